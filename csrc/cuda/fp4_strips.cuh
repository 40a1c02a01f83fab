// NVFP4 by strips (strip.cuh). A block of a column is what a lane holds of it: its amax and its codes need no other lane.
// Rows are handed over in a warp, four at a time through shared memory, so that a lane has a block of a row too.
#pragma once

#include "strip_casts.cuh"

namespace mh::cuda {

constexpr int kBlocksAcross = kTile / kLine;      // of a row of the tile
constexpr int kRowsHanded = kWarp / kBlocksAcross;  // in a warp at once
constexpr int kHandings = kWarpRows / kRowsHanded;
constexpr int kScaleCodes = 128;

// What is known of a direction before the cast.
struct Fp4Outer {
  OuterScale fixed;                // of the tensor
  float multipliers[kScaleCodes];  // of its blocks, by the E4M3 code of the scale
  OuterScale of_line[kTile];       // of rows or columns, where each has one
};

template <class T>
struct Fp4Shared {
  StripShared<T> strip;
  Fp4Outer row, col;
  int32_t squares[kWarps][kBlocksAcross];  // amaxes of square blocks

  // Codes of columns, and behind them two times the rows that a warp hands over.
  __device__ uint2* staged() { return reinterpret_cast<uint2*>(strip.codes); }
  __device__ uint4* handed(int warp) { return strip.codes + kTile * kLinesAcross / 2 + warp * kHandedChunks; }

