// Python bindings of one backend: argument checks, nothing else. Built twice, as megatron_hybrid._C (CPU) and
// megatron_hybrid._C_cuda; both export the same functions.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "backend.h"
#include "cpu/dispatch.h"
#include "interface.h"

namespace py = pybind11;
namespace backend = mh::MH_BACKEND;
using mh::Dtype;
using mh::Element;
using mh::FormatSpec;
using mh::ScaleRule;
using mh::Where;

namespace {

#if defined(MH_IS_CUDA)
constexpr const char* kWhereArg = "device";
constexpr bool kIsCuda = true;
constexpr auto kGroupAmax = &backend::group_amax;
#else
constexpr const char* kWhereArg = "threads";
constexpr bool kIsCuda = false;
constexpr decltype(mh::Casts::group_amax) kGroupAmax = nullptr;
#endif

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void check(bool ok, const std::string& message) {
  if (!ok) throw py::value_error(message);
}

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  check(value >= low && value <= high, std::string(name) + "=" + std::to_string(value) + " must be in [" +
                                           std::to_string(low) + ", " + std::to_string(high) + "]");
}

void check_pointer(const char* name, uintptr_t address, int64_t elements) {
  check(address || elements == 0,
        std::string(name) + " is a null pointer, but the call needs " + std::to_string(elements) + " elements there");
}

std::string block_text(int block_m, int block_k) { return std::to_string(block_m) + " x " + std::to_string(block_k); }

// Side of the blocks that come with a scale rule, where blocks have a side at all.
int block_side(ScaleRule rule) { return rule == ScaleRule::fp32 ? 128 : rule == ScaleRule::e8m0 ? 32 : 16; }

// Scale blocks the kernels know: the whole tensor, a row or column, 1 x b, b x 1, b x b.
void check_block(const FormatSpec& s) {
  const int m = s.block_m, k = s.block_k;
  const int side = m > k ? m : k;
  const bool along = s.axis == 0 ? m == 1 : k == 1;
  const bool preset = s.scale_rule == ScaleRule::fp32 && ((m == 0 && k == 0) || (along && m * k == 0 && m + k == 1));
  const bool sized = side == block_side(s.scale_rule);
  const bool tiled = sized && ((m == side && k == side) || (along && m * k == side));
  check(preset || tiled, "block_m x block_k = " + block_text(m, k) + " is not supported for axis=" +
                             std::to_string(s.axis) + "; supported: 0 x 0, one row or column (1 x 0, 0 x 1; FP32 scales), " +
                             "b along the axis or b x b, b being 128 for FP32 scales, 32 for E8M0, 16 for E4M3");
  const bool whole_rows = preset && m + k == 1;
  const bool outer_rows_fit = s.outer_rows ? whole_rows || (s.scale_rule == ScaleRule::e4m3_amax && along) : !whole_rows;
  check(outer_rows_fit, "outer_rows does not fit block_m x block_k = " + block_text(m, k));
}

FormatSpec make_spec(int element, int scale_rule, int axis, int block_m, int block_k, bool pow2, double eps,
                     bool outer_rows, bool rht, bool sr) {
  check_range("element", element, 0, 2);
  check_range("scale_rule", scale_rule, 1, 3);
  check_range("axis", axis, 0, 1);
  check_range("block_m", block_m, 0, 128);
  check_range("block_k", block_k, 0, 128);
  check(eps >= 0.0, "eps=" + std::to_string(eps) + " must not be negative");
  const FormatSpec s{static_cast<Element>(element), static_cast<ScaleRule>(scale_rule), axis, block_m, block_k, pow2,
                     static_cast<float>(eps), outer_rows, rht, sr};
  const bool fp4 = s.element == Element::e2m1;
  check(fp4 == (s.scale_rule == ScaleRule::e4m3_amax), "element e2m1 and scale_rule e4m3_amax go together only");
  check(fp4 || (!rht && !sr), "rht and sr are for element e2m1 only");
  check(!rht || block_m * block_k == 16, "rht needs blocks of 16 along the contraction axis");
  check_block(s);
  return s;
}

