// GEMMs of cuBLASLt, called with what torch's functions leave out: adding into an FP32 buffer, a factor that is in
// device memory, E5M2 with block scales; and with the algorithm of a problem asked for once, not at every call.
//
// out (rows_a, rows_b) = factor * A (rows_a, k) . B (rows_b, k)^T [+ out], all row-major and packed. To the library, which
// counts columns first, this is out^T = B . A^T: its A is our B. The library is the one torch has loaded, found by name.
#include <cublasLt.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "../entry.h"
#include "../interface.h"

namespace py = pybind11;

namespace {

struct Library {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtGetVersion) version;
};

Library lib{};

template <class F>
void find(void* handle, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  if (!function) throw std::runtime_error(std::string("cuBLASLt has no ") + name);
}

// Take the library that is loaded under this name, or load it. Raises RuntimeError where there is none.
size_t load(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) handle = dlopen(name.c_str(), RTLD_LAZY);
  if (!handle) throw std::runtime_error("cannot load " + name + ": " + dlerror());
  find(handle, "cublasLtCreate", lib.create);
  find(handle, "cublasLtMatmulDescCreate", lib.desc_create);
  find(handle, "cublasLtMatmulDescSetAttribute", lib.desc_set);
  find(handle, "cublasLtMatmulDescDestroy", lib.desc_destroy);
  find(handle, "cublasLtMatrixLayoutCreate", lib.layout_create);
  find(handle, "cublasLtMatrixLayoutDestroy", lib.layout_destroy);
  find(handle, "cublasLtMatmulPreferenceCreate", lib.preference_create);
  find(handle, "cublasLtMatmulPreferenceSetAttribute", lib.preference_set);
  find(handle, "cublasLtMatmulPreferenceDestroy", lib.preference_destroy);
  find(handle, "cublasLtMatmulAlgoGetHeuristic", lib.heuristic);
  find(handle, "cublasLtMatmul", lib.matmul);
  find(handle, "cublasLtGetVersion", lib.version);
  return lib.version();
}

// What decides the algorithm: all but the pointers, whose alignment is in it.
enum Field { kDevice, kRowsA, kRowsB, kK, kTypeA, kTypeB, kTypeOut, kModeA, kModeB, kFast, kAdd, kFactor, kAlignA, kAlignB,
             kAlignOut, kWorkspace, kFields };
using Problem = std::array<int64_t, kFields>;

struct Prepared {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;
  cublasLtMatmulAlgo_t algo{};

  Prepared() = default;
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;
  ~Prepared() {
    if (desc) lib.desc_destroy(desc);
    for (auto layout : {a, b, out})
      if (layout) lib.layout_destroy(layout);
  }
};

std::string describe(const Problem& p) {
  std::string text;
  for (int i = 0; i < kFields; ++i) text += (i ? " " : "") + std::to_string(p[i]);
  return text;
}

void check(cublasStatus_t status, const char* what, const Problem& p) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string("cuBLASLt: ") + what + " returned status " + std::to_string(status) +
                             " for (device, rows_a, rows_b, k, types a b out, scale modes a b, fast, add, factor, "
                             "alignments a b out, workspace) = " + describe(p));
}

template <class T>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const T& value, const Problem& p) {
  check(lib.desc_set(desc, attribute, &value, sizeof value), "an attribute", p);
}

constexpr int64_t kNoScale = -1;

void set_scales(cublasLtMatmulDesc_t desc, const void* scale_a, const void* scale_b, const Problem& p) {
  if (p[kModeA] != kNoScale) set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scale_a, p);
  if (p[kModeB] != kNoScale) set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scale_b, p);
}

cublasLtHandle_t handle(const Problem& p) {
  static std::map<int64_t, cublasLtHandle_t> handles;
  auto& h = handles[p[kDevice]];
  if (!h) check(lib.create(&h), "creating a handle", p);
  return h;
}

void make_desc(cublasLtMatmulDesc_t& desc, const Problem& p) {
  check(lib.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a descriptor", p);
  set(desc, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T, p);
  set(desc, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N, p);
  if (p[kModeA] != kNoScale) set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<int32_t>(p[kModeA]), p);
  if (p[kModeB] != kNoScale) set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<int32_t>(p[kModeB]), p);
  if (p[kFast]) set(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(1), p);
  if (p[kFactor]) set(desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, static_cast<int32_t>(CUBLASLT_POINTER_MODE_DEVICE), p);
}

void prepare(Prepared& made, const Problem& p, const void* scale_a, const void* scale_b) {
  make_desc(made.desc, p);
  set_scales(made.desc, scale_a, scale_b, p);
  const auto type = [&](Field f) { return static_cast<cudaDataType_t>(p[f]); };
  check(lib.layout_create(&made.a, type(kTypeB), p[kK], p[kRowsB], p[kK]), "a layout", p);
  check(lib.layout_create(&made.b, type(kTypeA), p[kK], p[kRowsA], p[kK]), "a layout", p);
  check(lib.layout_create(&made.out, type(kTypeOut), p[kRowsB], p[kRowsA], p[kRowsB]), "a layout", p);
  cublasLtMatmulPreference_t preference;
  check(lib.preference_create(&preference), "a preference", p);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(lib.preference_set(preference, attribute, &value, sizeof value), "a preference", p);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(p[kWorkspace]));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(p[kAlignB]));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(p[kAlignA]));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(p[kAlignOut]));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(p[kAlignOut]));
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const auto status =
      lib.heuristic(handle(p), made.desc, made.a, made.b, made.out, made.out, preference, 1, &found, &count);
  lib.preference_destroy(preference);
  check(count ? status : CUBLAS_STATUS_NOT_SUPPORTED, "the search for an algorithm", p);
  made.algo = found.algo;
}

