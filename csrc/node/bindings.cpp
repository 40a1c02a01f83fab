// The module: how Python makes a plan, calls it, and sees the node as a `grad_fn`.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/version.h>

#include <algorithm>
#include <map>
#include <optional>

#include "../interface.h"
#include "function_type.h"
#include "grouped.h"

namespace mh::node {
namespace {

PyObject* get_needs(PyObject* self, void*) {
  const auto& needs = node_of<LinearNode>(self).needs;
  return py::make_tuple(needs[0], needs[1], needs[2]).release().ptr();
}

// What is kept for backward: originals, and memory of payloads.
PyObject* get_saved(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const LinearNode& node = node_of<LinearNode>(self);
  py::list found;
  const auto add = [&](const Tensor& t) {
    if (t.defined()) found.append(wrap(t));
  };
  if (!node.released) {
    if (node.needs[1] && node.plan->kept[kInput] == Kept::original) add(node.x_kept.unpack());
    if (node.needs[0] && node.plan->kept[kWeight] == Kept::original) add(node.w_kept.unpack());
  }
  for (const auto& p : {node.x_payload, node.w_payload})
    for (const Tensor& t : p.memory) add(t);
  return found.release().ptr();
  END_HANDLE_TH_ERRORS
}

// The type of `grad_fn` of what the node made: as autograd's own, with what lean.py asks of it.
py::object node_type() {
  return function_type<LinearNode>("LeanLinearBackward", {
      {"needs_input_grad", get_needs, nullptr, nullptr, nullptr},
      {"saved_tensors", get_saved, nullptr, nullptr, nullptr},
  });
}

Side make_side(bool quantized, int axis, bool transposed, bool stateful, int element, int scale_rule, int block_m, int block_k,
               bool pow2, float eps, bool outer_rows, bool rht, bool sr) {
  return {{static_cast<Element>(element), static_cast<ScaleRule>(scale_rule), axis, block_m, block_k, pow2, eps, outer_rows, rht,
           sr},
          quantized, transposed, stateful};
}

Product make_product(const std::string& route, const std::string& backend, const std::array<std::array<bool, 3>, 2>& in_bf16,
                     const std::array<int, 2>& kinds, const std::array<int, 2>& types, const std::array<int, 2>& modes,
                     int64_t rows_a, bool fast) {
  const std::map<std::string, Route> routes{{"high_precision", Route::high_precision}, {"decoded", Route::decoded},
                                            {"cublaslt", Route::cublaslt}, {"python", Route::python}};
  const std::array<Kind, 2> covered{static_cast<Kind>(kinds[0]), static_cast<Kind>(kinds[1])};
  return {routes.at(route), backend, in_bf16, covered, types, modes, rows_a, fast};
}

// The place of a word among others.
template <class Words>
int place_of(const std::string& word, const Words& words) {
  const auto found = std::find(std::begin(words), std::end(words), word);
  TORCH_CHECK(found != std::end(words), "the node knows no ", word);
  return static_cast<int>(found - std::begin(words));
}

std::shared_ptr<Plan> make_plan(const std::array<std::array<Side, 2>, 3>& sides, const std::array<Product, 3>& products,
                                const std::array<std::string, 2>& kept, const std::array<bool, 3>& derives, bool sums,
                                int bf16, int fp32, int no_scale, const py::capsule& casts, const py::object& matmul,
                                int64_t workspace_bytes, py::handle python, const std::optional<Sharding>& sharding) {
  const auto* table = matmul.is_none() ? nullptr : matmul.cast<py::capsule>().get_pointer<const Matmul>();
  const std::array<Kept, 2> keeps{static_cast<Kept>(place_of(kept[kInput], kKept)),
                                  static_cast<Kept>(place_of(kept[kWeight], kKept))};
  return std::make_shared<Plan>(Plan{sides, products, keeps, derives, sums, bf16, fp32, no_scale,
                                     casts.get_pointer<const Casts>(), table, workspace_bytes, hold(python),
                                     sharding.value_or(Sharding{})});
}

Sharding make_sharding(int gathered, const std::array<std::string, 2>& ways, int64_t unit,
                       const std::array<std::array<bool, 2>, 3>& reduced, const std::array<bool, 3>& same_amax) {
  Sharding made{true, gathered, {}, unit, reduced, same_amax};
  for (int d = 0; gathered >= 0 && d < 2; ++d) made.ways[d] = static_cast<Way>(place_of(ways[d], kWays));
  return made;
}

std::shared_ptr<Ranks> make_ranks(py::handle group, int64_t size, bool coalesces, const std::string& output,
                                  const std::string& dgrad) {
  const std::map<std::string, Sum> sums{{"none", Sum::none}, {"all", Sum::all}, {"scatter", Sum::scatter}};
  auto* found = group.cast<c10d::ProcessGroup*>();
  const auto held = c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(found);
  const auto without_gil = [](Ranks* ranks) {  // the group's threads may want it before they end
    if (!PyGILState_Check()) return delete ranks;
    py::gil_scoped_release no_gil;
    delete ranks;
  };
  return {new Ranks{held, size, coalesces, sums.at(output), sums.at(dgrad)}, without_gil};
}

// Classes are laid out as another torch's headers say: it would be called with the wrong functions and options.
void check_torch() {
  const std::string built = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + ".";
  const auto found = py::str(py::module_::import("torch").attr("__version__")).cast<std::string>();
  if (found.rfind(built, 0) != 0) throw py::import_error("_C_node was built for torch " + built + "x, this is " + found);
}

}  // namespace
}  // namespace mh::node