  static constexpr int kHandedChunks = kTile * kLinesAcross / 2 / kWarps;
  static_assert(kHandedChunks * kVector == kRowsHanded * kTile * 2);
};

// What is known before the cast; a barrier ends it. `t.m0`, `t.k0`: of the lines.
__device__ __forceinline__ void load_fp4_outer(const Direction& d, int64_t first, int lines, int thread, Fp4Outer& to) {
  if (thread < 0 || thread >= kTile) return;
  if (d.spec.outer_rows) {
    to.of_line[thread] = outer_scale<Kind::fp4>(d, first + min(thread, lines - 1));
    return;
  }
  const OuterScale outer = outer_scale<Kind::fp4>(d, 0);
  if (thread == 0) to.fixed = outer;
  float scale, zero;
  decode_pair<E4M3>(static_cast<uint32_t>(thread), scale, zero);
  to.multipliers[thread] = nvfp4_multiplier_of(scale, outer.inverse);
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

// The E4M3 codes of the scales of two blocks, the first in the low byte.
__device__ __forceinline__ uint32_t scale_codes(int32_t amax, float encode, int32_t other, float encode_other) {
  constexpr float kSixth = 1.0f / 6.0f;
  return encode_pair<E4M3>(bits_float(static_cast<uint32_t>(amax)) * (encode * kSixth),
                           bits_float(static_cast<uint32_t>(other)) * (encode_other * kSixth));
}

// What the elements of a block are multiplied by. `line`: its row or column in the tile.
__device__ __forceinline__ float fp4_multiplier(const Direction& d, const Fp4Outer& outer, int line, uint32_t code) {
  if (!d.spec.outer_rows) return outer.multipliers[code];
  float scale, zero;
  decode_pair<E4M3>(code, scale, zero);
  return nvfp4_multiplier_of(scale, outer.of_line[line].inverse);
}

__device__ __forceinline__ float encode_of(const Direction& d, const Fp4Outer& outer, int line) {
  return d.spec.outer_rows ? outer.of_line[line].encode : outer.fixed.encode;
}

// 16 bytes of a row, in the rows handed over: where a lane writes half of them and where a lane reads its block's halves.
// Swizzled, so that eight lanes that read do not meet in a bank.
__device__ __forceinline__ int chunk_at(int chunk) { return chunk ^ (chunk >> 3); }

// Casts a warp's rows.
template <class T, Kind kind>
__device__ __forceinline__ void cast_fp4_rows(const Direction& d, const Tile& t, const Strip<T>& v, Fp4Shared<T>& sh) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, i0 = warp * kWarpRows;
  const int block = lane % kBlocksAcross, row = i0 + lane / kBlocksAcross, j = block * kLine;
  constexpr int kChunks = kTile * 2 / kVector;  // of a row
  uint4* handed = sh.handed(warp);
  Four<T>* give = reinterpret_cast<Four<T>*>(handed + chunk_at(lane / 2)) + lane % 2;
  const uint4 *take = handed + lane / kBlocksAcross * kChunks + chunk_at(2 * block);
  const bool square = is_square(d.spec), turned = kind == Kind::fp4_mixed && d.spec.rht;
  const int rows = j < t.cols ? t.rows : 0;
  const int64_t pitch = kRowsHanded * held(d.pitch), scale_step = kRowsHanded * held(d.scale_step_m);
  uint8_t* to = d.codes + (t.m0 + row) * d.pitch + (t.k0 + j) / 2;
  uint8_t* scale_to = static_cast<uint8_t*>(d.scale) + scale_index(d, t, row, j);
  MH_UNROLL
  for (int n = 0; n < kHandings; ++n) {
    MH_UNROLL
    for (int r = 0; r < kRowsHanded; ++r) give[r * kChunks * 2] = v[n * kRowsHanded + r];
    __syncwarp();
    const uint4 low = take[0], high = take[chunk_at(2 * block) & 1 ? -1 : 1];
    __syncwarp();
    Pair<T> line[kLine / 2];
    memcpy(line, &low, sizeof low), memcpy(line + kLine / 4, &high, sizeof high);
    const int i = row + n * kRowsHanded;
    float x[kLine];
    MH_UNROLL
    for (int e = 0; e < kLine / 2; ++e) x[2 * e] = line[e].lo(), x[2 * e + 1] = line[e].hi();
    int32_t amax;
    if (turned) {
      hadamard16(x, false);
      amax = line_amax(x);
    } else if (square) {
      amax = sh.squares[warp][block];
    } else {
      PairAmax<T> most;
      MH_UNROLL
      for (int e = 0; e < kLine / 2; ++e) most.add(line[e]);
      amax = most.both();
    }
    const uint32_t code = scale_codes(amax, encode_of(d, sh.row, i), 0, 0.0f);
    const float mult = fp4_multiplier(d, sh.row, i, code);
    uint32_t draws[kLine / 2];
    if (kind == Kind::fp4_mixed && d.spec.sr) row_draws(d.noise, t.m0 + i, t.k0 + j, draws);
    Signs signs;
    if constexpr (kind == Kind::fp4) signs = Signs::along(line);
    if constexpr (kind == Kind::fp4_mixed) signs = Signs::of(x);
    uint32_t codes[2];
    const auto above = [&](int e) { return above_draw(draws[e / 2], e % 2); };
    encode_nibbles(x, mult, code, signs, kind == Kind::fp4_mixed && d.spec.sr, above, codes);
    if (i < rows) {
      *reinterpret_cast<uint2*>(to) = {codes[0], codes[1]};
      if (!square || i % kLine == 0) *scale_to = static_cast<uint8_t>(code);
    }
    to += pitch, scale_to += scale_step;
  }
}

// Which 8 bytes of the staged codes a column's rows 16 * warp to 16 * warp + 15 are: neither the lanes that write four
// columns each nor those that read pieces of columns meet in a bank.
__device__ __forceinline__ int fp4_codes_at(int column, int warp) {
  const int swap = column >> 2 & 1, turn = (column >> 3 & 7) ^ (column >> 1 & 1);
  return (column ^ swap) * kLinesAcross + (warp ^ turn);
}

// Bits for a warp's columns: the draws of eight neighbours in a row are 16 bytes, inverted.
struct WarpDraws {
  uint4 of[kWarpRows][kTile / kDrawsPerCall];

