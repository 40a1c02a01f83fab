// Strips: 16 rows of a tile of 128 x 128 that a warp holds in registers, four columns a lane. Reading them, and their amaxes:
// columns' are asked of the thread block's warps, rows' of a warp's lanes.
#pragma once

#include "line.cuh"
#include "tile.cuh"

namespace mh::cuda {

constexpr int kWarps = kThreads / kWarp;
constexpr int kWarpRows = kTile / kWarps;  // a line along M
constexpr int kLaneCols = kTile / kWarp;
static_assert(kWarpRows == kLine && kLaneCols == 4);

template <class T>
struct alignas(8) Four {
  Pair<T> of[kLaneCols / 2];
};

template <class T>
struct StripShared {
  uint4 codes[kTile * kLinesAcross];  // of columns; what is 16 bytes
  Four<T> amax[kWarps][kWarp];
  alignas(16) float of_column[kTile];  // multipliers
  alignas(16) float of_row[kTile];
  alignas(16) uint32_t source[kTile];  // rows of the tensor
  float weight[kTile];
};

// Which 16 bytes of the codes a column's rows 16 * warp to 16 * warp + 15 are. A warp writes four columns a lane, where
// `unit_offset` (tile.cuh) would have two lanes meet in a bank.
__device__ __forceinline__ int codes_at(int column, int warp) {
  return column * kLinesAcross + (warp ^ (column / kLaneCols & 7));
}

template <class T>
using Strip = Four<T>[kWarpRows];

// Reads the four numbers of a lane in some rows, four rows on their way at once.
template <class T>
struct Reader {
  const char* first;
  uint32_t stride;  // bytes

  __device__ Reader(const void* data, int64_t row_stride, int64_t column)
      : first(reinterpret_cast<const char*>(static_cast<const typename T::Raw*>(data) + column)),
        stride(static_cast<uint32_t>(row_stride) * static_cast<uint32_t>(sizeof(typename T::Raw))) {}

  template <int n>
  __device__ __forceinline__ void read(const uint32_t* source, Four<T> (&to)[n]) const {
    MH_UNROLL
    for (int q = 0; q < n; q += 4) {
      const uint4 rows = *reinterpret_cast<const uint4*>(source + q);
      const uint32_t row[4] = {rows.x, rows.y, rows.z, rows.w};
      MH_UNROLL
      for (int r = 0; r < 4; ++r) {
        const uint2 some = *reinterpret_cast<const uint2*>(first + static_cast<uint64_t>(row[r]) * stride);
        memcpy(&to[q + r], &some, sizeof some);
      }
    }
  }
};

// Zeros where the block or the matrix ends.
template <class T>
__device__ __forceinline__ void cut(const Tile& t, Strip<T>& v) {
  if (t.rows == kTile && t.cols == kTile) return;
  const int i0 = threadIdx.x / kWarp * kWarpRows, j = threadIdx.x % kWarp * kLaneCols;
  MH_UNROLL
  for (int r = 0; r < kWarpRows; ++r)
    if (i0 + r >= t.rows || j >= t.cols) v[r] = {};
}

// The amax of the tile's column with this thread's number, in the first threads.
template <class T>
__device__ __forceinline__ int32_t column_amax(const Strip<T>& v, StripShared<T>& sh) {
  const int c = threadIdx.x;
  PairAmax<T> most[kLaneCols / 2], all;
  MH_UNROLL
  for (int r = 0; r < kWarpRows; ++r)
    for (int h = 0; h < kLaneCols / 2; ++h) most[h].add(v[r].of[h]);
  sh.amax[c / kWarp][c % kWarp] = {{most[0].pair(), most[1].pair()}};
  __syncthreads();
  if (c < kTile) {
    MH_UNROLL
    for (int w = 0; w < kWarps; ++w) all.add(sh.amax[w][c / kLaneCols].of[c / 2 % 2]);
  }
  return c % 2 ? all.hi() : all.lo();
}

// The amax of the warp's row with this lane's number, in the first lanes, of strips side by side.
template <class T, int strips>
__device__ __forceinline__ int32_t row_amax(const Strip<T> (&v)[strips]) {
  int32_t mine = 0;
  MH_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    PairAmax<T> most;
    MH_UNROLL
    for (int n = 0; n < strips * kLaneCols / 2; ++n) most.add(v[n / 2][r].of[n % 2]);
    const int32_t amax = __reduce_max_sync(kAllLanes, most.both());
    if (static_cast<int>(threadIdx.x % kWarp) == r) mine = amax;
  }
  return mine;
}

}  // namespace mh::cuda
