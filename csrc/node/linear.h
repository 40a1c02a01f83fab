// The linear of megatron_hybrid/lean.py as a node of autograd's own, with no Python on the way back.
//
//   fprop   y  = x  @ w.T     input.rowwise           weight.rowwise
//   dgrad   dx = dy @ w       grad_output.rowwise     weight.columnwise
//   wgrad   dw = dy.T @ x     grad_output.columnwise  input.columnwise
//
// Of tensor-parallel ranks it is linear.py's: amaxes are reduced, operands gathered as payloads, and results summed where the
// plan and the call's `Ranks` say. Casts and GEMMs are those of the other extensions, whose functions come in capsules
// (entry.h); what each operand is cast to and which GEMM multiplies it is told once, as a `Plan`. megatron_hybrid/node.py makes
// it and holds what is left to Python.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>

#include "python.h"

namespace mh::node {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

struct LinearNode : torch::autograd::Node {
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<const Ranks> ranks;  // null: this one alone
  Held call;
  Keys keys;
  std::array<bool, 3> needs;
  Tensor weight;
  c10::DimVector shape;
  ScalarType dtype;
  SavedVariable x_kept, w_kept;  // the originals, where backward casts them
  Payload x_payload, w_payload;  // else the direction that the plan keeps
  bool released = false;

  LinearNode(std::shared_ptr<const Plan> plan, py::handle call) : plan(std::move(plan)), call(hold(call)) {}

  std::string name() const override { return "LeanLinearBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> locked(mutex_);
    x_kept.reset_data(), w_kept.reset_data();
    x_payload = {}, w_payload = {}, keys = {};
    released = true;
  }

  // A product by the node or by Python.
  Tensor run(Gemm gemm, const Payload& a, const Payload& b, ScalarType dtype, const Tensor& total = {}) const;
  Pair cast(Operand operand, const Tensor& x, bool rowwise, bool columnwise, const Tensor& sums = {},
            const Amaxes& known = {}) const;
  Payload derive(Operand operand, const Payload& row, bool whole) const;
  Payload cast_input(const Tensor& x, bool column, Gathered& whole);
  Pair cast_grad_output(const Tensor& dy, const Tensor& dy2d, Tensor& sums, Looked& looked) const;
  Pair gather_grad_output(const Pair& own, Gathered& column) const;
  Payload input_column() const;
  Payload weight_column() const;
  Payload gathered_input_column(Gathered& coming) const;
  bool look_at_weight() const;
  variable_list backward(const Tensor& dy);
  variable_list backward_by_python(const Tensor& dy);
  variable_list apply(variable_list&& grads) override;
};

// Whether tensors that are made now have memory, and nobody makes a graph of what runs; kernels.py's `traced`.
bool makes_memory();

// Whether a node can take a call that Python's function can: on the current device, and with nothing that looks in from
// outside.
bool runs(const Tensor& x, const Tensor& w, PyObject* b_object);

// The gradients that `backward` makes of dy, which cannot be differentiated.
template <class Backward>
variable_list once(const Tensor& dy, Backward&& backward);

// These, behind a function that refuses to be differentiated.
variable_list refused(variable_list made);

// y = x @ w.T + b, or None: Python's linear is the one for this call. x (..., K), w (N, K).
py::object linear(const std::shared_ptr<Plan>& plan, py::handle x, py::handle w, py::handle b, py::handle call);

template <class Backward>
variable_list once(const Tensor& dy, Backward&& backward) {
  if (!at::GradMode::is_enabled()) return backward(dy);
  variable_list made;
  {
    const at::NoGradGuard no_grad;
    made = backward(dy);
  }
  return dy.requires_grad() ? refused(std::move(made)) : made;
}

}  // namespace mh::node
