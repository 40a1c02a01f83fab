#include "grouped.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace mh::node {
namespace {

std::unique_ptr<Copies> copies_of(py::handle map) {
  if (map.is_none()) return nullptr;
  const auto parts = map.attr("num_experts").cast<int64_t>();
  return std::make_unique<Copies>(Copies{hold(map), unwrap(map.attr("choice")), parts});
}

// Every token's sum of its rows.
Tensor summed(const std::unique_ptr<Copies>& copies, const Tensor& rows) {
  if (!copies) return rows;
  py::gil_scoped_acquire gil;
  return unwrap(held(copies->map).attr("sum")(wrap(rows)));
}

// Payloads that the kernel made which computed x; none: x is no `GroupedPayloads`.
std::optional<CodedPair> made_before(const GroupedPlan& plan, const Tensor& x) {
  py::gil_scoped_acquire gil;
  const py::object found = ask(*plan.expert, "payloads")(wrap(x));
  if (found.is_none()) return {};
  const auto t = found.cast<py::tuple>();
  return CodedPair{Coded::of(unwrap(t[0]), unwrap(t[1])), Coded::of(unwrap(t[2]), unwrap(t[3]))};
}

py::list wrapped(const std::vector<Tensor>& tensors) {
  py::list all;
  for (const Tensor& t : tensors) all.append(wrap(t));
  return all;
}

bool is_subclass(const Tensor& x) { return x.key_set().has(c10::DispatchKey::Python); }

// A GEMM of every expert, on its plan's backend.
void count_all(const GroupedPlan& plan, py::handle call, Gemm gemm) {
  const py::object calls = call.attr("call").attr("plan").attr("calls");
  const py::object key = py::make_tuple(kGemms[gemm], plan.expert->products[gemm].backend);
  calls[key] = py::object(calls[key]) + py::int_(plan.experts);
}

// Whether the products can read what others made where it is: parts of a payload may begin anywhere.
bool readable(std::initializer_list<Tensor> made) {
  for (const Tensor& t : made)
    if (t.defined() && !begins_aligned(t)) return false;
  return true;
}

bool readable(const CodedPair& made) {
  return readable({made[0].codes, made[0].scale, made[1].codes, made[1].scale});
}

// What Python gives of the weights: rows, and columns where asked for, with whether these are to be turned over.
struct Weights {
  Coded row;
  Tensor codes, scale;
  std::optional<Held> column;
  bool turned = false;

  bool readable() const { return node::readable({row.codes, row.scale, codes, scale}); }
};

Weights weights_of(const GroupedPlan& plan, py::handle call, const py::sequence& weights, bool columns) {
  const py::tuple t = ask(*plan.expert, "weights")(call, weights, columns);
  Weights found;
  found.row = Coded::of(unwrap(t[0]), unwrap(t[1]));
  if (!columns) return found;
  found.column = hold(t[2]), found.codes = unwrap(t[3]), found.scale = unwrap(t[4]), found.turned = t[5].cast<bool>();
  return found;
}

}  // namespace

void GroupedNode::release_variables() {
  const std::lock_guard<std::mutex> locked(mutex_);
  w_codes.reset_data(), w_scale.reset_data(), w_column.reset();
  x_column = {};
  released = true;
}

Coded GroupedNode::weight_column() const {
  const Tensor codes = w_codes.unpack(), scale = w_scale.unpack();
  if (!turned) return Coded::of(codes, scale);
  py::gil_scoped_acquire gil;
  const py::tuple t = ask(*plan->expert, "turned")(held(*w_column), wrap(codes), wrap(scale));
  return Coded::of(unwrap(t[0]), unwrap(t[1]));
}

// Whether any weight says where its gradient goes (saved.py). Counts this backward's GEMMs that do not depend on it.
bool GroupedNode::look_at_weights() const {
  py::gil_scoped_acquire gil;
  if (needs[0]) count_all(*plan, held(call), kDgrad);
  if (!needs[1]) return false;
  for (const Tensor& weight : weights) {
    const py::object w = wrap(weight);
    if (py::hasattr(w, "main_grad") || py::hasattr(w, "take_main_grad")) return true;
  }
  count_all(*plan, held(call), kWgrad);
  return false;
}

