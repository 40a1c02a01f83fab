// Lines: 16 elements along the direction of the scale blocks, the unit of work of a thread. Every block is one or more
// whole lines, a Hadamard group is one, and so is a packed word pair of FP4.
#pragma once

#include "../numerics/hadamard.h"
#include "../numerics/random.h"
#include "../numerics/scales.h"
#include "ptx.cuh"

namespace mh::cuda {

constexpr int kLine = 16;

// Two neighbours along K, as loaded: a line along K is eight of them, and sixteen, one below the other, are two lines
// along M.
template <class T>
struct alignas(2 * sizeof(typename T::Raw)) Pair {
  static constexpr int kWords = sizeof(typename T::Raw) / 2;
  uint32_t w[kWords];

  __device__ float lo() const {
    if constexpr (kWords == 1) return load_raw<T>(static_cast<uint16_t>(w[0]));
    if constexpr (kWords == 2) return bits_float(w[0]);
  }
  __device__ float hi() const {
    if constexpr (kWords == 1) return load_raw<T>(static_cast<uint16_t>(w[0] >> 16));
    if constexpr (kWords == 2) return bits_float(w[1]);
  }
  static __device__ Pair of(float lo, float hi) {
    Pair p;
    if constexpr (kWords == 1) p.w[0] = T::store(lo) | static_cast<uint32_t>(T::store(hi)) << 16;
    if constexpr (kWords == 2) p.w[0] = float_bits(lo), p.w[1] = float_bits(hi);
    return p;
  }
};

// Largest magnitudes of the low and of the high elements of pairs. Raw magnitudes order like their values, NaN above
// Inf, in 16 bits as in 32.
template <class T>
struct PairAmax {
  uint32_t most[Pair<T>::kWords] = {};

  __device__ void add(const Pair<T>& p) {
    if constexpr (Pair<T>::kWords == 1) {
      most[0] = max_u16x2(most[0], p.w[0] & 0x7fff7fffu);
    } else {
      most[0] = max(most[0], p.w[0] & 0x7fffffffu);
      most[1] = max(most[1], p.w[1] & 0x7fffffffu);
    }
  }
  __device__ int32_t lo() const { return abs_bits(pair().lo()); }
  __device__ int32_t hi() const { return abs_bits(pair().hi()); }
  __device__ int32_t both() const { return max_bits(lo(), hi()); }

