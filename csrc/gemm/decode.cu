// GEMMs of all groups on Hopper that decode one operand, the weight, where it is multiplied: a persistent program a
// multiprocessor, whose first warpgroup fetches tokens in bf16 and codes of the weight, and whose other two multiply.
// The instruction's first operand is the weight, 64 of its rows a product, which a warp decodes from codes into
// registers while its products before run; so weights in bf16 are in no memory at all. Sums are in FP32, outer scales
// multiply them, results are rounded once and turned over on their way to shared memory, whence a warp stores them
// while the next tile is multiplied.
#include "decode.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "decode.cuh"
#include "maps.h"
#include "tile.cuh"

namespace mh::gemm {
namespace {

constexpr int kTokens = 256, kCols = 128;  // a tile of the result
constexpr int kDeep = 64;                  // of the contraction at a time: a row of tokens is 128 bytes
constexpr int kStep = 2;                   // that many times a step; scales are read once a step
constexpr int kGroupCols = kCols / 2;      // a warpgroup's
constexpr int kSums = kTokens / 2;         // a thread's, of two columns
constexpr int kWarps = 8;                  // that multiply
constexpr int kGroupThreads = 128, kThreads = 3 * kGroupThreads;
constexpr int kFetchRegisters = 40, kProductRegisters = 232;
constexpr int kStages = 4;
constexpr int kTokenBox = 64, kBoxBytes = kTokenBox * kDeep * 2;  // tokens are fetched and multiplied in these
constexpr int kTokenBytes = kTokens / kTokenBox * kBoxBytes;
constexpr int kBoxes = 2;  // of results of 16 tokens
constexpr int kStaging = kTokens / kBoxRows * kBoxes * kOutBytes;

template <class D>
constexpr int kLine = kDeep * 2 / D::kWordCodes * 2;  // bytes of codes of a row
template <class D>
constexpr int kCodeBytes = kCols * kLine<D>;
template <class D>
constexpr int kScaleWords = kStep * kDeep / D::kBlock / 4;  // 4 scales each, of a row and step

// One tile: where its operands and results are.
struct Work {
  int token, line, rows, cols;  // first rows of A and B; of the result that exist
  int first_out, col_out;       // where they are among all results
};

struct Params {
  const float *a_factor, *b_factor;  // null: ones
  const uint8_t* b_scale;
  void* out;
  const int32_t *ends, *blocks;  // null: one group
  int tokens, groups, count, n, steps, block_rows, scale_line;  // scale_line: scales of a row
  Out out_type;
  bool add;
};

// Tokens of a tile are two blocks of 128 of one group, or its last one: a pair of blocks after the other, all columns of
// each. pairs: of all groups up to each, in shared memory.
struct Tiles {
  const Params& p;
  const int32_t* pairs;
  int across, tiles;

  struct Seen {
    int group, row, rows;
  };

  __device__ Tiles(const Params& params, const int32_t* pairs)
      : p(params), pairs(pairs), across((p.n + kCols - 1) / kCols) {
    tiles = (p.ends ? pairs[p.groups - 1] : (p.tokens + kTokens - 1) / kTokens) * across;
  }
  __device__ Seen look(int tile) const {
    const int pair = tile / across;
    if (!p.ends) return {0, pair * kTokens, min(kTokens, p.tokens - pair * kTokens)};
    int group = 0;
    for (int last = p.groups - 1; group < last;) {
      const int middle = (group + last) / 2;
      if (pairs[middle] > pair)
        last = middle;
      else
        group = middle + 1;
    }
    const int before = group ? pairs[group - 1] : 0, first = group ? p.ends[group - 1] : 0;
    const int32_t* block = p.blocks + first + 2 * (pair - before);
    const bool two = block + 1 < p.blocks + p.ends[group];
    return {group, block[p.count], block[2 * p.count] + (two ? block[2 * p.count + 1] : 0)};
  }
  __device__ Work at(int tile, const Seen& seen) const {
    const int n = tile % across * kCols;
    return {seen.row, seen.group * p.n + n, seen.rows, min(kCols, p.n - n), seen.row, n};
  }
};

// Pairs of blocks of all groups up to each.
__device__ inline void count_pairs(const Params& p, int32_t* pairs) {
  if (!p.ends) return;
  for (int g = threadIdx.x; g < p.groups; g += kThreads) pairs[g] = (p.ends[g] - (g ? p.ends[g - 1] : 0) + 1) / 2;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  int before = 0;
  for (int from = 0; from < p.groups; from += 32) {
    const int g = from + threadIdx.x;
    int sum = g < p.groups ? pairs[g] : 0;
    for (int away = 1; away < 32; away *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, away);
      if (static_cast<int>(threadIdx.x) >= away) sum += other;
    }
    sum += before;
    if (g < p.groups) pairs[g] = sum;
    before = __shfl_sync(0xffffffffu, sum, 31);
  }
}

template <class D>
struct Shared {
  uint32_t base;  // aligned

