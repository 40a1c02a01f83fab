// FP8 GEMMs of all groups on Hopper: a persistent program a multiprocessor, whose first warpgroup fetches and whose other
// two multiply, each 64 rows of a tile of 128 x 256. Sums leave the tensor cores every 128 products and are scaled and
// added up in FP32 (kinds but row_fast), 64 columns at a time while the next 64 are multiplied. A warp of the first stores
// the results, which wait for it in shared memory, while the next tile is multiplied.
#include "grouped.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>

#include "maps.h"
#include "tile.cuh"

namespace mh::gemm {
namespace {

constexpr int kRows = 128, kCols = 256, kDeep = 128;  // a tile, and codes of the contraction at a time
constexpr int kGroupRows = 64;                        // a warpgroup's
constexpr int kPart = 64, kParts = kCols / kPart;     // columns that are multiplied at a time
constexpr int kWarps = 8;                             // that multiply
constexpr int kGroupThreads = 128, kThreads = 3 * kGroupThreads;
constexpr int kFetchRegisters = 40, kProductRegisters = 232;
constexpr int kScaleThreads = 64;  // of the fetching warpgroup, its last two warps; the first fetches codes, the second stores
constexpr int kStages = 3;
constexpr int kABytes = kRows * kDeep, kBBytes = kCols * kDeep, kBoxBytes = kABytes + kBBytes;
constexpr int kScales = kRows + kCols;         // floats a stage, or a tile where they are of whole rows
constexpr int kBoxes = 4;                      // of a warp's results
constexpr int kStaging = kWarps * kBoxes * kOutBytes;
constexpr int kTold = 2;  // tiles ahead
constexpr int kTileBytes = 32;
constexpr int kBarriers = (2 * (kStages + kTold) + 2) * 8;
constexpr int kStageBytes = kBoxBytes + kScales * 4;
constexpr int kShared = kStages * kStageBytes + kStaging + kTold * kTileBytes + kBarriers + 1024;  // 1024: to align
static_assert(kShared <= 227 << 10);

// One tile: where its operands, scales and results are.
struct Work {
  int a_row, b_row, first, steps;  // rows of A and B; blocks of the contraction
  int rows, cols;                  // of the result that exist
  int first_out, col_out;          // where they are among all results
  int64_t a_scale, b_scale;        // elements from the beginning
};

struct Params {
  const float *a_scale, *b_scale;
  void* out;
  const int32_t *ends, *blocks;
  int groups, count, n, steps, rows_a;
  Out out_type;
  bool add;
};

// Tiles of fprop and dgrad: a block of rows after the other, all columns of each. `look` reads what `at` needs of memory.
template <Kind kKind>
struct Rows {
  enum { kRun = 1 };  // scales that are side by side
  const Params& p;
  int across, tiles;

  struct Seen {
    int group, row, rows;
  };

  __device__ explicit Rows(const Params& params) : p(params), across((p.n + kCols - 1) / kCols) {
    tiles = p.ends[p.groups - 1] * across;
  }
  __device__ Seen look(int tile) const {
    const int32_t* block = p.blocks + tile / across;
    return {block[0], block[p.count], block[2 * p.count]};
  }
  __device__ Work at(int tile, const Seen& seen) const {
    const int n = tile % across * kCols, row = seen.row, line = seen.group * p.n + n;
    Work w{row, line, 0, p.steps, seen.rows, min(kCols, p.n - n), row, n, row, line};
    if constexpr (kKind == Kind::block || kKind == Kind::tile) w.a_scale *= p.steps;
    if constexpr (kKind == Kind::block) w.b_scale *= p.steps;
    if constexpr (kKind == Kind::tile) w.b_scale = int64_t{line / 128} * p.steps;
    return w;
  }
  __device__ int64_t a_line() const { return p.steps; }  // from a row's scale to the next row's
  __device__ int64_t b_line() const { return p.steps; }
  __device__ int64_t a_step() const { return 1; }  // from a block's scale to the next block's
  __device__ int64_t b_step() const { return 1; }
};

// Tiles of wgrad: a group after the other; each contracts its group's blocks, none where it is empty.
template <Kind kKind>
struct Columns {
  enum { kRun = 2 };
  const Params& p;
  int down, across, tiles;

