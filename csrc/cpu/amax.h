// Outer amaxes: of the tensor, of each row (rowwise) or of each column (columnwise), after the Hadamard transform where
// the format has one. FP8 formats propagate NaN, NVFP4 ignores it.
#pragma once

#include "tile.h"

MH_NUMERICS_BEGIN

inline bool keeps_nan(const FormatSpec& spec) { return spec.scale_rule != ScaleRule::e4m3_amax; }

// Magnitudes of a storage type order like their bits as well, so maxima are taken before any conversion: half the work
// for 16-bit types.
template <class T>
struct RawBits {
  using Int = uint16_t;
  static constexpr Int kAbs = 0x7fff;
  static constexpr Int kInf = static_cast<Int>(T::kInf);
};

template <>
struct RawBits<Float32> {
  using Int = int32_t;
  static constexpr Int kAbs = kAbsMask;
  static constexpr Int kInf = kInfBits;
};

// Magnitudes above this count as 0: none, or NaNs.
template <class T>
MH_HD typename RawBits<T>::Int magnitude_limit(bool keep_nan) {
  return keep_nan ? RawBits<T>::kAbs : RawBits<T>::kInf;
}

template <class T>
MH_HD typename RawBits<T>::Int raw_magnitude(typename T::Raw raw, typename RawBits<T>::Int limit) {
  typename RawBits<T>::Int bits;
  memcpy(&bits, &raw, sizeof bits);
  bits &= RawBits<T>::kAbs;
  // a mask, not a branch: compilers thread branches into the maximum and then do not vectorise it
  return static_cast<typename RawBits<T>::Int>(bits & -static_cast<int>(bits <= limit));
}

template <class T>
MH_HD int32_t raw_to_bits(typename RawBits<T>::Int bits) {
  typename T::Raw raw;
  memcpy(&raw, &bits, sizeof raw);
  return abs_bits(T::load(raw));
}

// One running maximum a lane: compilers vectorise that, but not every 16-bit reduction.
template <class T>
inline int32_t row_amax(const typename T::Raw* __restrict x, int64_t n, bool keep_nan) {
  using Int = typename RawBits<T>::Int;
  const Int limit = magnitude_limit<T>(keep_nan);
  constexpr int kRunning = kCacheLine;
  Int most[kRunning] = {};
  int64_t first = 0;
  for (; first + kRunning <= n; first += kRunning)
    for (int e = 0; e < kRunning; ++e) {
      const Int bits = raw_magnitude<T>(x[first + e], limit);
      most[e] = bits > most[e] ? bits : most[e];
    }
  Int all = 0;
  for (int e = 0; e < kRunning; ++e) all = most[e] > all ? most[e] : all;
  for (; first < n; ++first) {
    const Int bits = raw_magnitude<T>(x[first], limit);
    all = bits > all ? bits : all;
  }
  return raw_to_bits<T>(all);
}

// Maxima of n columns from k0 on, over all rows, straight from memory.
constexpr int kStripCols = 4096;  // long rows for the hardware's prefetching, maxima that stay in the first cache

template <class T>
inline void cols_amax(const AmaxArgs& a, int64_t k0, int n) {
  const auto limit = magnitude_limit<T>(keeps_nan(a.spec));
  alignas(kCacheLine) typename RawBits<T>::Int most[kStripCols] = {};
  for (int64_t i = 0; i < a.x.rows; ++i) {
    const auto* __restrict row = static_cast<const typename T::Raw*>(a.x.data) + i * a.x.row_stride + k0;
    for (int j = 0; j < n; ++j) {
      const auto bits = raw_magnitude<T>(row[j], limit);
      most[j] = bits > most[j] ? bits : most[j];
    }
  }
  for (int j = 0; j < n; ++j) a.out[k0 + j] = amax_from_bits(raw_to_bits<T>(most[j]));
}

inline void direct_cols_amax(const AmaxArgs& a, int threads) {
  const int64_t k = a.x.cols;
  const int64_t share = ((k + threads - 1) / threads + kTileCols - 1) / kTileCols * kTileCols;
  const int64_t width = share < kTileCols ? kTileCols : (share < kStripCols ? share : kStripCols);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t k0 = 0; k0 < k; k0 += width) {
    const int n = static_cast<int>(k - k0 < width ? k - k0 : width);
    switch (a.x.dtype) {
      case Dtype::bf16: cols_amax<BFloat16>(a, k0, n); break;
      case Dtype::f16: cols_amax<Float16>(a, k0, n); break;
      case Dtype::f32: cols_amax<Float32>(a, k0, n); break;
    }
  }
}

// Maxima of a loaded tile's columns, after the transform where the format has one, added to `most`.
inline void tile_cols_amax(const AmaxArgs& a, const Tile& t, Scratch& s, int32_t* __restrict most) {
  const int32_t limit = magnitude_limit<Float32>(keeps_nan(a.spec));
  int r = 0;
  if (a.spec.rht)
    for (; r + kHadamardSize <= t.rows; r += kHadamardSize) hadamard_down_amax(s.row(r), kTileCols, t.cols, limit, most);
  for (; r < t.rows; ++r) {
    const float* __restrict row = s.row(r);
    for (int j = 0; j < t.cols; ++j) most[j] = max_bits(most[j], raw_magnitude<Float32>(row[j], limit));
  }
}

