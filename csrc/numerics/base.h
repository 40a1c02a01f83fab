// What the numerics are written in: C++17 that g++, clang and nvcc accept, no headers beyond the language's own.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MH_HD __host__ __device__ __forceinline__
#define MH_UNROLL _Pragma("unroll")
#else
#define MH_HD inline __attribute__((always_inline))
#define MH_UNROLL _Pragma("GCC unroll 16")
#endif

// The CPU loops are compiled once per instruction set. Each build names its own inline namespace, so that the linker
// never merges an AVX-512 copy of a function into code that must run without it.
#ifndef MH_ISA
#define MH_ISA plain
#endif
#define MH_NUMERICS_BEGIN \
  namespace mh {          \
  inline namespace MH_ISA {
#define MH_NUMERICS_END \
  }                     \
  }

MH_NUMERICS_BEGIN

constexpr int32_t kAbsMask = 0x7fffffff;
constexpr int32_t kInfBits = 0x7f800000;
constexpr int32_t kNanBits = 0x7fc00000;
constexpr float kFloatMax = 3.402823466e+38f;  // 0x7f7fffff, (2 - 2^-23) * 2^127

MH_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

MH_HD float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// |x| as an integer. Non-negative floats order like their bits, with NaN above Inf: integer maxima propagate NaN,
// which floating-point max instructions do not promise.
MH_HD int32_t abs_bits(float x) { return static_cast<int32_t>(float_bits(x)) & kAbsMask; }

MH_HD int32_t max_bits(int32_t a, int32_t b) { return a > b ? a : b; }

// An amax from collected bits, with one NaN for all of them.
MH_HD float amax_from_bits(int32_t bits) { return bits_float(static_cast<uint32_t>(bits > kInfBits ? kNanBits : bits)); }

MH_NUMERICS_END
