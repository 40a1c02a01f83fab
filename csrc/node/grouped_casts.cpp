#include "grouped_casts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace mh::node {
namespace {

constexpr int64_t kAlign = 16;  // bytes at which operands and results of the products begin

Tensor as_rows(const Tensor& x) { return x.stride(1) == 1 ? x : x.contiguous(); }

int32_t* words(const Tensor& t) { return t.data_ptr<int32_t>(); }

Groups kernel_groups(const RowGroups& groups, const Copies* copies) {
  return {words(groups.ends), words(groups.blocks), groups.ends.size(0), groups.count(), groups.rows,
          copies ? words(copies->choice) : nullptr, copies ? copies->parts : 1};
}

QuantizeArgs direction(const Side& side, const Matrix& x, const Coded& out, const float* amax, bool transposed) {
  QuantizeArgs args{};
  args.spec = side.spec, args.x = x;
  args.out = {out.code_data(), transposed, out.scale_data(), amax};
  return args;
}

// `GroupCast`: columns, and rows beside them, in one read of x; in two where scales are of whole rows or columns.
// computed: null, or what the rows are computed from; then payloads are apart.
CodedPair cast_in_one_read(const GroupedPlan& plan, Operand operand, const Tensor& given, bool by_rows,
                           const RowGroups& groups, const Copies* copies, const Computed* computed = nullptr) {
  const Tensor x = in_memory(given);
  const Side &row = plan.side(operand, 0), &column = plan.side(operand, 1);
  const bool whole_rows = by_rows && row.spec.outer_rows, whole_columns = column.spec.outer_rows;
  const int64_t T = groups.rows, K = x.size(1), E = groups.ends.size(0);
  const Matrix matrix{x.data_ptr(), dtype_code(x.scalar_type()), x.size(0), K, x.stride(0), x.stride(1)};
  const Where at = where(x.device());
  PairArgs args{};
  args.row.x = args.col.x = matrix, args.groups = kernel_groups(groups, copies);
  if (computed) {
    args.gate = computed->gate, args.grad = computed->grad, args.grad_stride = computed->grad_stride;
    args.weights = computed->weights;
  }
  const auto unwritten = computed ? &Coded::apart : &Coded::empty;
  Tensor amaxes;
  float *of_columns = nullptr, *of_rows = nullptr;
  if (whole_rows || whole_columns) {
    amaxes = at::zeros({E * K + (whole_rows ? T : 0)}, x.options().dtype(ScalarType::Float).requires_grad(false));
    of_columns = amaxes.data_ptr<float>(), of_rows = whole_rows ? of_columns + E * K : nullptr;
    const GroupAmaxArgs looked{args, reinterpret_cast<int32_t*>(of_columns), reinterpret_cast<int32_t*>(of_rows)};
    plan.expert->casts->group_amax(looked, at);
  }
  CodedPair made;
  if (by_rows) {
    made[0] = unwritten(x, T, K, T, whole_rows ? 1 : num_blocks(K, kPanelRows));
    args.row = direction(row, matrix, made[0], of_rows, false), args.has_row = true;
  }
  made[1] = unwritten(x, K, groups.count() * kPanelRows, whole_columns ? E : groups.count(), K);
  args.col = direction(column, matrix, made[1], whole_columns ? of_columns : nullptr, true), args.has_col = true;
  plan.expert->casts->quantize(args, at);
  return made;
}

// A rowwise payload of x, as one of its copies where they are more: `copied_rows`.
Coded cast_rows(const GroupedPlan& plan, Operand operand, const Tensor& x, const Copies* copies) {
  const Payload p = cast(*plan.expert, operand, x, true, false, {})[0];
  Coded row{p.memory[0], {}, p.m, p.k, p.m, num_blocks(p.k, p.side->spec.block_k), p.scale_at};
  if (!copies) return row;
  const auto [codes, scale] = row.tensors();
  py::gil_scoped_acquire gil;
  const py::tuple expanded = held(copies->map).attr("expand_both")(wrap(codes), wrap(scale));
  return Coded::of(unwrap(expanded[0]), unwrap(expanded[1]));
}

gemm::Out out_of(ScalarType dtype) {
  if (dtype == ScalarType::BFloat16) return gemm::Out::bf16;
  return dtype == ScalarType::Half ? gemm::Out::fp16 : gemm::Out::fp32;
}

gemm::GroupedArgs arguments(const GroupedProduct& how, const Coded& a, const Coded& b, const RowGroups& groups,
                            const Tensor& out, int64_t rows_a, bool add) {
  gemm::GroupedArgs args{};
  args.a = a.code_data(), args.b = b.code_data(), args.a_scale = a.scale_data(), args.b_scale = b.scale_data();
  args.out = out.data_ptr(), args.ends = words(groups.ends), args.blocks = words(groups.blocks);
  args.groups = groups.ends.size(0), args.count = groups.count();
  args.rows_a = rows_a, args.n = out.size(-1), args.k = a.columns;
  args.kind = how.kind, args.out_type = out_of(out.scalar_type());
  args.a_e5m2 = how.e5m2[0], args.b_e5m2 = how.e5m2[1], args.add = add;
  return args;
}

}  // namespace

