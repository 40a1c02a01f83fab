// Rows of all groups: what they are cast to, and their products. The casts of megatron_hybrid/grouped_casts.py and
// grouped_columns.py, the products of gemm/grouped.py's `PreparedFp8`.
#pragma once

#include "../gemm/grouped.h"
#include "python.h"

namespace mh::node {

struct GroupedProduct {
  gemm::Kind kind;
  std::array<bool, 2> e5m2;  // of A's and B's codes
};

struct GroupedPlan {
  std::shared_ptr<const Plan> expert;  // sides and casts of any; and whom to ask: megatron_hybrid/grouped_node.py
  std::array<GroupedProduct, 3> products;
  const gemm::Grouped* gemms;
  int64_t experts;
  bool derives;  // the input's columns from its rows: Python casts it

  const Side& side(Operand operand, int direction) const { return expert->sides[operand][direction]; }
};

// FP8 codes and their FP32 scales, packed. Those of the node are one tensor of bytes, scales from `scale_at` on; others
// are two.
struct Coded {
  Tensor codes, scale;
  int64_t rows = 0, columns = 0, scale_rows = 0, scale_columns = 0, scale_at = 0;

  static Coded of(const Tensor& codes, const Tensor& scale);
  // Unwritten, beside x.
  static Coded empty(const Tensor& x, int64_t rows, int64_t columns, int64_t scale_rows, int64_t scale_columns);
  // The same in two tensors.
  static Coded apart(const Tensor& x, int64_t rows, int64_t columns, int64_t scale_rows, int64_t scale_columns);

  uint8_t* code_data() const { return static_cast<uint8_t*>(codes.data_ptr()); }
  float* scale_data() const { return static_cast<float*>(scale.defined() ? scale.data_ptr() : code_data() + scale_at); }
  std::array<Tensor, 2> tensors() const;
};

// The copies of rows that a `RowMap` of permutation.py tells of.
struct Copies {
  Held map;
  Tensor choice;
  int64_t parts;

  int64_t rows() const { return choice.size(0); }
};

// Where the rows of all groups are: the map of blocks of 128 rows (`ops_triton.grouped_gemm.BlockMap`).
struct RowGroups {
  Tensor ends, blocks;
  int64_t rows;

  int64_t count() const { return blocks.size(1); }
};

using CodedPair = std::array<Coded, 2>;  // by direction

// What a cast computes rows of x from on the way; as `PairArgs` has them.
struct Computed {
  const void *gate, *grad;
  int64_t grad_stride;
  RowWeights weights;
};

// What is computed from x by rows and by columns, each in two tensors.
CodedPair cast_computed(const GroupedPlan& plan, Operand operand, const Tensor& x, const RowGroups& groups,
                        const Computed& computed);

// The rows of all groups by rows and by columns, as they are asked for. copies: null, or whose rows these are.
CodedPair cast_groups(const GroupedPlan& plan, Operand operand, const Tensor& x, bool by_rows, bool by_columns,
                      const RowGroups& groups, const Copies* copies);

// out (T, N): every row of a (T, k) with its group's of b (E * N, k).
Tensor multiply_rows(const GroupedPlan& plan, Gemm gemm, const Coded& a, const Coded& b, const RowGroups& groups,
                     ScalarType dtype);

// out (E, N, K) [+ out]: a (N, rows) . b (K, rows)^T of every group.
void multiply_columns(const GroupedPlan& plan, const Coded& a, const Coded& b, const RowGroups& groups,
                      const Tensor& out, bool add);

// Whether the kernels can read or write a tensor where it is.
bool begins_aligned(const Tensor& t);

}  // namespace mh::node
