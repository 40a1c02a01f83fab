// NVFP4 by strips (strip.cuh). A block of a column is what a lane holds of it: its amax and its codes need no other
// lane. Rows go through a warp's own shared memory, from which a lane takes whole blocks of them.
#pragma once

#include "fp4_codes.cuh"
#include "panels.cuh"
#include "strip_casts.cuh"

namespace mh::cuda {

constexpr int kBlocksAcross = kTile / kLine;        // of a row of the tile
constexpr int kRowsAcross = kWarp / kBlocksAcross;  // whose blocks a warp takes at once
constexpr int kScaleCodes = 128;

// What is known of a direction before the cast.
struct Fp4Outer {
  OuterScale fixed;  // of the tensor
  bool tie_free;     // without options: whether its multipliers are (is_tie_free), but for those of rare scales
  union {
    float multipliers[kScaleCodes];  // of its blocks, by the E4M3 code of the scale
    OuterScale of_line[kTile];       // of rows or columns, where each has one
  };
};

struct Fp4Staging {
  uint4 codes[kTile * kLinesAcross / 2];
};

// `kWith8`: the other direction is FP8.
template <class T, bool kWith8>
struct Fp4Shared {
  std::conditional_t<kWith8, StripShared<T>, Fp4Staging> strip;
  Fp4Outer row, col;
  int32_t squares[kWarps][kBlocksAcross];  // amaxes of square blocks

  __device__ char* staged() { return reinterpret_cast<char*>(strip.codes); }
};

// A warp's rows, swizzled by 16 bytes: neither the lanes that write nor those that read meet in a bank.
struct WarpRows {
  static constexpr int kChunks = kTile * 2 / kVector;  // of a row
  uint4 of[kWarpRows * kChunks];

  static __device__ __forceinline__ int at(int chunk) { return chunk ^ (chunk >> 3); }

  template <class T>
  __device__ __forceinline__ void put(const Strip<T>& v) {
    const int lane = threadIdx.x % kWarp;
    Four<T>* to = reinterpret_cast<Four<T>*>(of + at(lane / 2)) + lane % 2;
    MH_UNROLL
    for (int r = 0; r < kWarpRows; ++r) to[r * kChunks * 2] = v[r];
  }
};

// Bits for a warp's columns: the draws of eight neighbours in a row are 16 bytes, inverted.
struct WarpDraws {
  static constexpr int kRow = kTile / 2;  // words
  uint4 of[kWarpRows][kTile / kDrawsPerCall];

  __device__ __forceinline__ uint32_t* of_lane(int lane) {
    return reinterpret_cast<uint32_t*>(of) + lane * (kLaneCols / 2);
  }
};

static_assert(sizeof(WarpDraws) == sizeof(WarpRows));

// Reads a warp's strip of a whole tensor, zeros where the tensor ends.
template <class T>
__device__ __forceinline__ void load_strip(const Matrix& x, const Tile& t, Strip<T>& v) {
  const int i0 = threadIdx.x / kWarp * kWarpRows, j = threadIdx.x % kWarp * kLaneCols;
  const uint64_t stride = static_cast<uint32_t>(x.row_stride) * 2u;  // bytes, 32 bits of them
  const char* first = static_cast<const char*>(x.data) + static_cast<uint64_t>(t.m0 + i0) * stride + (t.k0 + j) * 2;
  const auto read = [&](int r) {
    const uint2 some = *reinterpret_cast<const uint2*>(first + stride * static_cast<uint32_t>(r));
    memcpy(&v[r], &some, sizeof some);
  };
  if (t.rows == kTile && t.cols == kTile) {
    MH_UNROLL
    for (int r = 0; r < kWarpRows; ++r) read(r);
  } else {
    const int rows = j < t.cols ? t.rows - i0 : 0;
    MH_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      v[r] = {};
      if (r < rows) read(r);
    }
  }
}

// What is known before the cast, by one warp; a barrier ends it. `first`, `lines`: of those that have a scale each.
template <class T, Kind kind>
__device__ __forceinline__ void load_fp4_outer(const Direction& d, int64_t first, int lines, int lane, Fp4Outer& to) {
  if (d.spec.outer_rows) {
    if (lane == 0) to.tie_free = false;
#pragma unroll 1
    for (int n = lane; n < kTile; n += kWarp) to.of_line[n] = outer_scale<Kind::fp4>(d, first + min(n, lines - 1));
    return;
  }
  const OuterScale outer = outer_scale<Kind::fp4>(d, 0);
  int32_t ties = 0;
#pragma unroll 1
  for (int code = lane; code < kScaleCodes; code += kWarp) {
    float scale, zero;
    decode_pair<E4M3>(static_cast<uint32_t>(code), scale, zero);
    const float mult = nvfp4_multiplier_of(scale, outer.inverse);
    to.multipliers[code] = mult;
    ties |= !is_rare_scale(static_cast<uint32_t>(code)) && !is_tie_free<T>(mult);
  }
  if constexpr (kind == Kind::fp4) ties = __reduce_max_sync(kAllLanes, ties);
  if (lane == 0) to.fixed = outer, to.tie_free = !ties;
}

