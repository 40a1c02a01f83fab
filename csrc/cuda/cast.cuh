// The cast kernel: a thread block brings a tile into shared memory once and casts it along rows, along columns, or both, and sums its columns where it is asked to. The tile
// is the tensor's, or computed from others (computed.cuh).
//
// Rows: a thread takes a line of 16, eight threads a row, and writes its codes straight to global memory. Columns: a
// thread takes lines of two neighbouring columns, 32 rows in two steps, and the codes go through shared memory so that
// they leave in whole rows of the stored matrix. Block amaxes wider than a line are exchanged by shuffles (rows), by a
// second look at the tile (32 rows), or through shared memory (128 rows, square tiles).
#pragma once

#include "computed.cuh"
#include "panels.cuh"

namespace mh::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kStripRows = 32;  // rows of a column strip, one warp's
constexpr int kStrips = kTile / kStripRows;
constexpr int kSquaresAcross = kTile / 16;  // at most

struct Exchange {
  float outer[kTile], inverse[kTile];                // encode scales of the rows and 1 / them, for formats with one a row
  int32_t squares[kSquaresAcross * kSquaresAcross];  // amaxes of square blocks
  int32_t strips[kStrips][kTile];                    // amaxes of column strips
  int32_t most[2];                                   // of all that this thread block cast, rows and columns
};

// What a line's elements are multiplied by, and its decode factors.
struct LineScale {
  float mult;
  float decode, outer;
  uint32_t keep;  // FP4: 0 where the block holds a NaN
};

// The scale above the blocks: a preset encode scale, NVFP4's outer one, or 1. `line`: the row or column.
template <Kind kind>
__device__ __forceinline__ float outer_encode(const Direction& d, int64_t line) {
  if (!kIsFp4<kind> && !is_preset(d.spec)) return 1.0f;
  const float amax = __ldcg(d.amax + (d.spec.outer_rows ? line : 0));  // this kernel may have written it
  return kIsFp4<kind> ? nvfp4_outer_encode(amax) : preset_encode_scale(d.spec, amax, d.fixed_scale);
}

// Those of the tile's rows, once a tile; `store`: also as the preset scales they are.
template <Kind kind>
__device__ __forceinline__ void load_outer(const Direction& d, const Tile& t, bool store, Exchange& ex) {
  const int i = threadIdx.x;
  if (!d.spec.outer_rows || i >= t.rows) return;
  ex.outer[i] = outer_encode<kind>(d, t.m0 + i);
  ex.inverse[i] = 1.0f / ex.outer[i];
  if (!kIsFp4<kind> && store && t.k0 == 0) static_cast<float*>(d.scale)[t.m0 + i] = ex.inverse[i];
}

// The scale of a line from its block's amax; stores it when `store` is set. `inverse`: 1 / outer.
template <Kind kind>
__device__ __forceinline__ LineScale line_scale(const Direction& d, int32_t amax, float outer, float inverse, int64_t at, bool store) {
  if constexpr (kIsFp4<kind>) {  // nvfp4_scale and nvfp4_multiplier, converted by the hardware
    const uint32_t code = encode_pair<E4M3>(bits_float(static_cast<uint32_t>(amax)) * (outer * (1.0f / 6.0f)), 0.0f);
    float scale, zero;
    decode_pair<E4M3>(code, scale, zero);
    const float multiplier = 1.0f / (scale * inverse);
    if (store) static_cast<uint8_t*>(d.scale)[at] = static_cast<uint8_t>(code);
    return {multiplier > kFloatMax ? kFloatMax : multiplier, scale, inverse, code == E4M3::kNan ? 0u : ~0u};
  }
  if (is_preset(d.spec)) return {outer, inverse, 1.0f, 0};
  if (d.spec.scale_rule == ScaleRule::e8m0) {
    const BlockScale s = block_scale<ScaleRule::e8m0>(d.spec, amax_from_bits(amax), 1.0f);
    if (store) static_cast<uint8_t*>(d.scale)[at] = static_cast<uint8_t>(s.stored);
    return {s.multiplier, e8m0_decode(s.stored), 1.0f, 0};
  }
  const BlockScale s = block_scale<ScaleRule::fp32>(d.spec, amax_from_bits(amax), 1.0f);
  if (store) static_cast<float*>(d.scale)[at] = bits_float(s.stored);
  return {s.multiplier, bits_float(s.stored), 1.0f, 0};
}

__device__ __forceinline__ bool is_square(const FormatSpec& s) { return s.block_m > 1 && s.block_m == s.block_k; }