mh::Matrix matrix(const char* name, uintptr_t data, int dtype, int64_t m, int64_t k, int64_t stride_m, int64_t stride_k) {
  check_range("dtype", dtype, 0, 2);
  check(m >= 0, "M=" + std::to_string(m) + " must not be negative");
  check(k >= 0, "K=" + std::to_string(k) + " must not be negative");
  check(stride_m >= 0 && stride_k >= 0, std::string(name) + ": strides must not be negative");
  check_pointer(name, data, m * k);
  return mh::Matrix{pointer<void>(data), static_cast<Dtype>(dtype), m, k, stride_m, stride_k};
}

Where where(uintptr_t stream, int threads_or_device) {
  check_range(kWhereArg, threads_or_device, kIsCuda ? 0 : 1, 1 << 20);
  return Where{stream, threads_or_device};
}

template <class F>
void run(F&& call) {
#if defined(MH_IS_CUDA)
  call();  // only enqueues
#else
  py::gil_scoped_release unlocked;
  call();
#endif
}

void amax(const FormatSpec& spec, uintptr_t data, int dtype, int64_t m, int64_t k, int64_t stride_m, int64_t stride_k,
          uintptr_t out, uintptr_t stream, int threads_or_device) {
  const int64_t n = mh::num_amaxes(spec, m, k);
  check(n > 0 || spec.outer_rows, "amax: this format has no outer amax");
  const mh::AmaxArgs args{spec, matrix("data", data, dtype, m, k, stride_m, stride_k), pointer<float>(out)};
  check_pointer("out", out, n);
  const Where w = where(stream, threads_or_device);
  run([&] { backend::amax(args, w); });
}

mh::QuantizeArgs quantize_args(const FormatSpec& spec, const mh::Matrix& x, uintptr_t qdata, bool transposed,
                               uintptr_t scale, uintptr_t amax, bool fixed_scale, uintptr_t measured, uintptr_t scratch,
                               uintptr_t rng, uintptr_t row_ids, uintptr_t noop) {
  const int64_t m = x.rows, k = x.cols;
  check_pointer("qdata", qdata, m * k);
  check_pointer("scale", scale, mh::num_scales(spec, m, k));
  check_pointer("amax", amax, mh::num_amaxes(spec, m, k));
  check(!fixed_scale || (spec.scale_rule == ScaleRule::fp32 && mh::num_amaxes(spec, m, k) > 0),
        "fixed_scale is for FP32 scales of a tensor or row only");
  check(!measured || mh::num_amaxes(spec, m, k) > 0 || m * k == 0, "measured: this format has no outer amax");
  check_pointer("rng", rng, spec.sr ? mh::kRngFields : 0);
  return {spec,
          x,
          {pointer<uint8_t>(qdata), transposed, pointer<void>(scale), pointer<float>(amax)},
          fixed_scale,
          pointer<int64_t>(rng),
          pointer<int64_t>(row_ids),
          pointer<int32_t>(noop),
          pointer<float>(measured),
          pointer<int32_t>(scratch)};
}

void put_direction(mh::PairArgs& pair, const mh::QuantizeArgs& args) {
  (args.spec.axis == 0 ? pair.row : pair.col) = args;
  (args.spec.axis == 0 ? pair.has_row : pair.has_col) = true;
}

void quantize(const FormatSpec& spec, uintptr_t data, int dtype, int64_t m, int64_t k, int64_t stride_m, int64_t stride_k,
              uintptr_t qdata, bool transposed, uintptr_t scale, uintptr_t amax, bool fixed_scale, uintptr_t rng,
              uintptr_t row_ids, uintptr_t noop, uintptr_t stream, int threads_or_device) {
  const mh::Matrix x = matrix("data", data, dtype, m, k, stride_m, stride_k);
  mh::PairArgs pair{};
  put_direction(pair, quantize_args(spec, x, qdata, transposed, scale, amax, fixed_scale, 0, 0, rng, row_ids, noop));
  const Where w = where(stream, threads_or_device);
  run([&] { backend::quantize(pair, w); });
}

