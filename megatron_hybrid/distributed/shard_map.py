"""Which bytes of a payload belong to a flat range of its matrix.

Masters are split among ranks by flat ranges [a, b) of the row-major (M, K), at any element. Whatever covers several
elements (a byte of two codes, a block's scale, a tensor's amax) belongs to the rank that owns its first element, so
that a rank's share of every buffer is one contiguous range too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..formats import Format
from ..storage import QuantizedStorage


def overlap(start: int, stop: int, first: int, last: int) -> tuple[int, int]:
    """What [first, last) has of [start, stop), both of one buffer, as a flat range of the latter; empty at either end."""
    return tuple(min(max(x - start, 0), stop - start) for x in (first, last))


@dataclass(frozen=True)
class Grid:
    """Blocks of bm x bk elements over an (M, K) matrix; `itemsize` bytes a block, in row-major order."""

    M: int
    K: int
    bm: int
    bk: int
    itemsize: int = 1

    @property
    def columns(self) -> int:
        return -(-self.K // self.bk)

    def before(self, x: int) -> int:
        """Blocks whose first element comes before flat element `x`."""
        if not self.K:
            return 0
        m, k = divmod(x, self.K)
        whole = -(-m // self.bm) * self.columns
        return whole + (-(-k // self.bk) if m % self.bm == 0 and m < self.M else 0)

    def share(self, a: int, b: int) -> tuple[int, int]:
        """Range of blocks that begin in [a, b)."""
        return self.before(a), self.before(b)

    def first_in_window(self, row: int) -> int:
        """The first block of a window of whole block rows that begins at `row`."""
        return row // self.bm * self.columns

    def cut_row(self, x: int) -> int | None:
        """The block row that a bound at flat element `x` cuts in two, or None."""
        row = x // self.K // self.bm
        return row if x != row * self.bm * self.K and 0 < x < self.M * self.K else None


def grids(s: QuantizedStorage) -> dict[str, Grid]:
    """The grid of every buffer of a payload, by name. Codes of 4 bits: bytes of two along a row."""
    M, K = s.shape
    M1, K1 = max(M, 1), max(K, 1)

    def blocks(bm, bk, itemsize):
        return Grid(M, K, M1 if bm is None else bm, K1 if bk is None else bk, itemsize)

    bm, bk = s.format.block(s.direction)
    found = {"qdata": blocks(1, 8 // s.format.bits, 1)}
    if s.scale is not None:
        found["scale"] = blocks(bm, bk, s.scale.element_size())
    if s.outer_amax is not None:
        outer = (None, None) if s.outer_amax.dim() == 0 else tuple(1 if n > 1 else None for n in s.outer_amax.shape)
        found["outer_amax"] = blocks(*outer, s.outer_amax.element_size())
    return found


def window_rows(fmt: Format, direction: str, shape, a: int, b: int) -> tuple[int, int]:
    """Rows [r0, r1) of whole block rows that hold the flat range [a, b)."""
    M, K = shape
    bm = fmt.block(direction)[0] or 1
    r0, r1 = a // K, -(-b // K)
    return r0 // bm * bm, min(M, -(-r1 // bm) * bm)
