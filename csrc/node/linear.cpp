#include "linear.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/add.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include "products.h"

namespace mh::node {

Tensor LinearNode::run(Gemm gemm, const Payload& a, const Payload& b, ScalarType dtype, const Tensor& total) const {
  if (plan->products[gemm].route == Route::python) return product(*plan, call, gemm, a, b, dtype, total);
  return multiply(*plan, gemm, a, b, dtype, total);
}

// Payloads of the gradient; `sums` gets its sums over M where the cast takes them. One that was cast before brings its own.
Pair LinearNode::cast_grad_output(const Tensor& dy, const Tensor& dy2d, Tensor& sums) const {
  if (dy.key_set().has(c10::DispatchKey::Python)) return payloads_of(*plan, call, dy, needs[0], needs[1]);
  if (needs[2] && plan->sums && dy.is_cuda()) sums = sum_parts(dy2d);
  return cast(*plan, kGradOutput, dy2d, needs[0], needs[1], states, sums);
}

// Counts this backward's GEMMs; whether the weight says where its gradient goes (saved.py).
bool LinearNode::look_at_weight() const {
  py::gil_scoped_acquire gil;
  for (const Gemm gemm : {kDgrad, kWgrad})
    if (needs[gemm - kDgrad] && plan->products[gemm].route != Route::python) count(held(call), *plan, gemm);
  if (!needs[1]) return false;
  const py::object w = wrap(weight);
  return py::hasattr(w, "main_grad") || py::hasattr(w, "take_main_grad");
}

namespace {

// Whether tensors that are made now have memory, and nobody makes a graph of what runs; kernels.py's `traced`.
bool makes_memory() {
  using Key = c10::impl::TorchDispatchModeKey;
  if (!c10::impl::dispatch_mode_enabled()) return true;
  for (const Key key : {Key::FAKE, Key::PROXY, Key::FUNCTIONAL})
    if (c10::impl::TorchDispatchModeTLS::get_mode(key).has_value()) return false;
  return true;
}

bool readable(const Plan& plan, const Tensor& dy) {
  if (dy.key_set().has(c10::DispatchKey::Python)) return has_memory(plan, dy);
  return !dy.is_meta() && dy.has_storage();
}

}  // namespace

variable_list LinearNode::backward_by_python(const Tensor& dy) {
  py::gil_scoped_acquire gil;
  py::object x = py::none(), w = py::none();
  if (needs[1]) x = plan->keeps_input ? py::object(described(x_col)) : wrap(x_kept.unpack());
  if (needs[0]) w = plan->keeps_weight ? py::object(described(w_col)) : wrap(w_kept.unpack());
  py::tuple sizes(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) sizes[d] = shape[d];
  const py::tuple made = ask(*plan, "gradients")(held(call), py::make_tuple(needs[0], needs[1], needs[2]), x, w, wrap(dy),
                                                 wrap(weight), dtype_object(dtype), sizes);
  return {unwrap(made[0]), unwrap(made[1]), unwrap(made[2])};
}

variable_list LinearNode::backward(const Tensor& dy) {
  const std::lock_guard<std::mutex> locked(mutex_);
  TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
  if (!makes_memory() || !readable(*plan, dy)) return backward_by_python(dy);
  const c10::DeviceGuard on(dy.device());
  const Tensor dy2d = as_matrix(dy);
  const bool told = look_at_weight();
  Tensor dx, dw, db, sums;
  const auto [dy_row, dy_col] = cast_grad_output(dy, dy2d, sums);
  if (needs[0]) {
    if (!plan->keeps_weight) w_col = cast(*plan, kWeight, w_kept.unpack(), false, true, states)[1];
    dx = run(kDgrad, dy_row, w_col, dtype).view(shape);
    if (!plan->keeps_weight) w_col = {};
  }
  if (needs[1]) {
    if (!plan->keeps_input) x_col = cast(*plan, kInput, as_matrix(x_kept.unpack()), false, true, states)[1];
    const Tensor total = told ? main_grad(*plan, weight) : Tensor();
    dw = run(kWgrad, dy_col, x_col, weight.scalar_type(), total);
    if (!plan->keeps_input) x_col = {};
    if (total.defined()) dw = placeholder_gradient(*plan, weight);
  }
  if (needs[2]) db = sums.defined() ? sums.sum(0).to(dy.scalar_type()) : dy2d.sum(0);
  return {dx, dw, db};
}

variable_list LinearNode::apply(variable_list&& grads) {
  const Tensor dy = grads[0].defined() ? grads[0] : input_metadata(0).zeros_like();
  if (!at::GradMode::is_enabled()) return backward(dy);
  variable_list made;
  {
    const at::NoGradGuard no_grad;
    made = backward(dy);
  }
  if (!dy.requires_grad()) return made;
  const auto refuse = std::make_shared<torch::autograd::DelayedError>(
      "trying to differentiate twice a function that was marked with @once_differentiable", made.size());
  for (Tensor& t : made)
    if (t.defined()) t = t.detach().requires_grad_();
  return (*refuse)(std::move(made));
}

namespace {

// Whether the node can take a call that lean.py can: on the current device, and with nothing that looks in from outside.
bool runs(const Tensor& x, const Tensor& w, PyObject* b_object) {
  const auto device = x.device();
  if (b_object != Py_None && !THPVariable_CheckExact(b_object)) return false;
  if (x.layout() != at::kStrided || w.layout() != at::kStrided) return false;
  if (device.is_cuda() && c10::impl::VirtualGuardImpl(device.type()).getDevice().index() != device.index()) return false;
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return false;
  if (c10::impl::dispatch_mode_enabled() || at::autocast::is_autocast_enabled(device.type())) return false;
  if (at::SavedTensorDefaultHooks::get_hooks().has_value()) return false;
  return !torch::autograd::isFwGradDefined(x) && !torch::autograd::isFwGradDefined(w);
}

}  // namespace

py::object linear(const std::shared_ptr<Plan>& plan, py::handle x_object, py::handle w_object, py::handle b_object,
                  py::handle call) {
  const Tensor x = unwrap(x_object), w = unwrap(w_object);
  if (!runs(x, w, b_object.ptr())) return py::none();
  const Tensor b = unwrap(b_object);
  const std::array<bool, 3> needs{x.requires_grad(), w.requires_grad(), b.defined() && b.requires_grad()};
  RECORD_FUNCTION("LeanLinear", c10::ArrayRef<const c10::IValue>{});
  const auto node = std::shared_ptr<LinearNode>(new LinearNode(plan, call), torch::autograd::deleteNode);
  node->needs = needs, node->weight = w, node->dtype = x.scalar_type();
  node->shape = c10::DimVector(x.sizes()), node->states = states_of(*plan, call);
  const bool x_column = needs[1] && plan->keeps_input, w_column = needs[0] && plan->keeps_weight;
  Pair w_both;
  const bool cached = !call.attr("weight_cache").is_none();
  if (cached) w_both = cached_weight(*plan, call, w_object, w_column);
  if (plan->products[kFprop].route != Route::python) count(call, *plan, kFprop);
  Tensor y;
  {
    py::gil_scoped_release no_gil;
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [x_row, x_col] = cast(*plan, kInput, as_matrix(x), true, x_column, node->states);
    if (!cached) w_both = cast(*plan, kWeight, w, true, w_column, node->states);
    y = node->run(kFprop, x_row, w_both[0], x.scalar_type());
    if (b.defined()) y = at::add(y, b).to(y.scalar_type());
    if (x.dim() != 2) {
      c10::DimVector shape(x.sizes());
      shape.back() = w.size(0);
      y = at::_unsafe_view(y, shape);
    }
    if (x_column) node->x_col = std::move(x_col);
    if (w_column) node->w_col = std::move(w_both[1]);
  }
  if (!needs[0] && !needs[1] && !needs[2]) return wrap(y);
  if (needs[1] && !plan->keeps_input) node->x_kept = SavedVariable(x, false);
  if (needs[0] && !plan->keeps_weight) node->w_kept = SavedVariable(w, false);
  node->set_next_edges(torch::autograd::collect_next_edges(x, w, std::optional<Tensor>(b)));
  torch::autograd::set_history(y, node);
  return wrap(y);
}

}  // namespace mh::node