// Where the scale of the block at (i, j) of the tile is stored.
__device__ __forceinline__ int64_t scale_index(const Direction& d, const Tile& t, int i, int j) {
  return ((t.m0 + i) >> d.block_m_log) * d.scale_step_m + ((t.k0 + j) >> d.block_k_log) * d.scale_step_k;
}

// Whether the thread with the line at (i, j) stores its block's scale: the first one of the block, inside the tensor.
__device__ __forceinline__ bool is_first(const Direction& d, const Tile& t, int i, int j) {
  return (i & (d.spec.block_m - 1)) == 0 && (j & (d.spec.block_k - 1)) == 0 && i < t.rows && j < t.cols;
}

__device__ __forceinline__ int32_t& square_of(const Direction& d, Exchange& ex, int i, int j) {
  return ex.squares[(i >> d.block_m_log) * kSquaresAcross + (j >> d.block_k_log)];
}

// Amaxes of the square blocks of the tile.
template <class T>
__device__ void collect_squares(const Direction& d, const char* tile, Exchange& ex) {
  __syncthreads();  // the other direction may still read its own
  for (int b = threadIdx.x; b < kSquaresAcross * kSquaresAcross; b += kThreads) ex.squares[b] = 0;
  __syncthreads();
  const int j = threadIdx.x % kLinesAcross * kLine;
  for (int i = threadIdx.x / kLinesAcross; i < kTile; i += kRowsAtOnce) {
    Pair<T> line[kLine / 2];
    load_line<T>(tile, i, j, line);
    PairAmax<T> amax;
    MH_UNROLL
    for (int e = 0; e < kLine / 2; ++e) amax.add(line[e]);
    atomicMax(&square_of(d, ex, i, j), amax.both());
  }
  __syncthreads();
}

// Largest value among the `lines` neighbouring threads whose lines make up a block.
__device__ __forceinline__ int32_t max_of_lines(int32_t amax, int lines) {
  if (lines >= 2) amax = max_bits(amax, __shfl_xor_sync(kAllLanes, amax, 1));
  if (lines >= 8) {
    amax = max_bits(amax, __shfl_xor_sync(kAllLanes, amax, 2));
    amax = max_bits(amax, __shfl_xor_sync(kAllLanes, amax, 4));
  }
  return amax;
}

template <Kind kind, class Draw>
__device__ __forceinline__ Codes<kind> encode_line(const FormatSpec& spec, const float (&x)[kLine], const LineScale& s,
                                                   Draw&& draw) {
  Codes<kind> codes;
  if constexpr (kIsFp4<kind>)
    encode_nibbles(x, s.mult, s.keep, kind == Kind::fp4_mixed && spec.sr, draw, codes.w);
  else if (spec.element == Element::e5m2)
    encode_bytes<E5M2>(x, s.mult, codes);
  else
    encode_bytes<E4M3>(x, s.mult, codes);
  return codes;
}

