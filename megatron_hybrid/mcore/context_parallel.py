"""Core attention where the sequence is split over context-parallel ranks: each gathers all keys and values.

Megatron cuts the sequence into twice as many chunks as there are ranks, and rank r of C holds chunks r and 2C - 1 - r: as
many visible keys on every rank. Each of a rank's two chunks of queries attends to the keys up to its own end.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """(C, s / C, ...) by rank -> (s, ...)."""
    halves = parts.unflatten(1, (2, -1))
    return torch.cat((halves[:, 0], halves[:, 1].flip(0))).flatten(0, 1)


def attend(q, k, v, group, attention) -> torch.Tensor:
    """This rank's rows of the attention output.

    q, k, v: this rank's [sequence / C, batch, heads, head size]. attention: a function of (queries, keys, values) of such
    shapes, the queries being the last ones of the keys' sequence.
    """
    ranks, rank = group.size(), group.rank()
    parts = gather_from_sequence_parallel_region(torch.stack((k, v), dim=1), group=group)  # gradients are summed back
    whole = in_order(parts.unflatten(0, (ranks, -1)))
    first, second = q.chunk(2)
    length = first.shape[0]
    return torch.cat([
        attention(rows, *whole[: (chunk + 1) * length].unbind(1))
        for rows, chunk in ((first, rank), (second, 2 * ranks - 1 - rank))
    ])  # fmt: skip