// Amaxes of the squares that a warp's strip is.
template <class T>
__device__ __forceinline__ void find_squares(const Strip<T>& v, int32_t (&squares)[kBlocksAcross]) {
  PairAmax<T> most;
  MH_UNROLL
  for (int r = 0; r < kWarpRows; ++r)
    for (int h = 0; h < kLaneCols / 2; ++h) most.add(v[r].of[h]);
  int32_t amax = most.both();
  constexpr int kLanes = kLine / kLaneCols;
  MH_UNROLL
  for (int away = 1; away < kLanes; away *= 2) amax = max_bits(amax, __shfl_xor_sync(kAllLanes, amax, away));
  if (threadIdx.x % kLanes == 0) squares[threadIdx.x % kWarp / kLanes] = amax;
  __syncwarp();
}

// Blocks of a direction: their scales' codes and what their elements are multiplied by.
struct Fp4Blocks {
  const Fp4Outer& outer;
  bool by_line, tie_free;
  float sixth;  // of the tensor's encode scale

  __device__ __forceinline__ Fp4Blocks(const Direction& d, const Fp4Outer& o)
      : outer(o), by_line(d.spec.outer_rows), tie_free(o.tie_free), sixth(o.fixed.encode * (1.0f / 6.0f)) {}

  __device__ __forceinline__ float scaled(int32_t amax, int line) const {
    return bits_float(static_cast<uint32_t>(amax)) * (by_line ? outer.of_line[line].encode * (1.0f / 6.0f) : sixth);
  }
  // Of two blocks, the first one's in the low byte; `line`, `other`: their rows or columns in the tile.
  __device__ __forceinline__ uint32_t codes(int32_t amax, int line, int32_t amax_other, int other) const {
    return encode_pair<E4M3>(scaled(amax, line), scaled(amax_other, other));
  }
  __device__ __forceinline__ uint32_t code(int32_t amax, int line) const {
    return encode_pair<E4M3>(scaled(amax, line), 0.0f);
  }
  __device__ __forceinline__ float multiplier(uint32_t code, int line) const {
    if (!by_line) return outer.multipliers[code];
    float scale, zero;
    decode_pair<E4M3>(code, scale, zero);
    return nvfp4_multiplier_of(scale, outer.of_line[line].inverse);
  }
};

// Codes of a block of numbers, of `turned` ones as turn_line leaves them. `draws(e)`, inverted, and `right`: as
// encode_stochastic_down and _along take them.
template <class T, Kind kind, bool kDown, bool right, class Draws>
__device__ __forceinline__ void encode_block(const Fp4Blocks& blocks, const FormatSpec& spec, bool turned,
                                             float (&x)[kLine], float mult, uint32_t code, Draws&& draws,
                                             uint32_t (&codes)[2]) {
  if constexpr (kind == Kind::fp4) {
    encode_nearest(x, mult, code, blocks.tie_free, codes);
  } else {
    const auto encode = [&](auto is_turned) {
      constexpr bool kTurned = decltype(is_turned)::value;
      if (!spec.sr)
        encode_nearest<kTurned>(x, mult, code, codes);
      else if constexpr (kDown)
        encode_stochastic_down<right, kTurned>(x, mult, code, draws, codes);
      else
        encode_stochastic_along<kTurned>(x, mult, code, draws, codes);
    };
    turned ? encode(std::true_type{}) : encode(std::false_type{});
  }
}

