"""Rows in another order: copied out of a smaller tensor, and summed back into it.

A map says for each row of the larger tensor which row of the smaller one it copies (`choice`: that row times E plus
which of its E columns chose it, -1 for none), and for each row of the smaller one which rows are its copies (`rows`,
those of row t from `starts[t]` on). Sums are in FP32 in the order of `rows`, rounded once; nothing is added
atomically.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import on_device

_ROWS, _BLOCK, _AT_ONCE = 4, 2048, 8  # rows and columns of a program that copies; rows added between two looks at the map
_LEAST, _LONG = 512, 512  # elements of a program, bytes of a row
_TILE = 2048  # of a routing map, a program


@triton.jit(do_not_specialize=["N", "T"])  # they follow the number of tokens
def _index(routed, at, starts, choice, rows, N, T, E, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """routed (N, E); at (E, N): how many were chosen up to there, expert by expert; starts (N + 1,)."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    inside = (t < N)[:, None] & (e < E)[None, :]
    chosen = tl.load(routed + t[:, None] * E + e[None, :], mask=inside, other=0) != 0
    row = tl.load(at + e[None, :] * N + t[:, None], mask=chosen, other=0) - 1
    slot = tl.load(starts + t, mask=t < N, other=0)[:, None] + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    tl.store(choice + row, t[:, None] * E + e[None, :], mask=chosen & (row < T))
    tl.store(rows + slot, tl.where(row < T, row, -1), mask=chosen & (slot < T))