  static constexpr int kBarriers = kStages * (kTokenBytes + kCodeBytes<D>) + kStaging;  // where they begin
  static constexpr int kPairs = kBarriers + (2 * kStages + 2) * 8;
  static constexpr int kBytes = kPairs + kMostGroups * 4;

  __device__ uint32_t tokens(int s) const { return base + s * kTokenBytes; }
  __device__ uint32_t codes(int s) const { return tokens(kStages) + s * kCodeBytes<D>; }
  __device__ uint32_t staging(int stripe) const { return codes(kStages) + stripe * kBoxes * kOutBytes; }
  __device__ uint32_t full(int s) const { return base + kBarriers + s * 8; }  // a stage's tokens and codes are there
  __device__ uint32_t empty(int s) const { return full(kStages) + s * 8; }
  __device__ uint32_t staged() const { return empty(kStages); }  // results are in shared memory
  __device__ uint32_t stored() const { return staged() + 8; }    // and have been read from there
};

template <class D>
__device__ void fetch(const Tiles& tiles, Shared<D> at, const CUtensorMap* a, const CUtensorMap* b) {
  Ring<kStages> ring;
  each_tile(tiles, [&](const Work& w) {
    const int boxes = (w.rows + kTokenBox - 1) / kTokenBox;
    for (int k = 0; k < tiles.p.steps * kStep; ++k, ring.next()) {
      const int s = ring.stage;
      barrier_wait(at.empty(s), ring.parity ^ 1);
      barrier_arrive_expecting(at.full(s), boxes * kBoxBytes + kCodeBytes<D>);
      copy_box(at.codes(s), b, at.full(s), k * kLine<D>, w.line);
      for (int i = 0; i < boxes; ++i)
        copy_box(at.tokens(s) + i * kBoxBytes, a, at.full(s), k * kDeep, w.token + i * kTokenBox);
    }
  });
}

// This thread's two rows of the weight.
__device__ inline int row_of(const Place& t, int i) {
  return t.group * kGroupCols + t.warp % 4 * 16 + i * 8 + t.lane / 4;
}

// Scales of those rows, of a step at a time.
template <class D>
struct Scales {
  const uint8_t* row[2];
  int shift;  // to this lane's

  __device__ Scales(const Params& p, const Work& w, const Place& t) : shift(D::kScaleStep == 2 ? t.lane % 4 / 2 * 8 : 0) {
    const int last = p.groups * p.n - 1;
    MH_UNROLL
    for (int i = 0; i < 2; ++i)
      row[i] = p.b_scale + int64_t{min(w.line + row_of(t, i), last) / p.block_rows} * p.scale_line;
  }
  __device__ void load(int step, uint32_t (&words)[2][kScaleWords<D>]) const {
    MH_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint8_t* at = row[i] + step * kScaleWords<D> * 4;
      if constexpr (kScaleWords<D> == 1) {
        words[i][0] = __ldg(reinterpret_cast<const uint32_t*>(at));
      } else {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(at));
        words[i][0] = two.x >> shift, words[i][1] = two.y >> shift;
      }
    }
  }
};

