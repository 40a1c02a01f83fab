// E2M1 codes of lines, with their signs, eight at a time, in fewer instructions than line.cuh has them; the same bits.
//
// What an instruction costs on Hopper, in cycles of a quarter of a multiprocessor that issues one of a warp in each:
//   FP32 and packed FP16 multiplication and addition   1 of the pipes for FP32
//   IMAD, IDP (dp2a)                                   1 of the same, and 2 of the heavier one of the two
//   bits, shifts, bytes, min, max, comparisons, IADD3, FP32 to packed FP16   2 of the integer pipe
// so that the number of all counts first, and those of the last line must stay under half of it.
#pragma once

#include "line.cuh"

namespace mh::cuda {

// A half word here is a sign and, from bit 9 up, a magnitude: E2M1's three bits in the upper byte, above a first bit of
// fraction. FP16 numbers below 2^-14 are evenly spaced and those above have the spacing of its powers of two, as E2M1's
// are around 1: x 2^-14 in FP16 has the bits of x's code, with nine more of a fraction.

// Two numbers, of magnitudes below 7, to half words of which the code is the nearest integer. Rounding to FP16 would
// lose on which side of a half a number was, were it not for the factor 1 + 2^-9: halves of codes, n + 1/2, are then
// moved by (2n + 1) / 2 units of FP16, to the middle between two of its numbers, and there ties go to where they go in
// E2M1. The second factor, somewhat under the inverse of the first, moves what lies above to the half and what lies
// below under it.
__device__ __forceinline__ uint32_t nearest_halves(float low, float high) {
  constexpr float kSpread = 0x1p-14f * (1.0f + 0x1p-9f);
  constexpr uint32_t kBack = 0x3bfb;  // 1 - 5 * 2^-11
  return multiply_halves(store_pair<Float16>(low * kSpread, high * kSpread), kBack << 16 | kBack);
}


// Codes of four pairs of numbers (a number and the next but one): eight nibbles, the first in the lowest.
struct HalfWords {
  uint32_t even[2], odd[2];

