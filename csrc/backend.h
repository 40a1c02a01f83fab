// What a backend gives the bindings: the casts, over pointers of its own memory. None allocates or synchronises.
#pragma once

#include "entry.h"

// `cpu` or `cuda`, set by the build.
#ifndef MH_BACKEND
#error "compile with -DMH_BACKEND=cpu or -DMH_BACKEND=cuda"
#endif

namespace mh::MH_BACKEND {

void amax(const AmaxArgs& args, const Where& where);
void quantize(const PairArgs& args, const Where& where);
void dequantize(const DequantizeArgs& args, const Where& where);
void decode_operands(const OperandsArgs& args, const Where& where);
void group_amax(const GroupAmaxArgs& args, const Where& where);  // CUDA only
void group_map(const GroupMapArgs& args, const Where& where);    // CUDA only
void outer_scale(const float* amax, float* out, int64_t n, const Where& where);

}  // namespace mh::MH_BACKEND
