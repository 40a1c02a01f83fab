// Single instructions that compilers do not choose by themselves, each beside plain code of the same meaning. The plain
// code runs where the kernels are emulated on a CPU (tests/emulation).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../numerics/elements.h"

namespace mh::cuda {

// Two FP8 codes, `lo` in the low byte. The conversion rounds to nearest even, saturates, and makes any NaN 0x7f.
template <class E>
__device__ __forceinline__ uint32_t encode_pair(float lo, float hi) {
#if defined(__CUDACC__)
  uint16_t codes;
  if constexpr (std::is_same_v<E, E4M3>)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
  return codes;
#else
  return encode<E>(lo) | encode<E>(hi) << 8;
#endif
}

// T::load, exact; which NaN a NaN becomes is nobody's concern here.
template <class T>
__device__ __forceinline__ float load_raw(typename T::Raw raw) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, Float16>) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(raw));
    return x;
  }
#endif
  return T::load(raw);
}

// Two numbers of a 16-bit type from FP32, nearest even; `lo` in the low half. Which NaN a NaN becomes differs from
// T::store.
template <class T>
__device__ __forceinline__ uint32_t store_pair(float lo, float hi) {
#if defined(__CUDACC__)
  uint32_t pair;
  if constexpr (std::is_same_v<T, Float16>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
#else
  return T::store(lo) | static_cast<uint32_t>(T::store(hi)) << 16;
#endif
}

// Two numbers as a pair of FP16, cut off toward 0; `low` in the low half.
__device__ __forceinline__ uint32_t cut_pair(float low, float high) {
#if defined(__CUDACC__)
  uint32_t pair;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  const auto cut = [](float x) {
    const uint32_t near = Float16::store(x);
    return near - (fabsf(Float16::load(static_cast<uint16_t>(near))) > fabsf(x));
  };
  return cut(low) | cut(high) << 16;
#endif
}

// Of two pairs of 16-bit numbers, the larger magnitudes, NaN where one of them is NaN. Signs are left to chance.
template <class T>
__device__ __forceinline__ uint32_t max_magnitudes(uint32_t a, uint32_t b) {
#if defined(__CUDACC__)
  uint32_t most;
  if constexpr (std::is_same_v<T, Float16>)
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  else
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
#else
  const uint32_t low = max(a & 0x7fffu, b & 0x7fffu), high = max(a >> 16 & 0x7fffu, b >> 16 & 0x7fffu);
  return low | high << 16;
#endif
}

// The larger magnitude, its sign left to chance; a NaN counts as nothing beside a number.
__device__ __forceinline__ float max_magnitude(float a, float b) {
#if defined(__CUDACC__)
  float most;
  asm("max.xorsign.abs.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
#else
  return a != a ? b : (b != b || fabsf(a) > fabsf(b) ? a : b);
#endif
}

// The same, but NaN where one of them is.
__device__ __forceinline__ float max_magnitude_nan(float a, float b) {
#if defined(__CUDACC__)
  float most;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
#else
  return abs_bits(a) > abs_bits(b) ? a : b;
#endif
}

// Two FP8 codes (`lo` in the low byte) to FP32, exact.
template <class E>
__device__ __forceinline__ void decode_pair(uint32_t codes, float& lo, float& hi) {
#if defined(__CUDACC__)
  uint32_t halves;
  if constexpr (std::is_same_v<E, E4M3>)
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  else
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(lo) : "h"(static_cast<uint16_t>(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(hi) : "h"(static_cast<uint16_t>(halves >> 16)));
#else
  lo = decode<E>(codes & 0xffu), hi = decode<E>(codes >> 8 & 0xffu);
#endif
}

// Products of two pairs of FP16 numbers.
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
#if defined(__CUDACC__)
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
#else
  const uint32_t low = Float16::store(Float16::load(static_cast<uint16_t>(a)) * Float16::load(static_cast<uint16_t>(b)));
  const uint32_t high = Float16::store(Float16::load(static_cast<uint16_t>(a >> 16)) * Float16::load(static_cast<uint16_t>(b >> 16)));
  return low | high << 16;
#endif
}

// Bits of `one` where the mask is set and of `other` where it is not, by one instruction.
template <uint32_t mask>
__device__ __forceinline__ uint32_t select_bits(uint32_t one, uint32_t other) {
#if defined(__CUDACC__)
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(bits) : "r"(one), "r"(other), "n"(mask));
  return bits;
#else
  return (one & mask) | (other & ~mask);
#endif
}

// 1 / x of a number from 1 up to 2, about as near as FP32 has it.
__device__ __forceinline__ float approximate_inverse(float x) {
#if defined(__CUDACC__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#else
  return 1.0f / x;
#endif
}

// c plus the products of a's 16-bit halves with the two lower bytes of b.
__device__ __forceinline__ uint32_t dot_halves(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDACC__)
  return __dp2a_lo(a, b, c);
#else
  return (a & 0xffffu) * (b & 0xffu) + (a >> 16) * (b >> 8 & 0xffu) + c;
#endif
}

