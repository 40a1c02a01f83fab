"""How a grouped linear casts input and grad_output where nothing but the tensors is left to be known: found once a plan.

What it makes is what `GroupedCall`'s own casts make, which serve where this does not, byte for byte, in fewer host
operations.
"""

from __future__ import annotations

import torch

from . import kernels
from .formats import COLUMNWISE, ROWWISE
from .grouped_columns import GroupCast, goes_by_group, goes_together
from .groups import Layout
from .lean import SideCast
from .permutation import RowMap
from .plan import GRAD_OUTPUT, INPUT, GemmPlan
from .storage import QuantizedStorage


class GroupedCasts:
    """Of one operand.

    casts_tokens    whether tokens are cast before they are copied to experts' rows: a cast by rows of what no rank has
                    another part of; copies draw random bits of their own
    """

    # of computed tensors: what their kernels load at once, and tiles of a gradient's halves
    _COMPUTED = {INPUT: 8, GRAD_OUTPUT: 256}

    def __init__(self, plan: GemmPlan, operand: str, width: int, dtype: torch.dtype, align: int):
        """width: columns of the tensor. align: the multiple of rows at which groups of columns begin."""
        quantizer = plan.quantizers[operand]
        row, col = quantizer.formats()
        alone = operand not in plan.reduced  # else amaxes of other ranks come between
        self.casts_tokens = row.is_quantized and not row.sr and alone
        here = alone and not (row.sr or row.is_stateful) and dtype in kernels.SOURCE_CODES
        self._row = SideCast(row, ROWWISE, False, plan.device.type) if here else None
        self._column, self._dtype, self._columns, self._both = col, dtype, None, None
        if goes_by_group(col, dtype, align, plan.device, transposed=plan.transposed(operand)):
            self._columns = GroupCast(None, col)
            if alone and not quantizer.derives_columnwise and goes_together(row, col, width):
                self._both = GroupCast(row, col)
        self.takes_computed = self._both is not None and dtype.itemsize == 2 and width % self._COMPUTED[operand] == 0

    @property
    def one_read(self) -> bool:
        """Whether rows and columns of plain tensors come from one read, by kernels for all groups."""
        return self._both is not None and self._row is not None and self.casts_tokens

    def rows(self, x: torch.Tensor) -> QuantizedStorage | None:
        """The rowwise payload of x (T, K); None: this is not the way to make it."""
        if self._row is None or kernels.traced(x):
            return None
        payload, arguments, alive = self._row.made(x, None, None)
        if arguments is not None:
            kernels.cast_directions(x, arguments, None)
        del alive  # not before
        return payload

    def columns(self, x: torch.Tensor, layout: Layout, copies: RowMap | None) -> QuantizedStorage | None:
        """The columnwise payload of x spread out by `layout`; None: this is not the way to make it."""
        if not self._column.is_quantized:
            x = layout.spread(x, copies)
            return QuantizedStorage.of(self._column, COLUMNWISE, tuple(x.shape), x.dtype, False, x)
        if self._columns is None or x.dtype != self._dtype or kernels.traced(x):
            return None
        return self._columns(x, layout, copies)[1]

    def both(
        self, x: torch.Tensor, layout: Layout, copies: RowMap | None = None
    ) -> tuple[QuantizedStorage, QuantizedStorage] | None:
        """The rowwise and the columnwise payload from one read of x; None: this is not the way to make them.

        A token of several experts is rather cast by rows once and its codes are copied, unless its amax is found on the way.
        """
        if self._both is None or x.dtype != self._dtype or kernels.traced(x):
            return None
        copied = copies is not None and copies.choice.shape[0] > x.shape[0]
        return None if copied and not self._row.measures else self._both(x, layout, copies)

    def computed(self, x: torch.Tensor, layout: Layout, **computed) -> tuple[QuantizedStorage, QuantizedStorage]:
        """The same of what `kernels.cast_groups` computes from x, where `takes_computed`."""
        return self._both(x, layout, **computed)