// (ends, blocks, number of groups, of blocks, of rows, choice, parts); see format.h.
mh::Groups groups_of(const py::tuple& t) {
  check(t.size() == 7, "groups: (ends, blocks, number of groups, of blocks, of rows, choice, parts)");
  const auto number = [&](int i) { return t[i].cast<int64_t>(); };
  const auto words = [&](int i) { return pointer<int32_t>(t[i].cast<uintptr_t>()); };
  const mh::Groups g{words(0), words(1), number(2), number(3), number(4), words(5), number(6)};
  check(kIsCuda && g.groups > 0 && g.ends && g.parts > 0, "groups: on CUDA only, and one at least");
  return g;
}

// None, or (data, dtype, places, dots); see format.h.
mh::RowWeights weights_of(const py::object& weights) {
  if (weights.is_none()) return {};
  const auto t = weights.cast<py::tuple>();
  check(t.size() == 4, "weights: (data, dtype, places, dots)");
  const auto address = [&](int i) { return t[i].cast<uintptr_t>(); };
  const auto dtype = static_cast<mh::Dtype>(t[1].cast<int>());
  return {pointer<void>(address(0)), dtype, pointer<int32_t>(address(2)), pointer<float>(address(3))};
}

void put_groups(mh::PairArgs& pair, const py::object& groups) {
  pair.groups = groups_of(groups.cast<py::tuple>());
  const auto fits = [](const mh::QuantizeArgs& a) {
    const FormatSpec& s = a.spec;
    return s.scale_rule == ScaleRule::fp32 && !a.fixed_scale && !a.measured && !a.noop &&
           (s.outer_rows || s.block_m * s.block_k == mh::kPanelRows);
  };
  check(pair.has_col && fits(pair.col) && pair.col.out.transposed && (!pair.has_row || (fits(pair.row) && !pair.row.out.transposed)),
        "groups: columns transposed, rows not, with FP32 scales of whole rows or columns, whose amaxes are known, or of 128");
  check(!pair.derived && !pair.sums, "groups: without derived columns and sums");
}

// `row` and `col` are None or (spec, qdata, transposed, scale, amax, fixed_scale, measured, scratch).
void quantize_pair(const py::object& row, const py::object& col, uintptr_t data, int dtype, int64_t m, int64_t k,
                   int64_t stride_m, int64_t stride_k, bool derived, uintptr_t sums, uintptr_t gate, uintptr_t rng,
                   uintptr_t row_ids, uintptr_t noop, uintptr_t stream, int threads_or_device, uintptr_t grad,
                   int64_t grad_stride, const py::object& groups, const py::object& weights, bool any_strips) {
  const mh::Matrix x = matrix("data", data, dtype, m, k, stride_m, stride_k);
  mh::PairArgs pair{};
  pair.row.x = x;
  pair.sums = pointer<float>(sums);
  pair.gate = pointer<void>(gate);
  pair.grad = pointer<void>(grad);
  pair.grad_stride = grad_stride;
  pair.any_strips = any_strips;
  int axis = 0;
  for (const py::object* side : {&row, &col}) {
    if (!side->is_none()) {
      const auto t = side->cast<py::tuple>();
      check(t.size() == 8, "a direction is (spec, qdata, transposed, scale, amax, fixed_scale, measured, scratch)");
      const auto& spec = t[0].cast<const FormatSpec&>();
      check(spec.axis == axis, axis ? "col: the spec has axis=0" : "row: the spec has axis=1");
      const auto address = [&](int i) { return t[i].cast<uintptr_t>(); };
      put_direction(pair, quantize_args(spec, x, address(1), t[2].cast<bool>(), address(3), address(4), t[5].cast<bool>(),
                                        address(6), address(7), rng, row_ids, noop));
    }
    ++axis;
  }
  pair.derived = derived;
  check(pair.has_row || pair.has_col || sums || m == 0, "quantize_pair: neither direction is given, and no sums");
  check(!sums || (kIsCuda && !(pair.has_row && pair.row.out.transposed)),
        "sums: on CUDA only, and not with a row payload that is transposed");
  check(!derived || (kIsCuda && pair.has_row && pair.has_col && !pair.row.out.transposed),
        "derived: on CUDA only, with both directions and a row payload that is not transposed");
  check(!derived || !pair.col.measured || pair.col.fixed_scale, "derived: the column's amax cannot be measured before the cast");
  const bool measures = (pair.row.measured && !pair.row.fixed_scale) || (pair.col.measured && !pair.col.fixed_scale);
  check(!gate || (kIsCuda && !measures), "gate: on CUDA only, and no amax can be measured before the cast");
  check(!grad || (kIsCuda && !measures && !gate && k % 2 == 0 && !(pair.has_row && pair.row.out.transposed)),
        "grad: on CUDA only, with an even number of columns, without gate, not with a row payload that is transposed, and no "
        "amax can be measured before the cast");
  if (!groups.is_none()) put_groups(pair, groups);
  pair.weights = weights_of(weights);
  check(weights.is_none() || (!groups.is_none() && (gate || grad)),
        "weights: of rows of groups that gate or grad computes");
  const Where w = where(stream, threads_or_device);
  run([&] { backend::quantize(pair, w); });
}

