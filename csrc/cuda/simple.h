// The first kernels, one direction a call: slow (about a tenth of the copy bandwidth), and run on an H100 with every test
// passing. They are what runs unless MH_CUDA_CASTS=tiles, until the tile kernels have been seen to do so too.
#pragma once

#include "launch.h"

namespace mh::cuda::simple {

void amax(const AmaxArgs& args, const Where& where);
void quantize(const QuantizeArgs& args, const Where& where);
void dequantize(const DequantizeArgs& args, const Where& where);

}  // namespace mh::cuda::simple
