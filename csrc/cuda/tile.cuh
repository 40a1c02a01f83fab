// Tiles in shared memory. A thread block copies a tile in as FP32, works on it, and writes it out; both copies run along
// the unit stride of the other side, so that global accesses coalesce in every layout.
#pragma once

#include "../numerics/hadamard.h"
#include "../numerics/scales.h"
#include "launch.h"

namespace mh::cuda {

constexpr int kMinTileSide = 64;
constexpr int kMaxBlocks = kMinTileSide * kMinTileSide / 16;  // scale blocks in a tile

struct Tile {
  int64_t m0, k0;
  int rows, cols;
};

// Tile and block sides as powers of two. A block over the whole extent counts as one over the whole tile here.
struct Tiling {
  int64_t m, k;
  int64_t across, count;
  int64_t scale_cols;
  int row_log, col_log;
  int block_m_log, block_k_log;

  __host__ __device__ int rows() const { return 1 << row_log; }
  __host__ __device__ int cols() const { return 1 << col_log; }
  __host__ __device__ int pitch() const { return cols() + 1; }  // odd: columns spread over the memory banks
  __host__ __device__ int block_cols_log() const { return col_log - block_k_log; }
  __host__ __device__ int blocks() const { return 1 << (row_log - block_m_log + block_cols_log()); }

  __device__ Tile tile(int64_t index) const {
    const int64_t m0 = index / across << row_log, k0 = index % across << col_log;
    return Tile{m0, k0, static_cast<int>(min(m - m0, static_cast<int64_t>(rows()))),
                static_cast<int>(min(k - k0, static_cast<int64_t>(cols())))};
  }
  __device__ int block_of(int i, int j) const { return (i >> block_m_log << block_cols_log()) + (j >> block_k_log); }
};

inline int log2_of(int power) {
  int log = 0;
  while (1 << log < power) ++log;
  return log;
}

inline Tiling make_tiling(const FormatSpec& spec, int64_t m, int64_t k) {
  Tiling t{};
  t.m = m;
  t.k = k;
  t.row_log = log2_of(spec.block_m > kMinTileSide ? spec.block_m : kMinTileSide);
  t.col_log = log2_of(spec.block_k > kMinTileSide ? spec.block_k : kMinTileSide);
  t.block_m_log = spec.block_m ? log2_of(spec.block_m) : t.row_log;
  t.block_k_log = spec.block_k ? log2_of(spec.block_k) : t.col_log;
  t.across = (k + t.cols() - 1) >> t.col_log;
  t.count = t.across * ((m + t.rows() - 1) >> t.row_log);
  t.scale_cols = spec.block_k ? (k + spec.block_k - 1) / spec.block_k : 1;
  return t;
}

// Shared memory of a tile: values, then codes at the same pitch.
struct SharedTile {
  float* values;
  uint8_t* codes;
  int pitch;

