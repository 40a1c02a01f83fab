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

constexpr int kStripRows = 32;  // rows of a column strip, one warp's
constexpr int kStrips = kTile / kStripRows;
constexpr int kSquaresAcross = kTile / 16;  // at most

// Encode scale above the blocks (a preset one, NVFP4's outer one, or 1), and 1 / it.
struct OuterScale {
  float encode, inverse;
};

struct Exchange {
  OuterScale rows[kTile];      // of formats with one a row
  OuterScale fixed[2];         // of the others, of rows and columns
  float multipliers[2][128];   // of their NVFP4 blocks, by the E4M3 code of the scale
  int32_t squares[kSquaresAcross * kSquaresAcross];  // amaxes of square blocks
  int32_t strips[kStrips][kTile];                    // amaxes of column strips
  int32_t most[2];                                   // of all that this thread block cast, rows and columns
};

// What a line's elements are multiplied by, and the scale as it is stored: a byte, or FP32's bits.
struct LineScale {
  float mult;
  uint32_t stored;
};

// The scale above the blocks of a row or column.
template <Kind kind>
__device__ __forceinline__ OuterScale outer_scale(const Direction& d, int64_t line) {
  if (!kIsFp4<kind> && !is_preset(d.spec)) return {1.0f, 1.0f};
  const float amax = __ldcg(d.amax + (d.spec.outer_rows ? line : 0));  // this kernel may have written it
  const float encode = kIsFp4<kind> ? nvfp4_outer_encode(amax) : preset_encode_scale(d.spec, amax, d.fixed_scale);
  return {encode, 1.0f / encode};
}

// nvfp4_multiplier_from_inverse of a scale that the hardware decoded.
__device__ __forceinline__ float nvfp4_multiplier_of(float scale, float inverse) {
  const float multiplier = 1.0f / (scale * inverse);
  return multiplier > kFloatMax ? kFloatMax : multiplier;
}

// What is known before the tile is there; a barrier ends it. `store`: the rows' scales too, as the preset scales they are.
template <Kind kind>
__device__ __forceinline__ void load_outer(const Direction& d, const Tile& t, bool down, bool store, Exchange& ex) {
  const int i = threadIdx.x;
  if (d.spec.outer_rows) {
    if (down || i >= t.rows) return;
    ex.rows[i] = outer_scale<kind>(d, t.m0 + i);
    if (!kIsFp4<kind> && store && t.k0 == 0) static_cast<float*>(d.scale)[t.m0 + i] = ex.rows[i].inverse;
    return;
  }
  const int code = i - (down ? 128 : 0);
  if (code < 0 || code >= (kIsFp4<kind> ? 128 : 1)) return;
  const OuterScale outer = outer_scale<kind>(d, 0);
  if (code == 0) ex.fixed[down] = outer;
  if constexpr (kIsFp4<kind>) {
    float scale, zero;
    decode_pair<E4M3>(static_cast<uint32_t>(code), scale, zero);
    ex.multipliers[down][code] = nvfp4_multiplier_of(scale, outer.inverse);
  }
}

__device__ __forceinline__ LineScale e8m0_line_scale(const Direction& d, int32_t amax, int64_t at, bool store) {
  const BlockScale s = block_scale<ScaleRule::e8m0>(d.spec, bits_float(static_cast<uint32_t>(amax)), 1.0f);
  if (store) static_cast<uint8_t*>(d.scale)[at] = static_cast<uint8_t>(s.stored);
  return {s.multiplier, s.stored};
}

__device__ __forceinline__ LineScale fp32_line_scale(const Direction& d, int32_t amax, int64_t at, bool store) {
  const BlockScale s = block_scale<ScaleRule::fp32>(d.spec, amax_from_bits(amax), 1.0f);
  if (store) static_cast<float*>(d.scale)[at] = bits_float(s.stored);
  return {s.multiplier, s.stored};
}

