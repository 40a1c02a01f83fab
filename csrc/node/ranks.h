// What travels between the tensor-parallel ranks of a linear: megatron_hybrid/distributed/tp.py and gather.py in C++.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

#include "casts.h"

namespace mh::node {

using Work = c10::intrusive_ptr<c10d::Work>;

// What becomes of a result of which every rank has a part of the sum.
enum class Sum { none, all, scatter };

// The ranks of one `TensorParallel`.
struct Ranks {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  int64_t size;
  bool coalesces;   // several tensors of a GPU travel in one collective as they are; else packed into one
  Sum output, dgrad;
};

// A sum over ranks on its way: `finish` waits for it and gives what this rank has of it.
class Summed {
 public:
  Summed() = default;
  Summed(const Ranks& ranks, Sum how, const Tensor& part);
  Tensor finish();

 private:
  Tensor part_, made_;
  Work work_;
};

// Maxima over the ranks on their way, of the amaxes of x (M, K) that cover other ranks' elements; as integers (amax.py).
class Looked {
 public:
  Looked() = default;
  Looked(const Plan& plan, const Ranks& ranks, Operand operand, const Tensor& x, bool rowwise, bool columnwise);
  Amaxes finish();

 private:
  Amaxes found_;
  Work work_;
};

// The rows of a payload on their way from all ranks, each with as many; `finish` waits and gives the whole payload.
class Gathered {
 public:
  Gathered() = default;
  Gathered(const Ranks& ranks, const Payload& part);
  bool started() const { return ranks_ != 0; }
  Payload finish();

 private:
  Payload part_;
  int64_t ranks_ = 0;
  std::vector<Tensor> sent_, whole_;  // of the tensors that split with the rows
  Tensor own_, packed_;
  Work work_;
};

}  // namespace mh::node