#if defined(MH_IS_CUDA)
void group_amax(uintptr_t data, int dtype, int64_t m, int64_t k, int64_t stride_m, int64_t stride_k, const py::tuple& groups,
                uintptr_t of_columns, uintptr_t of_rows, uintptr_t stream, int device, uintptr_t gate, uintptr_t grad,
                int64_t grad_stride, const py::object& weights) {
  mh::GroupAmaxArgs args{{}, pointer<int32_t>(of_columns), pointer<int32_t>(of_rows)};
  args.cast.col.x = matrix("data", data, dtype, m, k, stride_m, stride_k);
  args.cast.gate = pointer<void>(gate);
  args.cast.grad = pointer<void>(grad);
  args.cast.grad_stride = grad_stride;
  args.cast.groups = groups_of(groups);
  args.cast.weights = weights_of(weights);
  check_pointer("of_columns", of_columns, k);
  backend::group_amax(args, where(stream, device));
}

void group_map(uintptr_t sizes, bool wide, int64_t groups, int64_t count, uintptr_t ends, uintptr_t blocks, uintptr_t stream,
               int device) {
  check(groups >= 0 && count >= 0, "group_map: groups and count must not be negative");
  check_pointer("sizes", sizes, groups);
  check_pointer("ends", ends, groups);
  check_pointer("blocks", blocks, count);
  backend::group_map({pointer<void>(sizes), wide, groups, count, pointer<int32_t>(ends), pointer<int32_t>(blocks)},
                     where(stream, device));
}
#endif

mh::DequantizeArgs dequantize_args(const FormatSpec& spec, uintptr_t qdata, bool transposed, uintptr_t scale,
                                   uintptr_t amax, uintptr_t out, int dtype, int64_t m, int64_t k, int64_t stride_m,
                                   int64_t stride_k, bool outer, bool inverse_rht) {
  const mh::DequantizeArgs args{spec,
                                {pointer<uint8_t>(qdata), transposed, pointer<void>(scale), pointer<float>(amax)},
                                matrix("out", out, dtype, m, k, stride_m, stride_k),
                                outer,
                                inverse_rht};
  check_pointer("qdata", qdata, m * k);
  check_pointer("scale", scale, mh::num_scales(spec, m, k));
  const bool reads_amax = outer && spec.scale_rule == ScaleRule::e4m3_amax && m * k > 0;
  check_pointer("amax", amax, reads_amax ? mh::num_amaxes(spec, m, k) : 0);
  return args;
}