  struct Seen {
    int begin, end;
  };

  __device__ explicit Columns(const Params& params)
      : p(params), down((p.rows_a + kRows - 1) / kRows), across((p.n + kCols - 1) / kCols) {
    tiles = p.groups * down * across;
  }
  __device__ Seen look(int tile) const {
    const int g = tile / (down * across);
    return {g ? p.ends[g - 1] : 0, p.ends[g]};
  }
  __device__ Work at(int tile, const Seen& seen) const {
    const int g = tile / (down * across), within = tile % (down * across);
    const int row = within / across * kRows, n = within % across * kCols;
    Work w{row, n, seen.begin, seen.end - seen.begin, min(kRows, p.rows_a - row), min(kCols, p.n - n),
           g * p.rows_a + row, n};
    const int64_t from = kKind == Kind::block ? seen.begin : g;
    w.a_scale = from * p.rows_a + row;
    w.b_scale = from * p.n + n;
    return w;
  }
  __device__ int64_t a_line() const { return 1; }
  __device__ int64_t b_line() const { return 1; }
  __device__ int64_t a_step() const { return p.rows_a; }
  __device__ int64_t b_step() const { return p.n; }
};

struct Shared {
  uint32_t base;  // aligned

  __device__ uint32_t a(int s) const { return base + s * kBoxBytes; }
  __device__ uint32_t b(int s) const { return a(s) + kABytes; }
  __device__ uint32_t staging(int warp) const { return base + kStages * kBoxBytes + warp * kBoxes * kOutBytes; }
  __device__ uint32_t scales(int s) const { return staging(kWarps) + s * kScales * 4; }
  __device__ uint32_t tile(int t) const { return scales(kStages) + t * kTileBytes; }
  __device__ uint32_t full(int s) const { return tile(kTold) + s * 8; }  // a stage's codes and scales are there
  __device__ uint32_t empty(int s) const { return full(kStages) + s * 8; }
  __device__ uint32_t told(int t) const { return empty(kStages) + t * 8; }  // a tile's place and scales of rows are
  __device__ uint32_t heard(int t) const { return told(kTold) + t * 8; }
  __device__ uint32_t staged() const { return heard(kTold); }  // results are in shared memory
  __device__ uint32_t stored() const { return staged() + 8; }  // and have been read from there
};

template <Kind kKind>
constexpr bool kScaled = kKind == Kind::block || kKind == Kind::tile;  // every 128 products; else whole rows

template <class Tiles>
__device__ void fetch_codes(const Tiles& tiles, Shared at, const CUtensorMap* a, const CUtensorMap* b) {
  Ring<kStages> ring;
  each_tile(tiles, [&](const Work& w) {
    for (int k = 0; k < w.steps; ++k, ring.next()) {
      const int s = ring.stage;
      barrier_wait(at.empty(s), ring.parity ^ 1);
      barrier_arrive_expecting(at.full(s), kBoxBytes);
      copy_box(at.a(s), a, at.full(s), (w.first + k) * kDeep, w.a_row);
      copy_box(at.b(s), b, at.full(s), (w.first + k) * kDeep, w.b_row);
    }
  });
}

// Where the scale of a column of B is among the stage's, in kinds that have one a column and block: what a thread needs of
// 16 columns, four from two runs of 8, is side by side.
__device__ inline int place_of(int col) { return col / 16 * 16 + col % 8 / 2 * 4 + col % 16 / 8 * 2 + col % 2; }

__device__ inline int in_order(int i) { return i; }

// n floats from lines that exist, zeros for the others.
template <int kRun, int n, int (*kPlace)(int) = in_order>
__device__ inline void fetch_floats(uint32_t to, const float* from, int64_t line, int lines, int thread) {
  for (int i = thread * kRun; i < n; i += kScaleThreads * kRun)
    copy_floats<kRun>(to + kPlace(i) * 4, i < lines ? from + i * line : from, i < lines);
}

template <Kind kKind, class Tiles>
__device__ void fetch_scales(const Tiles& tiles, const Work& w, int k, uint32_t to, int thread) {
  const float* a = tiles.p.a_scale + w.a_scale + k * tiles.a_step();
  const float* b = tiles.p.b_scale + w.b_scale + k * tiles.b_step();
  fetch_floats<Tiles::kRun, kRows>(to, a, tiles.a_line(), w.rows, thread);
  if constexpr (kKind == Kind::tile)
    fetch_floats<1, kCols / 128>(to + kRows * 4, b, tiles.b_line(), (w.cols + 127) / 128, thread);
  else
    fetch_floats<Tiles::kRun, kCols, place_of>(to + kRows * 4, b, tiles.b_line(), w.cols, thread);
}

// What those that multiply are told of a tile. first, col: of the matrix of all results.
struct Tile {
  int steps, rows, cols, first, col;
};

__device__ inline void tell(uint32_t to, const Work& w) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w.steps), "r"(w.rows), "r"(w.cols), "r"(w.first_out)
               : "memory");
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(to + 16), "r"(w.col_out) : "memory");
}

