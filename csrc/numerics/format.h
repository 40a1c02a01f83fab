// The vocabulary of every cast: plain data, no code, shared by the bindings, the CPU loops and the CUDA kernels.
#pragma once

#include <cstdint>

namespace mh {

enum class Element : int { e4m3 = 0, e5m2 = 1, e2m1 = 2 };
enum class ScaleRule : int { none = 0, fp32 = 1, e8m0 = 2, e4m3_amax = 3 };
enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

// One direction of a format. `axis` is where the contraction runs: 0 along K (rowwise), 1 along M (columnwise).
// `block_m` x `block_k` is the scale block in the (M, K) tensor, 0 meaning the whole extent.
struct FormatSpec {
  Element element;
  ScaleRule scale_rule;
  int axis;
  int block_m;
  int block_k;
  bool pow2;        // FP32 scales floored to a power of two
  float eps;        // lower bound of the amax (FP32 rule)
  bool outer_rows;  // the outer amax is one a row (rowwise) or a column (columnwise), not one a tensor
  bool rht;         // Hadamard of size 16 along the contraction axis
  bool sr;          // stochastic rounding
};

// A strided (M, K) matrix of `dtype`; strides in elements.
struct Matrix {
  void* data;
  Dtype dtype;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;
};

// Quantized payload and scales of one direction. `codes` is row-major (M, K), or (K, M) when `transposed`; FP4 packs
// two codes a byte along the last stored dimension. `scale` is row-major over blocks. `amax` holds outer amaxes, or
// for `fixed_scale` the encode scale itself.
struct Payload {
  uint8_t* codes;
  bool transposed;
  void* scale;
  const float* amax;
};

// Layout of the random state that stochastic rounding reads, int64 each.
enum RngField : int { kSeed = 0, kTensorId, kCounter, kRowOffset, kColOffset, kGlobalCols, kRngFields };

constexpr int kPanelRows = 128;

struct QuantizeArgs {
  FormatSpec spec;
  Matrix x;
  Payload out;
  bool fixed_scale;
  const int64_t* rng;
  const int64_t* row_ids;  // global row of each row, instead of the row offset
  const int32_t* noop;     // non-zero: leave every output untouched
  float* measured;         // set: the call takes the amax of `x` too. Written here, whence `out.amax` may read it; with
                           // `fixed_scale` the value here is only raised to it (the history of delayed scaling)
  int32_t* scratch;        // one a kPanelRows rows, or null: lets a CUDA cast take row amaxes without a pass of their own
};

// Rows of a tensor in groups, each in blocks of kPanelRows rows that begin where the group does, the last one cut: the map
// of the blocks, made on the device (`GroupMapArgs`). ends (groups,): the block after each group's last; blocks
// (3, count): of each block its group, its first row among all groups' and how many it has. `choice`: null, or row r of all
// groups' is a copy of row choice[r] / parts of the tensor. `rows`: of all groups.
struct Groups {
  const int32_t *ends, *blocks;
  int64_t groups, count, rows;
  const int32_t* choice;
  int64_t parts;
};

// Weights of the rows of all groups: row r's is that at places[r], or at r, and 0 where that is -1; data null: none.
// `dots`: null, or FP32 (rows, tiles of 128 columns): of the gradient of SwiGLU, what adds up to the weights' own.
struct RowWeights {
  const void* data;
  Dtype dtype;
  const int32_t* places;
  float* dots;
};

// Both directions of one tensor, or one of them. `derived`: the column is cast from the row's decode, rounded to the
// dtype of `x`. `sums`: CUDA only, null or one FP32 row of sums over M a kPanelRows rows of `x`, taken in the same read;
// then neither direction need be there, and `row.x` is the tensor. `gate`: CUDA only, null or a matrix of the shape, dtype
// and strides of `x`; what is cast and summed is then silu(gate) * x, rounded to that dtype. `grad`: CUDA only, null or a
// matrix of that dtype with the rows of `x`, `grad_stride` elements apart, and half its columns, contiguous; what is cast and
// summed is then the gradient of gate and up, side by side in `x`, for `grad` being that of silu(gate) * up.
//
// `groups.ends` set: CUDA only, FP8 with FP32 scales of whole rows, of whole columns and of 128 elements. A column payload is
// (K, count * kPanelRows), whole blocks, with code 0 where a block has no row, and scales (count, K), or (groups, K) from such
// amaxes. A row payload is of all groups' rows, as without groups. What `gate` or `grad` computes is times `weights`, of
// 16 bits and read 16 bytes at a time; a gradient's halves are whole tiles of 128 columns.
//
// `any_strips`: CUDA only, the cast goes by strips wherever it can, also where another is chosen: for tests and
// measurements.
struct PairArgs {
  QuantizeArgs row, col;
  bool has_row, has_col;
  bool derived;
  float* sums;
  const void* gate;
  const void* grad;
  int64_t grad_stride;
  Groups groups;
  RowWeights weights;
  bool any_strips;
};

struct DequantizeArgs {
  FormatSpec spec;
  Payload in;
  Matrix out;
  bool outer;        // apply NVFP4's 1/enc
  bool inverse_rht;  // leave the transformed domain
};

// Both operands of a product, or one of them. `factor`: null, or where the product of NVFP4's 1/enc of both goes, from
// the first amax of each (`in.amax`); an operand without amaxes leaves it as the other's.
struct OperandsArgs {
  DequantizeArgs operands[2];
  bool has[2];
  float* factor;
};

// CUDA only. Bits of the amaxes of every group's columns, (groups, cols), and of all groups' rows or null; raised, from 0.
// `cast`: what will be cast, of which `col.x`, what computes the rows from it and `groups` are read.
struct GroupAmaxArgs {
  PairArgs cast;
  int32_t *of_columns, *of_rows;
};

// CUDA only. sizes (groups,): rows of each group, int64 where `wide`, else int32; `ends` and `blocks` of `Groups` to be written,
// zeros for blocks after the last group's.
struct GroupMapArgs {
  const void* sizes;
  bool wide;
  int64_t groups, count;
  int32_t *ends, *blocks;
};

struct AmaxArgs {
  FormatSpec spec;
  Matrix x;
  float* out;
};

}  // namespace mh
