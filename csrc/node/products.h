// The products of gemm/: A (rows_a, k) . B (rows_b, k)^T, both contraction-last.
#pragma once

#include "plan.h"

namespace mh::node {

// The product in `dtype`, or added to `total`, which is returned. Any route but `python`.
Tensor multiply(const Plan& plan, Gemm gemm, const Payload& a, const Payload& b, ScalarType dtype, const Tensor& total);

}  // namespace mh::node
