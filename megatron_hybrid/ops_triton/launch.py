"""What all launches share."""

from __future__ import annotations

import contextlib

import torch


def on_device(x: torch.Tensor):
    """Triton launches on torch's current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., N) as (rows, N) with adjacent elements adjacent in memory; a view where that is possible."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
