"""Where one direction's bytes lie, and moves that keep every byte: pieces, transposes, re-layouts, copies.

Nothing here casts. A piece shares memory with what it was cut from; scales that cover more than the piece
(a tensor's, a whole row's) are shared with it too, and the piece says so.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .formats import COLUMNWISE, ROWWISE
from .storage import QuantizedStorage, unpack_fp4
from .turn import turned

ROWS, COLUMNS = 0, 1  # dimensions of the logical (M, K)
_DIM_NAMES = ("rows", "columns")


def stored_dim(s: QuantizedStorage, dim: int) -> int:
    """The dimension of `qdata` that logical dimension `dim` runs along."""
    return 1 - dim if s.transposed else dim


def granularity(s: QuantizedStorage, dim: int) -> int:
    """Pieces along logical `dim` (0 rows, 1 columns) start and end at multiples of this: blocks and packed bytes."""
    block = s.format.block(s.direction)[dim] or 1
    packed = 8 // s.format.bits if s.format.is_quantized and stored_dim(s, dim) == 1 else 1
    return math.lcm(block, max(packed, 1))


def check_bounds(s: QuantizedStorage, dim: int, start: int, length: int) -> None:
    """Raise ``ValueError`` naming block and offset unless rows or columns [start, start + length) are whole blocks."""
    unit, end = granularity(s, dim), start + length
    for offset in (start, end):
        if offset % unit and offset != s.shape[dim]:
            block = " x ".join("all" if b is None else str(b) for b in s.format.block(s.direction))
            raise ValueError(
                f"{_DIM_NAMES[dim]} [{start}:{end}) of {s.shape[dim]} are not whole blocks of {s.direction} "
                f"{s.format}: offset {offset} is not a multiple of {unit} (block {block}, {s.format.bits} bits a code)"
            )


def narrow(s: QuantizedStorage, dim: int, start: int, length: int) -> tuple[QuantizedStorage, tuple[str, ...]]:
    """(piece, shared): rows (dim 0) or columns (dim 1) [start, start + length) of a payload, no copy.

    shared: the scales and amaxes of the piece that also cover elements outside it; with any, the piece cannot be
    cast anew alone. Raises ``ValueError`` naming block and offset for a piece that cuts a block.
    """
    if start == 0 and length == s.shape[dim]:
        return s, ()
    start = start if length else 0
    check_bounds(s, dim, start, length)
    fmt, shape = s.format, list(s.shape)
    shape[dim] = length
    axis = stored_dim(s, dim)
    if not fmt.is_quantized or axis == 0 or fmt.bits == 8:
        qdata = s.qdata.narrow(axis, start, length)
    else:
        qdata = s.qdata.narrow(axis, start * fmt.bits // 8, -(-length * fmt.bits // 8))
    scale, outer, block = s.scale, s.outer_amax, fmt.block(s.direction)[dim]
    if scale is not None and block is not None:
        scale = scale.narrow(dim, start // block, -(-length // block))
    if outer is not None and outer.dim() == 2 and dim == (ROWS if s.direction == ROWWISE else COLUMNS):
        outer = outer.narrow(dim, start, length)
    piece = replace(s, shape=tuple(shape), qdata=qdata, scale=scale, outer_amax=outer)
    return piece, tuple(n for n, t in piece.buffers().items() if n != "qdata" and t is getattr(s, n))


def row_dims(s: QuantizedStorage) -> dict[str, int | None]:
    """The dimension along which each of a payload's tensors splits with the rows (M); None: it covers all rows."""
    dims = {"qdata": stored_dim(s, ROWS)}
    if s.scale is not None:
        dims["scale"] = None if s.format.block(s.direction)[ROWS] is None else 0
    if s.outer_amax is not None:
        dims["outer_amax"] = 0 if s.outer_amax.dim() == 2 and s.direction == ROWWISE else None
    return dims


def join_rows(s: QuantizedStorage, gathered: dict[str, torch.Tensor], parts: int) -> QuantizedStorage:
    """The payload of `parts` x M rows from one part `s` and its gathered tensors: the parts', one after another.

    Tensors that cover all rows are those of `s`: every part has the same. Parts must end at whole blocks.
    """
    M, K = s.shape
    whole = s.changed(shape=(parts * M, K))
    check_bounds(whole, ROWS, 0, M)
    dims = row_dims(s)
    return whole.with_buffers({name: _along(t, dims[name], parts) for name, t in gathered.items()})


