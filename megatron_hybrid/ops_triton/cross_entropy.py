"""Cross-entropy over logits whose vocabulary is split across ranks.

Forward reads the logits once; backward writes their gradient over them. Nothing of their size is allocated.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .launch import as_rows, cdiv, on_device, packed

_BLOCK = 4096


@triton.jit
def _loss_statistics(logits, target, out, stride, M, first, V: tl.constexpr, BLOCK: tl.constexpr):
    """out (3, M): maximum, sum of exp(logit - maximum), the target's logit (0 when another rank has it)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits + col, mask=col < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, axis=0))
        base = tl.where(new == float("-inf"), 0.0, new)  # only -inf so far: keep exp(-inf - base) at 0, not NaN
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), axis=0)
        top = new
    local = tl.load(target + row) - first
    mine = (local >= 0) & (local < V)
    tl.store(out + row, top)
    tl.store(out + M + row, total)
    tl.store(out + 2 * M + row, tl.load(logits + local, mask=mine, other=0.0).to(tl.float32))


@triton.jit
def _loss_gradient(logits, target, log_sum, dloss, stride, first, V: tl.constexpr, BLOCK: tl.constexpr):
    """logits <- (softmax - one at the target) * dloss."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row * stride
    x = tl.load(logits + col, mask=col < V, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.load(log_sum + row))
    p = tl.where(col == tl.load(target + row) - first, p - 1.0, p)
    tl.store(logits + col, p * tl.load(dloss + row), mask=col < V)


class CrossEntropyFunction(torch.autograd.Function):
    """See `cross_entropy`."""

    @staticmethod
    def forward(ctx, logits, target, group):
        logits, target = packed(logits), target.contiguous()
        rows = as_rows(logits)
        (M, V), first = rows.shape, 0
        out = torch.empty(3, M, dtype=torch.float32, device=rows.device)
        size = 1 if group is None else group.size()
        if size > 1:
            first = group.rank() * V
        with on_device(rows):
            _loss_statistics[M,](rows, target, out, rows.stride(0), M, first, V=V, BLOCK=_BLOCK, num_warps=8)
        top, sums = out[0], out[1:]
        if size > 1:
            mine = top.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            sums[0] *= torch.exp(mine - top)
            dist.all_reduce(sums, group=group)
        log_sum = top + torch.log(sums[0])
        ctx.save_for_backward(logits, target, log_sum)
        ctx.first = first
        return (log_sum - sums[1]).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        logits, target, log_sum = ctx.saved_tensors
        rows = as_rows(logits)
        M, V = rows.shape
        dloss = packed(dloss).float()
        with on_device(logits):
            _loss_gradient[M, cdiv(V, _BLOCK)](
                rows, target, log_sum, dloss, rows.stride(0), ctx.first, V=V, BLOCK=_BLOCK, num_warps=8
            )
        torch.autograd.graph.increment_version(logits)  # whoever else needs them in backward is told, not misled
        return logits.detach(), None, None


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, group=None) -> torch.Tensor:
    """-log softmax(logits)[target] in FP32, of target's shape (...); logits (..., V), target int64 (...).

    group: the process group whose ranks hold V entries of the vocabulary each, in their order; None: one rank holds
    all. Backward overwrites the logits: a second one raises torch's error about a changed tensor. A target outside
    of the vocabulary counts as a logit of 0 that has no gradient.
    """
    return CrossEntropyFunction.apply(logits, target, group)
