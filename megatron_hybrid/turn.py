"""Matrices turned over, byte for byte: by a tiled kernel on CUDA, where torch's strided copy takes several times as long as
the bytes would."""

from __future__ import annotations

import torch

from . import ops_triton
from .kernels import in_memory, traced

_LEAST = 1 << 22  # bytes; below it Triton's launch costs more than the kernel saves
_SIZES = (1, 2, 4)  # bytes of an element that the kernel takes


def turned(x: torch.Tensor) -> torch.Tensor:
    """The transposes of matrices, packed: x (R, C) -> (C, R), or (B, R, C) -> (B, C, R)."""
    if not _by_kernel(x):
        return x.transpose(-2, -1).contiguous()
    from .ops_triton.turn import turn

    x = in_memory(x)
    return turn(x) if x.dim() == 3 else turn(x.unsqueeze(0)).squeeze(0)


def _by_kernel(x: torch.Tensor) -> bool:
    if not x.is_cuda or traced(x):
        return False
    fits = x.nbytes >= _LEAST and x.element_size() in _SIZES and x.stride(-1) == 1
    return fits and ops_triton.reason(x.device) is None