// Casts a warp's rows.
template <class T, Kind kind, class Shared>
__device__ __forceinline__ void cast_fp4_rows(const Direction& d, const Tile& t, const WarpRows& from, Shared& sh) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int block = lane % kBlocksAcross, row = warp * kWarpRows + lane / kBlocksAcross, j = block * kLine;
  const uint4* low = from.of + lane / kBlocksAcross * WarpRows::kChunks + WarpRows::at(2 * block);
  const uint4* high = from.of + lane / kBlocksAcross * WarpRows::kChunks + WarpRows::at(2 * block + 1);
  const bool square = is_square(d.spec), turned = kind == Kind::fp4_mixed && d.spec.rht;
  const int rows = j < t.cols ? t.rows : 0;
  const int64_t pitch = kRowsAcross * held(d.pitch), scale_step = kRowsAcross * held(d.scale_step_m);
  uint8_t* to = d.codes + (t.m0 + row) * d.pitch + (t.k0 + j) / 2;
  uint8_t* scale_to = static_cast<uint8_t*>(d.scale) + scale_index(d, t, row, j);
  const Fp4Blocks blocks(d, sh.row);
  MH_UNROLL
  for (int n = 0; n < kWarpRows / kRowsAcross; ++n) {
    const int i = row + n * kRowsAcross;
    const uint4 halves[2] = {low[n * kRowsAcross * WarpRows::kChunks], high[n * kRowsAcross * WarpRows::kChunks]};
    Pair<T> line[kLine / 2];
    memcpy(line, halves, sizeof line);
    float x[kLine];
    MH_UNROLL
    for (int e = 0; e < kLine / 2; ++e) x[2 * e] = line[e].lo(), x[2 * e + 1] = line[e].hi();
    int32_t amax;
    if (turned) {
      amax = turn_line(x);
    } else if (square) {
      amax = sh.squares[warp][block];
    } else {
      PairAmax<T> most;
      MH_UNROLL
      for (int e = 0; e < kLine / 2; ++e) most.add(line[e]);
      amax = most.both();
    }
    const uint32_t code = blocks.code(amax, i);
    uint32_t draws[kLine / 2], codes[2];
    if (kind == Kind::fp4_mixed && d.spec.sr) row_draws(d.noise, t.m0 + i, t.k0 + j, draws);
    const auto inverted = [&](int e) { return ~draws[e]; };
    encode_block<T, kind, false, false>(blocks, d.spec, turned, x, blocks.multiplier(code, i), code, inverted, codes);
    if (i < rows) {
      *reinterpret_cast<uint2*>(to) = {codes[0], codes[1]};
      if (!square || i % kLine == 0) *scale_to = static_cast<uint8_t>(code);
    }
    to += pitch, scale_to += scale_step;
  }
}

// At which byte the codes of a column's rows 16 * warp to 16 * warp + 15, 8 bytes, are staged: neither the lanes that
// write four columns each nor those that read pieces of columns meet in a bank. Of two warps it differs in one bit.
__device__ __forceinline__ int fp4_codes_at(int column, int warp) {
  const int swap = column >> 2 & 1, turn = (column >> 3 & 7) ^ (column >> 1 & 1);
  return ((column ^ swap) * kLinesAcross + (warp ^ turn)) * 8;
}

// The same of column c of a lane's four, from that of its first.
__device__ __forceinline__ int codes_of_column(int first, int c) {
  constexpr int kNext = kLinesAcross * 8;
  return first ^ (c & 1 ? kNext : 0) ^ (c & 2 ? 2 * kNext | 8 : 0);
}

// Makes the draws of a warp's rows from m0 on and the tile's columns from k0 on.
__device__ __forceinline__ void fill_draws(const Noise& noise, int64_t m0, int64_t k0, WarpDraws& draws) {
  constexpr int kAtOnce = 4, kAcross = kTile / kDrawsPerCall, kApart = kWarp / kAcross;  // rows
  const int lane = threadIdx.x % kWarp;
  const RandomKey key = random_key(noise.values, noise.axis);
  if (noise.aligned()) {
    const int64_t i = m0 + lane / kAcross, j = k0 + lane % kAcross * kDrawsPerCall;
    const int64_t step = kApart * noise.values[kGlobalCols] / kDrawsPerCall;
    uint64_t first = noise.index(i, j) / kDrawsPerCall;
    uint4* to = &draws.of[lane / kAcross][lane % kAcross];
#pragma unroll 1
    for (int r = 0; r < kWarpRows; r += kAtOnce * kApart) {
      uint32_t words[kAtOnce][4];
      if (noise.row_ids || step >> 32) {
        MH_UNROLL
        for (int n = 0; n < kAtOnce; ++n) {
          const uint4 w = inverted_call(key, noise.index(i + r + n * kApart, j) / kDrawsPerCall);
          words[n][0] = w.x, words[n][1] = w.y, words[n][2] = w.z, words[n][3] = w.w;
        }
      } else {
        inverted_draws(key, first, static_cast<uint32_t>(step), words);
      }
      MH_UNROLL
      for (int n = 0; n < kAtOnce; ++n)
        to[(r + n * kApart) * kAcross] = {words[n][0], words[n][1], words[n][2], words[n][3]};
      first += static_cast<uint64_t>(kAtOnce * step);
    }
  } else {
    uint32_t* to = draws.of_lane(lane);
#pragma unroll 1
    for (int n = 0; n < kWarpRows * kLaneCols / 2; ++n) {
      const int64_t row = m0 + n / 2, column = k0 + lane * kLaneCols + n % 2 * 2;
      to[n / 2 * WarpDraws::kRow + n % 2] =
          ~(draw_at(key, noise.index(row, column)) | draw_at(key, noise.index(row, column + 1)) << 16);
    }
  }
  __syncwarp();
}

