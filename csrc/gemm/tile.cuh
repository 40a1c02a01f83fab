// What kernels of this folder share: tiles of the result in turn, rings of buffers, and results on their way through
// shared memory.
#pragma once

#include "grouped.h"
#include "hopper.cuh"

namespace mh::gemm {

constexpr int kBoxRows = 16, kBoxLine = 128;  // of results: boxes of 16 rows of 128 bytes
constexpr int kOutBytes = kBoxRows * kBoxLine;

// This program's tiles in turn; the next one's place is looked up while this one is worked on.
template <class Tiles, class F>
__device__ inline void each_tile(const Tiles& tiles, F&& f) {
  int tile = blockIdx.x;
  if (tile >= tiles.tiles) return;
  auto seen = tiles.look(tile);
  for (int next; tile < tiles.tiles; tile = next) {
    const auto w = tiles.at(tile, seen);
    next = tile + gridDim.x;
    if (next < tiles.tiles) seen = tiles.look(next);
    f(w);
  }
}

// The place in a ring of buffers; its parity turns with every round.
template <int n>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++stage == n) stage = 0, parity ^= 1;
  }
};

// What all threads of a warp have, in a uniform register, so that what it counts and chooses is, too.
__device__ inline int uniform(int x) { return __reduce_max_sync(0xffffffffu, x); }

__device__ inline float shared_float(uint32_t at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
  return x;
}

__device__ inline float2 shared_float2(uint32_t at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
  return x;
}

__device__ inline float4 shared_float4(uint32_t at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
  return x;
}

__device__ inline uint4 shared_run(uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
  return x;
}

// Where a warp and this thread are in a tile.
struct Place {
  int group, warp, lane, row;  // row: this thread's first of the tile; its second is 8 below

  __device__ Place(int group, int thread)
      : group(uniform(group)), warp(uniform(group * 4 + thread / 32)), lane(thread % 32), row(warp * 16 + lane / 4) {}
};

// Where 16 bytes of a row of a warp's results are in its shared memory: boxes of 16 rows of 128 bytes in the 128-byte
// swizzle.
__device__ inline uint32_t staged_run(uint32_t staging, int row, int byte) {
  return staging + byte / kBoxLine * kOutBytes + row * kBoxLine + ((byte % kBoxLine / 16 ^ row % 8) << 4);
}

// Rows of which there are fewer than 16; a row is as many lanes as it has runs of 16 bytes.
__device__ inline void store_few(char* out, int64_t line, int rows, int bytes, uint32_t staging, int lane) {
  if (lane * 16 >= bytes) return;
  for (int row = 0; row < rows; ++row)
    *reinterpret_cast<uint4*>(out + row * line + lane * 16) = shared_run(staged_run(staging, row, lane * 16));
}

// Results that have been staged, by one warp while the next tile is multiplied. kBoxes: of 16 rows, side by side, at a time.
template <int kCols, int kBoxes, class Tiles, class Shared>
__device__ void store_results(const Tiles& tiles, Shared at, const CUtensorMap* map, int lane) {
  const auto& p = tiles.p;
  if (p.add) return;
  const int size = p.out_type == Out::fp32 ? 4 : 2, width = kBoxLine / size;
  const int64_t line = int64_t{p.n} * size;
  Ring<1> ring;
  each_tile(tiles, [&](const auto& w) {
    for (int from = 0; from < kCols; from += kBoxes * width, ring.next()) {
      barrier_wait(at.staged(), ring.parity);
      const int cols = w.cols - from, first = w.col_out + from;
      for (int warp = 0; warp * kBoxRows < w.rows; ++warp) {
        const int rows = w.rows - warp * kBoxRows, row = w.first_out + warp * kBoxRows;
        if (rows < kBoxRows) {
          store_few(static_cast<char*>(p.out) + row * line + first * size, line, rows, cols * size, at.staging(warp), lane);
        } else if (lane == 0) {
          for (int box = 0; box < kBoxes && box * width < cols; ++box)
            store_box(map, at.staging(warp) + box * kOutBytes, first + box * width, row);
        }
      }
      if (lane == 0) {
        bulk_commit();
        bulk_wait_read();
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(at.stored());
    }
  });
}

}  // namespace mh::gemm
