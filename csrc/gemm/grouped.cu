// FP8 GEMMs of all groups on Hopper: a persistent program a multiprocessor, whose first warpgroup fetches and whose other
// two multiply, each a 128 x 128 half of a 128 x 256 tile. Sums leave the tensor cores every 128 products, are scaled and
// added up in FP32 (kinds but row_fast) by one warpgroup while the other one's products run.
#include "grouped.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "hopper.cuh"

namespace mh::gemm {
namespace {

constexpr int kRows = 128, kCols = 256, kDeep = 128;  // a tile, and codes of the contraction at a time
constexpr int kHalf = 128;                            // columns a warpgroup
constexpr int kGroupThreads = 128, kThreads = 3 * kGroupThreads;
constexpr int kFetchRegisters = 40, kProductRegisters = 232;
constexpr int kScaleThreads = 96;  // of the fetching warpgroup, the warps after the first
constexpr int kStages = 4;
constexpr int kABytes = kRows * kDeep, kBBytes = kCols * kDeep, kBoxBytes = kABytes + kBBytes;
constexpr int kScales = kRows + kCols;  // floats a stage
constexpr int kRunBytes = 128;                // of a row of results, that a warp writes at once
constexpr int kStagedBytes = kRunBytes + 16;  // in shared memory: 16 against conflicts
constexpr int kStaging = 8 * 16 * kStagedBytes;
constexpr int kBarriers = 2 * kStages * 8;
constexpr int kShared = kStages * (kBoxBytes + kScales * 4) + kStaging + kBarriers + 1024;  // 1024: to align
static_assert(kShared <= 227 << 10);

// One tile: where its operands, scales and results are.
struct Work {
  int a_row, b_row, first, steps;  // rows of A and B; blocks of the contraction
  int rows, cols;                  // of the result that exist
  int64_t a_scale, b_scale, out;   // elements from the beginning
};

struct Params {
  const float *a_scale, *b_scale;
  void* out;
  const int32_t *ends, *blocks;
  int groups, count, n, steps, rows_a;
  Out out_type;
  bool add;
};

// Tiles of fprop and dgrad: a block of rows after the other, all columns of each.
template <Kind kKind>
struct Rows {
  static constexpr int kRun = 1;  // scales that are side by side
  const Params& p;
  int across, tiles;

