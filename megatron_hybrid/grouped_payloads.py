"""GroupedPayloads: rows of all groups as what a grouped linear casts them to, made by the kernel that computed them.

It has the shape and dtype of the rows and passes through autograd in their place, forward as a linear's input, backward
as its output's gradient. It has no values of its own, and no torch operation reads it.
"""

from __future__ import annotations

import torch

from .stacked import GroupedColumns
from .storage import QuantizedStorage

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)


class GroupedPayloads(torch.Tensor):
    """row: the payload (T, K) by rows; columns: by columns, each group's rows from the start of a block."""

    __slots__ = ("row", "columns")
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, row: QuantizedStorage, columns: GroupedColumns):
        t = torch.Tensor._make_wrapper_subclass(cls, row.shape, dtype=row.dtype, device=row.device)
        t.row, t.columns = row, columns
        return t

    def __init__(self, *args, **kwargs):
        pass  # torch.Tensor's takes none

    def __repr__(self, **_):
        formats = f"{self.row.format} | {self.columns.payload.format}"
        return f"GroupedPayloads({tuple(self.shape)}, {formats}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        t = args[0]
        if func in _SAME and (len(args) == 1 or tuple(args[1]) == tuple(t.shape)):
            return cls(t.row, t.columns)
        found = next(a for a in args if isinstance(a, cls))
        raise NotImplementedError(
            f"{func} of {found!r}: experts' SwiGLU casts its result and its gradient as it computes them, and only the "
            "experts' linears read that. In backward, fc1's output has a second reader: read it in a forward hook of "
            "linear_fc1, or turn --no-bias-swiglu-fusion on"
        )
