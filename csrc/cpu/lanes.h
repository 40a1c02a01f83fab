// The few things loops alone do not get compilers to vectorise: transposes, and the Hadamard transform across lanes.
// Vectors are the compilers' own (`vector_size`), as wide as the instruction set of the build.
#pragma once

#include <cstddef>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../numerics/hadamard.h"
#include "../numerics/random.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of codes and of random draws are read as one word");

MH_NUMERICS_BEGIN

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(float));
typedef float FloatLanes __attribute__((vector_size(kVectorBytes)));
typedef uint64_t WordLanes __attribute__((vector_size(kVectorBytes)));
typedef uint8_t ByteLanes __attribute__((vector_size(16)));

// Lane i of the result is lane first + i/2 of a (even i) or of b (odd i).
template <int first, class V, size_t... i>
MH_HD V interleave(V a, V b, std::index_sequence<i...>) {
  constexpr int n = sizeof...(i);
  return __builtin_shufflevector(a, b, (first + static_cast<int>(i) / 2 + static_cast<int>(i) % 2 * n)...);
}

// n x n transpose of n vectors of n lanes. Interleaving row i with row i + n/2 moves one bit of the row number into the
// lane number; log2(n) times, all of them.
template <int n, class V>
MH_HD void transpose_lanes(V (&v)[n]) {
  using Lane = std::make_index_sequence<n>;
  MH_UNROLL
  for (int stage = 1; stage < n; stage *= 2) {
    V t[n];
    MH_UNROLL
    for (int i = 0; i < n / 2; ++i) {
      t[2 * i] = interleave<0>(v[i], v[i + n / 2], Lane{});
      t[2 * i + 1] = interleave<n / 2>(v[i], v[i + n / 2], Lane{});
    }
    MH_UNROLL
    for (int i = 0; i < n; ++i) v[i] = t[i];
  }
}

template <class V>
MH_HD V load_lanes(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
MH_HD void store_lanes(void* to, V v) {
  memcpy(to, &v, sizeof v);
}

// out[j * out_ld + i] = in[i * in_ld + j] for 16 x 16 bytes
inline void transpose_16x16(const uint8_t* in, int64_t in_ld, uint8_t* out, int64_t out_ld) {
  ByteLanes v[16];
  MH_UNROLL
  for (int i = 0; i < 16; ++i) v[i] = load_lanes<ByteLanes>(in + i * in_ld);
  transpose_lanes<16>(v);
  MH_UNROLL
  for (int j = 0; j < 16; ++j) store_lanes(out + j * out_ld, v[j]);
}

// out[j * out_ld + i] = in[i * in_ld + j]
inline void transpose_bytes(const uint8_t* in, int64_t in_ld, uint8_t* out, int64_t out_ld, int rows, int cols) {
  const int whole_rows = rows & ~15, whole_cols = cols & ~15;
  for (int j = 0; j < whole_cols; j += 16)
    for (int i = 0; i < whole_rows; i += 16) transpose_16x16(in + i * in_ld + j, in_ld, out + j * out_ld + i, out_ld);
  for (int j = 0; j < cols; ++j)
    for (int i = j < whole_cols ? whole_rows : 0; i < rows; ++i) out[j * out_ld + i] = in[i * in_ld + j];
}

// Hadamard groups down n columns of 16 rows: a lane a column.
inline void hadamard_down(float* rows, int64_t ld, int n, bool inverse) {
  int j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    FloatLanes v[kHadamardSize];
    MH_UNROLL
    for (int e = 0; e < kHadamardSize; ++e) v[e] = load_lanes<FloatLanes>(rows + e * ld + j);
    hadamard16(v, inverse);
    MH_UNROLL
    for (int e = 0; e < kHadamardSize; ++e) store_lanes(rows + e * ld + j, v[e]);
  }
  for (; j < n; ++j) {
    float v[kHadamardSize];
    for (int e = 0; e < kHadamardSize; ++e) v[e] = rows[e * ld + j];
    hadamard16(v, inverse);
    for (int e = 0; e < kHadamardSize; ++e) rows[e * ld + j] = v[e];
  }
}

// The same for groups along a row: kLanes of them are transposed into lanes, transformed and transposed back.
inline void hadamard_groups(float* groups, bool inverse) {
  FloatLanes v[kHadamardSize];
  MH_UNROLL
  for (int part = 0; part < kHadamardSize; part += kLanes) {
    FloatLanes square[kLanes];
    MH_UNROLL
    for (int g = 0; g < kLanes; ++g) square[g] = load_lanes<FloatLanes>(groups + g * kHadamardSize + part);
    transpose_lanes<kLanes>(square);
    MH_UNROLL
    for (int g = 0; g < kLanes; ++g) v[part + g] = square[g];
  }
  hadamard16(v, inverse);
  MH_UNROLL
  for (int part = 0; part < kHadamardSize; part += kLanes) {
    FloatLanes square[kLanes];
    MH_UNROLL
    for (int g = 0; g < kLanes; ++g) square[g] = v[part + g];
    transpose_lanes<kLanes>(square);
    MH_UNROLL
    for (int g = 0; g < kLanes; ++g) store_lanes(groups + g * kHadamardSize + part, square[g]);
  }
}

inline void hadamard_along(float* row, int n, bool inverse) {
  const int groups = n / kHadamardSize;
  int g = 0;
  for (; g + kLanes <= groups; g += kLanes) hadamard_groups(row + g * kHadamardSize, inverse);
  for (; g < groups; ++g) {
    float v[kHadamardSize];
    memcpy(v, row + g * kHadamardSize, sizeof v);
    hadamard16(v, inverse);
    memcpy(row + g * kHadamardSize, v, sizeof v);
  }
}

// A word in the low half of each 64-bit lane; the high half holds anything.
template <>
struct WordOps<WordLanes> {
  static MH_HD WordLanes product(WordLanes a, uint32_t b) {
    const WordLanes k = WordLanes{} + b;
#if defined(__AVX512F__)
    return (WordLanes)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)k);
#elif defined(__AVX2__)
    return (WordLanes)_mm256_mul_epu32((__m256i)a, (__m256i)k);
#elif defined(__SSE2__)
    return (WordLanes)_mm_mul_epu32((__m128i)a, (__m128i)k);
#else
    return (a & 0xffffffffu) * k;
#endif
  }
  static MH_HD WordLanes high(WordLanes p) { return p >> 32; }
  static MH_HD WordLanes low(WordLanes p) { return p; }
};

constexpr int kCallLanes = kVectorBytes / static_cast<int>(sizeof(uint64_t));  // Philox calls at a time

// 8 * kCallLanes draws from group `group` on, in the order of the elements.
inline void draw_lanes(const RandomKey& key, uint64_t group, uint16_t* draws) {
  using Lane = std::make_index_sequence<kCallLanes>;
  WordLanes groups;
  for (int c = 0; c < kCallLanes; ++c) groups[c] = group + static_cast<uint64_t>(c);
  const Philox<WordLanes> w = random_words<WordLanes>(key, groups, groups >> 32);
  const WordLanes low = (w.c0 & 0xffffffffu) | w.c1 << 32, high = (w.c2 & 0xffffffffu) | w.c3 << 32;
  store_lanes(draws, interleave<0>(low, high, Lane{}));
  store_lanes(draws + 4 * kCallLanes, interleave<kCallLanes / 2>(low, high, Lane{}));
}

MH_NUMERICS_END