// The scale of a line from its block's amax; stores it when `store` is set. `multipliers`: by code, for one outer scale.
template <Kind kind>
__device__ __forceinline__ LineScale line_scale(const Direction& d, int32_t amax, const OuterScale& outer, const float* multipliers,
                                                int64_t at, bool store) {
  if constexpr (kIsFp4<kind>) {  // nvfp4_scale, converted by the hardware
    const uint32_t code = encode_pair<E4M3>(bits_float(static_cast<uint32_t>(amax)) * (outer.encode * (1.0f / 6.0f)), 0.0f);
    float scale, zero;
    decode_pair<E4M3>(code, scale, zero);
    if (store) static_cast<uint8_t*>(d.scale)[at] = static_cast<uint8_t>(code);
    return {d.spec.outer_rows ? nvfp4_multiplier_of(scale, outer.inverse) : multipliers[code], code};
  }
  if (is_preset(d.spec)) return {outer.encode, float_bits(outer.inverse)};
  if (d.spec.scale_rule == ScaleRule::e8m0) return e8m0_line_scale(d, amax, at, store);
  return fp32_line_scale(d, amax, at, store);
}

__device__ __forceinline__ bool is_square(const FormatSpec& s) { return s.block_m > 1 && s.block_m == s.block_k; }

// Where the scale of the block at (i, j) of the tile is stored.
__device__ __forceinline__ int64_t scale_index(const Direction& d, const Tile& t, int i, int j) {
  return ((t.m0 + i) >> d.block_m_log) * d.scale_step_m + ((t.k0 + j) >> d.block_k_log) * d.scale_step_k;
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
    load_line<T>(tile, line_offset<T>(i, j), line);
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

template <Kind kind, class Above>
__device__ __forceinline__ Codes<kind> encode_line(const FormatSpec& spec, float (&x)[kLine], const LineScale& s,
                                                   const Signs& signs, Above&& above) {
  Codes<kind> codes;
  if constexpr (kIsFp4<kind>)
    encode_nibbles(x, s.mult, s.stored, signs, kind == Kind::fp4_mixed && spec.sr, above, codes.w);
  else if (spec.element == Element::e5m2)
    encode_bytes<E5M2>(x, s.mult, codes);
  else
    encode_bytes<E4M3>(x, s.mult, codes);
  return codes;
}

// The decode of a line, in its place in the tile.
template <class T, Kind kind>
__device__ __forceinline__ void write_decode(const Direction& d, const Codes<kind>& codes, uint32_t stored, float outer, bool turned,
                                             char* tile, int offset) {
  float x[kLine];
  if constexpr (kIsFp4<kind>) {
    float scale, zero;
    decode_pair<E4M3>(stored, scale, zero);
    decode_codes<E2M1>(codes.w, scale, x);
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) x[e] = x[e] * outer;
  } else {
    const float scale = d.spec.scale_rule == ScaleRule::e8m0 ? e8m0_decode(stored) : bits_float(stored);
    d.spec.element == Element::e5m2 ? decode_codes<E5M2>(codes.w, 1.0f, x) : decode_codes<E4M3>(codes.w, 1.0f, x);
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) x[e] = x[e] * scale;
  }
  if (turned) hadamard16(x, true);
  store_line<T>(tile, offset, x);
}

