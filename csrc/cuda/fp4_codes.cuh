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
    const uint32_t first = (a & 0x80808080u) | ((a * 8u + kHalf) & 0x7f7f7f7fu);  // a code is the upper half of a byte
    const uint32_t second = (b & 0x80808080u) | ((b * 8u + kHalf) & 0x7f7f7f7fu);
    return (first >> 4 & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u);
  }
};

// The nearest codes of eight numbers of magnitudes below 7.
__device__ __forceinline__ uint32_t nearest_codes(const float (&y)[8]) {
  const HalfWords h = {{nearest_halves(y[0], y[2]), nearest_halves(y[4], y[6])},
                       {nearest_halves(y[1], y[3]), nearest_halves(y[5], y[7])}};
  return h.codes<true>();
}

// Whether an E4M3 scale may leave numbers of its block above 6 * 17/16 when they are multiplied: subnormal ones, the
// largest, which may have been cut, and NaN. They are rare.
__device__ __forceinline__ bool is_rare_scale(uint32_t scale) { return scale - 8u >= E4M3::kNan - 1 - 8u; }

// Then the products, cut, stand for the numbers; those of a block with a NaN have the code 0.
template <int n>
__device__ __forceinline__ void cut_products(float (&x)[n], float& mult, uint32_t scale) {
  MH_UNROLL
  for (int e = 0; e < n; ++e)
    x[e] = scale == E4M3::kNan ? 0.0f : fminf(fmaxf(x[e] * mult, -E2M1::kMax), E2M1::kMax);
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

}  // namespace mh::cuda
