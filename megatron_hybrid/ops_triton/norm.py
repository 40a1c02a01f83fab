"""RMSNorm and LayerNorm over the last dimension, forward and backward.

    y  = (x - mean) * rstd * gamma + beta                        RMSNorm: mean = 0, no beta
    dx = rstd * (g - xhat * mean(g * xhat) - mean(g)) + dr       g = dy * gamma; RMSNorm: without mean(g)

`dr` is the gradient of a residual stream that starts at x: added here, it costs no pass of its own. It is added to the
norm's own gradient once that is rounded: bit for bit what autograd gives where the two come from two nodes, so that a layer
whose norm is recomputed trains like one whose is not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .launch import as_rows, cdiv, on_device, power_of_2
from .sums import rows_in_a_part

MAX_SIZE = 16384  # a row is held in registers


@triton.jit
def _norm_forward(
    x, gamma, beta, y, means, rstds, stride, M, N, eps,
    CENTERED: tl.constexpr, MEAN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < M) & (col < N)
    v = tl.load(x + row[:, None] * stride + col, mask=inside, other=0.0).to(tl.float32)
    if MEAN:
        mean = tl.sum(v, axis=1) / N
        tl.store(means + row, mean, mask=row < M)
        v = tl.where(inside, v - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / N + eps)
    tl.store(rstds + row, rstd, mask=row < M)
    g = tl.load(gamma + col, mask=col < N, other=0.0).to(tl.float32)
    if CENTERED:
        g += 1.0
    out = v * rstd[:, None] * g
    if MEAN:
        out += tl.load(beta + col, mask=col < N, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * N + col, out, mask=inside)


@triton.jit
def _norm_backward(
    dy, x, gamma, dr, means, rstds, dx, dgammas, dbetas, dy_stride, x_stride, dr_stride, M, N,
    CENTERED: tl.constexpr, MEAN: tl.constexpr, RESIDUAL: tl.constexpr,
    PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    g = tl.load(gamma + col, mask=col < N, other=0.0).to(tl.float32)
    if CENTERED:
        g += 1.0
    dgamma = tl.zeros((ROWS, BLOCK), tl.float32)
    dbeta = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, PART, ROWS):
        row = part * PART + start + tl.arange(0, ROWS)
        inside = (row[:, None] < M) & (col < N)
        v = tl.load(x + row[:, None] * x_stride + col, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + row[:, None] * dy_stride + col, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row, mask=row < M, other=0.0)[:, None]
        if MEAN:
            v -= tl.load(means + row, mask=row < M, other=0.0)[:, None]
        xhat = tl.where(inside, v * rstd, 0.0)
        dgamma += d * xhat
        d_g = d * g
        out = d_g - xhat * (tl.sum(d_g * xhat, axis=1) / N)[:, None]
        if MEAN:
            dbeta += d
            out -= (tl.sum(d_g, axis=1) / N)[:, None]
        out *= rstd
        if RESIDUAL:  # both rounded, as a sum of two gradients is
            out = out.to(dx.dtype.element_ty).to(tl.float32)
            out += tl.load(dr + row[:, None] * dr_stride + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row[:, None] * N + col, out, mask=inside)
    where = tl.arange(0, BLOCK)
    tl.store(dgammas + part * N + where, tl.sum(dgamma, axis=0), mask=where < N)
    if MEAN:
        tl.store(dbetas + part * N + where, tl.sum(dbeta, axis=0), mask=where < N)


def _tile(N: int) -> dict:
    """A row a program, or several short ones; 8 to 16 elements a thread."""
    block = power_of_2(N)
    rows = max(1, 1024 // block)
    return dict(ROWS=rows, BLOCK=block, num_warps=min(16, max(4, block // 512)))


class NormFunction(torch.autograd.Function):
    """See `norm`."""

    @staticmethod
    def forward(ctx, x, gamma, beta, eps, centered, dtype, residual):
        rows, tile = as_rows(x), _tile(x.shape[-1])
        M, N = rows.shape
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        rstd = torch.empty(M, dtype=torch.float32, device=x.device)
        mean = torch.empty(M if beta is not None else 0, dtype=torch.float32, device=x.device)
        with on_device(x):
            _norm_forward[cdiv(M, tile["ROWS"]),](
                rows, gamma, gamma if beta is None else beta, y, mean, rstd, rows.stride(0), M, N, eps,
                CENTERED=centered, MEAN=beta is not None, **tile,
            )  # fmt: skip
        ctx.save_for_backward(rows, gamma, mean, rstd)
        ctx.centered, ctx.shape, ctx.beta_dtype = centered, x.shape, None if beta is None else beta.dtype
        ctx.set_materialize_grads(False)
        return (y, x) if residual else y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dr=None):
        if dy is None:
            return dr, None, None, None, None, None, None
        x, gamma, mean, rstd = ctx.saved_tensors
        (M, N), has_mean, tile = x.shape, ctx.beta_dtype is not None, _tile(x.shape[1])
        part = rows_in_a_part(M, max(16, tile["ROWS"]))
        num_parts = cdiv(M, part)
        dx = torch.empty(M, N, dtype=x.dtype, device=x.device)
        sums = torch.empty(1 + has_mean, num_parts, N, dtype=torch.float32, device=x.device)
        dy = as_rows(dy)
        residual = dy if dr is None else as_rows(dr)
        with on_device(x):
            _norm_backward[num_parts,](
                dy, x, gamma, residual, mean, rstd, dx, sums[0], sums[-1],
                dy.stride(0), x.stride(0), residual.stride(0), M, N,
                CENTERED=ctx.centered, MEAN=has_mean, RESIDUAL=dr is not None, PART=part, **tile,
                enable_fp_fusion=False,  # a product and the residual's sum in one rounding would be neither's bits
            )  # fmt: skip
        sums = sums.sum(dim=1)
        dbeta = sums[1].to(ctx.beta_dtype) if has_mean else None
        return dx.view(ctx.shape), sums[0].to(gamma.dtype), dbeta, None, None, None, None


def norm(x, gamma, beta=None, *, eps: float, centered: bool, dtype: torch.dtype, residual: bool = False):
    """LayerNorm of x (..., N) with gamma and beta (N,), RMSNorm without beta; y (..., N) in `dtype`.

    centered: gamma is stored minus one. residual: returns (y, x); the gradient of that x is added to the norm's own
    inside the same kernel. N is at most `MAX_SIZE`.
    """
    return NormFunction.apply(x, gamma, beta, eps, centered, dtype, residual)
