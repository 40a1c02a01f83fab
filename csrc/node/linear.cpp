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

// The payloads of an operand, x (M, K), by the node or by Python; see casts.h.
Pair LinearNode::cast(Operand operand, const Tensor& x, bool rowwise, bool columnwise, const Tensor& sums,
                      const Amaxes& known) const {
  const bool apart = sums.defined() && (keys.by_python[operand] || plan->derives[operand]);
  if (apart) node::cast(*plan, operand, x, false, false, keys, sums);
  if (!keys.by_python[operand])
    return node::cast(*plan, operand, x, rowwise, columnwise, keys, apart ? Tensor() : sums, known);
  return cast_by_python(*plan, call, operand, x, rowwise, columnwise, known);
}

// The columnwise payload from a rowwise one. whole: of a gathered operand, all of it, which draws with a key of its own.
Payload LinearNode::derive(Operand operand, const Payload& row, bool whole) const {
  if (keys.by_python[operand] || (whole && plan->draws(operand))) return derived_column(*plan, call, operand, row, whole);
  return node::derive(*plan, operand, row, keys);
}

// The rowwise payload of this rank's x (..., K), on its way to the others where it is gathered: `whole`. Keeps the column.
Payload LinearNode::cast_input(const Tensor& x, bool column, Gathered& whole) {
  const Tensor x2d = as_matrix(x);
  Looked looked;
  if (plan->sharding.reduces(kInput)) looked = Looked(*plan, *ranks, kInput, x2d, true, column);
  auto [row, col] = cast(kInput, x2d, true, column, {}, looked.finish());
  if (column) x_payload = std::move(col);
  if (needs[1] && plan->kept[kInput] == Kept::rowwise) x_payload = row;
  if (plan->sharding.gathers(kInput)) whole = Gathered(*ranks, row);
  return row;
}

// Payloads of the gradient; `sums` gets its sums over M where the cast takes them. One that was cast before brings its own.
Pair LinearNode::cast_grad_output(const Tensor& dy, const Tensor& dy2d, Tensor& sums, Looked& looked) const {
  if (dy.key_set().has(c10::DispatchKey::Python)) return payloads_of(*plan, call, dy, needs[0], needs[1]);
  if (needs[2] && plan->sums && dy.is_cuda()) sums = sum_parts(dy2d);
  const Sharding& sharding = plan->sharding;
  // a column that is made of the row which all ranks put together is not cast
  const bool column = needs[1] && !(sharding.gathers(kGradOutput) && sharding.ways[1] == Way::row_payload);
  return cast(kGradOutput, dy2d, needs[0], column, sums, looked.finish());
}

// The whole gradient from this rank's rows. The row comes first, and the column travels while dgrad runs: `column`.
Pair LinearNode::gather_grad_output(const Pair& own, Gathered& column) const {
  const auto& ways = plan->sharding.ways;
  const bool one_tensor = ways[0] == Way::as_is && ways[1] == Way::as_is;
  Gathered row(*ranks, own[0]);
  if (needs[1] && ways[1] != Way::row_payload && !one_tensor) column = Gathered(*ranks, own[1]);
  Pair whole{row.finish(), Payload()};
  if (!needs[1] || column.started()) return whole;
  if (ways[1] == Way::row_payload) {
    const bool derived = plan->derives[kGradOutput];
    whole[1] = derived ? derive(kGradOutput, whole[0], true) : column_of(*plan, call, whole[0]);
  } else {
    whole[1] = whole[0], whole[1].side = &plan->sides[kGradOutput][1];
  }
  return whole;
}

// The columnwise payload of this rank's input.
Payload LinearNode::input_column() const {
  if (plan->kept[kInput] == Kept::columnwise) return x_payload;
  if (plan->kept[kInput] == Kept::rowwise) return derive(kInput, x_payload, false);
  return cast(kInput, as_matrix(x_kept.unpack()), false, true)[1];
}

Payload LinearNode::weight_column() const {
  if (plan->kept[kWeight] == Kept::columnwise) return w_payload;
  if (plan->kept[kWeight] == Kept::rowwise) return derive(kWeight, w_payload, false);
  return cast(kWeight, w_kept.unpack(), false, true)[1];
}

