"""Core attention where the sequence is split over context-parallel ranks: each gathers all keys and values.

Megatron cuts the sequence into twice as many chunks as there are ranks, and rank r of C holds chunks r and 2C - 1 - r: as
many visible keys on every rank. Each of a rank's two chunks of queries attends to the keys up to its own end.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class GatherSequence(torch.autograd.Function):
    """[s / C, ...] of each rank -> [s, ...], in the order of the sequence; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = torch.empty(group.size() * x.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
        return in_order(parts.unflatten(0, (group.size(), -1)))

    @staticmethod
    def backward(ctx, grad):
        parts = by_rank(grad, ctx.group.size())
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=ctx.group)
        return own, None


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """(C, s / C, ...) by rank -> (s, ...)."""
    halves = parts.unflatten(1, (2, -1))
    return torch.cat((halves[:, 0], halves[:, 1].flip(0))).flatten(0, 1)


def by_rank(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """(s, ...) -> (C, s / C, ...) by rank."""
    chunks = whole.unflatten(0, (2 * ranks, -1))
    return torch.stack((chunks[:ranks], chunks[ranks:].flip(0)), dim=1).flatten(1, 2)


def attend(q, k, v, group, attention) -> torch.Tensor:
    """This rank's rows of the attention output.

    q, k, v: this rank's [sequence / C, batch, heads, head size]. attention: a function of (queries, keys, values) of such
    shapes, the queries being the last ones of the keys' sequence.
    """
    ranks, rank = group.size(), group.rank()
    whole = GatherSequence.apply(torch.stack((k, v), dim=1), group)
    first, second = q.chunk(2)
    length = first.shape[0]
    return torch.cat([
        attention(rows, *whole[: (chunk + 1) * length].unbind(1))
        for rows, chunk in ((first, rank), (second, 2 * ranks - 1 - rank))
    ])  # fmt: skip
