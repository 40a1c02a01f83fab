// GEMMs that decode an operand, for Python (`_C_gemm`); shapes and types are megatron_hybrid/gemm/decoding.py's to
// check.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "decode.h"

namespace py = pybind11;

namespace {

using mh::gemm::CodedRows;

mh::Element element_of(const std::string& name) {
  if (name == "e4m3") return mh::Element::e4m3;
  if (name == "e5m2") return mh::Element::e5m2;
  if (name == "e2m1") return mh::Element::e2m1;
  throw std::invalid_argument("_C_gemm: no codes are " + name + "; e4m3, e5m2 and e2m1 are");
}

CodedRows coded(uintptr_t codes, uintptr_t scale, const std::string& element, int block_rows) {
  const auto* scales = reinterpret_cast<const uint8_t*>(scale);
  return {reinterpret_cast<const void*>(codes), scales, element_of(element), block_rows};
}

void decode_slots(const CodedRows& in, uintptr_t out, int64_t rows, int64_t k, uintptr_t stream, int device) {
  mh::gemm::decode_slots({in, reinterpret_cast<void*>(out), rows, k}, {stream, device});
}

void decoding_rows(uintptr_t a, const CodedRows& b, uintptr_t out, uintptr_t a_factor, uintptr_t b_factor,
                   uintptr_t ends, uintptr_t blocks, int64_t groups, int64_t count, int64_t rows_a, int64_t n,
                   int64_t k, uintptr_t stream, int device) {
  const auto floats = [](uintptr_t at) { return reinterpret_cast<const float*>(at); };
  const auto numbers = [](uintptr_t at) { return reinterpret_cast<const int32_t*>(at); };
  mh::gemm::decoding_rows({reinterpret_cast<const void*>(a), floats(a_factor), floats(b_factor), b,
                           reinterpret_cast<void*>(out), numbers(ends), numbers(blocks), groups, count, rows_a, n, k},
                          {stream, device});
}

}  // namespace

void define_decoding(py::module_& m) {
  m.attr("MOST_GROUPS") = mh::gemm::kMostGroups;
  py::class_<CodedRows>(m, "CodedRows", py::module_local())
      .def(py::init(&coded), py::arg("codes"), py::arg("scale"), py::arg("element"), py::arg("block_rows"));
  m.def("decode_slots", &decode_slots, py::arg("in"), py::arg("out"), py::arg("rows"), py::arg("k"), py::arg("stream"),
        py::arg("device"), "Codes under block scales as bf16, in the order in which decoding_rows multiplies.");
  m.def("decoding_rows", &decoding_rows, py::arg("a"), py::arg("b"), py::arg("out"), py::arg("a_factor"),
        py::arg("b_factor"), py::arg("ends"), py::arg("blocks"), py::arg("groups"), py::arg("count"),
        py::arg("rows_a"), py::arg("n"), py::arg("k"), py::arg("stream"), py::arg("device"),
        "out (T, n): every row of a (T, k) with its group's codes of b (E * n, k).");
}