Tensor GroupedNode::input_gradient(const Coded& dy) const {
  return summed(copies, multiply_rows(*plan, kDgrad, dy, weight_column(), groups, dtype));
}

// Both operands of wgrad, and what they multiply, as `grouped_node.py` takes them.
py::object GroupedNode::ask_about(const char* name, const Coded& dy, py::handle more) const {
  const auto a = dy.tensors(), b = x_column.tensors();
  return ask(*plan->expert, name)(held(call), wrap(a[0]), wrap(a[1]), wrap(b[0]), wrap(b[1]), more);
}

// Adds the gradient to what the one weight says; what autograd gets then. Undefined: it says nothing.
Tensor GroupedNode::added(const Coded& dy) const {
  Tensor total, placeholder;
  {
    py::gil_scoped_acquire gil;
    const py::tuple both = ask(*plan->expert, "total")(wrap(weights[0]));
    total = unwrap(both[0]), placeholder = unwrap(both[1]);
    if (!total.defined()) return count_all(*plan, held(call), kWgrad), Tensor();
    const bool known = total.is_floating_point() && total.element_size() <= 4 && total.element_size() >= 2;
    const bool fits = total.is_contiguous() && total.sizes() == at::IntArrayRef{plan->experts, dy.rows, x_column.rows};
    if (!known || !fits || !begins_aligned(total)) {
      ask_about("add_to", dy, wrap(total));
      return placeholder;
    }
    count_all(*plan, held(call), kWgrad);
  }
  multiply_columns(*plan, dy, x_column, groups, total, true);
  return placeholder;
}

// told: some weight may say where its gradient goes.
void GroupedNode::weight_gradients(const Coded& dy, bool told, variable_list& made) const {
  const bool one = weights[0].dim() == 3;
  if (told && !one) {
    py::gil_scoped_acquire gil;
    const py::list found = ask_about("weight_gradients", dy, wrapped(weights));
    for (const py::handle dw : found) made.push_back(unwrap(dw));
    return;
  }
  Tensor dw = told ? added(dy) : Tensor();
  if (!dw.defined()) {
    const auto options = dy.codes.options().dtype(weights[0].scalar_type()).requires_grad(false);
    dw = at::empty({plan->experts, dy.rows, x_column.rows}, options);
    multiply_columns(*plan, dy, x_column, groups, dw, false);
  }
  if (one) return made.push_back(dw);
  for (const Tensor& of_expert : dw.unbind()) made.push_back(of_expert);
}

variable_list GroupedNode::backward_by_python(const Tensor& dy) {
  py::gil_scoped_acquire gil;
  py::object x = py::none(), w = py::none();
  if (needs[1]) {
    const auto [codes, scale] = x_column.tensors();
    x = py::make_tuple(wrap(codes), wrap(scale));
  }
  if (needs[0]) w = py::reinterpret_borrow<py::object>(held(*w_column));
  const py::list found = ask(*plan->expert, "gradients")(held(call), py::make_tuple(needs[0], needs[1], false), x, w,
                                                         wrapped(weights), wrap(dy), dtype_object(dtype));
  variable_list made;
  for (const py::handle one : found) made.push_back(unwrap(one));
  return made;
}

variable_list GroupedNode::backward(const Tensor& dy) {
  const std::lock_guard<std::mutex> locked(mutex_);
  TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
  const bool computed = is_subclass(dy);
  if (!makes_memory() || (!computed && (dy.is_meta() || !dy.has_storage()))) return backward_by_python(dy);
  const c10::DeviceGuard on(dy.device());
  CodedPair both;
  if (computed) {
    auto found = made_before(*plan, dy);
    if (!found || !readable(*found)) return backward_by_python(dy);
    both = std::move(*found);
  }
  const bool told = look_at_weights();
  if (!computed) both = cast_groups(*plan, kGradOutput, dy, needs[0], needs[1], groups, sums.get());
  variable_list made;
  made.reserve(1 + weights.size());
  made.push_back(needs[0] ? input_gradient(both[0]) : Tensor());
  if (needs[1])
    weight_gradients(both[1], told, made);
  else
    made.resize(1 + weights.size());
  return made;
}

variable_list GroupedNode::apply(variable_list&& grads) {
  const Tensor dy = grads[0].defined() ? grads[0] : input_metadata(0).zeros_like();
  return once(dy, [this](const Tensor& dy) { return backward(dy); });
}

