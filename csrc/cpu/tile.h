// Tiles: the unit of work of the CPU loops. A tile is copied into an FP32 scratch array that fits the caches, so that
// every later loop runs over contiguous rows whatever the strides of the tensor, and payloads are written in whole
// cache lines whatever their layout.
#pragma once

#include "../numerics/elements.h"
#include "../numerics/hadamard.h"

MH_NUMERICS_BEGIN

constexpr int kTileCols = 256;     // a multiple of every block size
constexpr int kMaxTileRows = 128;  // likewise
constexpr int kCacheLine = 64;

struct Tile {
  int64_t m0, k0;
  int rows, cols;
};

struct Scratch {
  alignas(kCacheLine) float values[kMaxTileRows * kTileCols];
  alignas(kCacheLine) uint8_t codes[kMaxTileRows * kTileCols];

  float* row(int i) { return values + i * kTileCols; }
  uint8_t* code_row(int i) { return codes + i * kTileCols; }
};

// How a matrix splits into tiles. Tiles start at multiples of `rows` and `kTileCols`: blocks and the byte pairs of FP4
// never straddle two of them.
struct Tiling {
  int64_t m, k;
  int rows;
  int64_t down, across;

  int64_t count() const { return down * across; }
  Tile tile(int64_t index) const { return at(index / across, index % across); }
  Tile at(int64_t i, int64_t j) const {
    const int64_t m0 = i * rows, k0 = j * kTileCols;
    return Tile{m0, k0, static_cast<int>(m - m0 < rows ? m - m0 : rows),
                static_cast<int>(k - k0 < kTileCols ? k - k0 : kTileCols)};
  }
};

inline Tiling make_tiling(const FormatSpec& spec, int64_t m, int64_t k, bool tall) {
  const int block = spec.block_m > 1 ? spec.block_m : 1;
  const int rows = block > 64 ? block : (tall || block > 1 || spec.axis == 1 ? 64 : 16);
  return Tiling{m, k, rows, (m + rows - 1) / rows, (k + kTileCols - 1) / kTileCols};
}

// Threads worth starting for n elements: below this many a thread, waking it costs more than it saves.
inline int useful_threads(int threads, int64_t n) {
  constexpr int64_t kElementsPerThread = 1 << 14;
  const int64_t most = n / kElementsPerThread + 1;
  return static_cast<int>(threads < most ? (threads < 1 ? 1 : threads) : most);
}

template <class T>
inline void load_rows(const Matrix& x, const Tile& t, Scratch& s) {
  using Raw = typename T::Raw;
  const Raw* base = static_cast<const Raw*>(x.data) + t.m0 * x.row_stride + t.k0 * x.col_stride;
  if (x.col_stride == 1) {
    for (int i = 0; i < t.rows; ++i) {
      const Raw* __restrict src = base + i * x.row_stride;
      float* __restrict dst = s.row(i);
      for (int j = 0; j < t.cols; ++j) dst[j] = T::load(src[j]);
    }
    return;
  }
  for (int j = 0; j < t.cols; ++j) {  // column by column: contiguous reads when the rows are (a transposed tensor)
    const Raw* __restrict src = base + j * x.col_stride;
    float* __restrict dst = s.values + j;
    for (int i = 0; i < t.rows; ++i) dst[i * kTileCols] = T::load(src[i * x.row_stride]);
  }
}

inline void load_tile(const Matrix& x, const Tile& t, Scratch& s) {
  switch (x.dtype) {
    case Dtype::f32: return load_rows<Float32>(x, t, s);
    case Dtype::bf16: return load_rows<BFloat16>(x, t, s);
    case Dtype::f16: return load_rows<Float16>(x, t, s);
  }
}

template <class T>
inline void store_rows(const Matrix& x, const Tile& t, Scratch& s) {
  using Raw = typename T::Raw;
  Raw* base = static_cast<Raw*>(x.data) + t.m0 * x.row_stride + t.k0 * x.col_stride;
  if (x.col_stride == 1) {
    for (int i = 0; i < t.rows; ++i) {
      const float* __restrict src = s.row(i);
      Raw* __restrict dst = base + i * x.row_stride;
      for (int j = 0; j < t.cols; ++j) dst[j] = T::store(src[j]);
    }
    return;
  }
  for (int j = 0; j < t.cols; ++j) {
    const float* __restrict src = s.values + j;
    Raw* __restrict dst = base + j * x.col_stride;
    for (int i = 0; i < t.rows; ++i) dst[i * x.row_stride] = T::store(src[i * kTileCols]);
  }
}

inline void store_tile(const Matrix& x, const Tile& t, Scratch& s) {
  switch (x.dtype) {
    case Dtype::f32: return store_rows<Float32>(x, t, s);
    case Dtype::bf16: return store_rows<BFloat16>(x, t, s);
    case Dtype::f16: return store_rows<Float16>(x, t, s);
  }
}

// Hadamard groups along the rows of a tile; a last group under 16 stays as it is.
inline void hadamard_along_rows(const Tile& t, Scratch& s, bool inverse) {
  const int groups = t.cols / kHadamardSize;
  for (int i = 0; i < t.rows; ++i) {
    float* row = s.row(i);
    for (int g = 0; g < groups; ++g) {
      float v[kHadamardSize];
      for (int e = 0; e < kHadamardSize; ++e) v[e] = row[g * kHadamardSize + e];
      hadamard16(v, inverse);
      for (int e = 0; e < kHadamardSize; ++e) row[g * kHadamardSize + e] = v[e];
    }
  }
}

inline void hadamard_along_cols(const Tile& t, Scratch& s, bool inverse) {
  const int groups = t.rows / kHadamardSize;
  for (int g = 0; g < groups; ++g) {
    float* rows = s.row(g * kHadamardSize);
    for (int j = 0; j < t.cols; ++j) {
      float v[kHadamardSize];
      for (int e = 0; e < kHadamardSize; ++e) v[e] = rows[e * kTileCols + j];
      hadamard16(v, inverse);
      for (int e = 0; e < kHadamardSize; ++e) rows[e * kTileCols + j] = v[e];
    }
  }
}

inline void hadamard_tile(const FormatSpec& spec, const Tile& t, Scratch& s, bool inverse) {
  if (spec.axis == 0)
    hadamard_along_rows(t, s, inverse);
  else
    hadamard_along_cols(t, s, inverse);
}

MH_NUMERICS_END
