// What one extension offers another in C++: tables of functions, handed over as capsules (`_C.CASTS`, `_C_lt.MATMUL`).
#pragma once

#include "numerics/format.h"

namespace mh {

// Where a call runs: CPU threads, or a CUDA stream of a device.
struct Where {
  uintptr_t stream;
  int threads_or_device;
};

constexpr const char* kCastsCapsule = "megatron_hybrid.casts";

struct Casts {
  void (*amax)(const AmaxArgs&, const Where&);
  void (*quantize)(const PairArgs&, const Where&);
  void (*decode_operands)(const OperandsArgs&, const Where&);
  void (*outer_scale)(const float* amax, float* out, int64_t n, const Where&);
  void (*group_amax)(const GroupAmaxArgs&, const Where&);  // null where groups are not cast: on the CPU
};

constexpr const char* kMatmulCapsule = "megatron_hybrid.matmul";

// out (rows_a, rows_b) = factor * A (rows_a, k) . B (rows_b, k)^T [+ out], all row-major and packed; types and modes are the
// library's numbers. factor: in device memory, or null for 1; constants: 0 and 1 in device memory, for a factor only.
struct MatmulArgs {
  const void *a, *b;
  void* out;
  int64_t rows_a, rows_b, k;
  int type_a, type_b, type_out, mode_a, mode_b;
  const void *scale_a, *scale_b;
  bool fast, add;
  const float *factor, *constants;
  void* workspace;
  int64_t workspace_bytes;
  uintptr_t stream;
  int device;
};

struct Matmul {
  void (*run)(const MatmulArgs&);
};

// Blocks along one extent; block 0 is the whole of it.
inline int64_t num_blocks(int64_t extent, int block) { return block ? (extent + block - 1) / block : 1; }

inline int64_t num_scales(const FormatSpec& s, int64_t m, int64_t k) {
  return num_blocks(m, s.block_m) * num_blocks(k, s.block_k);
}

// Outer amaxes a cast reads: a tensor's, or one a row or column; none for formats that scale blocks only.
inline int64_t num_amaxes(const FormatSpec& s, int64_t m, int64_t k) {
  if (s.outer_rows) return s.axis == 0 ? m : k;
  return s.scale_rule == ScaleRule::e4m3_amax || s.block_m == 0 ? 1 : 0;
}

}  // namespace mh
