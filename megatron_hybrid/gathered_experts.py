"""GatheredExperts: what a grouped linear's (E, N, K) parameter is while FSDP2 has gathered its experts as payloads.

It has the shape, dtype and gradient of the parameter, and no values of its own: `t[e]` is expert e's `HybridTensor`, and no
torch operation reads it.
"""

from __future__ import annotations

import torch

from .tensor import HybridTensor

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.as_strided.default)


class GatheredExperts(torch.Tensor):
    """Detached ones and the parameter made of one share their experts."""

    __slots__ = ("experts",)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, experts: tuple[HybridTensor, ...]):
        """experts: (N, K) each, of one shape, dtype and device."""
        first = experts[0]
        shape = (len(experts), *first.shape)
        t = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        t.experts = experts
        return t

    def __init__(self, *args, **kwargs):
        pass  # torch.Tensor's takes none

    def __getitem__(self, expert: int) -> HybridTensor:
        return self.experts[expert]

    @property
    def data(self) -> GatheredExperts:
        """The same experts outside autograd; takes those of another gather of the parameter."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new: GatheredExperts):
        assert type(new) is GatheredExperts and (new.shape, new.dtype) == (self.shape, self.dtype)
        self.experts = new.experts

    def describe(self) -> str:
        """The formats held, of every expert where they differ."""
        held = list(dict.fromkeys(expert.describe() for expert in self.experts))
        return f"{len(self.experts)} experts: {'; '.join(held)}"

    def __repr__(self, **_):
        return f"GatheredExperts({tuple(self.shape)}, {self.describe()}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        t = args[0]
        if func in _SAME and (len(args) == 1 or tuple(args[1]) == tuple(t.shape)):
            return GatheredExperts(t.experts)
        raise NotImplementedError(f"{func} of {t!r}: gathered experts are payloads; take one by its number")
