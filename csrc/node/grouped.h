// The grouped linear of megatron_hybrid/grouped_at_once.py in FP8 as a node of autograd's own, with no Python on the
// way back.
//
//   fprop   y[e]  = x[e]  @ w[e].T     dgrad   dx[e] = dy[e] @ w[e]     wgrad   dw[e] = dy[e].T @ x[e]
//
// x may be tokens whose copies the rows are, y sums of rows; x and dy may be payloads that another kernel made. Casts
// and products of all groups are those of the other extensions (grouped_casts.h). Weights are cast by Python, which
// keeps them.
#pragma once

#include <optional>

#include "grouped_casts.h"
#include "linear.h"

namespace mh::node {

struct GroupedNode : torch::autograd::Node {
  std::shared_ptr<const GroupedPlan> plan;
  Held call;
  std::vector<Tensor> weights;   // one (E, N, K), or one (N, K) an expert
  std::array<bool, 2> needs;     // of x and of the weights
  RowGroups groups;
  std::unique_ptr<Copies> copies, sums;  // of x and of y, or null
  ScalarType dtype;
  Coded x_column;
  SavedVariable w_codes, w_scale;
  std::optional<Held> w_column;  // the `StackedWeight` of these
  bool turned = false;           // they are as parameters hold them: to be turned over for the product
  bool released = false;

  GroupedNode(std::shared_ptr<const GroupedPlan> plan, py::handle call) : plan(std::move(plan)), call(hold(call)) {}

  std::string name() const override { return "GroupedLinearBackward"; }
  void release_variables() override;
  variable_list apply(variable_list&& grads) override;

  Coded weight_column() const;
  bool look_at_weights() const;
  Tensor input_gradient(const Coded& dy) const;
  py::object ask_about(const char* name, const Coded& dy, py::handle more) const;
  Tensor added(const Coded& dy) const;
  void weight_gradients(const Coded& dy, bool told, variable_list& made) const;
  variable_list backward(const Tensor& dy);
  variable_list backward_by_python(const Tensor& dy);
};

// y of x (T, K) or of tokens, or None: Python's function is the one for this call. weights: as the node's. where: a
// `BlockMap`. copies, sums: `RowMap`s or None. call: a `GroupedCall`.
py::object grouped(const std::shared_ptr<GroupedPlan>& plan, py::handle x, const py::sequence& weights,
                   const py::tuple& where, py::handle copies, py::handle sums, py::handle call);

// (codes, scales) by rows, then by columns, of what is computed from x; see `kernels.cast_groups`. weights: as its, or
// None.
py::tuple cast_as_computed(const GroupedPlan& plan, bool of_gradient, py::handle x, const py::tuple& where,
                           py::handle gate, py::handle grad, const py::object& weights);

// Adds the plan and the node's type to the module.
void bind_grouped(py::module_& m);

}  // namespace mh::node