__device__ inline Tile hear(uint32_t at) {
  Tile t;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(t.steps), "=r"(t.rows), "=r"(t.cols), "=r"(t.first)
               : "r"(at)
               : "memory");
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(t.col) : "r"(at + 16) : "memory");
  t.steps = uniform(t.steps), t.rows = uniform(t.rows), t.cols = uniform(t.cols);
  t.first = uniform(t.first), t.col = uniform(t.col);
  return t;
}

template <Kind kKind, class Tiles>
__device__ void tell_tiles(const Tiles& tiles, Shared at, int thread) {
  Ring<kStages> ring;
  Ring<kTold> turn;
  each_tile(tiles, [&](const Work& w) {
    const int t = turn.stage;
    barrier_wait(at.heard(t), turn.parity ^ 1);
    if (thread == 0) {
      tell(at.tile(t), w);
      barrier_arrive(at.told(t));
    }
    if constexpr (kScaled<kKind>) {
      barrier_arrive(at.told(t));  // all threads: none may be left behind where tiles have no steps
      for (int k = 0; k < w.steps; ++k, ring.next()) {
        barrier_wait(at.empty(ring.stage), ring.parity ^ 1);
        fetch_scales<kKind>(tiles, w, k, at.scales(ring.stage), thread);
        barrier_arrive_after_copies(at.full(ring.stage));
      }
    } else {
          fetch_floats<1, kRows>(at.scales(t), tiles.p.a_scale + w.a_scale, 1, w.rows, thread);
      fetch_floats<1, kCols>(at.scales(t) + kRows * 4, tiles.p.b_scale + w.b_scale, 1, w.cols, thread);
      barrier_arrive_after_copies(at.told(t));
    }
    turn.next();
  });
}

// What sums of 128 products, n registers of whole runs of 8 columns, are multiplied by before they are added up: scales of this
// thread's two rows (times the tile's), and where those of its columns are.
struct Factors {
  float first = 0.0f, second = 0.0f;
  uint32_t columns = 0;
};