PYBIND11_MODULE(_C_node, m) {
  using namespace mh::node;
  m.doc() = "The commonest linear as a node of autograd; made and called through megatron_hybrid.node.";
  check_torch();
  py::class_<Side>(m, "Side", py::module_local())
      .def(py::init(&make_side), py::kw_only(), py::arg("quantized"), py::arg("axis"), py::arg("transposed") = false,
           py::arg("stateful") = false, py::arg("element") = 0, py::arg("scale_rule") = 0, py::arg("block_m") = 0,
           py::arg("block_k") = 0, py::arg("pow2") = false, py::arg("eps") = 0.0f, py::arg("outer_rows") = false,
           py::arg("rht") = false, py::arg("sr") = false);
  py::class_<Product>(m, "Product", py::module_local())
      .def(py::init(&make_product), py::kw_only(), py::arg("route"), py::arg("backend"),
           py::arg("in_bf16") = std::array<std::array<bool, 3>, 2>{}, py::arg("kinds") = std::array<int, 2>{},
           py::arg("types") = std::array<int, 2>{}, py::arg("modes") = std::array<int, 2>{}, py::arg("rows_a") = 1,
           py::arg("fast") = false);
  py::class_<Sharding>(m, "Sharding", py::module_local())
      .def(py::init(&make_sharding), py::kw_only(), py::arg("gathered"), py::arg("ways"), py::arg("unit"), py::arg("reduced"),
           py::arg("same_amax"));
  py::class_<Ranks, std::shared_ptr<Ranks>>(m, "Ranks", py::module_local())
      .def(py::init(&make_ranks), py::kw_only(), py::arg("group"), py::arg("size"), py::arg("coalesces"), py::arg("output"),
           py::arg("dgrad"));
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan", py::module_local())
      .def(py::init(&make_plan), py::kw_only(), py::arg("sides"), py::arg("products"), py::arg("kept"),
           py::arg("derives"), py::arg("sums"), py::arg("bf16"), py::arg("fp32"), py::arg("no_scale"), py::arg("casts"), py::arg("matmul"), py::arg("workspace_bytes"), py::arg("python"), py::arg("sharding"))
      .def("__call__", &linear, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("call"));
  bind_grouped(m);
  m.attr("INTERFACE") = mh::kInterface;
  m.attr("LinearBackward") = node_type();
}
