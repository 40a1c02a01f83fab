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

constexpr int kDeep = 64;                 // of the contraction at a time: a row of tokens is 128 bytes
constexpr int kGroupCols = kCols / 2;     // a warpgroup's, 64 a product
constexpr int kWarps = 8;                 // that multiply
constexpr int kSums = kRows / 2;          // a thread's, of 64 of its warpgroup's columns
constexpr int kGroupThreads = 128, kThreads = 3 * kGroupThreads;
constexpr int kFetchRegisters = 40, kProductRegisters = 232;
constexpr int kStages = 5;
constexpr int kTokenBytes = kRows * kDeep * 2;

template <class D>
constexpr int kLine = kDeep * 2 / D::kWordCodes * 2;  // bytes of codes of a row
template <class D>
constexpr int kCodeBytes = kCols * kLine<D>;
template <class D>
constexpr int kScaleStages = D::kBlock * 4 / kDeep;  // that 4 bytes of scales last for

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

// A block of tokens after the other, all columns of each.
struct Tiles {
  const Params& p;
  int across, tiles;

  struct Seen {
    int group, row, rows;
  };

  __device__ explicit Tiles(const Params& params) : p(params), across((p.n + kCols - 1) / kCols) {
    tiles = (p.ends ? p.ends[p.groups - 1] : p.count) * across;
  }
  __device__ Seen look(int tile) const {
    const int first = tile / across * kRows;
    if (!p.ends) return {0, first, min(kRows, p.tokens - first)};
    const int32_t* block = p.blocks + tile / across;
    return {block[0], block[p.count], block[2 * p.count]};
  }
  __device__ Work at(int tile, const Seen& seen) const {
    const int n = tile % across * kCols;
    return {seen.row, seen.group * p.n + n, seen.rows, min(kCols, p.n - n), seen.row, n};
  }
};

template <class D>
struct Shared {
  uint32_t base;  // aligned

  static constexpr int kBytes = kStages * (kTokenBytes + kCodeBytes<D>) + kStaging + (2 * kStages + 2) * 8;

  __device__ uint32_t tokens(int s) const { return base + s * kTokenBytes; }
  __device__ uint32_t codes(int s) const { return tokens(kStages) + s * kCodeBytes<D>; }
  __device__ uint32_t staging(int stripe) const { return codes(kStages) + stripe * kBoxes * kOutBytes; }
  // A stage's tokens and codes are there.
  __device__ uint32_t full(int s) const { return staging(kRows / kBoxRows) + s * 8; }
  __device__ uint32_t empty(int s) const { return full(kStages) + s * 8; }
  __device__ uint32_t staged() const { return empty(kStages); }  // results are in shared memory
  __device__ uint32_t stored() const { return staged() + 8; }    // and have been read from there
};

template <class D>
__device__ void fetch(const Tiles& tiles, Shared<D> at, const CUtensorMap* a, const CUtensorMap* b) {
  Ring<kStages> ring;
  each_tile(tiles, [&](const Work& w) {
    for (int k = 0; k < tiles.p.steps; ++k, ring.next()) {
      const int s = ring.stage;
      barrier_wait(at.empty(s), ring.parity ^ 1);
      barrier_arrive_expecting(at.full(s), kTokenBytes + kCodeBytes<D>);
      copy_box(at.tokens(s), a, at.full(s), k * kDeep, w.token);
      copy_box(at.codes(s), b, at.full(s), k * kLine<D>, w.line);
    }
  });
}

// This thread's four rows of the weight: 8 m and 64 g below its first.
__device__ inline int row_of(const Place& t, int i) {
  return t.group * kGroupCols + i / 2 * 64 + t.warp % 4 * 16 + i % 2 * 8 + t.lane / 4;
}

// Scales of those rows, 4 bytes at a time.
template <class D>
struct Scales {
  const uint8_t* from;
  uint32_t line[4];  // from there to each row's

  __device__ Scales(const Params& p, const Work& w, const Place& t) {
    const int first = w.line / p.block_rows, last = (p.groups * p.n - 1) / p.block_rows;
    from = p.b_scale + int64_t{first} * p.scale_line;
    MH_UNROLL
    for (int i = 0; i < 4; ++i)
      line[i] = static_cast<uint32_t>(min((w.line + row_of(t, i)) / p.block_rows, last) - first) * p.scale_line;
  }
  __device__ void load(int stage, const Place& t, uint32_t (&words)[4]) const {
    MH_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto* at = from + line[i] + stage / kScaleStages<D> * 4;
      words[i] = __ldg(reinterpret_cast<const uint32_t*>(at)) >> (D::kScaleStep == 2 ? t.lane % 4 / 2 * 8 : 0);
    }
  }
};

