// Quantize on CUDA: one thread block a tile at a time.
#include <cuda_runtime.h>

#include "../numerics/random.h"
#include "tile.cuh"

namespace mh::cuda {
namespace {

// Encode scales known before the cast are stored by whichever thread comes by, also where the payload is empty.
__device__ void write_preset_scales(const QuantizeArgs& a) {
  const int64_t n = !a.spec.outer_rows ? 1 : (a.spec.axis == 0 ? a.x.rows : a.x.cols);
  float* out = static_cast<float*>(a.out.scale);
  const int64_t threads = gridDim.x * static_cast<int64_t>(kThreads);
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < n; i += threads)
    out[i] = 1.0f / preset_encode_scale(a.spec, a.out.amax[i], a.fixed_scale);
}

// Block amaxes by integer maxima, which propagate NaN and do not depend on the order.
__device__ void collect_amax(const FormatSpec& spec, const Tiling& g, const Tile& t, const SharedTile& s, int32_t* amax) {
  for (int b = threadIdx.x; b < g.blocks(); b += kThreads) amax[b] = 0;
  __syncthreads();
  const bool down = spec.block_m > 1 && spec.block_k == 1;
  for_each_run(g, t, s, down, [&](int i, int j, int step, int n) {
    const float* first = &s.value(i, j);
    int32_t most = 0;
    for (int e = 0; e < n; ++e) most = max_bits(most, abs_bits(first[e * step]));
    atomicMax(&amax[g.block_of(i, j)], most);
  });
  __syncthreads();
}

template <ScaleRule rule>
__device__ void block_scales(const QuantizeArgs& a, const Tiling& g, const Tile& t, const int32_t* amax, float* mult) {
  for_each_block(a.spec, g, t, [&](int b, int64_t row, int64_t col) {
    const bool two_level = rule == ScaleRule::e4m3_amax;
    const float enc = two_level ? nvfp4_outer_encode(a.out.amax[outer_index(a.spec, row, col)]) : 1.0f;
    const BlockScale scale = block_scale<rule>(a.spec, amax_from_bits(amax[b]), enc);
    mult[b] = scale.multiplier;
    const int64_t at = row * g.scale_cols + col;
    if constexpr (rule == ScaleRule::fp32)
      static_cast<float*>(a.out.scale)[at] = bits_float(scale.stored);
    else
      static_cast<uint8_t*>(a.out.scale)[at] = static_cast<uint8_t>(scale.stored);
  });
}

__device__ void tile_multipliers(const QuantizeArgs& a, const Tiling& g, const Tile& t, const SharedTile& s, int32_t* amax,
                                 float* mult) {
  if (is_preset(a.spec)) {
    for_each_block(a.spec, g, t, [&](int b, int64_t row, int64_t col) {
      mult[b] = preset_encode_scale(a.spec, a.out.amax[outer_index(a.spec, row, col)], a.fixed_scale);
    });
  } else {
    collect_amax(a.spec, g, t, s, amax);
    switch (a.spec.scale_rule) {
      case ScaleRule::e8m0: block_scales<ScaleRule::e8m0>(a, g, t, amax, mult); break;
      case ScaleRule::e4m3_amax: block_scales<ScaleRule::e4m3_amax>(a, g, t, amax, mult); break;
      default: block_scales<ScaleRule::fp32>(a, g, t, amax, mult);
    }
  }
  __syncthreads();
}

__device__ uint32_t encode_stochastic(const QuantizeArgs& a, const RandomKey& key, int64_t m, int64_t k, float x) {
  const int64_t row = a.row_ids ? a.row_ids[m] : m + a.rng[kRowOffset];
  const int64_t index = row * a.rng[kGlobalCols] + k + a.rng[kColOffset];
  return encode_e2m1_stochastic(x, random_draw(key, static_cast<uint64_t>(index)));
}

__device__ void encode_tile(const QuantizeArgs& a, const Tiling& g, const Tile& t, const SharedTile& s, const float* mult) {
  const RandomKey key = a.spec.sr ? random_key(a.rng, a.spec.axis) : RandomKey{};
  for_each(g, t, false, [&](int i, int j) {
    const float x = s.value(i, j) * mult[g.block_of(i, j)];
    uint32_t code = 0;
    switch (a.spec.element) {
      case Element::e4m3: code = encode<E4M3>(x); break;
      case Element::e5m2: code = encode<E5M2>(x); break;
      case Element::e2m1: code = a.spec.sr ? encode_stochastic(a, key, t.m0 + i, t.k0 + j, x) : encode<E2M1>(x);
    }
    s.code(i, j) = static_cast<uint8_t>(code);
  });
}

// FP4: the even element of a pair along the stored rows writes both.
__device__ void store_packed(const Payload& p, const Tiling& g, const Tile& t, const SharedTile& s) {
  const int64_t ld = ((p.transposed ? g.m : g.k) + 1) / 2;
  for_each(g, t, p.transposed, [&](int i, int j) {
    if ((p.transposed ? i : j) & 1) return;
    const bool pair = p.transposed ? i + 1 < t.rows : j + 1 < t.cols;
    const uint32_t high = pair ? s.code(i + p.transposed, j + !p.transposed) : 0;
    const int64_t at = p.transposed ? (t.k0 + j) * ld + (t.m0 + i) / 2 : (t.m0 + i) * ld + (t.k0 + j) / 2;
    p.codes[at] = static_cast<uint8_t>(s.code(i, j) | high << 4);
  });
}

__device__ void store_bytes(const Payload& p, const Tiling& g, const Tile& t, const SharedTile& s) {
  for_each(g, t, p.transposed, [&](int i, int j) {
    p.codes[p.transposed ? (t.k0 + j) * g.m + t.m0 + i : (t.m0 + i) * g.k + t.k0 + j] = s.code(i, j);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) quantize_tiles(QuantizeArgs a, Tiling g) {
  extern __shared__ float memory[];
  __shared__ int32_t amax[kMaxBlocks];
  __shared__ float mult[kMaxBlocks];
  if (a.noop && *a.noop) return;
  if (is_preset(a.spec)) write_preset_scales(a);
  const SharedTile s(memory, g);
  for (int64_t index = blockIdx.x; index < g.count; index += gridDim.x) {
    const Tile t = g.tile(index);
    load_values<T>(a.x, g, t, s);
    __syncthreads();
    if (a.spec.rht) {
      hadamard_tile(a.spec, g, t, s, false);
      __syncthreads();
    }
    tile_multipliers(a, g, t, s, amax, mult);
    encode_tile(a, g, t, s, mult);
    __syncthreads();
    if (a.spec.element == Element::e2m1)
      store_packed(a.out, g, t, s);
    else
      store_bytes(a.out, g, t, s);
    __syncthreads();  // the next tile overwrites the codes
  }
}

template <class T>
struct Quantize {
  static void run(const QuantizeArgs& args, const Where& where) {
    launch_tiles(quantize_tiles<T>, args, make_tiling(args.spec, args.x.rows, args.x.cols), where, "quantize");
  }
};

}  // namespace

void quantize(const QuantizeArgs& args, const Where& where) {
  if (args.x.rows * args.x.cols == 0 && !is_preset(args.spec)) return;
  const OnDevice on(where, "quantize");
  by_dtype<Quantize>(args.x.dtype, args, where);
}

}  // namespace mh::cuda
