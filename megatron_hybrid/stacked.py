"""Payloads of all groups at once: what one cast makes, and each group's part of it.

    rows      input and grad_output, rowwise: the cast of the concatenated rows, wherever scales do not span rows
    columns   the same, columnwise: the cast of the rows spread out to whole blocks, so that no block spans groups
    weight    (E, N, K) cast as the matrix of all experts' rows; columnwise as that of all experts' transposed rows, which its
              columns, turned over, are too where blocks end where experts do
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from . import kernels
from .formats import COLUMNWISE, ROWWISE, Format
from .gemm.grouped_cuda import BLOCK_ROWS
from .gemm.scaled_mm import BLOCK, ROW, scale_kind
from .grouped_columns import GroupCast, block_columns, goes_by_group, goes_together, row_scaled_columns
from .groups import Groups, Layout
from .permutation import RowMap
from .plan import GRAD_OUTPUT, INPUT, WEIGHT, GemmPlan
from .storage import QuantizedStorage, cast, high_precision_storage
from .storage_layout import ROWS, pack_fp4, stored_dim, transpose
from .turn import turned

_MOST = 1 << 31  # elements of a weight that is cast as groups of rows


def unstackable(plan: GemmPlan, out_features: int, in_features: int) -> str | None:
    """Why one cast of all groups would not give the bytes of a cast of each; None where it does."""
    for operand, quantizer in plan.quantizers.items():
        for direction, fmt in zip((ROWWISE, COLUMNWISE), quantizer.formats()):
            if operand == WEIGHT:
                rows = out_features if direction == ROWWISE else in_features
                why = _weight_reason(fmt, rows)
            else:
                why = _rows_reason(fmt) if direction == ROWWISE else _columns_reason(fmt)
            if why is not None:
                return f"{operand}.{direction} {fmt}: {why}"
    return None


def _rows_reason(fmt: Format) -> str | None:
    if fmt.is_quantized and fmt.outer_axis == "tensor":
        return "a group has one scale or amax"
    return "a scale spans rows" if fmt.is_quantized and fmt.tile else None


def _columns_reason(fmt: Format) -> str | None:
    if not fmt.is_quantized or scale_kind(fmt) == ROW:
        return None
    if fmt.outer_axis != "none":
        return "a group has amaxes of its own"
    return "random bits follow rows, which are moved" if fmt.sr else None


def _weight_reason(fmt: Format, rows: int) -> str | None:
    if not fmt.is_quantized:
        return None
    if fmt.outer_axis == "tensor":
        return "an expert has one scale or amax"
    if fmt.sr:
        return "random bits follow rows, which are transposed"
    block = fmt.block(ROWWISE)[0]
    return f"a tile spans experts of {rows} rows" if rows % block else None


def _cast_where_they_are(fmt: Format, rows: int) -> bool:
    """Whether the columns of experts of so many rows are those of one matrix, of which codes are turned over instead of
    the weight: half the bytes or less."""
    return fmt.outer_axis == "none" and fmt.bits == 8 and rows % fmt.block(COLUMNWISE)[0] == 0


def columns_alignment(plan: GemmPlan) -> int:
    """The multiple at which groups begin where no column block of this plan's wgrad spans two of them."""
    blocks = [plan.quantizers[op].columnwise.block(COLUMNWISE)[0] for op in (INPUT, GRAD_OUTPUT)]
    return max([1, *(block for block in blocks if block)])


