// What CUDA's host code shares: errors as exceptions, the device of a call.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "entry.h"

namespace mh {

// `what`: the function that was called.
inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("megatron_hybrid: CUDA error in ") + what + ": " + cudaGetErrorString(error));
}

inline cudaStream_t stream_of(const Where& where) { return reinterpret_cast<cudaStream_t>(where.stream); }

// The tensors' device for the length of a call: the caller's current one may be another.
class OnDevice {
 public:
  OnDevice(const Where& where, const char* what) {
    check(cudaGetDevice(&previous_), what);
    if (previous_ == where.threads_or_device)
      previous_ = -1;
    else
      check(cudaSetDevice(where.threads_or_device), what);
  }
  ~OnDevice() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace mh
