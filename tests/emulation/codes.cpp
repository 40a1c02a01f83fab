// The CUDA lines' E2M1 codes against the definition: every magnitude that rounding can see, then whole blocks of numbers under
// scales of all sizes.
#include <cstdio>
#include <random>

#include "cuda/line.cuh"

namespace {

using namespace mh;
using namespace mh::cuda;

std::mt19937 rng(1);

bool fails(const char* what, float x, uint32_t found, uint32_t wanted) {
  if (found == wanted) return false;
  printf("%s %a: code %u, wanted %u\n", what, x, found, wanted);
  return true;
}

// `u` in either half of a word; a code of 8 is packed as 7.
bool fails_stochastic(float x, uint32_t u) {
  const uint32_t other = rng() & 0xffffu, wanted = encode_e2m1_stochastic(x, u);
  for (bool upper : {false, true}) {
    const uint32_t above = above_draw(upper ? u << 16 | other : other << 16 | u, upper);
    if (fails("stochastic", x, std::min(e2m1_stochastic(x, above) >> 24, 7u), wanted)) return true;
  }
  return false;
}

// Below 1/32 one number in a thousand.
bool magnitudes_fail() {
  for (uint32_t bits = 0; bits < float_bits(7.0f); bits += bits < float_bits(1.0f / 32) ? 1000 : 1) {
    const float x = bits_float(bits);
    if (fails("nearest", x, e2m1_nearest(x) & 0xffu, encode<E2M1>(x))) return true;
    if (bits % 16 != 0 && x > 0.25f) continue;
    const double line = x < 2 ? 2.0 * x : (x < 4 ? x + 2.0 : x / 2.0 + 4.0);
    const uint32_t fraction = static_cast<uint32_t>(line * 65536) & 0xffffu;
    for (uint32_t u : {0u, fraction, (fraction - 1) & 0xffffu, (fraction + 1) & 0xffffu, 0xffffu, static_cast<uint32_t>(rng() & 0xffffu)})
      if (fails_stochastic(x, u)) return true;
  }
  return false;
}

float random_float(uint32_t first_exponent, uint32_t exponents) {
  return bits_float((first_exponent + static_cast<uint32_t>(rng()) % exponents) << 23 | (rng() & 0x7fffffu));
}

// A block of numbers of up to 2^`spread` below `top`, some of them zeros, Inf or NaN.
void fill(float top, uint32_t spread, float (&x)[kLine]) {
  const uint32_t mask = rng() % 2 ? 0xffff0000u : 0xffffffffu;
  for (float& v : x) {
    const float below = bits_float(float_bits(1.0f) - static_cast<uint32_t>(rng()) % (spread << 23));
    v = bits_float((float_bits(rng() % 16 == 0 ? top : top * below) & mask) | (rng() & 0x80000000u));
    if (rng() % 64 == 0) v = 0.0f;
    if (rng() % 4096 == 0) v = bits_float(rng() % 2 ? kInfBits : kNanBits);
  }
}

bool block_fails() {
  const float tensor_amax = rng() % 8 == 0 ? random_float(0, 255) : random_float(100, 40);
  const float top = rng() % 8 == 0 ? random_float(0, 255) : tensor_amax * random_float(127 - rng() % 12, 1) * 0.5f;
  float x[kLine], scaled[kLine];
  fill(top, 1 + rng() % 30, x);
  int32_t amax = 0;
  for (float v : x) amax = max_bits(amax, abs_bits(v));
  const float encode_scale = nvfp4_outer_encode(tensor_amax);
  const uint32_t scale = nvfp4_scale(amax_from_bits(amax), encode_scale);
  const float multiplier = nvfp4_multiplier(scale, encode_scale);
  const bool stochastic = rng() % 2;
  uint32_t draws[kLine], codes[2];
  for (uint32_t& draw : draws) draw = static_cast<uint32_t>(rng());
  memcpy(scaled, x, sizeof x);
  encode_nibbles(scaled, multiplier, scale, Signs::of(x), stochastic, [&](int e) { return above_draw(draws[e], true); }, codes);
  for (int e = 0; e < kLine; ++e) {
    const float y = x[e] * multiplier;
    const uint32_t wanted = scale == E4M3::kNan ? 0 : (stochastic ? encode_e2m1_stochastic(y, draws[e] >> 16) : encode<E2M1>(y));
    if (fails("block", y, codes[e / 8] >> (e % 8 * 4) & 15u, wanted)) return true;
  }
  return false;
}

}  // namespace

int main() {
  if (magnitudes_fail()) return 1;
  for (int i = 0; i < 2000000; ++i)
    if (block_fails()) return 1;
}
