// Stochastic rounding to E2M1, with bits that depend on an element's global position only.
#pragma once

#include "elements.h"

MH_NUMERICS_BEGIN

// Arithmetic of 32-bit words W. The CPU loops specialise it for vectors of words.
template <class W>
struct WordOps {
  static MH_HD uint64_t product(W a, uint32_t b) { return static_cast<uint64_t>(a) * b; }
  static MH_HD W high(uint64_t p) { return static_cast<W>(p >> 32); }
  static MH_HD W low(uint64_t p) { return static_cast<W>(p); }
};

// Philox 4x32 with 10 rounds: counter and key to four random words.
template <class W>
struct Philox {
  W c0, c1, c2, c3;
};

template <class W>
MH_HD Philox<W> philox_4x32_10(Philox<W> c, uint32_t k0, uint32_t k1) {
  using Ops = WordOps<W>;
  MH_UNROLL
  for (int round = 0; round < 10; ++round) {
    const auto p0 = Ops::product(c.c0, 0xD2511F53u);
    const auto p1 = Ops::product(c.c2, 0xCD9E8D57u);
    c = Philox<W>{Ops::high(p1) ^ c.c1 ^ k0, Ops::low(p1), Ops::high(p0) ^ c.c3 ^ k1, Ops::low(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

constexpr int kDrawsPerCall = 8;  // 16-bit draws in one Philox call

// What a tensor's draws are keyed by; `direction` is 0 for rowwise and 1 for columnwise casts.
struct RandomKey {
  uint32_t seed, tensor_id, counter, direction;
};

MH_HD RandomKey random_key(const int64_t* rng, int axis) {
  return RandomKey{static_cast<uint32_t>(rng[kSeed]), static_cast<uint32_t>(rng[kTensorId]),
                   static_cast<uint32_t>(rng[kCounter]), static_cast<uint32_t>(axis)};
}

// The draws of elements 8 * group ... 8 * group + 7, `group` given as its low and high word.
template <class W>
MH_HD Philox<W> random_words(const RandomKey& key, W group_low, W group_high) {
  const W zero = group_low ^ group_low;
  const Philox<W> counter{group_low, group_high, zero + key.counter, zero + key.direction};
  return philox_4x32_10(counter, key.seed, key.tensor_id);
}

MH_HD uint32_t random_draw(const RandomKey& key, uint64_t index) {
  const uint64_t group = index / kDrawsPerCall;
  const auto w = random_words(key, static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32));
  const int lane = static_cast<int>(index % kDrawsPerCall);
  const uint32_t low = lane & 2 ? w.c1 : w.c0, high = lane & 2 ? w.c3 : w.c2;
  return ((lane & 4 ? high : low) >> (lane & 1 ? 16 : 0)) & 0xffffu;
}

// x is the scaled element, u its 16 random bits. Between neighbouring magnitudes lo <= |x| <= hi, takes hi when
// u < f = floor(65536 * (|x| - lo) / (hi - lo)).
//
// w holds lo's code above f, 16 bits each. From 1 up, lo is |x| without its low 22 mantissa bits and those are
// (|x| - lo) / (hi - lo) in units of 2^-22: w is the bits of |x|, shifted. Below 1 the step is 1/2, so w counts units of
// 2^-17; the product is exact and the conversion truncates. Adding 65535 - u carries into the code exactly when u < f.
template <class F>
MH_HD typename Words<F>::Int encode_number_stochastic(F x, typename Words<F>::Int u) {
  using W = Words<F>;
  constexpr int32_t kOne = 0x3f800000, kOneShifted = (kOne >> 6) - (2 << 16);  // 1.0 has code 2
  const auto bits = W::bits(x);
  const auto zero = bits ^ bits;
  const auto a = W::min(bits & kAbsMask, zero + E2M1::kMaxBits);
  const auto w = W::if_less(a, zero + kOne, W::truncated(W::value(a) * 131072.0f), (a >> 6) - kOneShifted);
  return ((w + 65535 - u) >> 16) | ((bits >> 28) & 8);
}

MH_HD uint32_t encode_e2m1_stochastic(float x, uint32_t u) {
  const int32_t code = encode_number_stochastic(x, static_cast<int32_t>(u));
  return abs_bits(x) > kInfBits ? E2M1::kNan : static_cast<uint32_t>(code);
}

MH_NUMERICS_END
