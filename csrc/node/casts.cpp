#include "casts.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace mh::node {
namespace {

int64_t num_panels(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// One direction of a cast: memory for it, and what the kernels are told. temporary: room for an amax that is not kept.
QuantizeArgs arguments(const Matrix& x, Payload& out, const State& state, const Tensor& known, const Tensor& words,
                       uint8_t* temporary, int32_t* scratch) {
  const Side& side = *out.side;
  float *amax = nullptr, *measured = nullptr;
  if (side.stateful) {
    amax = state.scale.data_ptr<float>();
    measured = state.history.defined() ? state.history.data_ptr<float>() : nullptr;
  } else if (known.defined()) {
    amax = known.data_ptr<float>();
  } else if (side.measures()) {
    amax = measured = side.keeps_amax() ? out.outer() : reinterpret_cast<float*>(temporary);
  }
  const int64_t* rng = side.spec.sr && words.defined() ? words.data_ptr<int64_t>() : nullptr;
  const mh::Payload to{out.codes(), side.transposed, out.scale(), amax};
  return {side.spec, x, to, side.stateful, rng, nullptr, nullptr, measured, measured ? scratch : nullptr};
}

Payload unwritten(const Side& side, const Tensor& x, const Tensor& known) {
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
  if (side.keeps_amax()) p.memory[2] = known;
  p.memory[0] = bytes_beside(x, side.keeps_amax() && !known.defined() ? p.outer_at + p.amaxes() * 4 : end);
  return p;
}

// x (M, K) as a rowwise payload has it, in the dtype that was cast.
Tensor decoded(const Plan& plan, const Payload& row) {
  const Tensor out = at::empty({row.m, row.k}, row.options(row.dtype));
  if (!out.numel()) return out;
  const Matrix matrix{out.data_ptr(), dtype_code(row.dtype), row.m, row.k, row.k, 1};
  OperandsArgs args{};
  args.operands[0] = {row.side->spec, {row.codes(), row.side->transposed, row.scale(), row.outer()}, matrix, true, true};
  args.has[0] = true;
  plan.casts->decode_operands(args, where(out.device()));
  return out;
}

// Whether one call casts a row and the column of its decode: `derives_in_one_call` of storage.py.
bool in_one_call(const Side& column, const Tensor& x, const Tensor& known) {
  return x.is_cuda() && column.quantized && (!column.measures() || column.stateful || known.defined());
}

Pair cast_at_once(const Plan& plan, Operand operand, const Tensor& given, const std::array<bool, 2>& wanted, const Keys& keys,
                  const Tensor& sums, const Amaxes& known, bool derived) {
  const Tensor x = in_memory(given);
  Pair made;
  int64_t needed[3] = {};  // bytes that live until the cast has run: amaxes of both directions, working memory of the row's
  bool casts = sums.defined();
  for (int d = 0; d < 2; ++d) {
    if (!wanted[d]) continue;
    const Side& side = plan.sides[operand][d];
    made[d] = unwritten(side, x, known[d]);
    if (!side.quantized) continue;
    casts = true;
    const bool measures = side.measures() && !side.stateful && !known[d].defined();
    if (measures && !side.keeps_amax()) needed[d] = aligned(made[d].amaxes() * 4);
    if (measures && d == 0 && side.spec.outer_rows && x.is_cuda()) needed[2] = num_panels(x.size(0)) * 4;
  }
  if (!casts) return made;
  Tensor memory;
  if (const int64_t bytes = needed[0] + needed[1] + needed[2]; bytes) memory = bytes_beside(x, bytes);
  uint8_t* temporary = memory.defined() ? static_cast<uint8_t*>(memory.data_ptr()) : nullptr;
  PairArgs args{};
  args.derived = derived;
  args.sums = sums.defined() ? sums.data_ptr<float>() : nullptr;
  args.row.x = Matrix{x.data_ptr(), dtype_code(x.scalar_type()), x.size(0), x.size(1), x.stride(0), x.stride(1)};
  const Matrix matrix = args.row.x;
  for (int d = 0; d < 2; ++d) {
    if (!wanted[d] || !made[d].side->quantized) continue;
    auto* scratch = d == 0 && needed[2] ? reinterpret_cast<int32_t*>(temporary + needed[0] + needed[1]) : nullptr;
    uint8_t* own = temporary + (d ? needed[0] : 0);
    const State& state = keys.states[operand][d];
    (d ? args.col : args.row) = arguments(matrix, made[d], state, known[d], keys.words[operand], own, scratch);
    (d ? args.has_col : args.has_row) = true;
  }
  plan.casts->quantize(args, where(x.device()));
  return made;
}

}  // namespace

Tensor bytes_beside(const Tensor& x, int64_t size) {
  return at::empty({size}, x.options().dtype(ScalarType::Byte).requires_grad(false));
}

Tensor as_matrix(const Tensor& x) {
  if (x.dim() == 2) return x;
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return x.reshape({rows, x.size(-1)});
}

Tensor in_memory(const Tensor& x) { return x.is_neg() ? x.resolve_neg() : x; }

Where where(const at::Device& device) {
  if (device.is_cpu()) return {0, at::get_num_threads()};
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return {reinterpret_cast<uintptr_t>(stream.native_handle()), device.index()};
}

Tensor sum_parts(const Tensor& x) {
  return at::empty({num_panels(x.size(0)), x.size(1)}, x.options().dtype(ScalarType::Float).requires_grad(false));
}

Payload derive(const Plan& plan, Operand operand, const Payload& row, const Keys& keys) {
  return cast_at_once(plan, operand, decoded(plan, row), {false, true}, keys, {}, {}, false)[1];
}

Pair cast(const Plan& plan, Operand operand, const Tensor& x, bool rowwise, bool columnwise, const Keys& keys,
          const Tensor& sums, const Amaxes& known) {
  if (!columnwise || !plan.derives[operand])
    return cast_at_once(plan, operand, x, {rowwise, columnwise}, keys, sums, known, false);
  const bool together = in_one_call(plan.sides[operand][1], x, known[1]);
  Pair made = cast_at_once(plan, operand, x, {true, together}, keys, sums, known, together);
  if (!together) made[1] = derive(plan, operand, made[0], keys);
  if (!rowwise) made[0] = {};
  return made;
}

}  // namespace mh::node
