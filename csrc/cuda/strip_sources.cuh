// Where a warp's strips come from. A source fills `kStrips` of them, tiles of 128 columns side by side or in a tensor's halves;
// `kWeighted`: rows' weights are in shared memory before it does.
#pragma once

#include "cast.h"
#include "strip.cuh"

namespace mh::cuda {

// 1 where there are none.
__device__ __forceinline__ float weight_of(const RowWeights& w, int64_t row) {
  if (!w.data) return 1.0f;
  const int64_t at = w.places ? w.places[row] : row;
  if (at < 0) return 0.0f;
  if (w.dtype == Dtype::f32) return static_cast<const float*>(w.data)[at];
  const uint16_t raw = static_cast<const uint16_t*>(w.data)[at];
  return w.dtype == Dtype::bf16 ? load_raw<BFloat16>(raw) : load_raw<Float16>(raw);
}

// Which rows of the tensor a warp's are, the last one again behind the block's end, and their weights.
template <bool kWeighted, class T>
__device__ __forceinline__ void find_rows(const StripArgs& a, const Tile& t, int64_t m0, StripShared<T>& sh) {
  const int lane = threadIdx.x % kWarp, i = threadIdx.x / kWarp * kWarpRows + lane;
  if (lane < kWarpRows) {
    int64_t row = m0 + min(i, t.rows - 1);
    if constexpr (kWeighted) sh.weight[i] = weight_of(a.weights, row);
    const Groups& g = a.cast.groups;
    if (g.choice) row = static_cast<uint32_t>(max(g.choice[row], 0)) / static_cast<uint32_t>(g.parts);
    sh.source[i] = static_cast<uint32_t>(row);
  }
  __syncwarp();
}

// The tensor's rows, or copies of them.
template <class T>
struct RowsOf {
  static constexpr int kStrips = 1;
  static constexpr bool kWeighted = false;
  static __device__ __forceinline__ void load(const StripArgs& a, const Tile& t, int64_t, const StripShared<T>& sh,
                                              Strip<T> (&v)[1]) {
    const int i0 = threadIdx.x / kWarp * kWarpRows, j = threadIdx.x % kWarp * kLaneCols;
    Reader<T>(a.cast.x.data, a.cast.x.row_stride, t.k0 + (j < t.cols ? j : 0)).read(sh.source + i0, v[0]);
  }
};

// silu(gate) * x * weight.
template <class T>
struct ProductOf {
  static constexpr int kStrips = 1;
  static constexpr bool kWeighted = true;
  static __device__ __forceinline__ void load(const StripArgs& a, const Tile& t, int64_t, const StripShared<T>& sh,
                                              Strip<T> (&v)[1]) {
    constexpr int kAtOnce = 4;  // rows on their way
    const int i0 = threadIdx.x / kWarp * kWarpRows, j = threadIdx.x % kWarp * kLaneCols;
    const int64_t k = t.k0 + (j < t.cols ? j : 0), stride = a.cast.x.row_stride;
    const Reader<T> gates(a.cast.gate, stride, k), ups(a.cast.x.data, stride, k);
    MH_UNROLL
    for (int r0 = 0; r0 < kWarpRows; r0 += kAtOnce) {
      Four<T> gate[kAtOnce], up[kAtOnce];
      gates.read(sh.source + i0 + r0, gate), ups.read(sh.source + i0 + r0, up);
      MH_UNROLL
      for (int r = 0; r < kAtOnce; ++r) {
        const float weight = sh.weight[i0 + r0 + r];
        MH_UNROLL
        for (int h = 0; h < kLaneCols / 2; ++h) {
          const Pair<T>&g = gate[r].of[h], &u = up[r].of[h];
          const float lo = silu_of_narrow(g.lo()) * u.lo(), hi = silu_of_narrow(g.hi()) * u.hi();
          v[0][r0 + r].of[h] = Pair<T>::near(lo * weight, hi * weight);
        }
      }
    }
  }
};

// Sums over a warp's lanes of four numbers each; lane l < 4 gets that of number summed_by(l).
__device__ __forceinline__ int summed_by(int lane) { return lane % 2 * 2 + lane / 2 % 2; }

__device__ __forceinline__ float sum_lanes(const float (&x)[4]) {
  const int lane = threadIdx.x % kWarp;
  const bool odd = lane & 1, second = lane & 2;
  const float low = (odd ? x[2] : x[0]) + __shfl_xor_sync(kAllLanes, odd ? x[0] : x[2], 1);
  const float high = (odd ? x[3] : x[1]) + __shfl_xor_sync(kAllLanes, odd ? x[1] : x[3], 1);
  float sum = (second ? high : low) + __shfl_xor_sync(kAllLanes, second ? low : high, 2);
  MH_UNROLL
  for (int away = 4; away < kWarp; away *= 2) sum += __shfl_xor_sync(kAllLanes, sum, away);
  return sum;
}

// Of one element, from the gradient d of silu(gate) * up * weight. In the order of Triton's code for the same formula.
struct Gradient {
  float of_gate, of_up;
  float of_product;  // times up: what it adds to the weight's gradient

