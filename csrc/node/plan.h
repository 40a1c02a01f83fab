// What the node knows before a call, as a `Plan`, and what it multiplies, as `Payload`s.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>

#include <array>
#include <string>

#include "../entry.h"

namespace mh::node {

using at::ScalarType;
using at::Tensor;

enum Operand { kInput, kWeight, kGradOutput };
enum Gemm { kFprop, kDgrad, kWgrad };
constexpr const char* kOperands[] = {"input", "weight", "grad_output"};
constexpr const char* kGemms[] = {"fprop", "dgrad", "wgrad"};
constexpr const char* kDirections[] = {"rowwise", "columnwise"};

// How a GEMM is run: torch's own on tensors in high precision, or on decodes; cuBLASLt; what Python makes of it.
enum class Route { high_precision, decoded, cublaslt, python };
// What one FP32 scale covers: scaled_mm.py's words.
enum class Kind { none, tensor, row, block, tile };

// One direction of an operand, as lean.py's `SideCast` has it.
struct Side {
  FormatSpec spec;  // `axis` only, where it is not quantized
  bool quantized, transposed, stateful;

  bool measures() const { return spec.outer_rows || keeps_amax() || spec.block_m == 0; }
  bool keeps_amax() const { return spec.scale_rule == ScaleRule::e4m3_amax; }
  // FP32 scales that do not vary along the contraction
  bool scales_outside() const { return spec.scale_rule == ScaleRule::fp32 && measures(); }
  int64_t stored_rows(int64_t m, int64_t k) const { return transposed ? k : m; }
  int64_t pitch(int64_t m, int64_t k) const {
    const int64_t last = transposed ? m : k;
    return spec.element == Element::e2m1 ? (last + 1) / 2 : last;
  }
  int64_t scale_bytes(int64_t m, int64_t k) const {
    return num_scales(spec, m, k) * (spec.scale_rule == ScaleRule::fp32 ? 4 : 1);
  }
};

struct Product {
  Route route;
  std::string backend;
  // of A and B, where they are decoded: whether to bf16, by the dtype that was cast (`Dtype`); else to FP32
  std::array<std::array<bool, 3>, 2> in_bf16;
  std::array<Kind, 2> kinds;  // of A's and B's scales; these and what follows for cuBLASLt
  std::array<int, 2> types, modes;
  int64_t rows_a;  // A's rows are padded to a multiple of this
  bool fast;
};

// How a direction of the gathered operand comes together from all ranks: sharding.py's words, those that the node knows.
enum class Way { payload, row_payload, as_is };
constexpr const char* kWays[] = {"payload", "row payload", "as it is"};

// How tensor-parallel ranks split the operands; of a plan of one rank: not `several`.
struct Sharding {
  bool several = false;
  int gathered = -1;                         // an operand, or none
  std::array<Way, 2> ways;                   // by direction, where a rank's rows are
  int64_t unit = 1;                          // a multiple of this
  std::array<std::array<bool, 2>, 3> reduced{};  // by operand and direction: whether amaxes are maxima over the ranks
  std::array<bool, 3> same_amax{};               // by operand: both directions have one

  bool gathers(Operand operand) const { return several && gathered == operand; }
  bool reduces(Operand operand) const { return reduced[operand][0] || reduced[operand][1]; }
};

// What forward keeps of an operand: plan.py's words.
enum class Kept { original, rowwise, columnwise };
constexpr const char* kKept[] = {"original", "rowwise", "columnwise"};

struct Plan {
  std::array<std::array<Side, 2>, 3> sides;  // by operand and direction
  std::array<Product, 3> products;
  std::array<Kept, 2> kept;     // of input and weight
  std::array<bool, 3> derives;  // by operand: whether its column is cast from its row's decode
  bool sums;
  int bf16, fp32, no_scale;  // cuBLASLt's numbers
  const Casts* casts;
  const Matmul* matmul;  // null: no product is cuBLASLt's
  int64_t workspace_bytes;
  c10::SafePyObject python;  // megatron_hybrid.node
  Sharding sharding;

  // Whether an operand rounds stochastically, in any direction.
  bool draws(int operand) const { return sides[operand][0].spec.sr || sides[operand][1].spec.sr; }
};

inline Dtype dtype_code(ScalarType dtype) {
  return dtype == ScalarType::Float ? Dtype::f32 : dtype == ScalarType::BFloat16 ? Dtype::bf16 : Dtype::f16;
}

// The payload of one direction of a matrix (m, k). Its own memory is one tensor of bytes: codes, scales and amaxes that are
// kept, each at a multiple of 256; amaxes that were known before the cast stay in the tensor they came in, the third. One
// that Python holds comes as its three tensors. In high precision: the tensor.
struct Payload {
  const Side* side = nullptr;  // null: not there
  int64_t m = 0, k = 0;
  ScalarType dtype = ScalarType::Undefined;  // of what was cast
  std::array<Tensor, 3> memory;
  bool own = false;
  int64_t scale_at = 0, outer_at = 0;

  int64_t rows() const { return side->spec.axis == 0 ? m : k; }
  int64_t contraction() const { return side->spec.axis == 0 ? k : m; }
  int64_t amaxes() const { return num_amaxes(side->spec, m, k); }
  at::TensorOptions options(ScalarType of) const { return memory[0].options().dtype(of).requires_grad(false); }
  uint8_t* codes() const { return static_cast<uint8_t*>(memory[0].data_ptr()); }
  void* scale() const { return own ? codes() + scale_at : memory[1].data_ptr(); }
  float* outer() const {
    if (!side->keeps_amax()) return nullptr;
    return static_cast<float*>(memory[2].defined() ? memory[2].data_ptr() : static_cast<void*>(codes() + outer_at));
  }

  // Codes, scales and amaxes as tensors; own ones flat and of bytes.
  std::array<Tensor, 3> tensors() const {
    if (!own) return memory;
    const int64_t size = side->stored_rows(m, k) * side->pitch(m, k);
    const bool beside = side->keeps_amax() && !memory[2].defined();
    return {memory[0].narrow(0, 0, size), memory[0].narrow(0, scale_at, side->scale_bytes(m, k)),
            beside ? memory[0].narrow(0, outer_at, amaxes() * 4) : memory[2]};
  }
  Tensor code_matrix() const { return tensors()[0].view({side->stored_rows(m, k), side->pitch(m, k)}); }
  Tensor fp32_scales() const { return tensors()[1].view(ScalarType::Float); }
};

using Pair = std::array<Payload, 2>;  // by direction

}  // namespace mh::node