constexpr size_t kMostKnown = 4096;  // problems; sizes that follow the tokens of an expert would never end

const Prepared& prepared(const Problem& p, const void* scale_a, const void* scale_b) {
  static auto& known = *new std::map<Problem, std::unique_ptr<Prepared>>;  // outlives the library at exit
  auto it = known.find(p);
  if (it != known.end()) return *it->second;
  auto made = std::make_unique<Prepared>();
  prepare(*made, p, scale_a, scale_b);
  if (known.size() >= kMostKnown) known.clear();
  return *known.emplace(p, std::move(made)).first->second;
}

int64_t alignment(uintptr_t address) {
  const uintptr_t lowest = address & (~address + 1);
  return lowest == 0 || lowest > 256 ? 256 : static_cast<int64_t>(lowest);
}

std::mutex lock;  // over what is kept between calls: autograd's thread comes without the GIL

void run(const mh::MatmulArgs& c) {
  const auto aligned = [](const void* at) { return alignment(reinterpret_cast<uintptr_t>(at)); };
  const Problem p{c.device, c.rows_a, c.rows_b, c.k, c.type_a, c.type_b, c.type_out, c.mode_a, c.mode_b, c.fast, c.add,
                  c.factor != nullptr, aligned(c.a), aligned(c.b), aligned(c.out), c.workspace_bytes};
  const std::lock_guard<std::mutex> locked(lock);
  const Prepared& ready = prepared(p, c.scale_a, c.scale_b);
  set_scales(ready.desc, c.scale_a, c.scale_b, p);
  const float one = 1.0f, beta = c.add ? 1.0f : 0.0f;
  const void* alpha = c.factor ? c.factor : &one;
  const void* beta_at = c.factor ? c.constants + c.add : &beta;
  check(lib.matmul(handle(p), ready.desc, alpha, c.b, ready.a, c.a, ready.b, beta_at, c.out, ready.out, c.out, ready.out,
                   &ready.algo, c.workspace, static_cast<size_t>(c.workspace_bytes), reinterpret_cast<cudaStream_t>(c.stream)),
        "a product", p);
}

void matmul(uintptr_t a, uintptr_t b, uintptr_t out, int64_t rows_a, int64_t rows_b, int64_t k, int type_a, int type_b,
            int type_out, int mode_a, int mode_b, uintptr_t scale_a, uintptr_t scale_b, bool fast, bool add,
            uintptr_t factor, uintptr_t constants, uintptr_t workspace, int64_t workspace_bytes, uintptr_t stream,
            int device) {
  const auto pointer = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  const auto floats = [](uintptr_t address) { return reinterpret_cast<const float*>(address); };
  run({pointer(a), pointer(b), pointer(out), rows_a, rows_b, k, type_a, type_b, type_out, mode_a, mode_b, pointer(scale_a),
       pointer(scale_b), fast, add, floats(factor), floats(constants), pointer(workspace), workspace_bytes, stream, device});
}

}  // namespace

PYBIND11_MODULE(_C_lt, m) {
  m.doc() = "GEMMs of cuBLASLt; called through megatron_hybrid.gemm.cublaslt.";
  m.def("load", &load, py::arg("name"), "Find the library; its version.");
  m.def("matmul", &matmul, py::arg("a"), py::arg("b"), py::arg("out"), py::arg("rows_a"), py::arg("rows_b"), py::arg("k"),
        py::arg("type_a"), py::arg("type_b"), py::arg("type_out"), py::arg("mode_a"), py::arg("mode_b"), py::arg("scale_a"),
        py::arg("scale_b"), py::arg("fast"), py::arg("add"), py::arg("factor"), py::arg("constants"), py::arg("workspace"),
        py::arg("workspace_bytes"), py::arg("stream"), py::arg("device"));
  static const mh::Matmul table{&run};
  m.attr("INTERFACE") = mh::kInterface;
  m.attr("MATMUL") = py::capsule(&table, mh::kMatmulCapsule);
  m.attr("TYPES") = py::dict(py::arg("e4m3") = static_cast<int>(CUDA_R_8F_E4M3), py::arg("e5m2") = static_cast<int>(CUDA_R_8F_E5M2),
                             py::arg("bf16") = static_cast<int>(CUDA_R_16BF), py::arg("fp32") = static_cast<int>(CUDA_R_32F));
  m.attr("MODES") = py::dict(py::arg("none") = static_cast<int>(kNoScale),
                             py::arg("tensor") = static_cast<int>(CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F),
                             py::arg("row") = static_cast<int>(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F),
                             py::arg("block") = static_cast<int>(CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F),
                             py::arg("tile") = static_cast<int>(CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F));
}
