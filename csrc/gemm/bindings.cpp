// FP8 GEMMs of all groups for Python (`_C_gemm`); shapes and types are megatron_hybrid/gemm/grouped_cuda.py's to check.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "../interface.h"
#include "grouped.h"

namespace py = pybind11;

void define_decoding(py::module_& m);  // decode_bindings.cpp

namespace {

mh::gemm::Kind kind_of(const std::string& name) {
  if (name == "row_fast") return mh::gemm::Kind::row_fast;
  if (name == "row") return mh::gemm::Kind::row;
  if (name == "block") return mh::gemm::Kind::block;
  if (name == "tile") return mh::gemm::Kind::tile;
  throw std::invalid_argument("_C_gemm: no scales are called " + name + "; row_fast, row, block and tile are");
}

mh::gemm::Out out_of(const std::string& name) {
  if (name == "bf16") return mh::gemm::Out::bf16;
  if (name == "fp16") return mh::gemm::Out::fp16;
  if (name == "fp32") return mh::gemm::Out::fp32;
  throw std::invalid_argument("_C_gemm: no result is in " + name + "; bf16, fp16 and fp32 are");
}

struct Codes {
  uintptr_t data, scale;
  bool e5m2;
};

template <void (*kRun)(const mh::gemm::GroupedArgs&, const mh::Where&)>
void run(const Codes& a, const Codes& b, uintptr_t out, uintptr_t ends, uintptr_t blocks, int64_t groups, int64_t count,
         int64_t rows_a, int64_t n, int64_t k, const std::string& kind, const std::string& type, bool add, uintptr_t stream,
         int device) {
  const auto floats = [](uintptr_t at) { return reinterpret_cast<const float*>(at); };
  const auto numbers = [](uintptr_t at) { return reinterpret_cast<const int32_t*>(at); };
  kRun({reinterpret_cast<const void*>(a.data), reinterpret_cast<const void*>(b.data), floats(a.scale), floats(b.scale),
        reinterpret_cast<void*>(out), numbers(ends), numbers(blocks), groups, count, rows_a, n, k, kind_of(kind), out_of(type),
        a.e5m2, b.e5m2, add},
       {stream, device});
}

template <void (*kRun)(const mh::gemm::GroupedArgs&, const mh::Where&)>
void define(py::module_& m, const char* name, const char* about) {
  m.def(name, &run<kRun>, py::arg("a"), py::arg("b"), py::arg("out"), py::arg("ends"), py::arg("blocks"), py::arg("groups"),
        py::arg("count"), py::arg("rows_a"), py::arg("n"), py::arg("k"), py::arg("kind"), py::arg("type"), py::arg("add"),
        py::arg("stream"), py::arg("device"), about);
}

}  // namespace

PYBIND11_MODULE(_C_gemm, m) {
  m.doc() = "GEMMs of all groups on Hopper; called through megatron_hybrid.gemm.";
  py::class_<Codes>(m, "Codes", py::module_local())
      .def(py::init<uintptr_t, uintptr_t, bool>(), py::arg("data"), py::arg("scale"), py::arg("e5m2"));
  static const mh::gemm::Grouped grouped{&mh::gemm::rows, &mh::gemm::columns};
  m.attr("INTERFACE") = mh::kInterface;
  m.attr("GROUPED") = py::capsule(&grouped, mh::gemm::kGroupedCapsule);
  define<&mh::gemm::rows>(m, "rows", "out (T, n): every row of a (T, k) with its group's b (E * n, k).");
  define<&mh::gemm::columns>(m, "columns", "out (E, rows_a, n): a (rows_a, k) and b (n, k) over every group's blocks.");
  define_decoding(m);
}
