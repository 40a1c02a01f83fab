#include "python.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <map>
#include <utility>

namespace mh::node {
namespace {

// A payload that Python holds, as `described`, or None.
Payload imported(const Side& side, py::handle found) {
  Payload p;
  if (found.is_none()) return p;
  const auto t = found.cast<py::tuple>();
  p.side = &side, p.m = t[0].cast<int64_t>(), p.k = t[1].cast<int64_t>();
  p.dtype = reinterpret_cast<THPDtype*>(t[2].ptr())->scalar_type;
  for (int i = 0; i < 3; ++i) {
    const Tensor part = unwrap(t[3 + i]);
    p.memory[i] = side.quantized && part.defined() ? part.contiguous() : part;
  }
  return p;
}

Pair imported(const Plan& plan, Operand operand, const py::object& both) {
  const auto t = both.cast<py::tuple>();
  return {imported(plan.sides[operand][0], t[0]), imported(plan.sides[operand][1], t[1])};
}

}  // namespace

Held hold(py::handle object) { return {py::reinterpret_borrow<py::object>(object).release().ptr(), getPyInterpreter()}; }

py::handle held(const Held& object) { return object.ptr(getPyInterpreter()); }

py::object wrap(const Tensor& t) {
  return t.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(t)) : py::object(py::none());
}

Tensor unwrap(py::handle object) { return object.is_none() ? Tensor() : THPVariable_Unpack(object.ptr()); }

py::object dtype_object(ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

py::object ask(const Plan& plan, const char* name) { return held(plan.python).attr(name); }

py::tuple described(const Payload& p) {
  const auto t = p.tensors();
  return py::make_tuple(p.m, p.k, dtype_object(p.dtype), wrap(t[0]), wrap(t[1]), wrap(t[2]));
}

Pair cached_weight(const Plan& plan, py::handle call, py::handle weight, bool columnwise) {
  return imported(plan, kWeight, ask(plan, "cached")(call, weight, columnwise));
}

Keys keys_of(const Plan& plan, py::handle call) {
  Keys found;
  const py::object states = call.attr("state"), rng = call.attr("rng");
  for (int o = 0; o < 3; ++o) {
    for (int d = 0; d < 2; ++d) {
      if (!plan.sides[o][d].stateful) continue;
      const py::object state = states[kOperands[o]].cast<py::tuple>()[d];
      found.states[o][d] = {unwrap(state.attr("scale")), unwrap(state.attr("history"))};
    }
    found.by_python[o] = plan.derives[o] && plan.sharding.reduced[o][1];
    if (!plan.draws(o)) continue;
    const py::object key = rng[kOperands[o]], words = key.attr("plain_words");
    found.by_python[o] |= words.is_none();
    found.words[o] = unwrap(words);
  }
  return found;
}

void count(py::handle call, const Plan& plan, Gemm gemm) {
  const py::object key = py::make_tuple(kGemms[gemm], plan.products[gemm].backend), calls = call.attr("plan").attr("calls");
  calls[key] = py::object(calls[key]) + py::int_(1);
}

void count_gather(py::handle call, const Plan& plan, int direction) {
  const char* way = kWays[static_cast<int>(plan.sharding.ways[direction])];
  const py::object key = py::make_tuple(kOperands[plan.sharding.gathered], kDirections[direction], way);
  const py::object gathers = call.attr("plan").attr("gathers");
  gathers[key] = py::object(gathers[key]) + py::int_(1);
}

std::shared_ptr<const Ranks> ranks_of(py::handle call) {
  const py::object found = call.attr("comm").attr("in_node");
  return found.is_none() ? nullptr : found.cast<std::shared_ptr<Ranks>>();
}

Payload column_of(const Plan& plan, const Held& call, const Payload& row) {
  py::gil_scoped_acquire gil;
  return imported(plan.sides[kGradOutput][1], ask(plan, "column_of")(held(call), described(row)));
}

Payload derived_column(const Plan& plan, const Held& call, Operand operand, const Payload& row, bool whole) {
  py::gil_scoped_acquire gil;
  const py::object derive = ask(plan, "derived_column");
  return imported(plan.sides[operand][1], derive(held(call), kOperands[operand], described(row), whole));
}

bool has_memory(const Plan& plan, const Tensor& dy) {
  py::gil_scoped_acquire gil;
  return ask(plan, "has_memory")(wrap(dy)).cast<bool>();
}

Pair cast_by_python(const Plan& plan, const Held& call, Operand operand, const Tensor& x, bool rowwise, bool columnwise,
                    const Amaxes& known) {
  py::gil_scoped_acquire gil;
  const py::tuple amaxes = py::make_tuple(wrap(known[0]), wrap(known[1]));
  const py::object cast = ask(plan, "cast");
  return imported(plan, operand, cast(held(call), kOperands[operand], wrap(x), rowwise, columnwise, amaxes));
}

Pair payloads_of(const Plan& plan, const Held& call, const Tensor& dy, bool rowwise, bool columnwise) {
  py::gil_scoped_acquire gil;
  return imported(plan, kGradOutput, ask(plan, "payloads_of")(held(call), wrap(dy), rowwise, columnwise));
}

Tensor product(const Plan& plan, const Held& call, Gemm gemm, const Payload& a, const Payload& b, ScalarType dtype,
               const Tensor& total) {
  py::gil_scoped_acquire gil;
  return unwrap(ask(plan, "product")(held(call), kGemms[gemm], described(a), described(b), dtype_object(dtype), wrap(total)));
}

Tensor main_grad(const Plan& plan, const Tensor& weight) {
  py::gil_scoped_acquire gil;
  return unwrap(ask(plan, "main_grad")(wrap(weight)));
}

Tensor placeholder_gradient(const Plan& plan, const Tensor& weight) {
  py::gil_scoped_acquire gil;
  return unwrap(ask(plan, "placeholder_gradient")(wrap(weight)));
}

void* workspace(const Plan& plan, const Where& at) {
  thread_local std::map<std::pair<int, uintptr_t>, void*> known;
  void*& found = known[{at.threads_or_device, at.stream}];
  if (!found) {
    py::gil_scoped_acquire gil;
    found = reinterpret_cast<void*>(ask(plan, "workspace")(at.threads_or_device, at.stream).cast<uintptr_t>());
  }
  return found;
}

const float* constants(const Plan& plan, const Where& at) {
  thread_local std::map<int, const float*> known;
  const float*& found = known[at.threads_or_device];
  if (!found) {
    py::gil_scoped_acquire gil;
    found = reinterpret_cast<const float*>(ask(plan, "constants")(at.threads_or_device).cast<uintptr_t>());
  }
  return found;
}

}  // namespace mh::node