// Of the whole input, from all ranks' columns, or from all ranks' rows.
Payload LinearNode::gathered_input_column(Gathered& coming) const {
  const Payload whole = coming.finish();
  return whole.side->spec.axis == 0 ? derive(kInput, whole, true) : whole;
}

// Counts this backward's GEMMs; whether the weight says where its gradient goes (saved.py).
bool LinearNode::look_at_weight() const {
  py::gil_scoped_acquire gil;
  for (const Gemm gemm : {kDgrad, kWgrad})
    if (needs[gemm - kDgrad] && plan->products[gemm].route != Route::python) count(held(call), *plan, gemm);
  const Sharding& sharding = plan->sharding;
  if (needs[1] && sharding.several && sharding.gathered >= 0) count_gather(held(call), *plan, 1);
  if (sharding.gathers(kGradOutput)) count_gather(held(call), *plan, 0);
  if (!needs[1]) return false;
  const py::object w = wrap(weight);
  return py::hasattr(w, "main_grad") || py::hasattr(w, "take_main_grad");
}

bool makes_memory() {
  using Key = c10::impl::TorchDispatchModeKey;
  if (!c10::impl::dispatch_mode_enabled()) return true;
  for (const Key key : {Key::FAKE, Key::PROXY, Key::FUNCTIONAL})
    if (c10::impl::TorchDispatchModeTLS::get_mode(key).has_value()) return false;
  return true;
}

namespace {

bool readable(const Plan& plan, const Tensor& dy) {
  if (dy.key_set().has(c10::DispatchKey::Python)) return has_memory(plan, dy);
  return !dy.is_meta() && dy.has_storage();
}

}  // namespace

variable_list LinearNode::backward_by_python(const Tensor& dy) {
  py::gil_scoped_acquire gil;
  py::object x = py::none(), w = py::none();
  const bool x_original = plan->kept[kInput] == Kept::original, w_original = plan->kept[kWeight] == Kept::original;
  if (needs[1]) x = x_original ? wrap(x_kept.unpack()) : py::object(described(x_payload));
  if (needs[0]) w = w_original ? wrap(w_kept.unpack()) : py::object(described(w_payload));
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
  Gathered x_coming, dy_coming;
  Summed dx_coming;
  Looked looked;
  if (plan->sharding.reduces(kGradOutput)) looked = Looked(*plan, *ranks, kGradOutput, dy2d, needs[0], needs[1]);
  if (needs[1] && plan->sharding.gathers(kInput)) {
    const bool row = plan->sharding.ways[1] == Way::row_payload;
    x_coming = Gathered(*ranks, row ? x_payload : input_column());
  }
  Pair both = cast_grad_output(dy, dy2d, sums, looked);
  if (plan->sharding.gathers(kGradOutput)) both = gather_grad_output(both, dy_coming);
  auto& [dy_row, dy_col] = both;
  if (needs[0]) {
    dx = run(kDgrad, dy_row, weight_column(), dtype);
    if (ranks) dx_coming = Summed(*ranks, ranks->dgrad, dx);
  }
  if (needs[1]) {
    if (dy_coming.started()) dy_col = dy_coming.finish();
    const Payload x_column = x_coming.started() ? gathered_input_column(x_coming) : input_column();
    const Tensor total = told ? main_grad(*plan, weight) : Tensor();
    dw = run(kWgrad, dy_col, x_column, weight.scalar_type(), total);
    if (total.defined()) dw = placeholder_gradient(*plan, weight);
  }
  if (needs[2]) db = sums.defined() ? sums.sum(0).to(dy.scalar_type()) : dy2d.sum(0);
  if (needs[0]) dx = (ranks ? dx_coming.finish() : dx).view(shape);
  return {dx, dw, db};
}

variable_list LinearNode::apply(variable_list&& grads) {
  const Tensor dy = grads[0].defined() ? grads[0] : input_metadata(0).zeros_like();
  return once(dy, [this](const Tensor& dy) { return backward(dy); });
}

variable_list refused(variable_list made) {
  const auto refuse = std::make_shared<torch::autograd::DelayedError>(
      "trying to differentiate twice a function that was marked with @once_differentiable", made.size());
  for (Tensor& t : made)
    if (t.defined()) t = t.detach().requires_grad_();
  return (*refuse)(std::move(made));
}

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

