// Number types: one traits struct each, one templated `encode` (FP32 -> code) and `decode` (code -> FP32).
#pragma once

#include "base.h"
#include "format.h"

MH_NUMERICS_BEGIN

// |            | sign exp mantissa | bias | largest finite | Inf     | NaN                        |
// | E4M3       | 1    4   3        | 7    | 448            | no      | 0x7f, 0xff                 |
// | E5M2       | 1    5   2        | 15   | 57344          | 0x7c    | 0x7d..0x7f and their signs |
// | E2M1       | 1    2   1        | 1    | 6              | no      | no                         |
// | F16        | 1    5   10       | 15   | 65504          | 0x7c00  | above it                   |
//
// kMaxBits:  FP32 bits that larger magnitudes are clamped to before rounding.
// kNan:      the code a NaN becomes (sign dropped). E2M1 has none: 0, and its block's scale carries the NaN.
// kSpecial:  first magnitude code that is not finite; kHasInf: that one is Inf.
struct E4M3 {
  static constexpr int kBits = 8, kMantissa = 3, kBias = 7;
  static constexpr int32_t kMaxBits = 0x43e00000;  // 448 = (1 + 0b110 * 2^-3) * 2^8
  static constexpr float kMax = 448.0f;
  static constexpr uint32_t kNan = 0x7f, kSpecial = 0x7f;
  static constexpr bool kHasInf = false;
};

struct E5M2 {
  static constexpr int kBits = 8, kMantissa = 2, kBias = 15;
  static constexpr int32_t kMaxBits = 0x47600000;  // 57344 = (1 + 0b11 * 2^-2) * 2^15
  static constexpr float kMax = 57344.0f;
  static constexpr uint32_t kNan = 0x7f, kSpecial = 0x7c;
  static constexpr bool kHasInf = true;
};

struct E2M1 {
  static constexpr int kBits = 4, kMantissa = 1, kBias = 1;
  static constexpr int32_t kMaxBits = 0x40c00000;  // 6 = (1 + 0b1 * 2^-1) * 2^2
  static constexpr float kMax = 6.0f;
  static constexpr uint32_t kNan = 0, kSpecial = 8;
  static constexpr bool kHasInf = false;
};

// A storage type, not a payload: does not saturate. Its clamp is 65536, which rounds to Inf.
struct F16 {
  static constexpr int kBits = 16, kMantissa = 10, kBias = 15;
  static constexpr int32_t kMaxBits = 0x47800000;  // 65536 = 2^16
  static constexpr float kMax = 65504.0f;
  static constexpr uint32_t kNan = 0x7e00, kSpecial = 0x7c00;
  static constexpr bool kHasInf = true;
};

// What an F's bits are and how they are compared: a float here, the CPU loops add vectors of floats.
template <class F>
struct Words {
  using Int = int32_t;
  static MH_HD Int bits(F x) { return static_cast<Int>(float_bits(x)); }
  static MH_HD F value(Int bits) { return bits_float(static_cast<uint32_t>(bits)); }
  static MH_HD Int min(Int a, Int b) { return a < b ? a : b; }
  static MH_HD Int max(Int a, Int b) { return max_bits(a, b); }
  static MH_HD Int truncated(F x) { return static_cast<Int>(x); }
  static MH_HD Int if_less(Int a, Int b, Int then, Int otherwise) { return a < b ? then : otherwise; }
};

// FP32 -> code, nearest even, saturating. Branch-free, so that loops over it vectorise.
//
// Let 2^e be the power of two of |x|, but at least the type's smallest normal number. Codes around |x| are then
// 2^(e - mantissa) apart. Adding M = 2^(e + 23 - mantissa), whose last bit is worth that much, makes the FP32 adder round
// |x| to it, ties to even, and leaves n = |x| / 2^(e - mantissa) in the sum's low bits. The code is n plus one mantissa
// range for every power of two above the smallest: n carries into the exponent where |x| rounds up to 2^(e + 1), and is
// the code itself where |x| is subnormal.
// `encode_number` does not know NaN: what it makes of one is no code. Callers that cannot meet one save the comparison.
template <class E, class F>
MH_HD typename Words<F>::Int encode_number(F x) {
  using W = Words<F>;
  constexpr int kShift = 23 - E::kMantissa;
  constexpr int32_t kMinNormal = (128 - E::kBias) << 23;
  constexpr int32_t kMagnitude = (1 << (E::kBits - 1)) - 1, kSign = 1 << (E::kBits - 1);

  const auto zero = W::bits(x) ^ W::bits(x);
  const auto bits = W::bits(x);
  const auto a = W::min(bits & kAbsMask, zero + E::kMaxBits);
  const auto power = W::max(a & kInfBits, zero + kMinNormal);
  const auto m = power + (kShift << 23);
  const auto magnitude = W::bits(W::value(a) + W::value(m)) - m + ((power - kMinNormal) >> kShift);
  return (magnitude & kMagnitude) | ((bits >> (32 - E::kBits)) & kSign);
}

template <class E, class F>
MH_HD typename Words<F>::Int encode_words(F x) {
  using W = Words<F>;
  const auto abs = W::bits(x) & kAbsMask;
  return W::if_less((abs ^ abs) + kInfBits, abs, (abs ^ abs) + static_cast<int32_t>(E::kNan), encode_number<E>(x));
}

template <class E>
MH_HD uint32_t encode(float x) {
  return static_cast<uint32_t>(encode_words<E>(x));
}

template <class E>
MH_HD float decode(uint32_t code) {
  constexpr int kShift = 23 - E::kMantissa;
  constexpr float kStep = 1.0f / static_cast<float>(1 << (E::kBias - 1 + E::kMantissa));  // smallest magnitude

  const uint32_t magnitude = code & ((1u << (E::kBits - 1)) - 1);
  const uint32_t sign = (code >> (E::kBits - 1)) << 31;
  const uint32_t normal = (magnitude << kShift) + (static_cast<uint32_t>(127 - E::kBias) << 23);
  const uint32_t subnormal = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * kStep);
  const uint32_t finite = magnitude < (1u << E::kMantissa) ? subnormal : normal;
  const uint32_t special = E::kHasInf && magnitude == E::kSpecial ? kInfBits : kNanBits;
  return bits_float((magnitude >= E::kSpecial ? special : finite) | sign);
}

// High-precision storage types, as raw bits.
struct Float32 {
  using Raw = float;
  static MH_HD float load(Raw r) { return r; }
  static MH_HD Raw store(float x) { return x; }
};

struct BFloat16 {
  using Raw = uint16_t;
  static constexpr uint32_t kInf = 0x7f80;
  static MH_HD float load(Raw r) { return bits_float(static_cast<uint32_t>(r) << 16); }
  static MH_HD Raw store(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<Raw>(abs_bits(x) > kInfBits ? 0x7fc0u : rounded);
  }
};

struct Float16 {
  using Raw = uint16_t;
  static constexpr uint32_t kInf = F16::kSpecial;
  static MH_HD float load(Raw r) { return decode<F16>(r); }
  static MH_HD Raw store(float x) { return static_cast<Raw>(encode<F16>(x)); }
};

MH_NUMERICS_END