py::tuple cast_as_computed(const GroupedPlan& plan, bool of_gradient, py::handle x_object, const py::tuple& where,
                           py::handle gate, py::handle grad_object, const py::object& weights) {
  const Tensor x = unwrap(x_object), of_gate = unwrap(gate), grad = unwrap(grad_object);
  Computed computed{};
  if (of_gate.defined()) computed.gate = of_gate.data_ptr();
  if (grad.defined()) computed.grad = grad.data_ptr(), computed.grad_stride = grad.stride(0);
  if (!weights.is_none()) {
    const auto t = weights.cast<py::tuple>();
    const auto at = [&](int i) { return reinterpret_cast<void*>(t[i].cast<uintptr_t>()); };
    computed.weights = {at(0), static_cast<Dtype>(t[1].cast<int>()), static_cast<const int32_t*>(at(2)),
                        static_cast<float*>(at(3))};
  }
  const RowGroups groups{unwrap(where[0]), unwrap(where[1]), x.size(0)};
  const auto [row, column] = cast_computed(plan, of_gradient ? kGradOutput : kInput, x, groups, computed);
  return py::make_tuple(wrap(row.codes), wrap(row.scale), wrap(column.codes), wrap(column.scale));
}

py::object grouped(const std::shared_ptr<GroupedPlan>& plan, py::handle x_object, const py::sequence& weight_objects,
                   const py::tuple& where, py::handle copies, py::handle sums, py::handle call) {
  const Tensor x = unwrap(x_object);
  std::vector<Tensor> weights;
  bool weights_need = false;
  for (const py::handle w : weight_objects) {
    weights.push_back(unwrap(w));
    weights_need |= weights.back().requires_grad();
  }
  const std::array<bool, 2> needs{x.requires_grad(), weights_need};
  if (!runs(x, weights[0], Py_None) || (!needs[0] && !needs[1])) return py::none();
  auto of_x = copies_of(copies);
  const RowGroups groups{unwrap(where[0]), unwrap(where[1]), of_x ? of_x->rows() : x.size(0)};
  if (!groups.rows) return py::none();
  RECORD_FUNCTION("GroupedLinear", c10::ArrayRef<const c10::IValue>{});
  const auto node = std::shared_ptr<GroupedNode>(new GroupedNode(plan, call), torch::autograd::deleteNode);
  Tensor y;
  {
    const at::NoGradGuard no_grad;
    CodedPair both;
    if (plan->derives) {
      const py::tuple t = ask(*plan->expert, "derived_input")(call, x_object, needs[1]);
      both[0] = Coded::of(unwrap(t[0]), unwrap(t[1]));
      if (needs[1]) both[1] = Coded::of(unwrap(t[2]), unwrap(t[3]));
    } else if (is_subclass(x)) {
      auto found = made_before(*plan, x);
      if (!found) return py::none();
      both = std::move(*found);
    } else {
      py::gil_scoped_release no_gil;
      both = cast_groups(*plan, kInput, x, true, needs[1], groups, of_x.get());
    }
    if (!readable(both)) return py::none();
    Weights w = weights_of(*plan, call, weight_objects, needs[0]);
    if (!w.readable()) return py::none();
    count_all(*plan, call, kFprop);
    {
      py::gil_scoped_release no_gil;
      y = multiply_rows(*plan, kFprop, both[0], w.row, groups, x.scalar_type());
    }
    node->sums = copies_of(sums);
    y = summed(node->sums, y);
    if (needs[1]) node->x_column = std::move(both[1]);
    if (needs[0]) {
      node->w_codes = SavedVariable(w.codes, false), node->w_scale = SavedVariable(w.scale, false);
      node->w_column.emplace(*w.column), node->turned = w.turned;
    }
  }
  torch::autograd::edge_list edges{torch::autograd::impl::gradient_edge(x)};
  for (const Tensor& weight : weights) edges.push_back(torch::autograd::impl::gradient_edge(weight));
  node->needs = needs, node->groups = groups, node->dtype = x.scalar_type();
  node->copies = std::move(of_x), node->weights = std::move(weights);
  node->set_next_edges(std::move(edges));
  torch::autograd::set_history(y, node);
  return wrap(y);
}

}  // namespace mh::node