namespace {

// Whether the node can put together what ranks have: rows that are whole blocks, and nothing that linear.py does otherwise.
bool takes(const Plan& plan, const Ranks* ranks, const std::array<bool, 3>& needs, int64_t rows, bool cached) {
  const Sharding& sharding = plan.sharding;
  if (!ranks || (sharding.reduces(kWeight) && !cached)) return false;
  if (sharding.gathers(kGradOutput) && (!needs[0] || needs[2] || rows % ranks->size)) return false;
  const int64_t own = sharding.gathers(kGradOutput) ? rows / ranks->size : rows;
  return rows && (sharding.gathered < 0 || own % sharding.unit == 0);
}

// The leading dimensions of y with `rows` rows: x's, the first of them scaled where rows were gathered or scattered.
c10::DimVector output_shape(const Tensor& x, int64_t rows, int64_t features) {
  c10::DimVector shape(x.sizes());
  int64_t own = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) own *= x.size(d);
  if (x.dim() > 1 && rows != own) shape[0] = rows * shape[0] / own;
  shape.back() = features;
  return shape;
}

}  // namespace

py::object linear(const std::shared_ptr<Plan>& plan, py::handle x_object, py::handle w_object, py::handle b_object,
                  py::handle call) {
  const Tensor x = unwrap(x_object), w = unwrap(w_object);
  if (!runs(x, w, b_object.ptr())) return py::none();
  const Tensor b = unwrap(b_object);
  const std::array<bool, 3> needs{x.requires_grad(), w.requires_grad(), b.defined() && b.requires_grad()};
  const bool cached = !call.attr("weight_cache").is_none(), several = plan->sharding.several;
  const auto ranks = several ? ranks_of(call) : nullptr;
  if (several && !takes(*plan, ranks.get(), needs, x.numel() ? x.numel() / x.size(-1) : 0, cached)) return py::none();
  RECORD_FUNCTION("LeanLinear", c10::ArrayRef<const c10::IValue>{});
  const auto node = std::shared_ptr<LinearNode>(new LinearNode(plan, call), torch::autograd::deleteNode);
  node->needs = needs, node->weight = w, node->dtype = x.scalar_type(), node->ranks = ranks;
  node->shape = c10::DimVector(x.sizes()), node->keys = keys_of(*plan, call);
  const bool x_column = needs[1] && plan->kept[kInput] == Kept::columnwise;
  const bool w_column = needs[0] && plan->kept[kWeight] == Kept::columnwise;
  Pair w_both;
  Payload x_row;
  Gathered x_coming;
  if (cached && !several) w_both = cached_weight(*plan, call, w_object, w_column);
  if (plan->products[kFprop].route != Route::python) count(call, *plan, kFprop);
  if (plan->sharding.gathers(kInput)) count_gather(call, *plan, 0);
  Tensor y;
  if (several) {  // the weight after it, whose cast may ask other ranks
    {
      py::gil_scoped_release no_gil;
      const at::AutoDispatchBelowADInplaceOrView below;
      x_row = node->cast_input(x, x_column, x_coming);
    }
    if (cached) w_both = cached_weight(*plan, call, w_object, w_column);
  }
  {
    py::gil_scoped_release no_gil;
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!several) x_row = node->cast_input(x, x_column, x_coming);
    if (!cached) w_both = node->cast(kWeight, w, true, w_column);
    if (x_coming.started()) x_row = x_coming.finish();
    y = node->run(kFprop, x_row, w_both[0], x.scalar_type());
    if (b.defined()) y = at::add(y, b).to(y.scalar_type());
    if (ranks) y = Summed(*ranks, ranks->output, y).finish();
    if (x.dim() != 2) y = at::_unsafe_view(y, output_shape(x, y.size(0), w.size(0)));
    if (needs[0] && plan->kept[kWeight] != Kept::original) node->w_payload = std::move(w_both[w_column ? 1 : 0]);
  }
  if (!needs[0] && !needs[1] && !needs[2]) return wrap(y);
  if (needs[1] && plan->kept[kInput] == Kept::original) node->x_kept = SavedVariable(x, false);
  if (needs[0] && plan->kept[kWeight] == Kept::original) node->w_kept = SavedVariable(w, false);
  node->set_next_edges(torch::autograd::collect_next_edges(x, w, std::optional<Tensor>(b)));
  torch::autograd::set_history(y, node);
  return wrap(y);
}

}  // namespace mh::node
