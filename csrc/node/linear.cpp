// The linear of megatron_hybrid/lean.py as a node of autograd's own, with no Python on the way back.
//
//   fprop   y  = x  @ w.T     input.rowwise           weight.rowwise
//   dgrad   dx = dy @ w       grad_output.rowwise     weight.columnwise
//   wgrad   dw = dy.T @ x     grad_output.columnwise  input.columnwise
//
// Casts and GEMMs are those of the other extensions, whose functions come in capsules (entry.h); what each operand is cast
// to and which GEMM multiplies it is told once, as a `Plan`. megatron_hybrid/node.py makes it and holds what is left to Python.
#include <ATen/SavedTensorHooks.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../entry.h"

namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

enum Operand { kInput, kWeight, kGradOutput };
enum Gemm { kFprop, kDgrad, kWgrad };
constexpr const char* kOperands[] = {"input", "weight", "grad_output"};
constexpr const char* kGemms[] = {"fprop", "dgrad", "wgrad"};

// How a GEMM is run: torch's own on tensors in high precision, or on decodes in FP32; cuBLASLt; what Python makes of it.
enum class Route { high_precision, decoded, cublaslt, python };
// What one FP32 scale covers: scaled_mm.py's words.
enum class Kind { none, tensor, row, block, tile };

// One direction of an operand, as lean.py's `SideCast` has it.
struct Side {
  mh::FormatSpec spec;  // `axis` only, where it is not quantized
  bool quantized, transposed, stateful;

  bool measures() const { return spec.outer_rows || keeps_amax() || spec.block_m == 0; }
  bool keeps_amax() const { return spec.scale_rule == mh::ScaleRule::e4m3_amax; }
  int64_t stored_rows(int64_t m, int64_t k) const { return transposed ? k : m; }
  int64_t pitch(int64_t m, int64_t k) const {
    const int64_t last = transposed ? m : k;
    return spec.element == mh::Element::e2m1 ? (last + 1) / 2 : last;
  }
  int64_t scale_bytes(int64_t m, int64_t k) const {
    return num_scales(spec, m, k) * (spec.scale_rule == mh::ScaleRule::fp32 ? 4 : 1);
  }
};

struct Product {
  Route route;
  std::string backend;
  std::array<Kind, 2> kinds;  // of A's and B's scales; these and what follows for cuBLASLt
  std::array<int, 2> types, modes;
  int64_t rows_a;  // A's rows are padded to a multiple of this
  bool fast;
};

// A reference that may be dropped without the GIL.
using Held = c10::SafePyObject;

Held hold(py::handle object) { return {py::reinterpret_borrow<py::object>(object).release().ptr(), getPyInterpreter()}; }

py::handle held(const Held& object) { return object.ptr(getPyInterpreter()); }

struct Plan {
  std::array<std::array<Side, 2>, 3> sides;  // by operand and direction
  std::array<Product, 3> products;
  bool keeps_input, keeps_weight, sums;
  int bf16, fp32;  // cuBLASLt's numbers
  const mh::Casts* casts;
  const mh::Matmul* matmul;
  int64_t workspace_bytes;
  Held python;  // megatron_hybrid.node
};

// The payload of one direction of a matrix (m, k). Its own memory is one tensor of bytes: codes, scales and amaxes that are
// kept, each at a multiple of 256. One that Python holds comes as its three tensors. In high precision: the tensor.
struct Payload {
  const Side* side = nullptr;  // null: not there
  int64_t m = 0, k = 0;
  ScalarType dtype = ScalarType::Undefined;
  std::array<Tensor, 3> memory;
  bool own = false;
  int64_t scale_at = 0, outer_at = 0;

  int64_t rows() const { return side->spec.axis == 0 ? m : k; }
  int64_t contraction() const { return side->spec.axis == 0 ? k : m; }
  uint8_t* codes() const { return static_cast<uint8_t*>(memory[0].data_ptr()); }
  void* scale() const { return own ? codes() + scale_at : memory[1].data_ptr(); }
  float* outer() const {
    if (!side->keeps_amax()) return nullptr;
    return static_cast<float*>(own ? static_cast<void*>(codes() + outer_at) : memory[2].data_ptr());
  }

