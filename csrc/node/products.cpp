#include "products.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "casts.h"
#include "python.h"

namespace mh::node {
namespace {

// ---- torch's GEMMs: gemm/backends.py's functions of these names

Tensor finish(const Tensor& out, ScalarType dtype, const Tensor& total) {
  if (!total.defined()) return out.to(dtype);
  Tensor sum = total;
  return sum.add_(out);
}

bool low_precision(const Tensor& a, const Tensor& b) {
  return a.is_cuda() && a.scalar_type() == b.scalar_type() && a.scalar_type() != ScalarType::Float;
}

Tensor mm_fp32(const Tensor& a, const Tensor& b) {
  if (low_precision(a, b)) return at::mm(a, b.t(), ScalarType::Float);
  return at::mm(a.to(ScalarType::Float), b.to(ScalarType::Float).t());
}

Tensor mm_into(const Tensor& a, const Tensor& b, ScalarType dtype, const Tensor& total) {
  if (low_precision(a, b)) {
    if (total.defined() && total.scalar_type() == ScalarType::Float) {
      Tensor sum = total;
      return at::addmm_out(sum, total, a, b.t(), ScalarType::Float);
    }
    if (!total.defined() && dtype == a.scalar_type()) return at::mm(a, b.t());
  }
  return finish(mm_fp32(a, b), dtype, total);
}

Tensor high_precision(const Payload& p) { return p.side->spec.axis == 0 ? p.memory[0] : p.memory[0].t(); }

Tensor multiply_high_precision(const Tensor& a, const Tensor& b, ScalarType dtype, const Tensor& total) {
  return !total.defined() && dtype == a.scalar_type() ? at::mm(a, b.t()) : mm_into(a, b, dtype, total);
}

// ---- decodes: `EmulatedBackend`

// What the kernels are told of a decode to the GEMM view of an operand, contraction contiguous.
DequantizeArgs decoding(const Payload& p, void* out, Dtype dtype, void* scale, bool outside) {
  const bool along_k = p.side->spec.axis == 0;
  const Matrix matrix{out, dtype, p.m, p.k, along_k ? p.k : 1, along_k ? 1 : p.m};
  return {p.side->spec, {p.codes(), p.side->transposed, scale, p.outer()}, matrix, outside, false};
}

// Both operands, decoded in one call where they are quantized. outside: with the scales that `outside` gives.
std::array<Tensor, 2> decoded(const Plan& plan, const Payload& a, const Payload& b, ScalarType dtype, bool outside) {
  std::array<Tensor, 2> made, ones;
  OperandsArgs args{};
  for (int i = 0; i < 2; ++i) {
    const Payload& p = i ? b : a;
    const Side& side = *p.side;
    if (!side.quantized) {
      made[i] = high_precision(p).to(dtype);
      continue;
    }
    made[i] = at::empty({p.rows(), p.contraction()}, p.options(dtype));
    if (!p.m || !p.k) continue;
    const int64_t scales = num_scales(side.spec, p.m, p.k);
    if (!outside && side.scales_outside()) ones[i] = at::ones({scales}, p.options(ScalarType::Float));
    void* scale = ones[i].defined() ? ones[i].data_ptr() : p.scale();
    args.operands[i] = decoding(p, made[i].data_ptr(), dtype_code(dtype), scale, outside), args.has[i] = true;
  }
  if (args.has[0] || args.has[1]) plan.casts->decode_operands(args, where(made[0].device()));
  return made;
}

// FP32 scales by which a product is multiplied, one or one a row of the operand; undefined where there are none.
Tensor outside(const Plan& plan, const Payload& p) {
  if (!p.side->quantized) return {};
  if (p.side->scales_outside()) return p.fp32_scales().reshape({-1});
  if (!p.side->keeps_amax()) return {};
  const Tensor out = at::empty({p.amaxes()}, p.options(ScalarType::Float));
  if (out.numel()) plan.casts->outer_scale(p.outer(), out.data_ptr<float>(), out.numel(), where(out.device()));
  return out;
}

// The product of A's and B's scales where each is one number or none, else nothing.
Tensor one_factor(const Tensor& rows, const Tensor& columns) {
  for (const Tensor& t : {rows, columns})
    if (t.defined() && t.numel() != 1) return {};
  return !rows.defined() ? columns : !columns.defined() ? rows : rows.mul(columns);
}

// What cuBLASLt reads of device memory for a product of these in bf16; null: it is not the one to run it. `_direct`.
const float* constants_for(const Plan& plan, const Payload& a, const Payload& b, const Tensor& total) {
  const auto taken = [](const Payload& p) {
    return p.m && p.k && (p.side->quantized || high_precision(p).is_contiguous());
  };
  if (!plan.matmul || !taken(a) || !taken(b) || a.contraction() % 8 || b.rows() % 8) return nullptr;
  if (total.defined() && (total.scalar_type() != ScalarType::Float || !total.is_contiguous())) return nullptr;
  return constants(plan, where(a.memory[0].device()));
}

void run_matmul(const Plan& plan, MatmulArgs args, const Tensor& out) {
  const Where at = where(out.device());
  args.out = out.data_ptr(), args.type_out = out.scalar_type() == ScalarType::BFloat16 ? plan.bf16 : plan.fp32;
  args.workspace = out.is_cuda() ? workspace(plan, at) : nullptr, args.workspace_bytes = plan.workspace_bytes;
  args.stream = at.stream, args.device = at.threads_or_device;
  plan.matmul->run(args);
}

// The product of these, in bf16 at the addresses in `args`, times its factor.
Tensor multiply_scaled(const Plan& plan, const Payload& a, const Payload& b, MatmulArgs args, ScalarType dtype,
                       const Tensor& total) {
  args.rows_a = a.rows(), args.rows_b = b.rows(), args.k = a.contraction();
  args.type_a = args.type_b = plan.bf16, args.mode_a = args.mode_b = plan.no_scale;
  args.add = total.defined();
  const auto made = dtype == ScalarType::BFloat16 ? dtype : ScalarType::Float;
  const Tensor out = args.add ? total : at::empty({args.rows_a, args.rows_b}, a.options(made));
  run_matmul(plan, args, out);
  return args.add || made == dtype ? out : out.to(dtype);
}

// Whether the scales outside of a product are one number an operand or none, and come from amaxes. `_from_amaxes`.
bool from_amaxes(const Payload& a, const Payload& b) {
  const auto fits = [](const Payload& p) {
    return !p.side->quantized || (!p.side->scales_outside() && (!p.side->keeps_amax() || p.amaxes() == 1));
  };
  const auto keeps = [](const Payload& p) { return p.side->quantized && p.side->keeps_amax(); };
  return fits(a) && fits(b) && (keeps(a) || keeps(b));
}

// Decodes and their factor by one call, in one piece of memory.
Tensor multiply_from_amaxes(const Plan& plan, const Payload& a, const Payload& b, const float* constants,
                            ScalarType dtype, const Tensor& total) {
  const auto bytes = [](const Payload& p) { return p.side->quantized ? aligned(p.m * p.k * 2) : 0; };
  const Tensor memory = bytes_beside(a.memory[0], bytes(a) + bytes(b) + static_cast<int64_t>(sizeof(float)));
  auto* next = static_cast<uint8_t*>(memory.data_ptr());
  OperandsArgs decodes{};
  MatmulArgs args{};
  for (int i = 0; i < 2; ++i) {
    const Payload& p = i ? b : a;
    (i ? args.b : args.a) = p.side->quantized ? next : high_precision(p).data_ptr();
    if (!p.side->quantized) continue;
    decodes.operands[i] = decoding(p, next, Dtype::bf16, p.scale(), false), decodes.has[i] = true;
    next += bytes(p);
  }
  decodes.factor = reinterpret_cast<float*>(next);
  plan.casts->decode_operands(decodes, where(memory.device()));
  args.factor = decodes.factor, args.constants = constants;
  return multiply_scaled(plan, a, b, args, dtype, total);
}

// `out * rows * columns` rounded once, in as few passes over `out` as there are scales that do not combine.
Tensor scale_into(Tensor out, Tensor rows, Tensor columns, ScalarType dtype, const Tensor& total) {
  if (rows.defined()) rows = rows.reshape({-1, 1});
  if (columns.defined()) columns = columns.reshape({1, -1});
  if (rows.defined() && columns.defined()) {
    if (rows.numel() == 1 || columns.numel() == 1)
      rows = rows.mul(columns), columns = Tensor();
    else
      out.mul_(rows);
  }
  const Tensor last = columns.defined() ? columns : rows;
  if (total.defined()) {
    Tensor sum = total;
    return sum.addcmul_(out, last);
  }
  Tensor made = at::empty(out.sizes(), out.options().dtype(dtype));
  return at::mul_out(made, out, last);
}

Tensor multiply_decoded(const Plan& plan, const Product& how, const Payload& a, const Payload& b, ScalarType dtype,
                        const Tensor& total) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto in_bf16 = [&](int i, const Payload& p) { return how.in_bf16[i][static_cast<int>(dtype_code(p.dtype))]; };
  if (!in_bf16(0, a) || !in_bf16(1, b)) {
    const auto [x, w] = decoded(plan, a, b, ScalarType::Float, true);
    return mm_into(x, w, dtype, total);
  }
  if (from_amaxes(a, b))
    if (const float* known = constants_for(plan, a, b, total))
      return multiply_from_amaxes(plan, a, b, known, dtype, total);
  const auto [x, w] = decoded(plan, a, b, ScalarType::BFloat16, false);
  const Tensor rows = outside(plan, a), columns = outside(plan, b);
  if (!rows.defined() && !columns.defined()) return mm_into(x, w, dtype, total);
  if (const Tensor factor = one_factor(rows, columns); factor.defined())
    if (const float* known = constants_for(plan, a, b, total)) {
      MatmulArgs args{};
      args.a = x.data_ptr(), args.b = w.data_ptr(), args.factor = factor.data_ptr<float>(), args.constants = known;
      return multiply_scaled(plan, a, b, args, dtype, total);
    }
  return scale_into(mm_fp32(x, w), rows, columns, dtype, total);
}

// ---- codes: scaled_mm.py's `ScaledMm`

// The scales of an operand as the library takes them, its rows padded by `pad`: scaled_mm.py's `_scale_a` and `_scale_b`.
const void* laid_out(Kind kind, const Payload& p, int64_t pad, Tensor& kept) {
  const auto& spec = p.side->spec;
  const bool along_k = spec.axis == 0;
  if (kind == Kind::tensor || (!pad && (kind == Kind::row || (kind == Kind::block && !along_k)))) return p.scale();
  Tensor scale = p.fp32_scales().view({num_blocks(p.m, spec.block_m), num_blocks(p.k, spec.block_k)});
  if (!along_k) scale = scale.t();
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

Tensor multiply_codes(const Plan& plan, const Product& how, const Payload& a, const Payload& b, ScalarType dtype,
                      const Tensor& total) {
  const int64_t rows_a = a.rows(), rows_b = b.rows(), k = a.contraction();
  if (!rows_a || !rows_b || !k)
    return finish(at::zeros({rows_a, rows_b}, a.options(total.defined() ? ScalarType::Float : dtype)), dtype, total);
  const auto missing = [](int64_t size, int64_t unit) { return (unit - size % unit) % unit; };
  const int64_t pad_a = missing(rows_a, how.rows_a), pad_b = missing(rows_b, kAlign), pad_k = missing(k, kAlign);
  Tensor kept[4];
  MatmulArgs args{};
  args.a = a.codes(), args.b = b.codes();
  if (pad_a || pad_k) args.a = (kept[0] = at::constant_pad_nd(a.code_matrix(), {0, pad_k, 0, pad_a})).data_ptr();
  if (pad_b || pad_k) args.b = (kept[1] = at::constant_pad_nd(b.code_matrix(), {0, pad_k, 0, pad_b})).data_ptr();
  args.scale_a = laid_out(how.kinds[0], a, pad_a, kept[2]);
  args.scale_b = laid_out(how.kinds[1], b, pad_b, kept[3]);
  args.rows_a = rows_a + pad_a, args.rows_b = rows_b + pad_b, args.k = k + pad_k;
  args.type_a = how.types[0], args.type_b = how.types[1], args.mode_a = how.modes[0], args.mode_b = how.modes[1];
  args.fast = how.fast;
  args.add = total.defined() && total.scalar_type() == ScalarType::Float && total.is_contiguous() &&
             total.sizes() == at::IntArrayRef{args.rows_a, args.rows_b};
  const auto made = !total.defined() && dtype == ScalarType::BFloat16 ? dtype : ScalarType::Float;
  Tensor out = args.add ? total : at::empty({args.rows_a, args.rows_b}, a.options(made));
  run_matmul(plan, args, out);
  if (args.add) return total;
  if (pad_a || pad_b) out = out.narrow(0, 0, rows_a).narrow(1, 0, rows_b);
  return finish(out, dtype, total);
}

}  // namespace

Tensor multiply(const Plan& plan, Gemm gemm, const Payload& a, const Payload& b, ScalarType dtype, const Tensor& total) {
  const Product& how = plan.products[gemm];
  if (how.route == Route::high_precision) return multiply_high_precision(high_precision(a), high_precision(b), dtype, total);
  if (how.route == Route::cublaslt) return multiply_codes(plan, how, a, b, dtype, total);
  return multiply_decoded(plan, how, a, b, dtype, total);
}

}  // namespace mh::node