@triton.jit(do_not_specialize=["T"])
def _gather(x, choice, weights, out, stride, T, W, E, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(choice + row, mask=row < T, other=-1)
    has = (source >= 0)[:, None] & (col < W)[None, :]
    v = tl.load(x + (tl.maximum(source, 0) // E).to(tl.int64)[:, None] * stride + col[None, :], mask=has, other=0)
    if WEIGHTED:
        v = v.to(tl.float32) * tl.load(weights + row, mask=row < T, other=0).to(tl.float32)[:, None]
    to = out + row.to(tl.int64)[:, None] * W + col[None, :]
    tl.store(to, v.to(out.dtype.element_ty), mask=(row < T)[:, None] & (col < W)[None, :])


@triton.jit(do_not_specialize=["T"])
def _copy(x, starts, rows, out, stride, T, W, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """A row of x to all of its copies, read once."""
    t = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(starts + t), tl.minimum(tl.load(starts + t + 1), T)
    v = tl.load(x + t.to(tl.int64) * stride + col, mask=col < W, other=0)
    for first in range(begin, end, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            row = tl.load(rows + first + i, mask=first + i < end, other=-1)
            tl.store(out + tl.maximum(row, 0).to(tl.int64) * W + col, v, mask=(row >= 0) & (col < W))


@triton.jit(do_not_specialize=["T"])
def _clear(choice, out, T, W, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros where the choice is -1."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    missing = tl.load(choice + row, mask=row < T, other=0) < 0
    if tl.max(missing.to(tl.int32), axis=0) > 0:
        for start in range(0, W, BLOCK):
            col = start + tl.arange(0, BLOCK)
            zeros = tl.zeros((ROWS, BLOCK), out.dtype.element_ty)
            to = out + row.to(tl.int64)[:, None] * W + col[None, :]
            tl.store(to, zeros, mask=missing[:, None] & (col < W)[None, :])


@triton.jit(do_not_specialize=["T"])
def _sum(x, starts, rows, weights, out, stride, T, W, WEIGHTED: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(starts + t), tl.minimum(tl.load(starts + t + 1), T)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            row = tl.load(rows + first + i, mask=first + i < end, other=-1)
            at = tl.maximum(row, 0).to(tl.int64) * stride
            v = tl.load(x + at + col, mask=(row >= 0) & (col < W), other=0.0).to(tl.float32)
            if WEIGHTED:
                v *= tl.load(weights + row, mask=row >= 0, other=0.0).to(tl.float32)
            total += v
    tl.store(out + t.to(tl.int64) * W + col, total.to(out.dtype.element_ty), mask=col < W)


@triton.jit
def _dot(x, y, choice, out, x_stride, y_stride, W, E, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(choice + row)
    from_x, from_y = x + (tl.maximum(source, 0) // E).to(tl.int64) * x_stride, y + row * y_stride
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, W, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = (col < W) & (source >= 0)
        a = tl.load(from_x + col, mask=inside, other=0.0).to(tl.float32)
        total += a * tl.load(from_y + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["rows"])
def _scale(y, by_row, by_col, group, stride, rows, W, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < W)[None, :]
    to = y + row.to(tl.int64)[:, None] * stride + col[None, :]
    v = tl.load(to, mask=inside, other=0.0).to(tl.float32) * tl.load(by_row + row, mask=row < rows, other=0.0)[:, None]
    g = tl.load(group + row, mask=row < rows, other=0).to(tl.int64)
    v *= tl.load(by_col + g[:, None] * W + col[None, :], mask=inside, other=0.0)
    tl.store(to, v.to(y.dtype.element_ty), mask=inside)


def index(routed: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(choice (T,), starts (N + 1,), rows (T,)), int32, of a routing map (N, E): rows sorted by expert, then by token."""
    (N, E), device = routed.shape, routed.device
    at = routed.T.reshape(-1).cumsum(0, dtype=torch.int32)
    starts = torch.nn.functional.pad(routed.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    choice = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    rows = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    experts = max(16, triton.next_power_of_2(E))
    tokens = max(1, _TILE // experts)
    with on_device(routed):
        _index[max(1, triton.cdiv(N, tokens)),](
            routed.contiguous().view(torch.uint8), at, starts, choice, rows, N, num_rows, E,
            TOKENS=tokens, EXPERTS=experts,
        )  # fmt: skip
    return choice, starts, rows


def gather(x: torch.Tensor, choice: torch.Tensor, num: int = 1, weights: torch.Tensor | None = None) -> torch.Tensor:
    """(T, W): row choice // num of x (N, W) for every choice, times weights (T,); zeros where the choice is -1."""
    T, W = choice.shape[0], x.shape[1]
    out = torch.empty(T, W, dtype=x.dtype, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(max(W, 1)))
    rows = max(_ROWS, _LEAST // block)
    if out.numel():
        weighted = weights is not None
        with on_device(x):
            _gather[triton.cdiv(T, rows), triton.cdiv(W, block)](
                _words(x), choice, weights if weighted else choice, _words(out), x.stride(0), T, W, num,
                WEIGHTED=weighted, ROWS=rows, BLOCK=block,
            )  # fmt: skip
    return out


def copies(x: torch.Tensor, choice: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor, num: int) -> torch.Tensor:
    """`gather` without weights of a whole map, faster where rows are long: those of x do not fit into the cache."""
    T, W = choice.shape[0], x.shape[1]
    if W * x.element_size() < _LONG or not x.shape[0]:
        return gather(x, choice, num)
    out, block = torch.empty(T, W, dtype=x.dtype, device=x.device), min(_BLOCK, triton.next_power_of_2(W))
    with on_device(x):
        _copy[x.shape[0], triton.cdiv(W, block)](
            _words(x), starts, rows, _words(out), x.stride(0), T, W, AT_ONCE=_AT_ONCE, BLOCK=block
        )
        _clear[max(1, triton.cdiv(T, 64)),](choice, _words(out), T, W, ROWS=64, BLOCK=128)
    return out


def sums(x, starts: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """(N, W): of every row of the smaller tensor the sum of its rows of x (T, W), times weights (T,)."""
    N, (T, W) = starts.shape[0] - 1, x.shape
    out = torch.empty(N, W, dtype=x.dtype, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(max(W, 1)))
    if out.numel():
        weighted = weights is not None
        with on_device(x):
            _sum[N, triton.cdiv(W, block)](
                x, starts, rows, weights if weighted else rows, out, x.stride(0), min(T, rows.shape[0]), W,
                WEIGHTED=weighted, AT_ONCE=_AT_ONCE, BLOCK=block, num_warps=8 if block == _BLOCK else 4,
            )  # fmt: skip
    return out


def dots(x: torch.Tensor, y: torch.Tensor, choice: torch.Tensor, num: int) -> torch.Tensor:
    """FP32 (T,): of every row of y (T, W) the product with row choice // num of x; 0 where the choice is -1."""
    out = torch.empty(y.shape[0], dtype=torch.float32, device=y.device)
    if y.numel():
        with on_device(y):
            _dot[y.shape[0],](x, y, choice, out, x.stride(0), y.stride(0), y.shape[1], num, BLOCK=1024)
    return out


def scale_rows(y: torch.Tensor, by_row: torch.Tensor, by_col: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """y (T, W) in place: times by_row (T,), then by_col (E, W) of the row's group (T,), in FP32, rounded once."""
    (T, W), block = y.shape, min(_BLOCK, triton.next_power_of_2(y.shape[1]))
    if T:
        with on_device(y):
            _scale[triton.cdiv(T, _ROWS), triton.cdiv(W, block)](
                y, by_row, by_col, group, y.stride(0), T, W, ROWS=_ROWS, BLOCK=block
            )
    return y


def _words(x: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes: they are copied, not computed with."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
