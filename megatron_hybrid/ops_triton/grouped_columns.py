"""Row-scaled FP8 columns of all groups: the amax of every group and column, then codes, transposed, rows spread out.

A tile of rows reads its source rows through an index and each row's scales through its group, so that groups may
begin anywhere; rows of padding, whose index is negative, get code 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import on_device

_ROWS, _COLS = 64, 64
_BLOCK_COLS = 256
_MANY = 8


@triton.jit
def _amax(x, source, group, out, stride, K, blocks, MANY: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """MANY blocks of ROWS rows, each of one group; one maximum goes to memory for every run of blocks of a group.

    Bits of non-negative floats are ordered like the floats, NaN on top.
    """
    block = tl.program_id(0) * MANY
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    running = tl.zeros((COLS,), tl.int32)
    current = tl.load(group + block.to(tl.int64) * ROWS)
    for _ in range(MANY):
        g = tl.load(group + block.to(tl.int64) * ROWS, mask=block < blocks, other=current)
        if g != current:
            tl.atomic_max(out + current.to(tl.int64) * K + col, running, mask=col < K)
            running = tl.zeros((COLS,), tl.int32)
            current = g
        at = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        row = tl.load(source + at, mask=block < blocks, other=-1).to(tl.int64)[:, None]
        v = tl.load(x + row * stride + col[None, :], mask=(row >= 0) & (col < K)[None, :], other=0.0).to(tl.float32)
        bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        running = tl.maximum(running, tl.max(bits, axis=0))
        block += 1
    tl.atomic_max(out + current.to(tl.int64) * K + col, running, mask=col < K)


@triton.jit
def _encode(v, LARGEST: tl.constexpr, BIAS: tl.constexpr, MANTISSA: tl.constexpr):
    """FP8 codes of FP32 values: nearest even, saturating, one NaN. Integer arithmetic, the same on every device."""
    bits = v.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    a = tl.minimum(tl.abs(v), LARGEST)
    normal = a.to(tl.int32, bitcast=True)
    normal = ((normal + ((1 << (SHIFT - 1)) - 1) + ((normal >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # below the smallest normal number: added to 2^(23 - digits), the sum's last bit is the code's
    ONE: tl.constexpr = (127 + 23 - (BIAS - 1 + MANTISSA)) << 23
    base = tl.full(v.shape, ONE, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (a + base).to(tl.int32, bitcast=True) - ONE
    code = tl.where(a.to(tl.int32, bitcast=True) < ((127 - BIAS + 1) << 23), subnormal, normal)
    code = code | ((bits >> 24) & 0x80)
    return tl.where(v != v, 0x7F, code).to(tl.uint8)


@triton.jit
def _cast(
    x, source, group, enc, codes, stride, K, R, LARGEST: tl.constexpr, BIAS: tl.constexpr, MANTISSA: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row = tl.load(source + at, mask=at < R, other=-1).to(tl.int64)[:, None]
    g = tl.load(group + at, mask=at < R, other=0).to(tl.int64)[:, None]
    inside = (row >= 0) & (col < K)[None, :]
    v = tl.load(x + row * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    v *= tl.load(enc + g * K + col[None, :], mask=inside, other=1.0)
    code = _encode(v, LARGEST, BIAS, MANTISSA)
    out = codes + col[:, None].to(tl.int64) * R + at[None, :]
    tl.store(out, tl.trans(code), mask=(col < K)[:, None] & (at < R)[None, :])


def group_amax(x: torch.Tensor, source: torch.Tensor, group: torch.Tensor, num: int, align: int) -> torch.Tensor:
    """x (T, K) -> float32 (E, K). source, group: int32 (R,), the row and the group of each spread-out row, -1 for
    padding; every `align` of them are of one group."""
    out = torch.zeros(num, x.shape[1], dtype=torch.int32, device=x.device)
    with on_device(x):
        blocks = source.shape[0] // align
        _amax[triton.cdiv(blocks, _MANY), triton.cdiv(x.shape[1], _BLOCK_COLS)](
            x, source, group, out, x.stride(0), x.shape[1], blocks, MANY=_MANY, ROWS=align, COLS=_BLOCK_COLS
        )
    return out.view(torch.float32)


def group_cast(x, source, group, enc: torch.Tensor, *, largest: float, bias: int, mantissa: int) -> torch.Tensor:
    """uint8 codes (K, R) of x (T, K) times its group's encode scales enc (E, K). largest, bias, mantissa: of the
    element type, its largest number, exponent bias and stored mantissa bits."""
    K, R = x.shape[1], source.shape[0]
    codes = torch.empty(K, R, dtype=torch.uint8, device=x.device)
    with on_device(x):
        _cast[triton.cdiv(R, _ROWS), triton.cdiv(K, _COLS)](
            x, source, group, enc, codes, x.stride(0), K, R, LARGEST=largest, BIAS=bias, MANTISSA=mantissa,
            ROWS=_ROWS, COLS=_COLS,
        )  # fmt: skip
    return codes