  __device__ __forceinline__ uint32_t codes() const {
    constexpr uint32_t kUpperBytes = 0x7531, kHalf = 0x08080808u;
    constexpr uint32_t kEight = 0x80000008u;  // 8, and a bit that a sign replaces: no shift
    const uint32_t a = permute(even[0], even[1], kUpperBytes), b = permute(odd[0], odd[1], kUpperBytes);
    const uint32_t first = select_bits<0x80808080u>(a, a * kEight + kHalf);  // a code is the upper half of a byte
    const uint32_t second = select_bits<0x80808080u>(b, b * kEight + kHalf);
    return select_bits<0x0f0f0f0fu>(first >> 4, second);
  }
};

// A number of magnitude below 7, rounded down to FP32's steps below 2^-126 (e2m1_stochastic), plus one of two draws
// less 64 * 65535: its code is in bits 22 to 25, under the sign's. `inverted`: two draws, each of them 65535 less the
// random bits.
__device__ __forceinline__ uint32_t add_draw(float y, uint32_t inverted, bool upper) {
  const uint32_t bits = float_bits(__fmul_rz(y, 0x1p-126f));
  return dot_halves(inverted, upper ? 64u << 8 : 64u, bits);
}

// Stochastic codes of eight such sums.
__device__ __forceinline__ uint32_t stochastic_codes(const uint32_t (&sums)[8]) {
  constexpr uint32_t kUpperHalves = 0x7632, kUpperBytes = 0x7531;
  uint32_t h[2][2], codes[2];  // pairs of numbers: of even and odd places
  MH_UNROLL
  for (int i = 0; i < 2; ++i) {
    h[0][i] = permute(sums[4 * i], sums[4 * i + 2], kUpperHalves);
    h[1][i] = permute(sums[4 * i + 1], sums[4 * i + 3], kUpperHalves);
    codes[i] = select_bits<0x3c003c00u>(h[1][i] * 16u, h[0][i]) * 4u;  // two codes in an upper byte
  }
  const uint32_t all = permute(codes[0], codes[1], kUpperBytes), cut = all - (all >> 3 & 0x11111111u);  // 8 is 7
  const uint32_t even = permute(h[0][0], h[0][1], kUpperBytes), odd = permute(h[1][0], h[1][1], kUpperBytes);
  return select_bits<0x88888888u>(select_bits<0x08080808u>(even >> 4, odd), cut);
}

// Whether an E4M3 scale may leave numbers of its block above 6 * 17/16 when they are multiplied: subnormal ones, the
// largest, which may have been cut, and NaN. They are rare.
__device__ __forceinline__ bool is_rare_scale(uint32_t scale) { return scale - 8u >= E4M3::kNan - 1 - 8u; }

// What a line's numbers are, times 4 where it is `turned` and the transform's last factor is left to the multiplier.
template <bool turned>
constexpr float kLineFactor = turned ? 0.25f : 1.0f;

// The products of a line. Where products may be above 7, or the multiplier times the factor below FP32's normal
// numbers, which is rare, they are made step by step, and cut; those of a block with a NaN are 0.
template <bool turned>
__device__ __forceinline__ float prepare_line(float (&x)[kLine], float mult, uint32_t scale) {
  constexpr float kFactor = kLineFactor<turned>;
  if (!is_rare_scale(scale) && (!turned || mult >= 0x1p-124f)) return mult * kFactor;
  MH_UNROLL
  for (int e = 0; e < kLine; ++e) {
    const float y = fminf(fmaxf(x[e] * kFactor * mult, -E2M1::kMax), E2M1::kMax);
    x[e] = scale == E4M3::kNan ? 0.0f : y;
  }
  return 1.0f;
}

// Half words of a line's numbers, each with those of the next but one, to codes.
template <class Halves>
__device__ __forceinline__ void encode_halves(const float (&x)[kLine], float factor, Halves&& halves,
                                              uint32_t (&out)[kLine / 2]) {
  MH_UNROLL
  for (int i = 0; i < kLine / 2; ++i) {
    const float* at = x + i / 2 * 4 + i % 2;
    out[i] = halves(at[0] * factor, at[2] * factor);
  }
}

__device__ __forceinline__ void pack_halves(const uint32_t (&h)[kLine / 2], uint32_t (&out)[2]) {
  out[0] = HalfWords{{h[0], h[2]}, {h[1], h[3]}}.codes();
  out[1] = HalfWords{{h[4], h[6]}, {h[5], h[7]}}.codes();
}

// Nearest codes of a line. `scale`: its block's E4M3 code. Overwrites x where that is rare.
template <bool turned = false>
__device__ __forceinline__ void encode_nearest(float (&x)[kLine], float mult, uint32_t scale, uint32_t (&out)[2]) {
  uint32_t h[kLine / 2];
  encode_halves(x, prepare_line<turned>(x, mult, scale), nearest_halves, h);
  pack_halves(h, out);
}

// Whether a multiplier m meets no tie that E2M1 rounds down: no 16-bit x has a product x * m, rounded to FP32, of 1/4
// or 5/4 times a power of two. Then ties may go up, and products need no second factor. An x as near as that is 1/m or
// 5/4/m (to 2^-21, more than the reciprocal is wrong), rounded to the bits that x has; one bit more where x is above a
// power of two. Where a tensor's amax G 2^k has 8 bits and a scale S 2^l four, its multiplier is about 2688 / (S G) and
// meets ties where S G is a multiple of 21: of about half of all such tensors no multiplier does.
template <class T>
__device__ __forceinline__ bool is_tie_free(float mult) {
  constexpr int kBits = std::is_same_v<T, BFloat16> ? 8 : 11;
  constexpr float kGrid = 1.5f * static_cast<float>(1 << (23 - kBits));
  const float m = bits_float((float_bits(mult) & 0x7fffffu) | 0x3f800000u), inverse = approximate_inverse(m);
  const float x = (inverse + kGrid) - kGrid, y = fmaf(inverse, 1.25f, kGrid) - kGrid;
  return x * m != 1.0f && y * m != 1.25f && mult >= 0x1p-110f;
}

// Nearest codes of a line of 16-bit numbers as they are. `tie_free`: whether its multiplier is; which of the two ways a
// warp goes should be the same for all of its lanes most of the time.
__device__ __forceinline__ void encode_nearest(float (&x)[kLine], float mult, uint32_t scale, bool tie_free,
                                               uint32_t (&out)[2]) {
  uint32_t h[kLine / 2];
  if (tie_free && !is_rare_scale(scale))
    encode_halves(x, mult * 0x1p-14f, cut_pair, h);  // ties go up
  else
    encode_halves(x, prepare_line<false>(x, mult, scale), nearest_halves, h);
  pack_halves(h, out);
}

// Stochastic codes of a line: `sum(e, y)` is a number and its draw.
template <bool turned, class Sum>
__device__ __forceinline__ void encode_sums(float (&x)[kLine], float mult, uint32_t scale, Sum&& sum,
                                            uint32_t (&out)[2]) {
  const float factor = prepare_line<turned>(x, mult, scale);
  MH_UNROLL
  for (int h = 0; h < 2; ++h) {
    uint32_t sums[8];
    MH_UNROLL
    for (int e = 0; e < 8; ++e) sums[e] = sum(8 * h + e, x[8 * h + e] * factor);
    out[h] = stochastic_codes(sums);
  }
}

// Of a line along M, the one on the right of two where `right`: `inverted(e)` has the draws of row e in both, each of
// them 65535 less the random bits.
template <bool right, bool turned = false, class Inverted>
__device__ __forceinline__ void encode_stochastic_down(float (&x)[kLine], float mult, uint32_t scale,
                                                       Inverted&& inverted, uint32_t (&out)[2]) {
  const auto sum = [&](int e, float y) { return add_draw(y, inverted(e), right); };
  encode_sums<turned>(x, mult, scale, sum, out);
}

// The same of a line along K: `inverted(e)` has the draws of its elements 2e and 2e + 1.
template <bool turned = false, class Inverted>
__device__ __forceinline__ void encode_stochastic_along(float (&x)[kLine], float mult, uint32_t scale,
                                                        Inverted&& inverted, uint32_t (&out)[2]) {
  const auto sum = [&](int e, float y) { return add_draw(y, inverted(e / 2), e % 2); };
  encode_sums<turned>(x, mult, scale, sum, out);
}

// hadamard16 of a line of 16-bit numbers but for the last factor, 1/4, which is exact: such numbers, and so their sums,
// are multiples of 2^-133 or more. Returns the bits of the transform's amax, of any NaN where it has one.
__device__ __forceinline__ int32_t turn_line(float (&x)[kLine]) {
  constexpr int kHalf = kLine / 2;
  hadamard_signs(x);
  hadamard_sums<1, kHalf>(x);
  // |a| + |b| is the larger of |a + b| and |a - b|, unless it is Inf, where one of them may be NaN
  const auto larger = [&](int i) { return float_bits(fabsf(x[i]) + fabsf(x[i + kHalf])); };
  uint32_t most = 0;
  MH_UNROLL
  for (int i = 0; i < kHalf; i += 2) most = max(max(most, larger(i)), larger(i + 1));  // one instruction
  hadamard_sums<kHalf, kLine>(x);
  if (most >= static_cast<uint32_t>(kInfBits)) return line_amax(x);
  return abs_bits(bits_float(most) * 0.25f);
}

// Draws of n calls, groups first, first + step, ... of one upper word, each 65535 less the random bits: word w of call
// i is out[i][w]. Two rounds are the same for all calls but for one of their products.
template <int n>
__device__ __forceinline__ void inverted_draws_near(const RandomKey& key, uint64_t first, uint32_t step,
                                                    uint32_t (&out)[n][4]) {
  using Ops = WordOps<uint32_t>;
  constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u, kStep0 = 0x9E3779B9u, kStep1 = 0xBB67AE85u;
  uint32_t k0 = key.seed, k1 = key.tensor_id;
  uint32_t c0[n], c1[n], c2[n], c3[n];
  const uint64_t all_counter = Ops::product(key.counter, kM1);
  const uint64_t all_product = Ops::product(Ops::high(all_counter) ^ static_cast<uint32_t>(first >> 32) ^ k0, kM0);
  const uint32_t all_direction = key.direction ^ k1, all_high = Ops::high(all_product) ^ (k1 + kStep1);
  const uint32_t all_low = Ops::low(all_product), all_key = Ops::low(all_counter) ^ (k0 + kStep0);
  MH_UNROLL
  for (int i = 0; i < n; ++i) {
    const auto p0 = Ops::product(static_cast<uint32_t>(first) + static_cast<uint32_t>(i) * step, kM0);
    const auto p1 = Ops::product(Ops::high(p0) ^ all_direction, kM1);
    c0[i] = Ops::high(p1) ^ all_key, c1[i] = Ops::low(p1), c2[i] = all_high ^ Ops::low(p0), c3[i] = all_low;
  }
  k0 += kStep0, k1 += kStep1;
  MH_UNROLL
  for (int round = 2; round < 10; ++round) {
    k0 += kStep0, k1 += kStep1;
    const uint32_t x0 = round == 9 ? ~k0 : k0, x1 = round == 9 ? ~k1 : k1;
    MH_UNROLL
    for (int i = 0; i < n; ++i) {
      const auto p0 = Ops::product(c0[i], kM0), p1 = Ops::product(c2[i], kM1);
      c0[i] = Ops::high(p1) ^ c1[i] ^ x0, c1[i] = Ops::low(p1);
      c2[i] = Ops::high(p0) ^ c3[i] ^ x1, c3[i] = Ops::low(p0);
    }
  }
  MH_UNROLL
  for (int i = 0; i < n; ++i) out[i][0] = c0[i], out[i][1] = ~c1[i], out[i][2] = c2[i], out[i][3] = ~c3[i];
}

__device__ __noinline__ inline uint4 inverted_call(const RandomKey key, uint64_t group) {
  uint32_t out[1][4];
  inverted_draws_near(key, group, 0, out);
  return {out[0][0], out[0][1], out[0][2], out[0][3]};
}

// The same whatever the upper words are.
template <int n>
__device__ __forceinline__ void inverted_draws(const RandomKey& key, uint64_t first, uint32_t step,
                                               uint32_t (&out)[n][4]) {
  const uint64_t last = first + static_cast<uint64_t>(n - 1) * step;
  if (last >> 32 == first >> 32) return inverted_draws_near(key, first, step, out);
  MH_UNROLL
  for (int i = 0; i < n; ++i) {
    const uint4 w = inverted_call(key, first + static_cast<uint64_t>(i) * step);
    out[i][0] = w.x, out[i][1] = w.y, out[i][2] = w.z, out[i][3] = w.w;
  }
}

}  // namespace mh::cuda
