// What strips of a tile (strip.cuh) are cast with: scales, and codes on their way out. A scale is made once, by a lane
// of its own; codes of columns go through shared memory, to leave in whole rows of the stored matrix.
#pragma once

#include "cast.cuh"
#include "strip.cuh"

namespace mh::cuda {

// The multipliers of the tile's columns; stores scales of blocks.
template <class T>
__device__ __forceinline__ void scale_columns(const Direction& d, const Tile& t, const Strip<T>& v,
                                              StripShared<T>& sh) {
  const int c = threadIdx.x;
  const bool blocks = !d.spec.outer_rows;
  const int32_t amax = blocks ? column_amax(v, sh) : 0;
  if (c >= t.cols) return;
  const OuterScale outer = outer_scale<Kind::fp8>(d, t.lines + t.k0 + c);
  sh.of_column[c] = line_scale<Kind::fp8>(d, amax, outer, nullptr, scale_index(d, t, 0, c), blocks).mult;
}

// The same of a warp's rows.
template <class T>
__device__ __forceinline__ void scale_rows(const Direction& d, const Tile& t, const Strip<T> (&v)[1],
                                           StripShared<T>& sh) {
  const int lane = threadIdx.x % kWarp, i = threadIdx.x / kWarp * kWarpRows + lane;
  const bool blocks = !d.spec.outer_rows;
  const int32_t amax = blocks ? row_amax(v) : 0;
  if (lane < kWarpRows) {
    const OuterScale outer = outer_scale<Kind::fp8>(d, t.m0 + min(i, t.rows - 1));
    sh.of_row[i] = line_scale<Kind::fp8>(d, amax, outer, nullptr, scale_index(d, t, i, 0), blocks && i < t.rows).mult;
  }
  __syncwarp();
}

template <class E, class T>
__device__ __forceinline__ void put_rows(const Direction& d, const Tile& t, const Strip<T>& v, StripShared<T>& sh) {
  const int i0 = threadIdx.x / kWarp * kWarpRows, j = threadIdx.x % kWarp * kLaneCols;
  const int64_t pitch = held(d.pitch);
  uint8_t* to = d.codes + (t.m0 + i0) * pitch + t.k0 + j;
  const int rows = j < t.cols ? t.rows - i0 : 0;
  MH_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    const float mult = sh.of_row[i0 + r];
    const Pair<T>(&p)[kLaneCols / 2] = v[r].of;
    const uint32_t codes =
        encode_pair<E>(p[0].lo() * mult, p[0].hi() * mult) | encode_pair<E>(p[1].lo() * mult, p[1].hi() * mult) << 16;
    if (r < rows) *reinterpret_cast<uint32_t*>(to) = codes;
    to += pitch;
  }
}

template <class E, class T>
__device__ __forceinline__ void stage_columns(const Strip<T>& v, StripShared<T>& sh) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto* multipliers = reinterpret_cast<const uint4*>(sh.of_column);
  float mult[kLaneCols];
  const uint4 some = multipliers[lane];
  memcpy(mult, &some, sizeof some);
  MH_UNROLL
  for (int c = 0; c < kLaneCols; ++c) {
    float x[kLine];
    MH_UNROLL
    for (int r = 0; r < kWarpRows; ++r) x[r] = c % 2 ? v[r].of[c / 2].hi() : v[r].of[c / 2].lo();
    Codes<Kind::fp8> codes;
    encode_bytes<E>(x, mult[c], codes);
    sh.codes[codes_at(lane * kLaneCols + c, warp)] = {codes.w[0], codes.w[1], codes.w[2], codes.w[3]};
  }
}

// Staged codes of columns, the first `strips` of the tile's eight.
__device__ __forceinline__ void put_columns(const Direction& d, const Tile& t, const uint4* codes, int strips) {
  const int first = threadIdx.x / kLinesAcross, piece = threadIdx.x % kLinesAcross;
  constexpr int kAtOnce = kThreads / kLinesAcross;
  uint8_t* to = d.codes + (t.k0 + first) * d.pitch + t.m0 + piece * kVector;
  MH_UNROLL
  for (int n = 0; n < kTile / kAtOnce; ++n) {
    const int column = first + n * kAtOnce;
    if (column < t.cols && piece < strips) *reinterpret_cast<uint4*>(to) = codes[codes_at(column, piece)];
    to += kAtOnce * d.pitch;
  }
}

// Scales and codes of a warp's rows.
template <class T>
__device__ __forceinline__ void cast_strip_rows(const Direction& d, const Tile& t, const Strip<T> (&v)[1],
                                                StripShared<T>& sh) {
  scale_rows<T>(d, t, v, sh);
  d.spec.element == Element::e5m2 ? put_rows<E5M2, T>(d, t, v[0], sh) : put_rows<E4M3, T>(d, t, v[0], sh);
}

// Columns, whose scales are made, to the staging area; barriers before and after.
template <class T>
__device__ __forceinline__ void cast_strip_columns(const Direction& d, const Strip<T>& v, StripShared<T>& sh) {
  __syncthreads();
  d.spec.element == Element::e5m2 ? stage_columns<E5M2, T>(v, sh) : stage_columns<E4M3, T>(v, sh);
  __syncthreads();
}

constexpr int64_t kLongestRow = INT32_MAX / 2;  // bytes of a row and numbers of rows are 32 bits

// Whether strips can be read of a tensor.
inline bool fits_tensor(const CastArgs& a) {
  return a.x.dtype != Dtype::f32 && a.vector && a.x.cols % kLaneCols == 0 && a.x.row_stride <= kLongestRow;
}

inline bool has_strip_scales(const FormatSpec& s) {
  return s.scale_rule == ScaleRule::fp32 && (s.outer_rows || s.block_m * s.block_k == kTile);
}

// Whether a direction can be written from strips.
inline bool fits_rows(const Direction& d) { return has_strip_scales(d.spec) && !d.transposed && d.width >= kLaneCols; }
inline bool fits_columns(const Direction& d) { return has_strip_scales(d.spec) && d.transposed && d.width == kVector; }

}  // namespace mh::cuda
