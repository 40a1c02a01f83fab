// Strips: 16 rows of a tile of 128 x 128 that a warp holds in registers, four columns a lane. Reading them, and their
// amaxes: columns' are asked of the thread block's warps, rows' of a warp's lanes, eight of which hold 32 columns.
#pragma once

#include "line.cuh"
#include "tile.cuh"

namespace mh::cuda {

constexpr int kWarps = kThreads / kWarp;
constexpr int kWarpRows = kTile / kWarps;  // a line along M
constexpr int kLaneCols = kTile / kWarp;
constexpr int kFine = 32;                     // the side of the smallest blocks of scales
constexpr int kFineLanes = kFine / kLaneCols;  // of a row
constexpr int kFineWarps = kFine / kWarpRows;  // of a column
constexpr int kFinesAcross = kTile / kFine;
static_assert(kWarpRows == kLine && kLaneCols == 4 && kWarpRows == 2 * kFineLanes);

template <class T>
struct alignas(8) Four {
  Pair<T> of[kLaneCols / 2];
};

template <class T>
struct StripShared {
  uint4 codes[kTile * kLinesAcross];  // of columns; what is 16 bytes
  Four<T> amax[kWarps][kWarp];
  alignas(16) float of_column[kFinesAcross][kTile];  // multipliers; the first of four where blocks are not fine
  alignas(16) float of_row[kTile][kFinesAcross];     // all four, whatever the blocks are
  alignas(16) int32_t most[kWarps];
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

// What column_amax reads, of this warp; a barrier ends it.
template <class T>
__device__ __forceinline__ void share_amaxes(const Strip<T>& v, StripShared<T>& sh) {
  PairAmax<T> most[kLaneCols / 2];
  MH_UNROLL
  for (int r = 0; r < kWarpRows; ++r)
    for (int h = 0; h < kLaneCols / 2; ++h) most[h].add(v[r].of[h]);
  sh.amax[threadIdx.x / kWarp][threadIdx.x % kWarp] = {{most[0].pair(), most[1].pair()}};
}

// The amax of a column over some warps' rows.
template <int warps, class T>
__device__ __forceinline__ int32_t column_amax(int column, int first_warp, const StripShared<T>& sh) {
  PairAmax<T> all;
  MH_UNROLL
  for (int w = 0; w < warps; ++w) all.add(sh.amax[first_warp + w][column / kLaneCols].of[column / 2 % 2]);
  return column % 2 ? all.hi() : all.lo();
}

// The larger magnitudes of this lane's and another's.
template <class T>
__device__ __forceinline__ uint32_t max_with(uint32_t mine, uint32_t sent, int lanes_away) {
  return max_magnitudes<T>(mine, __shfl_xor_sync(kAllLanes, sent, lanes_away));
}

// Amaxes over 32 columns, those of this lane and seven more: of the warp's rows fine_row() and fine_row() + 1, in the
// low and the high half. Of strips side by side: over 32 columns of each. The eight lanes hand each other the rows that
// are not their own, two rows a word.
__device__ __forceinline__ int fine_row() { return threadIdx.x % kFineLanes * 2; }

template <class T, int strips>
__device__ __forceinline__ uint32_t fine_amaxes(const Strip<T> (&v)[strips]) {
  const auto over = [&](int r) {
    uint32_t most = v[0][r].of[0].w[0];
    MH_UNROLL
    for (int p = 1; p < strips * kLaneCols / 2; ++p) most = max_magnitudes<T>(most, v[p / 2][r].of[p % 2].w[0]);
    return most;
  };
  uint32_t rows[kFineLanes];
  MH_UNROLL
  for (int n = 0; n < kFineLanes; ++n) {
    const uint32_t even = over(2 * n), odd = over(2 * n + 1);
    rows[n] = max_magnitudes<T>(permute(even, odd, 0x5410), permute(even, odd, 0x7632));
  }
  MH_UNROLL
  for (int away = kFineLanes / 2; away > 0; away /= 2) {
    const bool upper = threadIdx.x & away;
    MH_UNROLL
    for (int n = 0; n < away; ++n)
      rows[n] = max_with<T>(upper ? rows[n + away] : rows[n], upper ? rows[n] : rows[n + away], away);
  }
  return rows[0];
}

// The amax of the warp's row own_row(), over the columns of all lanes, of strips side by side. The second half of the
// lanes has the rows of the first.
__device__ __forceinline__ int own_row() { return fine_row() + threadIdx.x / kFineLanes % 2; }

template <class T, int strips>
__device__ __forceinline__ int32_t row_amax(const Strip<T> (&v)[strips]) {
  PairAmax<T> most;
  most.most[0] = fine_amaxes<T>(v);
  MH_UNROLL
  for (int away = kFineLanes; away < kWarp; away *= 2) most.most[0] = max_with<T>(most.most[0], most.most[0], away);
  return own_row() % 2 ? most.hi() : most.lo();
}

// The amax of a warp's strip.
template <class T>
__device__ __forceinline__ int32_t warp_amax(const Strip<T>& v) {
  PairAmax<T> most;
  MH_UNROLL
  for (int r = 0; r < kWarpRows; ++r)
    for (int h = 0; h < kLaneCols / 2; ++h) most.add(v[r].of[h]);
  return __reduce_max_sync(kAllLanes, most.both());
}

}  // namespace mh::cuda
