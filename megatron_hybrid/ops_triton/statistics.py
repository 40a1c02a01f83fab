"""What a cast did to a tensor, in one read of it, of its codes and of its scales; see `observe.statistics.measure`.

Codes are decoded in registers, with the roundings of the payload's own decode. A program goes through its tiles and adds
up each place of a tile in FP32, places in FP64, and leaves a number of each kind; those of all programs are combined
afterwards. Which program has which tiles follows from the shape alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import cdiv, on_device

_MOST_PROGRAMS = 1024
_SCALES_AT_ONCE = 1024
_BINS = 512  # of exponents: a power of two that leaves one for what is outside the tensor


class Codes(NamedTuple):
    """How codes of an element type are read.

    one: 2^(127 - exponent bias), what a code shifted into an FP32 number's place is multiplied by. largest: the code of
    the largest number; those beyond are NaN, but for infinity (-1: there is none). furthest: what rounds to the largest
    number at most, as a multiple of it.
    """

    bits: int
    mantissa: int
    one: float
    largest: int
    infinity: int
    furthest: float


class Stored(NamedTuple):
    """A payload's buffers (R, C) in the order in which its codes lie.

    codes: uint8 (R, C), or (R, ceil(C / 2)) with two in a byte. scale: float32 block scales. outer: float32 outer
    scales that a scaled code is multiplied by, or None. block, outer_block: elements that a scale covers along R and C,
    0: all.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    outer: torch.Tensor | None
    block: tuple[int, int]
    outer_block: tuple[int, int]

    def rows(self, start: int, stop: int) -> Stored:
        """A run of rows, which begins where a block does."""

        def part(t, size):
            return t[start // size : -(-stop // size)] if size else t

        outer = None if self.outer is None else part(self.outer, self.outer_block[0])
        codes, scale = self.codes[start:stop], part(self.scale, self.block[0])
        return self._replace(codes=codes, scale=scale, outer=outer)


@triton.jit
def _value(code, HOW: tl.constexpr):
    """The FP32 number and the code of the magnitude of int32 codes."""
    SIGN: tl.constexpr = 1 << (HOW[0] - 1)
    size = code & (SIGN - 1)
    bits = ((code & SIGN) << (32 - HOW[0])) | (size << (23 - HOW[1]))
    value = bits.to(tl.float32, bitcast=True) * HOW[2]  # also of subnormal numbers
    if HOW[3] < SIGN - 1:
        value = tl.where(size > HOW[3], tl.where(size == HOW[4], float("inf"), float("nan")), value)
    return value, size


@triton.jit
def _at(index, size, stride, BLOCK: tl.constexpr):
    """Where the scales of rows or columns lie, of which there are less than 2^31. BLOCK 0: all have one."""
    if BLOCK == 0:
        return 0
    else:
        return tl.minimum(index, size - 1) // BLOCK * stride


@triton.jit(
    do_not_specialize=["scale_row", "scale_col", "outer_row", "outer_col", "tiles", "across", "programs"],
    do_not_specialize_on_alignment=["scale", "outer"],
)
def _compare(
    x, codes, scale, outer, parts, x_row, x_col, codes_row, scale_row, scale_col, outer_row, outer_col, R, C, tiles,
    across, programs, HOW: tl.constexpr, BLOCK: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """parts (8, programs), a column of which is this one's: amax, zeros, underflow, saturation, nonfinite, signal, noise,
    gain. A program has at most 65535 tiles: two counts of a place share a word."""
    largest = tl.zeros((ROWS, COLS), tl.int32)
    became_zero, out_of_range = tl.zeros((ROWS, COLS), tl.int32), tl.zeros((ROWS, COLS), tl.int32)
    signal, noise = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    gain = tl.zeros((ROWS, COLS), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // across) * ROWS + tl.arange(0, ROWS)[:, None]
        col = (tile % across) * COLS + tl.arange(0, COLS)[None, :]
        inside = (row < R) & (col < C)
        wide = row.to(tl.int64)
        v = tl.load(x + wide * x_row + col.to(tl.int64) * x_col, mask=inside, other=0.0).to(tl.float32)
        if HOW[0] == 4:
            pair = tl.load(codes + wide * codes_row + col // 2, mask=inside, other=0).to(tl.int32)
            code = (pair >> ((col & 1) * 4)) & 0xF
        else:
            code = tl.load(codes + wide * codes_row + col, mask=inside, other=0).to(tl.int32)
        q, size = _value(code, HOW)
        q *= tl.load(scale + _at(row, R, scale_row, BLOCK[0]) + _at(col, C, scale_col, BLOCK[1]))
        if OUTER is not None:
            q *= tl.load(outer + _at(row, R, outer_row, OUTER[0]) + _at(col, C, outer_col, OUTER[1]))
        q = tl.where(inside, q, 0.0)  # a scale may be NaN
        magnitude = tl.abs(v)
        bits = magnitude.to(tl.int32, bitcast=True)  # ordered like the floats, NaN on top
        zero = (q == 0.0) & inside
        beyond = (size == HOW[3]) & (magnitude > tl.abs(q) * HOW[5])
        largest = tl.maximum(largest, bits)
        became_zero += zero.to(tl.int32) | ((zero & (v != 0.0)).to(tl.int32) << 16)
        out_of_range += beyond.to(tl.int32) | ((bits >= 0x7F800000).to(tl.int32) << 16)
        error = v - q
        signal += v * v
        noise += error * error
        gain += error * (q + v)
    out = parts + tl.program_id(0)
    amax = tl.max(tl.max(largest, axis=1), axis=0)
    tl.store(out, amax.to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(out + programs, _sum(became_zero & 0xFFFF))
    tl.store(out + 2 * programs, _sum((became_zero >> 16) & 0xFFFF))
    tl.store(out + 3 * programs, _sum(out_of_range & 0xFFFF))
    tl.store(out + 4 * programs, _sum((out_of_range >> 16) & 0xFFFF))
    tl.store(out + 5 * programs, _sum(signal))
    tl.store(out + 6 * programs, _sum(noise))
    tl.store(out + 7 * programs, _sum(gain))


@triton.jit
def _sum(tile):
    return tl.sum(tl.sum(tile.to(tl.float64), axis=1), axis=0)


@triton.jit(do_not_specialize=["count", "programs"])
def _scales(
    scale, parts, bins, count, programs, above, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, AT_ONCE: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """parts (2, programs): the smallest and largest finite scale above `above`. bins (programs, BINS): of exponents."""
    least, most = tl.full((), float("inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
    found = tl.zeros((BINS,), tl.int32)
    for block in range(tl.program_id(0), (count + AT_ONCE - 1) // AT_ONCE, tl.num_programs(0)):
        at = block * AT_ONCE + tl.arange(0, AT_ONCE)
        v = tl.load(scale + at, mask=at < count, other=0.0)
        finite = tl.abs(v) < float("inf")
        used = finite & (v > above)
        least = tl.minimum(least, tl.min(tl.where(used, v, float("inf")), axis=0))
        most = tl.maximum(most, tl.max(tl.where(used, v, float("-inf")), axis=0))
        subnormal = v < 1.1754943508222875e-38
        bits = tl.where(subnormal, v * 16777216.0, v).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - tl.where(subnormal, 151, 127)  # of a zero below the lowest
        exponent = tl.where(finite, tl.maximum(exponent, LOWEST), HIGHEST)
        found += tl.histogram(tl.where(at < count, exponent - LOWEST, BINS - 1), BINS)
    tl.store(parts + tl.program_id(0), least)
    tl.store(parts + programs + tl.program_id(0), most)
    tl.store(bins + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


class Tiles(NamedTuple):
    """How a tensor is cut: tiles of rows x columns, `across` side by side, `count` in all, shared by `programs`."""

    rows: int
    columns: int
    across: int
    count: int

    @staticmethod
    def of(x: torch.Tensor) -> Tiles:
        """Squarer ones where x does not lie as the codes do, so that both are read in runs."""
        rows, columns = (8, 256) if x.stride(1) == 1 else (32, 64)
        across = cdiv(x.shape[1], columns)
        return Tiles(rows, columns, across, across * cdiv(x.shape[0], rows))

    @property
    def programs(self) -> int:
        return min(self.count, _MOST_PROGRAMS)


def compare(references, stored: Stored, how: Codes) -> torch.Tensor:
    """float64 (8,): amax; how many are zeros, underflow, saturated, not finite; signal, noise, gain.

    references: (first row, tensor) of runs of rows that make up what the payload was cast from, in its order (R, C),
    any strides.
    """
    made = []
    for first, x in references:
        part, tiles = stored.rows(first, first + x.shape[0]), Tiles.of(x)
        made.append(torch.empty(8, tiles.programs, dtype=torch.float64, device=x.device))
        outer = part.scale if part.outer is None else part.outer
        with on_device(x):
            _compare[(tiles.programs,)](
                x, part.codes, part.scale, outer, made[-1], *x.stride(), part.codes.stride(0), *_strides(part.scale),
                *_strides(outer), *x.shape, tiles.count, tiles.across, tiles.programs, HOW=tuple(how), BLOCK=part.block,
                OUTER=None if part.outer is None else part.outer_block, ROWS=tiles.rows, COLS=tiles.columns,
                num_warps=8, num_stages=1, enable_fp_fusion=False,
            )  # fmt: skip
    parts = made[0] if len(made) == 1 else torch.cat(made, dim=1)
    numbers = parts.sum(1)
    torch.amax(parts[0], 0, out=numbers[0])  # NaN stays
    return numbers


def _strides(scale: torch.Tensor) -> tuple[int, ...]:
    return scale.stride() if scale.dim() else (0, 0)


class Scales(NamedTuple):
    """least, most: float64 (), infinite where no scale counts. exponents: int64 (highest - lowest + 1,)."""

    least: torch.Tensor
    most: torch.Tensor
    exponents: torch.Tensor


def scales(scale: torch.Tensor, above: float, lowest: int, highest: int) -> Scales:
    """Smallest and largest of the finite scales above a number, and how many of all have which exponent.

    Exponents below the lowest, of zeros too, count as the lowest; those of Inf and NaN as the highest.
    """
    flat = scale.contiguous().view(-1)
    programs = min(cdiv(flat.shape[0], _SCALES_AT_ONCE), _MOST_PROGRAMS)
    parts = torch.empty(2, programs, dtype=torch.float32, device=scale.device)
    bins = torch.empty(programs, _BINS, dtype=torch.int32, device=scale.device)
    with on_device(scale):
        _scales[(programs,)](
            flat, parts, bins, flat.shape[0], programs, above, LOWEST=lowest, HIGHEST=highest, AT_ONCE=_SCALES_AT_ONCE,
            BINS=_BINS, num_warps=4,
        )  # fmt: skip
    return Scales(parts[0].amin(), parts[1].amax(), bins[:, : highest - lowest + 1].sum(0))