  __device__ explicit Rows(const Params& params) : p(params), across((p.n + kCols - 1) / kCols) {
    tiles = p.ends[p.groups - 1] * across;
  }
  __device__ Work at(int tile) const {
    const int block = tile / across, n = tile % across * kCols;
    const int g = p.blocks[block], row = p.blocks[p.count + block], line = g * p.n + n;
    Work w{row, line, 0, p.steps, p.blocks[2 * p.count + block], min(kCols, p.n - n), row, line, int64_t{row} * p.n + n};
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
  static constexpr int kRun = 2;
  const Params& p;
  int down, across, tiles;

  __device__ explicit Columns(const Params& params)
      : p(params), down((p.rows_a + kRows - 1) / kRows), across((p.n + kCols - 1) / kCols) {
    tiles = p.groups * down * across;
  }
  __device__ Work at(int tile) const {
    const int g = tile / (down * across), within = tile % (down * across);
    const int row = within / across * kRows, n = within % across * kCols;
    const int begin = g ? p.ends[g - 1] : 0;
    Work w{row, n, begin, p.ends[g] - begin, min(kRows, p.rows_a - row), min(kCols, p.n - n)};
    w.out = (int64_t{g} * p.rows_a + row) * p.n + n;
    const int64_t from = kKind == Kind::block ? begin : g;
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
  __device__ uint32_t scales(int s) const { return base + kStages * kBoxBytes + s * kScales * 4; }
  __device__ uint32_t staging() const { return scales(kStages); }
  __device__ uint32_t full(int s) const { return staging() + kStaging + s * 8; }
  __device__ uint32_t empty(int s) const { return full(kStages) + s * 8; }
};

// The place in the ring of buffers; its parity turns with every round.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <Kind kKind>
constexpr bool kScaled = kKind == Kind::block || kKind == Kind::tile;

template <class Tiles>
__device__ void fetch_codes(const Tiles& tiles, Shared at, const CUtensorMap* a, const CUtensorMap* b) {
  Ring ring;
  for (int tile = blockIdx.x; tile < tiles.tiles; tile += gridDim.x) {
    const Work w = tiles.at(tile);
    for (int k = 0; k < w.steps; ++k, ring.next()) {
      const int s = ring.stage;
      barrier_wait(at.empty(s), ring.parity ^ 1);
      barrier_arrive_expecting(at.full(s), kBoxBytes);
      copy_box(at.a(s), a, at.full(s), (w.first + k) * kDeep, w.a_row);
      copy_box(at.b(s), b, at.full(s), (w.first + k) * kDeep, w.b_row);
    }
  }
}

// Where the scale of a column of B is among the stage's, in kinds that have one a column: what a thread needs of 16
// columns, four from two runs of 8, is side by side.
__device__ inline int place(int col) { return col / 16 * 16 + col % 8 / 2 * 4 + col % 16 / 8 * 2 + col % 2; }

template <Kind kKind, class Tiles>
__device__ void fetch_scales(const Tiles& tiles, Shared at, int thread) {
  Ring ring;
  for (int tile = blockIdx.x; tile < tiles.tiles; tile += gridDim.x) {
    const Work w = tiles.at(tile);
    for (int k = 0; k < w.steps; ++k, ring.next()) {
      const uint32_t to = at.scales(ring.stage);
      const float* a = tiles.p.a_scale + w.a_scale + k * tiles.a_step();
      const float* b = tiles.p.b_scale + w.b_scale + k * tiles.b_step();
      barrier_wait(at.empty(ring.stage), ring.parity ^ 1);
      const auto copy = [&](int i, int place, const float* from, int64_t line, int size) {
        const bool there = i < size;
        copy_floats<Tiles::kRun>(to + place * 4, there ? from + i * line : from, there);
      };
      for (int i = thread * Tiles::kRun; i < kRows; i += kScaleThreads * Tiles::kRun) copy(i, i, a, tiles.a_line(), w.rows);
      if constexpr (kKind == Kind::tile) {  // two tiles side by side
        if (thread < kCols / kHalf) copy(thread, kRows + thread, b, tiles.b_line(), (w.cols + kHalf - 1) / kHalf);
      } else {
        for (int i = thread * Tiles::kRun; i < kCols; i += kScaleThreads * Tiles::kRun)
          copy(i, kRows + place(i), b, tiles.b_line(), w.cols);
      }
      barrier_arrive_after_copies(at.full(ring.stage));
    }
  }
}

__device__ inline float shared_float(uint32_t at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
  return x;
}

__device__ inline float4 shared_float4(uint32_t at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
  return x;
}

// The scales of one step that a thread needs: of its two rows; of all columns together (tile), or of its first 4 (block).
struct Factors {
  float a0, a1;
  float4 b;
};

// Sums of 128 products times their scales, added up. b: where the scales of this thread's columns are.
template <Kind kKind>
__device__ inline void promote(float (&acc)[64], const float (&p)[64], const Factors& f, uint32_t b) {
  if constexpr (kKind == Kind::row) {
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] += p[i];
  } else if constexpr (kKind == Kind::tile) {
    const float sa0 = f.a0 * f.b.x, sa1 = f.a1 * f.b.x;
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      acc[i] = fmaf(p[i], sa0, acc[i]);
      acc[i + 1] = fmaf(p[i + 1], sa0, acc[i + 1]);
      acc[i + 2] = fmaf(p[i + 2], sa1, acc[i + 2]);
      acc[i + 3] = fmaf(p[i + 3], sa1, acc[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 64; i += 8) {
      const float4 sb = i ? shared_float4(b + 2 * i * 4) : f.b;  // 16 columns every 8 registers
      acc[i] = fmaf(p[i] * f.a0, sb.x, acc[i]);
      acc[i + 1] = fmaf(p[i + 1] * f.a0, sb.y, acc[i + 1]);
      acc[i + 2] = fmaf(p[i + 2] * f.a1, sb.x, acc[i + 2]);
      acc[i + 3] = fmaf(p[i + 3] * f.a1, sb.y, acc[i + 3]);
      acc[i + 4] = fmaf(p[i + 4] * f.a0, sb.z, acc[i + 4]);
      acc[i + 5] = fmaf(p[i + 5] * f.a0, sb.w, acc[i + 5]);
      acc[i + 6] = fmaf(p[i + 6] * f.a1, sb.z, acc[i + 6]);
      acc[i + 7] = fmaf(p[i + 7] * f.a1, sb.w, acc[i + 7]);
    }
  }
}

__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(float x) { return x; }
__device__ inline void from_float(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }
__device__ inline void from_float(float x, __half& to) { to = __float2half_rn(x); }
__device__ inline void from_float(float x, float& to) { to = x; }

template <class S, int n>
struct alignas(n * sizeof(S)) Run {
  S x[n];
};

template <class R>
__device__ inline R* staged(char* staging, int row, int byte) {
  return reinterpret_cast<R*>(staging + row * kStagedBytes + byte);
}

// A warp's 16 rows x 128 columns, through shared memory as S, so that rows leave in runs of kRunBytes. rows, cols:
// that exist. Where they are added to what is there they are staged in FP32, and rounded once.
template <class S, class O, bool kAdd>
__device__ void write(const float (&acc)[64], O* out, int64_t line, int rows, int cols, char* staging, int lane) {
  constexpr int kPass = kRunBytes / sizeof(S), kPasses = kHalf / kPass, kRun = 16 / sizeof(S), kLanes = kRunBytes / 16;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPass / 8; ++j) {
      const int i = (pass * kPass / 8 + j) * 4, byte = (j * 8 + lane % 4 * 2) * static_cast<int>(sizeof(S));
      Run<S, 2> first, second;
      from_float(acc[i], first.x[0]), from_float(acc[i + 1], first.x[1]);
      from_float(acc[i + 2], second.x[0]), from_float(acc[i + 3], second.x[1]);
      *staged<Run<S, 2>>(staging, lane / 4, byte) = first;
      *staged<Run<S, 2>>(staging, lane / 4 + 8, byte) = second;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 32 / kLanes) {
      const int row = i + lane / kLanes, col = pass * kPass + lane % kLanes * kRun;
      if (row >= rows || col >= cols) continue;
      const auto x = *staged<Run<S, kRun>>(staging, row, lane % kLanes * 16);
      auto* to = reinterpret_cast<Run<O, kRun>*>(out + row * line + col);
      if constexpr (kAdd) {
        Run<O, kRun> y = *to;
#pragma unroll
        for (int e = 0; e < kRun; ++e) from_float(to_float(x.x[e]) + to_float(y.x[e]), y.x[e]);
        *to = y;
      } else {
        *to = x;
      }
    }
  }
}

template <class O>
__device__ void write_as(const Params& p, const float (&acc)[64], int64_t at, int rows, int cols, char* staging, int lane) {
  O* out = static_cast<O*>(p.out) + at;
  if (p.add)
    write<float, O, true>(acc, out, p.n, rows, cols, staging, lane);
  else
    write<O, O, false>(acc, out, p.n, rows, cols, staging, lane);
}

// Scales of whole rows, fetched before they are needed: of this thread's rows, and 4 columns a lane.
struct RowFactors {
  float a[4];
  float4 b;

