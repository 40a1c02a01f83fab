"""Matrices turned over, each of a stack: (B, R, C) to (B, C, R), byte for byte.

Elements of one or two bytes are put together to words of four that were below each other, so that what goes through shared
memory, and out, are words. A program reads and writes runs of 128 bytes at least.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, on_device

_WORD = 4  # bytes
_WORDS, _COLS = 32, 128  # of a program: words that become a run, and how many such runs
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _turn(
    x, out, batch_stride, stride, C, words, word_tiles, col_tiles, PACK: tl.constexpr, WORDS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """x (B, PACK * words, C), out (B, C, words). PACK: elements in a word of out."""
    tile = tl.program_id(0)  # programs beside each other read the same rows
    rest = tile // col_tiles
    matrix = (rest // word_tiles).to(tl.int64)
    col = (tile % col_tiles) * COLS + tl.arange(0, COLS)
    word = (rest % word_tiles) * WORDS + tl.arange(0, WORDS)
    inside = (word < words)[:, None] & (col < C)[None, :]
    x += matrix * batch_stride + col[None, :]
    v = tl.load(x + (word * PACK).to(tl.int64)[:, None] * stride, mask=inside, other=0)
    if PACK > 1:
        BITS: tl.constexpr = 32 // PACK
        v = v.to(tl.int32) & ((1 << BITS) - 1)  # int16 has a sign
        for j in tl.static_range(1, PACK):
            below = tl.load(x + (word * PACK + j).to(tl.int64)[:, None] * stride, mask=inside, other=0)
            v |= (below.to(tl.int32) & ((1 << BITS) - 1)) << (BITS * j)
    to = out + matrix * C * words + col.to(tl.int64)[:, None] * words + word[None, :]
    tl.store(to, tl.trans(v), mask=(word < words)[None, :] & (col < C)[:, None])


def turn(x: torch.Tensor) -> torch.Tensor:
    """The transposes (B, C, R), packed, of x (B, R, C), whose rows are packed and whose elements have 1, 2 or 4 bytes."""
    B, R, C = x.shape
    assert x.stride(2) == 1 or C < 2, x.stride()
    out = torch.empty(B, C, R, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    size = x.element_size()
    pack = _WORD // size if R % (_WORD // size) == 0 else 1
    ints = _INTEGERS[size]
    to = out.view(_INTEGERS[size * pack])
    words = R // pack
    tiles = cdiv(words, _WORDS), cdiv(C, _COLS)
    with on_device(x):
        _turn[B * tiles[0] * tiles[1],](
            x.view(ints), to, x.stride(0), x.stride(1), C, words, *tiles, PACK=pack, WORDS=_WORDS, COLS=_COLS
        )
    return out
