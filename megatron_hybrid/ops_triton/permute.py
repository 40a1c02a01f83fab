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

from .launch import cdiv, on_device, power_of_2

_ROWS, _BLOCK, _AT_ONCE = 4, 2048, 8  # rows and columns of a program that copies; rows added between two looks at the map
_LEAST, _LONG = 512, 512  # elements of a program, bytes of a row
_BESIDE, _CLEARED = 256, 64  # columns of what is copied beside; rows of a program that looks for those without a choice
_TILE, _MOST_COUNTS = 2048, 128  # of a routing map at once; programs that count, each of which reads all of their counts
_WORD = torch.int32
_PARTS = 4  # programs for the rows that a rank sends to an expert


@triton.jit
def _chosen(routed, first, N, E, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """int32 (TOKENS, EXPERTS) of the tokens from `first` on: 1 where one goes to an expert."""
    t, e = first + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    inside = (t < N)[:, None] & (e < E)[None, :]
    return (tl.load(routed + t[:, None] * E + e[None, :], mask=inside, other=0) != 0).to(tl.int32)


@triton.jit(do_not_specialize=["N", "TILES"])  # they follow the number of tokens
def _count(routed, counts, N, E, TILES, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """counts (programs, E): of TILES * TOKENS tokens how many go to each expert."""
    e = tl.arange(0, EXPERTS)
    found = tl.zeros((EXPERTS,), tl.int32)
    for tile in range(0, TILES):
        first = (tl.program_id(0) * TILES + tile) * TOKENS
        found += tl.sum(_chosen(routed, first, N, E, TOKENS, EXPERTS), axis=0)
    tl.store(counts + tl.program_id(0) * E + e, found, mask=e < E)


@triton.jit(do_not_specialize=["N", "T", "TILES"])
def _index(
    routed, counts, starts, choice, rows, sizes, N, T, E, TILES, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """As many programs as `_count`'s, each for the same tokens. Rows that nothing chose are written by the last one."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    e, p = tl.arange(0, EXPERTS), tl.arange(0, TOKENS)
    total, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for some in range(0, programs, TOKENS):
        inside = (some + p < programs)[:, None] & (e < E)[None, :]
        n = tl.load(counts + (some + p)[:, None] * E + e[None, :], mask=inside, other=0)
        total += tl.sum(n, axis=0)
        before += tl.sum(tl.where((some + p < program)[:, None], n, 0), axis=0)
    row = tl.cumsum(total, axis=0) - total + before  # the next one of each expert
    slot = tl.sum(before, axis=0)
    for tile in range(0, TILES):
        first = (program * TILES + tile) * TOKENS
        t, chosen = first + p, _chosen(routed, first, N, E, TOKENS, EXPERTS)
        its = tl.sum(chosen, axis=1)
        start = slot + tl.cumsum(its, axis=0) - its
        tl.store(starts + t, start, mask=t < N)
        to = row[None, :] + tl.cumsum(chosen, axis=0) - 1
        at = start[:, None] + tl.cumsum(chosen, axis=1) - 1
        tl.store(choice + to, t[:, None] * E + e[None, :], mask=(chosen != 0) & (to < T))
        tl.store(rows + at, tl.where(to < T, to, -1), mask=(chosen != 0) & (at < T))
        row += tl.sum(chosen, axis=0)
        slot += tl.sum(its, axis=0)
    if program == programs - 1:
        tl.store(starts + N, slot)
        tl.store(sizes + e, total, mask=e < E)
        for some in range(slot, T, BLOCK):
            left = some + tl.arange(0, BLOCK)
            none = tl.zeros((BLOCK,), tl.int32) - 1
            tl.store(choice + left, none, mask=left < T)
            tl.store(rows + left, none, mask=left < T)


@triton.jit
def _chunks(
    counts, choice, rows, sizes, stride, first, num, RANKS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program, or one of several, for the rows that one rank sends to one of `num` experts."""
    rank, expert = tl.program_id(0) // num, tl.program_id(0) % num
    chunk = tl.arange(0, CHUNKS)
    r, e = chunk // num, chunk % num
    n = tl.load(counts + r * stride + first + e, mask=r < RANKS, other=0).to(tl.int32)
    here = tl.sum(tl.where(chunk == tl.program_id(0), n, 0), axis=0)
    came = tl.sum(tl.where(chunk < tl.program_id(0), n, 0), axis=0)
    stands = tl.sum(tl.where((e < expert) | ((e == expert) & (r < rank)), n, 0), axis=0)
    if (rank == 0) & (tl.program_id(1) == 0):
        size = tl.sum(tl.where(e == expert, n, 0), axis=0)
        tl.store(sizes + expert, size.to(sizes.dtype.element_ty))
    for start in range(tl.program_id(1) * BLOCK, here, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(choice + stands + i, came + i, mask=i < here)
        tl.store(rows + came + i, stands + i, mask=i < here)


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
def _gather_two(
    x, y, choice, x_out, y_out, x_stride, y_stride, x_out_stride, y_out_stride, T, W, V, E,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Row choice // E of x (N, W), and of y (N, V), V <= SHORT, for every choice, none of which is -1."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col, col_y = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SHORT)
    source = (tl.load(choice + row, mask=row < T, other=0) // E).to(tl.int64)[:, None]
    to = row.to(tl.int64)[:, None]
    inside = (row < T)[:, None] & (col < W)[None, :]
    tl.store(x_out + to * x_out_stride + col, tl.load(x + source * x_stride + col, mask=inside, other=0), mask=inside)
    if tl.program_id(1) == 0:
        short = (row < T)[:, None] & (col_y < V)[None, :]
        v = tl.load(y + source * y_stride + col_y, mask=short, other=0)
        tl.store(y_out + to * y_out_stride + col_y, v, mask=short)


@triton.jit(do_not_specialize=["N", "T"])
def _copy(
    x, starts, rows, choice, out, beside, out_beside, stride, beside_stride, N, T, W, B,
    AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, BESIDE: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """A row of x to all of its copies, read once; BESIDE > 0: a row of `beside` (N, B) too. Programs from N on write
    zeros where the choice is -1."""
    t = tl.program_id(0)
    col, col_beside = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BESIDE if BESIDE > 0 else 1)
    if t < N:
        begin, end = tl.load(starts + t), tl.minimum(tl.load(starts + t + 1), T)
        v = tl.load(x + t.to(tl.int64) * stride + col, mask=col < W, other=0)
        for first in range(begin, end, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                row = tl.load(rows + first + i, mask=first + i < end, other=-1)
                tl.store(out + tl.maximum(row, 0).to(tl.int64) * W + col, v, mask=(row >= 0) & (col < W))
        if BESIDE > 0:
            if tl.program_id(1) == 0:
                short = tl.load(beside + t.to(tl.int64) * beside_stride + col_beside, mask=col_beside < B, other=0)
                for at in range(begin, end):
                    its = tl.load(rows + at)
                    short_to = out_beside + tl.maximum(its, 0).to(tl.int64) * B + col_beside
                    tl.store(short_to, short, mask=(its >= 0) & (col_beside < B))
    else:
        first_row = (t - N) * CLEARED
        row = first_row + tl.arange(0, CLEARED)
        chosen = tl.load(choice + row, mask=row < T, other=0)
        if tl.min(chosen, axis=0) < 0:
            for i in range(CLEARED):
                at = first_row + i
                missing = tl.load(choice + at, mask=at < T, other=0) < 0
                zeros = tl.zeros((BLOCK,), out.dtype.element_ty)
                tl.store(out + at.to(tl.int64) * W + col, zeros, mask=missing & (col < W))
                if BESIDE > 0:
                    nothing = tl.zeros((BESIDE,), out_beside.dtype.element_ty)
                    to = out_beside + at.to(tl.int64) * B + col_beside
                    tl.store(to, nothing, mask=missing & (col_beside < B) & (tl.program_id(1) == 0))


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


@triton.jit(do_not_specialize=["T"])
def _scatter(values, choice, out, T, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(choice + row, mask=row < T, other=-1)
    tl.store(out + to, tl.load(values + row, mask=row < T, other=0), mask=to >= 0)


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


def index(
    routed: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(choice (T,), starts (N + 1,), rows (T,), sizes (E,)), int32, of a routing map (N, E): rows sorted by expert, then
    by token, and how many each expert has."""
    N, E = routed.shape
    made = {"dtype": torch.int32, "device": routed.device}
    choice, rows = torch.empty(num_rows, **made), torch.empty(num_rows, **made)
    starts, sizes = torch.empty(N + 1, **made), torch.empty(E, **made)
    experts = max(16, power_of_2(E))
    tokens = max(1, _TILE // experts)
    tiles = max(1, cdiv(cdiv(N, tokens), _MOST_COUNTS))
    programs = max(1, cdiv(N, tokens * tiles))
    counts = torch.empty((programs, E), **made)
    routed = routed.contiguous().view(torch.uint8)
    with on_device(routed):
        _count[programs,](routed, counts, N, E, tiles, TOKENS=tokens, EXPERTS=experts)
        _index[programs,](
            routed, counts, starts, choice, rows, sizes, N, num_rows, E, tiles,
            TOKENS=tokens, EXPERTS=experts, BLOCK=1024, num_warps=8,
        )  # fmt: skip
    return choice, starts, rows, sizes


def chunks_by_expert(
    counts: torch.Tensor, first: int, num: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(choice (T,), rows (T,), both int32, sizes (num,)): `permutation.RowOrder.by_expert` of T = num_rows rows."""
    ranks, device = counts.shape[0], counts.device
    choice, rows = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    sizes = torch.empty(num, dtype=counts.dtype, device=device)
    with on_device(counts):
        _chunks[ranks * num, _PARTS](
            counts, choice, rows, sizes, counts.stride(0), first, num,
            RANKS=ranks, CHUNKS=power_of_2(ranks * num), BLOCK=256,
        )  # fmt: skip
    return choice, rows, sizes


def gather(x: torch.Tensor, choice: torch.Tensor, num: int = 1, weights: torch.Tensor | None = None) -> torch.Tensor:
    """(T, W): row choice // num of x (N, W) for every choice, times weights (T,); zeros where the choice is -1."""
    T = choice.shape[0]
    out = torch.empty(T, x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        weighted = weights is not None
        source, to = _words(x, out)
        W = to.shape[1]
        block = min(_BLOCK, power_of_2(W))
        rows = max(_ROWS, _LEAST // block)
        with on_device(x):
            _gather[cdiv(T, rows), cdiv(W, block)](
                source, choice, weights if weighted else choice, to, source.stride(0), T, W, num,
                WEIGHTED=weighted, ROWS=rows, BLOCK=block,
            )  # fmt: skip
    return out


def gather_two(x, y, x_out, y_out, choice: torch.Tensor, num: int = 1) -> None:
    """Rows choice // num of bytes x (N, W) into x_out (T, W), and of y (N, V) into y_out (T, V), which may be parts of
    wider rows; no choice is -1. y's rows are short."""
    (x, x_out), (y, y_out) = _words(x, x_out), _words(y, y_out)
    (T, W), V = x_out.shape, y_out.shape[1]
    if T and W:
        block = min(_BLOCK, power_of_2(W))
        rows = max(_ROWS, _LEAST // block)
        with on_device(x):
            _gather_two[cdiv(T, rows), cdiv(W, block)](
                x, y, choice, x_out, y_out, x.stride(0), y.stride(0), x_out.stride(0), y_out.stride(0), T, W, V, num,
                ROWS=rows, BLOCK=block, SHORT=power_of_2(max(V, 1)),
            )  # fmt: skip


def scatter(values: torch.Tensor, choice: torch.Tensor, size: int) -> torch.Tensor:
    """(size,): every value (T,) where its choice is, which no other is; zeros elsewhere. A choice of -1 is nowhere."""
    out = torch.zeros(size, dtype=values.dtype, device=values.device)
    T = values.shape[0]
    if T:
        with on_device(values):
            _scatter[cdiv(T, 1024),](values, choice, out, T, BLOCK=1024)
    return out


def copies(x, choice: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor, num: int, beside=None):
    """`gather` without weights of a whole map, faster where rows are long: those of x do not fit into the cache.

    beside: a matrix (N, B), whose rows are copied too: the result is of both. One launch where its rows are short.
    """
    T, (N, W) = choice.shape[0], x.shape
    if W * x.element_size() < _LONG or not N:
        made = gather(x, choice, num)
        return made if beside is None else (made, gather(beside, choice, num))
    if beside is not None and not 0 < beside.shape[1] <= _BESIDE:
        return copies(x, choice, starts, rows, num), copies(beside, choice, starts, rows, num)
    out = torch.empty((T, W), dtype=x.dtype, device=x.device)
    source, to = _words(x, out)
    W = to.shape[1]
    block = min(_BLOCK, power_of_2(W))
    other, out_beside, wide = x, out, 0
    if beside is not None:
        wide = beside.shape[1]
        other, out_beside = beside, torch.empty((T, wide), dtype=beside.dtype, device=x.device)
    with on_device(x):
        _copy[N + cdiv(T, _CLEARED), cdiv(W, block)](
            source, starts, rows, choice, to, _bytes(other), _bytes(out_beside), source.stride(0), other.stride(0),
            N, T, W, wide, AT_ONCE=_AT_ONCE, BLOCK=block, BESIDE=power_of_2(wide) if wide else 0, CLEARED=_CLEARED,
        )  # fmt: skip
    return out if beside is None else (out, out_beside)


def sums(x, starts: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """(N, W): of every row of the smaller tensor the sum of its rows of x (T, W), times weights (T,)."""
    N, (T, W) = starts.shape[0] - 1, x.shape
    out = torch.empty(N, W, dtype=x.dtype, device=x.device)
    block = min(_BLOCK, power_of_2(max(W, 1)))
    if out.numel():
        weighted = weights is not None
        with on_device(x):
            _sum[N, cdiv(W, block)](
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
    (T, W), block = y.shape, min(_BLOCK, power_of_2(y.shape[1]))
    if T:
        with on_device(y):
            _scale[cdiv(T, _ROWS), cdiv(W, block)](
                y, by_row, by_col, group, y.stride(0), T, W, ROWS=_ROWS, BLOCK=block
            )
    return y


def _words(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of bytes, and where they are copied, as words where they are made of those: they are not computed with."""
    if x.element_size() > 1:
        return x, out
    x, out = _bytes(x), _bytes(out)
    if (x.shape[1] | x.stride(0) | x.storage_offset() | out.stride(0) | out.storage_offset()) % _WORD.itemsize:
        return x, out
    return x.view(_WORD), out.view(_WORD)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