  __device__ RowFactors(const Params& p, const Work& w, int row, int group, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = row + i / 2 * 64 + i % 2 * 8;
      a[i] = at < w.rows ? p.a_scale[w.a_scale + at] : 0.0f;
    }
    const int col = group * kHalf + lane * 4;
    const float* from = p.b_scale + w.b_scale + col;  // sizes are multiples of 16, the scales' beginnings not
    const bool there = col < w.cols;
    b = {there ? from[0] : 0.0f, there ? from[1] : 0.0f, there ? from[2] : 0.0f, there ? from[3] : 0.0f};
  }

  // Onto the sums, by way of the warp's shared memory.
  __device__ void apply(float (&acc)[2][64], char* staging, int lane) const {
    __syncwarp();
    reinterpret_cast<float4*>(staging)[lane] = b;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      const float2 sb = reinterpret_cast<const float2*>(staging)[i + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        acc[h][i] *= a[2 * h] * sb.x, acc[h][i + 1] *= a[2 * h] * sb.y;
        acc[h][i + 2] *= a[2 * h + 1] * sb.x, acc[h][i + 3] *= a[2 * h + 1] * sb.y;
      }
    }
  }
};

template <bool kA5, bool kB5>
__device__ inline void products(float (&sum)[64], uint64_t a, uint64_t b, bool add) {
#pragma unroll
  for (int i = 0; i < 4; ++i) product<kA5, kB5>(sum, a + 2 * i, b + 2 * i, add || i > 0);
}

constexpr int kHalfRows = 64 * kDeep >> 4;  // of A, in units of a matrix descriptor

