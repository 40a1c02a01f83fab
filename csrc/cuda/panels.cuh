// Row amaxes inside the cast kernel: the rows of a panel are read for their amaxes a few panels before the panel is cast,
// so that the cast finds it in the L2 and the tensor leaves device memory once.
//
// Work is handed out in the order of the item number: the look at panel p comes before the casts of panel p - kAhead. A
// cast waits for the counter of its panel. What it waits for has a lower number, so that it runs or has run: thread
// blocks start in the order of their index.
#pragma once

#include "cast.h"
#include "largest.cuh"

namespace mh::cuda {

constexpr int kLooksAtOnce = 2;                     // rows that a warp loads before it uses them
constexpr int kLookRows = kTile / (kThreads / 32);  // rows of a warp

struct Item {
  bool look, cast;
  uint32_t panel, at;  // a look's number in its panel, a cast's tile
};

__device__ inline Item item_of(const CastArgs& a, uint32_t index) {
  if (!a.panels.done) return {false, true, 0, index};
  const Panels& p = a.panels;
  const uint32_t first = min(kAhead, p.count) * p.looks;
  if (index < first) return {true, false, index / p.looks, index % p.looks};
  const uint32_t each = p.looks + a.tiling.across, panel = (index - first) / each, at = (index - first) % each;
  if (at >= p.looks) return {false, true, panel, panel * a.tiling.across + at - p.looks};
  return {panel + kAhead < p.count, false, panel + kAhead, at};
}

template <class T>
__device__ void look(const CastArgs& a, const Item& item) {
  const int lane = threadIdx.x % 32;
  const int64_t m0 = static_cast<int64_t>(item.panel) * kTile + threadIdx.x / 32 * kLookRows;
  const auto* base = static_cast<const typename T::Raw*>(a.x.data);
  const Target target{nullptr, true, false, a.row.spec.scale_rule != ScaleRule::e4m3_amax};
  int64_t k[kLookLines];
  int n[kLookLines];  // elements inside
  MH_UNROLL
  for (int l = 0; l < kLookLines; ++l) {
    k[l] = static_cast<int64_t>(item.at) * kLookCols + (l * 32 + lane) * kLine;
    n[l] = static_cast<int>(min(max(a.x.cols - k[l], int64_t{0}), int64_t{kLine}));
  }
  int32_t mine = 0;  // lane r keeps row r
#pragma unroll 1
  for (int r = 0; r < kLookRows; r += kLooksAtOnce) {
    Pair<T> row[kLooksAtOnce][kLookLines][kLine / 2];
    MH_UNROLL
    for (int u = 0; u < kLooksAtOnce; ++u) {
      const bool inside = m0 + r + u < a.x.rows;
      MH_UNROLL
      for (int l = 0; l < kLookLines; ++l) {
        const int some = inside ? n[l] : 0;
        read_pairs<T>(base + (some ? (m0 + r + u) * a.x.row_stride + k[l] * a.x.col_stride : 0), a.x.col_stride, some,
                      a.vector, row[u][l]);
      }
    }
    MH_UNROLL
    for (int u = 0; u < kLooksAtOnce; ++u) {
      Largest<T> most;
      most.add_raw(row[u]);
      const int32_t bits = __reduce_max_sync(0xffffffffu, most.get(target));
      if (lane == r + u) mine = bits;
    }
  }
  if (lane < kLookRows && m0 + lane < a.x.rows) atomicMax(reinterpret_cast<int32_t*>(a.panels.amax) + m0 + lane, mine);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&a.panels.done[item.panel], 1);
}

// Returns once the amaxes of the panel's rows are there; one thread calls it, before a barrier.
__device__ inline void wait_for(const Panels& p, uint32_t panel) {
  while (load_acquire(&p.done[panel]) < static_cast<int32_t>(p.looks)) {
  }
}

}  // namespace mh::cuda
