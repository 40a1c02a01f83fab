"""A fused projection's output into rotated queries, rotated keys and values, in one pass; and back.

The projection's last dimension holds, for every group, its query heads, its key head, its value head. Queries of
grouped attention are not a view of that, so the split has to copy them anyway: the rotation rides along.

    y1 = x1 cos f - x2 sin f        the two halves of the rotated part of a head
    y2 = x2 cos f + x1 sin f
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .launch import on_device, packed, power_of_2

_HEADS = 16  # a tile


@triton.jit
def _kinds(head, G: tl.constexpr, R: tl.constexpr):
    """Of the projection's heads: which are queries, keys, values, and each one's place among its kind."""
    group, place = head // (R + 2), head % (R + 2)
    exists = head < G * (R + 2)
    return (place < R) & exists, (place == R) & exists, (place == R + 1) & exists, group * R + place, group


@triton.jit
def _get(q, k, v, q_head, group, is_q, is_k, is_v, col, ok, D: tl.constexpr):
    """Elements of all heads from where each head lies."""
    x = tl.load(q + q_head * D + col, mask=is_q & ok, other=0.0).to(tl.float32)
    x += tl.load(k + group * D + col, mask=is_k & ok, other=0.0).to(tl.float32)
    return x + tl.load(v + group * D + col, mask=is_v & ok, other=0.0).to(tl.float32)


@triton.jit
def _put(q, k, v, x, q_head, group, is_q, is_k, is_v, col, ok, D: tl.constexpr):
    tl.store(q + q_head * D + col, x, mask=is_q & ok)
    tl.store(k + group * D + col, x, mask=is_k & ok)
    tl.store(v + group * D + col, x, mask=is_v & ok)


@triton.jit
def _split_rotate(
    mixed, cosines, sines, q, k, v, B, stride_s, stride_b,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr,
    HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # s * B + b
    mixed += token * G * (R + 2) * D
    q += token * G * R * D
    k += token * G * D
    v += token * G * D
    col = tl.arange(0, HALF_BLOCK)[None, :]
    ok = col < HALF
    angle = (token // B) * stride_s + (token % B) * stride_b + col
    cos = tl.load(cosines + angle, mask=ok, other=0.0)
    sin = tl.load(sines + angle, mask=ok, other=0.0)
    for first in range(0, G * (R + 2), HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        is_q, is_k, is_v, q_head, group = _kinds(head, G, R)
        inside = ok & (head < G * (R + 2))
        x = mixed + head * D + col
        if BACKWARD:
            d1 = _get(q, k, v, q_head, group, is_q, is_k, is_v, col, ok, D)
            d2 = _get(q, k, v, q_head, group, is_q, is_k, is_v, HALF + col, ok, D)
            tl.store(x, tl.where(is_v, d1, d1 * cos + d2 * sin), mask=inside)
            tl.store(x + HALF, tl.where(is_v, d2, d2 * cos - d1 * sin), mask=inside)
        else:
            x1 = tl.load(x, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
            y1 = tl.where(is_v, x1, x1 * cos - x2 * sin)
            y2 = tl.where(is_v, x2, x2 * cos + x1 * sin)
            _put(q, k, v, y1, q_head, group, is_q, is_k, is_v, col, ok, D)
            _put(q, k, v, y2, q_head, group, is_q, is_k, is_v, HALF + col, ok, D)
        if D > 2 * HALF:  # the part of a head that is not rotated
            rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
            in_rest = rest < D
            at = mixed + head * D + rest
            if BACKWARD:
                d = _get(q, k, v, q_head, group, is_q, is_k, is_v, rest, in_rest, D)
                tl.store(at, d, mask=in_rest & (head < G * (R + 2)))
            else:
                d = tl.load(at, mask=in_rest & (head < G * (R + 2)), other=0.0).to(tl.float32)
                _put(q, k, v, d, q_head, group, is_q, is_k, is_v, rest, in_rest, D)


def _run(mixed, cos, sin, q, k, v, *, backward: bool) -> None:
    S, B, heads, D = q.shape
    G, half = k.shape[2], cos.shape[-1]
    stride_b = 0 if cos.shape[1] == 1 else cos.stride(1)
    with on_device(mixed):
        _split_rotate[S * B,](
            mixed, cos, sin, q, k, v, B, cos.stride(0), stride_b,
            G=G, R=heads // G, D=D, HALF=half, BACKWARD=backward, HEADS=_HEADS,
            HALF_BLOCK=power_of_2(half), REST_BLOCK=power_of_2(max(1, D - 2 * half)),
        )  # fmt: skip


class SplitRotateFunction(torch.autograd.Function):
    """See `split_rotate`."""

    @staticmethod
    def forward(ctx, mixed, cos, sin, groups, head_size):
        mixed = packed(mixed)
        S, B, width = mixed.shape
        heads = width // head_size - 2 * groups
        q, k, v = (mixed.new_empty(S, B, n, head_size) for n in (heads, groups, groups))
        _run(mixed, cos, sin, q, k, v, backward=False)
        ctx.save_for_backward(cos, sin)
        ctx.shape = mixed.shape
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        q, k, v = (packed(g) for g in grads)
        mixed = q.new_empty(ctx.shape)
        _run(mixed, *ctx.saved_tensors, q, k, v, backward=True)
        return mixed, None, None, None, None


def split_rotate(mixed, freqs, *, groups: int, head_size: int, scale: float = 1.0):
    """mixed (S, B, groups * (R + 2) * head_size) -> q (S, B, groups * R, head_size), k and v (S, B, groups, head_size).

    freqs: angles (S, 1 or B, 1, D'), the same in both halves of D', which is even and at most head_size. The first D'
    elements of every query and key head are rotated, half against half, with cosines and sines times `scale`. Raises
    ``ValueError`` for angles of another number of positions.
    """
    if freqs.shape[0] != mixed.shape[0] or freqs.shape[1] not in (1, mixed.shape[1]):
        raise ValueError(f"angles {tuple(freqs.shape)} are not for the positions of a tensor {tuple(mixed.shape)}")
    angles = freqs[:, :, 0, : freqs.shape[-1] // 2].float().contiguous()
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return SplitRotateFunction.apply(mixed, cos, sin, groups, head_size)
