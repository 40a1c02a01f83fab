"""SwiGLU of experts' rows times their weights, and its gradient, cast as computed: FP8 with scales of 128 elements.

A program computes a block of rows (grouped_gemm.py's map) and 128 columns of gate and of up, rounds what it finds to
x's dtype, and holds it for both casts: nothing is read twice, and results are in memory as codes only. They are those
of swiglu.py and of `group_cast`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .grouped_columns import cast_held, converts, empty_columns, empty_rows, how_cast, measured
from .grouped_gemm import BLOCK, BlockMap
from .launch import on_device
from .swiglu import gated, load, sums_for, sums_of_tiles, total, weighted_gradients

_WARPS = 16  # of 8, each thread would hold twice as much, and what is held of a gradient would not fit into registers


@triton.jit
def _quarter(x, weights, first, rows, col, j, stride, F):
    """Of rows j, j + 4, ... of a block: where they are (32,), which of their columns are inside, gate, up, weights."""
    at = tl.arange(0, 32) * 4 + j
    inside = (at < rows)[:, None] & (col < F)[None, :]
    gate, up = load(x + first.to(tl.int64) * stride, x, at[:, None], col[None, :], inside, stride, F, False)
    weight = tl.load(weights + first + at, mask=at < rows, other=0.0).to(tl.float32)
    return at, inside, gate, up, weight[:, None]


@triton.jit(do_not_specialize=["count"])  # it follows the number of tokens
def _cast_weighted_forward(
    x, weights, ends, blocks, row_codes, row_scales, col_codes, col_scales, stride, E, count, F,
    ROW: tl.constexpr, COL: tl.constexpr, CONVERTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Payloads of y (T, F): as `_cast`'s."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if block >= tl.load(ends + E - 1):
        return
    first, rows = tl.load(blocks + count + block), tl.load(blocks + 2 * count + block)
    col = tile * COLS + tl.arange(0, COLS)
    held, of_rows, of_cols = (), (), tl.zeros((32, COLS), tl.int32)
    for j in tl.static_range(4):
        _, _, gate, up, weight = _quarter(x, weights, first, rows, col, j, stride, F)
        y = (gated(gate, up) * weight).to(x.dtype.element_ty).to(tl.float32)
        bits, of_cols = measured(y, of_cols)
        held, of_rows = held + (y,), of_rows + (bits,)
    cast_held(
        held, of_rows, of_cols, blocks, block, col, tile, row_codes, row_scales, col_codes, col_scales, count, F, ROW,
        COL, CONVERTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "T"])
def _cast_weighted_backward(
    dy, x, weights, sums, ends, blocks, row_codes, row_scales, col_codes, col_scales, dy_stride, stride, E, count, F, T,
    ROW: tl.constexpr, COL: tl.constexpr, CONVERTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Payloads of dx (T, 2F), as `_cast`'s; sums: see `_weighted_backward`. F is a multiple of COLS."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if block >= tl.load(ends + E - 1):
        return
    first, rows = tl.load(blocks + count + block), tl.load(blocks + 2 * count + block)
    col = tile * COLS + tl.arange(0, COLS)
    gates, of_gates, gate_cols = (), (), tl.zeros((32, COLS), tl.int32)
    ups, of_ups, up_cols = (), (), tl.zeros((32, COLS), tl.int32)
    for j in tl.static_range(4):
        at, inside, gate, up, weight = _quarter(x, weights, first, rows, col, j, stride, F)
        start = dy + first.to(tl.int64) * dy_stride
        d = tl.load(start + (at[:, None] * dy_stride + col[None, :]), mask=inside, other=0.0).to(tl.float32)
        dgate, dup, term = weighted_gradients(gate, up, weight, d)
        found = tl.reshape(sums_of_tiles(term), (32,))
        tl.store(sums + (tile.to(tl.int64) * T + first) + at, found, mask=at < rows)
        dgate = dgate.to(x.dtype.element_ty).to(tl.float32)
        dup = dup.to(x.dtype.element_ty).to(tl.float32)
        bits, gate_cols = measured(dgate, gate_cols)
        gates, of_gates = gates + (dgate,), of_gates + (bits,)
        bits, up_cols = measured(dup, up_cols)
        ups, of_ups = ups + (dup,), of_ups + (bits,)
    cast_held(
        gates, of_gates, gate_cols, blocks, block, col, tile, row_codes, row_scales, col_codes, col_scales, count, 2 * F,
        ROW, COL, CONVERTS,
    )  # fmt: skip
    cast_held(
        ups, of_ups, up_cols, blocks, block, F + col, F // COLS + tile, row_codes, row_scales, col_codes, col_scales,
        count, 2 * F, ROW, COL, CONVERTS,
    )  # fmt: skip


def product_cast(x: torch.Tensor, weights: torch.Tensor, where: BlockMap, columns: dict, rows: dict):
    """(`group_cast` of `weighted_product(x, weights)`,): rows x (T, 2F) of 16 bits an element, weights (T,)."""
    (T, F), count = (x.shape[0], x.shape[1] // 2), where.count
    by_columns, by_rows = empty_columns(F, where, columns, x.device), empty_rows(T, F, rows, x.device)
    with on_device(x):
        _cast_weighted_forward[max(1, count), triton.cdiv(F, BLOCK)](
            x, weights, where.ends, where.blocks, *by_rows, *_words(by_columns), x.stride(0), where.ends.shape[0],
            count, F, ROW=how_cast(**rows), COL=how_cast(**columns), CONVERTS=converts(x.device), COLS=BLOCK,
            num_warps=_WARPS, maxnreg=64,
        )  # fmt: skip
    return ((by_columns, by_rows),)


def gradient_cast(
    dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, where: BlockMap, columns: dict, rows: dict
):  # fmt: skip
    """(`group_cast` of the first, the second) of `weighted_gradient(dy, x, weights)`; F is a multiple of 128."""
    (T, F), count, sums = (x.shape[0], x.shape[1] // 2), where.count, sums_for(x)
    by_columns, by_rows = empty_columns(2 * F, where, columns, x.device), empty_rows(T, 2 * F, rows, x.device)
    with on_device(x):
        _cast_weighted_backward[max(1, count), F // BLOCK](
            dy, x, weights, sums, where.ends, where.blocks, *by_rows, *_words(by_columns), dy.stride(0), x.stride(0),
            where.ends.shape[0], count, F, T, ROW=how_cast(**rows), COL=how_cast(**columns),
            CONVERTS=converts(x.device), COLS=BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return (by_columns, by_rows), total(sums, weights)


def _words(columns: tuple) -> tuple:
    """Their codes as `_cast` writes them."""
    codes, scales = columns
    return codes.view(torch.int32), scales
