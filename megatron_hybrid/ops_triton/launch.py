"""What all launches share."""

from __future__ import annotations

import contextlib

import torch

from ..kernels import in_memory

_HERE = contextlib.nullcontext()


def on_device(x: torch.Tensor):
    """Triton launches on torch's current device: make it the tensor's."""
    if not x.is_cuda or x.device.index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(x.device)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own takes a microsecond of every launch: it looks whether code is compiled."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not less than n > 0."""
    return 1 << (n - 1).bit_length()


def packed(x: torch.Tensor) -> torch.Tensor:
    """x as numbers that lie in memory, one after another."""
    return in_memory(x).contiguous()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., N) as (rows, N) with adjacent elements adjacent in memory, as numbers that lie there; a view where that is
    possible."""
    x = in_memory(x)
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
