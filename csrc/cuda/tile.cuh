// Tiles in shared memory: 128 x 128 elements as they are in global memory, and the codes of a column payload on their
// way out. Both are swizzled, 16 bytes (8 for FP4 codes) at a time, so that rows and columns are read without conflicts.
#pragma once

#include "launch.h"
#include "line.cuh"
#include "matrix.h"

namespace mh::cuda {

constexpr int kTile = 128;  // a multiple of every block side
constexpr int kLinesAcross = kTile / kLine;
constexpr int kRowsAtOnce = kThreads / kLinesAcross;  // rows that a thread block takes line by line

struct Tile {
  int64_t m0, k0;
  int rows, cols;
  int64_t lines = 0;  // of outer scales of columns, before the first of this tile's group
};

// How a matrix splits into tiles, one a thread block. `backwards`: the last one first. `halves`: the tiles of a row's halves
// in turn, so that what both read is still in the L2 for the second.
template <int kRows, int kCols>
struct TilingBy {
  int64_t m, k;
  uint32_t across, count;
  bool backwards, halves;

  __device__ Tile tile(uint32_t index) const {
    const uint32_t at = backwards ? count - 1 - index : index, row = at / across, turn = at - row * across;
    const uint32_t col = halves ? turn / 2 + turn % 2 * ((across + 1) / 2) : turn;
    const int64_t m0 = static_cast<int64_t>(row) * kRows, k0 = static_cast<int64_t>(col) * kCols;
    return Tile{m0, k0, static_cast<int>(min(m - m0, static_cast<int64_t>(kRows))),
                static_cast<int>(min(k - k0, static_cast<int64_t>(kCols)))};
  }
};
using Tiling = TilingBy<kTile, kTile>;

template <int kRows = kTile, int kCols = kTile>
TilingBy<kRows, kCols> make_tiling(int64_t m, int64_t k, bool backwards) {
  const int64_t across = (k + kCols - 1) / kCols, count = across * ((m + kRows - 1) / kRows);
  if (count > kMaxGrid / 2) throw std::runtime_error("megatron_hybrid._C_cuda: a matrix of more than 2^44 elements");
  return {m, k, static_cast<uint32_t>(across), static_cast<uint32_t>(count), backwards, false};
}

template <class T>
constexpr int kTileBytes = kTile * kTile * static_cast<int>(sizeof(typename T::Raw));
constexpr int kStagingBytes = kTile * kTile;

// Byte offset in the tile of 16 bytes: row i, the chunk-th of its 16 or 32.
template <class T>
__device__ __forceinline__ int chunk_offset(int i, int chunk) {
  constexpr int kChunks = kTile * static_cast<int>(sizeof(typename T::Raw)) / kVector;
  return (i * kChunks + (chunk ^ (chunk >> 3))) * kVector;
}

template <class T>
__device__ __forceinline__ int element_offset(int i, int j) {
  constexpr int kPerChunk = kVector / static_cast<int>(sizeof(typename T::Raw));
  return chunk_offset<T>(i, j / kPerChunk) + j % kPerChunk * static_cast<int>(sizeof(typename T::Raw));
}

// Starts to fill a tile, with zeros where the matrix ends; wait_copies and a barrier end it. `vector`: rows are contiguous and
// their 16-byte chunks aligned. row_of(i): elements from the matrix's first to the tile's row i.
template <class T, class RowOf>
__device__ void start_tile(const Matrix& x, bool vector, const Tile& t, char* tile, RowOf&& row_of) {
  using Raw = typename T::Raw;
  constexpr int kPerChunk = kVector / static_cast<int>(sizeof(Raw)), kChunks = kTile / kPerChunk;
  const Raw* base = static_cast<const Raw*>(x.data) + t.k0 * x.col_stride;
  if (vector) {
    MH_UNROLL
    for (int n = 0; n < kTile * kChunks / kThreads; ++n) {
      const int at = n * kThreads + threadIdx.x, i = at / kChunks, chunk = at % kChunks;
      const int left = i < t.rows ? (t.cols - chunk * kPerChunk) * static_cast<int>(sizeof(Raw)) : 0;
      const int valid = min(max(left, 0), kVector);
      copy_async<kVector>(tile + chunk_offset<T>(i, chunk), valid ? base + row_of(i) + chunk * kPerChunk : base, valid);
    }
    return;
  }
  const bool down = x.row_stride == 1 && x.col_stride != 1;  // neighbouring threads take neighbours in memory
  for (int at = threadIdx.x; at < kTile * kTile; at += kThreads) {
    const int i = down ? at % kTile : at / kTile, j = down ? at / kTile : at % kTile;
    const bool inside = i < t.rows && j < t.cols;
    *reinterpret_cast<Raw*>(tile + element_offset<T>(i, j)) = inside ? base[row_of(i) + j * x.col_stride] : Raw{};
  }
}

// Byte offset in the tile of the line along K that starts at (i, j): of its first chunk. That of its c-th differs from it by
// c chunks in an exclusive or.
template <class T>
__device__ __forceinline__ int line_offset(int i, int j) {
  return element_offset<T>(i, j);
}

template <class T>
__device__ __forceinline__ void load_line(const char* tile, int offset, Pair<T> (&line)[kLine / 2]) {
  constexpr int kPerChunk = kVector / static_cast<int>(sizeof(typename T::Raw));
  MH_UNROLL
  for (int c = 0; c < kLine / kPerChunk; ++c) {
    const uint4 v = *reinterpret_cast<const uint4*>(tile + (offset ^ c * kVector));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    MH_UNROLL
    for (int w = 0; w < 4; ++w) line[(4 * c + w) / Pair<T>::kWords].w[(4 * c + w) % Pair<T>::kWords] = words[w];
  }
}

template <class T>
__device__ __forceinline__ void store_line(char* tile, int offset, const float (&x)[kLine]) {
  constexpr int kPerChunk = kVector / static_cast<int>(sizeof(typename T::Raw));
  Pair<T> line[kLine / 2];
  store_pairs(x, line);
  MH_UNROLL
  for (int c = 0; c < kLine / kPerChunk; ++c) {
    uint32_t words[4];
    MH_UNROLL
    for (int w = 0; w < 4; ++w) words[w] = line[(4 * c + w) / Pair<T>::kWords].w[(4 * c + w) % Pair<T>::kWords];
    *reinterpret_cast<uint4*>(tile + (offset ^ c * kVector)) = {words[0], words[1], words[2], words[3]};
  }
}

// The elements (i, j) and (i, j + 1), j even.
template <class T>
__device__ __forceinline__ Pair<T> load_pair(const char* tile, int i, int j) {
  return *reinterpret_cast<const Pair<T>*>(tile + element_offset<T>(i, j));
}

// Writes the first n bytes of some words in the widest steps of up to `width` bytes that are whole.
template <int kWords>
__device__ __forceinline__ void put_bytes(uint8_t* to, const uint32_t (&w)[kWords], int n, int width) {
  if (n >= kWords * 4 && width >= 4) {
    if (kWords == 4 && width >= 16) {
      *reinterpret_cast<uint4*>(to) = {w[0], w[1], w[kWords - 2], w[kWords - 1]};
    } else if (width >= 8) {
      MH_UNROLL
      for (int i = 0; i < kWords; i += 2) *reinterpret_cast<uint2*>(to + 4 * i) = {w[i], w[i + 1]};
    } else {
      MH_UNROLL
      for (int i = 0; i < kWords; ++i) *reinterpret_cast<uint32_t*>(to + 4 * i) = w[i];
    }
    return;
  }
  MH_UNROLL
  for (int b = 0; b < kWords * 4; ++b)
    if (b < n) to[b] = static_cast<uint8_t>(w[b / 4] >> (b % 4 * 8));
}

// Reads the first n bytes of some words, zeros after them.
template <int kWords>
__device__ __forceinline__ void get_bytes(const uint8_t* from, uint32_t (&w)[kWords], int n, int width) {
  MH_UNROLL
  for (int i = 0; i < kWords; ++i) w[i] = 0;
  if (n >= kWords * 4 && width >= 4) {
    MH_UNROLL
    for (int i = 0; i < kWords; ++i) w[i] = reinterpret_cast<const uint32_t*>(from)[i];
  } else {
    MH_UNROLL
    for (int b = 0; b < kWords * 4; ++b)
      if (b < n) w[b / 4] |= static_cast<uint32_t>(from[b]) << (b % 4 * 8);
  }
}

// Offset in the staging area of a unit: the codes of a line, the unit-th of eight in a stored row.
template <Kind kind>
__device__ __forceinline__ int unit_offset(int row, int unit) {
  return (row * kLinesAcross + (unit ^ (row >> 1 & 7))) * Codes<kind>::kBytes;
}

template <Kind kind>
__device__ __forceinline__ void stage_codes(uint8_t* staging, int row, int unit, const Codes<kind>& codes) {
  uint8_t* to = staging + unit_offset<kind>(row, unit);
  if constexpr (kIsFp4<kind>)
    *reinterpret_cast<uint2*>(to) = {codes.w[0], codes.w[1]};
  else
    *reinterpret_cast<uint4*>(to) = {codes.w[0], codes.w[1], codes.w[2], codes.w[3]};
}

// The codes of two neighbouring columns j, j + 1 (j even), rows i to i + 15, into rows of the stored matrix.
template <Kind kind>
__device__ __forceinline__ void stage_pairs(uint8_t* staging, int i, int j, const Codes<kind> (&codes)[2]) {
  MH_UNROLL
  for (int e = 0; e < kLine; ++e) {
    uint8_t* to = staging + unit_offset<kind>(i + e, j / kLine);
    if constexpr (kIsFp4<kind>) {
      const uint32_t low = codes[0].w[e / 8] >> (e % 8 * 4) & 15u, high = codes[1].w[e / 8] >> (e % 8 * 4) & 15u;
      to[j % kLine / 2] = static_cast<uint8_t>(low | high << 4);
    } else {
      const uint32_t both = permute(codes[0].w[e / 4], codes[1].w[e / 4], (4 + e % 4) << 4 | e % 4);
      *reinterpret_cast<uint16_t*>(to + j % kLine) = static_cast<uint16_t>(both);
    }
  }
}

// Starts to bring stored codes to the staging area, zeros where the tensor ends; wait_copies and a barrier end it. The
// counterpart of copy_out.
template <Kind kind>
__device__ void start_codes(uint8_t* staging, const uint8_t* from, int64_t pitch, int rows, int bytes, int width) {
  constexpr int kUnit = Codes<kind>::kBytes;
  MH_UNROLL
  for (int n = 0; n < kTile * kLinesAcross / kThreads; ++n) {
    const int at = n * kThreads + threadIdx.x, row = at / kLinesAcross, unit = at % kLinesAcross;
    const int valid = row < rows ? min(max(bytes - unit * kUnit, 0), kUnit) : 0;
    const uint8_t* first = valid ? from + row * pitch + unit * kUnit : from;
    uint8_t* to = staging + unit_offset<kind>(row, unit);
    if (width >= kUnit) {
      copy_async<kUnit>(to, first, valid);
      continue;
    }
    Codes<kind> codes;
    get_bytes(first, codes.w, valid, width);
    stage_codes<kind>(staging, row, unit, codes);
  }
}

// Staged codes to global memory, 16 bytes a thread. `rows` stored rows of `bytes` bytes each lie in the tensor.
template <Kind kind>
__device__ void copy_out(const uint8_t* staging, uint8_t* to, int64_t pitch, int rows, int bytes, int width) {
  constexpr int kPieces = kTile * kTile / kLine * Codes<kind>::kBytes / kVector;  // in all
  constexpr int kAcross = kPieces / kTile;
  MH_UNROLL
  for (int n = 0; n < kPieces / kThreads; ++n) {
    const int at = n * kThreads + threadIdx.x, row = at / kAcross, piece = at % kAcross;
    uint32_t w[4];
    if constexpr (kIsFp4<kind>) {
      const uint2 a = *reinterpret_cast<const uint2*>(staging + unit_offset<kind>(row, 2 * piece));
      const uint2 b = *reinterpret_cast<const uint2*>(staging + unit_offset<kind>(row, 2 * piece + 1));
      w[0] = a.x, w[1] = a.y, w[2] = b.x, w[3] = b.y;
    } else {
      const uint4 v = *reinterpret_cast<const uint4*>(staging + unit_offset<kind>(row, piece));
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
    if (row < rows) put_bytes(to + row * pitch + piece * kVector, w, bytes - piece * kVector, width);
  }
}

}  // namespace mh::cuda
