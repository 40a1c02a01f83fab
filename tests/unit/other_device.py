"""A device with memory of its own, as far as a test on the CPU needs one: its tensors say `is_cuda`, operations do not
mix them with the host's, and every copy between the two is noted."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")  # the only one besides the host that torch has everywhere
aten = torch.ops.aten


class OnDevice(torch.Tensor):
    """A tensor there; `held` is its value."""

    is_cuda = True

    @staticmethod
    def __new__(cls, held):
        t = torch.Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DEVICE)
        t.held = held
        return t

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of OtherDevice")


class OtherDevice(TorchDispatchMode):
    """to_device, to_host: bytes of copies so far. most: the most bytes of copies from the host that were alive at once.
    pinned: addresses of host memory that was asked for pinned."""

    def __init__(self):
        super().__init__()
        self.to_device = self.to_host = self.most = 0
        self.pinned, self._arrivals = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        moved = self._moved(func, args, kwargs)
        if moved is not None:
            return moved
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        there = any(isinstance(t, OnDevice) for t in given)
        assert not there or all(isinstance(t, OnDevice) or t.dim() == 0 for t in given), f"{func} of tensors of two devices"
        asked = kwargs.get("device")
        if asked is not None:
            there, kwargs["device"] = torch.device(asked) == DEVICE, torch.device("cpu")
        pinned = kwargs.pop("pin_memory", False)
        out = func(*tree_map_only(OnDevice, lambda t: t.held, args), **tree_map_only(OnDevice, lambda t: t.held, kwargs))
        if pinned:
            self.pinned.add(out.data_ptr())
        if func._schema.is_mutable:
            return args[0] if isinstance(args[0], torch.Tensor) else out
        return tree_map_only(torch.Tensor, OnDevice, out) if there else out

    def _moved(self, func, args, kwargs):
        """The result of a copy between host and device; None of anything else."""
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            source, there = args[0], torch.device(kwargs["device"]) == DEVICE
            if isinstance(source, OnDevice) == there:
                return None
            held = source.held if isinstance(source, OnDevice) else source
            held = held.to(kwargs.get("dtype") or held.dtype, copy=True)
            return self._arrived(OnDevice(held)) if there else self._left(held)
        if func is aten.copy_.default and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
            to, source = args[:2]
            (to.held if isinstance(to, OnDevice) else to).copy_(source.held if isinstance(source, OnDevice) else source)
            return self._arrived(to) if isinstance(to, OnDevice) else self._left(to)
        return None

    def _arrived(self, t: OnDevice) -> OnDevice:
        self.to_device += t.held.nbytes
        self._arrivals = [r for r in self._arrivals if r() is not None] + [weakref.ref(t)]
        self.most = max(self.most, sum(r().held.nbytes for r in self._arrivals))
        return t

    def _left(self, t: torch.Tensor) -> torch.Tensor:
        self.to_host += t.nbytes
        return t
