// Decodes inside a product (csrc/gemm/decode.cuh) against the definition: every code under every scale, then that what
// one operand is decoded to and what the other's registers hold are in the same order of the contraction.
#include <cmath>
#include <cstdio>
#include <random>

#include "gemm/decode.cuh"

namespace {

using namespace mh;
using namespace mh::gemm;

template <class E>
constexpr bool kFp8 = E::kBits == 8;

template <class E>
float definition(uint32_t code, uint32_t scale) {
  return kFp8<E> ? decode<E>(code) * e8m0_decode(scale) : decode<E>(code) * decode<E4M3>(scale) / 256.0f;
}

bool same(uint16_t found, float wanted) {
  const uint16_t bits = BFloat16::store(wanted);
  return wanted != wanted ? (found & 0x7fffu) > BFloat16::kInf : found == bits;
}

// A code's bits wherever it is in a word, the others being something else.
template <class E>
bool values_fail() {
  using D = Coded<E>;
  std::mt19937 rng(1);
  constexpr uint32_t kCodes = 1u << E::kBits;
  for (uint32_t scale = 0; scale < 256; ++scale)
    for (uint32_t code = 0; code < kCodes; ++code) {
      if (kFp8<E> && (code & 0x7fu) >= E::kSpecial && scale != 255) continue;  // casts write NaN under such a scale
      for (int at = 0; at < D::kWordCodes; ++at) {
        const uint32_t shift = at * E::kBits, other = static_cast<uint32_t>(rng());
        const uint32_t word = (other & ~((kCodes - 1) << shift)) | code << shift;
        const uint32_t unused = static_cast<uint32_t>(rng()) << 8;
        uint32_t multipliers[2];
        D::multipliers(unused | scale, unused | 0x38u, multipliers);
        uint32_t pair = cuda::multiply_bf16s(D::pair(word, at % D::kPairs), multipliers[0]);
        if (D::large(scale * 0x01010101u)) pair = cuda::multiply_bf16s(pair, D::rest(unused | scale));
        const float wanted = definition<E>(code, scale);
        if (same(static_cast<uint16_t>(at < D::kPairs ? pair : pair >> 16), wanted)) continue;
        printf("code %u at %d under scale %u: %08x, wanted %a\n", code, at, scale, pair, wanted);
        return true;
      }
    }
  return false;
}

// 16 rows of 32 codes: registers of all lanes as the instruction reads them, against what `slots` gives and the codes'
// places.
template <class E>
bool order_fails() {
  using D = Coded<E>;
  constexpr int kRunCodes = 4 * D::kWordCodes, kRuns = 32 / kRunCodes;
  std::mt19937 rng(2);
  uint8_t bytes[16][kRuns * 16];
  uint32_t scale[16][2];
  for (int row = 0; row < 16; ++row) {
    for (uint8_t& byte : bytes[row]) byte = static_cast<uint8_t>(rng() & 0x77u);  // no NaN
    for (uint32_t& s : scale[row]) s = rng() % 120;
    if (D::kScaleStep == 1) scale[row][1] = scale[row][0];
  }
  const auto word = [&](int row, int run, int t) {
    uint32_t w;
    memcpy(&w, &bytes[row][run * 16 + t * 4], 4);
    return w;
  };
  uint16_t slot[16][32], held[16][32];
  for (int row = 0; row < 16; ++row)
    for (int run = 0; run < kRuns; ++run)
      for (int part = 0; part < D::kPairs; ++part) {
        const uint32_t words[4] = {word(row, run, 0), word(row, run, 1), word(row, run, 2), word(row, run, 3)};
        uint32_t pairs[4];
        slots<D>(words, scale[row], part, pairs);
        memcpy(&slot[row][run * kRunCodes + part * 8], pairs, sizeof pairs);
      }
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane / 4, t = lane % 4;
    uint32_t words[4 / D::kPairs][2], multipliers[2], a[2][4];
    for (int run = 0; run < kRuns; ++run) words[run][0] = word(row, run, t), words[run][1] = word(row + 8, run, t);
    const int block = D::kScaleStep == 2 ? t / 2 : 0;
    D::multipliers(scale[row][block], scale[row + 8][block], multipliers);
    fragments<D>(words, multipliers, a);
    for (int slice = 0; slice < 2; ++slice)
      for (int i = 0; i < 4; ++i)  // 8 rows below: odd registers; 8 columns further: the last two
        memcpy(&held[row + i % 2 * 8][slice * 16 + i / 2 * 8 + t * 2], &a[slice][i], 4);
  }
  for (int row = 0; row < 16; ++row)
    for (int s = 0; s < 32; ++s) {
      const int in_run = s % kRunCodes, q = in_run / 8, t = in_run % 8 / 2, e = in_run % 2;
      const int code_at = s / kRunCodes * kRunCodes + t * D::kWordCodes + q + e * D::kPairs;
      const uint32_t byte = bytes[row][code_at * E::kBits / 8], code = kFp8<E> ? byte : byte >> (code_at % 2 * 4) & 15u;
      const float wanted = definition<E>(code, scale[row][kFp8<E> ? 0 : code_at / 16]);
      if (held[row][s] == slot[row][s] && same(held[row][s], wanted)) continue;
      printf("row %d slot %d: registers %04x, memory %04x, wanted %a\n", row, s, held[row][s], slot[row][s], wanted);
      return true;
    }
  return false;
}

template <class E>
bool fails(const char* name) {
  const bool failed = values_fail<E>() || order_fails<E>();
  if (failed) printf("%s failed\n", name);
  return failed;
}

}  // namespace

int main() { return fails<E4M3>("E4M3") | fails<E5M2>("E5M2") | fails<E2M1>("E2M1"); }
