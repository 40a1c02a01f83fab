// GEMMs in bf16 of all groups on Hopper, of codes under block scales: MXFP8 and NVFP4. The first operand is decoded to
// memory, in the order of `slots` (decode.cuh), the second where it is multiplied.
#pragma once

#include <cstdint>

#include "../entry.h"

namespace mh::gemm {

constexpr int kMostGroups = 448;

// Rows of codes, packed, FP4 two a byte; scales (rows / block_rows, k / 32 or 16), packed.
struct CodedRows {
  const void* codes;
  const uint8_t* scale;
  Element element;
  int block_rows;
};

// out (rows, k): bf16, in slots, 2^-8 of the numbers where they are E2M1.
struct SlotsArgs {
  CodedRows in;
  void* out;
  int64_t rows, k;  // k: a multiple of 128
};

void decode_slots(const SlotsArgs& args, const Where& where);

// out (T, n) in bf16: every row of a (T, k), as `decode_slots` gives them, with its group's b (E * n, k). a_factor
// (T,), b_factor (E * n,): FP32 scales of rows, both or neither; of E2M1 both are there. ends, blocks: grouped.h; null:
// one group, of `count` blocks of 128 rows.
struct DecodingArgs {
  const void* a;
  const float *a_factor, *b_factor;
  CodedRows b;
  void* out;
  const int32_t *ends, *blocks;
  int64_t groups, count, rows_a, n, k;  // groups: at most kMostGroups; n: a multiple of 8, k of 128
};

void decoding_rows(const DecodingArgs& args, const Where& where);

}  // namespace mh::gemm
