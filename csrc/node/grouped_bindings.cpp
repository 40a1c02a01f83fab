// The grouped linear's plan and node as Python sees them.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <map>

#include "function_type.h"
#include "grouped.h"

namespace mh::node {
namespace {

// Of x, of the weights, of a bias, as grouped_at_once.py's function has it.
PyObject* get_wanted(PyObject* self, void*) {
  const auto& needs = node_of<GroupedNode>(self).needs;
  return py::make_tuple(needs[0], needs[1], false).release().ptr();
}

// What is kept for backward.
PyObject* get_saved(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const GroupedNode& node = node_of<GroupedNode>(self);
  py::list found;
  if (!node.released) {
    for (const Tensor& t : {node.x_column.codes, node.x_column.scale})
      if (t.defined()) found.append(wrap(t));
    if (node.needs[0])
      for (const SavedVariable* kept : {&node.w_codes, &node.w_scale}) found.append(wrap(kept->unpack()));
  }
  return found.release().ptr();
  END_HANDLE_TH_ERRORS
}

py::object node_type() {
  return function_type<GroupedNode>("GroupedLinearBackward", {
      {"wanted", get_wanted, nullptr, nullptr, nullptr},
      {"saved_tensors", get_saved, nullptr, nullptr, nullptr},
  });
}

GroupedProduct make_product(const std::string& kind, const std::array<bool, 2>& e5m2) {
  using gemm::Kind;
  const std::map<std::string, Kind> kinds{
      {"row_fast", Kind::row_fast}, {"row", Kind::row}, {"block", Kind::block}, {"tile", Kind::tile}};
  return {kinds.at(kind), e5m2};
}

std::shared_ptr<GroupedPlan> make_plan(const std::shared_ptr<Plan>& expert,
                                       const std::array<GroupedProduct, 3>& products, const py::capsule& gemms,
                                       int64_t experts, bool derives) {
  const auto* table = gemms.get_pointer<const gemm::Grouped>();
  return std::make_shared<GroupedPlan>(GroupedPlan{expert, products, table, experts, derives});
}

}  // namespace

void bind_grouped(py::module_& m) {
  py::class_<GroupedProduct>(m, "GroupedProduct", py::module_local())
      .def(py::init(&make_product), py::kw_only(), py::arg("kind"), py::arg("e5m2"));
  py::class_<GroupedPlan, std::shared_ptr<GroupedPlan>>(m, "GroupedPlan", py::module_local())
      .def(py::init(&make_plan), py::kw_only(), py::arg("expert"), py::arg("products"), py::arg("gemms"),
           py::arg("experts"), py::arg("derives"))
      .def("__call__", &grouped, py::arg("x"), py::arg("weights"), py::arg("where"), py::arg("copies"), py::arg("sums"),
           py::arg("call"))
      .def("computed", &cast_as_computed, py::arg("of_gradient"), py::arg("x"), py::arg("where"), py::arg("gate"),
           py::arg("grad"), py::arg("weights"));
  m.attr("GroupedBackward") = node_type();
}

}  // namespace mh::node