template <bool kA5, bool kB5>
__device__ void sum_fast(float (&acc)[2][64], Shared at, Ring& ring, int steps, int group, int lane) {
  int before = -1;
  for (int k = 0; k < steps; ++k, ring.next()) {
    const int s = ring.stage;
    barrier_wait(at.full(s), ring.parity);
    const uint64_t a = matrix_descriptor(at.a(s)), b = matrix_descriptor(at.b(s) + group * kHalf * kDeep);
    hold(acc[0]), hold(acc[1]);
    products_begin();
    products<kA5, kB5>(acc[0], a, b, true);
    products<kA5, kB5>(acc[1], a + kHalfRows, b, true);
    products_commit();
    products_wait<1>();
    if (before >= 0 && lane == 0) barrier_arrive(at.empty(before));
    before = s;
  }
  products_wait<0>();
  hold(acc[0]), hold(acc[1]);
  if (before >= 0 && lane == 0) barrier_arrive(at.empty(before));
}

template <Kind kKind, bool kA5, bool kB5>
__device__ void sum_promoted(float (&acc)[2][64], Shared at, Ring& ring, int steps, int row, int group, int lane) {
  for (int k = 0; k < steps; ++k, ring.next()) {
    const int s = ring.stage;
    barrier_wait(at.full(s), ring.parity);
    const uint64_t a = matrix_descriptor(at.a(s)), b = matrix_descriptor(at.b(s) + group * kHalf * kDeep);
    const uint32_t scales_b = at.scales(s) + (kRows + (kKind == Kind::tile ? group : group * kHalf + lane % 4 * 4)) * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float part[64];
      hold(part);
      products_begin();
      products<kA5, kB5>(part, a + h * kHalfRows, b, false);
      products_commit();
      Factors f{};
      if constexpr (kScaled<kKind>) {
        f.a0 = shared_float(at.scales(s) + (h * 64 + row) * 4);
        f.a1 = shared_float(at.scales(s) + (h * 64 + row + 8) * 4);
        if constexpr (kKind == Kind::tile)
          f.b.x = shared_float(scales_b);
        else
          f.b = shared_float4(scales_b);
      }
      products_wait<0>();
      hold(part);
      if (kKind != Kind::block && h == 1) {  // all is read
        __syncwarp();
        if (lane == 0) barrier_arrive(at.empty(s));
      }
      promote<kKind>(acc[h], part, f, scales_b);
    }
    if constexpr (kKind == Kind::block) {
      __syncwarp();
      if (lane == 0) barrier_arrive(at.empty(s));
    }
  }
}

template <Kind kKind, bool kA5, bool kB5, class Tiles>
__device__ void multiply(const Tiles& tiles, Shared at, char* memory, int group, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  const int row = warp * 16 + lane / 4;  // and 8 below, of each 64
  char* staging = memory + (at.staging() - shared_address(memory)) + (group * 4 + warp) * 16 * kStagedBytes;
  const Params& p = tiles.p;
  Ring ring;
  for (int tile = blockIdx.x; tile < tiles.tiles; tile += gridDim.x) {
    const Work w = tiles.at(tile);
    float acc[2][64];
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[0][i] = acc[1][i] = 0.0f;
    if constexpr (kScaled<kKind>) {
      sum_promoted<kKind, kA5, kB5>(acc, at, ring, w.steps, row, group, lane);
    } else {
      const RowFactors factors(p, w, row, group, lane);
      if constexpr (kKind == Kind::row_fast)
        sum_fast<kA5, kB5>(acc, at, ring, w.steps, group, lane);
      else
        sum_promoted<kKind, kA5, kB5>(acc, at, ring, w.steps, row, group, lane);
      if (w.steps) factors.apply(acc, staging, lane);  // scales of an empty group's columns mean nothing
    }
    const int cols = w.cols - group * kHalf;
    if (cols <= 0 || (p.add && w.steps == 0)) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = h * 64 + warp * 16;
      const int64_t to = w.out + int64_t{first} * p.n + group * kHalf;
      switch (p.out_type) {
        case Out::bf16: write_as<__nv_bfloat16>(p, acc[h], to, w.rows - first, cols, staging, lane); break;
        case Out::fp16: write_as<__half>(p, acc[h], to, w.rows - first, cols, staging, lane); break;
        case Out::fp32: write_as<float>(p, acc[h], to, w.rows - first, cols, staging, lane); break;
      }
    }
  }
}