// Codes of a stage, 16 rows of a warp: of two times 32 columns of the contraction what `fragments` takes.
template <class D>
__device__ inline void load_codes(uint32_t codes, const Place& t, uint32_t (&words)[2][4 / D::kPairs][2]) {
  const int row = t.lane % 16, line = t.group * kGroupCols + t.warp % 4 * 16 + row;
  MH_UNROLL
  for (int i = 0; i < 4 / D::kPairs; ++i) {
    const int run = (2 * i + t.lane / 16) ^ (row * kLine<D> / 128 & (kLine<D> / 16 - 1));
    uint32_t x[4];
    load_rows(x, codes + line * kLine<D> + (run << 4));
    MH_UNROLL
    for (int e = 0; e < 4; ++e) (D::kPairs == 2 ? words[i][e / 2] : words[e / 2][0])[e % 2] = x[e];
  }
}

// The weight's registers for a stage. scales: bytes of the stage's blocks from the lowest on. large: whether one of them is.
template <class D>
__device__ inline void decode(uint32_t codes, const uint32_t (&scales)[2], bool large, const Place& t,
                              uint32_t (&a)[2][2][4]) {
  uint32_t words[2][4 / D::kPairs][2];
  load_codes<D>(codes, t, words);
  MH_UNROLL
  for (int part = 0; part < 2; ++part) {
    const uint32_t first = scales[0] >> part * D::kScaleStep * 8, second = scales[1] >> part * D::kScaleStep * 8;
    uint32_t multipliers[2];
    D::multipliers(first, second, multipliers);
    fragments<D>(words[part], multipliers, a[part]);
    if (D::kLarge && large) {
      MH_UNROLL
      for (int i = 0; i < 8; ++i) {
        uint32_t& x = a[part][i / 4][i % 4];
        x = cuda::multiply_bf16s(x, D::rest(i % 2 ? second : first));
      }
    }
  }
}

// A stage's buffers are free once all warps have come.
template <class D>
__device__ inline void release(Shared<D> at, int stage, int lane) {
  if (lane == 0) barrier_arrive(at.empty(stage));
}

template <class D>
__device__ void skip(Shared<D> at, Ring<kStages>& ring, int stages, int lane) {
  for (int k = 0; k < stages; ++k, ring.next()) {
    barrier_wait(at.full(ring.stage), ring.parity);
    __syncwarp();
    release(at, ring.stage, lane);
  }
}

// A stage is multiplied while the next one is decoded, into the other set of registers. n: sums of a product; fewer where
// the tile has few tokens. next: the first step's scales.
template <class D, int n>
__device__ void sum(float (&sums)[kSums], Shared<D> at, Ring<kStages>& ring, const Scales<D>& scales,
                    uint32_t (&next)[2][kScaleWords<D>], int steps, const Place& t) {
  float(&acc)[n] = reinterpret_cast<float(&)[n]>(sums);
  uint32_t a[kStep][2][2][4];
  int before = -1;
  for (int k = 0; k < steps; ++k) {
    uint32_t words[2][kScaleWords<D>], any = 0;
    MH_UNROLL
    for (int i = 0; i < 2 * kScaleWords<D>; ++i) any |= words[i % 2][i / 2] = next[i % 2][i / 2];
    if (k + 1 < steps) scales.load(k + 1, next);
    const bool large = D::kLarge && __any_sync(0xffffffffu, D::large(any));
#pragma unroll
    for (int stage = 0; stage < kStep; ++stage, ring.next()) {
      const int s = ring.stage, block = stage * 2 * D::kScaleStep;
      barrier_wait(at.full(s), ring.parity);
      const uint32_t mine[2] = {words[0][block / 4] >> block % 4 * 8, words[1][block / 4] >> block % 4 * 8};
      decode<D>(at.codes(s), mine, large, t, a[stage]);
      const uint64_t tokens = matrix_descriptor(at.tokens(s));
      hold(acc);
      products_begin();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) WideProduct::run(acc, a[stage][slice / 2][slice % 2], tokens + 2 * slice);
      products_commit();
      products_wait<1>();
      if (before >= 0) release(at, before, t.lane);
      before = s;
    }
  }
  products_wait<0>();
  hold(acc);
  release(at, before, t.lane);
}

// Outer scales onto the sums: of this thread's two rows of the weight, and of its tokens.
template <class D>
__device__ inline void scale(const Params& p, const Work& w, float (&acc)[kSums], const Place& t) {
  float rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row_of(t, i);
    rows[i] = (row < w.cols ? __ldg(p.b_factor + w.line + row) : 0.0f) * D::kFactor;
  }