  __device__ Pair<T> pair() const {
    Pair<T> p;
    MH_UNROLL
    for (int i = 0; i < Pair<T>::kWords; ++i) p.w[i] = most[i];
    return p;
  }
};

__device__ inline int32_t line_amax(const float (&x)[kLine]) {
  int32_t most = 0;
  MH_UNROLL
  for (int e = 0; e < kLine; ++e) most = max_bits(most, abs_bits(x[e]));
  return most;
}

// What a direction's kernel is compiled for. `fp4_mixed` is FP4 with the Hadamard transform, stochastic rounding or both.
enum class Kind { none, fp8, fp4, fp4_mixed };

template <Kind kind>
constexpr bool kIsFp4 = kind == Kind::fp4 || kind == Kind::fp4_mixed;

// A line's codes as stored: a byte each, or two a byte.
template <Kind kind>
struct Codes {
  static constexpr int kWords = kIsFp4<kind> ? 2 : 4;
  static constexpr int kBytes = kWords * 4;
  uint32_t w[kWords];
};

// E2M1 from FP32 arithmetic, two ways that share a step. With E = floor(log2(max(|x|, 1))), codes at |x| are multiples
// n of 2^(E - 1), and the code is n + 2E. Adding a float whose last bit is worth 2^(E - 1) makes the adder round to n
// (ties to even), and one whose last bit is worth 2^(E - 17) and that rounds down leaves 16 bits of the fraction.
// kBias cancels what the sum's exponent adds to n + 2E, modulo 8.
constexpr int32_t kOneBits = 0x3f800000;
constexpr int32_t kBias = 6;
constexpr int32_t kNearest = (22 << 23) + kBias;
constexpr int32_t kFraction = (6 << 23) + (kBias << 16);

__device__ __forceinline__ float e2m1_shifter(float magnitude, int32_t shift) {
  const int32_t exponent = static_cast<int32_t>(float_bits(magnitude)) & kInfBits;
  return bits_float(static_cast<uint32_t>(__viaddmax_s32(exponent, shift, kOneBits + shift)));
}

// The code is in the low three bits, the sign is not.
__device__ __forceinline__ uint32_t e2m1_nearest(float x) {
  const float a = fminf(fabsf(x), E2M1::kMax);
  const uint32_t sum = float_bits(a + e2m1_shifter(a, kNearest));
  return (sum >> 22) + sum;
}

// `u`: 16 random bits; takes the upper neighbour when u is below the fraction.
__device__ __forceinline__ uint32_t e2m1_stochastic(float x, uint32_t u) {
  const float a = fminf(fabsf(x), E2M1::kMax);
  const uint32_t sum = float_bits(__fadd_rz(a, e2m1_shifter(a, kFraction))) + (u ^ 0xffffu);
  return (sum >> 22) + (sum >> 16);
}

// Eight codes to a word, the first in the low nibble: magnitudes from the low bits of c, signs from x.
__device__ __forceinline__ uint32_t pack_e2m1(const uint32_t* c, const float* x) {
  uint32_t half[2];  // even and odd elements, a byte each
  MH_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t low = permute(c[i], c[i + 2], 0x0040), high = permute(c[i + 4], c[i + 6], 0x4000);
    const uint32_t magnitudes = permute(low, high, 0x7610);
    const uint32_t low_signs = permute(float_bits(x[i]), float_bits(x[i + 2]), 0x00fb);
    const uint32_t high_signs = permute(float_bits(x[i + 4]), float_bits(x[i + 6]), 0xfb00);
    const uint32_t signs = permute(low_signs, high_signs, 0x7610);
    half[i] = (magnitudes & 0x07070707u) | (signs & 0x08080808u);
  }
  return half[0] | half[1] << 4;
}

template <class E>
__device__ __forceinline__ void encode_bytes(const float (&x)[kLine], float mult, Codes<Kind::fp8>& out) {
  MH_UNROLL
  for (int i = 0; i < 4; ++i)
    out.w[i] = encode_pair<E>(x[4 * i] * mult, x[4 * i + 1] * mult) |
               encode_pair<E>(x[4 * i + 2] * mult, x[4 * i + 3] * mult) << 16;
}

// `draw(e)`: 16 random bits of element e. `keep` is 0 for a block with a NaN, all of whose codes are 0.
template <class Draw>
__device__ __forceinline__ void encode_nibbles(const float (&x)[kLine], float mult, uint32_t keep, bool stochastic,
                                               Draw&& draw, uint32_t (&out)[2]) {
  MH_UNROLL
  for (int h = 0; h < 2; ++h) {
    float scaled[8];
    uint32_t c[8];
    MH_UNROLL
    for (int e = 0; e < 8; ++e) scaled[e] = x[8 * h + e] * mult;
    if (stochastic) {
      MH_UNROLL
      for (int e = 0; e < 8; ++e) c[e] = e2m1_stochastic(scaled[e], draw(8 * h + e));
    } else {
      MH_UNROLL
      for (int e = 0; e < 8; ++e) c[e] = e2m1_nearest(scaled[e]);
    }
    out[h] = pack_e2m1(c, scaled) & keep;
  }
}

// A line of codes back to FP32, without scales.
template <Kind kind>
__device__ __forceinline__ void decode_line(Element element, const Codes<kind>& in, float (&x)[kLine]) {
  MH_UNROLL
  for (int e = 0; e < kLine; ++e) {
    if constexpr (kIsFp4<kind>) {
      // the three bits as exponent and mantissa of an FP32 number are the value times 2^-126, also below 1
      const uint32_t nibble = in.w[e / 8] >> (e % 8 * 4);
      x[e] = bits_float((nibble & 7u) << 22 | (nibble & 8u) << 28) * 0x1p126f;
    } else {
      const uint32_t code = in.w[e / 4] >> (e % 4 * 8) & 0xffu;
      x[e] = element == Element::e5m2 ? decode<E5M2>(code) : decode<E4M3>(code);
    }
  }
}

