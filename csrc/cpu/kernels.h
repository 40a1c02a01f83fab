// Entry points of the CPU loops, one table for each instruction set they are compiled for.
#pragma once

#include "../numerics/format.h"

namespace mh::cpu {

struct KernelTable {
  void (*amax)(const AmaxArgs&, int threads);
  void (*quantize)(const QuantizeArgs&, int threads);
  void (*dequantize)(const DequantizeArgs&, int threads);
  void (*outer_scale)(const float* amax, float* out, int64_t n, int threads);
};

KernelTable kernels_baseline();
KernelTable kernels_avx2();
KernelTable kernels_avx512();

}  // namespace mh::cpu
