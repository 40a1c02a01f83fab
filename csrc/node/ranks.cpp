#include "ranks.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

namespace mh::node {
namespace {

Work gather(const Ranks& ranks, Tensor& whole, Tensor part) {
  c10d::AllgatherOptions options;
  options.asyncOp = true;
  return ranks.group->_allgather_base(whole, part, options);
}

// A payload's tensors that split with its rows: codes, then scales and amaxes where each row or block of rows has its own.
std::vector<Tensor> split_with_rows(const Payload& p) {
  if (!p.side->quantized) return {p.memory[0].contiguous()};
  const auto parts = p.tensors();
  const auto bytes = [](const Tensor& t) { return t.contiguous().view({-1}).view(ScalarType::Byte); };
  std::vector<Tensor> found{bytes(parts[0])};
  if (p.side->spec.block_m) found.push_back(bytes(parts[1]));
  if (p.side->keeps_amax() && p.side->spec.outer_rows && p.side->spec.axis == 0) found.push_back(bytes(parts[2]));
  return found;
}

// Matrices of bytes (rows, pitch) of `parts` ranks, one after another, put together along their columns.
Tensor along_columns(const Tensor& bytes, int64_t parts, int64_t pitch) {
  const bool words = pitch % 8 == 0 && reinterpret_cast<uintptr_t>(bytes.data_ptr()) % 8 == 0;  // several times as fast
  const Tensor t = words ? bytes.view(ScalarType::Long) : bytes;
  return t.view({parts, -1, words ? pitch / 8 : pitch}).transpose(0, 1).contiguous().view({-1}).view(ScalarType::Byte);
}

}  // namespace

Summed::Summed(const Ranks& ranks, Sum how, const Tensor& part) : part_(part) {
  if (how == Sum::none) {
    made_ = part;
    return;
  }
  part_ = part.contiguous();  // a slice, where a GEMM padded its columns
  if (how == Sum::all) {
    made_ = part_;
    std::vector<Tensor> tensors{part_};
    c10d::AllreduceOptions options;
    options.asyncOp = true;
    work_ = ranks.group->allreduce(tensors, options);
    return;
  }
  made_ = at::empty({part_.size(0) / ranks.size, part_.size(1)}, part_.options());
  c10d::ReduceScatterOptions options;
  options.asyncOp = true;
  work_ = ranks.group->_reduce_scatter_base(made_, part_, options);
}

Tensor Summed::finish() {
  if (work_) work_->wait();
  part_.reset(), work_.reset();
  return made_;
}

Looked::Looked(const Plan& plan, const Ranks& ranks, Operand operand, const Tensor& x, bool rowwise, bool columnwise) {
  const auto& reduced = plan.sharding.reduced[operand];
  const bool derives = plan.derives[operand];  // from a row that is cast too, given out or not
  const bool wanted[] = {(rowwise || (columnwise && derives)) && reduced[0], columnwise && reduced[1] && !derives};
  const bool shared = wanted[0] && wanted[1] && plan.sharding.same_amax[operand];
  const auto& sides = plan.sides[operand];
  const int64_t rows = wanted[0] ? num_amaxes(sides[0].spec, x.size(0), x.size(1)) : 0;
  const int64_t columns = wanted[1] && !shared ? num_amaxes(sides[1].spec, x.size(0), x.size(1)) : 0;
  if (!(rows + columns)) return;
  const Tensor all = at::empty({rows + columns}, x.options().dtype(ScalarType::Float).requires_grad(false));
  if (wanted[0]) found_[0] = all.narrow(0, 0, rows);
  if (wanted[1]) found_[1] = shared ? found_[0] : all.narrow(0, rows, columns);
  const Matrix matrix{x.data_ptr(), dtype_code(x.scalar_type()), x.size(0), x.size(1), x.stride(0), x.stride(1)};
  for (int d = 0; d < 2; ++d)
    if (wanted[d] && !(d && shared)) plan.casts->amax({sides[d].spec, matrix, found_[d].data_ptr<float>()}, where(x.device()));
  std::vector<Tensor> bits{all.view(ScalarType::Int)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX, options.asyncOp = true;
  work_ = ranks.group->allreduce(bits, options);
}

Amaxes Looked::finish() {
  if (work_) work_->wait();
  work_.reset();
  return std::move(found_);
}

Gathered::Gathered(const Ranks& ranks, const Payload& part)
    : part_(part), ranks_(ranks.size), sent_(split_with_rows(part)) {
  const Tensor& first = sent_[0];
  if (sent_.size() > 1 && !(ranks.coalesces && first.is_cuda())) {  // tp.py says why
    own_ = at::cat(sent_);
    packed_ = at::empty({ranks_, own_.numel()}, own_.options());
    Tensor flat = packed_.view({-1});
    work_ = gather(ranks, flat, own_);
    return;
  }
  for (const Tensor& t : sent_) {
    c10::DimVector shape(t.sizes());
    shape[0] *= ranks_;
    whole_.push_back(at::empty(shape, t.options()));
  }
  if (sent_.size() == 1) {
    work_ = gather(ranks, whole_[0], first);
    return;
  }
  c10d::AllgatherOptions options;
  options.asyncOp = true;
  work_ = ranks.group->allgather_into_tensor_coalesced(whole_, sent_, options);
}

Payload Gathered::finish() {
  work_->wait();
  int64_t at = 0;
  for (size_t i = 0; packed_.defined() && i < sent_.size(); at += sent_[i++].numel())
    whole_.push_back(packed_.narrow(1, at, sent_[i].numel()).clone(at::MemoryFormat::Contiguous).view({-1}));
  Payload p = part_;
  p.m *= ranks_, p.own = false;
  if (!p.side->quantized) {
    p.memory[0] = whole_[0];
  } else {
    p.memory = part_.tensors();
    const int64_t pitch = part_.side->pitch(part_.m, part_.k);
    p.memory[0] = part_.side->transposed ? along_columns(whole_[0], ranks_, pitch) : whole_[0];
    size_t i = 1;
    if (p.side->spec.block_m) p.memory[1] = whole_[i++];
    if (i < whole_.size()) p.memory[2] = whole_[i];
  }
  *this = {};
  return p;
}

}  // namespace mh::node
