// Codes under block scales as pairs of bf16 numbers, 32 bits at a time, and where a product's registers take them from.
//
// The magnitude of a code, moved to where bf16 keeps exponent and mantissa, is the code's value times a power of two
// that depends on the type only, subnormals included; one bf16 product makes up for it and for the block's scale. The
// result is rounded once, to what FP32's product of code and scale rounds to.
//
// A product takes 16 columns of A at a time, of which lane t of every four has 2t, 2t + 1, 2t + 8, 2t + 9. Here it has
// 4 bytes side by side instead, so both operands are multiplied in another order of the contraction, in *slots*: of
// every 16 bytes of codes, slot 8 q + 2 t + e is code q + kPairs * e of word t. Then a pair lies at the same bits of
// both halves of a word.
#pragma once

#include "../cuda/ptx.cuh"
#include "../numerics/scales.h"

namespace mh::gemm {

constexpr uint32_t kBoth = 0x00010001u;  // times the bits of a half: both halves

// FP8 under E8M0 scales of 32.
template <class E>
struct Coded {
  static constexpr int kWordCodes = 4, kPairs = kWordCodes / 2, kBlock = 32;
  static constexpr int kScaleStep = 1;  // lanes' blocks in 32 codes: one
  static constexpr float kFactor = 1.0f;
  static constexpr bool kLarge = true;  // scales that do not fit into one product
  static constexpr uint32_t kOne = 127, kOffset = 127 - E::kBias;

  static __device__ __forceinline__ uint32_t pair(uint32_t word, int q) {
    constexpr int kShift = 7 - E::kMantissa;
    const uint32_t signs = q ? word : word << 8, magnitudes = q ? word >> (8 - kShift) : word << kShift;
    return (signs & 0x80008000u) | (magnitudes & (0x7fu << kShift) * kBoth);
  }

  // Of two scales, the lowest bytes of `a` and `b`; at most 1.
  static __device__ __forceinline__ void multipliers(uint32_t a, uint32_t b, uint32_t (&m)[2]) {
    m[0] = (min(a & 0xffu, kOne) + kOffset) * (kBoth << 7), m[1] = (min(b & 0xffu, kOne) + kOffset) * (kBoth << 7);
  }

  // The rest of a scale above 1, NaN included.
  static __device__ __forceinline__ uint32_t rest(uint32_t scale) {
    const uint32_t code = scale & 0xffu;
    return code == 255 ? 0x7fc0u * kBoth : max(code, kOne) * (kBoth << 7);
  }

  // Whether one of four scales may be above 1.
  static __device__ __forceinline__ bool large(uint32_t scales) { return (scales & 0x80808080u) != 0; }
};

// E2M1 under E4M3 scales of 16. What is decoded is 2^-8 of it, so that multipliers fit.
template <>
struct Coded<E2M1> {
  static constexpr int kWordCodes = 8, kPairs = kWordCodes / 2, kBlock = 16;
  static constexpr int kScaleStep = 2;
  static constexpr float kFactor = 256.0f;
  static constexpr bool kLarge = false;

  static __device__ __forceinline__ uint32_t pair(uint32_t word, int q) {
    const uint32_t signs = word << (12 - 4 * q), magnitudes = q < 2 ? word << (6 - 4 * q) : word >> (4 * q - 6);
    return (signs & 0x80008000u) | (magnitudes & 0x01c0u * kBoth);
  }

  static __device__ __forceinline__ void multipliers(uint32_t a, uint32_t b, uint32_t (&m)[2]) {
    constexpr float kLift = 3.32306998946228968e35f;  // 2^118: codes lie at 2^-126 of their values
    float x, y;
    cuda::decode_pair<E4M3>(cuda::permute(a, b, 0x0040), x, y);
    m[0] = cuda::permute(float_bits(x * kLift), 0, 0x3232), m[1] = cuda::permute(float_bits(y * kLift), 0, 0x3232);
  }

  static __device__ __forceinline__ uint32_t rest(uint32_t) { return 0x3f80u * kBoth; }
  static __device__ __forceinline__ bool large(uint32_t) { return false; }
};

// A product's registers of 16 rows and 32 codes, two times 16: of this lane's two rows, words of 4 bytes of every 16.
template <class D>
__device__ __forceinline__ void fragments(const uint32_t (&words)[4 / D::kPairs][2], const uint32_t (&multipliers)[2],
                                          uint32_t (&a)[2][4]) {
  MH_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int slice = i / 4, row = i % 2, half = i / 2 % 2, q = slice * 2 + half;
    const uint32_t pair = D::pair(words[q / D::kPairs][row], q % D::kPairs);
    a[slice][row + 2 * half] = cuda::multiply_bf16s(pair, multipliers[row]);
  }
}

// 8 slots, from 8 `part` on, of a run of 16 bytes. scales: one, or of each half of the run.
template <class D>
__device__ __forceinline__ void slots(const uint32_t (&words)[4], const uint32_t (&scales)[2], int part,
                                      uint32_t (&pairs)[4]) {
  uint32_t multipliers[2];
  D::multipliers(scales[0], scales[1], multipliers);
  MH_UNROLL
  for (int t = 0; t < 4; ++t) {
    pairs[t] = cuda::multiply_bf16s(D::pair(words[t], part), multipliers[t / 2]);
    if (D::kLarge) pairs[t] = cuda::multiply_bf16s(pairs[t], D::rest(scales[t / 2]));
  }
}

}  // namespace mh::gemm