@dataclass(frozen=True)
class StackedWeight:
    """One direction of an (E, N, K) weight: of every expert a matrix (rows, contraction).

    payload: rowwise payload of (E * rows, contraction), or the weight itself in high precision, (E, N, K). Columns of
    parameters that live quantized are as these hold them: columnwise payloads of (N, K), one after another.
    """

    payload: QuantizedStorage | torch.Tensor
    direction: str
    format: Format
    num: int

    @classmethod
    def make(cls, weight: torch.Tensor, fmt: Format, direction: str, *, reduce_amax=None) -> StackedWeight:
        """reduce_amax: see `storage.cast`; of all experts' amaxes at once."""
        num, rows, K = weight.shape
        if not fmt.is_quantized:
            return cls(weight, direction, fmt, num)
        if direction == COLUMNWISE and _cast_where_they_are(fmt, rows):
            return cls(cast(weight.reshape(-1, K), fmt, COLUMNWISE, dtype=weight.dtype), direction, fmt, num).packed()
        stack = weight if direction == ROWWISE else turned(weight)
        stack = stack.reshape(-1, stack.shape[-1])
        return cls(cast(stack, fmt, ROWWISE, dtype=weight.dtype, reduce_amax=reduce_amax), direction, fmt, num)

    @classmethod
    def make_both(cls, weight: torch.Tensor, row: Format, col: Format) -> tuple[StackedWeight, StackedWeight] | None:
        """What `make` gives for both directions where columns have a scale each, from two reads of the weight: it is
        cast as the rows of E groups. None where the device's kernels do not cast so."""
        num, rows, K = weight.shape
        fits = rows % BLOCK_ROWS == 0 and weight.numel() <= _MOST and not kernels.traced(weight)
        here = fits and scale_kind(col) == ROW and goes_together(row, col, K)
        if not here or not goes_by_group(col, weight.dtype, BLOCK_ROWS, weight.device, transposed=True):
            return None
        sizes = torch.full((num,), rows, dtype=torch.int32, device=weight.device)
        groups = Groups(sizes, num, num * rows, weight.device, host=[rows] * num)
        by_row, by_column = GroupCast(row, col)(weight.reshape(-1, K), groups.layout(BLOCK_ROWS))
        # of every column all experts' codes, one after another: of every expert all columns'
        codes = by_column.qdata.view(torch.int64).view(K, num, -1).transpose(0, 1).contiguous().view(torch.uint8)
        packed = by_column.changed(
            direction=ROWWISE, shape=(num * K, rows), transposed=False, qdata=codes.view(-1, rows),
            scale=by_column.scale.view(-1, 1),
        )  # fmt: skip
        return cls(by_row, ROWWISE, row, num), cls(packed, COLUMNWISE, col, num)

    def as_columns(self) -> StackedWeight:
        """The columns of the weight whose rows these are, in a format whose directions share codes and scales."""
        return replace(self, payload=self.payload.changed(direction=COLUMNWISE), direction=COLUMNWISE).packed()

    def packed(self) -> StackedWeight:
        """The same with its payload `by_rows`."""
        return replace(self, payload=self.by_rows())

    def buffers(self) -> dict[str, torch.Tensor]:
        """Its tensors, by name."""
        return {"payload": self.payload} if isinstance(self.payload, torch.Tensor) else self.payload.buffers()

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, contraction) of one expert's matrix."""
        if isinstance(self.payload, torch.Tensor):
            _, N, K = self.payload.shape
            return (N, K) if self.direction == ROWWISE else (K, N)
        rows, columns = self.payload.shape[0] // self.num, self.payload.shape[1]
        return (columns, rows) if self.payload.direction == COLUMNWISE else (rows, columns)

    def by_rows(self) -> QuantizedStorage:
        """The rowwise payload of (E * rows, contraction). A copy where it is parameters' columns: what multiplies codes
        wants the contraction contiguous, as dense linears' GEMMs do."""
        s = self.payload
        if s.direction == ROWWISE:
            return s
        turned = {name: self._turned(t) for name, t in s.buffers().items() if name != "qdata"}
        codes = self._turned(s.codes())  # which packed ones are not
        turned["qdata"] = pack_fp4(codes) if s.format.bits == 4 else codes
        rows, contraction = self.shape
        return s.changed(direction=ROWWISE, shape=(self.num * rows, contraction), **turned)

    def _turned(self, t: torch.Tensor) -> torch.Tensor:
        """A matrix an expert, one after another, as their transposes, one after another."""
        return turned(t.view(self.num, -1, t.shape[1])).view(self.num * t.shape[1], -1)

    def high_precision(self) -> torch.Tensor:
        """(E, rows, contraction) in high precision; a view."""
        assert isinstance(self.payload, torch.Tensor)
        return self.payload if self.direction == ROWWISE else self.payload.transpose(1, 2)

    def dequantize(self) -> torch.Tensor:
        """The weight (E, N, K) that the payload decodes to, in the nominal dtype."""
        if isinstance(self.payload, torch.Tensor):
            return self.payload
        values = self.by_rows().dequantize(self.payload.dtype).view(self.num, *self.shape)
        return values if self.direction == ROWWISE else values.transpose(1, 2)

    def piece(self, expert: int) -> QuantizedStorage:
        """One expert's payload, as a cast of its (N, K) weight would make it."""
        if isinstance(self.payload, torch.Tensor):
            weight = self.payload[expert]
            return high_precision_storage(weight, self.format, self.direction, weight.dtype)
        piece = part_of_stack(self.payload, expert, self.num)
        if piece.direction == self.direction:
            return piece
        return transpose(piece)