#pragma unroll
  for (int j = 0; j < kSums; j += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = j * 2 + t.lane % 4 * 2 + e;
      const float outer = (token < w.rows ? __ldg(p.a_factor + w.token + token) : 0.0f) * D::kFactor;
      acc[j + e] = acc[j + e] * rows[0] * outer, acc[j + 2 + e] = acc[j + 2 + e] * rows[1] * outer;
    }
  }
}

__device__ inline uint32_t pair_of(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

// To where `store_results` takes them from, a token a row.
template <class D>
__device__ inline void write(const float (&acc)[kSums], Shared<D> at, const Place& t) {
  const int byte = (t.group * kGroupCols + t.warp % 4 * 16) * 2 + t.lane / 8 % 2 * 16;
#pragma unroll
  for (int j = 0; j < kSums; j += 8)  // 16 tokens
    store_columns(staged_run(at.staging(j / 8), t.lane / 16 * 8 + t.lane % 8, byte), pair_of(acc[j], acc[j + 1]),
                  pair_of(acc[j + 2], acc[j + 3]), pair_of(acc[j + 4], acc[j + 5]), pair_of(acc[j + 6], acc[j + 7]));
}

template <class D>
__device__ void multiply(const Tiles& tiles, Shared<D> at, const Place& t) {
  const Params& p = tiles.p;
  Ring<kStages> ring;
  Ring<1> results;
  int tile = blockIdx.x;
  if (tile >= tiles.tiles) return;
  Work w = tiles.at(tile, tiles.look(tile));
  Scales<D> scales(p, w, t);
  uint32_t first[2][kScaleWords<D>];
  scales.load(0, first);
  for (int next = tile + gridDim.x;; next += gridDim.x, results.next()) {
    const bool more = next < tiles.tiles;
    const auto seen = tiles.look(more ? next : tile);
    const bool here = t.group * kGroupCols < uniform(w.cols);
    float acc[kSums];
#pragma unroll
    for (int e = 0; e < kSums; ++e) acc[e] = 0.0f;
    if (!here) {
      skip(at, ring, p.steps * kStep, t.lane);
    } else {
      const int rows = uniform(w.rows);
      if (rows <= kTokens / 4)
        sum<D, kSums / 4>(acc, at, ring, scales, first, p.steps, t);
      else if (rows <= kTokens / 2)
        sum<D, kSums / 2>(acc, at, ring, scales, first, p.steps, t);
      else
        sum<D, kSums>(acc, at, ring, scales, first, p.steps, t);
    }
    const Work ahead = tiles.at(more ? next : tile, seen);
    scales = Scales<D>(p, ahead, t);
    scales.load(0, first);  // on their way while results are written
    if (here && p.a_factor) scale<D>(p, w, acc, t);
    barrier_wait(at.stored(), results.parity ^ 1);
    if (here) write<D>(acc, at, t);
    copies_see_stores();
    __syncwarp();
    if (t.lane == 0) barrier_arrive(at.staged());
    if (!more) return;
    w = ahead, tile = next;
  }
}

template <class D>
__global__ void __launch_bounds__(kThreads, 1)
    decoding(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
             const __grid_constant__ CUtensorMap out, const __grid_constant__ Params p) {
  extern __shared__ char memory[];
  const uint32_t start = shared_address(memory);
  const Shared<D> at{(start + 1023) & ~1023u};
  auto* pairs = reinterpret_cast<int32_t*>(memory + (at.base - start) + Shared<D>::kPairs);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(at.full(s), 1);
      barrier_init(at.empty(s), kWarps);
    }
    barrier_init(at.staged(), kWarps);
    barrier_init(at.stored(), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    copies_see_stores();
  }
  count_pairs(p, pairs);
  __syncthreads();
  const Tiles tiles(p, pairs);
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  if (group == 0) {
    give_up_registers<kFetchRegisters>();
    if (thread == 0) fetch<D>(tiles, at, &a, &b);
    else if (thread >= 32 && thread < 64) store_results<kCols, kBoxes>(tiles, at, &out, thread - 32);
  } else {
    take_registers<kProductRegisters>();
    multiply<D>(tiles, at, Place(group - 1, thread));
  }
}

