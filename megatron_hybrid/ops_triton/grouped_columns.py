"""FP8 columns of all groups, transposed, each group's rows starting a block of 128, and rows beside them.

Scales are of 128 elements, or of a whole row or a group's column.

A program reads a block of rows through the map of blocks (grouped_gemm.py), so that groups may begin anywhere; rows of
padding get code 0, blocks after the last group's are left as they are. Four rows' codes are packed into a word before
they are transposed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..formats import ELEMENTS
from ..permutation import RowMap
from .grouped_gemm import BLOCK, BlockMap
from .launch import on_device

_COLS, _AMAX_COLS, _AMAX_RUN = 64, 128, 4


@triton.jit
def _rows(choice, num, first, rows, j, COPIES: tl.constexpr):
    """Where rows j, j + 4, ... of a block are in x: (32,). COPIES: row r is a copy of row choice[r] // num of x."""
    at = tl.arange(0, 32) * 4 + j
    row = first + at
    if COPIES:
        row = tl.maximum(tl.load(choice + row, mask=at < rows, other=0), 0) // num
    return row


@triton.jit
def _values(x, row, rows, col, j, stride, K):
    """Rows j, j + 4, ... of a block, which are these of x, in FP32: (32, columns)."""
    at = tl.arange(0, 32) * 4 + j
    inside = (at < rows)[:, None] & (col < K)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _quarter(x, choice, num, first, rows, col, j, stride, K, COPIES: tl.constexpr):
    """`_values` of `_rows`."""
    return _values(x, _rows(choice, num, first, rows, j, COPIES), rows, col, j, stride, K)