// Maxima of a tile that goes through the scratch array: of each row into `rows` where they are asked for, of all as the
// result.
inline int32_t tile_amax(const AmaxArgs& a, const Tile& t, Scratch& s, int32_t* rows) {
  load_tile(a.x, t, s);
  int32_t all = 0;
  if (a.spec.axis == 1) {  // then nobody asks for rows
    alignas(kCacheLine) int32_t most[kTileCols] = {};
    tile_cols_amax(a, t, s, most);
    for (int j = 0; j < t.cols; ++j) all = max_bits(all, most[j]);
    return all;
  }
  const bool keep = keeps_nan(a.spec);
  for (int r = 0; r < t.rows; ++r) {
    const int32_t most = a.spec.rht ? hadamard_along_amax(s.row(r), t.cols, magnitude_limit<Float32>(keep))
                                    : row_amax<Float32>(s.row(r), t.cols, keep);
    rows[r] = max_bits(rows[r], most);
    all = max_bits(all, most);
  }
  return all;
}

// Rows lie contiguous and are not transformed: maxima come straight from memory.
inline bool is_direct(const AmaxArgs& a) { return a.x.col_stride == 1 && !a.spec.rht; }

template <class T>
inline int32_t strip_rows_amax(const AmaxArgs& a, const Tiling& g, int64_t strip, Scratch& s, int32_t* rows) {
  int32_t all = 0;
  if (is_direct(a)) {
    const Tile t = g.at(strip, 0);
    for (int r = 0; r < t.rows; ++r) {
      const auto* row = static_cast<const typename T::Raw*>(a.x.data) + (t.m0 + r) * a.x.row_stride;
      rows[r] = row_amax<T>(row, g.k, keeps_nan(a.spec));
      all = max_bits(all, rows[r]);
    }
    return all;
  }
  for (int64_t j = 0; j < g.across; ++j) all = max_bits(all, tile_amax(a, g.at(strip, j), s, rows));
  return all;
}

// Maxima of a strip of rows across all columns: of each row into `rows` (zeros on entry), of all as the result.
inline int32_t strip_rows_amax(const AmaxArgs& a, const Tiling& g, int64_t strip, Scratch& s, int32_t* rows) {
  switch (a.x.dtype) {
    case Dtype::bf16: return strip_rows_amax<BFloat16>(a, g, strip, s, rows);
    case Dtype::f16: return strip_rows_amax<Float16>(a, g, strip, s, rows);
    default: return strip_rows_amax<Float32>(a, g, strip, s, rows);
  }
}

// Maxima of the columns of a tile's width, down all rows, through the scratch array.
inline void strip_cols_amax(const AmaxArgs& a, const Tiling& g, int64_t strip, Scratch& s, int32_t* cols) {
  for (int64_t i = 0; i < g.down; ++i) {
    const Tile t = g.at(i, strip);
    load_tile(a.x, t, s);
    tile_cols_amax(a, t, s, cols);
  }
}

inline void amax_of_cols(const AmaxArgs& a, const Tiling& g, int threads) {
  if (is_direct(a)) return direct_cols_amax(a, threads);
#pragma omp parallel num_threads(threads)
  {
    Scratch s;
#pragma omp for schedule(static)
    for (int64_t strip = 0; strip < g.across; ++strip) {
      alignas(kCacheLine) int32_t cols[kTileCols] = {};
      strip_cols_amax(a, g, strip, s, cols);
      const int64_t k0 = strip * kTileCols;
      for (int j = 0; j < kTileCols && k0 + j < g.k; ++j) a.out[k0 + j] = amax_from_bits(cols[j]);
    }
  }
}

inline void amax_of_rows(const AmaxArgs& a, const Tiling& g, int threads) {
  int32_t all = 0;
#pragma omp parallel num_threads(threads) reduction(max : all)
  {
    Scratch s;
#pragma omp for schedule(static)
    for (int64_t strip = 0; strip < g.down; ++strip) {
      int32_t rows[kMaxTileRows] = {};
      all = max_bits(all, strip_rows_amax(a, g, strip, s, rows));
      const int64_t m0 = strip * g.rows;
      if (a.spec.outer_rows)
        for (int r = 0; r < g.rows && m0 + r < g.m; ++r) a.out[m0 + r] = amax_from_bits(rows[r]);
    }
  }
  if (!a.spec.outer_rows) *a.out = amax_from_bits(all);
}

// An empty extent leaves an amax of 0 for the tensor, and for every row or column there is.
inline void amax(const AmaxArgs& a, int threads) {
  const Tiling tiling = make_tiling(a.spec, a.x.rows, a.x.cols, a.x.col_stride != 1);
  const int useful = useful_threads(threads, a.x.rows * a.x.cols);
  if (a.spec.outer_rows && a.spec.axis == 1) return amax_of_cols(a, tiling, useful);
  amax_of_rows(a, tiling, useful);
}

MH_NUMERICS_END
