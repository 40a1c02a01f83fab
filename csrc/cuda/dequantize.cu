// Dequantize on CUDA: one thread block a tile at a time.
#include <cuda_runtime.h>

#include "tile.cuh"

namespace mh::cuda {
namespace {

__device__ void load_codes(const DequantizeArgs& a, const Tiling& g, const Tile& t, const SharedTile& s) {
  const bool packed = a.spec.element == Element::e2m1, down = a.in.transposed;
  const int64_t extent = down ? g.m : g.k;
  const int64_t ld = packed ? (extent + 1) / 2 : extent;
  for_each(g, t, down, [&](int i, int j) {
    const int64_t row = down ? t.k0 + j : t.m0 + i, col = down ? t.m0 + i : t.k0 + j;
    const uint8_t byte = a.in.codes[row * ld + (packed ? col / 2 : col)];
    s.code(i, j) = packed ? byte >> (col % 2 * 4) & 15 : byte;
  });
}

// Decode scale of each block, and NVFP4's second level (1 where it is left out).
__device__ void load_scales(const DequantizeArgs& a, const Tiling& g, const Tile& t, float* scale, float* outer) {
  for_each_block(a.spec, g, t, [&](int b, int64_t row, int64_t col) {
    const int64_t at = row * g.scale_cols + col;
    outer[b] = 1.0f;
    switch (a.spec.scale_rule) {
      case ScaleRule::e8m0: scale[b] = e8m0_decode(static_cast<const uint8_t*>(a.in.scale)[at]); break;
      case ScaleRule::e4m3_amax:
        scale[b] = decode<E4M3>(static_cast<const uint8_t*>(a.in.scale)[at]);
        if (a.outer) outer[b] = 1.0f / nvfp4_outer_encode(a.in.amax[outer_index(a.spec, row, col)]);
        break;
      default: scale[b] = static_cast<const float*>(a.in.scale)[at];
    }
  });
}

__device__ float decode_element(Element element, uint32_t code) {
  switch (element) {
    case Element::e4m3: return decode<E4M3>(code);
    case Element::e5m2: return decode<E5M2>(code);
    default: return decode<E2M1>(code);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) dequantize_tiles(DequantizeArgs a, Tiling g) {
  extern __shared__ float memory[];
  __shared__ float scale[kMaxBlocks];
  __shared__ float outer[kMaxBlocks];
  const SharedTile s(memory, g);
  for (int64_t index = blockIdx.x; index < g.count; index += gridDim.x) {
    const Tile t = g.tile(index);
    load_codes(a, g, t, s);
    load_scales(a, g, t, scale, outer);
    __syncthreads();
    for_each(g, t, false, [&](int i, int j) {
      const int b = g.block_of(i, j);
      s.value(i, j) = decode_element(a.spec.element, s.code(i, j)) * scale[b] * outer[b];
    });
    __syncthreads();
    if (a.spec.rht && a.inverse_rht) {
      hadamard_tile(a.spec, g, t, s, true);
      __syncthreads();
    }
    store_values<T>(a.out, g, t, s);
    __syncthreads();  // the next tile overwrites the codes
  }
}

template <class T>
struct Dequantize {
  static void run(const DequantizeArgs& args, const Where& where) {
    launch_tiles(dequantize_tiles<T>, args, make_tiling(args.spec, args.out.rows, args.out.cols), where, "dequantize");
  }
};

}  // namespace

void dequantize(const DequantizeArgs& args, const Where& where) {
  const OnDevice on(where, "dequantize");
  by_dtype<Dequantize>(args.out.dtype, args, where);
}

}  // namespace mh::cuda