Coded Coded::of(const Tensor& codes, const Tensor& scale) {
  const Tensor packed = codes.contiguous(), scales = scale.contiguous();
  return {packed, scales, packed.size(0), packed.size(1), scales.size(0), scales.size(1), 0};
}

Coded Coded::empty(const Tensor& x, int64_t rows, int64_t columns, int64_t scale_rows, int64_t scale_columns) {
  const int64_t scale_at = aligned(rows * columns);
  const int64_t bytes = scale_at + scale_rows * scale_columns * static_cast<int64_t>(sizeof(float));
  return {bytes_beside(x, bytes), {}, rows, columns, scale_rows, scale_columns, scale_at};
}

Coded Coded::apart(const Tensor& x, int64_t rows, int64_t columns, int64_t scale_rows, int64_t scale_columns) {
  const auto options = x.options().requires_grad(false);
  return {at::empty({rows, columns}, options.dtype(ScalarType::Byte)),
          at::empty({scale_rows, scale_columns}, options.dtype(ScalarType::Float)),
          rows, columns, scale_rows, scale_columns, 0};
}

std::array<Tensor, 2> Coded::tensors() const {
  if (scale.defined()) return {codes, scale};
  const Tensor scales = codes.narrow(0, scale_at, scale_rows * scale_columns * static_cast<int64_t>(sizeof(float)));
  return {codes.narrow(0, 0, rows * columns).view({rows, columns}),
          scales.view(ScalarType::Float).view({scale_rows, scale_columns})};
}

CodedPair cast_groups(const GroupedPlan& plan, Operand operand, const Tensor& x, bool by_rows, bool by_columns,
                      const RowGroups& groups, const Copies* copies) {
  // codes of a token are rather copied than cast for each of its experts, unless its amax is found on the way
  const bool copied = copies && copies->rows() > x.size(0);
  const bool together = by_rows && by_columns && !(copied && !plan.side(operand, 0).measures());
  if (together) return cast_in_one_read(plan, operand, as_rows(x), true, groups, copies);
  CodedPair made;
  if (by_rows) made[0] = cast_rows(plan, operand, x, copies);
  if (by_columns) made[1] = cast_in_one_read(plan, operand, as_rows(x), false, groups, copies)[1];
  return made;
}

CodedPair cast_computed(const GroupedPlan& plan, Operand operand, const Tensor& x, const RowGroups& groups,
                        const Computed& computed) {
  return cast_in_one_read(plan, operand, as_rows(x), true, groups, nullptr, &computed);
}

Tensor multiply_rows(const GroupedPlan& plan, Gemm gemm, const Coded& a, const Coded& b, const RowGroups& groups,
                     ScalarType dtype) {
  const Tensor out = at::empty({a.rows, b.rows / plan.experts}, a.codes.options().dtype(dtype).requires_grad(false));
  plan.gemms->rows(arguments(plan.products[gemm], a, b, groups, out, a.rows, false), where(out.device()));
  return out;
}

void multiply_columns(const GroupedPlan& plan, const Coded& a, const Coded& b, const RowGroups& groups,
                      const Tensor& out, bool add) {
  plan.gemms->columns(arguments(plan.products[kWgrad], a, b, groups, out, a.rows, add), where(out.device()));
}

bool begins_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % kAlign == 0; }

}  // namespace mh::node
