// Launch plumbing: the device of a call, grid sizes, errors that name the function.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../backend.h"
#include "../numerics/elements.h"

#if defined(__CUDACC__)
#define MH_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

namespace mh::cuda {

constexpr int kThreads = 256;
constexpr int64_t kMaxGrid = 0x7fffffff;  // kernels stride over the rest

inline void check(cudaError_t error, const char* function) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("megatron_hybrid._C_cuda.") + function + ": " + cudaGetErrorString(error));
}

// The tensors' device for the length of a call: the caller's current one may be another.
class OnDevice {
 public:
  OnDevice(const Where& where, const char* function) {
    check(cudaGetDevice(&previous_), function);
    if (previous_ == where.threads_or_device)
      previous_ = -1;
    else
      check(cudaSetDevice(where.threads_or_device), function);
  }
  ~OnDevice() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int previous_ = -1;
};

inline cudaStream_t stream_of(const Where& where) { return reinterpret_cast<cudaStream_t>(where.stream); }

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
