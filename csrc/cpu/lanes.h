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
typedef int32_t IntLanes __attribute__((vector_size(kVectorBytes)));
typedef uint16_t DrawLanes __attribute__((vector_size(kVectorBytes / 2)));
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

MH_HD IntLanes max_lanes(IntLanes a, IntLanes b) { return a > b ? a : b; }

template <>
struct Words<FloatLanes> {
  using Int = IntLanes;
  static MH_HD Int bits(FloatLanes x) { return (Int)x; }
  static MH_HD FloatLanes value(Int bits) { return (FloatLanes)bits; }
  static MH_HD Int min(Int a, Int b) { return a < b ? a : b; }
  static MH_HD Int max(Int a, Int b) { return max_lanes(a, b); }
  static MH_HD Int truncated(FloatLanes x) { return __builtin_convertvector(x, Int); }
  static MH_HD Int if_less(Int a, Int b, Int then, Int otherwise) { return a < b ? then : otherwise; }
};

constexpr int kByteGroup = 4 * kLanes;  // numbers whose codes, a byte each, fill a vector

// Codes of kByteGroup numbers, 32 bits each, to as many bytes in their order.
MH_HD void store_bytes(uint8_t* out, const IntLanes (&v)[4]) {
#if defined(__AVX512F__)
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i low = _mm512_packus_epi32((__m512i)v[0], (__m512i)v[1]);
  const __m512i high = _mm512_packus_epi32((__m512i)v[2], (__m512i)v[3]);
  _mm512_storeu_si512(out, _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_packus_epi16(low, high)));
#elif defined(__AVX2__)
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i low = _mm256_packus_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i high = _mm256_packus_epi32((__m256i)v[2], (__m256i)v[3]);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
#elif defined(__SSE2__)
  const __m128i low = _mm_packs_epi32((__m128i)v[0], (__m128i)v[1]), high = _mm_packs_epi32((__m128i)v[2], (__m128i)v[3]);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(low, high));
#else
  for (int i = 0; i < kByteGroup; ++i) out[i] = static_cast<uint8_t>(v[i / kLanes][i % kLanes]);
#endif
}

MH_HD IntLanes abs_lanes(FloatLanes v) { return (IntLanes)v & kAbsMask; }

