"""Columnwise casts of FP8 for all groups at once: a scale for every group and column, or for every 128 rows of a group.

The arithmetic is docs/numerics.md's FP32 rule: on a GPU in the casts of csrc/cuda, in torch operations elsewhere; tests hold
both to the bytes of casts of each group alone.
"""

from __future__ import annotations

import torch

from . import kernels, ops_triton
from .formats import COLUMNWISE, ELEMENTS, ROWWISE, Format
from .gemm.grouped_cuda import BLOCK_ROWS
from .gemm.scaled_mm import BLOCK, ROW, scale_kind
from .groups import Layout
from .ops_triton.launch import as_rows
from .permutation import RowMap
from .scaling import FLT_MAX
from .storage import FP8_DTYPES, QuantizedStorage, cast

_ALIGNED = 16  # what grouped FP8 GEMMs ask of K; compiled for 100 columns, rows and columns together gave wrong codes
_ALL_BUT_SIGN = (1 << 31) - 1
_SIGN_AND_EXPONENT = -(1 << 23)  # 0xff800000 as an int32


def row_scaled_columns(x: torch.Tensor, fmt: Format, layout: Layout, copies: RowMap | None = None) -> QuantizedStorage:
    """x (T, K) -> payload of its rows spread out by `layout`, stored (K, rows), with scales (E, K).

    copies: x is (N, K), and the T rows are copies of its rows.

    NaN and Inf leave their group's column with scale 1, as in a cast of the group alone. Rows after the last group
    get codes that nothing reads.
    """
    return (with_kernels if _by_kernels(x, fmt, layout, transposed=True) else with_torch)(x, fmt, layout, copies)


def block_columns(
    x: torch.Tensor, fmt: Format, layout: Layout, copies: RowMap | None = None, *, transposed: bool
) -> QuantizedStorage:
    """x (T, K) -> payload of its rows spread out by `layout`, with a scale for every 128 rows of a group and column.

    copies: as `row_scaled_columns`'s. Rows after the last group get codes that nothing reads.
    """
    if _by_kernels(x, fmt, layout, transposed=transposed):
        return with_kernels(x, fmt, layout, copies)
    return cast(layout.spread(x, copies), fmt, COLUMNWISE, transposed=transposed)


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
    return GroupCast(None, fmt)(x, layout, copies)[1]


def goes_together(row: Format, col: Format, K: int) -> bool:
    """Whether one read of a tensor with K columns gives payloads in these formats."""
    return K % _ALIGNED == 0 and all(scale_kind(fmt) in (ROW, BLOCK) for fmt in (row, col))


def goes_by_group(fmt: Format, dtype: torch.dtype, align: int, device, *, transposed: bool) -> bool:
    """Whether columns in this format are made by `with_kernels`. device: a torch device, or its kind."""
    has = dtype in kernels.SOURCE_CODES and align == BLOCK_ROWS and ops_triton.reason(device) is None
    return has and (scale_kind(fmt) == ROW or (scale_kind(fmt) == BLOCK and transposed))


def _by_kernels(x: torch.Tensor, fmt: Format, layout: Layout, *, transposed: bool) -> bool:
    """The same of a tensor, which must have memory: kernels of all groups are no operators."""
    return goes_by_group(fmt, x.dtype, layout.align, x.device, transposed=transposed) and not kernels.traced(x)


class GroupCast:
    """Columns of all groups and the rows beside them, from one read of a tensor, two where scales are of whole rows or
    columns; on CUDA. Everything is found here that does not depend on the tensors.

    row: None, or a format that `goes_together` with the columns'.
    """

    def __init__(self, row: Format | None, col: Format):
        self.row, self.column, device = row, col, torch.device("cuda")
        self._row_spec = None if row is None else kernels.spec(row, ROWWISE, device)
        self._column_spec = kernels.spec(col, COLUMNWISE, device)
        self._whole_rows, self._whole_columns = (f is not None and scale_kind(f) == ROW for f in (row, col))

    def __reduce__(self):
        return GroupCast, (self.row, self.column)

    def __call__(self, x: torch.Tensor, layout: Layout, copies: RowMap | None = None, **computed):
        """(rowwise payload or None, columnwise payload spread out by `layout`) of x (T, K), or of what is `computed`
        from it.

        copies: as `row_scaled_columns`'s; the rows are of all T too. computed: `gate`, `grad` and `weights` as
        `kernels.cast_groups` takes them.
        """
        x, where, device = as_rows(x), layout.blocks, x.device
        T, K = x.shape if copies is None else (copies.num_rows, x.shape[1])
        rows, memory, of_columns, of_rows = None, None, 0, 0
        groups = kernels.groups_of(where, T, copies)
        if self._whole_rows or self._whole_columns:
            memory, of_columns, of_rows = kernels.amax_groups(x, groups, rows=self._whole_rows, **computed)
        by_row = None
        if self.row is not None:
            blocks = 1 if self._whole_rows else -(-K // layout.align)
            codes = torch.empty((T, K), dtype=torch.uint8, device=device)
            scale = torch.empty((T, blocks), dtype=torch.float32, device=device)
            rows = QuantizedStorage.of(self.row, ROWWISE, (T, K), x.dtype, False, codes, scale)
            by_row = (self._row_spec, codes.data_ptr(), False, scale.data_ptr(), of_rows, False, 0, 0)
        whole = self._whole_columns
        codes = torch.empty((K, layout.rows), dtype=torch.uint8, device=device)
        scale = torch.empty((groups[2] if whole else groups[3], K), dtype=torch.float32, device=device)
        by_column = (self._column_spec, codes.data_ptr(), True, scale.data_ptr(), of_columns if whole else 0, False, 0, 0)
        kernels.cast_groups(x, by_row, by_column, groups, **computed)
        del memory  # not before
        return rows, QuantizedStorage.of(self.column, COLUMNWISE, (layout.rows, K), x.dtype, True, codes, scale)


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
