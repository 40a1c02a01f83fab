// Lines: 16 elements along the direction of the scale blocks, the unit of work of a thread. Every block is one or more
// whole lines, a Hadamard group is one, and so is a packed word pair of FP4.
#pragma once

#include "../numerics/hadamard.h"
#include "../numerics/random.h"
#include "../numerics/scales.h"
#include "ptx.cuh"

namespace mh::cuda {

// Words of several calls of Philox side by side.
template <int n>
struct Several {
  uint32_t v[n];
};

}  // namespace mh::cuda

MH_NUMERICS_BEGIN

template <int n>
struct WordOps<cuda::Several<n>> {
  struct Products {
    uint64_t v[n];
  };
  static MH_HD Products product(const cuda::Several<n>& a, uint32_t b) {
    Products p;
    MH_UNROLL
    for (int i = 0; i < n; ++i) p.v[i] = static_cast<uint64_t>(a.v[i]) * b;
    return p;
  }
  static MH_HD cuda::Several<n> high(const Products& p) {
    cuda::Several<n> w;
    MH_UNROLL
    for (int i = 0; i < n; ++i) w.v[i] = static_cast<uint32_t>(p.v[i] >> 32);
    return w;
  }
  static MH_HD cuda::Several<n> low(const Products& p) {
    cuda::Several<n> w;
    MH_UNROLL
    for (int i = 0; i < n; ++i) w.v[i] = static_cast<uint32_t>(p.v[i]);
    return w;
  }
};

MH_NUMERICS_END

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
  __device__ typename T::Raw raw(int which) const {
    typename T::Raw both[2];
    memcpy(both, w, sizeof both);
    return both[which];
  }
  // `of`, but any NaN for a NaN
  static __device__ Pair near(float lo, float hi) {
    Pair p;
    if constexpr (kWords == 1) p.w[0] = store_pair<T>(lo, hi);
    if constexpr (kWords == 2) p.w[0] = float_bits(lo), p.w[1] = float_bits(hi);
    return p;
  }
  static __device__ Pair of(float lo, float hi) {
    Pair p;
    if constexpr (kWords == 1) p.w[0] = T::store(lo) | static_cast<uint32_t>(T::store(hi)) << 16;
    if constexpr (kWords == 2) p.w[0] = float_bits(lo), p.w[1] = float_bits(hi);
    return p;
  }
};

// Largest magnitudes of the low and of the high elements of pairs, NaN above Inf. Signs mean nothing.
template <class T>
struct PairAmax {
  uint32_t most[Pair<T>::kWords] = {};