// Casts the tile along its rows; `write_back` leaves the decode in the tile. Returns the largest magnitude of this
// thread's elements where delayed scaling collects it.
template <class T, Kind kind>
__device__ int32_t cast_rows(const Direction& d, const Tile& t, bool write_back, char* tile, Exchange& ex) {
  constexpr int kPerByte = kIsFp4<kind> ? 2 : 1;
  if (is_square(d.spec)) collect_squares<T>(d, tile, ex);
  const bool blocks = kIsFp4<kind> || !is_preset(d.spec);  // a scale a block
  const int block_lines = kIsFp4<kind> || is_square(d.spec) ? 1 : d.spec.block_k / kLine;
  const OuterScale fixed = ex.fixed[0];
  const int j = threadIdx.x % kLinesAcross * kLine, first = threadIdx.x / kLinesAcross;
  const int bytes = (t.cols - j + kPerByte - 1) / kPerByte;
  int offset = held(line_offset<T>(first, j));
  const bool stores = blocks && j < t.cols && (j & (d.spec.block_k - 1)) == 0;  // the first line of a block
  const int stored_rows = stores ? t.rows : 0;
  int64_t scale_at = blocks ? scale_index(d, t, first, j) : 0;
  // a block is no taller than a step, or as tall as the tile
  const int64_t scale_step = held((kRowsAtOnce >> d.block_m_log) * d.scale_step_m), step = held(kRowsAtOnce * d.pitch);
  uint8_t* to = d.codes + (t.m0 + first) * d.pitch + (t.k0 + j) / kPerByte;
  int32_t most = 0;
#pragma unroll 1
  for (int i = first; i < kTile; i += kRowsAtOnce) {
    Pair<T> line[kLine / 2];
    load_line<T>(tile, offset, line);
    float x[kLine];
    MH_UNROLL
    for (int e = 0; e < kLine / 2; ++e) x[2 * e] = line[e].lo(), x[2 * e + 1] = line[e].hi();
    const bool turned = kind == Kind::fp4_mixed && d.spec.rht && j + kLine <= t.cols;
    if (turned) hadamard16(x, false);
    int32_t amax = 0;
    if (blocks || d.history) {
      PairAmax<T> raw;
      MH_UNROLL
      for (int e = 0; e < kLine / 2; ++e) raw.add(line[e]);
      amax = turned ? line_amax(x) : raw.both();
      if constexpr (!kIsFp4<kind>) most = max_bits(most, amax);
      amax = is_square(d.spec) ? square_of(d, ex, i, j) : max_of_lines(amax, block_lines);
    }
    const OuterScale outer = d.spec.outer_rows ? ex.rows[i] : fixed;
    const bool store = i < stored_rows && (i & (d.spec.block_m - 1)) == 0;
    const LineScale s = line_scale<kind>(d, amax, outer, ex.multipliers[0], scale_at, store);
    uint32_t draws[kLine / 2];
    if (kind == Kind::fp4_mixed && d.spec.sr) row_draws(d.noise, t.m0 + i, t.k0 + j, draws);
    Signs signs;
    if constexpr (kind == Kind::fp4) signs = Signs::along(line);
    if constexpr (kind == Kind::fp4_mixed) signs = Signs::of(x);
    const auto above = [&](int e) { return above_draw(draws[e / 2], e % 2); };
    const Codes<kind> codes = encode_line<kind>(d.spec, x, s, signs, above);
    if (i < t.rows && j < t.cols) put_bytes(to, codes.w, bytes, d.width);
    if (write_back && i < t.rows && j < t.cols) write_decode<T, kind>(d, codes, s.stored, outer.inverse, turned, tile, offset);
    scale_at += scale_step, to += step, offset += kRowsAtOnce * kTileBytes<T> / kTile;
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

// Casts the tile along its columns into the staging area. `collected`: the amaxes of square blocks are there.
template <class T, Kind kind>
__device__ int32_t cast_columns(const Direction& d, const Tile& t, bool collected, const char* tile, uint8_t* staging, Exchange& ex) {
  if (is_square(d.spec) && !collected) collect_squares<T>(d, tile, ex);
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
  OuterScale outer[2] = {ex.fixed[1], ex.fixed[1]};
  if (d.spec.outer_rows) {
    MH_UNROLL
    for (int c = 0; c < 2; ++c) outer[c] = outer_scale<kind>(d, t.lines + min(t.k0 + j + c, t.k0 + t.cols - 1));
  }
  const bool blocks = kIsFp4<kind> || !is_preset(d.spec);  // a scale a block
  int64_t scale_at = blocks ? scale_index(d, t, i0, j) : 0;
  const int next_scale = static_cast<int>((j + 1) >> d.block_k_log) - (j >> d.block_k_log);
  int stored_rows[2];  // a column of blocks is stored by the thread with its first column
  MH_UNROLL
  for (int c = 0; c < 2; ++c) stored_rows[c] = blocks && j + c < t.cols && ((j + c) & (d.spec.block_k - 1)) == 0 ? t.rows : 0;
  const auto scale_of = [&](int i, int c, int32_t amax) {
    const int64_t at = c ? scale_at + next_scale * d.scale_step_k : scale_at;
    return line_scale<kind>(d, amax, outer[c], ex.multipliers[1], at, i < stored_rows[c] && (i & (d.spec.block_m - 1)) == 0);
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
    Signs signs[2];
    if constexpr (kind == Kind::fp4) Signs::down(pairs, signs);
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
        if constexpr (kind == Kind::fp4_mixed) signs[c] = Signs::of(x);
        scales[c] = scale_of(i, c, amax);
      }
      const auto above = [&](int e) { return above_draw(draws[e], c); };
      codes[c] = encode_line<kind>(d.spec, x, scales[c], signs[c], above);
      if (d.transposed) stage_codes<kind>(staging, j + c, i / kLine, codes[c]);
    }
    if (!d.transposed) stage_pairs<kind>(staging, i, j, codes);
    scale_at += d.scale_step_m;  // FP4 blocks are a line tall
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

// A tile's place where its rows are, and their number and its group; false where there is no such block.
__device__ __forceinline__ bool find_block(const Groups& g, int64_t width, Tile& t, Tile& at_rows) {
  const int64_t block = t.m0 / kTile;
  if (block >= g.ends[g.groups - 1]) return false;
  t.rows = g.blocks[2 * g.count + block];
  t.lines = g.blocks[block] * width;
  at_rows = t;
  at_rows.m0 = g.blocks[g.count + block];
  return true;
}

template <class T>
__device__ __forceinline__ void fill_tile_of_groups(const CastArgs& a, const Tile& t, char* tile) {
  const int64_t stride = a.x.row_stride;
  if (!a.groups.choice) return start_tile<T>(a.x, a.vector, t, tile, [&](int i) { return (t.m0 + i) * stride; });
  const auto parts = static_cast<uint32_t>(a.groups.parts);
  const int32_t* choice = a.groups.choice + t.m0;
  start_tile<T>(a.x, a.vector, t, tile, [&](int i) { return static_cast<uint32_t>(max(choice[i], 0)) / parts * stride; });
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
    start_tile<T>(a.x, a.vector, t, tile, [&](int i) { return (t.m0 + i) * rows; });
}

// Thread blocks a multiprocessor runs at once: they hide each other's loads. Four leave 64 registers a thread; transforms
// and random bits need 80, and FP32 tiles fill the shared memory with two.
template <class T, Kind row, Kind col>
constexpr int kBlocksAtOnce = sizeof(typename T::Raw) == 4 ? 2 : (row == Kind::fp4_mixed || col == Kind::fp4_mixed ? 3 : 4);

template <class T, Kind row, Kind col, bool kGrouped = false>
__global__ void __launch_bounds__(kThreads, (kBlocksAtOnce<T, row, col>)) cast_tiles(const __grid_constant__ CastArgs a) {
  MH_DYNAMIC_SHARED(uint4, memory);
  __shared__ Exchange exchange;
  Exchange& ex = *held_shared(&exchange);
  char* tile = held_shared(reinterpret_cast<char*>(memory));
  uint8_t* staging = reinterpret_cast<uint8_t*>(tile) + kTileBytes<T>;
  if (a.noop && *a.noop) return;
  if constexpr (row == Kind::fp8)
    if (!a.panels.done) store_preset_scales(a.row, kGrouped ? a.groups.rows : a.tiling.m);
  if constexpr (col == Kind::fp8) store_preset_scales(a.col, kGrouped ? a.groups.groups * a.tiling.k : a.tiling.k);
  if (threadIdx.x < 2) ex.most[threadIdx.x] = 0;
  int32_t most[2] = {0, 0};
  if (a.items == 0) return;  // of an empty matrix, preset scales are all there is
  const Item item = item_of(a, blockIdx.x);
  if (item.look) look<T>(a, item);
  if (!item.cast) return;
  Tile t = a.tiling.tile(item.at), at_rows = t;
  if constexpr (kGrouped) {
    if (!find_block(a.groups, a.tiling.k, t, at_rows)) return;
    fill_tile_of_groups<T>(a, at_rows, tile);
  } else {
    fill_tile<T>(a, t, tile);
  }
  if (a.panels.done) {
    if (threadIdx.x == 0) wait_for(a.panels, item.panel);
    __syncthreads();
  }
  if constexpr (row != Kind::none) load_outer<row>(a.row, at_rows, false, a.panels.done, ex);
  if constexpr (col != Kind::none) load_outer<col>(a.col, t, true, false, ex);
  wait_copies();
  __syncthreads();
  if (a.sums) sum_columns<T>(a.sums, a.x.cols, t, tile, ex);
  if constexpr (row != Kind::none) most[0] = cast_rows<T, row>(a.row, at_rows, a.derived, tile, ex);
  if constexpr (col != Kind::none) {
    if (a.derived) __syncthreads();
    const bool collected = row != Kind::none && !a.derived && is_square(a.row.spec) && a.row.spec.block_m == a.col.spec.block_m;
    most[1] = cast_columns<T, col>(a.col, t, collected, tile, staging, ex);
    __syncthreads();
    if constexpr (kGrouped) t.rows = kTile;
    store_columns<col>(a.col, t, staging);
  }
  if constexpr (row == Kind::fp8) raise_history(a.row, &ex.most[0], most[0]);
  if constexpr (col == Kind::fp8) raise_history(a.col, &ex.most[1], most[1]);
}

template <class T, Kind row, Kind col, bool kGrouped = false>
void launch_kinds(const CastArgs& args, const Where& where) {
  const int bytes = kTileBytes<T> + (col == Kind::none ? 0 : kStagingBytes);
  const auto kernel = cast_tiles<T, row, col, kGrouped>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "quantize");
  launch(kernel, grid_for(args.items), bytes, where, "quantize", args);
}

template <class T>
void launch_groups(const CastArgs& args, Kind row, const Where& where) {
  if (row == Kind::none) return launch_kinds<T, Kind::none, Kind::fp8, true>(args, where);
  launch_kinds<T, Kind::fp8, Kind::fp8, true>(args, where);
}

// FP4 without options has kernels of its own for BF16 only; other tensors take those that have the options too.
template <class T>
constexpr bool kHasPlainFp4 = std::is_same_v<T, BFloat16>;

template <Kind kind>
using KindOf = std::integral_constant<Kind, kind>;

// Calls f with the `KindOf` that kernels of T are compiled for.
template <class T, class F>
void by_kind(Kind kind, F&& f) {
  switch (kind) {
    case Kind::none: return f(KindOf<Kind::none>{});
    case Kind::fp8: return f(KindOf<Kind::fp8>{});
    case Kind::fp4:
      if constexpr (kHasPlainFp4<T>) return f(KindOf<Kind::fp4>{});
      [[fallthrough]];
    case Kind::fp4_mixed: return f(KindOf<Kind::fp4_mixed>{});
  }
}

template <class T>
void launch_cast(const CastArgs& args, Kind row, Kind col, const Where& where) {
  by_kind<T>(row, [&](auto r) {
    by_kind<T>(col, [&](auto c) { launch_kinds<T, decltype(r)::value, decltype(c)::value>(args, where); });
  });
}

}  // namespace mh::cuda