  __device__ SharedTile(float* memory, const Tiling& g)
      : values(memory), codes(reinterpret_cast<uint8_t*>(memory + g.rows() * g.pitch())), pitch(g.pitch()) {}
  __device__ float& value(int i, int j) const { return values[i * pitch + j]; }
  __device__ uint8_t& code(int i, int j) const { return codes[i * pitch + j]; }
};

inline size_t shared_bytes(const Tiling& g) {
  return static_cast<size_t>(g.rows()) * g.pitch() * (sizeof(float) + sizeof(uint8_t));
}

// Calls body(i, j) for the elements of a tile, neighbouring threads along the columns, or down the rows.
template <class F>
__device__ void for_each(const Tiling& g, const Tile& t, bool down, F&& body) {
  const int n = 1 << (g.row_log + g.col_log);
  for (int e = threadIdx.x; e < n; e += kThreads) {
    const int i = down ? e & (g.rows() - 1) : e >> g.col_log;
    const int j = down ? e >> g.row_log : e & (g.cols() - 1);
    if (i < t.rows && j < t.cols) body(i, j);
  }
}

__device__ inline bool runs_down(const Matrix& x) { return x.row_stride == 1 && x.col_stride != 1; }

template <class T>
__device__ void load_values(const Matrix& x, const Tiling& g, const Tile& t, const SharedTile& s) {
  const auto* base = static_cast<const typename T::Raw*>(x.data) + t.m0 * x.row_stride + t.k0 * x.col_stride;
  for_each(g, t, runs_down(x), [&](int i, int j) { s.value(i, j) = T::load(base[i * x.row_stride + j * x.col_stride]); });
}

template <class T>
__device__ void store_values(const Matrix& x, const Tiling& g, const Tile& t, const SharedTile& s) {
  auto* base = static_cast<typename T::Raw*>(x.data) + t.m0 * x.row_stride + t.k0 * x.col_stride;
  for_each(g, t, runs_down(x), [&](int i, int j) { base[i * x.row_stride + j * x.col_stride] = T::store(s.value(i, j)); });
}

// Runs of up to 16 elements along an axis: calls body(i, j, step, n), the run starting at (i, j), its elements `step`
// apart in shared memory. Runs are aligned to 16, so each lies in one scale block.
template <class F>
__device__ void for_each_run(const Tiling& g, const Tile& t, const SharedTile& s, bool down, F&& body) {
  const int n = 1 << (g.row_log + g.col_log - 4);
  for (int r = threadIdx.x; r < n; r += kThreads) {
    const int i = down ? r >> g.col_log << 4 : r >> (g.col_log - 4);
    const int j = down ? r & (g.cols() - 1) : (r & ((g.cols() >> 4) - 1)) << 4;
    if (i >= t.rows || j >= t.cols) continue;
    body(i, j, down ? s.pitch : 1, min(16, down ? t.rows - i : t.cols - j));
  }
}

__device__ inline void hadamard_tile(const FormatSpec& spec, const Tiling& g, const Tile& t, const SharedTile& s,
                                     bool inverse) {
  for_each_run(g, t, s, spec.axis == 1, [&](int i, int j, int step, int n) {
    if (n < kHadamardSize) return;  // a last group under 16 stays as it is
    float v[kHadamardSize];
    float* first = &s.value(i, j);
    MH_UNROLL
    for (int e = 0; e < kHadamardSize; ++e) v[e] = first[e * step];
    hadamard16(v, inverse);
    MH_UNROLL
    for (int e = 0; e < kHadamardSize; ++e) first[e * step] = v[e];
  });
}

// Calls body(block, row, col) for the scale blocks of a tile, (row, col) being global block coordinates; a block over
// the whole extent has coordinate 0.
template <class F>
__device__ void for_each_block(const FormatSpec& spec, const Tiling& g, const Tile& t, F&& body) {
  for (int b = threadIdx.x; b < g.blocks(); b += kThreads) {
    const int bi = b >> g.block_cols_log(), bj = b & ((1 << g.block_cols_log()) - 1);
    if (bi << g.block_m_log >= t.rows || bj << g.block_k_log >= t.cols) continue;
    const int64_t row = spec.block_m ? (t.m0 >> g.block_m_log) + bi : 0;
    const int64_t col = spec.block_k ? (t.k0 >> g.block_k_log) + bj : 0;
    body(b, row, col);
  }
}

// Index of the outer amax of a block: formats with one a row (or column) have blocks one row (or column) wide.
__device__ inline int64_t outer_index(const FormatSpec& spec, int64_t row, int64_t col) {
  return !spec.outer_rows ? 0 : (spec.axis == 0 ? row : col);
}

// Kernels instantiated for each storage type, as a switch.
template <template <class> class Launch, class... Args>
void by_dtype(Dtype dtype, Args&&... args) {
  switch (dtype) {
    case Dtype::f32: return Launch<Float32>::run(args...);
    case Dtype::bf16: return Launch<BFloat16>::run(args...);
    case Dtype::f16: return Launch<Float16>::run(args...);
  }
}

// Launches a tile kernel, asking for more than 48 KiB of shared memory where the tile needs it.
template <class Kernel, class Args>
void launch_tiles(Kernel kernel, const Args& args, const Tiling& g, const Where& where, const char* function) {
  const size_t bytes = shared_bytes(g);
  if (bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), function);
  kernel<<<grid_for(g.count), kThreads, bytes, stream_of(where)>>>(args, g);
  check(cudaGetLastError(), function);
}

}  // namespace mh::cuda