// Scales of a lane's four blocks.
__device__ __forceinline__ void put_column_scales(const Direction& d, const Tile& t, int i, int j, uint32_t codes) {
  if (i >= t.rows || j >= t.cols) return;
  uint8_t* to = static_cast<uint8_t*>(d.scale) + scale_index(d, t, i, j);
  if (is_square(d.spec)) {
    if (j % kLine == 0) *to = static_cast<uint8_t>(codes);
  } else if (d.scale_step_k == 1 && (reinterpret_cast<uintptr_t>(to) & 3) == 0) {
    *reinterpret_cast<uint32_t*>(to) = codes;
  } else {
    MH_UNROLL
    for (int c = 0; c < kLaneCols; ++c) to[c * d.scale_step_k] = static_cast<uint8_t>(codes >> (8 * c));
  }
}

template <class T>
__device__ __forceinline__ float number(const Pair<T>& p, bool upper) {
  return upper ? p.hi() : p.lo();
}

// Casts a warp's columns into the staging area; a barrier ends it. `kAgain`: after a cast of the strip's rows.
template <class T, Kind kind, bool kAgain, class Shared>
__device__ __forceinline__ void cast_fp4_columns(const Direction& d, const Tile& t, const Strip<T>& v, WarpDraws* draws,
                                                 Shared& sh) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, i0 = warp * kWarpRows, j = lane * kLaneCols;
  const bool square = is_square(d.spec);
  const bool turned = kind == Kind::fp4_mixed && d.spec.rht && i0 + kLine <= t.rows;
  const Fp4Blocks blocks(d, sh.col);
  const int staged = fp4_codes_at(j, warp);
  uint32_t scales = 0;  // codes, a byte each
  MH_UNROLL
  for (int h = 0; h < kLaneCols / 2; ++h) {
    if (turned) break;
    PairAmax<T> most;
    MH_UNROLL
    for (int r = 0; r < kLine; ++r) most.add(v[r].of[h]);
    const int32_t of_square = sh.squares[warp][j / kLine];
    const int32_t first = square ? of_square : most.lo(), second = square ? of_square : most.hi();
    scales |= blocks.codes(first, j + 2 * h, second, j + 2 * h + 1) << (16 * h);
  }
  MH_UNROLL
  for (int h = 0; h < kLaneCols / 2; ++h) {
    MH_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int c = 2 * h + half;
      float x[kLine];
      MH_UNROLL
      for (int r = 0; r < kLine; ++r) x[r] = kAgain ? converted_again(v[r].of[h], half) : number(v[r].of[h], half);
      if (turned) scales |= blocks.code(turn_line(x), j + c) << (8 * c);
      const uint32_t code = scales >> (8 * c) & 0xffu;
      const float mult = blocks.multiplier(code, j + c);
      const auto inverted = [&](int e) { return draws->of_lane(lane)[e * WarpDraws::kRow + h]; };
      uint32_t codes[2];
      half ? encode_block<T, kind, true, true>(blocks, d.spec, turned, x, mult, code, inverted, codes)
           : encode_block<T, kind, true, false>(blocks, d.spec, turned, x, mult, code, inverted, codes);
      *reinterpret_cast<uint2*>(sh.staged() + codes_of_column(staged, c)) = {codes[0], codes[1]};
    }
  }
  put_column_scales(d, t, i0, j, scales);
}

// Staged codes of columns, 16 bytes a thread.
__device__ __forceinline__ void put_fp4_columns(const Direction& d, const Tile& t, const char* codes) {
  constexpr int kPieces = kTile / 2 / kVector, kAtOnce = kThreads / kPieces;
  const int first = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  const int low = fp4_codes_at(first, 2 * piece), high = low ^ 8;
  const int cols = piece * 2 * kVector < t.rows ? t.cols : 0;
  uint8_t* to = d.codes + (t.k0 + first) * d.pitch + t.m0 / 2 + piece * kVector;
  MH_UNROLL
  for (int n = 0; n < kTile / kAtOnce; ++n) {
    static_assert(kAtOnce % 64 == 0);  // columns that lie alike
    const char* from = codes + n * kAtOnce * kLinesAcross * 8;
    const uint2 a = *reinterpret_cast<const uint2*>(from + low), b = *reinterpret_cast<const uint2*>(from + high);
    if (first + n * kAtOnce < cols) *reinterpret_cast<uint4*>(to) = {a.x, a.y, b.x, b.y};
    to += kAtOnce * d.pitch;
  }
}