  __device__ void add(const Pair<T>& p) {
    if constexpr (Pair<T>::kWords == 1) {
      most[0] = max_magnitudes<T>(most[0], p.w[0]);
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
  float most = 0.0f;
  MH_UNROLL
  for (int e = 0; e < kLine; ++e) most = max_magnitude_nan(most, x[e]);
  return abs_bits(most);
}

// Pairs of FP32 numbers lo(e) and hi(e) as T::store makes them. A NaN is rare: whether there is one (or an Inf) shows in
// products with 0.
template <class T, int n, class Lo, class Hi>
__device__ __forceinline__ void store_pairs(Lo&& lo, Hi&& hi, Pair<T> (&pairs)[n]) {
  float zeros[2] = {0.0f, 0.0f};
  if constexpr (Pair<T>::kWords == 1) {
    MH_UNROLL
    for (int e = 0; e < n; ++e) zeros[0] = fmaf(lo(e), 0.0f, zeros[0]), zeros[1] = fmaf(hi(e), 0.0f, zeros[1]);
  }
  if (zeros[0] + zeros[1] == 0.0f) {
    MH_UNROLL
    for (int e = 0; e < n; ++e) pairs[e] = Pair<T>::near(lo(e), hi(e));
  } else {
    MH_UNROLL
    for (int e = 0; e < n; ++e) pairs[e] = Pair<T>::of(lo(e), hi(e));
  }
}

// The same of neighbours along K.
template <class T, int n>
__device__ __forceinline__ void store_pairs(const float (&x)[2 * n], Pair<T> (&pairs)[n]) {
  store_pairs([&](int e) { return x[2 * e]; }, [&](int e) { return x[2 * e + 1]; }, pairs);
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

// E2M1 from FP32 arithmetic. Codes at |x| are apart by 1/2, 1 or 2: as a function of |x| the code is f(|x|), the least of the
// three lines 2|x|, |x| + 2 and |x|/2 + 4, rounded. `x`: a magnitude below 7.

// Each line is rounded by one fused multiply-add whose sum is so large that its last bit is worth 1 (nearest, ties to even:
// 2 and 4 are even). The code is in the low byte, below a constant.
__device__ __forceinline__ uint32_t e2m1_nearest(float x) {
  constexpr float kWhole = 8388608.0f;  // 2^23
  const float half = fmaf(x, 2.0f, kWhole), one = x + (kWhole + 2.0f), two = fmaf(x, 0.5f, kWhole + 4.0f);
  return min(min(float_bits(half), float_bits(one)), float_bits(two));  // one instruction on integers
}

// FP32 numbers below 2^-126 are evenly spaced and those above have the spacing of E2M1's powers of two: x 2^-126 has the bits
// f(x) 2^22, rounded down here. `above`: 65535 less 16 random bits, in the middle bytes; it carries into the code, the upper
// byte, when the random bits are below the fraction's first 16. Codes reach 8 where x is above 6.
__device__ __forceinline__ uint32_t e2m1_stochastic(float x, uint32_t above) {
  return float_bits(__fmul_rz(x, 0x1p-126f)) * 4u + above;
}

// What a draw is to e2m1_stochastic; `upper`: the upper half of a word.
__device__ __forceinline__ uint32_t above_draw(uint32_t word, bool upper) { return permute(~word, 0, upper ? 0x4324 : 0x4104); }

// Byte `byte` of four words.
template <uint32_t byte>
__device__ __forceinline__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kBoth = byte | (4 + byte) << 4;
  return permute(permute(a, b, kBoth), permute(c, d, kBoth), 0x5410);
}

// Eight codes to a word, the first in the low nibble, without signs.
__device__ __forceinline__ uint32_t pack_nearest(const uint32_t (&c)[8]) {
  return gather_bytes<0>(c[1] * 16u + c[0], c[3] * 16u + c[2], c[5] * 16u + c[4], c[7] * 16u + c[6]);
}

__device__ __forceinline__ uint32_t pack_stochastic(const uint32_t (&c)[8]) {
  const uint32_t codes = gather_bytes<3>(c[0], c[2], c[4], c[6]) + gather_bytes<3>(c[1], c[3], c[5], c[7]) * 16u;
  return codes - (codes >> 3 & 0x11111111u);  // 8 is 7
}

// The signs of a line's codes, as they are packed: from bytes whose top bits are those of the even and of the odd elements.
struct Signs {
  uint32_t w[2];

  static __device__ __forceinline__ uint32_t pack(uint32_t even, uint32_t odd) {
    return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
  }
  static __device__ __forceinline__ Signs of(const float (&x)[kLine]) {
    Signs signs;
    MH_UNROLL
    for (int h = 0; h < 2; ++h) {
      uint32_t b[8];
      MH_UNROLL
      for (int e = 0; e < 8; ++e) b[e] = float_bits(x[8 * h + e]);
      signs.w[h] = pack(gather_bytes<3>(b[0], b[2], b[4], b[6]), gather_bytes<3>(b[1], b[3], b[5], b[7]));
    }
    return signs;
  }
  // Of a line along K, from pairs of 16-bit numbers.
  template <class T>
  static __device__ __forceinline__ Signs along(const Pair<T> (&line)[kLine / 2]) {
    Signs signs;
    MH_UNROLL
    for (int h = 0; h < 2; ++h) {
      const uint32_t low = permute(line[4 * h].w[0], line[4 * h + 1].w[0], 0x7531);
      const uint32_t high = permute(line[4 * h + 2].w[0], line[4 * h + 3].w[0], 0x7531);
      signs.w[h] = pack(permute(low, high, 0x6420), permute(low, high, 0x7531));
    }
    return signs;
  }
  // Of two lines along M side by side.
  template <class T>
  static __device__ __forceinline__ void down(const Pair<T> (&pairs)[kLine], Signs (&signs)[2]) {
    MH_UNROLL
    for (int h = 0; h < 2; ++h) {
      uint32_t low[2], high[2];  // of the even and of the odd rows, both columns
      MH_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        const Pair<T>* p = pairs + 8 * h + odd;
        low[odd] = permute(p[0].w[0], p[2].w[0], 0x7531), high[odd] = permute(p[4].w[0], p[6].w[0], 0x7531);
      }
      signs[0].w[h] = pack(permute(low[0], high[0], 0x6420), permute(low[1], high[1], 0x6420));
      signs[1].w[h] = pack(permute(low[0], high[0], 0x7531), permute(low[1], high[1], 0x7531));
    }
  }
};

template <class E>
__device__ __forceinline__ void encode_bytes(const float (&x)[kLine], float mult, Codes<Kind::fp8>& out) {
  MH_UNROLL
  for (int i = 0; i < 4; ++i)
    out.w[i] = encode_pair<E>(x[4 * i] * mult, x[4 * i + 1] * mult) |
               encode_pair<E>(x[4 * i + 2] * mult, x[4 * i + 3] * mult) << 16;
}

// `scale`: the block's E4M3 code. `above(e)`: what e2m1_stochastic adds to element e.
template <class Above>
__device__ __forceinline__ void encode_nibbles(float (&x)[kLine], float mult, uint32_t scale, const Signs& signs,
                                               bool stochastic, Above&& above, uint32_t (&out)[2]) {
  // A scale rounded by at most 1/16 brings the block's amax to no more than 6 * 17/16. Others, rare: subnormal ones, the
  // largest, which may have been cut, and NaN.
  if (scale - 8u >= E4M3::kNan - 1 - 8u) {
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) x[e] = fminf(fabsf(x[e]) * mult, E2M1::kMax);
    mult = 1.0f;
  }
  uint32_t c[2][8];
  if (stochastic) {
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) c[e / 8][e % 8] = e2m1_stochastic(fabsf(x[e]) * mult, above(e));
    out[0] = pack_stochastic(c[0]), out[1] = pack_stochastic(c[1]);
  } else {
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) c[e / 8][e % 8] = e2m1_nearest(fabsf(x[e]) * mult);
    out[0] = pack_nearest(c[0]), out[1] = pack_nearest(c[1]);
  }
  const uint32_t keep = scale == E4M3::kNan ? 0u : ~0u;  // a block with a NaN has the code 0 for all elements
  MH_UNROLL
  for (int h = 0; h < 2; ++h) out[h] = (out[h] | signs.w[h]) & keep;
}