// Casts the tile along its rows; `write_back` leaves the decode in the tile. Returns the largest magnitude of this
// thread's elements where delayed scaling collects it.
template <class T, Kind kind>
__device__ int32_t cast_rows(const Direction& d, const Tile& t, bool write_back, char* tile, Exchange& ex) {
  if (is_square(d.spec)) collect_squares<T>(d, tile, ex);
  const bool needs_amax = !is_preset(d.spec) || d.history;
  const int block_lines = is_square(d.spec) ? 1 : d.spec.block_k / kLine;
  const float fixed_outer = d.spec.outer_rows ? 1.0f : outer_encode<kind>(d, 0), fixed_inverse = 1.0f / fixed_outer;
  const int j = threadIdx.x % kLinesAcross * kLine;
  int32_t most = 0;
  for (int i = threadIdx.x / kLinesAcross; i < kTile; i += kRowsAtOnce) {
    Pair<T> line[kLine / 2];
    load_line<T>(tile, i, j, line);
    float x[kLine];
    MH_UNROLL
    for (int e = 0; e < kLine / 2; ++e) x[2 * e] = line[e].lo(), x[2 * e + 1] = line[e].hi();
    const bool turned = kind == Kind::fp4_mixed && d.spec.rht && j + kLine <= t.cols;
    if (turned) hadamard16(x, false);
    int32_t amax = 0;
    if (needs_amax) {
      PairAmax<T> raw;
      MH_UNROLL
      for (int e = 0; e < kLine / 2; ++e) raw.add(line[e]);
      amax = turned ? line_amax(x) : raw.both();
      most = max_bits(most, amax);
      amax = is_square(d.spec) ? square_of(d, ex, i, j) : max_of_lines(amax, block_lines);
    }
    const float outer = d.spec.outer_rows ? ex.outer[i] : fixed_outer, inverse = d.spec.outer_rows ? ex.inverse[i] : fixed_inverse;
    const bool blocks = !is_preset(d.spec);
    const LineScale s = line_scale<kind>(d, amax, outer, inverse, blocks ? scale_index(d, t, i, j) : 0, blocks && is_first(d, t, i, j));
    uint32_t draws[kLine / 2];
    if (kind == Kind::fp4_mixed && d.spec.sr) row_draws(d.noise, t.m0 + i, t.k0 + j, draws);
    const auto draw = [&](int e) { return draws[e / 2] >> (e % 2 * 16) & 0xffffu; };
    const Codes<kind> codes = encode_line<kind>(d.spec, x, s, draw);
    if (i >= t.rows || j >= t.cols) continue;
    constexpr int kPerByte = kIsFp4<kind> ? 2 : 1;
    uint8_t* to = d.codes + (t.m0 + i) * d.pitch + (t.k0 + j) / kPerByte;
    put_bytes(to, codes.w, (t.cols - j + kPerByte - 1) / kPerByte, d.width);
    if (!write_back) continue;
    if constexpr (kIsFp4<kind>)
      decode_codes<E2M1>(codes.w, s.decode, x);
    else
      d.spec.element == Element::e5m2 ? decode_codes<E5M2>(codes.w, s.decode, x) : decode_codes<E4M3>(codes.w, s.decode, x);
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) x[e] = kIsFp4<kind> ? x[e] * s.outer : x[e] * s.decode;
    if (turned) hadamard16(x, true);
    store_line<T>(tile, i, j, x);
  }
  return most;
}

// Amaxes of this thread's two columns over its strip of rows.
template <class T>
__device__ __forceinline__ PairAmax<T> strip_amax(const char* tile, int i, int j) {
  PairAmax<T> amax;
  MH_UNROLL
  for (int r = 0; r < kStripRows; ++r) amax.add(load_pair<T>(tile, i + r, j));
  return amax;
}

// Casts the tile along its columns into the staging area.
template <class T, Kind kind>
__device__ int32_t cast_columns(const Direction& d, const Tile& t, const char* tile, uint8_t* staging, Exchange& ex) {
  if (is_square(d.spec)) collect_squares<T>(d, tile, ex);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int j = warp % 2 * (kTile / 2) + 2 * lane, i0 = warp / 2 * kStripRows;
  int32_t block[2] = {0, 0};
  int32_t most = 0;
  if (!kIsFp4<kind> && !is_square(d.spec) && (d.spec.block_m > 1 || d.history)) {
    const PairAmax<T> strip = strip_amax<T>(tile, i0, j);
    block[0] = strip.lo(), block[1] = strip.hi();
    most = strip.both();
  }
  if (!kIsFp4<kind> && d.spec.block_m == kTile && d.spec.block_k == 1) {
    ex.strips[warp / 2][j] = block[0], ex.strips[warp / 2][j + 1] = block[1];
    __syncthreads();
    MH_UNROLL
    for (int strip = 0; strip < kStrips; ++strip)
      block[0] = max_bits(block[0], ex.strips[strip][j]), block[1] = max_bits(block[1], ex.strips[strip][j + 1]);
  }
  float outer[2], inverse[2];
  MH_UNROLL
  for (int c = 0; c < 2; ++c) outer[c] = outer_encode<kind>(d, min(t.k0 + j + c, t.k0 + t.cols - 1)), inverse[c] = 1.0f / outer[c];
  const auto scale_of = [&](int i, int c, int32_t amax) {
    const bool blocks = !is_preset(d.spec);
    return line_scale<kind>(d, amax, outer[c], inverse[c], blocks ? scale_index(d, t, i, j + c) : 0, blocks && is_first(d, t, i, j + c));
  };
  LineScale scales[2];
  if constexpr (!kIsFp4<kind>) {  // blocks are at least as tall as a strip
    MH_UNROLL
    for (int c = 0; c < 2; ++c) scales[c] = scale_of(i0, c, is_square(d.spec) ? square_of(d, ex, i0, j + c) : block[c]);
  }
#pragma unroll 1
  for (int i = i0; i < i0 + kStripRows; i += kLine) {
    Pair<T> pairs[kLine];
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) pairs[e] = load_pair<T>(tile, i + e, j);
    uint32_t draws[kLine];
    if (kind == Kind::fp4_mixed && d.spec.sr) column_draws(d.noise, t.m0 + i, t.k0 + j, lane, draws);
    if (kIsFp4<kind> && !is_square(d.spec)) {
      PairAmax<T> amax;
      MH_UNROLL
      for (int e = 0; e < kLine; ++e) amax.add(pairs[e]);
      block[0] = amax.lo(), block[1] = amax.hi();
    }
    Codes<kind> codes[2];
    MH_UNROLL
    for (int c = 0; c < 2; ++c) {
      float x[kLine];
      MH_UNROLL
      for (int e = 0; e < kLine; ++e) x[e] = c ? pairs[e].hi() : pairs[e].lo();
      if constexpr (kIsFp4<kind>) {
        int32_t amax = is_square(d.spec) ? square_of(d, ex, i, j + c) : block[c];
        if (kind == Kind::fp4_mixed && d.spec.rht && i + kLine <= t.rows) {
          hadamard16(x, false);
          amax = line_amax(x);
        }
        scales[c] = scale_of(i, c, amax);
      }
      const auto draw = [&](int e) { return c ? draws[e] >> 16 : draws[e] & 0xffffu; };
      codes[c] = encode_line<kind>(d.spec, x, scales[c], draw);
      if (d.transposed) stage_codes<kind>(staging, j + c, i / kLine, codes[c]);
    }
    if (!d.transposed) stage_pairs<kind>(staging, i, j, codes);
  }
  return most;
}