// Products of two pairs of BF16 numbers, subnormals kept.
__device__ __forceinline__ uint32_t multiply_bf16s(uint32_t a, uint32_t b) {
#if defined(__CUDACC__)
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
#else
  const uint32_t low = BFloat16::store(BFloat16::load(static_cast<uint16_t>(a)) * BFloat16::load(static_cast<uint16_t>(b)));
  const uint32_t high = BFloat16::store(BFloat16::load(static_cast<uint16_t>(a >> 16)) * BFloat16::load(static_cast<uint16_t>(b >> 16)));
  return low | high << 16;
#endif
}

// Byte permutation: selector s, four bits a byte of the result, takes byte s % 8 of a (0 to 3) and b (4 to 7), or from 8
// up eight copies of its sign.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selectors) {
  uint32_t bytes = 0;
#if defined(__CUDACC__)
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selectors));
#else
  for (int i = 0; i < 4; ++i) {
    const uint32_t s = selectors >> (4 * i) & 15u, byte = (s % 8 < 4 ? a : b) >> (s % 4 * 8) & 0xffu;
    bytes |= (s < 8 ? byte : (byte & 0x80u ? 0xffu : 0u)) << (8 * i);
  }
#endif
  return bytes;
}

// The same number, kept in a register: the compiler does not compute it anew where it is used.
__device__ __forceinline__ int held(int x) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

__device__ __forceinline__ int64_t held(int64_t x) {
#if defined(__CUDACC__)
  asm volatile("" : "+l"(x));
#endif
  return x;
}

// The same for where something in shared memory is.
template <class X>
__device__ __forceinline__ X* held_shared(X* x) {
#if defined(__CUDACC__)
  uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(x));
  asm volatile("" : "+r"(at));
  return static_cast<X*>(__cvta_shared_to_generic(at));
#else
  return x;
#endif
}

// Starts copying 16 or 8 bytes into shared memory, of which only the first `valid` are read and the others become 0.
template <int bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid) {
#if defined(__CUDACC__)
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(global), "r"(valid) : "memory");
#else
  alignas(bytes) uint8_t copied[bytes] = {};
  memcpy(copied, __builtin_assume_aligned(global, bytes), static_cast<size_t>(valid));
  memcpy(__builtin_assume_aligned(shared, bytes), copied, bytes);
#endif
}

__device__ __forceinline__ void wait_copies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Reads a counter that other thread blocks raise, and with it what they wrote before.
__device__ __forceinline__ int32_t load_acquire(const int32_t* counter) {
#if defined(__CUDACC__)
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
#else
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
#endif
}

// Reads what other thread blocks raise, perhaps before they have.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* raised) {
#if defined(__CUDACC__)
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(raised) : "memory");
  return value;
#else
  return __atomic_load_n(raised, __ATOMIC_RELAXED);
#endif
}

// e^-x and a quotient by the instructions that Triton's compiler picks, so that both give the same bits.
__device__ __forceinline__ float exp_minus(float x) {
  constexpr float kLog2E = 1.44269504088896340736f;
#if defined(__CUDACC__)
  float power;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(-x * kLog2E));
  return power;
#else
  return static_cast<float>(exp2(static_cast<double>(-x * kLog2E)));
#endif
}

__device__ __forceinline__ float divide(float a, float b) {
#if defined(__CUDACC__)
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
#else
  return a / b;
#endif
}

// 4 / (1 + e^-x) as `divide` finds quotients, in fewer instructions: it scales what is beyond 2^126, and the mantissa
// of a reciprocal does not depend on the exponent. An e^-x below FP32's normal numbers adds nothing to 1.
__device__ __forceinline__ float four_sigmoids(float x) {
#if defined(__CUDACC__)
  constexpr float kLog2E = 1.44269504088896340736f;
  float power, quotient;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x * kLog2E));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(fmaf(power, 0.25f, 0.25f)));
  return quotient;
#else
  return divide(1.0f, 0.25f + 0.25f * exp_minus(x));
#endif
}

__device__ __forceinline__ float sigmoid(float x) { return four_sigmoids(x) * 0.25f; }

__device__ __forceinline__ float silu(float x) { return divide(x, 1.0f + exp_minus(x)); }  // one rounding fewer

// silu of a 16-bit number: a quarter of it is exact.
__device__ __forceinline__ float silu_of_narrow(float x) {
#if defined(__CUDACC__)
  return four_sigmoids(x) * (x * 0.25f);
#else
  return silu(x);
#endif
}

}  // namespace mh::cuda
