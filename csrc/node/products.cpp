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

// The GEMM view of an operand, contraction contiguous. outside: with the scales that `outside` gives.
Tensor decoded(const Plan& plan, const Payload& p, ScalarType dtype, bool outside) {
  const Side& side = *p.side;
  if (!side.quantized) return high_precision(p).to(dtype);
  const Tensor out = at::empty({p.rows(), p.contraction()}, p.options(dtype));
  if (!p.m || !p.k) return out;
  Tensor ones;
  if (!outside && side.scales_outside()) ones = at::ones({num_scales(side.spec, p.m, p.k)}, p.options(ScalarType::Float));
  const bool along_k = side.spec.axis == 0;
  const Matrix matrix{out.data_ptr(), dtype_code(dtype), p.m, p.k, along_k ? p.k : 1, along_k ? 1 : p.m};
  void* scale = ones.defined() ? ones.data_ptr() : p.scale();
  plan.casts->dequantize({side.spec, {p.codes(), side.transposed, scale, p.outer()}, matrix, outside, false},
                         where(out.device()));
  return out;
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

// What cuBLASLt reads of device memory for a product of these; null: it is not the one to run it. `_direct`.
const float* constants_for(const Plan& plan, const Tensor& a, const Tensor& b, const Tensor& total) {
  const auto taken = [](const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16 && t.is_contiguous(); };
  if (!plan.matmul || !taken(a) || !taken(b) || !a.numel() || !b.numel() || a.size(1) % 8 || b.size(0) % 8) return nullptr;
  if (total.defined() && (total.scalar_type() != ScalarType::Float || !total.is_contiguous())) return nullptr;
  return constants(plan, where(a.device()));
}

void run_matmul(const Plan& plan, MatmulArgs args, const Tensor& out) {
  const Where at = where(out.device());
  args.out = out.data_ptr(), args.type_out = out.scalar_type() == ScalarType::BFloat16 ? plan.bf16 : plan.fp32;
  args.workspace = out.is_cuda() ? workspace(plan, at) : nullptr, args.workspace_bytes = plan.workspace_bytes;
  args.stream = at.stream, args.device = at.threads_or_device;
  plan.matmul->run(args);
}

Tensor multiply_scaled(const Plan& plan, const Tensor& a, const Tensor& b, const Tensor& factor, const float* constants,
                       ScalarType dtype, const Tensor& total) {
  MatmulArgs args{};
  args.a = a.data_ptr(), args.b = b.data_ptr();
  args.rows_a = a.size(0), args.rows_b = b.size(0), args.k = a.size(1);
  args.type_a = args.type_b = plan.bf16, args.mode_a = args.mode_b = plan.no_scale;
  args.add = total.defined(), args.factor = factor.data_ptr<float>(), args.constants = constants;
  const auto made = dtype == ScalarType::BFloat16 ? dtype : ScalarType::Float;
  const Tensor out = args.add ? total : at::empty({args.rows_a, args.rows_b}, a.options().dtype(made));
  run_matmul(plan, args, out);
  return args.add ? total : out.to(dtype);
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
  if (!in_bf16(0, a) || !in_bf16(1, b))
    return mm_into(decoded(plan, a, ScalarType::Float, true), decoded(plan, b, ScalarType::Float, true), dtype, total);
  const Tensor x = decoded(plan, a, ScalarType::BFloat16, false), w = decoded(plan, b, ScalarType::BFloat16, false);
  const Tensor rows = outside(plan, a), columns = outside(plan, b);
  if (!rows.defined() && !columns.defined()) return mm_into(x, w, dtype, total);
  if (const Tensor factor = one_factor(rows, columns); factor.defined())
    if (const float* known = constants_for(plan, x, w, total)) return multiply_scaled(plan, x, w, factor, known, dtype, total);
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
