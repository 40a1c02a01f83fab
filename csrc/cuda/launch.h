// Launch plumbing: the device of a call, grid sizes, errors that name the function.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../backend.h"

namespace mh::cuda {

constexpr int kThreads = 256;
constexpr int64_t kMaxGrid = 1 << 20;  // kernels stride over the rest

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

}  // namespace mh::cuda
