// Tiles: the unit of work of the CPU loops. A tile is copied into an FP32 scratch array that fits the caches, so that
// every later loop runs over contiguous rows whatever the strides of the tensor, and payloads are written in whole
// cache lines whatever their layout.
#pragma once

#include "../numerics/elements.h"
#include "stream.h"

MH_NUMERICS_BEGIN

constexpr int kTileCols = 256;     // a multiple of every block size
constexpr int kMaxTileRows = 128;  // likewise

struct Tile {
  int64_t m0, k0;
  int rows, cols;
};

struct Scratch {
  alignas(kCacheLine) float values[kMaxTileRows * kTileCols];
  alignas(kCacheLine) uint8_t codes[kMaxTileRows * kTileCols];
  alignas(kCacheLine) uint8_t turned[kMaxTileRows * kTileCols];  // codes transposed, or a row on its way out

  float* row(int i) { return values + i * kTileCols; }
  uint8_t* code_row(int i) { return codes + i * kTileCols; }
};

// How a matrix splits into tiles of `rows` x kTileCols. They start at multiples of their sides: blocks and the byte pairs of
// FP4 never straddle two of them. They are numbered in bands of `band` rows of tiles, down each band before across it: a
// transposed payload is then written in long runs, and few memory pages are in use at a time.
struct Tiling {
  int64_t m, k;
  int rows;
  int64_t down, across, band;

  int64_t count() const { return down * across; }
  Tile tile(int64_t index) const {
    const int64_t first = index / (band * across) * band, in_band = index % (band * across);
    const int64_t height = down - first < band ? down - first : band;
    return at(first + in_band % height, in_band / height);
  }
  Tile at(int64_t i, int64_t j) const {
    const int64_t m0 = i * rows, k0 = j * kTileCols;
    return Tile{m0, k0, static_cast<int>(m - m0 < rows ? m - m0 : rows),
                static_cast<int>(k - k0 < kTileCols ? k - k0 : kTileCols)};
  }
};

// `tall`: the other side is written or read down the columns. Its tiles are as high as a cache line is long, FP4's twice
// that; others are as low as the blocks allow, to read and write long rows.
inline Tiling make_tiling(const FormatSpec& spec, int64_t m, int64_t k, bool tall) {
  constexpr int kBandRows = 512;
  const int block = spec.block_m > 1 ? spec.block_m : 1;
  const int line = spec.element == Element::e2m1 ? 2 * kCacheLine : kCacheLine;
  const int low = block > 1 || spec.axis == 1 ? (block > kCacheLine ? block : kCacheLine) : 4;
  const int rows = tall && line > low ? line : low;
  return Tiling{m, k, rows, (m + rows - 1) / rows, (k + kTileCols - 1) / kTileCols, tall ? kBandRows / rows : 1};
}

// Threads worth starting for n elements: below this many a thread, waking it costs more than it saves.
inline int useful_threads(int threads, int64_t n) {
  constexpr int64_t kElementsPerThread = 1 << 14;
  const int64_t most = n / kElementsPerThread + 1;
  return static_cast<int>(threads < most ? (threads < 1 ? 1 : threads) : most);
}

// Asks for a row of a tile before it is needed: hardware sees runs too short to look ahead by itself.
inline void prefetch_row(const Matrix& x, const Tile& t, int i) {
  if (x.col_stride != 1 || i >= t.rows) return;
  const int64_t size = x.dtype == Dtype::f32 ? 4 : 2;
  const char* row = static_cast<const char*>(x.data) + ((t.m0 + i) * x.row_stride + t.k0) * size;
  for (int64_t at = 0; at < t.cols * size; at += kCacheLine) __builtin_prefetch(row + at, 0, 2);
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
    const int64_t row_bytes = x.row_stride * static_cast<int64_t>(sizeof(Raw));
    const bool stream = x.cols * sizeof(Raw) % kCacheLine == 0 && wants_stream(x.data, row_bytes, x.rows * row_bytes);
    Raw* __restrict row = reinterpret_cast<Raw*>(s.turned);
    for (int i = 0; i < t.rows; ++i) {
      const float* __restrict src = s.row(i);
      for (int j = 0; j < t.cols; ++j) row[j] = T::store(src[j]);
      put(base + i * x.row_stride, row, t.cols * static_cast<int64_t>(sizeof(Raw)), stream);
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

// Hadamard groups along the contraction axis of a tile; a last group under 16 stays as it is.
inline void hadamard_tile(const FormatSpec& spec, const Tile& t, Scratch& s, bool inverse) {
  if (spec.axis == 0) {
    for (int i = 0; i < t.rows; ++i) hadamard_along(s.row(i), t.cols, inverse);
    return;
  }
  for (int i = 0; i + kHadamardSize <= t.rows; i += kHadamardSize) hadamard_down(s.row(i), kTileCols, t.cols, inverse);
}

MH_NUMERICS_END
