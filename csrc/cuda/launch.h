// Launch plumbing: grid sizes, launches, storage types.
#pragma once

#include <cstdint>

#include "../backend.h"
#include "../device.h"
#include "../numerics/elements.h"

#if defined(__CUDACC__)
#define MH_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

namespace mh::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int64_t kMaxGrid = 0x7fffffff;  // kernels stride over the rest

inline unsigned grid_for(int64_t work) {
  return static_cast<unsigned>(work < 1 ? 1 : (work > kMaxGrid ? kMaxGrid : work));
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), unsigned grid, int shared_bytes, const Where& where, const char* function,
            const Args&... args) {
#if defined(__CUDACC__)
  kernel<<<grid, kThreads, static_cast<size_t>(shared_bytes), stream_of(where)>>>(args...);
#else
  emulate(grid, shared_bytes, where.stream, [&] { kernel(args...); });  // tests/emulation/cuda_runtime.h
#endif
  check(cudaGetLastError(), function);
}

// Host code by storage type: calls f with a value of it.
template <class F>
void by_dtype(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::f32: return f(Float32{});
    case Dtype::bf16: return f(BFloat16{});
    case Dtype::f16: return f(Float16{});
  }
}

}  // namespace mh::cuda