  // Codes, scales and amaxes as tensors; own ones flat and of bytes.
  std::array<Tensor, 3> tensors() const {
    if (!own) return memory;
    const int64_t n = num_amaxes(side->spec, m, k), size = side->stored_rows(m, k) * side->pitch(m, k);
    return {memory[0].narrow(0, 0, size), memory[0].narrow(0, scale_at, side->scale_bytes(m, k)),
            side->keeps_amax() ? memory[0].narrow(0, outer_at, n * 4) : Tensor()};
  }
  Tensor code_matrix() const { return tensors()[0].view({side->stored_rows(m, k), side->pitch(m, k)}); }
  // FP32 scales in the GEMM view: (rows, contraction) in blocks.
  Tensor scale_matrix() const {
    const auto& s = side->spec;
    const Tensor t = tensors()[1].view(ScalarType::Float).view({mh::num_blocks(m, s.block_m), mh::num_blocks(k, s.block_k)});
    return s.axis == 0 ? t : t.t();
  }
};

using Pair = std::array<Payload, 2>;

// What delayed scaling reads and writes of one direction.
struct State {
  Tensor scale, history;
};
using States = std::array<std::array<State, 2>, 3>;

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

Tensor as_matrix(const Tensor& x) {
  if (x.dim() == 2) return x;
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return x.reshape({rows, x.size(-1)});
}

int64_t num_panels(int64_t rows) { return (rows + mh::kPanelRows - 1) / mh::kPanelRows; }

mh::Dtype dtype_code(ScalarType dtype) {
  return dtype == ScalarType::Float ? mh::Dtype::f32 : dtype == ScalarType::BFloat16 ? mh::Dtype::bf16 : mh::Dtype::f16;
}

// The device's current stream, or torch's threads.
mh::Where where(const at::Device& device) {
  if (device.is_cpu()) return {0, at::get_num_threads()};
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return {reinterpret_cast<uintptr_t>(stream.native_handle()), device.index()};
}

// ---- casts

// One direction of a cast: memory for it, and what the kernels are told. temporary: room for an amax that is not kept.
mh::QuantizeArgs arguments(const mh::Matrix& x, Payload& out, const State& state, uint8_t* temporary, int32_t* scratch) {
  const Side& side = *out.side;
  float *amax = nullptr, *measured = nullptr;
  if (side.stateful) {
    amax = state.scale.data_ptr<float>();
    measured = state.history.defined() ? state.history.data_ptr<float>() : nullptr;
  } else if (side.measures()) {
    amax = measured = side.keeps_amax() ? out.outer() : reinterpret_cast<float*>(temporary);
  }
  return {side.spec, x, {out.codes(), side.transposed, out.scale(), amax}, side.stateful, nullptr, nullptr, nullptr, measured,
          measured ? scratch : nullptr};
}

Payload unwritten(const Side& side, const Tensor& x) {
  Payload p;
  p.side = &side, p.m = x.size(0), p.k = x.size(1), p.dtype = x.scalar_type();
  if (!side.quantized) {
    p.memory[0] = x;
    return p;
  }
  p.own = true;
  p.scale_at = aligned(side.stored_rows(p.m, p.k) * side.pitch(p.m, p.k));
  const int64_t end = p.scale_at + side.scale_bytes(p.m, p.k);
  p.outer_at = aligned(end);
  const int64_t size = side.keeps_amax() ? p.outer_at + num_amaxes(side.spec, p.m, p.k) * 4 : end;
  p.memory[0] = at::empty({size}, x.options().dtype(ScalarType::Byte).requires_grad(false));
  return p;
}

// `OperandCast` of lean.py. sums: null, or memory for the sums over M that the cast takes on its way.
Pair cast(const Plan& plan, Operand operand, const Tensor& x, bool rowwise, bool columnwise, const States& states,
          float* sums = nullptr) {
  const bool wanted[] = {rowwise, columnwise};
  Pair made;
  int64_t needed[3] = {};  // bytes that live until the cast has run: amaxes of both directions, working memory of the row's
  bool casts = sums != nullptr;
  for (int d = 0; d < 2; ++d) {
    if (!wanted[d]) continue;
    const Side& side = plan.sides[operand][d];
    made[d] = unwritten(side, x);
    if (!side.quantized) continue;
    casts = true;
    const bool measures = side.measures() && !side.stateful;
    if (measures && !side.keeps_amax()) needed[d] = aligned(num_amaxes(side.spec, x.size(0), x.size(1)) * 4);
    if (measures && d == 0 && side.spec.outer_rows && x.is_cuda()) needed[2] = num_panels(x.size(0)) * 4;
  }
  if (!casts) return made;
  Tensor memory;
  if (const int64_t bytes = needed[0] + needed[1] + needed[2]; bytes)
    memory = at::empty({bytes}, x.options().dtype(ScalarType::Byte).requires_grad(false));
  uint8_t* temporary = memory.defined() ? static_cast<uint8_t*>(memory.data_ptr()) : nullptr;
  mh::PairArgs args{};
  args.sums = sums;
  args.row.x = mh::Matrix{x.data_ptr(), dtype_code(x.scalar_type()), x.size(0), x.size(1), x.stride(0), x.stride(1)};
  const mh::Matrix matrix = args.row.x;
  for (int d = 0; d < 2; ++d) {
    if (!wanted[d] || !made[d].side->quantized) continue;
    auto* scratch = d == 0 && needed[2] ? reinterpret_cast<int32_t*>(temporary + needed[0] + needed[1]) : nullptr;
    (d ? args.col : args.row) = arguments(matrix, made[d], states[operand][d], temporary + (d ? needed[0] : 0), scratch);
    (d ? args.has_col : args.has_row) = true;
  }
  plan.casts->quantize(args, where(x.device()));
  return made;
}

