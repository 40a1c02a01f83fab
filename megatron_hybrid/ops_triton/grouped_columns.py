"""FP8 columns of all groups, transposed, each group's rows starting a block of 128: in blocks of 128 x 1, or row-scaled.

A program reads a block of rows through the map of blocks (grouped_gemm.py), so that groups may begin anywhere; rows of
padding get code 0, blocks after the last group's are left as they are. Four rows' codes are packed into a word before
they are transposed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .grouped_gemm import BLOCK, BlockMap
from .launch import on_device

_COLS, _AMAX_COLS = 64, 128
_TYPES = {"e4m3": (448.0, 7, 3), "e5m2": (57344.0, 15, 2)}  # largest number, exponent bias, stored mantissa bits


@triton.jit
def _four_rows(x, first, rows, col, stride, K, j: tl.constexpr):
    """Rows j, j + 4, ... of a block in FP32: (32, columns)."""
    at = tl.arange(0, 32) * 4 + j
    inside = (at < rows)[:, None] & (col < K)[None, :]
    v = tl.load(x + (first + at).to(tl.int64)[:, None] * stride + col[None, :], mask=inside, other=0.0)
    return v.to(tl.float32)


@triton.jit
def _largest(v0, v1, v2, v3):
    """Bits of the columns' amaxes. Those of non-negative floats are ordered like the floats, NaN on top."""
    bits = tl.maximum(_magnitude(v0), _magnitude(v1))
    return tl.max(tl.maximum(bits, tl.maximum(_magnitude(v2), _magnitude(v3))), axis=0)


@triton.jit
def _magnitude(v):
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _encode_scale(amax, LARGEST: tl.constexpr, EPS: tl.constexpr, POW2: tl.constexpr):
    """largest / amax; 1 where the amax is 0, Inf or NaN."""
    top = tl.full(amax.shape, 3.4028234663852886e38, tl.float32)
    amax = tl.where(amax < EPS, EPS, amax)
    scale = tl.minimum(tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax), top)
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return tl.where((amax > 0) & (amax <= top), scale, 1.0)


@triton.jit
def _encode(v, LARGEST: tl.constexpr, BIAS: tl.constexpr, MANTISSA: tl.constexpr, CONVERTS: tl.constexpr):
    """FP8 codes of FP32 values as int32: nearest even, saturating, one NaN. CONVERTS: the device has instructions."""
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


@triton.jit
def _amax(x, ends, blocks, out, stride, E, count, K, COLS: tl.constexpr):
    """out (E, K): the bits of every group's and column's amax, zeros before."""
    block = tl.program_id(0)
    if block >= tl.load(ends + E - 1):
        return
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    g, first, rows = tl.load(blocks + block), tl.load(blocks + count + block), tl.load(blocks + 2 * count + block)
    v0, v1 = _four_rows(x, first, rows, col, stride, K, 0), _four_rows(x, first, rows, col, stride, K, 1)
    v2, v3 = _four_rows(x, first, rows, col, stride, K, 2), _four_rows(x, first, rows, col, stride, K, 3)
    tl.atomic_max(out + g.to(tl.int64) * K + col, _largest(v0, v1, v2, v3), mask=col < K, sem="relaxed")


@triton.jit
def _cast(
    x, ends, blocks, amax, codes, scales, stride, E, count, K, WHOLE: tl.constexpr, LARGEST: tl.constexpr,
    BIAS: tl.constexpr, MANTISSA: tl.constexpr, EPS: tl.constexpr, POW2: tl.constexpr, CONVERTS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """codes (K, 128 * count / 4) in words. WHOLE: amax (E, K) -> scales (E, K); else of each block, (count, K)."""
    block = tl.program_id(0)
    if block >= tl.load(ends + E - 1):
        return
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    g, first, rows = tl.load(blocks + block), tl.load(blocks + count + block), tl.load(blocks + 2 * count + block)
    v0, v1 = _four_rows(x, first, rows, col, stride, K, 0), _four_rows(x, first, rows, col, stride, K, 1)
    v2, v3 = _four_rows(x, first, rows, col, stride, K, 2), _four_rows(x, first, rows, col, stride, K, 3)
    at = (g if WHOLE else block).to(tl.int64) * K + col
    bits = tl.load(amax + at, mask=col < K, other=0) if WHOLE else _largest(v0, v1, v2, v3)
    enc = _encode_scale(bits.to(tl.float32, bitcast=True), LARGEST, EPS, POW2)
    tl.store(scales + at, tl.div_rn(tl.full(enc.shape, 1.0, tl.float32), enc), mask=col < K)
    enc = enc[None, :]
    word = _encode(v0 * enc, LARGEST, BIAS, MANTISSA, CONVERTS)
    word |= _encode(v1 * enc, LARGEST, BIAS, MANTISSA, CONVERTS) << 8
    word |= _encode(v2 * enc, LARGEST, BIAS, MANTISSA, CONVERTS) << 16
    word |= _encode(v3 * enc, LARGEST, BIAS, MANTISSA, CONVERTS) << 24
    out = codes + col.to(tl.int64)[:, None] * (count * 32) + block * 32 + tl.arange(0, 32)[None, :]
    tl.store(out, tl.trans(word), mask=(col < K)[:, None])


def group_amax(x: torch.Tensor, where: BlockMap) -> torch.Tensor:
    """x (T, K) -> the bits of every group's and column's amax, int32 (E, K)."""
    out = torch.zeros(where.ends.shape[0], x.shape[1], dtype=torch.int32, device=x.device)
    with on_device(x):
        _amax[max(1, where.count), triton.cdiv(x.shape[1], _AMAX_COLS)](
            x, where.ends, where.blocks, out, x.stride(0), out.shape[0], where.count, x.shape[1], COLS=_AMAX_COLS,
            num_warps=8,
        )  # fmt: skip
    return out


def group_cast(x: torch.Tensor, where: BlockMap, amax: torch.Tensor | None, *, element: str, eps: float, pow2: bool):
    """uint8 codes (K, R) and float32 decode scales of x (T, K): (E, K) from `amax`, which is `group_amax`'s, or, None,
    (R / 128, K) of every block of rows. R: rows of all blocks there is room for."""
    num, K, count = where.ends.shape[0], x.shape[1], where.count
    codes = torch.empty(K, count * BLOCK, dtype=torch.uint8, device=x.device)
    whole = amax is not None
    scales = torch.ones(num, K, device=x.device) if whole else torch.empty(count, K, device=x.device)
    largest, bias, mantissa = _TYPES[element]
    with on_device(x):
        _cast[max(1, count), triton.cdiv(K, _COLS)](
            x, where.ends, where.blocks, amax, codes.view(torch.int32), scales, x.stride(0), num, count, K,
            WHOLE=whole, LARGEST=largest, BIAS=bias, MANTISSA=mantissa, EPS=eps, POW2=pow2, CONVERTS=x.is_cuda,
            COLS=_COLS, num_warps=8,
        )  # fmt: skip
    return codes, scales
