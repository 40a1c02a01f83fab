// Quantize: tile by tile, band by band. A band is the rows one row of scale blocks covers: one row for blocks along K,
// block_m rows otherwise. Its block amaxes are collected, turned into multipliers spread over the columns, and its
// elements encoded.
#pragma once

#include "../numerics/random.h"
#include "../numerics/scales.h"
#include "layout.h"

MH_NUMERICS_BEGIN

struct Band {
  int64_t block_row;  // row of the scale array
  int first, rows;    // rows in the tile
};

// Largest |x| of every column of the band.
inline void column_amax(Scratch& s, const Band& b, int cols, int32_t* __restrict amax) {
  const float* __restrict first = s.row(b.first);
  for (int j = 0; j < cols; ++j) amax[j] = abs_bits(first[j]);
  for (int i = 1; i < b.rows; ++i) {
    const float* __restrict row = s.row(b.first + i);
    for (int j = 0; j < cols; ++j) amax[j] = max_bits(amax[j], abs_bits(row[j]));
  }
}

// Maxima of groups of `size` neighbours; the last group may be short.
template <int size>
inline void group_amax(const int32_t* __restrict in, int32_t* __restrict out, int n) {
  const int whole = n / size;
  for (int g = 0; g < whole; ++g) {
    int32_t most = 0;
    for (int e = 0; e < size; ++e) most = max_bits(most, in[g * size + e]);
    out[g] = most;
  }
  if (n % size == 0) return;
  int32_t most = 0;
  for (int j = whole * size; j < n; ++j) most = max_bits(most, in[j]);
  out[whole] = most;
}

template <int size>
inline void spread(const float* __restrict in, float* __restrict out, int n) {
  for (int g = 0; g < n / size; ++g)
    for (int e = 0; e < size; ++e) out[g * size + e] = in[g];
  for (int j = n / size * size; j < n; ++j) out[j] = in[j / size];
}

inline void group_amax(int size, const int32_t* in, int32_t* out, int n) {
  switch (size) {
    case 16: return group_amax<16>(in, out, n);
    case 32: return group_amax<32>(in, out, n);
    default: return group_amax<128>(in, out, n);
  }
}

inline void spread(int size, const float* in, float* out, int n) {
  switch (size) {
    case 16: return spread<16>(in, out, n);
    case 32: return spread<32>(in, out, n);
    default: return spread<128>(in, out, n);
  }
}

// Scales of n blocks from their amaxes: multipliers out, stored scales into the scale array from element `at` on.
template <ScaleRule rule>
inline void block_scales(const QuantizeArgs& a, const int32_t* __restrict amax, const float* __restrict enc, int n,
                         int64_t at, float* __restrict mult) {
  const FormatSpec spec = a.spec;
  alignas(kCacheLine) uint32_t stored[kTileCols];
  for (int g = 0; g < n; ++g) {
    const BlockScale s = block_scale<rule>(spec, amax_from_bits(amax[g]), enc[g]);
    mult[g] = s.multiplier;
    stored[g] = s.stored;
  }
  if constexpr (rule == ScaleRule::fp32) {
    memcpy(static_cast<float*>(a.out.scale) + at, stored, static_cast<size_t>(n) * sizeof(float));
  } else {
    uint8_t* bytes = static_cast<uint8_t*>(a.out.scale) + at;
    for (int g = 0; g < n; ++g) bytes[g] = static_cast<uint8_t>(stored[g]);
  }
}

// Multipliers of a band's columns where the scale is known before the cast.
inline void preset_multipliers(const QuantizeArgs& a, const Tile& t, const Band& b, float* mult) {
  if (a.spec.outer_rows && a.spec.axis == 1) {
    for (int j = 0; j < t.cols; ++j) mult[j] = preset_encode_scale(a.spec, a.out.amax[t.k0 + j], a.fixed_scale);
    return;
  }
  const float amax = a.out.amax[a.spec.outer_rows ? t.m0 + b.first : 0];
  const float scale = preset_encode_scale(a.spec, amax, a.fixed_scale);
  for (int j = 0; j < t.cols; ++j) mult[j] = scale;
}

// NVFP4's outer encode scale of each of a band's n blocks; other rules have none.
inline void outer_encode(const QuantizeArgs& a, const Tile& t, const Band& b, int n, float* enc) {
  if (a.spec.scale_rule != ScaleRule::e4m3_amax) {
    for (int j = 0; j < n; ++j) enc[j] = 1.0f;
    return;
  }
  if (a.spec.outer_rows && a.spec.axis == 1) {
    for (int j = 0; j < n; ++j) enc[j] = nvfp4_outer_encode(a.out.amax[t.k0 + j]);
    return;
  }
  const float one = nvfp4_outer_encode(a.out.amax[a.spec.outer_rows ? t.m0 + b.first : 0]);
  for (int j = 0; j < n; ++j) enc[j] = one;
}