// ---- products: A (rows_a, k) . B (rows_b, k)^T in `dtype`, or added to `total`

Tensor finish(const Tensor& out, ScalarType dtype, const Tensor& total) {
  if (!total.defined()) return out.to(dtype);
  Tensor sum = total;
  return sum.add_(out);
}

Tensor multiply(const Tensor& a, const Tensor& b, ScalarType dtype, const Tensor& total) {
  const bool low = a.is_cuda() && a.scalar_type() == b.scalar_type() && a.scalar_type() != ScalarType::Float;
  if (low && total.defined() && total.scalar_type() == ScalarType::Float) {
    Tensor sum = total;
    return at::addmm_out(sum, total, a, b.t(), ScalarType::Float);
  }
  if (!total.defined() && dtype == a.scalar_type()) return at::mm(a, b.t());
  if (low) return finish(at::mm(a, b.t(), ScalarType::Float), dtype, total);
  return finish(at::mm(a.to(ScalarType::Float), b.to(ScalarType::Float).t()), dtype, total);
}

Tensor high_precision(const Payload& p) { return p.side->spec.axis == 0 ? p.memory[0] : p.memory[0].t(); }

Tensor decoded(const Plan& plan, const Payload& p) {
  if (!p.side->quantized) return high_precision(p).to(ScalarType::Float);
  const Tensor out = at::empty({p.rows(), p.contraction()}, p.memory[0].options().dtype(ScalarType::Float));
  const bool along_k = p.side->spec.axis == 0;
  const mh::Matrix matrix{out.data_ptr(), mh::Dtype::f32, p.m, p.k, along_k ? p.k : 1, along_k ? 1 : p.m};
  if (p.m > 0 && p.k > 0)
    plan.casts->dequantize({p.side->spec, {p.codes(), p.side->transposed, p.scale(), p.outer()}, matrix, true, false},
                           where(out.device()));
  return out;
}

// The scales of an operand as the library takes them, its rows padded by `pad`: scaled_mm.py's `_scale_a` and `_scale_b`.
const void* laid_out(Kind kind, const Payload& p, int64_t pad, Tensor& kept) {
  const bool along_k = p.side->spec.axis == 0;
  if (kind == Kind::tensor || (!pad && (kind == Kind::row || (kind == Kind::block && !along_k)))) return p.scale();
  Tensor scale = p.scale_matrix();
  if (kind == Kind::tile) {
    const int64_t more = (4 - scale.size(1) % 4) % 4;
    kept = more ? at::constant_pad_nd(scale, {0, more}) : scale.contiguous();
  } else {
    if (pad) scale = at::constant_pad_nd(scale, {0, 0, 0, pad}, 1.0);
    kept = scale.t().contiguous();
  }
  return kept.data_ptr();
}

constexpr int64_t kAlign = 16;

// Of a stream; Python keeps it.
void* workspace(const Plan& plan, const mh::Where& at) {
  thread_local std::map<std::pair<int, uintptr_t>, void*> known;
  void*& found = known[{at.threads_or_device, at.stream}];
  if (!found) {
    py::gil_scoped_acquire gil;
    found = reinterpret_cast<void*>(held(plan.python).attr("workspace")(at.threads_or_device, at.stream).cast<uintptr_t>());
  }
  return found;
}

