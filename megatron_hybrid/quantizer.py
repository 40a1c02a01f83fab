"""HybridQuantizer: which format each direction gets. Immutable; what a call wants is an argument of the call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import kernels
from .formats import COLUMNWISE, DIRECTIONS, ROWWISE, Format, nearest, parse_format
from .storage import QuantizedStorage, cast, check_call, derive_columnwise

SOURCES = ("original", "rowwise_dequantized")


@dataclass(frozen=True)
class HybridQuantizer:
    """Formats of the two directions, and what the columnwise copy is cast from.

    rowwise, columnwise: a format name, a `Format` or None (the direction is never made).
    columnwise_source: ``original`` casts the tensor, ``rowwise_dequantized`` casts the rowwise copy's decode.
    Raises ``ValueError`` for an unknown format or source, or a source without the rowwise format it needs.
    """

    rowwise: Format | str | None = None
    columnwise: Format | str | None = None
    columnwise_source: str = "original"

    def __post_init__(self):
        for name in DIRECTIONS:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else parse_format(value))
        if self.columnwise_source not in SOURCES:
            raise ValueError(
                f"columnwise_source {self.columnwise_source!r}{nearest(str(self.columnwise_source), SOURCES)} "
                f"Valid: {', '.join(SOURCES)}"
            )
        if self.derives_columnwise and self.columnwise and not self.rowwise:
            raise ValueError("columnwise_source 'rowwise_dequantized' needs a rowwise format")

    @property
    def derives_columnwise(self) -> bool:
        return self.columnwise_source == "rowwise_dequantized"

    def formats(self) -> tuple[Format | None, Format | None]:
        return self.rowwise, self.columnwise

    def amax(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(rowwise, columnwise) outer amaxes of `x` (..., K): float32 `Format.amax_shape`, None where none is needed.

        These may be max-reduced over ranks and given back to `quantize`. A derived column's amax is that of the
        rowwise decode, which is not known yet: None.
        """
        x2d = x.reshape(-1, x.shape[-1])
        return tuple(self._amax(x2d, fmt, d) for fmt, d in zip(self.formats(), DIRECTIONS))

    def _amax(self, x, fmt, direction):
        if fmt is None or (direction == COLUMNWISE and self.derives_columnwise):
            return None
        shape = fmt.amax_shape(*x.shape, direction)
        if shape is None:
            return None
        return kernels.amax(x, fmt, direction, torch.empty(shape, dtype=torch.float32, device=x.device))

    def new_state(self, device="cpu"):
        """(rowwise, columnwise) `DelayedState`, None for a direction that keeps none."""
        from .scaling import DelayedState

        return tuple(DelayedState.new(f, device) if f and f.is_stateful else None for f in self.formats())

    def cast(
        self, x: torch.Tensor, *, rowwise=True, columnwise=True, state=None, amax=None, rng=None, transposed=False
    ) -> tuple[QuantizedStorage | None, QuantizedStorage | None]:
        """Cast `x` (M, K) to plain payloads of the directions asked for; see `quantize` for the arguments.

        transposed: the columnwise payload is written (K, M), as a GEMM reads it. Everything is checked before
        the first kernel runs.
        """
        rowwise, columnwise = rowwise and self.rowwise is not None, columnwise and self.columnwise is not None
        need_row = rowwise or (columnwise and self.derives_columnwise)
        state, amax = state or (None, None), amax or (None, None)
        for wanted, fmt, d, s in zip((need_row, columnwise), self.formats(), DIRECTIONS, state):
            if wanted:
                check_call(fmt, d, s, rng)
        row = col = None
        if need_row:
            row = cast(x, self.rowwise, ROWWISE, amax=amax[0], state=state[0], rng=rng)
        if columnwise:
            extra = dict(amax=amax[1], state=state[1], rng=rng, transposed=transposed)
            if self.derives_columnwise:
                col = derive_columnwise(row, self.columnwise, **extra)
            else:
                col = cast(x, self.columnwise, COLUMNWISE, **extra)
        return (row if rowwise else None), col

    def quantize(self, x: torch.Tensor, *, rowwise=True, columnwise=True, state=None, amax=None, rng=None):
        """Quantize `x` (..., K) to a `HybridTensor` holding the directions asked for.

        state, amax: (rowwise, columnwise) pairs; amax None is computed from `x`, else taken as given (already
        reduced over ranks). rng: an `Rng`. Raises ``ValueError`` only for a missing state (delayed scaling) or
        rng (stochastic rounding).
        """
        from .tensor import HybridTensor

        x2d = x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach().reshape(1, 1)
        row, col = self.cast(x2d, rowwise=rowwise, columnwise=columnwise, state=state, amax=amax, rng=rng)
        return HybridTensor.from_storages(row, col, tuple(x.shape), x.dtype, self)