// Eight FP4 codes to FP32, times `scale`, an E4M3 number: products of 2 and 4 bits are exact, in FP16 too. A code's
// three bits as exponent and mantissa of an FP16 number are its value times 2^-14, also below 1.
__device__ __forceinline__ void decode_nibbles(uint32_t codes, float scale, float* x) {
  const uint32_t scales = store_pair<Float16>(scale, scale);
  MH_UNROLL
  for (int e = 0; e < 4; ++e) {  // the elements e and e + 4
    const uint32_t shifted = codes << (12 - 4 * e);
    const uint32_t small = (shifted >> 3 & 0x0e000e00u) | (shifted & 0x80008000u);
    const uint32_t scaled = multiply_halves(multiply_halves(small, 0x74007400u), scales);  // 2^14
    x[e] = load_raw<Float16>(static_cast<uint16_t>(scaled)), x[e + 4] = load_raw<Float16>(static_cast<uint16_t>(scaled >> 16));
  }
}

// n codes, a multiple of 8, back to FP32; FP4 codes come times their block's scale, FP8 codes as they are.
template <class E, int n>
__device__ __forceinline__ void decode_codes(const uint32_t* codes, float scale, float (&x)[n]) {
  if constexpr (std::is_same_v<E, E2M1>) {
    MH_UNROLL
    for (int e = 0; e < n; e += 8) decode_nibbles(codes[e / 8], scale, x + e);
  } else {
    MH_UNROLL
    for (int e = 0; e < n; e += 2) decode_pair<E>(codes[e / 4] >> (e % 4 * 8) & 0xffffu, x[e], x[e + 1]);
  }
}

