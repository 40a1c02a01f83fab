// E2M1 codes by fp4_codes.cuh against the definition: every magnitude that rounding can see; all 16-bit numbers under
// multipliers of all sizes, among them those with ties and with products that only rounding makes ties; transforms;
// draws.
#include "cuda/fp4_codes.cuh"

#include <cstdio>
#include <random>
#include <vector>

namespace {

using namespace mh;
using namespace mh::cuda;

std::mt19937 rng(1);

bool fails(const char* what, float x, float mult, uint32_t found, uint32_t wanted) {
  if (found == wanted) return false;
  printf("%s %a * %a: %u, wanted %u\n", what, x, mult, found, wanted);
  return true;
}

uint32_t code_of(const uint32_t (&codes)[2], int e) { return codes[e / 8] >> (e % 8 * 4) & 15u; }

// The nearest codes of eight numbers of magnitudes below 7.
uint32_t nearest_codes(const float (&y)[8]) {
  const HalfWords h = {{nearest_halves(y[0], y[2]), nearest_halves(y[4], y[6])},
                       {nearest_halves(y[1], y[3]), nearest_halves(y[5], y[7])}};
  return h.codes();
}

// Below 1/32 one number in a thousand.
bool magnitudes_fail() {
  float y[8];
  int filled = 0;
  for (uint32_t bits = 0; bits < float_bits(7.0f); bits += bits < float_bits(1.0f / 32) ? 1000 : 1) {
    y[filled++] = bits_float(bits | (bits % 8 < 4 ? 0x80000000u : 0u));
    if (filled < 8) continue;
    const uint32_t codes = nearest_codes(y);
    for (int e = 0; e < 8; ++e)
      if (fails("nearest", y[e], 1.0f, codes >> (4 * e) & 15u, encode<E2M1>(y[e]))) return true;
    filled = 0;
  }
  return false;
}

// Random bits, or those at which the rounding of a product changes.
uint32_t draw_for(float y) {
  if (rng() % 2) return rng() & 0xffffu;
  const double a = std::fabs(static_cast<double>(y)), line = a < 2 ? 2 * a : (a < 4 ? a + 2 : a / 2 + 4);
  return (static_cast<uint32_t>(std::min(line, 8.0) * 65536) + rng() % 3 - 1) & 0xffffu;
}

// Codes of a line as `encode(line, out)` and its definition of them, of a product and of random bits.
template <class Encode, class Wanted>
bool codes_differ(const char* what, const float (&x)[kLine], float mult, Encode&& encode, Wanted&& wanted) {
  float copy[kLine];
  memcpy(copy, x, sizeof x);
  uint32_t codes[2];
  encode(copy, codes);
  for (int e = 0; e < kLine; ++e)
    if (fails(what, x[e], mult, code_of(codes, e), wanted(e))) return true;
  return false;
}

// `factor`: what x has been left to be multiplied by.
template <class T, bool turned>
bool line_fails(const float (&x)[kLine], float mult, uint32_t scale, bool nearest, bool stochastic) {
  const bool nan = scale == E4M3::kNan;
  float y[kLine];
  uint32_t draws[kLine], along[kLine / 2] = {}, down[2][kLine];
  for (int e = 0; e < kLine; ++e) {
    y[e] = x[e] * kLineFactor<turned> * mult;
    draws[e] = draw_for(y[e]);
    along[e / 2] |= (0xffffu - draws[e]) << (e % 2 * 16);
    const uint32_t other = rng() & 0xffffu;
    down[0][e] = (0xffffu - draws[e]) | other << 16, down[1][e] = (0xffffu - draws[e]) << 16 | other;
  }
  const auto rounded = [&](int e) { return nan ? 0u : encode<E2M1>(y[e]); };
  const auto drawn = [&](int e) { return nan ? 0u : encode_e2m1_stochastic(y[e], draws[e]); };
  if (nearest) {
    const auto exact = [&](auto& v, auto& out) { encode_nearest<turned>(v, mult, scale, out); };
    const auto tie_less = [&](auto& v, auto& out) { encode_nearest(v, mult, scale, is_tie_free<T>(mult), out); };
    if (codes_differ("nearest", x, mult, exact, rounded)) return true;
    if (!turned && codes_differ("tie free", x, mult, tie_less, rounded)) return true;
  }
  if (!stochastic) return false;
  const auto of_line = [&](auto& v, auto& out) {
    encode_stochastic_along<turned>(v, mult, scale, [&](int e) { return along[e]; }, out);
  };
  const auto of_left = [&](auto& v, auto& out) {
    encode_stochastic_down<false, turned>(v, mult, scale, [&](int e) { return down[0][e]; }, out);
  };
  const auto of_right = [&](auto& v, auto& out) {
    encode_stochastic_down<true, turned>(v, mult, scale, [&](int e) { return down[1][e]; }, out);
  };
  return codes_differ("along", x, mult, of_line, drawn) || codes_differ("left", x, mult, of_left, drawn) ||
         codes_differ("right", x, mult, of_right, drawn);
}

// All 16-bit numbers that a block with this scale may hold. A block without a NaN has none.
template <class T>
bool numbers_fail(float mult, uint32_t scale) {
  const bool stochastic = rng() % 8 == 0;
  float x[kLine];
  int filled = 0;
  for (uint32_t raw = 0; raw < 0x8000u; ++raw) {
    float v = T::load(static_cast<uint16_t>(raw | (rng() & 0x8000u)));
    const bool too_large = !is_rare_scale(scale) && std::fabs(v * mult) > 6.0f * 17 / 16;
    const bool outside = scale != E4M3::kNan && (v != v || too_large);
    if (outside) continue;
    x[filled++] = v;
    if (filled < kLine) continue;
    if (line_fails<T, false>(x, mult, scale, true, stochastic)) return true;
    filled = 0;
  }
  while (filled > 0 && filled < kLine) x[filled++] = -0.0f;
  return filled > 0 && line_fails<T, false>(x, mult, scale, true, true);
}

float random_power() { return bits_float((64 + rng() % 128) << 23); }

std::vector<float> amaxes() {
  std::vector<float> all = {0.0f, 0x1p-149f, 0x1p-133f, 0x1p-126f, kFloatMax, bits_float(kInfBits), 65504.0f, 2688.0f};
  for (int i = 0; i < 12; ++i) all.push_back(random_power() * bits_float(0x3f800000u | (rng() & 0x7fffffu)));
  for (int i = 0; i < 12; ++i) all.push_back(bits_float(float_bits(random_power()) | (rng() & 0x7fu) << 16));
  for (float odd : {2688.0f, 147.0f, 189.0f, 129.0f, 133.0f, 1.0f, 3.0f, 5.0f, 7.0f, 896.0f, 2688.0f / 5})
    all.push_back(odd * 0x1p-5f);
  return all;
}

// A multiplier that takes a number with few bits to a tie, or as near as rounding hides.
template <class T>
float multiplier_of_tie() {
  constexpr float kTies[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  constexpr uint32_t kBits = std::is_same_v<T, BFloat16> ? 0x10000u : 0x2000u;
  const float x = bits_float(float_bits(1.0f) + rng() % 128 * kBits + (rng() % 8 << 23)) * random_power();
  const float mult = kTies[rng() % 7] / x;
  return bits_float(float_bits(mult) + rng() % 5 - 2);
}

template <class T>
bool multipliers_fail() {
  for (float amax : amaxes()) {
    const float enc = nvfp4_outer_encode(amax);
    for (uint32_t scale = 0; scale < 128; ++scale)
      if (numbers_fail<T>(nvfp4_multiplier(scale, enc), scale)) return true;
  }
  for (int i = 0; i < 500; ++i)
    if (numbers_fail<T>(multiplier_of_tie<T>(), 8 + rng() % 118)) return true;
  for (int i = 0; i < 100; ++i)
    for (float odd : {1.0f, 3.0f, 5.0f, 7.0f})
      if (numbers_fail<T>(odd * random_power(), 8 + rng() % 118)) return true;
  return false;
}

// Blocks of numbers of like size, or of any bits, through the transform.
template <class T>
bool turned_fails() {
  float x[kLine], wanted[kLine];
  const uint16_t around = static_cast<uint16_t>(rng()), mask = rng() % 2 ? 0xffffu : 0xff80u;
  const bool any = rng() % 64 == 0;
  for (float& v : x) {
    const uint32_t raw = any ? rng() : ((around & 0x7c00u) | (rng() & 0x83ffu)) & mask;
    v = rng() % 32 ? T::load(static_cast<uint16_t>(raw)) : 0.0f;
  }
  memcpy(wanted, x, sizeof x);
  hadamard16(wanted, false);
  const int32_t amax = line_amax(wanted), found = turn_line(x);
  if (amax > kInfBits ? found <= kInfBits : found != amax) return fails("amax", x[0], 1.0f, found, amax);
  for (int e = 0; e < kLine; ++e) {
    const bool number = wanted[e] == wanted[e];
    if (number && fails("transform", x[e], 0.25f, float_bits(x[e] * 0.25f), float_bits(wanted[e]))) return true;
  }
  const float largest = amax_from_bits(amax), outer = rng() % 8 ? largest * (1.0f + (rng() & 0xffu)) : kFloatMax;
  const float enc = nvfp4_outer_encode(outer);
  const uint32_t scale = nvfp4_scale(largest, enc);
  return line_fails<T, true>(x, nvfp4_multiplier(scale, enc), scale, true, true);
}

bool draws_fail() {
  const auto word = [] { return static_cast<uint32_t>(rng()); };
  const RandomKey key = {word(), word(), word(), word() % 2};
  const uint64_t high = rng() % 4, first = high << 32 | static_cast<uint32_t>(rng() % 2 ? rng() : -(rng() % 8192));
  const uint32_t step = rng() % 2048;
  constexpr int kCalls = 4;
  uint32_t words[kCalls][4];
  inverted_draws(key, first, step, words);
  for (int i = 0; i < kCalls; ++i)
    for (int draw = 0; draw < kDrawsPerCall; ++draw) {
      const uint64_t index = (first + static_cast<uint64_t>(i) * step) * kDrawsPerCall + draw;
      const uint32_t found = 0xffffu - (words[i][draw / 2] >> (draw % 2 * 16) & 0xffffu);
      if (fails("draw", static_cast<float>(index), 1.0f, found, random_draw(key, index))) return true;
    }
  return false;
}

template <class Fails>
bool often(int times, Fails&& fails) {
  for (int i = 0; i < times; ++i)
    if (fails()) return true;
  return false;
}

}  // namespace

int main() {
  return magnitudes_fail() || multipliers_fail<BFloat16>() || multipliers_fail<Float16>() ||
         often(200000, turned_fails<BFloat16>) || often(200000, turned_fails<Float16>) || often(100000, draws_fail);
}
