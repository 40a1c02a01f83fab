"""Sums over rows: gradients of biases and of norms' parameters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import as_rows, cdiv, on_device

_MOST_PARTS = 1024


def rows_in_a_part(rows: int, least: int) -> int:
    """How many rows one program sums: from the shape alone, so that the order of the sum is the same everywhere."""
    return max(least, cdiv(cdiv(rows, _MOST_PARTS), least) * least)


@triton.jit
def _column_sum(x, parts, stride, M, N, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, PART, ROWS):
        row = part.to(tl.int64) * PART + start + tl.arange(0, ROWS)[:, None]
        total += tl.load(x + row * stride + col, mask=(row < M) & (col < N), other=0.0).to(tl.float32)
    out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + part.to(tl.int64) * N + out, tl.sum(total, axis=0), mask=out < N)


def column_sum(x: torch.Tensor) -> torch.Tensor:
    """`x.sum` over all dimensions but the last: x (..., N) -> (N,), summed in FP32, in x's dtype."""
    rows = as_rows(x)
    M, N = rows.shape
    part = rows_in_a_part(M, 32)
    parts = torch.empty(cdiv(M, part), N, dtype=torch.float32, device=x.device)
    with on_device(x):
        _column_sum[parts.shape[0], cdiv(N, 256)](
            rows, parts, rows.stride(0), M, N, PART=part, ROWS=8, BLOCK=256
        )
    return parts.sum(dim=0).to(x.dtype)