template <int n, class F>
__device__ __forceinline__ Several<n> each(F&& f) {
  Several<n> out;
  MH_UNROLL
  for (int i = 0; i < n; ++i) out.v[i] = f(i);
  return out;
}

template <int n>
__device__ __forceinline__ Several<n> operator^(const Several<n>& a, const Several<n>& b) {
  return each<n>([&](int i) { return a.v[i] ^ b.v[i]; });
}
template <int n>
__device__ __forceinline__ Several<n> operator^(const Several<n>& a, uint32_t b) {
  return each<n>([&](int i) { return a.v[i] ^ b; });
}
template <int n>
__device__ __forceinline__ Several<n> operator+(const Several<n>& a, uint32_t b) {
  return each<n>([&](int i) { return a.v[i] + b; });
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

// Calls side by side, which share the keys of the rounds.
template <int n>
__device__ __forceinline__ Philox<Several<n>> draw_words(const RandomKey& key, const uint64_t (&groups)[n]) {
  Several<n> low, high;
  MH_UNROLL
  for (int i = 0; i < n; ++i) low.v[i] = static_cast<uint32_t>(groups[i]), high.v[i] = static_cast<uint32_t>(groups[i] >> 32);
  return random_words(key, low, high);
}

__device__ __noinline__ inline uint32_t draw_at(const RandomKey key, uint64_t index) { return random_draw(key, index); }

// Draws of the line along K that starts at (i, j): element e has the half e % 2 of word e / 2.
__device__ __forceinline__ void row_draws(const Noise& noise, int64_t i, int64_t j, uint32_t (&out)[kLine / 2]) {
  const RandomKey key = random_key(noise.values, noise.axis);
  if (noise.aligned()) {
    const uint64_t first = noise.index(i, j) / kDrawsPerCall, groups[2] = {first, first + 1};
    const auto w = draw_words(key, groups);
    MH_UNROLL
    for (int h = 0; h < 2; ++h)
      out[4 * h] = w.c0.v[h], out[4 * h + 1] = w.c1.v[h], out[4 * h + 2] = w.c2.v[h], out[4 * h + 3] = w.c3.v[h];
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
  uint64_t groups[kLine / 4];
  MH_UNROLL
  for (int n = 0; n < kLine / 4; ++n) groups[n] = noise.index(i + 4 * n + lane % 4, j) / kDrawsPerCall;
  const auto w = draw_words(key, groups);
  MH_UNROLL
  for (int n = 0; n < kLine / 4; ++n) {
    const uint32_t w0 = w.c0.v[n], w1 = w.c1.v[n], w2 = w.c2.v[n], w3 = w.c3.v[n];
    const uint32_t a = __shfl_xor_sync(kAll, odd ? w0 : w1, 1), b = __shfl_xor_sync(kAll, odd ? w2 : w3, 1);
    const uint32_t c0 = odd ? a : w0, c1 = odd ? w1 : a, c2 = odd ? b : w2, c3 = odd ? w3 : b;
    const uint32_t c = __shfl_xor_sync(kAll, upper ? c0 : c2, 2), d = __shfl_xor_sync(kAll, upper ? c1 : c3, 2);
    const int e = 4 * n;
    out[e] = upper ? c : c0, out[e + 1] = upper ? d : c1, out[e + 2] = upper ? c2 : c, out[e + 3] = upper ? c3 : d;
  }
}

}  // namespace mh::cuda