template <Kind kKind, int n>
__device__ inline void promote(float* acc, const float (&p)[n], const Factors& f) {
  if constexpr (kKind == Kind::row) {
#pragma unroll
    for (int i = 0; i < n; ++i) acc[i] += p[i];
  } else if constexpr (kKind == Kind::tile) {
#pragma unroll
    for (int i = 0; i < n; i += 4) {
      acc[i] = fmaf(p[i], f.first, acc[i]);
      acc[i + 1] = fmaf(p[i + 1], f.first, acc[i + 1]);
      acc[i + 2] = fmaf(p[i + 2], f.second, acc[i + 2]);
      acc[i + 3] = fmaf(p[i + 3], f.second, acc[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; i += 8) {  // 16 columns
      const float4 sb = shared_float4(f.columns + 2 * i * 4);
      acc[i] = fmaf(p[i] * f.first, sb.x, acc[i]);
      acc[i + 1] = fmaf(p[i + 1] * f.first, sb.y, acc[i + 1]);
      acc[i + 2] = fmaf(p[i + 2] * f.second, sb.x, acc[i + 2]);
      acc[i + 3] = fmaf(p[i + 3] * f.second, sb.y, acc[i + 3]);
      acc[i + 4] = fmaf(p[i + 4] * f.first, sb.z, acc[i + 4]);
      acc[i + 5] = fmaf(p[i + 5] * f.first, sb.w, acc[i + 5]);
      acc[i + 6] = fmaf(p[i + 6] * f.second, sb.z, acc[i + 6]);
      acc[i + 7] = fmaf(p[i + 7] * f.second, sb.w, acc[i + 7]);
    }
  }
}

__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(float x) { return x; }
__device__ inline void from_float(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }
__device__ inline void from_float(float x, __half& to) { to = __float2half_rn(x); }
__device__ inline void from_float(float x, float& to) { to = x; }

__device__ inline uint32_t pair_of(__nv_bfloat16, float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline uint32_t pair_of(__half, float x, float y) {
  const __half2 pair = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <class S, int n>
struct alignas(n * sizeof(S)) Run {
  S x[n];
};

// 16 rows x 512 bytes, of 256 columns (2 bytes) or half of them.
template <class O>
__device__ inline void stage(const float* sums, uint32_t staging, int lane) {
  if constexpr (sizeof(O) == 2) {
#pragma unroll
    for (int i = 0; i < 128; i += 8)  // 16 columns
      store_rows(staged_run(staging, lane % 16, i * 4 + lane / 16 * 16), pair_of(O{}, sums[i], sums[i + 1]),
                 pair_of(O{}, sums[i + 2], sums[i + 3]), pair_of(O{}, sums[i + 4], sums[i + 5]),
                 pair_of(O{}, sums[i + 6], sums[i + 7]));
  } else {
#pragma unroll
    for (int i = 0; i < 64; i += 4) {  // 8 columns
      const int row = lane / 4, byte = i * 8 + lane % 4 * 8;
      store_floats(staged_run(staging, row, byte) + byte % 16, sums[i], sums[i + 1]);
      store_floats(staged_run(staging, row + 8, byte) + byte % 16, sums[i + 2], sums[i + 3]);
    }
  }
}

// To where `store_results` takes them from.
template <class O>
__device__ inline void write(const float (&acc)[128], Shared at, Ring<1>& ring, const Place& t) {
  constexpr int kPass = kBoxes * kBoxLine / sizeof(O);
#pragma unroll
  for (int pass = 0; pass < kCols / kPass; ++pass, ring.next()) {
    barrier_wait(at.stored(), ring.parity ^ 1);
    stage<O>(acc + pass * kPass / 2, at.staging(t.warp), t.lane);
    copies_see_stores();
    __syncwarp();
    if (t.lane == 0) barrier_arrive(at.staged());
  }
}

// The same added to what is there, staged in FP32 and rounded once.
template <class O>
__device__ void add(const Params& p, const float (&acc)[128], const Tile& tile, uint32_t staging, const Place& t) {
  constexpr int kPass = 128, kRun = 16 / sizeof(O), kLanes = kPass / kRun;  // columns; of a lane; lanes of a row
  const int rows = min(tile.rows - t.warp * 16, kBoxRows);
  O* out = static_cast<O*>(p.out) + int64_t{tile.first + t.warp * 16} * p.n + tile.col;
#pragma unroll
  for (int pass = 0; pass < kCols / kPass; ++pass) {
    __syncwarp();
    stage<float>(acc + pass * kPass / 2, staging, t.lane);
    __syncwarp();
    const int within = t.lane % kLanes * kRun, col = pass * kPass + within;
    if (col >= tile.cols) continue;
    for (int row = t.lane / kLanes; row < rows; row += 32 / kLanes) {
      auto* to = reinterpret_cast<Run<O, kRun>*>(out + int64_t{row} * p.n + col);
      Run<O, kRun> y = *to;
#pragma unroll
      for (int e = 0; e < kRun; e += 4) {
        const float4 x = shared_float4(staged_run(staging, row, (within + e) * 4));
        from_float(x.x + to_float(y.x[e]), y.x[e]), from_float(x.y + to_float(y.x[e + 1]), y.x[e + 1]);
        from_float(x.z + to_float(y.x[e + 2]), y.x[e + 2]), from_float(x.w + to_float(y.x[e + 3]), y.x[e + 3]);
      }
      *to = y;
    }
  }
}

// Scales of whole rows onto the sums.
__device__ inline void scale_rows(float (&acc)[128], uint32_t scales, const Place& t) {
  const float a0 = shared_float(scales + t.row * 4), a1 = shared_float(scales + (t.row + 8) * 4);
#pragma unroll
  for (int i = 0; i < 128; i += 4) {  // 8 columns
    const float2 b = shared_float2(scales + (kRows + i * 2 + t.lane % 4 * 2) * 4);
    acc[i] *= a0 * b.x, acc[i + 1] *= a0 * b.y;
    acc[i + 2] *= a1 * b.x, acc[i + 3] *= a1 * b.y;
  }
}

// A stage's buffers are free once all warps have come.
__device__ inline void release(Shared at, int stage, int lane) {
  if (lane == 0) barrier_arrive(at.empty(stage));
}

// Rows that do not exist are not multiplied.
__device__ void skip(Shared at, Ring<kStages>& ring, int steps, int lane) {
  for (int k = 0; k < steps; ++k, ring.next()) {
    barrier_wait(at.full(ring.stage), ring.parity);
    __syncwarp();
    release(at, ring.stage, lane);
  }
}

template <bool kA5, bool kB5>
__device__ void sum_fast(float (&acc)[128], Shared at, Ring<kStages>& ring, int steps, const Place& t) {
  int before = -1;
  for (int k = 0; k < steps; ++k, ring.next()) {
    const int s = ring.stage;
    barrier_wait(at.full(s), ring.parity);
    const uint64_t a = matrix_descriptor(at.a(s) + t.group * kGroupRows * kDeep), b = matrix_descriptor(at.b(s));
    hold(acc);
    products_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) Product<kA5, kB5>::run(acc, a + 2 * i, b + 2 * i, true);
    products_commit();
    products_wait<1>();
    if (before >= 0) release(at, before, t.lane);
    before = s;
  }
  products_wait<0>();
  hold(acc);
  if (before >= 0) release(at, before, t.lane);
}

template <bool kA5, bool kB5>
__device__ inline void multiply_part(float (&part)[kPart / 2], const uint32_t (&a)[4][4], uint32_t b) {
  const uint64_t descriptor = matrix_descriptor(b);
  hold(part);
  products_begin();
#pragma unroll
  for (int i = 0; i < 4; ++i) Product<kA5, kB5>::run(part, a[i], descriptor + 2 * i, i > 0);
  products_commit();
}

// While the sums of kPart columns are scaled and added up the next kPart are multiplied, into the other set of registers.
template <Kind kKind, bool kA5, bool kB5>
__device__ void sum_promoted(float (&acc)[128], Shared at, Ring<kStages>& ring, int steps, const Place& t) {
  float part[2][kPart / 2];
  const uint32_t a_row = (t.warp * 16 + t.lane % 16) * kDeep + ((t.lane / 16 ^ t.lane % 8) << 4);
  for (int k = 0; k < steps; ++k, ring.next()) {
    const int s = ring.stage;
    barrier_wait(at.full(s), ring.parity);
    uint32_t a[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) load_rows(a[i], at.a(s) + (a_row ^ i << 5));
    const uint32_t scales = at.scales(s);
    float rows[2], tiles[2];
    if constexpr (kScaled<kKind>) rows[0] = shared_float(scales + t.row * 4), rows[1] = shared_float(scales + (t.row + 8) * 4);
    if constexpr (kKind == Kind::tile)
      tiles[0] = shared_float(scales + kRows * 4), tiles[1] = shared_float(scales + (kRows + 1) * 4);
    const auto factors = [&](int q) -> Factors {
      if constexpr (kKind == Kind::tile) return {rows[0] * tiles[q * kPart / 128], rows[1] * tiles[q * kPart / 128]};
      if constexpr (kKind == Kind::block) return {rows[0], rows[1], scales + (kRows + q * kPart + t.lane % 4 * 4) * 4};
      return {};
    };
    multiply_part<kA5, kB5>(part[0], a, at.b(s));
#pragma unroll
    for (int q = 0; q < kParts; ++q) {
      if (q + 1 < kParts) {
        multiply_part<kA5, kB5>(part[(q + 1) % 2], a, at.b(s) + (q + 1) * kPart * kDeep);
        products_wait<1>();
      } else {
        products_wait<0>();
        if (kKind != Kind::block) release(at, s, t.lane);
      }
      hold(part[q % 2]);
      promote<kKind>(acc + q * (kPart / 2), part[q % 2], factors(q));
    }
    if (kKind == Kind::block) {
      __syncwarp();
      release(at, s, t.lane);
    }
  }
}

template <class O>
__device__ inline void finish(const Params& p, const float (&acc)[128], const Tile& tile, Shared at, Ring<1>& ring,
                              const Place& t) {
  if (!p.add) return write<O>(acc, at, ring, t);
  if (tile.steps) add<O>(p, acc, tile, at.staging(t.warp), t);
}

template <Kind kKind, bool kA5, bool kB5, class Tiles>
__device__ void multiply(const Tiles& tiles, Shared at, const Place& t) {
  const Params& p = tiles.p;
  Ring<kStages> ring;
  Ring<kTold> turn;
  Ring<1> results;
  for (int i = blockIdx.x; i < tiles.tiles; i += gridDim.x, turn.next()) {
    barrier_wait(at.told(turn.stage), turn.parity);
    const Tile tile = hear(at.tile(turn.stage));
    const bool here = t.group * kGroupRows < tile.rows;
    float acc[128];
#pragma unroll
    for (int e = 0; e < 128; ++e) acc[e] = 0.0f;
    if (!here)
      skip(at, ring, tile.steps, t.lane);
    else if constexpr (kKind == Kind::row_fast)
      sum_fast<kA5, kB5>(acc, at, ring, tile.steps, t);
    else
      sum_promoted<kKind, kA5, kB5>(acc, at, ring, tile.steps, t);
    // Scales of an empty group mean nothing.
    if (!kScaled<kKind> && here && tile.steps) scale_rows(acc, at.scales(turn.stage), t);
    __syncwarp();
    if (t.lane == 0) barrier_arrive(at.heard(turn.stage));
    switch (p.out_type) {
      case Out::bf16: finish<__nv_bfloat16>(p, acc, tile, at, results, t); break;
      case Out::fp16: finish<__half>(p, acc, tile, at, results, t); break;
      case Out::fp32: finish<float>(p, acc, tile, at, results, t); break;
    }
  }
}

template <Kind kKind, bool kA5, bool kB5, class Tiles>
__global__ void __launch_bounds__(kThreads, 1)
    grouped(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const __grid_constant__ CUtensorMap out,
            const __grid_constant__ Params p) {
  extern __shared__ char memory[];
  const Shared at{(shared_address(memory) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(at.full(s), 1 + (kScaled<kKind> ? kScaleThreads : 0));
      barrier_init(at.empty(s), kWarps);
    }
    for (int t = 0; t < kTold; ++t) {
      barrier_init(at.told(t), 1 + kScaleThreads);
      barrier_init(at.heard(t), kWarps);
    }
    barrier_init(at.staged(), kWarps);
    barrier_init(at.stored(), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    copies_see_stores();
  }
  __syncthreads();
  const Tiles tiles(p);
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  if (group == 0) {
    give_up_registers<kFetchRegisters>();
    if (thread == 0) fetch_codes(tiles, at, &a, &b);
    else if (thread >= 64) tell_tiles<kKind>(tiles, at, thread - 64);
    else if (thread >= 32) store_results<kCols, kBoxes>(tiles, at, &out, thread - 32);
  } else {
    take_registers<kProductRegisters>();
    multiply<kKind, kA5, kB5>(tiles, at, Place(group - 1, thread));
  }
}

CUtensorMap map_of_codes(const void* codes, int64_t rows, int64_t k, int box) {
  return map_of(codes, rows, k, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, box);
}

CUtensorMap map_of_results(void* out, int64_t rows, int64_t cols, Out type) {
  switch (type) {
    case Out::bf16: return map_of(out, rows, cols, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, kBoxRows);
    case Out::fp16: return map_of(out, rows, cols, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, kBoxRows);
    default: return map_of(out, rows, cols, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, kBoxRows);
  }
}

struct Launch {
  CUtensorMap a, b, out;
  Params params;
  unsigned grid;
  cudaStream_t stream;
};

template <Kind kKind, bool kA5, bool kB5, class Tiles>
void start(const Launch& l) {
  const auto kernel = grouped<kKind, kA5, kB5, Tiles>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "grouped GEMM");  // of this device
  kernel<<<l.grid, kThreads, kShared, l.stream>>>(l.a, l.b, l.out, l.params);
  check(cudaGetLastError(), "grouped GEMM");
}

template <Kind kKind, template <Kind> class Tiles>
void by_elements(const GroupedArgs& args, const Launch& l) {
  if (args.a_e5m2 && args.b_e5m2) return start<kKind, true, true, Tiles<kKind>>(l);
  if (args.a_e5m2) return start<kKind, true, false, Tiles<kKind>>(l);
  if (args.b_e5m2) return start<kKind, false, true, Tiles<kKind>>(l);
  start<kKind, false, false, Tiles<kKind>>(l);
}

Launch prepared(const GroupedArgs& args, int64_t rows_b, int64_t rows_out, int64_t most, const Where& where) {
  int multiprocessors;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, where.threads_or_device), "grouped GEMM");
  return {map_of_codes(args.a, args.rows_a, args.k, kRows),
          map_of_codes(args.b, rows_b, args.k, kCols),
          map_of_results(args.out, rows_out, args.n, args.out_type),
          {args.a_scale, args.b_scale, args.out, args.ends, args.blocks, static_cast<int>(args.groups),
           static_cast<int>(args.count), static_cast<int>(args.n), static_cast<int>((args.k + kDeep - 1) / kDeep),
           static_cast<int>(args.rows_a), args.out_type, args.add},
          static_cast<unsigned>(most < multiprocessors ? most : multiprocessors),
          stream_of(where)};
}

int64_t over(int64_t size, int64_t by) { return (size + by - 1) / by; }

}  // namespace