def _along(t: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """`parts` tensors, one after another along dimension 0, joined along dimension `dim` instead: a copy for 1."""
    if dim == 0:
        return t
    words = _as_words(t)
    turned = words.view(parts, -1, words.shape[1]).transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return turned.view(-1, parts * words.shape[1]).view(t.dtype)


def _as_words(t: torch.Tensor) -> torch.Tensor:
    """A contiguous matrix as eight bytes an element, where its rows are whole words: copies are several times as fast."""
    words = t.is_contiguous() and (t.shape[1] * t.element_size()) % 8 == 0 and t.data_ptr() % 8 == 0
    return t.view(torch.int64) if words and t.shape[1] else t


def transpose(s: QuantizedStorage) -> QuantizedStorage:
    """The same bytes as the other direction of the transposed matrix: rowwise of x is columnwise of x.T."""
    direction = COLUMNWISE if s.direction == ROWWISE else ROWWISE
    flipped = dict(direction=direction, shape=s.shape[::-1])
    if not s.format.is_quantized:
        return replace(s, qdata=s.qdata.T, **flipped)
    small = {n: t.T for n in ("scale", "outer_amax") if (t := getattr(s, n)) is not None and t.dim() == 2}
    return replace(s, transposed=not s.transposed, **small, **flipped)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes (..., n) -> (..., ceil(n / 2)): the even one in the low nibble."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def relayout(s: QuantizedStorage, transposed: bool) -> QuantizedStorage:
    """The same codes stored (K, M) when `transposed`, else (M, K). Scales are canonical in both; no copy if it is so."""
    if not s.format.is_quantized or s.transposed == transposed:
        return s
    if s.format.bits == 8:
        return s.changed(transposed=transposed, qdata=turned(s.qdata))
    codes = unpack_fp4(s.qdata, s.shape[ROWS if s.transposed else COLUMNS])
    return replace(s, transposed=transposed, qdata=pack_fp4(turned(codes)))


def copy_(dst: QuantizedStorage, src: QuantizedStorage) -> None:
    """Copy the bytes of a payload of the same format, direction and shape into `dst`; layouts may differ."""
    assert (dst.format, dst.direction, dst.shape) == (src.format, src.direction, src.shape)
    src = relayout(src, dst.transposed)
    for name, t in dst.buffers().items():
        t.copy_(getattr(src, name))


def map_buffers(s: QuantizedStorage, f) -> QuantizedStorage:
    """The payload over `f` of each of its tensors."""
    return s.with_buffers({name: f(t) for name, t in s.buffers().items()})


def is_contiguous(s: QuantizedStorage) -> bool:
    return all(t.is_contiguous() for t in s.buffers().values())


def equal(a: QuantizedStorage, b: QuantizedStorage) -> bool:
    """Same format, direction, shape and bytes, whatever the layout. NaN equals itself."""
    if (a.format, a.direction, a.shape, a.dtype) != (b.format, b.direction, b.shape, b.dtype):
        return False
    theirs = relayout(b, a.transposed).buffers()
    return all(torch.equal(_bytes(t), _bytes(theirs[n])) for n, t in a.buffers().items())


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def new_like(s: QuantizedStorage, shape, *, dtype=None, device=None, zero=False) -> QuantizedStorage:
    """A payload of the same format, direction and layout for (M, K) = `shape`.

    zero: decodes to zeros. Outer scales and amaxes of an unchanged shape are then kept from `s` (any scale is
    right for zeros), so that pieces of `s` can be copied into it.
    """
    out = QuantizedStorage.empty(
        s.format, s.direction, shape, dtype or s.dtype, device or s.device, transposed=s.transposed
    )
    if not zero:
        return out
    out.qdata.zero_()
    fill = {"scale": 1 if s.format.scale == "fp32" else 0, "outer_amax": 0}  # what a cast of zeros writes
    for name in ("scale", "outer_amax"):
        ours, theirs = getattr(out, name), getattr(s, name)
        if ours is None:
            continue
        if s.format.outer_axis != "none" and ours.dtype == torch.float32 and ours.shape == theirs.shape:
            ours.copy_(theirs)
        else:
            ours.fill_(fill[name])
    return out
