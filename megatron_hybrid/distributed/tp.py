"""How a linear's tensors move between the ranks of a tensor-parallel group.

What is split how is a `Sharding` (sharding.py), built here for the two kinds of parallel linears; the classes move.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from .. import node
from ..linear import Communication
from ..plan import GRAD_OUTPUT, INPUT, WEIGHT
from ..scaling import Pieces
from ..sharding import COLUMNS, ROWS, Shard, Sharding
from .amax import start_max


def column_sharding(ranks: int, out_features: int, *, sequence_parallel: bool, pieces: int = 1) -> Sharding:
    """Of a linear whose weight is split along its rows; out_features: of the whole. pieces: see `Shard`."""
    length = out_features // ranks
    shards = {WEIGHT: Shard(ROWS, length, pieces), GRAD_OUTPUT: Shard(COLUMNS, length, pieces)}
    if sequence_parallel:
        return Sharding(ranks, {INPUT: Shard(ROWS), **shards}, gathered=INPUT)
    return Sharding(ranks, shards)


def row_sharding(ranks: int, in_features: int, *, sequence_parallel: bool) -> Sharding:
    """Of a linear whose weight is split along its columns; in_features: of the whole."""
    length = in_features // ranks
    shards = {INPUT: Shard(COLUMNS, length), WEIGHT: Shard(COLUMNS, length)}
    if sequence_parallel:
        return Sharding(ranks, {**shards, GRAD_OUTPUT: Shard(ROWS)}, gathered=GRAD_OUTPUT)
    return Sharding(ranks, shards)


def column_index_maps(rank: int, ranks: int, in_features: int, out_features: int, pieces: int = 1) -> dict:
    """Where a rank's shards of a `column_sharding` lie in the whole tensors, for `LinearRuntime.index_maps`."""
    K, N = in_features, out_features
    starts = [p * N // pieces + rank * (N // ranks // pieces) for p in range(pieces)]
    rows, columns = tuple((start, 0, K) for start in starts), tuple((0, start, N) for start in starts)
    if pieces == 1 or ranks == 1:
        return {INPUT: (0, 0, K), WEIGHT: rows[0], GRAD_OUTPUT: columns[0]}
    return {INPUT: (0, 0, K), WEIGHT: Pieces(ROWS, rows), GRAD_OUTPUT: Pieces(COLUMNS, columns)}


def row_index_maps(rank: int, ranks: int, in_features: int, out_features: int) -> dict:
    """Where a rank's shards of a `row_sharding` lie in the whole tensors, for `LinearRuntime.index_maps`."""
    K, N, start = in_features, out_features, rank * (in_features // ranks)
    return {INPUT: (0, start, K), WEIGHT: (0, start, K), GRAD_OUTPUT: (0, 0, N)}


class TensorParallel(Communication):
    """Shards that stay where they are: only amaxes travel. A row-parallel linear's output is reduced outside of it."""

    sums = dict(output="none", dgrad="none")  # what becomes of these over the ranks, as csrc/node calls it

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        # what torch puts around a backend to check every collective has no coalesced gather (2.11)
        checked = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self._coalesces = "cuda:nccl" in dist.get_backend_config(group) and not checked

    @functools.cached_property
    def in_node(self):
        """The same in C++; None where the node is not built, or where a group is a class of Python's: C++ would not call
        its methods, but those of a group that has no backend."""
        library = node.library()
        if library is None or type(self.group) is not dist.ProcessGroup:
            return None
        return library.Ranks(group=self.group, size=self.size, coalesces=self._coalesces, **self.sums)

    def start_max(self, amaxes: list[torch.Tensor]):
        return start_max(amaxes, self.group)

    def start_gather(self, *tensors: torch.Tensor):
        """Start gathering the ranks' tensors along dimension 0, several in one collective."""
        if len(tensors) > 1 and not (self._coalesces and tensors[0].is_cuda):
            return self._start_packed_gather(tensors)
        whole = [x.new_empty(x.shape[0] * self.size, *x.shape[1:]) for x in tensors]
        if len(tensors) == 1:
            work = dist.all_gather_into_tensor(whole[0], tensors[0], group=self.group, async_op=True)
        else:
            work = self.group.allgather_into_tensor_coalesced(_as_bytes(whole), _as_bytes(tensors))

        def finish(_keep_alive=tensors):
            work.wait()
            return whole

        return finish

    def _start_packed_gather(self, tensors):
        """The same in one buffer of bytes, where there is no NCCL. Gloo's coalesced gather packs too, but its threads write
        the operation's name into the group's status at once: it does not fit into the string, and the heap breaks."""
        parts = [x.flatten() for x in _as_bytes(tensors)]
        own = torch.cat(parts)
        packed = own.new_empty(self.size, own.numel())
        work = dist.all_gather_into_tensor(packed.view(-1), own, group=self.group, async_op=True)

        def finish(_keep_alive=own):
            work.wait()
            pieces = packed.split([part.numel() for part in parts], dim=1)
            shapes = [(x.shape[0] * self.size, *x.shape[1:]) for x in tensors]
            copies = [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]  # aligned for their types
            return [copy.view(x.dtype).view(shape) for copy, x, shape in zip(copies, tensors, shapes)]

        return finish

    def _start_scatter(self, x: torch.Tensor):
        """Start summing the ranks' tensors and splitting the sum along dimension 0."""
        x = x.contiguous()
        own = torch.empty(x.shape[0] // self.size, *x.shape[1:], dtype=x.dtype, device=x.device)
        work = dist.reduce_scatter_tensor(own, x, group=self.group, async_op=True)

        def finish(_keep_alive=x):
            work.wait()
            return own

        return finish


def _as_bytes(tensors) -> list[torch.Tensor]:
    """As one collective wants them: of one element type."""
    return [x if x.dtype == torch.uint8 else x.view(torch.uint8) for x in tensors]


class ColumnParallel(TensorParallel):
    """The input is the same on every rank; the input gradient is the sum over ranks, taken while wgrad runs."""

    sums = dict(output="none", dgrad="all")

    def reduce_dgrad(self, dx: torch.Tensor):
        dx = dx.contiguous()  # a slice, where a GEMM padded its columns
        work = dist.all_reduce(dx, group=self.group, async_op=True)

        def finish():
            work.wait()
            return dx

        return finish


class ColumnSequenceParallel(TensorParallel):
    """The input is split along its rows, the sequence, and gathered; so is its gradient, the sum over ranks.

    A rank keeps its own rows for backward, as Megatron does, quantized where the plan keeps a payload, and gathers
    them again: 1/ranks of the memory for a second gather.
    """

    sums = dict(output="none", dgrad="scatter")

    def reduce_dgrad(self, dx: torch.Tensor):
        return self._start_scatter(dx)


class RowSequenceParallel(TensorParallel):
    """The output is the sum over ranks, split along its rows; its gradient is gathered."""

    sums = dict(output="scatter", dgrad="none")

    def reduce_output(self, y: torch.Tensor) -> torch.Tensor:
        return self._start_scatter(y)()
