// Scale rules: from the amax of a block (or of a tensor or row) to the multiplier of its elements and the stored scale.
#pragma once

#include "elements.h"

MH_NUMERICS_BEGIN

// A quotient of non-negative numbers, at most FP32's largest. On integers: with a comparison of floats, what GCC 13 built
// gave small amaxes a scale of 1, as if an infinite quotient had to mean a divisor of 0.
MH_HD float cut_overflow(float quotient) {
  const uint32_t bits = float_bits(quotient), most = 0x7f7fffffu;
  return bits_float(bits < most ? bits : most);
}

// --- FP32 rule -------------------------------------------------------------------------------------------------------

// Encode scale max/amax. An amax that is 0, Inf or NaN gives 1; a quotient past FP32's range gives its largest number.
MH_HD float fp32_encode_scale(float amax, float element_max, float eps, bool pow2) {
  const float a = amax < eps ? eps : amax;  // a NaN compares false and stays
  const float finite = cut_overflow(element_max / a);
  const float floored = bits_float(float_bits(finite) & (pow2 ? 0x7f800000u : 0xffffffffu));
  return a > 0.0f && a <= kFloatMax ? floored : 1.0f;
}

// --- E8M0 ------------------------------------------------------------------------------------------------------------

// Smallest power of two that is >= v, as a biased exponent: what lies above a power of two carries into the exponent. Rounding
// up keeps the block's maximum inside the element's range; code 0 is 2^-127, whose FP32 is the subnormal 0x00400000.
MH_HD uint32_t e8m0_encode(float v) {
  const uint32_t bits = static_cast<uint32_t>(abs_bits(v));
  const uint32_t code = (bits + (bits < 0x00800000u ? 0x3fffffu : 0x7fffffu)) >> 23;
  return bits > static_cast<uint32_t>(kInfBits) ? 255u : (code < 254u ? code : 254u);
}

MH_HD float e8m0_decode(uint32_t code) {
  const uint32_t finite = code == 0 ? 0x00400000u : code << 23;
  return bits_float(code == 255 ? static_cast<uint32_t>(kNanBits) : finite);
}

// 2^(127 - code), exact; NaN for a NaN block, which makes every element NaN.
MH_HD float e8m0_multiplier(uint32_t code) {
  const float finite = e8m0_decode(254 - (code < 254 ? code : 254));
  return code == 255 ? bits_float(kNanBits) : finite;
}

// --- NVFP4: an E4M3 scale a block under an FP32 scale a tensor or row -------------------------------------------------

// 2688 = 448 * 6: the largest value a block can reach. An amax of 0, or one so large that enc would be 0, gives 1.
MH_HD float nvfp4_outer_encode(float amax) {
  const float finite = cut_overflow(2688.0f / amax);
  return amax > 0.0f && finite > 0.0f ? finite : 1.0f;
}

// What a product of two operands is multiplied by, from the amax of each; null: one that has none.
MH_HD float nvfp4_factor(const float* a, const float* b) {
  const float of_a = a ? 1.0f / nvfp4_outer_encode(*a) : 1.0f, of_b = b ? 1.0f / nvfp4_outer_encode(*b) : 1.0f;
  return of_a * of_b;
}

MH_HD uint32_t nvfp4_scale(float block_amax, float enc) {
  const float s = block_amax * (enc * (1.0f / 6.0f));
  return encode<E4M3>(s > kFloatMax ? kFloatMax : s);  // a NaN stays NaN: code 0x7f
}

// NaN for a NaN block, which makes all its codes 0 (E2M1 encodes NaN as 0). `inverse` is 1 / enc.
MH_HD float nvfp4_multiplier_from_inverse(uint32_t scale, float inverse) {
  const float m = 1.0f / (decode<E4M3>(scale) * inverse);
  return m > kFloatMax ? kFloatMax : m;
}

MH_HD float nvfp4_multiplier(uint32_t scale, float enc) { return nvfp4_multiplier_from_inverse(scale, 1.0f / enc); }

// --- all rules under one call ----------------------------------------------------------------------------------------

// A block's scale: what its elements are multiplied by, and what is stored: a byte, or the bits of an FP32 decode scale.
struct BlockScale {
  float multiplier;
  uint32_t stored;
};

MH_HD float element_max(Element e) {
  return e == Element::e4m3 ? E4M3::kMax : e == Element::e5m2 ? E5M2::kMax : E2M1::kMax;
}

// 1/max as an FP32 constant: E8M0 multiplies by it, other rules divide by the amax.
MH_HD float element_max_inv(Element e) {
  return e == Element::e4m3 ? 1.0f / 448.0f : e == Element::e5m2 ? 1.0f / 57344.0f : 1.0f / 6.0f;
}

// `enc` is the outer encode scale and `inverse` 1 / enc; only NVFP4 reads them.
template <ScaleRule rule>
MH_HD BlockScale block_scale(const FormatSpec& spec, float amax, float enc, float inverse) {
  if constexpr (rule == ScaleRule::fp32) {
    const float multiplier = fp32_encode_scale(amax, element_max(spec.element), spec.eps, spec.pow2);
    return BlockScale{multiplier, float_bits(1.0f / multiplier)};
  } else if constexpr (rule == ScaleRule::e8m0) {
    const uint32_t code = e8m0_encode(amax * element_max_inv(spec.element));
    return BlockScale{e8m0_multiplier(code), code};
  } else {
    const uint32_t code = nvfp4_scale(amax, enc);
    return BlockScale{nvfp4_multiplier_from_inverse(code, inverse), code};
  }
}

template <ScaleRule rule>
MH_HD BlockScale block_scale(const FormatSpec& spec, float amax, float enc) {
  return block_scale<rule>(spec, amax, enc, 1.0f / enc);
}

// Formats whose scale comes from an amax known before the cast: a tensor's, or a row's.
MH_HD bool is_preset(const FormatSpec& spec) {
  return spec.scale_rule == ScaleRule::fp32 && (spec.block_m == 0 || spec.block_k == 0);
}

// Their encode scale. `fixed`: the amax buffer holds it already.
MH_HD float preset_encode_scale(const FormatSpec& spec, float amax, bool fixed) {
  return fixed ? amax : fp32_encode_scale(amax, element_max(spec.element), spec.eps, spec.pow2);
}

MH_NUMERICS_END
