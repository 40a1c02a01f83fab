"""SwiGLU cast as it is computed: its result for the linear that reads it, its gradient for the linear that made its input.
Of experts, whose SwiGLU is weighted, the rows of all groups at once.

Neither is ever in memory but as payloads. Both are rounded to the input's dtype before they are cast, so the payloads are
those of casting what `swiglu` and its backward give.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from . import kernels
from .formats import ROWWISE
from .grouped_at_once import GroupedCall, call_for_gradient
from .lean import takes_payloads
from .linear import LOCAL, LinearCall
from .ops_triton.launch import as_rows, packed
from .ops_triton.permute import scatter
from .ops_triton.swiglu import gradient, product, swiglu, weighted_gradient, weighted_product, weighted_swiglu
from .permutation import RowMap
from .plan import GRAD_OUTPUT, INPUT
from .runtime import LinearRuntime
from .tensor import HybridTensor


@dataclass(frozen=True)
class ComputedCast:
    """The cast of one operand of a linear's call, of what a kernel computes on the way."""

    call: LinearCall
    operand: str
    rowwise: bool
    columnwise: bool

    def possible(self) -> bool:
        """On one rank, with plain tensors, columns from the original, nobody watching, and no scale that needs to know the
        whole tensor before."""
        plan = self.call.plan
        lean = plan.lean if plan.sharding is None else None
        return lean is not None and getattr(lean, self.operand).takes_computed and lean.has_states(self.call.state)

    def __call__(self, x: torch.Tensor, shape, **computed) -> HybridTensor:
        """Of x (M, K), computed as `kernels.cast_directions` says, as a tensor of this shape."""
        plan, states = self.call.plan, (self.call.state or {}).get(self.operand)
        row, col = getattr(plan.lean, self.operand)(x, self.rowwise, self.columnwise, states, **computed)
        return HybridTensor.from_storages(row, col, shape, x.dtype, plan.quantizers[self.operand])


class SwigluCast(torch.autograd.Function):
    """x (..., 2F) -> (..., F); `forth` casts it, `back` casts the gradient of x, where they are there."""

    @staticmethod
    def forward(ctx, x, forth: ComputedCast | None, back: ComputedCast | None):
        rows = as_rows(x)
        ctx.save_for_backward(rows)
        ctx.shape, ctx.back = x.shape, back
        gate, up = rows.chunk(2, dim=1)
        shape = (*x.shape[:-1], up.shape[1])
        return product(rows).view(shape) if forth is None else forth(up, shape, gate=gate)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        if ctx.back is None or torch.is_anomaly_enabled():  # which looks at values between functions
            return gradient(dy, rows).view(ctx.shape), None, None
        return ctx.back(rows, ctx.shape, grad=as_rows(dy)), None, None


def swiglu_casts(x: torch.Tensor, runtime: LinearRuntime, weight: torch.Tensor, *, training: bool, shown: bool = False):
    """The casts that can be made as they are computed, None for others: of `swiglu(x)` for the linear with this runtime and
    weight, and of x's gradient for the linear that made x. shown: something else has x, and may add to its gradient."""
    call = runtime.call(x.device, LOCAL, training=training)
    columnwise = torch.is_grad_enabled() and weight.requires_grad and call.plan.saved[INPUT] != ROWWISE
    casts = [ComputedCast(call, INPUT, True, columnwise), None]
    if not shown and takes_payloads(x):
        needs = x.grad_fn.needs_input_grad
        casts[1] = ComputedCast(x.grad_fn.call, GRAD_OUTPUT, needs[0], needs[1])
    return tuple(cast if cast is not None and cast.possible() else None for cast in casts)


def shows_output(module: torch.nn.Module) -> bool:
    """Whether hooks get what this module's forward gives, and may read it for a loss of their own."""
    return bool(module._forward_hooks or torch.nn.modules.module._global_forward_hooks)


def swiglu_for(
    x: torch.Tensor, bias, runtime: LinearRuntime, weight: torch.Tensor, *, training: bool, shown: bool = False
) -> torch.Tensor:
    """`silu(gate) * up` (..., F) of x (..., 2F) + bias (2F,).

    On CUDA it is cast for the linear with this runtime and weight, and its gradient for the linear that made x, where that
    takes no more than the kernel that computes it; else it is as it is. shown: something else than this has x.
    """
    if bias is None and x.is_cuda and not torch.compiler.is_compiling():
        casts = swiglu_casts(x, runtime, weight, training=training, shown=shown)
        if any(casts):
            return SwigluCast.apply(x, *casts)
    return swiglu(x, bias)


_TILE = 128  # columns of which a kernel adds up what weights' gradients are made of


class WeightedSwigluCast(torch.autograd.Function):
    """x (T, 2F), weights, of rows or with a `RowMap` where they choose theirs -> (T, F), cast for the call `forth`; the
    gradient of x for `back`, where they are there."""

    @staticmethod
    def forward(ctx, x, weights, where: RowMap | None, forth: GroupedCall | None, back: GroupedCall | None):
        x, weights = as_rows(x), packed(weights)
        ctx.save_for_backward(x, weights)
        ctx.where, ctx.back = where, back
        if forth is None:
            return weighted_product(x, weights, where)
        gate, up = x.chunk(2, dim=1)
        return forth.computed(INPUT, up, gate=gate, weights=kernels.weights_of(weights, _places(where)))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, weights), where, dy = ctx.saved_tensors, ctx.where, as_rows(dy)
        if ctx.back is None or torch.is_anomaly_enabled() or not _in_vectors(dy):
            return *weighted_gradient(dy, x, weights, where), None, None, None
        dots = torch.empty(x.shape[0], dy.shape[1] // _TILE, dtype=torch.float32, device=x.device)
        dx = ctx.back.computed(GRAD_OUTPUT, x, grad=dy, weights=kernels.weights_of(weights, _places(where), dots))
        dweights = dots.sum(dim=1).to(weights.dtype)
        if where is not None:
            dweights = scatter(dweights, where.choice, weights.numel()).view(weights.shape)
        return dx, dweights, None, None, None


def _places(where: RowMap | None) -> torch.Tensor | None:
    return None if where is None else where.choice


def _in_vectors(x: torch.Tensor) -> bool:
    """Whether rows of x (M, K) can be read 16 bytes at a time."""
    return x.stride(1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def weighted_swiglu_for(
    x: torch.Tensor, weights: torch.Tensor, where: RowMap | None, forth: GroupedCall | None, *, shown: bool = False
) -> torch.Tensor:
    """`weighted_swiglu(x, weights, where)`, cast for the call `forth` where there is one, and its gradient for the
    grouped linear that made x where that takes it. shown: something else than this has x."""
    if not x.is_cuda or torch.compiler.is_compiling() or weights.dtype not in kernels.SOURCE_CODES:
        return weighted_swiglu(x, weights, where)
    back = None if shown else call_for_gradient(x)
    if (forth is None and back is None) or not _in_vectors(x):
        return weighted_swiglu(x, weights, where)
    return WeightedSwigluCast.apply(x, weights, where, forth, back)
