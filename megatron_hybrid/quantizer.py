"""HybridQuantizer: which format each direction gets. Immutable; what a call wants is an argument of the call."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from . import kernels
from .formats import COLUMNWISE, DIRECTIONS, ROWWISE, Format, nearest, parse_format
from .quantizer_spec import COLUMNWISE_SOURCES, ORIGINAL, ROWWISE_DEQUANTIZED
from .storage import (
    QuantizedStorage,
    cast,
    cast_into,
    cast_pair,
    check_call,
    derive_columnwise,
    derives_in_one_call,
)

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """`x` (..., K) as (M, K), leading dimensions flattened; a scalar is (1, 1). A view where strides allow."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() else x.reshape(1, 1)


@dataclass(frozen=True)
class HybridQuantizer:
    """Formats of the two directions, and what the columnwise copy is cast from.

    rowwise, columnwise: a format name, a `Format` or None (the direction is never made).
    columnwise_source: ``original`` casts the tensor, ``rowwise_dequantized`` casts the rowwise copy's decode.
    Raises ``ValueError`` for an unknown format or source, or a source without the rowwise format it needs.
    """

    rowwise: Format | str | None = None
    columnwise: Format | str | None = None
    columnwise_source: str = ORIGINAL

    def __post_init__(self):
        for name in DIRECTIONS:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else parse_format(value))
        if (source := self.columnwise_source) not in COLUMNWISE_SOURCES:
            raise ValueError(
                f"columnwise_source {source!r}{nearest(str(source), COLUMNWISE_SOURCES)} "
                f"Valid: {', '.join(COLUMNWISE_SOURCES)}"
            )
        if self.derives_columnwise and self.columnwise and not self.rowwise:
            raise ValueError("columnwise_source 'rowwise_dequantized' needs a rowwise format")

    @property
    def derives_columnwise(self) -> bool:
        """Whether the column is cast from the row's decode."""
        return self.columnwise_source == ROWWISE_DEQUANTIZED

    def formats(self) -> tuple[Format | None, Format | None]:
        """(rowwise, columnwise)."""
        return self.rowwise, self.columnwise

    def amax(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(rowwise, columnwise) outer amaxes of `x` (..., K): float32 `Format.amax_shape`, None where none is needed.

        These may be max-reduced over ranks and given back to `quantize`. A derived column's amax is that of the
        rowwise decode, which is not known yet: None.
        """
        x2d = as_matrix(x)
        return tuple(self._amax(x2d, fmt, d) for fmt, d in zip(self.formats(), DIRECTIONS))

    def _amax(self, x, fmt, direction):
        if fmt is None or (direction == COLUMNWISE and self.derives_columnwise):
            return None
        shape = fmt.amax_shape(*x.shape, direction)
        if shape is None:
            return None
        return kernels.amax(x, fmt, direction, torch.empty(shape, dtype=torch.float32, device=x.device))

    def outer_amaxes(self, x: torch.Tensor, rowwise: bool, columnwise: bool):
        """`amax` of a matrix (M, K) for the directions asked for; one kernel where both are the same number."""
        row = self._amax(x, self.rowwise, ROWWISE) if rowwise else None
        if columnwise and row is not None and self.has_one_amax:
            return row, row
        return row, self._amax(x, self.columnwise, COLUMNWISE) if columnwise else None

    @property
    def has_one_amax(self) -> bool:
        """Whether the outer amax of both directions is the same number."""
        row, col = self.formats()
        plain = not (row.rht or col.rht or self.derives_columnwise)
        return plain and row.family == col.family and row.outer_axis == col.outer_axis == "tensor"

    def new_state(self, device="cpu"):
        """(rowwise, columnwise) `DelayedState`, None for a direction that keeps none."""
        from .scaling import DelayedState

        return tuple(DelayedState.new(f, device) if f and f.is_stateful else None for f in self.formats())

    def cast(
        self, x: torch.Tensor, *, rowwise=True, columnwise=True, state=None, amax=None, reduce_amax=None, rng=None,
        transposed=False,
    ) -> tuple[QuantizedStorage | None, QuantizedStorage | None]:  # fmt: skip
        """Cast `x` (M, K) to plain payloads of the directions asked for; see `quantize` for the arguments.

        reduce_amax: of a derived column's amax, see `storage.cast`. transposed: the columnwise payload is written
        (K, M), as a GEMM reads it. Everything is checked before the first kernel runs.
        """
        rowwise, columnwise = rowwise and self.rowwise is not None, columnwise and self.columnwise is not None
        need_row = rowwise or (columnwise and self.derives_columnwise)
        state, amax = state or (None, None), amax or (None, None)
        for wanted, fmt, d, s in zip((need_row, columnwise), self.formats(), DIRECTIONS, state):
            if wanted:
                check_call(fmt, d, s, rng)
        row = col = None
        if need_row and columnwise and self._casts_at_once(x, x.dtype, amax, rng, reduce_amax):
            empty = dict(shape=tuple(x.shape), dtype=x.dtype, device=x.device, like=x)
            row = QuantizedStorage.empty(self.rowwise, ROWWISE, **empty)
            col = QuantizedStorage.empty(self.columnwise, COLUMNWISE, **empty, transposed=transposed)
            cast_pair(row, col, x, amax=amax, state=state, rng=rng, derived=self.derives_columnwise)
            return (row if rowwise else None), col
        if need_row:
            row = cast(x, self.rowwise, ROWWISE, amax=amax[0], state=state[0], rng=rng)
        if columnwise:
            extra = dict(amax=amax[1], state=state[1], rng=rng, transposed=transposed)
            if self.derives_columnwise:
                col = derive_columnwise(row, self.columnwise, reduce_amax=reduce_amax, **extra)
            else:
                col = cast(x, self.columnwise, COLUMNWISE, **extra)
        return (row if rowwise else None), col

    def _casts_at_once(self, x, dtype, amax, rng, reduce_amax=None) -> bool:
        """Whether one kernel call makes both directions of `x`, nominally `dtype`, so that it is read once."""
        row, col = self.formats()
        if not (row and col and row.is_quantized and col.is_quantized):
            return False
        if (row.sr or col.sr) and rng.parts is not None:  # a call a part
            return False
        if not self.derives_columnwise:
            return True
        reduced = reduce_amax is not None and col.outer_axis != "none"
        return not reduced and derives_in_one_call(col, x, dtype, amax[1])

    def quantize(self, x: torch.Tensor, *, rowwise=True, columnwise=True, state=None, amax=None, rng=None):
        """Quantize `x` (..., K) to a `HybridTensor` holding the directions asked for.

        state, amax: (rowwise, columnwise) pairs; amax None is computed from `x`, else taken as given (already
        reduced over ranks). rng: an `Rng`. Raises ``ValueError`` only for a missing state (delayed scaling) or
        rng (stochastic rounding).
        """
        from .tensor import HybridTensor

        x2d = as_matrix(x.detach())
        self.check_arguments(x2d, rowwise, columnwise, state=state, amax=amax, rng=rng)
        if any(f is not None and not f.is_quantized for f in self.formats()):
            x2d = x2d.clone(memory_format=torch.contiguous_format)  # the payload is the tensor: not the caller's
        row, col = self.cast(x2d, rowwise=rowwise, columnwise=columnwise, state=state, amax=amax, rng=rng)
        return HybridTensor.from_storages(row, col, tuple(x.shape), x.dtype, self, device=x.device)

    def update(
        self, row: QuantizedStorage | None, col: QuantizedStorage | None, x: torch.Tensor, *,
        state=None, amax=None, reduce_amax=None, rng=None, noop=None,
    ) -> None:  # fmt: skip
        """Cast `x` (M, K) into the given payloads, in place; a payload that is None is left out.

        A derived column is cast from the decode of the *updated* row, or of a row cast only for it when `row` is
        None. noop: int32 device flag; non-zero leaves every byte as it was. reduce_amax: (rowwise, columnwise), see
        `storage.cast`. Check with `check_arguments` first.
        """
        state, amax, reduce = state or (None, None), amax or (None, None), reduce_amax or (None, None)
        noop = None if noop is None else noop.reshape(())
        both = row is not None and col is not None and reduce_amax is None
        if both and self._casts_at_once(x, row.dtype, amax, rng):
            derived = self.derives_columnwise
            return cast_pair(row, col, x, amax=amax, state=state, rng=rng, noop=noop, derived=derived)
        if row is not None:
            cast_into(row, x, amax=amax[0], reduce_amax=reduce[0], state=state[0], rng=rng, noop=noop)
        if col is None:
            return
        if self.derives_columnwise:
            keys = dict(amax=amax[0], reduce_amax=reduce[0], state=state[0], rng=rng, noop=noop)
            row = row or cast(x, self.rowwise, ROWWISE, dtype=col.dtype, **keys)
            x = row.dequantize(row.dtype)
        elif row is not None and col.qdata is row.qdata:
            return  # both directions are the one high-precision tensor
        cast_into(col, x, amax=amax[1], reduce_amax=reduce[1], state=state[1], rng=rng, noop=noop)

    def rederive(
        self, row: QuantizedStorage, col: QuantizedStorage, *, state=None, amax=None, reduce_amax=None, rng=None, noop=None
    ) -> None:
        """Cast `col` again, in place, from the decode of `row`, as ``rowwise_dequantized`` does. Checks first."""
        x = row.dequantize(row.dtype)
        state, amax = (state or (None, None))[1], (amax or (None, None))[1]
        _check_cast(x, self.columnwise, COLUMNWISE, state, amax, rng)
        _check_noop(noop, x.device)
        noop = None if noop is None else noop.reshape(())
        reduce = None if reduce_amax is None else reduce_amax[1]
        cast_into(col, x, amax=amax, reduce_amax=reduce, state=state, rng=rng, noop=noop)

    def check_arguments(self, x, rowwise=True, columnwise=True, *, state=None, amax=None, rng=None, noop=None):
        """Raise ``ValueError`` for anything a cast of `x` (M, K) would fail on, before anything is written."""
        if x.dtype not in SOURCE_DTYPES:
            raise ValueError(f"cannot quantize dtype {x.dtype}; supported: {', '.join(map(str, SOURCE_DTYPES))}")
        columnwise = columnwise and self.columnwise is not None
        rowwise = self.rowwise is not None and (rowwise or (columnwise and self.derives_columnwise))
        state, amax = state or (None, None), amax or (None, None)
        for wanted, fmt, d, s, a in zip((rowwise, columnwise), self.formats(), DIRECTIONS, state, amax, strict=True):
            if wanted:
                _check_cast(x, fmt, d, s, a, rng)
        _check_noop(noop, x.device)


def _check_cast(x, fmt: Format, direction: str, state, amax, rng) -> None:
    check_call(fmt, direction, state, rng)
    what = f"{direction} {fmt}"
    if fmt.is_quantized and not kernels.traced(x):
        kernels.spec(fmt, direction, x.device)  # the kernels of this device are there
    if amax is not None:
        _check_tensor(amax, f"{what}: amax", torch.float32, fmt.amax_shape(*x.shape, direction), x.device)
    if fmt.is_stateful:
        _check_tensor(state.scale, f"{what}: state.scale", torch.float32, (), x.device)
    if fmt.sr:
        _check_tensor(rng.values, f"{what}: rng.values", torch.int64, (6,), x.device)
        if rng.row_ids is not None:
            _check_tensor(rng.row_ids, f"{what}: rng.row_ids", torch.int64, (x.shape[0],), x.device)


def _check_noop(noop, device) -> None:
    if noop is not None:
        _check_tensor(noop.reshape(-1), "noop_flag", torch.int32, (1,), device)


def _check_tensor(t: torch.Tensor, what: str, dtype, shape, device) -> None:
    if shape is None:
        raise ValueError(f"{what} was given, but the format has none")
    found = (t.dtype, tuple(t.shape), t.device)
    if found != (dtype, tuple(shape), device):
        raise ValueError(f"{what} must be {dtype} {tuple(shape)} on {device}, found {found[0]} {found[1]} on {found[2]}")