template <Kind kind>
__device__ void store_columns(const Direction& d, const Tile& t, const uint8_t* staging) {
  constexpr int kPerByte = kIsFp4<kind> ? 2 : 1;
  const int64_t row = d.transposed ? t.k0 : t.m0, first = d.transposed ? t.m0 : t.k0;
  const int rows = d.transposed ? t.cols : t.rows, cols = d.transposed ? t.rows : t.cols;
  copy_out<kind>(staging, d.codes + row * d.pitch + first / kPerByte, d.pitch, rows, (cols + kPerByte - 1) / kPerByte, d.width);
}

// Sums of the tile's columns, in an order that depends on the tile alone: 32 rows from the top, then the four of these.
template <class T>
__device__ void sum_columns(float* sums, int64_t width, const Tile& t, const char* tile, Exchange& ex) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int j = warp % 2 * (kTile / 2) + 2 * lane, i0 = warp / 2 * kStripRows;
  float lo = 0.0f, hi = 0.0f;
#pragma unroll 8
  for (int r = 0; r < kStripRows; ++r) {
    const Pair<T> p = load_pair<T>(tile, i0 + r, j);
    lo += p.lo(), hi += p.hi();
  }
  ex.strips[warp / 2][j] = static_cast<int32_t>(float_bits(lo)), ex.strips[warp / 2][j + 1] = static_cast<int32_t>(float_bits(hi));
  __syncthreads();
  const int c = threadIdx.x;
  if (c < t.cols) {
    float all = 0.0f;
    MH_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) all += bits_float(static_cast<uint32_t>(ex.strips[strip][c]));
    sums[t.m0 / kTile * width + t.k0 + c] = all;
  }
  __syncthreads();  // the casts use the strips for their amaxes
}

// Encode scales known before the cast are stored by whichever thread comes by, also where the payload is empty.
__device__ inline void store_preset_scales(const Direction& d, int64_t lines) {
  if (!is_preset(d.spec)) return;
  const int64_t n = d.spec.outer_rows ? lines : 1;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < n; i += gridDim.x * static_cast<int64_t>(kThreads))
    static_cast<float*>(d.scale)[i] = 1.0f / preset_encode_scale(d.spec, d.amax[i], d.fixed_scale);
}

__device__ inline void raise_history(const Direction& d, int32_t* block_most, int32_t most) {
  if (!d.history) return;
  most = __reduce_max_sync(kAllLanes, most);
  if (threadIdx.x % kWarp == 0) atomicMax(block_most, most);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<int32_t*>(d.history), *block_most > kInfBits ? kNanBits : *block_most);
}

// Brings a tile into shared memory, as it is or computed; wait_copies and a barrier end it.
template <class T>
__device__ __forceinline__ void fill_tile(const CastArgs& a, const Tile& t, char* tile) {
  using Raw = const typename T::Raw;
  auto* const x = static_cast<Raw*>(a.x.data);
  const int64_t rows = a.x.row_stride, cols = a.x.col_stride;
  if (a.grad)
    compute_tile<T>(SwigluGradient<T>{x, static_cast<Raw*>(a.grad), rows, cols, a.grad_stride, a.x.cols / 2}, a.vector, t, tile);
  else if (a.gate)
    compute_tile<T>(Swiglu<T>{static_cast<Raw*>(a.gate), x, rows, cols}, a.vector, t, tile);
  else
    start_tile<T>(a.x, a.vector, t, tile);
}

