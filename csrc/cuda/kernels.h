// The tile kernels, and which kernels a call gets.
#pragma once

#include "../backend.h"

namespace mh::cuda {

// Tile kernels from now on, or the simple ones (simple.h).
void use_tiles(bool on);

namespace tiles {

void amax(const AmaxArgs& args, const Where& where);
void quantize(const PairArgs& args, const Where& where);
void dequantize(const DequantizeArgs& args, const Where& where);

}  // namespace tiles
}  // namespace mh::cuda