@triton.jit
def _magnitude(v):
    """Bits of non-negative floats, which are ordered like the floats, NaN on top."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _encode_scale(amax, HOW: tl.constexpr):
    """largest / amax; 1 where the amax is 0, Inf or NaN."""
    top = tl.full(amax.shape, 3.4028234663852886e38, tl.float32)
    amax = tl.where(amax < HOW[4], HOW[4], amax)
    scale = tl.minimum(tl.div_rn(tl.full(amax.shape, HOW[1], tl.float32), amax), top)
    if HOW[5]:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return tl.where((amax > 0) & (amax <= top), scale, 1.0)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _encode(v, HOW: tl.constexpr, CONVERTS: tl.constexpr):
    """FP8 codes of FP32 values as int32: nearest even, saturating, one NaN. CONVERTS: the device has instructions."""
    LARGEST: tl.constexpr = HOW[1]
    BIAS: tl.constexpr = HOW[2]
    MANTISSA: tl.constexpr = HOW[3]
    if CONVERTS:
        narrow = v.to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5)
        return narrow.to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bits = v.to(tl.int32, bitcast=True)
        SHIFT: tl.constexpr = 23 - MANTISSA
        a = tl.minimum(tl.abs(v), LARGEST)
        normal = a.to(tl.int32, bitcast=True)
        normal = (normal + ((1 << (SHIFT - 1)) - 1) + ((normal >> SHIFT) & 1)) >> SHIFT
        normal -= (127 - BIAS) << MANTISSA
        # below the smallest normal number: added to 2^(23 - digits), the sum's last bit is the code's
        ONE: tl.constexpr = (127 + 23 - (BIAS - 1 + MANTISSA)) << 23
        base = tl.full(v.shape, ONE, tl.int32).to(tl.float32, bitcast=True)
        subnormal = (a + base).to(tl.int32, bitcast=True) - ONE
        code = tl.where(a.to(tl.int32, bitcast=True) < ((127 - BIAS + 1) << 23), subnormal, normal)
        code = code | ((bits >> 24) & 0x80)
        return tl.where(v != v, 0x7F, code)


@triton.jit(do_not_specialize=["count"])  # it follows the number of tokens
def _amax(
    x, choice, num, ends, blocks, of_rows, of_cols, stride, E, count, K, COPIES: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """The bits of amaxes, zeros before: of_cols (E, K) of every group's columns; with ROWS, of_rows (T,) of rows. A program
    takes RUN runs of COLS columns one after another: what it must know of its block is some loads after each other. Threads
    keep what their columns of a row have largest, and are asked for it once, at the end."""
    block = tl.program_id(1)  # programs beside each other read the same rows
    if block >= tl.load(ends + E - 1):
        return
    g, first, rows = tl.load(blocks + block), tl.load(blocks + count + block), tl.load(blocks + 2 * count + block)
    where, of_quarters = (), ()
    for j in tl.static_range(4):
        where = where + (_rows(choice, num, first, rows, j, COPIES),)
        of_quarters = of_quarters + (tl.zeros((32, COLS // 8), tl.int32),)
    for start in range(tl.program_id(0) * COLS * RUN, tl.minimum(K, (tl.program_id(0) + 1) * COLS * RUN), COLS):
        col = start + tl.arange(0, COLS)
        largest, found = tl.zeros((32, COLS), tl.int32), ()
        for j in tl.static_range(4):
            bits = _magnitude(_values(x, where[j], rows, col, j, stride, K))
            largest = tl.maximum(largest, bits)
            if ROWS:
                found = found + (tl.maximum(of_quarters[j], tl.max(tl.reshape(bits, (32, COLS // 8, 8)), axis=2)),)
            else:
                found = found + (of_quarters[j],)
        of_quarters = found
        tl.atomic_max(of_cols + g.to(tl.int64) * K + col, tl.max(largest, axis=0), mask=col < K, sem="relaxed")
    if ROWS:
        for j in tl.static_range(4):
            at = tl.arange(0, 32) * 4 + j
            tl.atomic_max(of_rows + first + at, tl.max(of_quarters[j], axis=1), mask=at < rows, sem="relaxed")


@triton.jit
def _cast_rows(v, first, rows, col, j, amax, codes, scales, K, HOW: tl.constexpr, CONVERTS: tl.constexpr):
    """A quarter of a block by rows."""
    at = tl.arange(0, 32) * 4 + j
    row, inside = (first + at).to(tl.int64), at < rows
    if HOW[0]:
        bits = tl.load(amax + row, mask=inside, other=0)
        scale, mine = scales + row, inside & (tl.program_id(1) == 0)
    else:
        bits = tl.max(_magnitude(v), axis=1)
        scale, mine = scales + row * tl.num_programs(1) + tl.program_id(1), inside
    enc = _encode_scale(bits.to(tl.float32, bitcast=True), HOW)
    tl.store(scale, _inverse(enc), mask=mine)
    code = _encode(v * enc[:, None], HOW, CONVERTS).to(tl.uint8)
    tl.store(codes + row[:, None] * K + col[None, :], code, mask=inside[:, None] & (col < K)[None, :])


@triton.jit(do_not_specialize=["count"])  # it follows the number of tokens
def _cast(
    x, choice, num, ends, blocks, row_amax, col_amax, row_codes, row_scales, col_codes, col_scales, stride, E, count, K,
    COPIES: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, CONVERTS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """ROW, COL: what makes the codes by rows and by columns, see `_how`; ROW None: no codes by rows.

    Columns: col_codes (K, 128 * count / 4) in words; col_scales (E, K), or (count, K) of every block. Rows: row_codes
    (T, K); row_scales (T,), or (T, K / 128) of blocks, which are COLS then.
    """
    block = tl.program_id(0)
    if block >= tl.load(ends + E - 1):
        return
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    g, first, rows = tl.load(blocks + block), tl.load(blocks + count + block), tl.load(blocks + 2 * count + block)
    at = (g if COL[0] else block).to(tl.int64) * K + col
    if COL[0]:
        bits = tl.load(col_amax + at, mask=col < K, other=0)
    else:
        largest = tl.zeros((32, COLS), tl.int32)
        for j in tl.range(4, num_stages=STAGES):
            largest = tl.maximum(largest, _magnitude(_quarter(x, choice, num, first, rows, col, j, stride, K, COPIES)))
        bits = tl.max(largest, axis=0)
    enc = _encode_scale(bits.to(tl.float32, bitcast=True), COL)
    tl.store(col_scales + at, _inverse(enc), mask=col < K)
    word = tl.zeros((32, COLS), tl.int32)
    for j in tl.range(4, num_stages=STAGES):  # read again, mostly from the cache
        v = _quarter(x, choice, num, first, rows, col, j, stride, K, COPIES)
        word |= _encode(v * enc[None, :], COL, CONVERTS) << (8 * j)
        if ROW is not None:
            _cast_rows(v, first, rows, col, j, row_amax, row_codes, row_scales, K, ROW, CONVERTS)
    out = col_codes + col.to(tl.int64)[:, None] * (count * 32) + block * 32 + tl.arange(0, 32)[None, :]
    tl.store(out, tl.trans(word), mask=(col < K)[:, None])


def _how(element: str, eps: float, pow2: bool, whole: bool) -> tuple:
    """What a cast does: scales of whole rows or columns (else of 128 elements), largest number, exponent bias, mantissa
    bits, the amax's lower bound, scales that are powers of two."""
    e = ELEMENTS[element]
    bias = (1 << (e.bits - 1 - e.significant_bits)) - 1  # exponent bits: all but the sign and the stored digits
    return (whole, e.max, bias, e.significant_bits - 1, eps, pow2)


