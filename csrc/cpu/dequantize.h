// Dequantize: codes to a scratch tile, times the block scale, times the outer scale, out of the transformed domain.
#pragma once

#include "quantize.h"

MH_NUMERICS_BEGIN

template <int size>
inline void spread(const float* __restrict in, float* __restrict out, int n) {
  for (int g = 0; g < n / size; ++g)
    for (int e = 0; e < size; ++e) out[g * size + e] = in[g];
  for (int j = n / size * size; j < n; ++j) out[j] = in[j / size];
}

inline void spread(int size, const float* in, float* out, int n) {
  switch (size) {
    case 16: return spread<16>(in, out, n);
    case 32: return spread<32>(in, out, n);
    default: return spread<128>(in, out, n);
  }
}

// Decode scales of the columns of scale row `block_row`.
inline void column_scales(const DequantizeArgs& a, const Tile& t, int64_t block_row, float* scales) {
  const int size = a.spec.block_k;
  if (size == 0) {  // one scale a tensor or a row
    const float one = static_cast<const float*>(a.in.scale)[a.spec.outer_rows ? block_row : 0];
    for (int j = 0; j < t.cols; ++j) scales[j] = one;
    return;
  }
  alignas(kCacheLine) float grouped[kTileCols];
  const int n = (t.cols + size - 1) / size;
  const int64_t at = block_row * ((a.out.cols + size - 1) / size) + t.k0 / size;
  const float* fp32 = static_cast<const float*>(a.in.scale) + at;
  const uint8_t* bytes = static_cast<const uint8_t*>(a.in.scale) + at;
  float* out = size > 1 ? grouped : scales;
  switch (a.spec.scale_rule) {
    case ScaleRule::e8m0:
      for (int g = 0; g < n; ++g) out[g] = e8m0_decode(bytes[g]);
      break;
    case ScaleRule::e4m3_amax:
      for (int g = 0; g < n; ++g) out[g] = decode<E4M3>(bytes[g]);
      break;
    default:
      for (int g = 0; g < n; ++g) out[g] = fp32[g];
  }
  if (size > 1) spread(size, grouped, scales, t.cols);
}

template <class E>
inline void decode_row(const uint8_t* __restrict codes, const float* __restrict scales, float* __restrict out, int n) {
  for (int j = 0; j < n; ++j) out[j] = decode<E>(codes[j]) * scales[j];
}

// NVFP4's second level, 1/enc of the tensor, the row or each column.
inline void apply_outer(const DequantizeArgs& a, const Tile& t, Scratch& s) {
  alignas(kCacheLine) float outer[kTileCols];
  const bool by_col = a.spec.outer_rows && a.spec.axis == 1;
  if (by_col)
    for (int j = 0; j < t.cols; ++j) outer[j] = 1.0f / nvfp4_outer_encode(a.in.amax[t.k0 + j]);
  for (int i = 0; i < t.rows; ++i) {
    float* __restrict row = s.row(i);
    if (by_col) {
      for (int j = 0; j < t.cols; ++j) row[j] = row[j] * outer[j];
    } else {
      const float one = 1.0f / nvfp4_outer_encode(a.in.amax[a.spec.outer_rows ? t.m0 + i : 0]);
      for (int j = 0; j < t.cols; ++j) row[j] = row[j] * one;
    }
  }
}

inline void dequantize_tile(const DequantizeArgs& a, const Tile& t, Scratch& s) {
  const bool packed = a.spec.element == Element::e2m1;
  load_codes(a.in, packed, a.out.rows, a.out.cols, t, s);
  const int size = a.spec.block_m > 0 ? a.spec.block_m : t.rows;
  alignas(kCacheLine) float scales[kTileCols];
  for (int i = 0; i < t.rows; ++i) {
    // a block over all rows has one row of scales
    if (i % size == 0) column_scales(a, t, a.spec.block_m > 0 ? (t.m0 + i) / size : 0, scales);
    switch (a.spec.element) {
      case Element::e4m3: decode_row<E4M3>(s.code_row(i), scales, s.row(i), t.cols); break;
      case Element::e5m2: decode_row<E5M2>(s.code_row(i), scales, s.row(i), t.cols); break;
      case Element::e2m1: decode_row<E2M1>(s.code_row(i), scales, s.row(i), t.cols); break;
    }
  }
  if (packed && a.outer) apply_outer(a, t, s);
  if (a.spec.rht && a.inverse_rht) hadamard_tile(a.spec, t, s, true);
  store_tile(a.out, t, s);
}

inline void dequantize(const DequantizeArgs& a, int threads) {
  const bool tall = a.in.transposed || a.out.col_stride != 1;
  const Tiling tiling = make_tiling(a.spec, a.out.rows, a.out.cols, tall);
  const int64_t n = tiling.count();
#pragma omp parallel num_threads(useful_threads(threads, a.out.rows * a.out.cols))
  {
    Scratch s;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) dequantize_tile(a, tiling.tile(i), s);
    finish_stream();
  }
}

inline void outer_scale(const float* amax, float* out, int64_t n, int threads) {
#pragma omp parallel for num_threads(useful_threads(threads, n)) schedule(static)
  for (int64_t i = 0; i < n; ++i) out[i] = 1.0f / nvfp4_outer_encode(amax[i]);
}

MH_NUMERICS_END
