"""SwiGLU: `y = silu(gate) * up`, gate and up side by side in x (..., 2F).

    dgate = dy * up * s * (1 + gate * (1 - s))        s = sigmoid(gate)
    dup   = dy * gate * s

Weighted, for experts: `y = silu(gate) * up * weight` with a weight a row; dy times the weight takes dy's place, and
dweight is the row's sum of `dy * silu(gate) * up`: of 128 columns by pairs, then of these sums, so that what computes a
block of columns at a time (swiglu_cast.py) finds the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .launch import as_rows, on_device
from .sums import column_sum

_BLOCK, _TILE = 2048, 128


@triton.jit
def load(x, bias, row, col, inside, stride, F, BIASED: tl.constexpr):
    """gate, up of rows and columns that broadcast, zeros where they are not inside."""
    gate = tl.load(x + row * stride + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + F + col, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        gate += tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + F + col, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def gated(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gradients(gate, up, s, d):
    """Of gate and up; s: the sigmoid."""
    return d * up * s * (1.0 + gate * (1.0 - s)), d * gate * s


@triton.jit
def weighted_gradients(gate, up, weight, d):
    """Of gate and up, and what is summed for the weight's: a product that no compiler joins with the sum."""
    s = 1.0 / (1.0 + tl.exp(-gate))
    term = tl.fma(d * gate * s, up, tl.zeros_like(up))
    dgate, dup = gradients(gate, up, s, d * weight)
    return dgate, dup, term


@triton.jit
def sums_of_tiles(v):
    """Of (rows, columns) the sums of every 128 columns, by pairs: in one order, whatever threads hold them."""
    for _ in tl.static_range(7):  # 128 = 2^7
        v = tl.sum(tl.reshape(v, (v.shape[0], v.shape[1] // 2, 2)), axis=2)
    return v


@triton.jit
def _swiglu_forward(x, bias, y, stride, F, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate, up = load(x, bias, row, col, col < F, stride, F, BIASED)
    tl.store(y + row * F + col, gated(gate, up), mask=col < F)


@triton.jit
def _swiglu_backward(dy, x, bias, dx, dy_stride, stride, F, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate, up = load(x, bias, row, col, col < F, stride, F, BIASED)
    d = tl.load(dy + row * dy_stride + col, mask=col < F, other=0.0).to(tl.float32)
    dgate, dup = gradients(gate, up, 1.0 / (1.0 + tl.exp(-gate)), d)
    tl.store(dx + row * 2 * F + col, dgate, mask=col < F)
    tl.store(dx + row * 2 * F + F + col, dup, mask=col < F)


@triton.jit
def _weighted_forward(x, weights, y, stride, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate, up = load(x, x, row, col, col < F, stride, F, False)
    weight = tl.load(weights + row).to(tl.float32)
    tl.store(y + row * F + col, gated(gate, up) * weight, mask=col < F)


@triton.jit(do_not_specialize=["M"])  # the number of tokens
def _weighted_backward(dy, x, weights, dx, sums, dy_stride, stride, F, M, BLOCK: tl.constexpr):
    """sums (tiles of 128 columns, M): each row's of its tiles."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    for start in range(0, F, BLOCK):
        col = start + tl.arange(0, BLOCK)
        gate, up = load(x, x, row, col, col < F, stride, F, False)
        d = tl.load(dy + row * dy_stride + col, mask=col < F, other=0.0).to(tl.float32)
        dgate, dup, term = weighted_gradients(gate, up, weight, d)
        tile = start // 128 + tl.arange(0, BLOCK // 128)
        found = tl.reshape(sums_of_tiles(tl.reshape(term, (1, BLOCK))), (BLOCK // 128,))
        tl.store(sums + tile.to(tl.int64) * M + row, found, mask=tile * 128 < F)
        tl.store(dx + row * 2 * F + col, dgate, mask=col < F)
        tl.store(dx + row * 2 * F + F + col, dup, mask=col < F)


def product(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y (M, F) of rows x (M, 2F)."""
    M, F = x.shape[0], x.shape[1] // 2
    y = torch.empty(M, F, dtype=x.dtype, device=x.device)
    with on_device(x):
        _swiglu_forward[M, triton.cdiv(F, _BLOCK)](
            x, x if bias is None else bias, y, x.stride(0), F, BIASED=bias is not None, BLOCK=_BLOCK
        )
    return y


def gradient(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Gradient (M, 2F) of rows x (M, 2F) from that of y, dy (..., F)."""
    M, F = x.shape[0], x.shape[1] // 2
    dy, dx = as_rows(dy), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with on_device(x):
        _swiglu_backward[M, triton.cdiv(F, _BLOCK)](
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


def weighted_product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """y (M, F) of rows x (M, 2F), weights (M,)."""
    M, F = x.shape[0], x.shape[1] // 2
    y, block = torch.empty(M, F, dtype=x.dtype, device=x.device), _block(F)
    if M:
        with on_device(x):
            _weighted_forward[M, triton.cdiv(F, block)](x, weights, y, x.stride(0), F, BLOCK=block)
    return y


def weighted_gradient(dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows x (M, 2F) and of weights (M,), from that of y, dy (M, F)."""
    M, F = x.shape[0], x.shape[1] // 2
    dx, sums = torch.empty(x.shape, dtype=x.dtype, device=x.device), sums_for(x)
    if M:
        with on_device(x):
            _weighted_backward[M,](
                dy, x, weights, dx, sums, dy.stride(0), x.stride(0), F, M, BLOCK=max(_TILE, _block(F))
            )
    return dx, total(sums, weights)


def _block(F: int) -> int:
    """Columns of a program: all of a narrow row's."""
    return min(_BLOCK // 2, triton.next_power_of_2(F))


def sums_for(x: torch.Tensor) -> torch.Tensor:
    """Where the gradient of the weights is summed, for rows x (M, 2F): (tiles of 128 columns of F, M)."""
    return torch.empty(triton.cdiv(x.shape[1] // 2, _TILE), x.shape[0], dtype=torch.float32, device=x.device)


def total(sums: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The gradient of the weights."""
    return sums.sum(dim=0).to(weights.dtype)


class WeightedSwigluFunction(torch.autograd.Function):
    """See `weighted_swiglu`."""

    @staticmethod
    def forward(ctx, x, weights):
        x, weights = as_rows(x), weights.contiguous()
        ctx.save_for_backward(x, weights)
        return weighted_product(x, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return weighted_gradient(as_rows(dy), *ctx.saved_tensors)


def weighted_swiglu(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up * weight` (M, F) of rows x (M, 2F) holding gate, then up; weights (M,), one a row."""
    return WeightedSwigluFunction.apply(x, weights)
