"""Columnwise casts of FP8 for all groups at once: a scale for every group and column, or for every 128 rows of a group.

The arithmetic is docs/numerics.md's FP32 rule: on a GPU in the casts of csrc/cuda, with the map of blocks from Triton,
in torch operations elsewhere; tests hold both to the bytes of casts of each group alone.
"""

from __future__ import annotations

import torch

from . import ops_triton
from .formats import COLUMNWISE, ELEMENTS, ROWWISE, Format
from .gemm.scaled_mm import BLOCK, ROW, scale_kind
from .groups import Layout
from .kernels import Side, amax_groups, cast_groups
from .ops_triton.launch import as_rows
from .permutation import RowMap
from .scaling import FLT_MAX
from .storage import FP8_DTYPES, QuantizedStorage, cast

_SOURCES, _BLOCK_ROWS = (torch.bfloat16, torch.float16, torch.float32), 128
_ALIGNED = 16  # what grouped FP8 GEMMs ask of K; compiled for 100 columns, rows and columns together gave wrong codes
_ALL_BUT_SIGN = (1 << 31) - 1
_SIGN_AND_EXPONENT = -(1 << 23)  # 0xff800000 as an int32


def row_scaled_columns(x: torch.Tensor, fmt: Format, layout: Layout, copies: RowMap | None = None) -> QuantizedStorage:
    """x (T, K) -> payload of its rows spread out by `layout`, stored (K, rows), with scales (E, K).

    copies: x is (N, K), and the T rows are copies of its rows.

    NaN and Inf leave their group's column with scale 1, as in a cast of the group alone. Rows after the last group
    get codes that nothing reads.
    """
    return (with_kernels if _has_kernels(x, layout) else with_torch)(x, fmt, layout, copies)


def block_columns(
    x: torch.Tensor, fmt: Format, layout: Layout, copies: RowMap | None = None, *, transposed: bool
) -> QuantizedStorage:
    """x (T, K) -> payload of its rows spread out by `layout`, with a scale for every 128 rows of a group and column.

    copies: as `row_scaled_columns`'s. Rows after the last group get codes that nothing reads.
    """
    if transposed and not fmt.tile and _has_kernels(x, layout):
        return with_kernels(x, fmt, layout, copies)
    return cast(layout.spread(x, copies), fmt, COLUMNWISE, transposed=transposed)


def _has_kernels(x: torch.Tensor, layout: Layout) -> bool:
    return x.dtype in _SOURCES and layout.align == _BLOCK_ROWS and ops_triton.reason(x.device) is None


def with_torch(x: torch.Tensor, fmt: Format, layout: Layout, copies: RowMap | None = None) -> QuantizedStorage:
    """`row_scaled_columns` on any device."""
    x, blocks = layout.spread(x, copies), layout.align
    group = _group_of_blocks(layout, x.shape[0] // blocks)
    amax = x.abs().view(-1, blocks, x.shape[1]).amax(1).float()  # (blocks of rows, K)
    enc = encode_scale(_segment_max(amax, group, layout.groups.num), fmt)
    values = x.view(-1, blocks, x.shape[1]).float() * enc[group].unsqueeze(1)
    return _payload(x.shape, x.dtype, fmt, encode(values.view(x.shape), fmt).T.contiguous(), enc)


def with_kernels(x: torch.Tensor, fmt: Format, layout: Layout, copies: RowMap | None = None) -> QuantizedStorage:
    """`row_scaled_columns` in two reads of x, `block_columns` in one; on CUDA, groups begin at multiples of 128."""
    return both_with_kernels(x, None, fmt, layout, copies)[1]


def rows_and_columns(x: torch.Tensor, row: Format, col: Format, layout: Layout):
    """(rowwise payload, columnwise payload spread out by `layout`) of x (T, K) from one read of it, two where scales are
    of whole rows or columns; None where this device or these formats need a cast each."""
    known = all(scale_kind(fmt) in (ROW, BLOCK) for fmt in (row, col))
    if known and x.shape[1] % _ALIGNED == 0 and _has_kernels(x, layout):
        return both_with_kernels(x, row, col, layout)
    return None


def both_with_kernels(x: torch.Tensor, row: Format | None, col: Format, layout: Layout, copies: RowMap | None = None):
    """`rows_and_columns`; (None, columnwise payload) where `row` is None, as it is with `copies`."""

    def side(fmt: Format, codes, of_whole, of_blocks, amax, **how) -> Side:
        whole = scale_kind(fmt) == ROW
        codes = torch.empty(codes, dtype=torch.uint8, device=x.device)
        scale = torch.empty(of_whole if whole else of_blocks, device=x.device)
        return Side(fmt, codes, scale, amax if whole else None, **how)

    x = as_rows(x)
    K, where, of_columns, of_rows = x.shape[1], layout.blocks, None, None
    T = x.shape[0] if copies is None else copies.num_rows
    whole_rows = row is not None and scale_kind(row) == ROW
    if whole_rows or scale_kind(col) == ROW:
        of_columns, of_rows = amax_groups(x, where, T, rows=whole_rows, copies=copies)
    columns = side(col, (K, layout.rows), (layout.groups.num, K), (where.count, K), of_columns, transposed=True)
    rows = None if row is None else side(row, (T, K), (T, 1), (T, -(-K // layout.align)), of_rows)
    cast_groups(x, rows, columns, where, T, copies)
    payload = QuantizedStorage(col, COLUMNWISE, (layout.rows, K), x.dtype, True, columns.qdata, columns.scale)
    return None if rows is None else QuantizedStorage(row, ROWWISE, (T, K), x.dtype, False, rows.qdata, rows.scale), payload


def _payload(shape, dtype, fmt: Format, codes: torch.Tensor, enc: torch.Tensor) -> QuantizedStorage:
    return QuantizedStorage(fmt, COLUMNWISE, tuple(shape), dtype, True, codes, torch.ones_like(enc) / enc)


def _group_of_blocks(layout: Layout, num_blocks: int) -> torch.Tensor:
    """int64: the group of each block of `align` rows."""
    first_rows = torch.arange(num_blocks, device=layout.ends.device, dtype=torch.int32) * layout.align
    return torch.searchsorted(layout.ends, first_rows, right=True).clamp_(max=layout.groups.num - 1)


def _segment_max(amax: torch.Tensor, group: torch.Tensor, num: int) -> torch.Tensor:
    """(blocks, K) -> (E, K), 0 for groups without a block. NaN propagates: its bits are the largest."""
    out = torch.zeros(num, amax.shape[1], dtype=torch.int32, device=amax.device)
    bits = amax.view(torch.int32) & _ALL_BUT_SIGN  # non-negative floats are ordered like their bits; a NaN may be signed
    return out.scatter_reduce_(0, group.unsqueeze(1).expand_as(bits), bits, "amax").view(torch.float32)


def encode_scale(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """max / amax; 1 where the amax is 0, Inf or NaN."""
    a = torch.where(amax < fmt.eps, torch.full_like(amax, fmt.eps), amax)
    scale = (torch.full_like(a, ELEMENTS[fmt.element].max) / a).clamp(max=FLT_MAX)
    if fmt.pow2:
        scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
    return torch.where((a > 0) & (a <= FLT_MAX), scale, torch.ones_like(scale))


def encode(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """uint8 codes of FP32 values: nearest even, saturating, one NaN."""
    largest = ELEMENTS[fmt.element].max
    values = torch.where(values == values, values.clamp(-largest, largest), torch.full_like(values, float("nan")))
    return values.to(FP8_DTYPES[fmt.element]).view(torch.uint8)