// Where the random bits of a cast come from. Kernels see a transposed tensor where that suits its memory (`swapped`);
// draws are keyed by the position in the tensor as it is.
struct Noise {
  const int64_t* values;
  const int64_t* row_ids;
  int64_t rows;  // of the tensor as it is
  bool swapped;
  int axis;

  // Lines start at multiples of 16: with this, all eight draws of a call belong to neighbours along K.
  __device__ bool aligned() const {
    return !swapped && values[kGlobalCols] % kDrawsPerCall == 0 && values[kColOffset] % kDrawsPerCall == 0;
  }
  __device__ uint64_t index(int64_t i, int64_t j) const {
    const int64_t m = min(swapped ? j : i, rows - 1), k = swapped ? i : j;
    const int64_t row = row_ids ? row_ids[m] : m + values[kRowOffset];
    return static_cast<uint64_t>(row * values[kGlobalCols] + k + values[kColOffset]);
  }
};

__device__ __forceinline__ Philox<uint32_t> draw_words(const RandomKey& key, uint64_t group) {
  return random_words(key, static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32));
}

__device__ __noinline__ inline uint32_t draw_at(const RandomKey key, uint64_t index) { return random_draw(key, index); }

// Draws of the line along K that starts at (i, j): element e has the half e % 2 of word e / 2.
__device__ __forceinline__ void row_draws(const Noise& noise, int64_t i, int64_t j, uint32_t (&out)[kLine / 2]) {
  const RandomKey key = random_key(noise.values, noise.axis);
  if (noise.aligned()) {
    const uint64_t group = noise.index(i, j) / kDrawsPerCall;
    MH_UNROLL
    for (int h = 0; h < 2; ++h) {
      const Philox<uint32_t> w = draw_words(key, group + h);
      out[4 * h] = w.c0, out[4 * h + 1] = w.c1, out[4 * h + 2] = w.c2, out[4 * h + 3] = w.c3;
    }
  } else {
    MH_UNROLL
    for (int e = 0; e < kLine / 2; ++e)
      out[e] = draw_at(key, noise.index(i, j + 2 * e)) | draw_at(key, noise.index(i, j + 2 * e + 1)) << 16;
  }
}

// Draws of the two lines along M that start at (i, j) and (i, j + 1): word e holds those of row e. Four lanes share the
// calls of their eight columns: each makes those of four rows, and a 4 x 4 transposition hands the words around.
__device__ __forceinline__ void column_draws(const Noise& noise, int64_t i, int64_t j, int lane, uint32_t (&out)[kLine]) {
  const RandomKey key = random_key(noise.values, noise.axis);
  if (!noise.aligned()) {
    MH_UNROLL
    for (int e = 0; e < kLine; ++e)
      out[e] = draw_at(key, noise.index(i + e, j)) | draw_at(key, noise.index(i + e, j + 1)) << 16;
    return;
  }
  constexpr unsigned kAll = 0xffffffffu;
  const bool odd = lane & 1, upper = lane & 2;
  MH_UNROLL
  for (int e = 0; e < kLine; e += 4) {
    const Philox<uint32_t> w = draw_words(key, noise.index(i + e + lane % 4, j) / kDrawsPerCall);
    const uint32_t a = __shfl_xor_sync(kAll, odd ? w.c0 : w.c1, 1), b = __shfl_xor_sync(kAll, odd ? w.c2 : w.c3, 1);
    const uint32_t c0 = odd ? a : w.c0, c1 = odd ? w.c1 : a, c2 = odd ? b : w.c2, c3 = odd ? w.c3 : b;
    const uint32_t c = __shfl_xor_sync(kAll, upper ? c0 : c2, 2), d = __shfl_xor_sync(kAll, upper ? c1 : c3, 2);
    out[e] = upper ? c : c0, out[e + 1] = upper ? d : c1, out[e + 2] = upper ? c2 : c, out[e + 3] = upper ? c3 : d;
  }
}

}  // namespace mh::cuda
