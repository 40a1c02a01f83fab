"""Let ``--optimizer-cpu-offload`` run on the CPU stand-in, where no tensor says that it is on a GPU.

Megatron's optimizer of two devices asks ``is_cuda`` of every parameter and copies with ``.cpu()``. While it sorts them,
here every tensor is on the device but for what ``.cpu()`` returned and what was made of that.
"""

from __future__ import annotations

import functools

import torch
from torch.overrides import TorchFunctionMode

from .framework import Change, Patch


class TwoDevices(TorchFunctionMode):
    """Inside, ``is_cuda`` is False for the host's tensors alone; ``.cpu()`` makes them."""

    def __init__(self):
        super().__init__()
        self.host = {}  # id -> the tensor, which keeps the id its own

    def __torch_function__(self, func, types, args=(), kwargs=None):
        on_host = bool(args) and id(args[0]) in self.host
        if func == torch.Tensor.is_cuda.__get__:
            return not on_host
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (on_host or func is torch.Tensor.cpu):
            self.host[id(result)] = result
        return result


def around_sort(original):
    @functools.wraps(original)
    def _get_sub_optimizer_param_groups(self, offload_fraction):
        with TwoDevices():
            return original(self, offload_fraction)

    return _get_sub_optimizer_param_groups


def _not_needed() -> str | None:
    from . import cpu_device

    return None if cpu_device.is_installed() else "there is no stand-in for a GPU"


_OPTIMIZER = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
PATCH = Patch(
    name="offload_on_cpu",
    changes=(Change(f"{_OPTIMIZER}._get_sub_optimizer_param_groups", around_sort),),
    versions=">=0.19.2,<0.20",
    why="without a GPU every parameter counts as the host's, and the first step looks for device copies in vain (KeyError)",
    remove_when="HybridDeviceOptimizer runs where parameters are on the CPU",
    not_needed=_not_needed,
)