template <Kind kKind, bool kA5, bool kB5, class Tiles>
__global__ void __launch_bounds__(kThreads, 1)
    grouped(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const __grid_constant__ Params p) {
  extern __shared__ char memory[];
  const Shared at{(shared_address(memory) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(at.full(s), 1 + (kScaled<kKind> ? kScaleThreads : 0));
      barrier_init(at.empty(s), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  const Tiles tiles(p);
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  if (group == 0) {
    give_up_registers<kFetchRegisters>();
    if (thread == 0) fetch_codes(tiles, at, &a, &b);
    if (kScaled<kKind> && thread >= 32) fetch_scales<kKind>(tiles, at, thread - 32);
  } else {
    take_registers<kProductRegisters>();
    multiply<kKind, kA5, kB5>(tiles, at, memory, group - 1, thread);
  }
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("megatron_hybrid._C_gemm: ") + what + ": " + cudaGetErrorString(error));
}

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status),
          "cuTensorMapEncodeTiled");
    if (!function) throw std::runtime_error("megatron_hybrid._C_gemm: this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

CUtensorMap map_of(const void* codes, int64_t rows, int64_t k, int box) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)}, stride[1] = {sizes[0]};
  const cuuint32_t boxes[2] = {kDeep, static_cast<cuuint32_t>(box)}, every[2] = {1, 1};
  const CUresult result = encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(codes), sizes, stride, boxes, every,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("megatron_hybrid._C_gemm: no tensor map of " + std::to_string(rows) + " x " + std::to_string(k) +
                             " codes: error " + std::to_string(result));
  return map;
}

struct Launch {
  CUtensorMap a, b;
  Params params;
  unsigned grid;
  cudaStream_t stream;
};

template <Kind kKind, bool kA5, bool kB5, class Tiles>
void start(const Launch& l) {
  const auto kernel = grouped<kKind, kA5, kB5, Tiles>;
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  check(allowed, "shared memory");
  kernel<<<l.grid, kThreads, kShared, l.stream>>>(l.a, l.b, l.params);
  check(cudaGetLastError(), "launch");
}

template <Kind kKind, template <Kind> class Tiles>
void by_elements(const GroupedArgs& args, const Launch& l) {
  if (args.a_e5m2 && args.b_e5m2) return start<kKind, true, true, Tiles<kKind>>(l);
  if (args.a_e5m2) return start<kKind, true, false, Tiles<kKind>>(l);
  if (args.b_e5m2) return start<kKind, false, true, Tiles<kKind>>(l);
  start<kKind, false, false, Tiles<kKind>>(l);
}

// The tensors' device for the length of a call.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&previous_), "device");
    if (previous_ != device) check(cudaSetDevice(device), "device");
  }
  ~OnDevice() { cudaSetDevice(previous_); }

 private:
  int previous_ = 0;
};

Launch prepared(const GroupedArgs& args, int64_t rows_b, int64_t most, const Where& where) {
  int multiprocessors;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, where.threads_or_device), "device");
  return {map_of(args.a, args.rows_a, args.k, kRows),
          map_of(args.b, rows_b, args.k, kCols),
          {args.a_scale, args.b_scale, args.out, args.ends, args.blocks, static_cast<int>(args.groups),
           static_cast<int>(args.count), static_cast<int>(args.n), static_cast<int>((args.k + kDeep - 1) / kDeep),
           static_cast<int>(args.rows_a), args.out_type, args.add},
          static_cast<unsigned>(most < multiprocessors ? most : multiprocessors),
          reinterpret_cast<cudaStream_t>(where.stream)};
}

int64_t over(int64_t size, int64_t by) { return (size + by - 1) / by; }

}  // namespace

void rows(const GroupedArgs& args, const Where& where) {
  const int64_t most = args.count * over(args.n, kCols);
  if (args.rows_a == 0 || most == 0) return;
  const OnDevice device(where.threads_or_device);
  const Launch l = prepared(args, args.groups * args.n, most, where);
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
  const OnDevice device(where.threads_or_device);
  const Launch l = prepared(args, args.n, most, where);
  switch (args.kind) {
    case Kind::row_fast: return by_elements<Kind::row_fast, Columns>(args, l);
    case Kind::row: return by_elements<Kind::row, Columns>(args, l);
    case Kind::block: return by_elements<Kind::block, Columns>(args, l);
    case Kind::tile: throw std::invalid_argument("megatron_hybrid._C_gemm: columns have no 128 x 128 tiles");
  }
}

}  // namespace mh::gemm
