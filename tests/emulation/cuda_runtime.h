// Stands in for CUDA's header where the tile kernels are compiled by a C++ compiler and run on the CPU: thread blocks one
// after the other, their 256 threads as coroutines that switch at barriers and shuffles (emulate.cpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __host__
#define __device__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define MH_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(emulation::dynamic_shared)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};

namespace emulation {

constexpr int kThreads = 256;

struct Index {
  unsigned x;
};
extern Index thread, block, grid;
extern void* dynamic_shared;

void wait_for_block();
uint32_t exchange(uint32_t value, int lanes_away);  // the value of the lane whose number differs by that xor

}  // namespace emulation

#define threadIdx emulation::thread
#define blockIdx emulation::block
#define gridDim emulation::grid

void emulate(unsigned grid, int shared_bytes, uintptr_t stream, const std::function<void()>& kernel);

inline void __syncthreads() { emulation::wait_for_block(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes_away) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  bits = emulation::exchange(bits, lanes_away);
  memcpy(&value, &bits, sizeof bits);
  return value;
}

inline void __syncwarp() { emulation::exchange(0, 0); }

inline int32_t __reduce_max_sync(unsigned lanes, int32_t value) {
  for (int away = 1; away < 32; away *= 2) value = std::max(value, __shfl_xor_sync(lanes, value, away));
  return value;
}

inline int32_t atomicMax(int32_t* at, int32_t value) {
  int32_t old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (value > old && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
inline int32_t atomicAdd(int32_t* at, int32_t value) { return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL); }
inline void __threadfence() {}

template <class T>
T __ldcg(const T* at) {
  return *at;
}

inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline float __fmul_rz(float a, float b) {
  const double product = static_cast<double>(a) * static_cast<double>(b);  // exact
  const float nearest = static_cast<float>(product);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(product) ? std::nextafterf(nearest, 0.0f) : nearest;
}

using std::max;
using std::min;
inline int64_t min(int64_t a, int b) { return a < b ? a : b; }

// The calls around launches: one device, nothing fails.
using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 0, cudaFuncAttributePreferredSharedMemoryCarveout = 0;
constexpr int cudaSharedmemCarveoutMaxShared = 100;
inline const char* cudaGetErrorString(cudaError_t) { return "none"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return cudaSuccess;
}