  __device__ __forceinline__ Gradient(float d, float gate, float up, float weight) {
    const float s = sigmoid(gate), dy = d * weight;
    of_product = d * gate * s;
    of_gate = dy * up * s * fmaf(gate, 1.0f - s, 1.0f);
    of_up = dy * gate * s;
  }
};

// The gradients of gate and of up, side by side in x, from that of silu(gate) * up * weight; and the weight's.
template <class T>
struct GradientOf {
  static constexpr int kStrips = 2;
  static constexpr bool kWeighted = true;
  static __device__ __forceinline__ void load(const StripArgs& a, const Tile& t, int64_t m0, const StripShared<T>& sh,
                                              Strip<T> (&v)[2]) {
    constexpr int kAtOnce = 4;
    const int lane = threadIdx.x % kWarp, i0 = threadIdx.x / kWarp * kWarpRows;
    const int64_t k = t.k0 + lane * kLaneCols, stride = a.cast.x.row_stride, half = a.cast.x.cols / 2;
    const Reader<T> gates(a.cast.x.data, stride, k), ups(a.cast.x.data, stride, k + half);
    const Reader<T> grads(a.cast.grad, a.cast.grad_stride, k);
    MH_UNROLL
    for (int r0 = 0; r0 < kWarpRows; r0 += kAtOnce) {
      Four<T> gate[kAtOnce], up[kAtOnce], grad[kAtOnce];
      const uint32_t* rows = sh.source + i0 + r0;
      grads.read(rows, grad), gates.read(rows, gate), ups.read(rows, up);
      float dots[kAtOnce];
      MH_UNROLL
      for (int r = 0; r < kAtOnce; ++r) {
        const float weight = sh.weight[i0 + r0 + r];
        dots[r] = 0.0f;
        MH_UNROLL
        for (int h = 0; h < kLaneCols / 2; ++h) {
          const Pair<T>&d = grad[r].of[h], &g = gate[r].of[h], &u = up[r].of[h];
          const Gradient lo(d.lo(), g.lo(), u.lo(), weight), hi(d.hi(), g.hi(), u.hi(), weight);
          dots[r] = fmaf(hi.of_product, u.hi(), fmaf(lo.of_product, u.lo(), dots[r]));
          v[0][r0 + r].of[h] = Pair<T>::near(lo.of_gate, hi.of_gate);
          v[1][r0 + r].of[h] = Pair<T>::near(lo.of_up, hi.of_up);
        }
      }
      if (a.weights.dots) {
        const float sum = sum_lanes(dots);
        const int i = i0 + r0 + summed_by(lane);
        if (lane < kAtOnce && i < t.rows) a.weights.dots[(m0 + i) * a.cast.tiling.across + t.k0 / kTile] = sum;
      }
    }
  }
};

}  // namespace mh::cuda
