// Outer amaxes: of the tensor, of each row (rowwise) or of each column (columnwise), after the Hadamard transform where
// the format has one. FP8 formats propagate NaN, NVFP4 ignores it.
#pragma once

#include "tile.h"

MH_NUMERICS_BEGIN

MH_HD int32_t outer_amax_bits(float x, bool keep_nan) {
  const int32_t bits = abs_bits(x);
  return bits > kInfBits && !keep_nan ? 0 : bits;
}

inline bool keeps_nan(const FormatSpec& spec) { return spec.scale_rule != ScaleRule::e4m3_amax; }

inline int32_t row_amax(const float* __restrict x, int n, bool keep_nan) {
  int32_t most = 0;
  for (int j = 0; j < n; ++j) most = max_bits(most, outer_amax_bits(x[j], keep_nan));
  return most;
}

inline void amax_load(const AmaxArgs& a, const Tile& t, Scratch& s) {
  load_tile(a.x, t, s);
  if (a.spec.rht) hadamard_tile(a.spec, t, s, false);
}

inline void tensor_amax(const AmaxArgs& a, const Tiling& tiling, int threads) {
  const bool keep = keeps_nan(a.spec);
  const int64_t n = tiling.count();
  int32_t most = 0;
#pragma omp parallel num_threads(threads) reduction(max : most)
  {
    Scratch s;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
      const Tile t = tiling.tile(i);
      amax_load(a, t, s);
      for (int r = 0; r < t.rows; ++r) most = max_bits(most, row_amax(s.row(r), t.cols, keep));
    }
  }
  *a.out = amax_from_bits(most);
}

// One thread owns a strip of rows, across all columns.
inline void amax_of_rows(const AmaxArgs& a, const Tiling& tiling, int threads) {
  const bool keep = keeps_nan(a.spec);
#pragma omp parallel num_threads(threads)
  {
    Scratch s;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tiling.down; ++i) {
      int32_t most[kMaxTileRows] = {};
      for (int64_t j = 0; j < tiling.across; ++j) {
        const Tile t = tiling.at(i, j);
        amax_load(a, t, s);
        for (int r = 0; r < t.rows; ++r) most[r] = max_bits(most[r], row_amax(s.row(r), t.cols, keep));
      }
      const int64_t m0 = i * tiling.rows;
      for (int r = 0; r < tiling.rows && m0 + r < tiling.m; ++r) a.out[m0 + r] = amax_from_bits(most[r]);
    }
  }
}

inline void amax_of_cols(const AmaxArgs& a, const Tiling& tiling, int threads) {
  const bool keep = keeps_nan(a.spec);
#pragma omp parallel num_threads(threads)
  {
    Scratch s;
#pragma omp for schedule(static)
    for (int64_t j = 0; j < tiling.across; ++j) {
      alignas(kCacheLine) int32_t most[kTileCols] = {};
      for (int64_t i = 0; i < tiling.down; ++i) {
        const Tile t = tiling.at(i, j);
        amax_load(a, t, s);
        for (int r = 0; r < t.rows; ++r) {
          const float* __restrict row = s.row(r);
          for (int c = 0; c < t.cols; ++c) most[c] = max_bits(most[c], outer_amax_bits(row[c], keep));
        }
      }
      const int64_t k0 = j * kTileCols;
      for (int c = 0; c < kTileCols && k0 + c < tiling.k; ++c) a.out[k0 + c] = amax_from_bits(most[c]);
    }
  }
}

inline void amax(const AmaxArgs& a, int threads) {
  const Tiling tiling = make_tiling(a.spec, a.x.rows, a.x.cols, a.x.col_stride != 1);
  const int useful = useful_threads(threads, a.x.rows * a.x.cols);
  if (!a.spec.outer_rows) return tensor_amax(a, tiling, useful);
  // an empty extent leaves an amax of 0 for every row or column there is
  if (a.spec.axis == 0) return amax_of_rows(a, tiling, useful);
  amax_of_cols(a, tiling, useful);
}

MH_NUMERICS_END