// Codes of 32 columns of the contraction, `part` of the stage: of two times 16 rows what `fragments` takes.
template <class D>
__device__ inline void load_codes(uint32_t codes, int part, const Place& t, uint32_t (&words)[2][4 / D::kPairs][2]) {
  const auto at = [&](int row, int run) {
    const int line = t.group * kGroupCols + t.warp % 4 * 16 + row;
    return codes + line * kLine<D> + ((run ^ (row * kLine<D> / 128 & (kLine<D> / 16 - 1))) << 4);
  };
  uint32_t x[4];
  if constexpr (D::kPairs == 2) {
    MH_UNROLL
    for (int m = 0; m < 2; ++m) {
      load_rows(x, at(m * 64 + t.lane % 16, 2 * part + t.lane / 16));
      words[m][0][0] = x[0], words[m][0][1] = x[1], words[m][1][0] = x[2], words[m][1][1] = x[3];
    }
  } else {
    load_rows(x, at(t.lane / 16 * 64 + t.lane % 16, part));
    words[0][0][0] = x[0], words[0][0][1] = x[1], words[1][0][0] = x[2], words[1][0][1] = x[3];
  }
}

// The weight's registers for 32 columns of the contraction. scales: their bytes are the lowest. large: whether one of
// them is.
template <class D>
__device__ inline void decode(uint32_t codes, int part, const uint32_t (&scales)[4], bool large, const Place& t,
                              uint32_t (&a)[2][2][4]) {
  uint32_t words[2][4 / D::kPairs][2];
  load_codes<D>(codes, part, t, words);
  MH_UNROLL
  for (int m = 0; m < 2; ++m) {
    uint32_t multipliers[2];
    D::multipliers(scales[2 * m], scales[2 * m + 1], multipliers);
    fragments<D>(words[m], multipliers, a[m]);
  }
  if (D::kLarge && large) {
    MH_UNROLL
    for (int i = 0; i < 16; ++i) {
      uint32_t& x = a[i / 8][i / 4 % 2][i % 4];
      x = cuda::multiply_bf16s(x, D::rest(scales[i / 8 * 2 + i % 2]));
    }
  }
}

// A stage's buffers are free once all warps have come.
template <class D>
__device__ inline void release(Shared<D> at, int stage, int lane) {
  if (lane == 0) barrier_arrive(at.empty(stage));
}

template <class D>
__device__ void skip(Shared<D> at, Ring<kStages>& ring, int steps, int lane) {
  for (int k = 0; k < steps; ++k, ring.next()) {
    barrier_wait(at.full(ring.stage), ring.parity);
    __syncwarp();
    release(at, ring.stage, lane);
  }
}

// 32 columns of the contraction are multiplied while the next 32 are decoded, into the other set of registers.
// Of a tile with few tokens half the sums are made, n a product.
template <class D, int n>
__device__ void sum(float (&sums)[2][kSums], Shared<D> at, Ring<kStages>& ring, const Scales<D>& scales, int steps,
                    const Place& t) {
  float(&first)[n] = reinterpret_cast<float(&)[n]>(sums[0]), (&second)[n] = reinterpret_cast<float(&)[n]>(sums[1]);
  uint32_t next[4], a[2][2][2][4];
  int before = -1;
  scales.load(0, t, next);
  for (int k = 0; k < steps; k += kScaleStages<D>) {
    uint32_t words[4];
    MH_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = next[i];
    if (k + kScaleStages<D> < steps) scales.load(k + kScaleStages<D>, t, next);
    const bool large = D::kLarge && __any_sync(0xffffffffu, D::large(words[0] | words[1] | words[2] | words[3]));
#pragma unroll
    for (int stage = 0; stage < kScaleStages<D>; ++stage, ring.next()) {
      const int s = ring.stage;
      barrier_wait(at.full(s), ring.parity);
      const uint64_t tokens = matrix_descriptor(at.tokens(s));
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int shift = (stage * 2 + part) * D::kScaleStep * 8;
        const uint32_t mine[4] = {words[0] >> shift, words[1] >> shift, words[2] >> shift, words[3] >> shift};
        decode<D>(at.codes(s), part, mine, large, t, a[part]);
        hold(first), hold(second);
        products_begin();
#pragma unroll
        for (int slice = 0; slice < 2; ++slice) {
          WideProduct::run(first, a[part][0][slice], tokens + 2 * (2 * part + slice), true);
          WideProduct::run(second, a[part][1][slice], tokens + 2 * (2 * part + slice), true);
        }
        products_commit();
        products_wait<1>();
        if (part == 0 && before >= 0) release(at, before, t.lane);
      }
      before = s;
    }
  }
  products_wait<0>();
  hold(first), hold(second);
  release(at, before, t.lane);
}

