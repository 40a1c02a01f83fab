"""How a tensor-parallel group splits a linear's operands, and what that means for casts and gathers.

A linear's operands are matrices (M, K): tokens by features, or a weight's rows by columns. Each is whole on every
rank or split along one dimension. Two questions follow, answered here from a format alone: whose elements an outer
amax covers (then amaxes are max-reduced before the cast), and whether a scale block lies across a shard's bound
(then the shard's codes are not the whole tensor's).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .formats import COLUMNWISE, ROWWISE, Format, shares_codes

ROWS, COLUMNS = 0, 1  # dimensions of the logical (M, K)


@dataclass(frozen=True)
class Shard:
    """One rank's part of an operand.

    dim       0: some rows of (M, K); 1: some columns
    length    rows or columns of this rank; None where only a call knows (tokens)
    pieces    equally long runs that the part is made of: 2 for a gated linear, which holds a run of the gate and one
              of the rest
    """

    dim: int
    length: int | None = None
    pieces: int = 1


@dataclass(frozen=True)
class Sharding:
    """The shards of a linear's operands over `ranks` ranks; an operand that is not named is whole on each.

    gathered: the operand whose rows (the sequence) are put together before its gemms, or None.
    """

    ranks: int
    shards: dict[str, Shard] = field(default_factory=dict)
    gathered: str | None = None


def covers_other_ranks(fmt: Format | None, direction: str, shard: Shard) -> bool:
    """Whether outer amaxes of a shard cover elements of other shards too.

    Not those of delayed scaling: its histories are reduced once a step.
    """
    if fmt is None or fmt.is_stateful or fmt.outer_axis == "none":
        return False
    along = COLUMNS if direction == ROWWISE else ROWS  # an outer amax of a row runs along the contraction
    return fmt.outer_axis == "tensor" or shard.dim == along


def block_along(fmt: Format | None, direction: str, dim: int) -> int:
    """Length of a scale block along a dimension; 1 where every element counts for itself, or all of them as one."""
    return 1 if fmt is None or not fmt.is_quantized else fmt.block(direction)[dim] or 1


def cuts_blocks(fmt: Format | None, direction: str, shard: Shard, length: int) -> bool:
    """Whether a shard of `length` rows or columns ends inside a scale block (or Hadamard block) of the whole tensor."""
    block = block_along(fmt, direction, shard.dim)
    return length % shard.pieces != 0 or (length // shard.pieces) % block != 0


# How the rows of an operand's one direction come together from all ranks.
PAYLOAD = "payload"  # cast where the rows are; codes and scales travel
ROW_PAYLOAD = "row payload"  # the rowwise payload travels (or is there already); the column is made from it
AS_IS = "as it is"  # the gemm reads this operand in high precision
HIGH_PRECISION = "high precision"  # a block lies across a bound: the tensor travels, and every rank casts all of it


def same_codes(row: Format, col: Format) -> bool:
    """Whether one direction's payload serves as the other's, in another layout, at every time."""
    return shares_codes(row, col) and not row.is_stateful


def row_gather(quantizer, rows: int) -> str:
    """How the rowwise direction is gathered, for `rows` rows a rank."""
    fmt = quantizer.rowwise
    if not fmt.is_quantized:
        return AS_IS
    return HIGH_PRECISION if rows % block_along(fmt, ROWWISE, ROWS) else PAYLOAD


def column_gather(quantizer, rows: int, *, row_is_there: bool) -> str:
    """How the columnwise direction is gathered, for `rows` rows a rank.

    row_is_there: the rowwise payload of all ranks is there anyway (a gradient's, for dgrad).
    """
    row, col = quantizer.formats()
    row_travels = row_gather(quantizer, rows) == PAYLOAD
    fits = rows % block_along(col, COLUMNWISE, ROWS) == 0
    if quantizer.derives_columnwise and row.is_quantized:
        if not row_travels:
            return HIGH_PRECISION
        return PAYLOAD if fits and col.is_quantized and not row_is_there else ROW_PAYLOAD
    if not col.is_quantized:
        return AS_IS
    if row_is_there and row_travels and same_codes(row, col):
        return ROW_PAYLOAD
    return PAYLOAD if fits else HIGH_PRECISION
