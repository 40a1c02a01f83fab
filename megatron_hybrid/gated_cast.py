"""SwiGLU cast as it is computed, for the linear that reads it: its result is never in memory but as payloads.

The result is rounded to the input's dtype before it is cast, so the payloads are those of casting what `swiglu` gives.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .formats import ROWWISE
from .linear import LOCAL, LinearCall
from .ops_triton.launch import as_rows
from .ops_triton.swiglu import gradient, swiglu
from .plan import INPUT
from .runtime import LinearRuntime
from .tensor import HybridTensor


class SwigluCast(torch.autograd.Function):
    """x (..., 2F) -> `HybridTensor` (..., F) of the consumer's input quantizer."""

    @staticmethod
    def forward(ctx, x, call: LinearCall, columnwise: bool):
        rows = as_rows(x)
        gate, up = rows.chunk(2, dim=1)
        row, col = call.plan.lean.input(up, True, columnwise, (call.state or {}).get(INPUT), gate=gate)
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return HybridTensor.from_storages(row, col, (*x.shape[:-1], up.shape[1]), x.dtype, call.plan.quantizers[INPUT])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return gradient(dy, rows).view(ctx.shape), None, None


def casts_swiglu(call: LinearCall) -> bool:
    """Whether a linear's input can be cast as SwiGLU computes it: on one rank, with plain tensors, columns from the
    original, nobody watching, and no scale that needs to know the whole tensor before."""
    lean, alone = call.plan.lean, call.plan.sharding is None
    return alone and lean is not None and lean.input.takes_gate and lean.has_states(call.state)


def swiglu_for(x: torch.Tensor, bias, runtime: LinearRuntime, weight: torch.Tensor, *, training: bool) -> torch.Tensor:
    """`silu(gate) * up` (..., F) of x (..., 2F) + bias (2F,), cast for the linear with this runtime and weight where
    that takes no more than the kernel that computes it (CUDA); else as it is."""
    if bias is None and x.is_cuda and not torch.compiler.is_compiling():
        call = runtime.call(x.device, LOCAL, training=training)
        if casts_swiglu(call):
            columnwise = torch.is_grad_enabled() and weight.requires_grad and call.plan.saved[INPUT] != ROWWISE
            return SwigluCast.apply(x, call, columnwise)
    return swiglu(x, bias)
