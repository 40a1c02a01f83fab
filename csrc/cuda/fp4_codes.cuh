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

// Bits of `one` where the mask is set and of `other` where it is not, by one instruction.
template <uint32_t mask>
__device__ __forceinline__ uint32_t select_bits(uint32_t one, uint32_t other) {
#if defined(__CUDACC__)
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(bits) : "r"(one), "r"(other), "n"(mask));
  return bits;
#else
  return (one & mask) | (other & ~mask);
#endif
}

// A half word here is a sign and, from bit 9 up, a magnitude: E2M1's three bits in the upper byte, above a first bit of
// fraction. FP16 numbers below 2^-14 are evenly spaced and those above have the spacing of its powers of two, as E2M1's are
// around 1: x 2^-14 in FP16 has the bits of x's code, with nine more of a fraction.

// Two numbers, of magnitudes below 7, to half words of which the code is the nearest integer. Rounding to FP16 would lose on
// which side of a half a number was, were it not for the factor 1 + 2^-9: halves of codes, n + 1/2, are then moved by
// (2n + 1) / 2 units of FP16, to the middle between two of its numbers, and there ties go to where they go in E2M1. The
// second factor, somewhat under the inverse of the first, moves what lies above to the half and what lies below under it.
__device__ __forceinline__ uint32_t nearest_halves(float low, float high) {
  constexpr float kSpread = 0x1p-14f * (1.0f + 0x1p-9f);
  constexpr uint32_t kBack = 0x3bfb;  // 1 - 5 * 2^-11
  return multiply_halves(store_pair<Float16>(low * kSpread, high * kSpread), kBack << 16 | kBack);
}

// Codes of four pairs of numbers (a number and the next but one): eight nibbles, the first in the lowest.
struct HalfWords {
  uint32_t even[2], odd[2];

  template <bool rounded>
  __device__ __forceinline__ uint32_t codes() const {
    constexpr uint32_t kUpperBytes = 0x7531, kHalf = rounded ? 0x08080808u : 0u;
    const uint32_t a = permute(even[0], even[1], kUpperBytes), b = permute(odd[0], odd[1], kUpperBytes);
    const uint32_t first = select_bits<0x80808080u>(a, a * 8u + kHalf);  // a code is the upper half of a byte
    const uint32_t second = select_bits<0x80808080u>(b, b * 8u + kHalf);
    return select_bits<0x0f0f0f0fu>(first >> 4, second);
  }
};

// The nearest codes of eight numbers of magnitudes below 7.
__device__ __forceinline__ uint32_t nearest_codes(const float (&y)[8]) {
  const HalfWords h = {{nearest_halves(y[0], y[2]), nearest_halves(y[4], y[6])},
                       {nearest_halves(y[1], y[3]), nearest_halves(y[5], y[7])}};
  return h.codes<true>();
}

// A number of magnitude below 7, rounded down to FP32's steps below 2^-126 (e2m1_stochastic), plus one of two draws less 64 *
// 65535: its code is in bits 22 to 25, under the sign's. `inverted`: two draws, each of them 65535 less the random bits.
template <int half>
__device__ __forceinline__ uint32_t add_draw(float y, uint32_t inverted) {
  const uint32_t bits = float_bits(__fmul_rz(y, 0x1p-126f));
#if defined(__CUDACC__)
  return __dp2a_lo(inverted, half ? 64u << 8 : 64u, bits);
#else
  return (half ? inverted >> 16 : inverted & 0xffffu) * 64u + bits;
#endif
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

// Then the products, cut, stand for the numbers; those of a block with a NaN have the code 0.
template <int n>
__device__ __forceinline__ void cut_products(float (&x)[n], float& mult, uint32_t scale) {
  MH_UNROLL
  for (int e = 0; e < n; ++e) {
    const float y = fminf(fmaxf(x[e] * mult, -E2M1::kMax), E2M1::kMax);
    x[e] = scale == E4M3::kNan ? 0.0f : y;
  }
  mult = 1.0f;
}

// Nearest codes of a line. `scale`: its block's E4M3 code. Overwrites x where that is rare.
__device__ __forceinline__ void encode_nearest(float (&x)[kLine], float mult, uint32_t scale, uint32_t (&out)[2]) {
  if (is_rare_scale(scale)) cut_products(x, mult, scale);
  MH_UNROLL
  for (int h = 0; h < 2; ++h) {
    float y[8];
    MH_UNROLL
    for (int e = 0; e < 8; ++e) y[e] = x[8 * h + e] * mult;
    out[h] = nearest_codes(y);
  }
}

// Stochastic codes of a line along M, the one on the right of two where `right`: `inverted(e)` has the draws of row e in both,
// each of them 65535 less the random bits.
template <bool right, class Inverted>
__device__ __forceinline__ void encode_stochastic_down(float (&x)[kLine], float mult, uint32_t scale, Inverted&& inverted,
                                                       uint32_t (&out)[2]) {
  if (is_rare_scale(scale)) cut_products(x, mult, scale);
  MH_UNROLL
  for (int h = 0; h < 2; ++h) {
    uint32_t sums[8];
    MH_UNROLL
    for (int e = 0; e < 8; ++e) sums[e] = add_draw<right>(x[8 * h + e] * mult, inverted(8 * h + e));
    out[h] = stochastic_codes(sums);
  }
}

// The same of a line along K: `inverted(e)` has the draws of its elements 2e and 2e + 1.
template <class Inverted>
__device__ __forceinline__ void encode_stochastic_along(float (&x)[kLine], float mult, uint32_t scale, Inverted&& inverted,
                                                        uint32_t (&out)[2]) {
  if (is_rare_scale(scale)) cut_products(x, mult, scale);
  MH_UNROLL
  for (int h = 0; h < 2; ++h) {
    uint32_t sums[8];
    MH_UNROLL
    for (int e = 0; e < 8; e += 2) {
      const uint32_t two = inverted(4 * h + e / 2);
      sums[e] = add_draw<0>(x[8 * h + e] * mult, two);
      sums[e + 1] = add_draw<1>(x[8 * h + e + 1] * mult, two);
    }
    out[h] = stochastic_codes(sums);
  }
}

}  // namespace mh::cuda
