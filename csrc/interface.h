// The number of what extensions offer one another (entry.h, gemm/grouped.h), of what megatron_hybrid/node.py and
// grouped_node.py tell `_C_node`, and of what megatron_hybrid/gemm calls of `_C_gemm`: raised with any, so that parts of
// different builds are noticed instead of called.
#pragma once

namespace mh {

constexpr int kInterface = 11;

}  // namespace mh
