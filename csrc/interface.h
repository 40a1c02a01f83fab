// The number of what extensions offer one another (entry.h, gemm/grouped.h) and of what megatron_hybrid/node.py and
// grouped_node.py tell `_C_node`: raised with either, so that parts of different builds are noticed instead of called.
#pragma once

namespace mh {

constexpr int kInterface = 9;

}  // namespace mh