void dequantize(const FormatSpec& spec, uintptr_t qdata, bool transposed, uintptr_t scale, uintptr_t amax,
                uintptr_t out, int dtype, int64_t m, int64_t k, int64_t stride_m, int64_t stride_k, bool outer,
                bool inverse_rht, uintptr_t stream, int threads_or_device) {
  const mh::DequantizeArgs args =
      dequantize_args(spec, qdata, transposed, scale, amax, out, dtype, m, k, stride_m, stride_k, outer, inverse_rht);
  const Where w = where(stream, threads_or_device);
  if (m * k == 0) return;
  run([&] { backend::dequantize(args, w); });
}

// (spec, qdata, transposed, scale, amax, out, dtype, M, K, stride_m, stride_k, outer, inverse_rht).
mh::DequantizeArgs operand_of(const py::tuple& t) {
  check(t.size() == 13, "an operand is what dequantize takes, in its order, but for where it runs");
  const auto address = [&](int i) { return t[i].cast<uintptr_t>(); };
  const auto number = [&](int i) { return t[i].cast<int64_t>(); };
  return dequantize_args(t[0].cast<const FormatSpec&>(), address(1), t[2].cast<bool>(), address(3), address(4),
                         address(5), t[6].cast<int>(), number(7), number(8), number(9), number(10), t[11].cast<bool>(),
                         t[12].cast<bool>());
}

// `a` and `b` are None or an operand.
void decode_operands(const py::object& a, const py::object& b, uintptr_t factor, uintptr_t stream,
                     int threads_or_device) {
  mh::OperandsArgs args{};
  args.factor = pointer<float>(factor);
  const py::object* given[] = {&a, &b};
  for (int i = 0; i < 2; ++i) {
    if (given[i]->is_none()) continue;
    args.operands[i] = operand_of(given[i]->cast<py::tuple>());
    args.has[i] = true;
    const mh::DequantizeArgs& operand = args.operands[i];
    const int64_t amaxes = mh::num_amaxes(operand.spec, operand.out.rows, operand.out.cols);
    check(!factor || !operand.in.amax || (operand.spec.scale_rule == ScaleRule::e4m3_amax && amaxes == 1),
          "factor: of operands with one amax of NVFP4, or none");
  }
  const Where w = where(stream, threads_or_device);
  run([&] { backend::decode_operands(args, w); });
}

void outer_scale(uintptr_t amax, uintptr_t out, int64_t n, uintptr_t stream, int threads_or_device) {
  check(n >= 0, "n=" + std::to_string(n) + " must not be negative");
  check_pointer("amax", amax, n);
  check_pointer("out", out, n);
  const Where w = where(stream, threads_or_device);
  if (n == 0) return;
  run([&] { backend::outer_scale(pointer<float>(amax), pointer<float>(out), n, w); });
}

void bind_spec(py::module_& m) {
  // module_local: both extensions may live in one process
  py::class_<FormatSpec>(m, "FormatSpec", py::module_local(), "One direction of a format; see csrc/numerics/format.h.")
      .def(py::init(&make_spec), py::kw_only(), py::arg("element"), py::arg("scale_rule"), py::arg("axis"),
           py::arg("block_m"), py::arg("block_k"), py::arg("pow2") = false, py::arg("eps") = 0.0,
           py::arg("outer_rows") = false, py::arg("rht") = false, py::arg("sr") = false)
      .def_property_readonly("element", [](const FormatSpec& s) { return static_cast<int>(s.element); })
      .def_property_readonly("scale_rule", [](const FormatSpec& s) { return static_cast<int>(s.scale_rule); })
      .def_readonly("axis", &FormatSpec::axis)
      .def_readonly("block_m", &FormatSpec::block_m)
      .def_readonly("block_k", &FormatSpec::block_k)
      .def_readonly("pow2", &FormatSpec::pow2)
      .def_readonly("eps", &FormatSpec::eps)
      .def_readonly("outer_rows", &FormatSpec::outer_rows)
      .def_readonly("rht", &FormatSpec::rht)
      .def_readonly("sr", &FormatSpec::sr);
}

}  // namespace