// What each column of the band is multiplied by; writes the band's stored scales on the way.
inline void band_multipliers(const QuantizeArgs& a, const Tile& t, const Band& b, Scratch& s, float* mult) {
  if (is_preset(a.spec)) return preset_multipliers(a, t, b, mult);
  alignas(kCacheLine) int32_t amax[kTileCols];
  alignas(kCacheLine) int32_t grouped[kTileCols];
  alignas(kCacheLine) float enc[kTileCols];
  alignas(kCacheLine) float scales[kTileCols];
  const int size = a.spec.block_k;
  const int n = (t.cols + size - 1) / size;
  column_amax(s, b, t.cols, amax);
  const int32_t* block_amax = amax;
  if (size > 1) {
    group_amax(size, amax, grouped, t.cols);
    block_amax = grouped;
  }
  const int64_t at = b.block_row * ((a.x.cols + size - 1) / size) + t.k0 / size;
  float* out = size > 1 ? scales : mult;
  outer_encode(a, t, b, n, enc);
  switch (a.spec.scale_rule) {
    case ScaleRule::e8m0: block_scales<ScaleRule::e8m0>(a, block_amax, enc, n, at, out); break;
    case ScaleRule::e4m3_amax: block_scales<ScaleRule::e4m3_amax>(a, block_amax, enc, n, at, out); break;
    default: block_scales<ScaleRule::fp32>(a, block_amax, enc, n, at, out);
  }
  if (size > 1) spread(size, scales, mult, t.cols);
}

template <class E>
inline void encode_row(const float* __restrict x, const float* __restrict mult, uint8_t* __restrict codes, int n) {
  for (int j = 0; j < n; ++j) codes[j] = static_cast<uint8_t>(encode<E>(x[j] * mult[j]));
}

// Random draws for n elements from global index `first` on; returns where they start in `draws`.
constexpr int kDrawsAtATime = kDrawsPerCall * kCallLanes;
constexpr int kRowDraws = kTileCols + kDrawsPerCall + kDrawsAtATime;

inline int row_draws(const RandomKey& key, uint64_t first, int n, uint16_t* draws) {
  const int skip = static_cast<int>(first % kDrawsPerCall);
  for (int at = 0; at < skip + n; at += kDrawsAtATime)
    draw_lanes(key, first / kDrawsPerCall + static_cast<uint64_t>(at / kDrawsPerCall), draws + at);
  return skip;
}

inline void encode_row_stochastic(const QuantizeArgs& a, int64_t m, int64_t k0, const float* __restrict x,
                                  const float* __restrict mult, uint8_t* __restrict codes, int n) {
  alignas(kCacheLine) uint16_t draws[kRowDraws];
  const int64_t row = a.row_ids ? a.row_ids[m] : m + a.rng[kRowOffset];
  const uint64_t first = static_cast<uint64_t>(row * a.rng[kGlobalCols] + k0 + a.rng[kColOffset]);
  const uint16_t* __restrict u = draws + row_draws(random_key(a.rng, a.spec.axis), first, n, draws);
  for (int j = 0; j < n; ++j) codes[j] = static_cast<uint8_t>(encode_e2m1_stochastic(x[j] * mult[j], u[j]));
}

inline void encode_band(const QuantizeArgs& a, const Tile& t, const Band& b, Scratch& s, const float* mult) {
  for (int i = b.first; i < b.first + b.rows; ++i) {
    switch (a.spec.element) {
      case Element::e4m3: encode_row<E4M3>(s.row(i), mult, s.code_row(i), t.cols); break;
      case Element::e5m2: encode_row<E5M2>(s.row(i), mult, s.code_row(i), t.cols); break;
      case Element::e2m1:
        if (a.spec.sr)
          encode_row_stochastic(a, t.m0 + i, t.k0, s.row(i), mult, s.code_row(i), t.cols);
        else
          encode_row<E2M1>(s.row(i), mult, s.code_row(i), t.cols);
    }
  }
}

inline void quantize_tile(const QuantizeArgs& a, const Tile& t, Scratch& s) {
  const bool packed = a.spec.element == Element::e2m1;
  load_tile(a.x, t, s);
  if (a.spec.rht) hadamard_tile(a.spec, t, s, false);
  const int size = a.spec.block_m > 0 ? a.spec.block_m : t.rows;
  alignas(kCacheLine) float mult[kTileCols];
  for (int first = 0; first < t.rows; first += size) {
    const Band b{(t.m0 + first) / size, first, t.rows - first < size ? t.rows - first : size};
    band_multipliers(a, t, b, s, mult);
    encode_band(a, t, b, s, mult);
  }
  store_codes(a.out, packed, a.x.rows, a.x.cols, t, s);
}

inline void write_preset_scales(const QuantizeArgs& a) {
  const int64_t n = !a.spec.outer_rows ? 1 : (a.spec.axis == 0 ? a.x.rows : a.x.cols);
  float* out = static_cast<float*>(a.out.scale);
  for (int64_t i = 0; i < n; ++i) out[i] = 1.0f / preset_encode_scale(a.spec, a.out.amax[i], a.fixed_scale);
}

inline void quantize(const QuantizeArgs& a, int threads) {
  if (a.noop && *a.noop) return;
  if (is_preset(a.spec)) write_preset_scales(a);  // also where the payload is empty
  const bool tall = a.out.transposed || a.x.col_stride != 1;
  const Tiling tiling = make_tiling(a.spec, a.x.rows, a.x.cols, tall);
  const int64_t n = tiling.count();
#pragma omp parallel num_threads(useful_threads(threads, a.x.rows * a.x.cols))
  {
    Scratch s;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) quantize_tile(a, tiling.tile(i), s);
    finish_stream();
  }
}

MH_NUMERICS_END
