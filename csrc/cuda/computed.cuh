// Tiles that are computed where they would be read. A source says which elements of which tensors an element comes from
// (`input`, where it `needs` that one) and what it is (`of`, in FP32); it is rounded to the tensor's type, as a kernel that
// writes it would do.
#pragma once

#include "tile.cuh"

namespace mh::cuda {

// silu(gate) * up.
template <class T>
struct Swiglu {
  using Raw = typename T::Raw;
  static constexpr int kInputs = 2;
  const Raw *gate, *up;
  int64_t row_stride, col_stride;

  __device__ static constexpr bool needs(int, int64_t) { return true; }
  __device__ const Raw* input(int n, int64_t m, int64_t k) const { return (n ? up : gate) + m * row_stride + k * col_stride; }
  __device__ float of(const float (&v)[kInputs], int64_t) const { return silu(v[0]) * v[1]; }
};

// The gradients of gate and up, side by side as gate and up are in x, from that of silu(gate) * up.
template <class T>
struct SwigluGradient {
  using Raw = typename T::Raw;
  static constexpr int kInputs = 3;
  const Raw *x, *grad;
  int64_t row_stride, col_stride, grad_stride, half;

  __device__ bool of_gate(int64_t k) const { return k < half; }
  __device__ bool needs(int n, int64_t k) const { return n < 2 || of_gate(k); }
  __device__ const Raw* input(int n, int64_t m, int64_t k) const {
    const int64_t j = of_gate(k) ? k : k - half;
    if (n == 0) return grad + m * grad_stride + j;
    return x + m * row_stride + (n == 2 ? half + j : j) * col_stride;
  }
  // In the order and with the fused product of Triton's code for the same formula.
  __device__ float of(const float (&v)[kInputs], int64_t k) const {
    const float dy = v[0], gate = v[1], up = v[2], s = sigmoid(gate);
    return of_gate(k) ? dy * up * s * fmaf(gate, 1.0f - s, 1.0f) : dy * gate * s;
  }
};

// Elements that one thread computes one by one.
template <class T, class Source>
__device__ void compute_elements(const Source& source, const Tile& t, char* tile) {
  using Raw = typename T::Raw;
  for (int at = threadIdx.x; at < kTile * kTile; at += kThreads) {
    const int i = at / kTile, j = at % kTile;
    float v[Source::kInputs] = {};
    const bool inside = i < t.rows && j < t.cols;
    MH_UNROLL
    for (int n = 0; n < Source::kInputs; ++n)
      if (inside && source.needs(n, t.k0 + j)) v[n] = load_raw<T>(*source.input(n, t.m0 + i, t.k0 + j));
    *reinterpret_cast<Raw*>(tile + element_offset<T>(i, j)) = inside ? T::store(source.of(v, t.k0 + j)) : Raw{};
  }
}

// Fills a tile, with zeros where the matrix ends. `vector`: whatever a chunk of 16 bytes comes from is contiguous and
// aligned, and chunks end where the matrix does.
template <class T, class Source>
__device__ void compute_tile(const Source& source, bool vector, const Tile& t, char* tile) {
  constexpr int kPerChunk = kVector / static_cast<int>(sizeof(typename T::Raw)), kChunks = kTile / kPerChunk;
  constexpr int kInputs = Source::kInputs, kAtOnce = 2;  // chunks whose inputs are on their way together
  if (!vector) return compute_elements<T>(source, t, tile);
#pragma unroll 1
  for (int first = threadIdx.x; first < kTile * kChunks; first += kAtOnce * kThreads) {
    Pair<T> in[kAtOnce][kInputs][kPerChunk / 2] = {};
    MH_UNROLL
    for (int u = 0; u < kAtOnce; ++u) {
      const int at = first + u * kThreads, i = at / kChunks, j = at % kChunks * kPerChunk;
      if (i >= t.rows || j >= t.cols) continue;
      MH_UNROLL
      for (int n = 0; n < kInputs; ++n) {
        if (!source.needs(n, t.k0 + j)) continue;
        const uint4 v = *reinterpret_cast<const uint4*>(source.input(n, t.m0 + i, t.k0 + j));
        memcpy(in[u][n], &v, sizeof v);
      }
    }
    MH_UNROLL
    for (int u = 0; u < kAtOnce; ++u) {
      const int at = first + u * kThreads, i = at / kChunks, chunk = at % kChunks;
      Pair<T> made[kPerChunk / 2];
      MH_UNROLL
      for (int e = 0; e < kPerChunk / 2; ++e) {
        float lo[kInputs], hi[kInputs];
        MH_UNROLL
        for (int n = 0; n < kInputs; ++n) lo[n] = in[u][n][e].lo(), hi[n] = in[u][n][e].hi();
        const int64_t k = t.k0 + chunk * kPerChunk;
        made[e] = Pair<T>::near(source.of(lo, k), source.of(hi, k));
      }
      uint4 out;
      memcpy(&out, made, sizeof out);
      *reinterpret_cast<uint4*>(tile + chunk_offset<T>(i, chunk)) = out;
    }
  }
}

}  // namespace mh::cuda
