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

// E2M1 from FP32 arithmetic. Codes at |x| are apart by 1/2, 1 or 2, and as a function of |x| the code is the least of the
// three lines 2|x|, |x| + 2 and |x|/2 + 4. Each is rounded by one fused multiply-add whose sum is so large that its last bit
// is worth 1 (nearest, ties to even: 2 and 4 are even) or 2^-16 (rounded down: the fraction's 16 bits, to which random bits
// are added). With |x| cut at 8 codes reach 8, which pack_e2m1 makes 7.
constexpr float kWhole = 8388608.0f;  // 2^23
constexpr uint32_t kNearestByte = 0, kStochasticByte = 2;  // where the code is in the result

__device__ __forceinline__ uint32_t e2m1_nearest(float x) {
  const float eighth = __saturatef(fabsf(x) * 0.125f);
  const float half = fmaf(eighth, 16.0f, kWhole), one = fmaf(eighth, 8.0f, kWhole + 2.0f), two = fmaf(eighth, 4.0f, kWhole + 4.0f);
  return float_bits(fminf(fminf(half, one), two));
}

// `u`: 16 random bits; takes the upper neighbour when u is below the fraction.
__device__ __forceinline__ uint32_t e2m1_stochastic(float x, uint32_t u) {
  constexpr float kUnit = 65536.0f, kCarry = kWhole + 65535.0f;
  const float eighth = __saturatef(fabsf(x) * 0.125f);
  const float half = __fmaf_rz(eighth, 16.0f * kUnit, kCarry), one = __fmaf_rz(eighth, 8.0f * kUnit, kCarry + 2.0f * kUnit);
  const float two = __fmaf_rz(eighth, 4.0f * kUnit, kCarry + 4.0f * kUnit);
  return float_bits(fminf(fminf(half, one), two)) - u;
}

// Every second of eight words, a byte each: byte `byte` of w[0], w[2], w[4], w[6].
template <uint32_t byte>
__device__ __forceinline__ uint32_t gather_bytes(const uint32_t* w) {
  constexpr uint32_t kBoth = byte | (4 + byte) << 4;
  return permute(permute(w[0], w[2], kBoth), permute(w[4], w[6], kBoth), 0x5410);
}

// Eight codes to a word, the first in the low nibble: magnitudes from byte `byte` of c, signs from x.
template <uint32_t byte>
__device__ __forceinline__ uint32_t pack_e2m1(const uint32_t* c, const float* x) {
  uint32_t bits[8];
  MH_UNROLL
  for (int e = 0; e < 8; ++e) bits[e] = float_bits(x[e]);
  const uint32_t magnitudes = gather_bytes<byte>(c) + gather_bytes<byte>(c + 1) * 16u;
  const uint32_t signs = (gather_bytes<3>(bits) >> 4 & 0x08080808u) | (gather_bytes<3>(bits + 1) & 0x80808080u);
  return (magnitudes - (magnitudes >> 3 & 0x11111111u)) | signs;
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
      out[h] = pack_e2m1<kStochasticByte>(c, scaled) & keep;
    } else {
      MH_UNROLL
      for (int e = 0; e < 8; ++e) c[e] = e2m1_nearest(scaled[e]);
      out[h] = pack_e2m1<kNearestByte>(c, scaled) & keep;
    }
  }
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
