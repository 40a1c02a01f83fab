// Tensor maps: how copies find boxes of a matrix.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>

#include "../device.h"

namespace mh::gemm {

using Encode = decltype(&cuTensorMapEncodeTiled);

inline Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status),
          "cuTensorMapEncodeTiled");
    if (!function) throw std::runtime_error("megatron_hybrid._C_gemm: this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

// Of a packed matrix, in boxes of `line` bytes of a row (128, 64 or 32), in the swizzle of that many bytes.
inline CUtensorMap map_of(const void* data, int64_t rows, int64_t cols, CUtensorMapDataType type, int size, int box,
                          int line = 128) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[1] = {sizes[0] * size};
  const cuuint32_t boxes[2] = {static_cast<cuuint32_t>(line / size), static_cast<cuuint32_t>(box)}, every[2] = {1, 1};
  const CUtensorMapSwizzle swizzle = line == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : line == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                  : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUresult result = encoder()(&map, type, 2, const_cast<void*>(data), sizes, stride, boxes, every,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("megatron_hybrid._C_gemm: no tensor map of " + std::to_string(rows) + " x " +
                             std::to_string(cols) + " elements: error " + std::to_string(result));
  return map;
}

}  // namespace mh::gemm