// 8 slots a thread.
struct Slots {
  const uint4* codes;
  const uint8_t* scale;
  uint4* out;
  int64_t runs;  // of 16 bytes of codes, all rows
  int line, block_rows;  // runs of a row; rows that share scales
};

constexpr int kSlotThreads = 256;

template <class D>
__global__ void __launch_bounds__(kSlotThreads) to_slots(const __grid_constant__ Slots s) {
  constexpr int kRunScales = D::kPairs == 4 ? 2 : 1, kRunsOfScale = D::kPairs == 4 ? 1 : 2;
  const int64_t at = int64_t{blockIdx.x} * kSlotThreads + threadIdx.x, run = at / D::kPairs;
  if (run >= s.runs) return;
  const int64_t row = run / s.line;
  const int within = static_cast<int>(run - row * s.line), part = static_cast<int>(at % D::kPairs);
  const uint8_t* scale = s.scale + (row / s.block_rows * s.line + within) * kRunScales / kRunsOfScale;
  const uint4 codes = __ldg(s.codes + run);
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w}, scales[2] = {scale[0], scale[kRunScales - 1]};
  uint32_t pairs[4];
  slots<D>(words, scales, part, pairs);
  s.out[at] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

template <class F>
void by_element(Element element, F&& f) {
  switch (element) {
    case Element::e4m3: return f(Coded<E4M3>{});
    case Element::e5m2: return f(Coded<E5M2>{});
    case Element::e2m1: return f(Coded<E2M1>{});
  }
}

int64_t over(int64_t size, int64_t by) { return (size + by - 1) / by; }

template <class D>
void start(const DecodingArgs& args, unsigned programs, const Where& where) {
  const int64_t line = args.k * 2 / D::kWordCodes * 2;
  const auto a = map_of(args.a, args.rows_a, args.k, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, kTokenBox);
  const auto b = map_of(args.b.codes, args.groups * args.n, line, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, kCols, kLine<D>);
  const auto out = map_of(args.out, args.rows_a, args.n, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, kBoxRows);
  const auto number = [](int64_t x) { return static_cast<int>(x); };
  const Params p{args.a_factor, args.b_factor, args.b.scale, args.out, args.ends, args.blocks, number(args.rows_a),
                 number(args.groups), number(args.count), number(args.n), number(args.k / (kStep * kDeep)), args.b.block_rows,
                 number(args.k / D::kBlock), Out::bf16, false};
  constexpr int kBytes = Shared<D>::kBytes + 1024;  // 1024: to align
  static_assert(kBytes <= 227 << 10);
  const auto kernel = decoding<D>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "decoding GEMM");
  kernel<<<programs, kThreads, kBytes, stream_of(where)>>>(a, b, out, p);
  check(cudaGetLastError(), "decoding GEMM");
}

}  // namespace

void decode_slots(const SlotsArgs& args, const Where& where) {
  if (args.rows * args.k == 0) return;
  const OnDevice device(where, "decode_slots");
  by_element(args.in.element, [&](auto d) {
    using D = decltype(d);
    const int64_t line = args.k / (4 * D::kWordCodes), runs = args.rows * line;
    const Slots s{static_cast<const uint4*>(args.in.codes), args.in.scale, static_cast<uint4*>(args.out), runs,
                  static_cast<int>(line), args.in.block_rows};
    to_slots<D><<<static_cast<unsigned>(over(runs * D::kPairs, kSlotThreads)), kSlotThreads, 0, stream_of(where)>>>(s);
  });
  check(cudaGetLastError(), "decode_slots");
}

void decoding_rows(const DecodingArgs& args, const Where& where) {
  const int64_t most = args.count * over(args.n, kCols);
  if (args.rows_a == 0 || most == 0) return;
  const OnDevice device(where, "decoding GEMM");
  int count;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, where.threads_or_device), "decoding GEMM");
  const auto programs = static_cast<unsigned>(most < count ? most : count);
  by_element(args.b.element, [&](auto d) { start<decltype(d)>(args, programs, where); });
}

}  // namespace mh::gemm
