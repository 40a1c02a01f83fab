"""Fused kernels for what lies between a transformer layer's GEMMs: norms, SwiGLU, rotary embedding, the loss.

Importing this package imports no Triton; its modules do. They run on CUDA, and on the CPU only under Triton's
interpreter (tests). Everything is computed in FP32 and rounded once on the way out (a norm's gradient
also before a residual's is added to it); sums over rows run in an order that depends on the shape alone, so results repeat
bit for bit.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil

import torch


def reason(device: torch.device) -> str | None:
    """Why the kernels cannot be used on a device; None: they can."""
    if device.type != "cuda":
        return f"they need a CUDA device, found {device}"
    return _reason_on_cuda()


@functools.cache
def _reason_on_cuda() -> str | None:
    """Asked before every grouped cast: PATH is searched once."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    compilers = [os.environ.get("CC", ""), "gcc", "clang"]  # as Triton looks for one, for its launchers
    if not any(c and shutil.which(c) for c in compilers):
        return "triton needs a C compiler (gcc or clang on PATH)"
    return None
