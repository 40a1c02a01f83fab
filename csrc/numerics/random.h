// Stochastic rounding to E2M1, with bits that depend on an element's global position only.
#pragma once

#include "elements.h"

MH_NUMERICS_BEGIN

// Philox 4x32 with 10 rounds: counter and key to four random words.
struct Philox {
  uint32_t c0, c1, c2, c3;
};

MH_HD Philox philox_4x32_10(Philox c, uint32_t k0, uint32_t k1) {
  MH_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c.c0;
    const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c.c2;
    c = Philox{static_cast<uint32_t>(p1 >> 32) ^ c.c1 ^ k0, static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ c.c3 ^ k1, static_cast<uint32_t>(p0)};
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

// The eight draws of elements 8 * group ... 8 * group + 7.
MH_HD Philox random_words(const RandomKey& key, uint64_t group) {
  return philox_4x32_10(Philox{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), key.counter, key.direction},
                        key.seed, key.tensor_id);
}

MH_HD uint32_t random_draw(const RandomKey& key, uint64_t index) {
  const Philox w = random_words(key, index / kDrawsPerCall);
  const int lane = static_cast<int>(index % kDrawsPerCall);
  const uint32_t low = lane & 2 ? w.c1 : w.c0, high = lane & 2 ? w.c3 : w.c2;
  return ((lane & 4 ? high : low) >> (lane & 1 ? 16 : 0)) & 0xffffu;
}

// x is the scaled element, u its 16 random bits. Between neighbouring magnitudes lo <= |x| <= hi, takes hi when
// u < floor(65536 * (|x| - lo) / (hi - lo)). Every step is exact: the difference because lo <= |x| <= 2 lo (or lo = 0),
// the rest because hi - lo is a power of two.
MH_HD uint32_t encode_e2m1_stochastic(float x, uint32_t u) {
  const uint32_t bits = float_bits(x);
  const int32_t abs = static_cast<int32_t>(bits) & kAbsMask;
  const int32_t a = abs < E2M1::kMaxBits ? abs : E2M1::kMaxBits;
  const float v = bits_float(static_cast<uint32_t>(a));
  const int32_t truncated = (a >> 22) - (126 << 1);         // codes 2..7, v >= 1
  const int32_t code = v < 1.0f ? (v >= 0.5f ? 1 : 0) : truncated;
  const float lo = decode<E2M1>(static_cast<uint32_t>(code));
  const float per_step = v < 2.0f ? 131072.0f : (v < 4.0f ? 65536.0f : 32768.0f);  // 65536 / (hi - lo)
  const int32_t f = static_cast<int32_t>((v - lo) * per_step);
  const int32_t rounded = code + (static_cast<int32_t>(u) < f ? 1 : 0);
  const uint32_t signed_code = static_cast<uint32_t>(rounded) | ((bits >> 31) << 3);
  return abs > kInfBits ? E2M1::kNan : signed_code;
}

MH_NUMERICS_END