class Amaxes(NamedTuple):
    """Bits of amaxes, int32: columns (E, K) of every group; rows (T,), or None."""

    columns: torch.Tensor
    rows: torch.Tensor | None


def group_amax(x: torch.Tensor, where: BlockMap, *, rows: bool = False, copies: RowMap | None = None) -> Amaxes:
    """Of x (T, K), in one read. copies: x is (N, K), and the T rows are copies of its rows."""
    num, (T, K) = where.ends.shape[0], (x.shape if copies is None else (copies.num_rows, x.shape[1]))
    both = torch.zeros(num * K + (T if rows else 0), dtype=torch.int32, device=x.device)
    columns, of_rows = both[: num * K].view(num, K), both[num * K :]
    with on_device(x):
        _amax[triton.cdiv(K, _AMAX_COLS * _AMAX_RUN), max(1, where.count)](
            x, *_read_by(x, copies), where.ends, where.blocks, of_rows, columns, x.stride(0), num, where.count, K,
            COPIES=copies is not None, ROWS=rows, COLS=_AMAX_COLS, RUN=_AMAX_RUN, num_warps=8, num_stages=1,
        )  # fmt: skip
    return Amaxes(columns, of_rows if rows else None)


def _read_by(x: torch.Tensor, copies: RowMap | None) -> tuple:
    """`_quarter`'s choice and num."""
    return (x, 1) if copies is None else (copies.choice, copies.num_experts)


def group_cast(
    x: torch.Tensor, where: BlockMap, amax: Amaxes | None, columns: dict, rows: dict | None = None,
    copies: RowMap | None = None,
):  # fmt: skip
    """((codes (K, R) by columns, scales), (codes (T, K) by rows, scales) or None) of x (T, K): uint8, and float32
    decode scales. R: rows of all blocks there is room for.

    columns, rows: `element`, `eps`, `pow2`, and `whole`: scales (E, K) and (T, 1) from `amax`, else (R / 128, K) and (T,
    K / 128) of blocks. copies: as `group_amax`'s; rows are None then.
    """
    assert rows is None or copies is None
    num, (T, K), count, device = where.ends.shape[0], x.shape, where.count, x.device
    codes = torch.empty(K, count * BLOCK, dtype=torch.uint8, device=device)
    scales = torch.ones(num, K, device=device) if columns["whole"] else torch.empty(count, K, device=device)
    row_codes = row_scales = None
    if rows is not None:
        row_codes = torch.empty(T, K, dtype=torch.uint8, device=device)
        row_scales = torch.empty(T, 1 if rows["whole"] else triton.cdiv(K, BLOCK), device=device)
    both = rows is not None
    wide = _COLS if not both or rows["whole"] else BLOCK
    with on_device(x):
        _cast[max(1, count), triton.cdiv(K, wide)](
            x, *_read_by(x, copies), where.ends, where.blocks,
            *((None, None) if amax is None else (amax.rows, amax.columns)), row_codes, row_scales, codes.view(torch.int32), scales, x.stride(0), num, count, K, COPIES=copies is not None,
            ROW=None if rows is None else _how(**rows), COL=_how(**columns), CONVERTS=x.is_cuda, COLS=wide,
            STAGES=3 if both else 1, num_warps=4 if both else 8,
        )  # fmt: skip
    return (codes, scales), None if rows is None else (row_codes, row_scales)
