// What is asked of Python: tensors and payloads to and from its objects, and what megatron_hybrid/node.py owns.
#pragma once

#include <pybind11/pybind11.h>

#include "casts.h"
#include "ranks.h"

namespace py = pybind11;

namespace mh::node {

// A reference that may be dropped without the GIL.
using Held = c10::SafePyObject;

Held hold(py::handle object);
py::handle held(const Held& object);

py::object wrap(const Tensor& t);  // None: undefined
Tensor unwrap(py::handle object);

py::object dtype_object(ScalarType dtype);

// ---- with the GIL

py::object ask(const Plan& plan, const char* name);  // a function of megatron_hybrid/node.py
py::tuple described(const Payload& p);               // (M, K, dtype of what was cast, codes, scales, amaxes)
Pair cached_weight(const Plan& plan, py::handle call, py::handle weight, bool columnwise);
Keys keys_of(const Plan& plan, py::handle call);
void count(py::handle call, const Plan& plan, Gemm gemm);
void count_gather(py::handle call, const Plan& plan, int direction);
std::shared_ptr<const Ranks> ranks_of(py::handle call);  // null: they are not such that the node can speak to them

// ---- without it

Payload column_of(const Plan& plan, const Held& call, const Payload& row);  // of a gathered gradient, of the same codes
// From a row that was kept. whole: of a gathered operand, all of it.
Payload derived_column(const Plan& plan, const Held& call, Operand operand, const Payload& row, bool whole);
bool has_memory(const Plan& plan, const Tensor& dy);  // a gradient of a subclass
// `LinearCall.cast` of an operand (M, K) that the node does not cast. known: its amaxes, see `cast`.
Pair cast_by_python(const Plan& plan, const Held& call, Operand operand, const Tensor& x, bool rowwise, bool columnwise,
                    const Amaxes& known);
Pair payloads_of(const Plan& plan, const Held& call, const Tensor& dy, bool rowwise, bool columnwise);
Tensor product(const Plan& plan, const Held& call, Gemm gemm, const Payload& a, const Payload& b, ScalarType dtype,
               const Tensor& total);
Tensor main_grad(const Plan& plan, const Tensor& weight);
Tensor placeholder_gradient(const Plan& plan, const Tensor& weight);
void* workspace(const Plan& plan, const Where& at);         // a stream's working memory for cuBLASLt
const float* constants(const Plan& plan, const Where& at);  // 0 and 1 in a device's memory; null where they cannot be made now

}  // namespace mh::node
