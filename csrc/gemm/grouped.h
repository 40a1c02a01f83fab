// FP8 GEMMs of all groups on Hopper; over pointers, sizes of groups on the device.
#pragma once

#include <cstdint>

#include "../entry.h"

namespace mh::gemm {

enum class Out { bf16, fp16, fp32 };

// What a scale of each operand covers, and whether sums leave the tensor cores every 128 products.
enum class Kind {
  row_fast,  // a row; they do not
  row,       // a row
  block,     // 1 x 128 of both
  tile,      // 1 x 128 of A, 128 x 128 of B
};

// Operands are codes, rows packed, contraction contiguous and a multiple of 16. ends (E,), blocks (3, count): the map of
// blocks of 128 rows (ops_triton/grouped_gemm.py).
struct GroupedArgs {
  const void *a, *b;
  const float *a_scale, *b_scale;
  void* out;
  const int32_t *ends, *blocks;
  int64_t groups, count;
  int64_t rows_a;  // rows kernels: T; columns: N
  int64_t n;       // columns of the result
  int64_t k;       // contraction: of both operands
  Kind kind;
  Out out_type;
  bool a_e5m2, b_e5m2, add;
};

// out (T, n): every row of a (T, k) with its group's b (E * n, k). Scales: (T,), (E * n,) ; (T, k / 128), (E * n, k / 128) ;
// (T, k / 128), (E * n / 128, k / 128).
void rows(const GroupedArgs& args, const Where& where);

// out (E, rows_a, n) [+ out]: a (rows_a, k) . b (n, k)^T over every group's blocks of the contraction. Scales: (E, rows_a),
// (E, n) ; (k / 128, rows_a), (k / 128, n).
void columns(const GroupedArgs& args, const Where& where);

// What csrc/node calls of these, in a capsule: `_C_gemm.GROUPED`.
constexpr const char* kGroupedCapsule = "megatron_hybrid.grouped";

struct Grouped {
  void (*rows)(const GroupedArgs&, const Where&);
  void (*columns)(const GroupedArgs&, const Where&);
};

}  // namespace mh::gemm