// Outer scales onto the sums: of this thread's four rows of the weight, and of its tokens.
template <class D>
__device__ inline void scale(const Params& p, const Work& w, float (&acc)[2][kSums], const Place& t) {
  float rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = row_of(t, i);
    rows[i] = (row < w.cols ? __ldg(p.b_factor + w.line + row) : 0.0f) * D::kFactor;
  }
#pragma unroll
  for (int j = 0; j < kSums; j += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = j * 2 + t.lane % 4 * 2 + e;
      const float outer = (token < w.rows ? __ldg(p.a_factor + w.token + token) : 0.0f) * D::kFactor;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = acc[i / 2][j + i % 2 * 2 + e];
        x = x * rows[i] * outer;
      }
    }
  }
}

__device__ inline uint32_t pair_of(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

// To where `store_results` takes them from, a token a row.
template <class D>
__device__ inline void write(const float (&acc)[2][kSums], Shared<D> at, const Place& t) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int byte = (t.group * kGroupCols + m * 64 + t.warp % 4 * 16) * 2 + t.lane / 8 % 2 * 16;
#pragma unroll
    for (int j = 0; j < kSums; j += 8)  // 16 tokens
      store_columns(staged_run(at.staging(j / 8), t.lane / 16 * 8 + t.lane % 8, byte),
                    pair_of(acc[m][j], acc[m][j + 1]), pair_of(acc[m][j + 2], acc[m][j + 3]),
                    pair_of(acc[m][j + 4], acc[m][j + 5]), pair_of(acc[m][j + 6], acc[m][j + 7]));
  }
}

template <class D>
__device__ void multiply(const Tiles& tiles, Shared<D> at, const Place& t) {
  const Params& p = tiles.p;
  Ring<kStages> ring;
  Ring<1> results;
  each_tile(tiles, [&](const Work& w) {
    const int rows = uniform(w.rows), cols = uniform(w.cols);
    if (t.group * kGroupCols >= cols) {
      skip(at, ring, p.steps, t.lane);
      barrier_wait(at.stored(), results.parity ^ 1);
    } else {
      float acc[2][kSums];
#pragma unroll
      for (int e = 0; e < 2 * kSums; ++e) acc[e / kSums][e % kSums] = 0.0f;
      const Scales<D> scales(p, w, t);
      if (rows <= kRows / 2)
        sum<D, kSums / 2>(acc, at, ring, scales, p.steps, t);
      else
        sum<D, kSums>(acc, at, ring, scales, p.steps, t);
      if (p.a_factor) scale<D>(p, w, acc, t);
      barrier_wait(at.stored(), results.parity ^ 1);
      write<D>(acc, at, t);
    }
    copies_see_stores();
    __syncwarp();
    if (t.lane == 0) barrier_arrive(at.staged());
    results.next();
  });
}

template <class D>
__global__ void __launch_bounds__(kThreads, 1)
    decoding(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
             const __grid_constant__ CUtensorMap out, const __grid_constant__ Params p) {
  extern __shared__ char memory[];
  const Shared<D> at{(shared_address(memory) + 1023) & ~1023u};
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
  __syncthreads();
  const Tiles tiles(p);
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  if (group == 0) {
    give_up_registers<kFetchRegisters>();
    if (thread == 0) fetch<D>(tiles, at, &a, &b);
    else if (thread >= 32 && thread < 64) store_results(tiles, at, &out, thread - 32);
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
  const auto a = map_of(args.a, args.rows_a, args.k, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, kRows);
  const auto b = map_of(args.b.codes, args.groups * args.n, line, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, kCols, kLine<D>);
  const auto out = map_of(args.out, args.rows_a, args.n, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, kBoxRows);
  const auto number = [](int64_t x) { return static_cast<int>(x); };
  const Params p{args.a_factor, args.b_factor, args.b.scale, args.out, args.ends, args.blocks, number(args.rows_a),
                 number(args.groups), number(args.count), number(args.n), number(args.k / kDeep), args.b.block_rows,
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
