"""Tokens on their way to experts and back: each copied to its experts' rows, and the rows summed to their tokens.

Kernels on a GPU (ops_triton/permute.py), torch operations elsewhere. Copies are bit for bit; sums are in FP32 or wider,
over a token's experts in the order of their numbers, and rounded once. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from . import ops_triton
from .ops_triton.launch import as_rows, packed

_SUMMED = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class RowMap:
    """T rows sorted by expert, copies of N tokens' rows. All int32 on the device.

    choice: (T,) of each row its token * E + its expert, -1 for a row that nothing chose. starts: (N + 1,), rows: (T,):
    the rows of token t are rows[starts[t] : starts[t + 1]], by expert. sizes: (E,), of each expert, where known.
    """

    choice: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    num_experts: int
    sizes: torch.Tensor | None = None

    @classmethod
    def of(cls, routing_map: torch.Tensor, num_rows: int) -> RowMap:
        """routing_map: bool (N, E), or anything that is not 0 where a token goes to an expert. num_rows: T, how many
        those are, or more."""
        routed = routing_map if routing_map.dtype == torch.bool else routing_map != 0
        if _has_triton(routed):
            from .ops_triton import permute

            found = permute.index(routed, num_rows)
        else:
            found = _index(routed, num_rows)
        choice, starts, rows, sizes = found
        return cls(choice, starts, rows, routed.shape[1], sizes)

    @property
    def num_tokens(self) -> int:
        return self.starts.shape[0] - 1

    @property
    def num_rows(self) -> int:
        return self.choice.shape[0]

    @property
    def tokens(self) -> torch.Tensor:
        """int64 (T,): the token of each row, -1 for none."""
        return self.choice.long().div(self.num_experts, rounding_mode="floor")

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """x (N, W) of any dtype -> (T, W)."""
        if _has_triton(x):
            from .ops_triton import permute

            return permute.copies(as_rows(x), self.choice, self.starts, self.rows, self.num_experts)
        return gather_rows(x, self.choice, self.num_experts)

    def expand_both(self, x: torch.Tensor, beside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`expand` of two, of which `beside` has the shorter rows."""
        if _has_triton(x):
            from .ops_triton import permute

            where = self.choice, self.starts, self.rows, self.num_experts
            return permute.copies(as_rows(x), *where, as_rows(beside))
        return self.expand(x), self.expand(beside)

    def sum(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """(N, W): of every token the sum of its rows of x (T, W), each times its weight (T,)."""
        x = as_rows(x)
        if _has_triton(x) and x.dtype in _SUMMED:
            from .ops_triton import permute

            return permute.sums(x, self.starts, self.rows, weights)
        wide = torch.promote_types(x.dtype, torch.float32)
        x_wide = x.to(wide) if weights is None else x.to(wide) * weights.to(wide).unsqueeze(1)
        out = torch.zeros(self.num_tokens + 1, x.shape[1], dtype=wide, device=x.device)  # the last for rows of no token
        return out.index_add_(0, self.tokens % (self.num_tokens + 1), x_wide)[:-1].to(x.dtype)


class RowOrder(RowMap):
    """T rows in another order, each of them once: row choice[i] stands at place i, and row t at place rows[t].

    Nothing is added: `sum` is `expand` back.

    sizes: of the experts whose rows these are.
    """

    def __init__(self, choice: torch.Tensor, rows: torch.Tensor, sizes: torch.Tensor | None = None):
        super().__init__(choice, None, rows, 1, sizes)

    @classmethod
    def by_expert(cls, counts: torch.Tensor, first: int, num: int, num_rows: int) -> RowOrder:
        """The order by expert, then by the rank that sent them, of rows that have come by rank, then by expert.

        counts: int (R, E) on the device, rows that each rank sends to each expert. Here are `num` experts from `first`
        on, with num_rows rows in all.
        """
        if _has_triton(counts):
            from .ops_triton import permute

            return cls(*permute.chunks_by_expert(counts, first, num, num_rows))
        here = counts[:, first : first + num]
        order = torch.arange(here.numel(), device=counts.device).view(-1, num).T.reshape(-1)
        choice = chunk_sources(here.reshape(-1), order, num_rows)
        return cls(choice, inverse(choice), here.sum(dim=0, dtype=counts.dtype))

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0]

    @property
    def tokens(self) -> torch.Tensor:
        """int64 (T,): the row that stands at each place."""
        return self.choice.long()

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        return gather_rows(x, self.choice)

    def expand_both(self, x: torch.Tensor, beside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.expand(x), self.expand(beside)

    def sum(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        return gather_rows(x, self.rows, 1, None if weights is None else weights[self.rows.long()])


def _index(routed: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, ...]:
    """`ops_triton.permute.index` in torch operations."""
    (N, E), device = routed.shape, routed.device
    picked = routed.T.reshape(-1).to(torch.uint8).argsort(descending=True, stable=True)[:num_rows]
    choice = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    choice[: picked.shape[0]] = torch.where(routed.T.reshape(-1)[picked], picked % N * E + picked // N, -1)
    last = torch.where(choice < 0, N * E, choice)  # rows that nothing chose stand at the end
    rows = torch.where(last.sort(stable=True).values < N * E, last.argsort(stable=True), -1)
    starts = torch.nn.functional.pad(routed.sum(1).cumsum(0), (1, 0))
    return tuple(t.to(torch.int32) for t in (choice, starts, rows, routed.sum(0)))


def permute(tokens: torch.Tensor, where: RowMap) -> torch.Tensor:
    """tokens (N, W) -> their rows (T, W)."""
    return _Copy.apply(tokens, where)


def permute_probs(probs: torch.Tensor, where: RowMap) -> torch.Tensor:
    """probs (N, E) -> those of the rows, (T,)."""
    return _Pick.apply(probs, where)


def unpermute(rows: torch.Tensor, where: RowMap, probs: torch.Tensor | None = None) -> torch.Tensor:
    """Rows (T, W) -> the sum of each token's, (N, W), each times its probability in probs (N, E)."""
    return _Sum.apply(rows, where, None if probs is None else _Pick.apply(probs, where))


def sort_chunks(x: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Chunks of rows of x (T, ...) of these sizes (C,), in another order (C,)."""
    source = chunk_sources(sizes, order, x.shape[0]).to(x.device)
    return _Reorder.apply(x, source, inverse(source))


def chunk_sources(sizes: torch.Tensor, order: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int32 (T,): which row stands where when chunks of these sizes (C,) are put in this order (C,)."""
    order = order.to(sizes.device)
    ends, moved = sizes.cumsum(0), sizes[order]
    new_ends = moved.cumsum(0)
    row = torch.arange(num_rows, device=sizes.device)
    chunk = torch.searchsorted(new_ends, row, right=True).clamp_(max=sizes.shape[0] - 1)
    shift = (ends - sizes)[order] - (new_ends - moved)
    return (row + shift[chunk]).to(torch.int32)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """(T,): where each row goes when row order[i] comes to place i; order (T,) has every row once."""
    places = torch.arange(order.shape[0], dtype=order.dtype, device=order.device)
    return torch.empty_like(order).index_copy_(0, order.long(), places)


def gather_rows(x: torch.Tensor, choice: torch.Tensor, num: int = 1, weights: torch.Tensor | None = None) -> torch.Tensor:
    """(T, W): row choice // num of x (N, W) of any dtype, times weights (T,); zeros where the choice is -1."""
    x = as_rows(x)
    if _has_triton(x) and (weights is None or x.dtype in _SUMMED):
        from .ops_triton import permute

        return permute.gather(x, choice, num, weights)
    source = choice.long().clamp(min=0) // num
    out = x.view(torch.uint8).index_select(0, source).view(x.dtype) if x.element_size() == 1 else x.index_select(0, source)
    if weights is not None:
        out = (out * weights.unsqueeze(1)).to(x.dtype)
    return torch.where((choice >= 0).unsqueeze(1), out, torch.zeros((), dtype=x.dtype, device=x.device))


def gather_bytes(sources, outs, where: RowMap) -> None:
    """The rows of byte matrices (N, ...) to those that are their copies, of which each is one; `outs` (T, ...) may be parts
    of wider rows."""
    sources, outs = list(sources), list(outs)
    if len(outs) > 1 and _has_triton(outs[0]):
        from .ops_triton import permute

        permute.gather_two(*sources[:2], *outs[:2], where.choice, where.num_experts)
        del sources[:2], outs[:2]
    for source, out in zip(sources, outs):
        out.copy_(gather_rows(source, where.choice, where.num_experts))


def _row_dots(x: torch.Tensor, y: torch.Tensor, where: RowMap) -> torch.Tensor:
    """(T,): of every row of y (T, W) the product with its token's row of x (N, W), in FP32 or wider."""
    if _has_triton(y) and y.dtype in _SUMMED:
        from .ops_triton import permute

        return permute.dots(as_rows(x), as_rows(y), where.choice, where.num_experts)
    wide = torch.promote_types(y.dtype, torch.float32)
    return (where.expand(x).to(wide) * y.to(wide)).sum(1)


def _has_triton(x: torch.Tensor) -> bool:
    return ops_triton.reason(x.device) is None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, where: RowMap):
        ctx.where = where
        return where.expand(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return ctx.where.sum(dy), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, where: RowMap, weights):
        ctx.where = where
        ctx.save_for_backward(*(() if weights is None else (x, weights)))
        return where.sum(x, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        where, (x, weights) = ctx.where, ctx.saved_tensors or (None, None)
        dx = where.expand(dy) if weights is None else gather_rows(dy, where.choice, where.num_experts, weights)
        return dx, None, None if weights is None else _row_dots(dy, x, where).to(weights.dtype)


class _Pick(torch.autograd.Function):
    """Of a matrix (N, E) what the rows chose, (T,)."""

    @staticmethod
    def forward(ctx, probs, where: RowMap):
        ctx.where, ctx.shape = where, probs.shape
        return gather_rows(probs.reshape(-1, 1), where.choice).view(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        size = ctx.shape.numel()
        if _has_triton(grad):
            from .ops_triton import permute

            return permute.scatter(packed(grad), ctx.where.choice, size).view(ctx.shape), None
        choice = ctx.where.choice.long()
        out = grad.new_zeros(size + 1)  # the last for rows that nothing chose
        return out.index_copy_(0, choice % (size + 1), grad.contiguous())[:-1].view(ctx.shape), None


class _Reorder(torch.autograd.Function):
    """Rows in another order, without one left out or repeated."""

    @staticmethod
    def forward(ctx, x, source, back):
        ctx.save_for_backward(back)
        return _gather_any(x, source)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gather_any(dy, *ctx.saved_tensors), None, None


def _gather_any(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`gather_rows` of x (T, ...)."""
    return gather_rows(x.unsqueeze(-1).flatten(1), source).view(x.shape)