// Thread blocks that a multiprocessor runs at once: three for options, which need 80 registers a thread, and for the
// shared memory of NVFP4 rows beside FP8 columns.
template <class T, Kind row, Kind col>
constexpr int kFp4StripBlocks =
    row == Kind::fp4_mixed || col == Kind::fp4_mixed || (kIsFp4<row> && col == Kind::fp8) ? 3 : 4;

// Casts a tile. FP8 is cast as cast_strips does (strip_kernels.cuh).
template <class T, Kind row, Kind col>
__global__ void __launch_bounds__(kThreads, (kFp4StripBlocks<T, row, col>))
    cast_fp4_strips(const __grid_constant__ StripArgs args) {
  constexpr bool kRow8 = row == Kind::fp8, kCol8 = col == Kind::fp8, kRow4 = kIsFp4<row>, kCol4 = kIsFp4<col>;
  MH_DYNAMIC_SHARED(WarpRows, of_warps);  // draws of all warps, if there are any, then rows
  __shared__ Fp4Shared<T, kRow8 || kCol8> shared;
  auto& sh = *held_shared(&shared);
  const CastArgs& a = args.cast;
  if (a.noop && *a.noop) return;
  if constexpr (kRow8) store_preset_scales(a.row, a.x.rows);
  if constexpr (kCol8) store_preset_scales(a.col, a.x.cols);
  Item item{false, true, 0, blockIdx.x};
  if constexpr (kRow4) {
    item = item_of(a, blockIdx.x);
    if (item.look) look<T>(a, item);
    if (!item.cast) return;
  }
  const Tile t = a.tiling.tile(item.at);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool draws = col == Kind::fp4_mixed && a.col.spec.sr;
  WarpRows& rows = of_warps[warp + (draws ? kWarps : 0)];
  const Direction *row8 = kRow8 ? &a.row : nullptr, *col8 = kCol8 ? &a.col : nullptr;
  const Known known(row8, col8);
  Strip<T> v[1];
  load_strip<T>(a.x, t, v[0]);
  if (kRow4 && a.panels.done) {
    if (threadIdx.x == 0) wait_for(a.panels, item.panel);
    __syncthreads();
  }
  if (kRow4 && warp == 0) load_fp4_outer<T, row>(a.row, t.m0, t.rows, lane, sh.row);
  if (kCol4 && warp == kWarps / 2) load_fp4_outer<T, col>(a.col, t.k0, t.cols, lane, sh.col);
  if constexpr (kCol8) preset_columns<T>(a.col, t, sh.strip);
  if constexpr (kRow8) preset_rows<T>(a.row, t, sh.strip);
  auto* const drawn = reinterpret_cast<WarpDraws*>(of_warps + warp);
  if (draws) fill_draws(a.col.noise, t.m0 + warp * kWarpRows, t.k0, *drawn);
  if constexpr (kRow4) rows.template put<T>(v[0]);
  int32_t of_tile = 0;
  if constexpr (kRow8 || kCol8) of_tile = look_at_tile<T>(row8, col8, known, v[0], sh.strip);
  if constexpr (kCol8)
    if (has_line_blocks(a.col.spec)) share_amaxes<T>(v[0], sh.strip);
  if ((kRow4 && is_square(a.row.spec)) || (kCol4 && is_square(a.col.spec))) find_squares<T>(v[0], sh.squares[warp]);
  if constexpr (kRow8) block_rows<T>(a.row, t, of_tile, v, sh.strip);
  __syncthreads();
  if constexpr (kRow8) cast_strip_rows<T>(a.row, t, v[0], sh.strip);
  if constexpr (kCol8) {
    block_columns<T>(a.col, t, of_tile, sh.strip);
    cast_strip_columns<T>(a.col, v[0], sh.strip);
    put_columns(a.col, t, sh.strip.codes, t.rows / kWarpRows);
  }
  if constexpr (kCol4) cast_fp4_columns<T, col, kRow8>(a.col, t, v[0], drawn, sh);
  if constexpr (kRow4) cast_fp4_rows<T, row>(a.row, t, rows, sh);
  if constexpr (kCol4) {
    __syncthreads();
    put_fp4_columns(a.col, t, sh.staged());
  }
}

}  // namespace mh::cuda