  __device__ __forceinline__ const uint32_t* of_lane(int lane) const {
    return reinterpret_cast<const uint32_t*>(of) + lane * (kLaneCols / 2);
  }
  static constexpr int kRow = kTile / 2;  // words
};

// Of the tile's columns from k0 on and the warp's rows from m0 on.
__device__ __forceinline__ void fill_draws(const Noise& noise, int64_t m0, int64_t k0, WarpDraws& draws) {
  const int lane = threadIdx.x % kWarp;
  const RandomKey key = random_key(noise.values, noise.axis);
  if (noise.aligned()) {
    constexpr int kAtOnce = 4, kAcross = kTile / kDrawsPerCall, kApart = kWarp / kAcross;  // rows
#pragma unroll 1
    for (int r = lane / kAcross; r < kWarpRows; r += kAtOnce * kApart) {
      uint64_t groups[kAtOnce];
      MH_UNROLL
      for (int n = 0; n < kAtOnce; ++n)
        groups[n] = noise.index(m0 + r + n * kApart, k0 + lane % kAcross * kDrawsPerCall) / kDrawsPerCall;
      const auto w = draw_words(key, groups);
      MH_UNROLL
      for (int n = 0; n < kAtOnce; ++n)
        draws.of[r + n * kApart][lane % kAcross] = {~w.c0.v[n], ~w.c1.v[n], ~w.c2.v[n], ~w.c3.v[n]};
    }
  } else {
    auto* const own = const_cast<uint32_t*>(draws.of_lane(lane));
#pragma unroll 1
    for (int n = 0; n < kWarpRows * kLaneCols / 2; ++n) {
      const int64_t i = m0 + n / 2, j = k0 + lane * kLaneCols + n % 2 * 2;
      own[n / 2 * WarpDraws::kRow + n % 2] = ~(draw_at(key, noise.index(i, j)) | draw_at(key, noise.index(i, j + 1)) << 16);
    }
  }
  __syncwarp();
}

// Casts a warp's columns into the staging area; a barrier ends it.
template <class T, Kind kind>
__device__ __forceinline__ void cast_fp4_columns(const Direction& d, const Tile& t, const Strip<T>& v,
                                                 const WarpDraws* draws, Fp4Shared<T>& sh) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, i0 = warp * kWarpRows, j = lane * kLaneCols;
  const bool square = is_square(d.spec), turned = kind == Kind::fp4_mixed && d.spec.rht && i0 + kLine <= t.rows;
  const bool stochastic = kind == Kind::fp4_mixed && d.spec.sr;
  uint32_t scales = 0;
  MH_UNROLL
  for (int h = 0; h < kLaneCols / 2; ++h) {
    Pair<T> pairs[kLine];
    MH_UNROLL
    for (int r = 0; r < kLine; ++r) pairs[r] = v[r].of[h];
    PairAmax<T> most;
    MH_UNROLL
    for (int r = 0; r < kLine; ++r) most.add(pairs[r]);
    Signs signs[2];
    if constexpr (kind == Kind::fp4) Signs::down(pairs, signs);
    MH_UNROLL
    for (int c = 0; c < 2; ++c) {
      const int column = j + 2 * h + c;
      float x[kLine];
      MH_UNROLL
      for (int r = 0; r < kLine; ++r) x[r] = converted_again(pairs[r], c);
      int32_t amax = c ? most.hi() : most.lo();
      if (square) amax = sh.squares[warp][column / kLine];
      if (turned) {
        hadamard16(x, false);
        amax = line_amax(x);
      }
      if constexpr (kind == Kind::fp4_mixed) signs[c] = Signs::of(x);
      const uint32_t code = scale_codes(amax, encode_of(d, sh.col, column), 0, 0.0f);
      const float mult = fp4_multiplier(d, sh.col, column, code);
      scales |= code << (8 * (2 * h + c));
      const auto above = [&](int e) {
        return permute(draws->of_lane(lane)[e * WarpDraws::kRow + h], 0, c ? 0x4324 : 0x4104);
      };
      uint32_t codes[2];
      encode_nibbles(x, mult, code, signs[c], stochastic, above, codes);
      sh.staged()[fp4_codes_at(column, warp)] = {codes[0], codes[1]};
    }
  }
  if (i0 >= t.rows || j >= t.cols) return;
  uint8_t* to = static_cast<uint8_t*>(d.scale) + scale_index(d, t, i0, j);
  if (square) {
    if (j % kLine == 0) *to = static_cast<uint8_t>(scales);
  } else if (d.scale_step_k == 1 && (reinterpret_cast<uintptr_t>(to) & 3) == 0) {
    *reinterpret_cast<uint32_t*>(to) = scales;
  } else {
    MH_UNROLL
    for (int c = 0; c < kLaneCols; ++c) to[c * d.scale_step_k] = static_cast<uint8_t>(scales >> (8 * c));
  }
}

// Staged codes of columns, 16 bytes a thread.
__device__ __forceinline__ void put_fp4_columns(const Direction& d, const Tile& t, const uint2* codes) {
  constexpr int kPieces = kTile / 2 / kVector, kAtOnce = kThreads / kPieces;
  const int first = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  uint8_t* to = d.codes + (t.k0 + first) * d.pitch + t.m0 / 2 + piece * kVector;
  MH_UNROLL
  for (int n = 0; n < kTile / kAtOnce; ++n) {
    const int column = first + n * kAtOnce;
    const uint2 low = codes[fp4_codes_at(column, 2 * piece)], high = codes[fp4_codes_at(column, 2 * piece + 1)];
    if (column < t.cols && piece * 2 * kVector < t.rows) *reinterpret_cast<uint4*>(to) = {low.x, low.y, high.x, high.y};
    to += kAtOnce * d.pitch;
  }
}

}  // namespace mh::cuda