def part_of_stack(s: QuantizedStorage, expert: int, num: int) -> QuantizedStorage:
    """One expert's payload of those of `num`, one after another: a view."""
    buffers = {}
    for name, t in s.buffers().items():
        rows = t.shape[0] // num
        buffers[name] = t.narrow(0, expert * rows, rows)
    return s.changed(shape=(s.shape[0] // num, s.shape[1]), **buffers)


@dataclass(frozen=True)
class GroupedColumns:
    """Columnwise payload of rows spread out by `layout`. Row-scaled FP8 has a scale a group and column: (E, K)."""

    payload: QuantizedStorage
    layout: Layout

    @classmethod
    def make(
        cls, x: torch.Tensor, fmt: Format, layout: Layout, copies: RowMap | None = None, *, transposed: bool
    ) -> GroupedColumns:
        """x (T, K), or (N, K) with the T rows copies of its rows. One launch for all groups."""
        if scale_kind(fmt) == ROW:
            return cls(row_scaled_columns(x, fmt, layout, copies), layout)
        if scale_kind(fmt) == BLOCK:
            return cls(block_columns(x, fmt, layout, copies, transposed=transposed), layout)
        return cls(cast(layout.spread(x, copies), fmt, COLUMNWISE, transposed=transposed), layout)

    def piece(self, group: int) -> QuantizedStorage:
        """One group's payload, as a cast of its rows would make it."""
        start, rows = self.layout.starts()[group], self.layout.groups.host[group]
        s = self.payload
        if scale_kind(s.format) == ROW:
            s = replace(s, scale=s.scale[group : group + 1])
        return rows_of(s, start, rows)


def copied_rows(s: QuantizedStorage, copies: RowMap | None) -> QuantizedStorage:
    """Rows (T, K) that are copies of those of a rowwise payload (N, K), whose scales do not span rows."""
    if copies is None:
        return s
    shape = (copies.num_rows, s.shape[1])
    if s.scale is None:
        return s.changed(shape=shape, qdata=copies.expand(s.qdata))
    qdata, scale = copies.expand_both(s.qdata, s.scale)
    outer = None if s.outer_amax is None else copies.expand(s.outer_amax)
    return s.changed(shape=shape, qdata=qdata, scale=scale, outer_amax=outer)


def rows_of(s: QuantizedStorage, start: int, rows: int) -> QuantizedStorage:
    """Rows [start, start + rows) of a payload; `start` is a multiple of its blocks' rows, the end need not be."""
    K, axis = s.shape[1], stored_dim(s, ROWS)
    if not s.format.is_quantized:
        return replace(s, shape=(rows, K), qdata=s.qdata.narrow(0, start, rows))
    if axis == 0 or s.format.bits == 8:
        qdata = s.qdata.narrow(axis, start, rows)
    else:
        qdata = s.qdata.narrow(axis, start * s.format.bits // 8, -(-rows * s.format.bits // 8))
    scale, outer, block = s.scale, s.outer_amax, s.format.block(s.direction)[0]
    if scale is not None and block is not None:
        scale = scale.narrow(0, start // block, -(-rows // block))
    if outer is not None and outer.dim() == 2 and s.direction == ROWWISE:
        outer = outer.narrow(0, start, rows)
    return replace(s, shape=(rows, K), qdata=qdata, scale=scale, outer_amax=outer)
