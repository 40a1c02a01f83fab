// The casts of lean.py: memory for payloads, and one call of the other extension's kernels.
#pragma once

#include "plan.h"

namespace mh::node {

// What delayed scaling reads and writes of one direction.
struct State {
  Tensor scale, history;
};

// What the casts of a call read besides tensors, by operand: `LinearCall.keys` of linear.py.
struct Keys {
  std::array<std::array<State, 2>, 3> states;
  std::array<Tensor, 3> words;      // of stochastic rounding, where an operand draws: `Rng.plain_words`
  std::array<bool, 3> by_python{};  // Python casts it: it draws with a key that has none, or its derived
                                    // column has an amax that ranks reduce
};

// x (..., K) as (M, K).
Tensor as_matrix(const Tensor& x);

// x; of a view that stands for the negative of what lies in memory a copy that is.
Tensor in_memory(const Tensor& x);

inline int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Unwritten memory on x's device.
Tensor bytes_beside(const Tensor& x, int64_t size);

// The device's current stream, or torch's threads.
Where where(const at::Device& device);

// FP32 memory for the sums over M that a cast of x (M, K) can take on its way.
Tensor sum_parts(const Tensor& x);

// FP32 amaxes by direction; undefined: the cast finds it.
using Amaxes = std::array<Tensor, 2>;

// `OperandCast` of lean.py, x (M, K). sums: undefined, or `sum_parts`. known: contiguous.
Pair cast(const Plan& plan, Operand operand, const Tensor& x, bool rowwise, bool columnwise, const Keys& keys,
          const Tensor& sums = {}, const Amaxes& known = {});

// The columnwise payload that is cast from a rowwise one's decode: `storage.derive_columnwise`.
Payload derive(const Plan& plan, Operand operand, const Payload& row, const Keys& keys);

}  // namespace mh::node