// Thread blocks a multiprocessor runs at once: they hide each other's loads. Four leave 64 registers a thread; transforms
// and random bits need 80, and FP32 tiles fill the shared memory with two.
template <class T, Kind row, Kind col>
constexpr int kBlocksAtOnce = sizeof(typename T::Raw) == 4 ? 2 : (row == Kind::fp4_mixed || col == Kind::fp4_mixed ? 3 : 4);

template <class T, Kind row, Kind col>
__global__ void __launch_bounds__(kThreads, (kBlocksAtOnce<T, row, col>)) cast_tiles(const __grid_constant__ CastArgs a) {
  MH_DYNAMIC_SHARED(uint4, memory);
  __shared__ Exchange ex;
  char* tile = reinterpret_cast<char*>(memory);
  uint8_t* staging = reinterpret_cast<uint8_t*>(memory) + kTileBytes<T>;
  if (a.noop && *a.noop) return;
  if constexpr (row == Kind::fp8)
    if (!a.panels.done) store_preset_scales(a.row, a.tiling.m);
  if constexpr (col == Kind::fp8) store_preset_scales(a.col, a.tiling.k);
  if (threadIdx.x < 2) ex.most[threadIdx.x] = 0;
  int32_t most[2] = {0, 0};
  if (a.items == 0) return;  // of an empty matrix, preset scales are all there is
  const Item item = item_of(a, blockIdx.x);
  if (item.look) look<T>(a, item);
  if (!item.cast) return;
  const Tile t = a.tiling.tile(item.at);
  fill_tile<T>(a, t, tile);
  if (a.panels.done) {
    if (threadIdx.x == 0) wait_for(a.panels, item.panel);
    __syncthreads();
  }
  if constexpr (row != Kind::none) load_outer<row>(a.row, t, a.panels.done, ex);
  wait_copies();
  __syncthreads();
  if (a.sums) sum_columns<T>(a.sums, a.x.cols, t, tile, ex);
  if constexpr (row != Kind::none) most[0] = cast_rows<T, row>(a.row, t, a.derived, tile, ex);
  if constexpr (col != Kind::none) {
    if (a.derived) __syncthreads();
    most[1] = cast_columns<T, col>(a.col, t, tile, staging, ex);
    __syncthreads();
    store_columns<col>(a.col, t, staging);
  }
  if constexpr (row == Kind::fp8) raise_history(a.row, &ex.most[0], most[0]);
  if constexpr (col == Kind::fp8) raise_history(a.col, &ex.most[1], most[1]);
}

template <class T, Kind row, Kind col>
void launch_kinds(const CastArgs& args, const Where& where) {
  const int bytes = kTileBytes<T> + (col == Kind::none ? 0 : kStagingBytes);
  const auto kernel = cast_tiles<T, row, col>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "quantize");
  launch(kernel, grid_for(args.items), bytes, where, "quantize", args);
}

// FP4 without options has kernels of its own for BF16 only; other tensors take those that have the options too.
template <class T>
constexpr bool kHasPlainFp4 = std::is_same_v<T, BFloat16>;

template <class T, Kind row>
void launch_row(const CastArgs& args, Kind col, const Where& where) {
  switch (col) {
    case Kind::none: return launch_kinds<T, row, Kind::none>(args, where);
    case Kind::fp8: return launch_kinds<T, row, Kind::fp8>(args, where);
    case Kind::fp4:
      if constexpr (kHasPlainFp4<T>) return launch_kinds<T, row, Kind::fp4>(args, where);
      [[fallthrough]];
    case Kind::fp4_mixed: return launch_kinds<T, row, Kind::fp4_mixed>(args, where);
  }
}

template <class T>
void launch_cast(const CastArgs& args, Kind row, Kind col, const Where& where) {
  switch (row) {
    case Kind::none: return launch_row<T, Kind::none>(args, col, where);
    case Kind::fp8: return launch_row<T, Kind::fp8>(args, col, where);
    case Kind::fp4:
      if constexpr (kHasPlainFp4<T>) return launch_row<T, Kind::fp4>(args, col, where);
      [[fallthrough]];
    case Kind::fp4_mixed: return launch_row<T, Kind::fp4_mixed>(args, col, where);
  }
}

}  // namespace mh::cuda