// Lane g of the result is the largest lane of v[g], for kLanes vectors. As a transpose, but each interleaved pair is
// merged at once, so that every stage has half as many vectors.
MH_HD IntLanes largest_lanes(IntLanes (&v)[kLanes]) {
  using Lane = std::make_index_sequence<kLanes>;
  MH_UNROLL
  for (int n = kLanes / 2; n > 0; n /= 2) {
    MH_UNROLL
    for (int i = 0; i < kLanes / 2; ++i)
      if (i < n) v[i] = max_lanes(interleave<0>(v[i], v[i + n], Lane{}), interleave<kLanes / 2>(v[i], v[i + n], Lane{}));
  }
  return v[0];
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

// kLanes groups along a row, a lane a group.
inline void load_groups(const float* groups, FloatLanes (&v)[kHadamardSize]) {
  MH_UNROLL
  for (int part = 0; part < kHadamardSize; part += kLanes) {
    FloatLanes square[kLanes];
    MH_UNROLL
    for (int g = 0; g < kLanes; ++g) square[g] = load_lanes<FloatLanes>(groups + g * kHadamardSize + part);
    transpose_lanes<kLanes>(square);
    MH_UNROLL
    for (int g = 0; g < kLanes; ++g) v[part + g] = square[g];
  }
}

// The transform of groups along a row: kLanes of them are transposed into lanes, transformed and transposed back.
inline void hadamard_groups(float* groups, bool inverse) {
  FloatLanes v[kHadamardSize];
  load_groups(groups, v);
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

// Magnitudes above `limit` count as 0, as in amaxes.
MH_HD IntLanes limited_lanes(FloatLanes v, int32_t limit) {
  const IntLanes bits = abs_lanes(v);
  return bits & (bits <= limit);
}

// Largest magnitudes after the transform of groups down 16 rows, column by column, added to `most`.
inline void hadamard_down_amax(const float* rows, int64_t ld, int n, int32_t limit, int32_t* most) {
  int j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    FloatLanes v[kHadamardSize];
    MH_UNROLL
    for (int e = 0; e < kHadamardSize; ++e) v[e] = load_lanes<FloatLanes>(rows + e * ld + j);
    hadamard16(v, false);
    IntLanes all = load_lanes<IntLanes>(most + j);
    MH_UNROLL
    for (int e = 0; e < kHadamardSize; ++e) all = max_lanes(all, limited_lanes(v[e], limit));
    store_lanes(most + j, all);
  }
  for (; j < n; ++j) {
    float v[kHadamardSize];
    for (int e = 0; e < kHadamardSize; ++e) v[e] = rows[e * ld + j];
    hadamard16(v, false);
    for (int e = 0; e < kHadamardSize; ++e) most[j] = max_bits(most[j], abs_bits(v[e]) <= limit ? abs_bits(v[e]) : 0);
  }
}

// Largest magnitude of a row after the transform of its groups; a last group under 16 is not transformed. The order of
// the lanes does not matter to it, so nothing is transposed back.
inline int32_t hadamard_along_amax(const float* row, int n, int32_t limit) {
  const int groups = n / kHadamardSize;
  IntLanes lanes = {};
  int g = 0;
  for (; g + kLanes <= groups; g += kLanes) {
    FloatLanes v[kHadamardSize];
    load_groups(row + g * kHadamardSize, v);
    hadamard16(v, false);
    MH_UNROLL
    for (int e = 0; e < kHadamardSize; ++e) lanes = max_lanes(lanes, limited_lanes(v[e], limit));
  }
  int32_t all = 0;
  for (int e = 0; e < kLanes; ++e) all = max_bits(all, lanes[e]);
  for (int at = g * kHadamardSize; at < n; at += kHadamardSize) {
    const int size = n - at < kHadamardSize ? n - at : kHadamardSize;
    float v[kHadamardSize] = {};
    memcpy(v, row + at, static_cast<size_t>(size) * sizeof(float));
    if (size == kHadamardSize) hadamard16(v, false);
    for (int e = 0; e < size; ++e) all = max_bits(all, abs_bits(v[e]) <= limit ? abs_bits(v[e]) : 0);
  }
  return all;
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
  static MH_HD WordLanes high(WordLanes p) {
    return (WordLanes)odd_twice((IntLanes)p, std::make_index_sequence<kLanes>{});
  }
  static MH_HD WordLanes low(WordLanes p) { return p; }

 private:
  // not a shift, which would wait for the unit that multiplies
  template <size_t... i>
  static MH_HD IntLanes odd_twice(IntLanes v, std::index_sequence<i...>) {
    return __builtin_shufflevector(v, v, (static_cast<int>(i) | 1)...);
  }
};

// Several vectors of words: rounds of independent calls fill the time that each waits for its products.
constexpr int kChains = 4;

struct WordChains {
  WordLanes v[kChains];
};

MH_HD WordChains operator^(WordChains a, const WordChains& b) {
  MH_UNROLL
  for (int i = 0; i < kChains; ++i) a.v[i] ^= b.v[i];
  return a;
}

MH_HD WordChains operator^(WordChains a, uint32_t b) {
  MH_UNROLL
  for (int i = 0; i < kChains; ++i) a.v[i] ^= b;
  return a;
}

MH_HD WordChains operator+(WordChains a, uint32_t b) {
  MH_UNROLL
  for (int i = 0; i < kChains; ++i) a.v[i] += b;
  return a;
}

template <>
struct WordOps<WordChains> {
  static MH_HD WordChains product(WordChains a, uint32_t b) {
    MH_UNROLL
    for (int i = 0; i < kChains; ++i) a.v[i] = WordOps<WordLanes>::product(a.v[i], b);
    return a;
  }
  static MH_HD WordChains high(WordChains p) {
    MH_UNROLL
    for (int i = 0; i < kChains; ++i) p.v[i] = WordOps<WordLanes>::high(p.v[i]);
    return p;
  }
  static MH_HD WordChains low(WordChains p) { return p; }
};

constexpr int kCallLanes = kVectorBytes / static_cast<int>(sizeof(uint64_t));  // Philox calls in a vector
constexpr int kCallsAtATime = kCallLanes * kChains;

// 8 * kCallsAtATime draws from group `group` on, in the order of the elements.
inline void draw_lanes(const RandomKey& key, uint64_t group, uint16_t* draws) {
  using Lane = std::make_index_sequence<kCallLanes>;
  WordChains low_words, high_words;
  MH_UNROLL
  for (int i = 0; i < kChains; ++i) {
    for (int c = 0; c < kCallLanes; ++c) low_words.v[i][c] = group + static_cast<uint64_t>(i * kCallLanes + c);
    high_words.v[i] = low_words.v[i] >> 32;
  }
  const Philox<WordChains> w = random_words<WordChains>(key, low_words, high_words);
  MH_UNROLL
  for (int i = 0; i < kChains; ++i, draws += 8 * kCallLanes) {
    const WordLanes low = (w.c0.v[i] & 0xffffffffu) | w.c1.v[i] << 32;
    const WordLanes high = (w.c2.v[i] & 0xffffffffu) | w.c3.v[i] << 32;
    store_lanes(draws, interleave<0>(low, high, Lane{}));
    store_lanes(draws + 4 * kCallLanes, interleave<kCallLanes / 2>(low, high, Lane{}));
  }
}

MH_NUMERICS_END