Tensor multiply_codes(const Plan& plan, const Product& how, const Payload& a, const Payload& b, ScalarType dtype,
                      const Tensor& total) {
  const int64_t rows_a = a.rows(), rows_b = b.rows(), k = a.contraction();
  const auto options = a.memory[0].options();
  if (!rows_a || !rows_b || !k)
    return finish(at::zeros({rows_a, rows_b}, options.dtype(total.defined() ? ScalarType::Float : dtype)), dtype, total);
  const auto missing = [](int64_t size, int64_t unit) { return (unit - size % unit) % unit; };
  const int64_t pad_a = missing(rows_a, how.rows_a), pad_b = missing(rows_b, kAlign), pad_k = missing(k, kAlign);
  Tensor kept[4];
  const void *codes_a = a.codes(), *codes_b = b.codes();
  if (pad_a || pad_k) codes_a = (kept[0] = at::constant_pad_nd(a.code_matrix(), {0, pad_k, 0, pad_a})).data_ptr();
  if (pad_b || pad_k) codes_b = (kept[1] = at::constant_pad_nd(b.code_matrix(), {0, pad_k, 0, pad_b})).data_ptr();
  const void* scale_a = laid_out(how.kinds[0], a, pad_a, kept[2]);
  const void* scale_b = laid_out(how.kinds[1], b, pad_b, kept[3]);
  const int64_t padded_a = rows_a + pad_a, padded_b = rows_b + pad_b;
  const bool add = total.defined() && total.scalar_type() == ScalarType::Float && total.is_contiguous() &&
                   total.sizes() == at::IntArrayRef{padded_a, padded_b};
  const bool to_bf16 = !total.defined() && dtype == ScalarType::BFloat16;
  Tensor out = add ? total : at::empty({padded_a, padded_b}, options.dtype(to_bf16 ? ScalarType::BFloat16 : ScalarType::Float));
  const auto at = where(out.device());
  void* scratch = out.is_cuda() ? workspace(plan, at) : nullptr;
  plan.matmul->run({codes_a, codes_b, out.data_ptr(), padded_a, padded_b, k + pad_k, how.types[0], how.types[1],
                    to_bf16 ? plan.bf16 : plan.fp32, how.modes[0], how.modes[1], scale_a, scale_b, how.fast, add, nullptr,
                    nullptr, scratch, plan.workspace_bytes, at.stream, at.threads_or_device});
  if (add) return total;
  if (pad_a || pad_b) out = out.narrow(0, 0, rows_a).narrow(1, 0, rows_b);
  return finish(out, dtype, total);
}

// ---- what Python is asked for

py::object wrap(const Tensor& t) {
  return t.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(t)) : py::object(py::none());
}

Tensor unwrap(py::handle object) { return object.is_none() ? Tensor() : THPVariable_Unpack(object.ptr()); }

py::object dtype_object(ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

// (M, K, dtype of the tensor that it stands for, its three tensors)
py::tuple described(const Payload& p) {
  const auto t = p.tensors();
  return py::make_tuple(p.m, p.k, dtype_object(p.dtype), wrap(t[0]), wrap(t[1]), wrap(t[2]));
}

// A payload that Python holds: (M, K, its three tensors), or None.
Payload imported(const Side& side, py::handle found, ScalarType dtype) {
  Payload p;
  if (found.is_none()) return p;
  const auto t = found.cast<py::tuple>();
  p.side = &side, p.m = t[0].cast<int64_t>(), p.k = t[1].cast<int64_t>(), p.dtype = dtype;
  for (int i = 0; i < 3; ++i) p.memory[i] = unwrap(t[2 + i]);
  return p;
}

Pair imported(const Plan& plan, Operand operand, const py::object& both, ScalarType dtype) {
  const auto t = both.cast<py::tuple>();
  return {imported(plan.sides[operand][0], t[0], dtype), imported(plan.sides[operand][1], t[1], dtype)};
}

void count(py::handle call, const Plan& plan, Gemm gemm) {
  const py::object key = py::make_tuple(kGemms[gemm], plan.products[gemm].backend), calls = call.attr("plan").attr("calls");
  calls[key] = py::object(calls[key]) + py::int_(1);
}

States states_of(const Plan& plan, py::handle call) {
  States found;
  const py::object all = call.attr("state");
  for (int o = 0; o < 3; ++o)
    for (int d = 0; d < 2; ++d) {
      if (!plan.sides[o][d].stateful) continue;
      const py::object state = all[kOperands[o]].cast<py::tuple>()[d];
      found[o][d] = {unwrap(state.attr("scale")), unwrap(state.attr("history"))};
    }
  return found;
}

// ---- the linear

struct LinearNode : Node {
  std::shared_ptr<const Plan> plan;
  Held call;
  States states;
  std::array<bool, 3> needs;
  Tensor weight;
  c10::DimVector shape;
  ScalarType dtype;
  SavedVariable x_kept, w_kept;  // the originals, where backward casts them
  Payload x_col, w_col;          // else what it reads of them
  bool released = false;

  LinearNode(std::shared_ptr<const Plan> plan, py::handle call) : plan(std::move(plan)), call(hold(call)) {}

  std::string name() const override { return "LeanLinearBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> locked(mutex_);
    x_kept.reset_data(), w_kept.reset_data();
    x_col = {}, w_col = {}, states = {};
    released = true;
  }

  Tensor run(Gemm gemm, const Payload& a, const Payload& b, ScalarType dtype, const Tensor& total = {}) const;
  Pair cast_grad_output(const Tensor& dy, const Tensor& dy2d, Tensor& sums) const;
  bool look_at_weight() const;
  variable_list backward(const Tensor& dy);
  variable_list apply(variable_list&& grads) override;
};

Tensor LinearNode::run(Gemm gemm, const Payload& a, const Payload& b, ScalarType dtype, const Tensor& total) const {
  const Product& how = plan->products[gemm];
  if (how.route == Route::high_precision) return multiply(high_precision(a), high_precision(b), dtype, total);
  if (how.route == Route::cublaslt) return multiply_codes(*plan, how, a, b, dtype, total);
  if (how.route == Route::decoded) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return multiply(decoded(*plan, a), decoded(*plan, b), dtype, total);
  }
  py::gil_scoped_acquire gil;
  return unwrap(held(plan->python).attr("product")(held(call), kGemms[gemm], described(a), described(b), dtype_object(dtype),
                                                   wrap(total)));
}