PYBIND11_MODULE(MH_MODULE, m) {
  m.doc() = "Casts between high precision and quantized formats; called through megatron_hybrid.kernels.";
  bind_spec(m);
  m.def("amax", &amax, py::arg("spec"), py::arg("data"), py::arg("dtype"), py::arg("M"), py::arg("K"),
        py::arg("stride_m"), py::arg("stride_k"), py::arg("out"), py::arg("stream"), py::arg(kWhereArg));
  m.def("quantize", &quantize, py::arg("spec"), py::arg("data"), py::arg("dtype"), py::arg("M"), py::arg("K"),
        py::arg("stride_m"), py::arg("stride_k"), py::arg("qdata"), py::arg("transposed"), py::arg("scale"),
        py::arg("amax"), py::arg("fixed_scale"), py::arg("rng"), py::arg("row_ids"), py::arg("noop"), py::arg("stream"),
        py::arg(kWhereArg));
  m.attr("PANEL_ROWS") = mh::kPanelRows;
  static const mh::Casts casts{&backend::amax, &backend::quantize, &backend::decode_operands, &backend::outer_scale,
                               kGroupAmax};
  m.attr("INTERFACE") = mh::kInterface;
  m.attr("CASTS") = py::capsule(&casts, mh::kCastsCapsule);
  m.def("quantize_pair", &quantize_pair, py::arg("row"), py::arg("col"), py::arg("data"), py::arg("dtype"), py::arg("M"),
        py::arg("K"), py::arg("stride_m"), py::arg("stride_k"), py::arg("derived"), py::arg("sums"), py::arg("gate"),
        py::arg("rng"), py::arg("row_ids"), py::arg("noop"), py::arg("stream"), py::arg(kWhereArg), py::arg("grad") = 0,
        py::arg("grad_stride") = 0, py::arg("groups") = py::none(), py::arg("weights") = py::none(),
        py::arg("any_strips") = false);
  m.def("dequantize", &dequantize, py::arg("spec"), py::arg("qdata"), py::arg("transposed"), py::arg("scale"),
        py::arg("amax"), py::arg("out"), py::arg("dtype"), py::arg("M"), py::arg("K"), py::arg("stride_m"),
        py::arg("stride_k"), py::arg("outer"), py::arg("inverse_rht"), py::arg("stream"), py::arg(kWhereArg));
  m.def("decode_operands", &decode_operands, py::arg("a"), py::arg("b"), py::arg("factor"), py::arg("stream"),
        py::arg(kWhereArg));
  m.def("outer_scale", &outer_scale, py::arg("amax"), py::arg("out"), py::arg("n"), py::arg("stream"), py::arg(kWhereArg));
#if defined(MH_IS_CUDA)
  m.def("group_amax", &group_amax, py::arg("data"), py::arg("dtype"), py::arg("M"), py::arg("K"), py::arg("stride_m"),
        py::arg("stride_k"), py::arg("groups"), py::arg("of_columns"), py::arg("of_rows"), py::arg("stream"),
        py::arg(kWhereArg), py::arg("gate") = 0, py::arg("grad") = 0, py::arg("grad_stride") = 0,
        py::arg("weights") = py::none());
  m.def("group_map", &group_map, py::arg("sizes"), py::arg("wide"), py::arg("groups"), py::arg("count"), py::arg("ends"),
        py::arg("blocks"), py::arg("stream"), py::arg(kWhereArg));
#endif
#if !defined(MH_IS_CUDA)
  m.def("isa", &mh::cpu::isa, "Instruction set in use.");
  m.def("isas", &mh::cpu::isas, "Instruction sets this processor runs.");
  m.def("set_isa", &mh::cpu::set_isa, py::arg("name"), "Use another instruction set: same bytes, another speed.");
#endif
#if defined(MH_CUDA_ARCHS)
  m.attr("archs") = MH_CUDA_ARCHS;  // what setup.py compiled for
#endif
}
