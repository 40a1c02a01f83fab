// Chooses, once, the widest instruction set this processor runs. Every choice gives the same bytes.
#include "dispatch.h"

#include <stdexcept>

#include "../backend.h"
#include "../numerics/scales.h"
#include "kernels.h"

namespace mh::cpu {
namespace {

struct Isa {
  const char* name;
  bool (*runs)();
  KernelTable (*table)();
};

bool always() { return true; }

#if defined(MH_X86_ISAS)
bool has_avx2() { return __builtin_cpu_supports("avx2"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Narrowest first.
const Isa kIsas[] = {
    {"baseline", always, kernels_baseline},
#if defined(MH_X86_ISAS)
    {"avx2", has_avx2, kernels_avx2},
    {"avx512", has_avx512, kernels_avx512},
#endif
};

const Isa* widest() {
  const Isa* best = kIsas;
  for (const Isa& isa : kIsas)
    if (isa.runs()) best = &isa;
  return best;
}

struct Chosen {
  const Isa* isa = widest();
  KernelTable table = isa->table();
};

Chosen& chosen() {
  static Chosen c;
  return c;
}

}  // namespace

std::string isa() { return chosen().isa->name; }

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas)
    if (isa.runs()) names.emplace_back(isa.name);
  return names;
}

void set_isa(const std::string& name) {
  for (const Isa& isa : kIsas) {
    if (name != isa.name || !isa.runs()) continue;
    chosen().isa = &isa;
    chosen().table = isa.table();
    return;
  }
  std::string valid;
  for (const std::string& n : isas()) valid += (valid.empty() ? "" : ", ") + n;
  throw std::invalid_argument("set_isa: name='" + name + "' does not run on this processor; valid: " + valid);
}

void amax(const AmaxArgs& args, const Where& where) { chosen().table.amax(args, where.threads_or_device); }

namespace {

void quantize_one(const QuantizeArgs& args, int threads) {
  if (args.noop && *args.noop) return;
  if (args.measured) {
    float amax = 0.0f;
    const bool raises = args.fixed_scale;  // delayed scaling: the history keeps the larger one, and a NaN
    chosen().table.amax({args.spec, args.x, raises ? &amax : args.measured}, threads);
    if (raises && (amax > *args.measured || amax != amax)) *args.measured = amax;
  }
  chosen().table.quantize(args, threads);
}

}  // namespace

void quantize(const PairArgs& args, const Where& where) {
  if (args.has_row) quantize_one(args.row, where.threads_or_device);
  if (args.has_col) quantize_one(args.col, where.threads_or_device);
}

void dequantize(const DequantizeArgs& args, const Where& where) {
  chosen().table.dequantize(args, where.threads_or_device);
}

void decode_operands(const OperandsArgs& args, const Where& where) {
  const float* amaxes[2] = {};
  for (int i = 0; i < 2; ++i) {
    if (!args.has[i]) continue;
    const DequantizeArgs& operand = args.operands[i];
    amaxes[i] = operand.in.amax;
    if (operand.out.rows * operand.out.cols > 0) dequantize(operand, where);
  }
  if (args.factor) *args.factor = nvfp4_factor(amaxes[0], amaxes[1]);
}

void outer_scale(const float* amax, float* out, int64_t n, const Where& where) {
  chosen().table.outer_scale(amax, out, n, where.threads_or_device);
}

}  // namespace mh::cpu
