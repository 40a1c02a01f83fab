"""SwiGLU: `y = silu(gate) * up`, gate and up side by side in x (..., 2F).

    dgate = dy * up * s * (1 + gate * (1 - s))        s = sigmoid(gate)
    dup   = dy * gate * s

Weighted, for experts: `y = silu(gate) * up * weight` with a weight a row; dy times the weight takes dy's place, and
dweight is the row's sum of `dy * silu(gate) * up`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .launch import as_rows, cdiv, on_device, packed, power_of_2
from .sums import column_sum

_BLOCK = 2048


@triton.jit
def _load(x, bias, row, col, stride, F, BIASED: tl.constexpr):
    gate = tl.load(x + row * stride + col, mask=col < F, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + F + col, mask=col < F, other=0.0).to(tl.float32)
    if BIASED:
        gate += tl.load(bias + col, mask=col < F, other=0.0).to(tl.float32)
        up += tl.load(bias + F + col, mask=col < F, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _swiglu_forward(x, bias, y, stride, F, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate, up = _load(x, bias, row, col, stride, F, BIASED)
    tl.store(y + row * F + col, gate / (1.0 + tl.exp(-gate)) * up, mask=col < F)


@triton.jit
def _swiglu_backward(dy, x, bias, dx, dy_stride, stride, F, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate, up = _load(x, bias, row, col, stride, F, BIASED)
    d = tl.load(dy + row * dy_stride + col, mask=col < F, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(dx + row * 2 * F + col, d * up * s * (1.0 + gate * (1.0 - s)), mask=col < F)
    tl.store(dx + row * 2 * F + F + col, d * gate * s, mask=col < F)


@triton.jit
def _place(choice, row, CHOSEN: tl.constexpr):
    """Where a row's weight is; -1: nowhere, it is 0."""
    if CHOSEN:
        return tl.load(choice + row).to(tl.int64)
    else:
        return row


@triton.jit
def _weighted_forward(x, weights, choice, y, stride, F, BLOCK: tl.constexpr, CHOSEN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate, up = _load(x, x, row, col, stride, F, False)
    place = _place(choice, row, CHOSEN)
    weight = tl.load(weights + place, mask=place >= 0, other=0.0).to(tl.float32)
    tl.store(y + row * F + col, gate / (1.0 + tl.exp(-gate)) * up * weight, mask=col < F)


@triton.jit
def _weighted_backward(
    dy, x, weights, choice, dx, dweights, dy_stride, stride, F, BLOCK: tl.constexpr, CHOSEN: tl.constexpr
):  # fmt: skip
    """A program a row, so that the row's sum is in one place."""
    row = tl.program_id(0).to(tl.int64)
    place = _place(choice, row, CHOSEN)
    weight = tl.load(weights + place, mask=place >= 0, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        col = start + tl.arange(0, BLOCK)
        gate, up = _load(x, x, row, col, stride, F, False)
        d = tl.load(dy + row * dy_stride + col, mask=col < F, other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-gate))
        total += d * gate * s * up
        d *= weight
        tl.store(dx + row * 2 * F + col, d * up * s * (1.0 + gate * (1.0 - s)), mask=col < F)
        tl.store(dx + row * 2 * F + F + col, d * gate * s, mask=col < F)
    tl.store(dweights + place, tl.sum(total, axis=0), mask=place >= 0)


def product(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y (M, F) of rows x (M, 2F)."""
    M, F = x.shape[0], x.shape[1] // 2
    y = torch.empty(M, F, dtype=x.dtype, device=x.device)
    with on_device(x):
        _swiglu_forward[M, cdiv(F, _BLOCK)](
            x, x if bias is None else bias, y, x.stride(0), F, BIASED=bias is not None, BLOCK=_BLOCK
        )
    return y


def gradient(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Gradient (M, 2F) of rows x (M, 2F) from that of y, dy (..., F)."""
    M, F = x.shape[0], x.shape[1] // 2
    dy, dx = as_rows(dy), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with on_device(x):
        _swiglu_backward[M, cdiv(F, _BLOCK)](
            dy, x, x if bias is None else bias, dx, dy.stride(0), x.stride(0), F,
            BIASED=bias is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return dx


class SwigluFunction(torch.autograd.Function):
    """See `swiglu`."""

    @staticmethod
    def forward(ctx, x, bias):
        rows = as_rows(x)
        ctx.save_for_backward(rows, bias)
        ctx.shape = x.shape
        return product(rows, bias).view(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, bias = ctx.saved_tensors
        dx = gradient(dy, x, bias)
        dbias = column_sum(dx).to(bias.dtype) if bias is not None and ctx.needs_input_grad[1] else None
        return dx.view(ctx.shape), dbias


def swiglu(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) * up` (..., F) of x + bias, x (..., 2F) holding gate, then up; bias (2F,)."""
    return SwigluFunction.apply(x, bias)


def weighted_product(x: torch.Tensor, weights: torch.Tensor, where=None) -> torch.Tensor:
    """y (M, F) of rows x (M, 2F); see `weighted_swiglu`."""
    M, F = x.shape[0], x.shape[1] // 2
    y, block = torch.empty(M, F, dtype=x.dtype, device=x.device), _block(F)
    if M:
        with on_device(x):
            _weighted_forward[M, cdiv(F, block)](
                x, weights, _choice(weights, where), y, x.stride(0), F, BLOCK=block, CHOSEN=where is not None
            )
    return y


def weighted_gradient(dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, where=None):
    """Gradients of rows x (M, 2F) and of weights from that of y, dy (M, F)."""
    M, F = x.shape[0], x.shape[1] // 2
    dy, dx = as_rows(dy), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweights = torch.empty_like(weights) if where is None else torch.zeros_like(weights)
    if M:
        with on_device(x):
            _weighted_backward[M,](
                dy, x, weights, _choice(weights, where), dx, dweights, dy.stride(0), x.stride(0), F, BLOCK=_block(F),
                CHOSEN=where is not None,
            )  # fmt: skip
    return dx, dweights


class WeightedSwigluFunction(torch.autograd.Function):
    """See `weighted_swiglu`."""

    @staticmethod
    def forward(ctx, x, weights, where):
        x, weights = as_rows(x), packed(weights)
        ctx.save_for_backward(x, weights)
        ctx.where = where
        return weighted_product(x, weights, where)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *weighted_gradient(dy, *ctx.saved_tensors, ctx.where), None


def _choice(weights: torch.Tensor, where) -> torch.Tensor:
    """The rows' places among the weights, or a tensor that is not read."""
    return weights if where is None else where.choice


def _block(F: int) -> int:
    """Columns of a program: all of a narrow row's."""
    return min(_BLOCK // 2, power_of_2(F))


def weighted_swiglu(x: torch.Tensor, weights: torch.Tensor, where=None) -> torch.Tensor:
    """`silu(gate) * up * weight` (M, F) of rows x (M, 2F) holding gate, then up; weights (M,), one a row, or with a `RowMap` of
    M rows (N, E), of which the rows chose theirs."""
    return WeightedSwigluFunction.apply(x, weights, where)