// Payloads of the gradient; `sums` gets its sums over M where the cast takes them. One that was cast before brings its own.
Pair LinearNode::cast_grad_output(const Tensor& dy, const Tensor& dy2d, Tensor& sums) const {
  if (dy.key_set().has(c10::DispatchKey::Python)) {
    py::gil_scoped_acquire gil;
    const auto both = held(plan->python).attr("payloads_of")(held(call), wrap(dy), needs[0], needs[1]);
    return imported(*plan, kGradOutput, both, dy.scalar_type());
  }
  if (needs[2] && plan->sums && dy.is_cuda())
    sums = at::empty({num_panels(dy2d.size(0)), dy2d.size(1)}, dy.options().dtype(ScalarType::Float));
  return cast(*plan, kGradOutput, dy2d, needs[0], needs[1], states, sums.defined() ? sums.data_ptr<float>() : nullptr);
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

variable_list LinearNode::backward(const Tensor& dy) {
  const std::lock_guard<std::mutex> locked(mutex_);
  TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
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
    Tensor total;
    if (told) {
      py::gil_scoped_acquire gil;
      total = unwrap(held(plan->python).attr("main_grad")(wrap(weight)));
    }
    dw = run(kWgrad, dy_col, x_col, weight.scalar_type(), total);
    if (!plan->keeps_input) x_col = {};
    if (total.defined()) {
      py::gil_scoped_acquire gil;
      dw = unwrap(held(plan->python).attr("placeholder_gradient")(wrap(weight)));
    }
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

// y = x @ w.T + b, or None: Python's linear is the one for this call. x (..., K), w (N, K).
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
  if (cached) w_both = imported(*plan, kWeight, held(plan->python).attr("cached")(call, w_object, w_column), w.scalar_type());
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

// ---- bindings

const LinearNode& node_of(PyObject* self) {
  return static_cast<const LinearNode&>(*reinterpret_cast<torch::autograd::THPCppFunction*>(self)->cdata);
}

PyObject* get_needs(PyObject* self, void*) {
  const auto& needs = node_of(self).needs;
  return py::make_tuple(needs[0], needs[1], needs[2]).release().ptr();
}

// What is kept for backward: originals, and memory of payloads.
PyObject* get_saved(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const LinearNode& node = node_of(self);
  py::list found;
  const auto add = [&](const Tensor& t) {
    if (t.defined()) found.append(wrap(t));
  };
  if (!node.released) {
    if (node.needs[1] && !node.plan->keeps_input) add(node.x_kept.unpack());
    if (node.needs[0] && !node.plan->keeps_weight) add(node.w_kept.unpack());
  }
  for (const auto& p : {node.x_col, node.w_col})
    for (const Tensor& t : p.memory) add(t);
  return found.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* get_call(PyObject* self, void*) {
  return py::reinterpret_borrow<py::object>(held(node_of(self).call)).release().ptr();
}

// The type of `grad_fn` of what the node made: as autograd's own, with what lean.py asks of it.
py::object node_type() {
  using namespace torch::autograd;  // whose functions the macro names
  static PyMethodDef methods[] = {
      {"_register_hook_dict", THPCppFunction_register_hook_dict, METH_O, nullptr},
      {"register_hook", THPCppFunction_register_hook, METH_O, nullptr},
      {"register_prehook", THPCppFunction_register_prehook, METH_O, nullptr},
      {"name", THPCppFunction_name, METH_NOARGS, nullptr},
      {"_sequence_nr", THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef properties[] = {THP_FUNCTION_DEFAULT_PROPERTIES,
                                     {"needs_input_grad", get_needs, nullptr, nullptr, nullptr},
                                     {"call", get_call, nullptr, nullptr, nullptr},
                                     {"saved_tensors", get_saved, nullptr, nullptr, nullptr},
                                     {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyTypeObject type;
  _initFunctionPyTypeObject(type, "LeanLinearBackward", properties, methods);
  registerCppFunction(typeid(LinearNode), &type);
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&type));
}

Side make_side(bool quantized, int axis, bool transposed, bool stateful, int element, int scale_rule, int block_m, int block_k,
               bool pow2, float eps, bool outer_rows, bool rht) {
  return {{static_cast<mh::Element>(element), static_cast<mh::ScaleRule>(scale_rule), axis, block_m, block_k, pow2, eps,
           outer_rows, rht, false},
          quantized, transposed, stateful};
}

Product make_product(const std::string& route, const std::string& backend, const std::array<int, 2>& kinds,
                     const std::array<int, 2>& types, const std::array<int, 2>& modes, int64_t rows_a, bool fast) {
  const std::map<std::string, Route> routes{{"high_precision", Route::high_precision}, {"decoded", Route::decoded},
                                            {"cublaslt", Route::cublaslt}, {"python", Route::python}};
  return {routes.at(route), backend, {static_cast<Kind>(kinds[0]), static_cast<Kind>(kinds[1])}, types, modes, rows_a, fast};
}

std::shared_ptr<Plan> make_plan(const std::array<std::array<Side, 2>, 3>& sides, const std::array<Product, 3>& products,
                                bool keeps_input, bool keeps_weight, bool sums, int bf16, int fp32, const py::capsule& casts,
                                const py::object& matmul, int64_t workspace_bytes, py::handle python) {
  const auto* table = matmul.is_none() ? nullptr : matmul.cast<py::capsule>().get_pointer<const mh::Matmul>();
  return std::make_shared<Plan>(Plan{sides, products, keeps_input, keeps_weight, sums, bf16, fp32,
                                     casts.get_pointer<const mh::Casts>(), table, workspace_bytes, hold(python)});
}

}  // namespace

PYBIND11_MODULE(_C_node, m) {
  m.doc() = "The commonest linear as a node of autograd; made and called through megatron_hybrid.node.";
  py::class_<Side>(m, "Side", py::module_local())
      .def(py::init(&make_side), py::kw_only(), py::arg("quantized"), py::arg("axis"), py::arg("transposed") = false,
           py::arg("stateful") = false, py::arg("element") = 0, py::arg("scale_rule") = 0, py::arg("block_m") = 0,
           py::arg("block_k") = 0, py::arg("pow2") = false, py::arg("eps") = 0.0f, py::arg("outer_rows") = false,
           py::arg("rht") = false);
  py::class_<Product>(m, "Product", py::module_local())
      .def(py::init(&make_product), py::kw_only(), py::arg("route"), py::arg("backend"), py::arg("kinds") = std::array<int, 2>{},
           py::arg("types") = std::array<int, 2>{}, py::arg("modes") = std::array<int, 2>{}, py::arg("rows_a") = 1,
           py::arg("fast") = false);
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan", py::module_local())
      .def(py::init(&make_plan), py::kw_only(), py::arg("sides"), py::arg("products"), py::arg("keeps_input"),
           py::arg("keeps_weight"), py::arg("sums"), py::arg("bf16"), py::arg("fp32"), py::arg("casts"), py::arg("matmul"),
           py::arg("workspace_bytes"), py::arg("python"))
      .def("__call__", &linear, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("call"));
  m.attr("LinearBackward") = node_type();
}
