"""The keys of stochastic rounding of a whole step: which one an operand of a microbatch draws with."""

from __future__ import annotations

from collections import defaultdict

import torch

from .plan import GRAD_OUTPUT, INPUT, WEIGHT
from .roles import ModuleRole, tensor_id
from .scaling import COUNTER, Pieces, Rng

MOST_ROWS_OF_A_RANK = 1 << 40  # of tokens, in a microbatch: how far apart the ranks of one replica draw


class Table:
    """`words`, int64 (rows, 6), and `rows`, views of it: a call then makes none."""

    def __init__(self, words: torch.Tensor):
        self.words, self.rows = words, words.unbind()

    def __reduce__(self):
        return Table, (self.words,)


class RandomKeys:
    """The stochastic-rounding keys of one step, in device memory: a row of six words for every microbatch.

    One table a module, operand and device. A forward keeps the row of its microbatch, so that its backward draws
    with the same counter whatever runs in between. The weight always uses the first microbatch's counter: it is one
    tensor a step.

    num_microbatches: of this rank. replica, num_replicas: which data-parallel rank this is, of how many. Microbatch j
    of a replica counts as j * num_replicas + replica, so that replicas draw differently, and as one rank would that
    ran all of their microbatches. part: which of the ranks of this replica that have tokens of their own, whose rows then
    begin elsewhere.
    """

    def __init__(self, seed: int, num_microbatches: int, replica: int = 0, num_replicas: int = 1, part: int = 0):
        self.seed, self.num_microbatches = seed, num_microbatches
        self.replica, self.num_replicas, self.part = replica, num_replicas, part
        self.step = self.microbatch = 0
        self.stands = False
        self._tables: dict[tuple, Table] = {}

    def stand(self) -> None:
        """From now on a table is one row, of the microbatch of now, at an address that stays: a captured CUDA graph draws
        with what `set` has written there. A backward then draws with its forward's key only after a `set` to its microbatch.
        """
        self.stands, self._tables = True, {}

    def set(self, step: int, microbatch: int, num_microbatches: int | None = None) -> None:
        """Go to a microbatch of a step. Raises ``ValueError`` for one that the step does not have."""
        total = num_microbatches or self.num_microbatches
        if not 0 <= microbatch < total:
            raise ValueError(f"microbatch {microbatch} of {total}: pass `num_microbatches` to prepare() or begin_step()")
        before = self.step, self.num_microbatches, self.microbatch if self.stands else None
        self.step, self.num_microbatches, self.microbatch = step, total, microbatch
        if total != before[1] and not self.stands:
            self._tables = {}
        elif (step, total, microbatch if self.stands else None) != before:
            self._count()

    def _count(self) -> None:
        """Write the counters of now into all tables, in as few kernels as for one."""
        together = defaultdict(list)
        for (_, operand, *_), table in self._tables.items():
            together[operand == WEIGHT, table.words.device].append(table.words[:, COUNTER])
        for (of_weight, device), columns in together.items():
            torch._foreach_copy_(columns, [self._counters(WEIGHT if of_weight else INPUT, device)] * len(columns))

    def _counters(self, operand: str, device) -> torch.Tensor:
        """Of a table's rows."""
        replica = 0 if operand == WEIGHT else self.replica
        first = self.step * self.num_microbatches * self.num_replicas + replica
        if not self.stands:
            return (torch.arange(self.num_microbatches, device=device) * self.num_replicas + first) & 0xFFFFFFFF
        if operand != WEIGHT:
            first += self.microbatch * self.num_replicas
        return torch.full((1,), first & 0xFFFFFFFF, dtype=torch.int64, device=device)

    def _row(self, operand: str) -> int:
        """Of the current microbatch, in a table."""
        return 0 if self.stands or operand == WEIGHT else self.microbatch

    def table(self, role: ModuleRole, operand: str, device, index_map=None) -> Table:
        """Of num_microbatches rows, or one where keys `stand`; all experts of a module share it. Made at first use."""
        key = (role.name, operand, str(device), index_map)
        if key not in self._tables:
            first = Rng(self.seed, tensor_id(role.operand(operand)), 0, 0, index_map, device=device)
            words = first.values.repeat(1 if self.stands else self.num_microbatches, 1)
            words[:, COUNTER] = self._counters(operand, device)
            self._tables[key] = Table(words)
        return self._tables[key]

    def rng(self, role: ModuleRole, operand: str, device, index_map=None) -> Rng:
        """The key of one operand in the current microbatch. index_map: (row offset, column offset, global K), `Pieces`
        of such, or None for a whole tensor."""
        if isinstance(index_map, Pieces):
            keys = tuple(self.rng(role, operand, device, piece) for piece in index_map.maps)
            first = Rng.view(keys[0].values, own_columns=False)
            first.parts = index_map.dim, keys
            return first
        own_columns, row = index_map is None, self._row(operand)
        if self.part and operand != WEIGHT:
            index_map = shifted(index_map or (0, 0, 0), self.part * MOST_ROWS_OF_A_RANK)
        table = self.table(role, operand, device, index_map)
        # compiled code would be made anew for every other row
        values = table.words[row] if torch.compiler.is_compiling() else table.rows[row]
        return Rng.view(values, own_columns=own_columns)

    def rng_of_rows(self, role: ModuleRole, operand: str, device, row_ids: torch.Tensor) -> Rng:
        """The key of whole rows of all replicas' tokens, in the current microbatch: the first replica's counter, and
        row_ids, int64 (M,), the place of each row among all of them."""
        values = self.table(role, operand, device).words[self._row(operand)].clone()
        values[COUNTER] = (values[COUNTER] - self.replica) & 0xFFFFFFFF
        return Rng.view(values, row_ids)


def whole_tensors(in_features: int, out_features: int) -> dict[str, tuple[int, int, int]]:
    """The index maps of a linear's operands where no rank has only a part: keys then need not be told each cast's K."""
    return {INPUT: (0, 0, in_features), WEIGHT: (0, 0, in_features), GRAD_OUTPUT: (0, 0, out_features)}


def shifted(index_map: tuple[int, int, int] | Pieces, rows: int) -> tuple[int, int, int] | Pieces:
    """The index map of what lies so many rows further down."""
    if isinstance(index_map, Pieces):
        return Pieces(index_map.dim, tuple(shifted(piece, rows) for piece in index_map.maps))
    return index_map[0] + rows, *index_map[1:]
