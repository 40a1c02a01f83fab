// Amaxes in registers: of raw and of transformed values, with and without NaN.
#pragma once

#include "line.cuh"

namespace mh::cuda {

// One amax, of the tensor or of each row or column of the matrix as the kernel sees it.
struct Target {
  float* out;
  bool per_line;
  bool turned;    // of the transformed values
  bool keep_nan;
};

// Largest magnitudes of two neighbouring columns (a line along K counts as both): NaNs aside, and where there were any. Only
// NVFP4 transforms, and its amaxes leave NaNs out.
template <class T>
struct Largest {
  PairAmax<T> raw;
  float turned[2] = {0.0f, 0.0f};
  bool raw_nan[2] = {false, false};

  template <int lines, int n>
  __device__ void add_raw(const Pair<T> (&p)[lines][n]) {
    PairAmax<T> most;
    MH_UNROLL
    for (int i = 0; i < lines * n; ++i) most.add(p[i / n][i % n]);
    if (most.both() > kInfBits) {  // rare
      raw_nan[0] |= most.lo() > kInfBits, raw_nan[1] |= most.hi() > kInfBits;
      most = {};
      MH_UNROLL
      for (int i = 0; i < lines * n; ++i) most.add(without_nan(p[i / n][i % n]));
    }
    raw.add(most.pair());
  }

  template <int n>
  __device__ void add_raw(const Pair<T> (&p)[n]) {
    add_raw(reinterpret_cast<const Pair<T>(&)[1][n]>(p));
  }

  __device__ void add_turned(float (&x)[kLine], bool whole, int column) {
    if (whole) hadamard16(x, false);
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) turned[column] = max_magnitude(turned[column], x[e]);
  }

  // A line along K, n elements of it inside.
  __device__ void add_line(const Pair<T> (&line)[kLine / 2], int n, bool wants_raw, bool wants_turned) {
    if (wants_raw) add_raw(line);
    if (!wants_turned) return;
    float x[kLine];
    MH_UNROLL
    for (int e = 0; e < kLine / 2; ++e) x[2 * e] = line[e].lo(), x[2 * e + 1] = line[e].hi();
    add_turned(x, n == kLine, 0);
  }

  __device__ void merge(const Largest& other) {
    raw.add(other.raw.pair());
    MH_UNROLL
    for (int c = 0; c < 2; ++c) {
      turned[c] = max_magnitude(turned[c], other.turned[c]);
      raw_nan[c] |= other.raw_nan[c];
    }
  }

  __device__ int32_t get(const Target& t, int column) const {
    if (t.turned) return abs_bits(turned[column]);
    return t.keep_nan && raw_nan[column] ? kNanBits : (column ? raw.hi() : raw.lo());
  }
  __device__ int32_t get(const Target& t) const { return max_bits(get(t, 0), get(t, 1)); }

 private:
  static __device__ Pair<T> without_nan(Pair<T> p) {
    const bool lo = abs_bits(p.lo()) > kInfBits, hi = abs_bits(p.hi()) > kInfBits;
    return Pair<T>::of(lo ? 0.0f : p.lo(), hi ? 0.0f : p.hi());
  }
};

// Neighbours along K from global memory, `n` of them inside. `vector`: contiguous and aligned.
template <class T, int kPairs>
__device__ __forceinline__ void read_pairs(const typename T::Raw* first, int64_t stride, int n, bool vector,
                                           Pair<T> (&pairs)[kPairs]) {
  if (vector && n == 2 * kPairs) {
    uint4 v[sizeof(pairs) / sizeof(uint4)];
    MH_UNROLL
    for (unsigned i = 0; i < sizeof(pairs) / sizeof(uint4); ++i) v[i] = reinterpret_cast<const uint4*>(first)[i];
    memcpy(pairs, v, sizeof pairs);
    return;
  }
  MH_UNROLL
  for (int e = 0; e < kPairs; ++e)
    pairs[e] = Pair<T>::of(2 * e < n ? load_raw<T>(first[2 * e * stride]) : 0.0f,
                           2 * e + 1 < n ? load_raw<T>(first[(2 * e + 1) * stride]) : 0.0f);
}

}  // namespace mh::cuda