void rows(const GroupedArgs& args, const Where& where) {
  const int64_t most = args.count * over(args.n, kCols);
  if (args.rows_a == 0 || most == 0) return;
  const OnDevice device(where, "grouped GEMM");
  const Launch l = prepared(args, args.groups * args.n, args.rows_a, most, where);
  switch (args.kind) {
    case Kind::row_fast: return by_elements<Kind::row_fast, Rows>(args, l);
    case Kind::row: return by_elements<Kind::row, Rows>(args, l);
    case Kind::block: return by_elements<Kind::block, Rows>(args, l);
    case Kind::tile: return by_elements<Kind::tile, Rows>(args, l);
  }
}

void columns(const GroupedArgs& args, const Where& where) {
  const int64_t most = args.groups * over(args.rows_a, kRows) * over(args.n, kCols);
  if (most == 0 || args.k == 0) return;
  const OnDevice device(where, "grouped GEMM");
  const Launch l = prepared(args, args.n, args.groups * args.rows_a, most, where);
  switch (args.kind) {
    case Kind::row_fast: return by_elements<Kind::row_fast, Columns>(args, l);
    case Kind::row: return by_elements<Kind::row, Columns>(args, l);
    case Kind::block: return by_elements<Kind::block, Columns>(args, l);
    case Kind::tile: throw std::invalid_argument("megatron_hybrid._C_gemm: columns have no 128 x 128 tiles");
  }
}

}  // namespace mh::gemm
