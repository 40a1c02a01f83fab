// Payload layouts: row-major or transposed, one code a byte or two (FP4).
#pragma once

#include "tile.h"

MH_NUMERICS_BEGIN

MH_HD int64_t packed_bytes(int64_t n) { return (n + 1) / 2; }

// Even element in the low nibble; an odd tail leaves the high one 0.
inline void pack_row(const uint8_t* __restrict codes, uint8_t* __restrict out, int n) {
  for (int j = 0; j < n / 2; ++j) {
    uint16_t pair;
    memcpy(&pair, codes + 2 * j, sizeof pair);
    out[j] = static_cast<uint8_t>(pair | pair >> 4);
  }
  if (n % 2) out[n / 2] = codes[n - 1];
}

inline void unpack_row(const uint8_t* __restrict in, uint8_t* __restrict codes, int n) {
  for (int j = 0; j < n / 2; ++j) {
    const uint16_t pair = static_cast<uint16_t>((in[j] & 15) | (in[j] >> 4) << 8);
    memcpy(codes + 2 * j, &pair, sizeof pair);
  }
  if (n % 2) codes[n - 1] = in[n / 2] & 15;
}

// Pairs of rows into one, in place: row i of the result holds rows 2i (low) and 2i + 1.
inline int pack_down(uint8_t* codes, int rows, int cols) {
  for (int i = 0; i < rows; i += 2) {
    const uint8_t* lo = codes + i * kTileCols;
    const uint8_t* hi = lo + kTileCols;
    uint8_t* out = codes + i / 2 * kTileCols;
    if (i + 1 < rows)
      for (int j = 0; j < cols; ++j) out[j] = static_cast<uint8_t>(lo[j] | hi[j] << 4);
    else
      for (int j = 0; j < cols; ++j) out[j] = lo[j];
  }
  return (rows + 1) / 2;
}

inline void unpack_up(uint8_t* codes, int rows, int cols) {
  for (int i = (rows - 1) / 2 * 2; i >= 0; i -= 2) {
    const uint8_t* in = codes + i / 2 * kTileCols;
    uint8_t* lo = codes + i * kTileCols;
    uint8_t* hi = lo + kTileCols;
    if (i + 1 < rows)
      for (int j = 0; j < cols; ++j) hi[j] = in[j] >> 4;
    for (int j = 0; j < cols; ++j) lo[j] = in[j] & 15;
  }
}

// Scratch codes of a tile to the payload of an (m, k) tensor.
inline void store_codes(const Payload& p, bool packed, int64_t m, int64_t k, const Tile& t, Scratch& s) {
  const int64_t extent = p.transposed ? m : k, lines = p.transposed ? k : m;
  const int64_t ld = packed ? packed_bytes(extent) : extent;
  const bool stream = wants_stream(p.codes, ld, lines * ld);
  if (p.transposed) {
    const int rows = packed ? pack_down(s.codes, t.rows, t.cols) : t.rows;
    uint8_t* base = p.codes + t.k0 * ld + (packed ? t.m0 / 2 : t.m0);
    transpose_bytes(s.codes, kTileCols, s.turned, kMaxTileRows, rows, t.cols);
    for (int j = 0; j < t.cols; ++j) put(base + j * ld, s.turned + j * kMaxTileRows, rows, stream);
    return;
  }
  uint8_t* base = p.codes + t.m0 * ld + (packed ? t.k0 / 2 : t.k0);
  for (int i = 0; i < t.rows; ++i) {
    if (packed) pack_row(s.code_row(i), s.turned, t.cols);
    put(base + i * ld, packed ? s.turned : s.code_row(i), packed ? packed_bytes(t.cols) : t.cols, stream);
  }
}

inline void load_codes(const Payload& p, bool packed, int64_t m, int64_t k, const Tile& t, Scratch& s) {
  if (p.transposed) {
    const int64_t ld = packed ? packed_bytes(m) : m;
    const int rows = packed ? (t.rows + 1) / 2 : t.rows;
    transpose_bytes(p.codes + t.k0 * ld + (packed ? t.m0 / 2 : t.m0), ld, s.codes, kTileCols, t.cols, rows);
    if (packed) unpack_up(s.codes, t.rows, t.cols);
    return;
  }
  const int64_t ld = packed ? packed_bytes(k) : k;
  const uint8_t* base = p.codes + t.m0 * ld + (packed ? t.k0 / 2 : t.k0);
  for (int i = 0; i < t.rows; ++i) {
    if (packed)
      unpack_row(base + i * ld, s.code_row(i), t.cols);
    else
      memcpy(s.code_row(i), base + i * ld, static_cast<size_t>(t.cols));
  }
}

MH_NUMERICS_END
