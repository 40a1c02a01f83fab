"""Quantized parameters whose FP32 masters are split among ranks: cast every share, gather bytes.

    weights = ShardedWeights(params, ranges, rank, gather="rowwise")
    amaxes = weights.amaxes(masters)       # of what no rank holds whole; to be max-reduced over the ranks
    chunk = weights.cast(masters, amaxes)  # uint8, this rank's bytes of every payload; to be gathered
    weights.scatter(chunks)                # (ranks, bytes): every rank's bytes into the parameters, columns derived

The bytes are those of casting the whole master on one rank, whatever the bounds of the shares: amaxes of blocks that
a bound cuts are completed first, and a cast then sees them in the place of the elements that other ranks own.
`high_precision` gathers the masters themselves, in the dtype they are cast from, and casts them everywhere.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import kernels
from ..formats import COLUMNWISE, DIRECTIONS, ROWWISE, shares_codes
from ..storage import QuantizedStorage, cast_into
from ..tensor import HybridTensor
from ..tensor_owner import write_keys, written_value
from .shard_map import Grid, grids, window_rows

HIGH_PRECISION, BOTH = "high_precision", "both"


def copies_row(t: HybridTensor) -> bool:
    """Whether the column held has the codes and scales of the row."""
    both = t.rowwise is not None and t.columnwise is not None and not t.quantizer.derives_columnwise
    return both and shares_codes(*t.quantizer.formats())


def derivable(t: HybridTensor) -> bool:
    """Whether the column's bytes follow from the row's."""
    return t.quantizer.derives_columnwise or copies_row(t)


def part_read(t: HybridTensor, *, forward: bool, backward: bool) -> HybridTensor:
    """A tensor over the payloads of `t` that passes read: fprop's; dgrad's, and the row where that follows from it."""
    row, col = t.rowwise, t.columnwise
    needs_row = forward or col is None or derivable(t)
    return t._like(row if needs_row else None, col if backward else None, t.shape, None)


def gathered(t: HybridTensor, gather: str) -> list[QuantizedStorage]:
    """The payloads of a parameter whose bytes travel. Raises ``ValueError`` for what `gather` cannot do."""
    held = t.payloads()
    if t.columnwise is not None and t.rowwise is not None and derivable(t):
        held = [t.rowwise]
    elif gather == ROWWISE and t.columnwise is not None:
        raise ValueError(f"param_gather: rowwise: the column of {t!r} does not follow from its row; use both")
    for s in held:
        if s.format.rht or s.transposed:
            raise ValueError(f"param_gather: {gather}: {s.direction} {s.format} mixes elements; use high_precision")
    return held


@dataclass
class Slot:
    """A stretch of the vector of amaxes: those of a whole payload (`row` None) or of one block row that is cut."""

    payload: QuantizedStorage
    param: int
    row: int | None
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


class ShardedWeights:
    """The parameters of one bucket, on one rank.

    params: parameters (M, K), alike on all ranks. ranges[rank][i]: the flat range [start, stop) of parameter i whose
    master this rank holds; those of all ranks are disjoint and cover it. gather: ``rowwise``, ``both`` or
    ``high_precision``. Masters are FP32 vectors, None or empty for an empty range.
    """

    def __init__(self, params, ranges, rank: int, *, gather: str):
        self.params, self.ranges, self.rank, self.gather = params, ranges, rank, gather
        self._held = [(t.rowwise, t.columnwise) for t in params]
        self.slots: list[Slot] = []
        self.payloads: list[list[QuantizedStorage]] = [[] for _ in params]
        if gather != HIGH_PRECISION:
            self.payloads = [gathered(t, gather) for t in params]
            self._make_slots()
        self._sizes = [[self._bytes(r, i) for i in range(len(params))] for r in range(len(ranges))]
        self.chunk_bytes = max((sum(sizes) for sizes in self._sizes), default=0)
        self._plan_copies()

    def is_current(self) -> bool:
        """Whether the parameters still hold the payloads that this was made for."""
        return all(t.rowwise is row and t.columnwise is col for t, (row, col) in zip(self.params, self._held))

    @property
    def num_amaxes(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    def places(self) -> dict[tuple, range]:
        """Which stretch of the amaxes is of what: a payload's, or one of its block rows'."""
        return {(id(slot.payload), slot.row): range(slot.start, slot.stop) for slot in self.slots}

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def _make_slots(self) -> None:
        def add(i, payload, row, shape):
            self.slots.append(Slot(payload, i, row, self.num_amaxes, shape))

        for i, (t, payloads) in enumerate(zip(self.params, self.payloads)):
            bounds = sorted({x for ranges in self.ranges for x in ranges[i]})
            for s in payloads:
                if (shape := s.format.amax_shape(*s.shape, s.direction)) is not None:
                    add(i, s, None, shape)
                if (grid := _block_grid(s)) is not None:
                    cut = {grid.cut_row(x) for x in bounds if t.numel()} - {None}
                    for row in sorted(cut):
                        add(i, s, row, (grid.columns,))

    # ---- what a rank's chunk holds

    def _bytes(self, rank: int, i: int) -> int:
        a, b = self.ranges[rank][i]
        if self.gather == HIGH_PRECISION:
            return (b - a) * self._source_dtype(i).itemsize
        return sum(n for s in self.payloads[i] for _, _, n in _stretches(s, a, b))

    def _source_dtype(self, i: int) -> torch.dtype:
        return written_value(self.params[i], torch.empty(0)).dtype

    def check(self, masters) -> None:
        """Raise ``ValueError`` for a master that does not fit, before anything is written anywhere."""
        for i, (master, (a, b)) in enumerate(zip(masters, self.ranges[self.rank], strict=True)):
            found = 0 if master is None else master.numel()
            if found != b - a or (found and (master.dtype != torch.float32 or master.device != self.params[i].device)):
                what = "none" if master is None else f"{found} elements, {master.dtype}, {master.device}"
                raise ValueError(
                    f"master of parameter {i} {self.params[i]!r} on rank {self.rank}: expected {b - a} elements of "
                    f"torch.float32 on {self.params[i].device}, found {what}"
                )

    # ---- casting

    @torch.no_grad()
    def amaxes(self, masters) -> torch.Tensor:
        """int32 bits of the amaxes (of floats >= 0, hence in their order, NaN above all) of this rank's elements.

        Max-reduce over the ranks before `cast`. Raises what `check` raises.
        """
        self.check(masters)
        out = torch.zeros(self.num_amaxes, dtype=torch.float32, device=self.device)
        for slot in self.slots:
            a, b = self.ranges[self.rank][slot.param]
            if a == b:
                continue
            values = out[slot.start : slot.stop].view(slot.shape)
            if slot.row is None:
                self._outer_amax(slot, masters, values)
            else:
                grid = _block_grid(slot.payload)
                first, last = slot.row * grid.bm, min((slot.row + 1) * grid.bm, grid.M)
                if a < last * grid.K and b > first * grid.K:
                    values.copy_(_block_amax(self._window(slot.param, masters, first, last), grid))
        return out.view(torch.int32) & 0x7FFFFFFF  # a NaN's sign

    def _outer_amax(self, slot: Slot, masters, values) -> None:
        s, (a, b) = slot.payload, self.ranges[self.rank][slot.param]
        K = s.shape[1]
        r0, r1 = a // K, -(-b // K)
        window = self._window(slot.param, masters, r0, r1)
        by_rows = len(slot.shape) == 2 and s.direction == ROWWISE
        out = values[r0:r1] if by_rows else values
        kernels.amax(window, s.format, s.direction, out)

    def _window(self, i: int, masters, r0: int, r1: int) -> torch.Tensor:
        """Rows [r0, r1) of parameter i as they are cast, zero where this rank owns nothing."""
        (a, b), K = self.ranges[self.rank][i], self.params[i].shape[-1]
        master = written_value(self.params[i], masters[i].detach().reshape(-1))
        if (a, b) == (r0 * K, r1 * K):
            return master.view(r1 - r0, K)
        window = torch.zeros((r1 - r0) * K, dtype=master.dtype, device=master.device)
        lo, hi = max(a, r0 * K), min(b, r1 * K)
        window[lo - r0 * K : hi - r0 * K] = master[lo - a : hi - a]
        return window.view(r1 - r0, K)

    @torch.no_grad()
    def cast(self, masters, amaxes: torch.Tensor, *, step: bool = False, record: bool = True) -> torch.Tensor:
        """uint8 (chunk_bytes,): this rank's bytes, quantized with the reduced `amaxes`.

        step: an optimizer's step was done; delayed scales then move on, on every rank alike. record: their histories
        keep the amaxes; False in evaluation, and of what a load goes over. `scatter` needs the same.
        Raises what `check` does.
        """
        self.check(masters)
        chunk = torch.zeros(self.chunk_bytes, dtype=torch.uint8, device=self.device)
        amaxes = amaxes.view(torch.float32)
        position, ranges = 0, self.ranges[self.rank]
        for i, t in enumerate(self.params):
            size = self._sizes[self.rank][i]
            part = chunk[position : position + size]
            position += size
            if self.gather == HIGH_PRECISION:
                if size:
                    part.copy_(written_value(t, masters[i].detach().reshape(-1)).contiguous().view(torch.uint8))
                continue
            keys = write_keys(t, step=step, record=record)
            for s in self.payloads[i]:
                n = sum(m for _, _, m in _stretches(s, *ranges[i]))
                self._cast_payload(i, s, masters, amaxes, keys, part[:n])
                part = part[n:]
        return chunk

    def _cast_payload(self, i, s, masters, amaxes, keys, part) -> None:
        slots = [slot for slot in self.slots if slot.payload is s]
        outer = next((amaxes[x.start : x.stop].view(x.shape) for x in slots if x.row is None), None)
        # buffers may be there for the formats of other steps
        has_state = s.format.is_stateful and keys["state"] is not None
        state = keys["state"][DIRECTIONS.index(s.direction)] if has_state else None
        if state is not None:
            states = keys["state"] if copies_row(self.params[i]) else [state]
            for recording in states:
                recording.record(outer)  # also on ranks that own nothing of it
            state = state.frozen()
        a, b = self.ranges[self.rank][i]
        if a == b:
            return
        r0, r1 = window_rows(s.format, s.direction, s.shape, a, b)
        window = self._window(i, masters, r0, r1)
        grid = _block_grid(s)
        for slot in slots:
            if slot.row is not None and r0 <= slot.row * grid.bm < r1:
                window = self._complete(window, r0, (a, b), grid, slot, amaxes)
        if outer is not None and outer.dim() == 2 and s.direction == ROWWISE:
            outer = outer[r0:r1]
        rng = None if keys["rng"] is None else keys["rng"].moved(r0)
        out = QuantizedStorage.empty(s.format, s.direction, (r1 - r0, s.shape[1]), s.dtype, window.device)
        cast_into(out, window, amax=outer, state=state, rng=rng)
        all_grids = grids(s)
        sources, targets = [], []
        for name, start, n in _stretches(s, a, b):
            begin = start - all_grids[name].first_in_window(r0) * all_grids[name].itemsize
            sources.append(_bytes_of(getattr(out, name))[begin : begin + n])
            targets.append(part[:n])
            part = part[n:]
        torch._foreach_copy_(targets, sources)

    @staticmethod
    def _complete(window, r0: int, owned, grid: Grid, slot: Slot, amaxes) -> torch.Tensor:
        """The window with every element of the slot's block row that others own replaced by its block's amax."""
        first = slot.row * grid.bm
        last = min(first + grid.bm, grid.M)
        fill = amaxes[slot.start : slot.stop].repeat_interleave(grid.bk)[: grid.K].expand(last - first, grid.K)
        where = torch.arange(first * grid.K, last * grid.K, device=window.device).view(last - first, grid.K)
        mine = (where >= owned[0]) & (where < owned[1])
        window = window.clone()
        rows = window[first - r0 : last - r0]
        rows.copy_(torch.where(mine, rows, fill.to(rows.dtype)))
        return window

    # ---- receiving

    @torch.no_grad()
    def scatter(self, chunks: torch.Tensor, *, step: bool = False, record: bool = True) -> None:
        """Write every rank's bytes, `chunks` (ranks, chunk_bytes), into the parameters; derive what was not gathered.

        step, record: as in the `cast` of these bytes.
        """
        if self.gather == HIGH_PRECISION:
            self._write_masters(chunks, step, record)
            return
        if self._copies:
            sources = [chunks[rank, start:stop] for rank, start, stop, _ in self._copies]
            torch._foreach_copy_([target for *_, target in self._copies], sources)
        for rank, start, target in self._halves:  # the high half is the later element, of the later rank
            target.copy_((target & 0x0F) | (chunks[rank, start : start + 1] & 0xF0))
        for t, payloads in zip(self.params, self.payloads):
            self._received(t, payloads, record)

    def _plan_copies(self) -> None:
        """Where every stretch of every rank's chunk goes: (rank, first byte, last, bytes of a payload), once."""
        self._copies, self._halves = [], []
        for rank, sizes in enumerate(self._sizes):
            position = 0
            for i, owned in enumerate(self.ranges[rank]):
                for s in self.payloads[i]:
                    for name, start, n in _stretches(s, *owned):
                        target, begin = _bytes_of(getattr(s, name))[start : start + n], position
                        position += n
                        if name == "qdata" and _begins_in_a_byte(s, owned):
                            self._halves.append((rank, begin, target[:1]))
                            target, begin = target[1:], begin + 1
                        if target.numel():
                            self._copies.append((rank, begin, position, target))
            assert self.gather == HIGH_PRECISION or position == sum(sizes)

    def _write_masters(self, chunks, step: bool, record: bool) -> None:
        position = [0] * len(self.ranges)
        for i, t in enumerate(self.params):
            pieces = []
            for rank, sizes in enumerate(self._sizes):
                pieces.append(chunks[rank, position[rank] : position[rank] + sizes[i]])
                position[rank] += sizes[i]
            order = sorted(range(len(pieces)), key=lambda rank: self.ranges[rank][i])
            value = torch.cat([pieces[rank] for rank in order]).view(self._source_dtype(i))
            t.detach().write(value.view(t.shape), step=step, master=True, record=record)

    @staticmethod
    def _received(t: HybridTensor, payloads, record: bool) -> None:
        t._written(*payloads, *([None] * (2 - len(payloads))))
        if t.columnwise is None or len(payloads) == 2 or payloads[0].direction == COLUMNWISE:
            return
        if t.quantizer.derives_columnwise:
            t.rederive(**write_keys(t, record=record))
        else:
            for name, buffer in t.columnwise.buffers().items():
                buffer.copy_(getattr(t.rowwise, name))
            t._written(t.rowwise, t.columnwise)


def _block_grid(s: QuantizedStorage) -> Grid | None:
    """The grid of blocks with amaxes of their own, that a cast takes from the elements."""
    bm, bk = s.format.block(s.direction)
    return None if bm is None or bk is None else Grid(*s.shape, bm, bk)


def _block_amax(rows: torch.Tensor, grid: Grid) -> torch.Tensor:
    """float32 (blocks,): the amax of every block of one block row."""
    padded = torch.nn.functional.pad(rows.float(), (0, grid.columns * grid.bk - grid.K))
    return padded.view(rows.shape[0], grid.columns, grid.bk).abs().amax(dim=(0, 2))


def _begins_in_a_byte(s: QuantizedStorage, owned) -> bool:
    """Whether a range's first element is the second code of its byte."""
    return s.format.bits == 4 and owned[0] < owned[1] and owned[0] % s.shape[1] % 2 == 1


def _stretches(s: QuantizedStorage, a: int, b: int):
    """(buffer name, first byte, bytes) of the share of [a, b) in every buffer of a payload."""
    for name, grid in grids(s).items():
        first, last = grid.share(a, b) if a < b else (0, 0)
        if name == "qdata" and _begins_in_a_byte(s, (a, b)):
            first -= 1
        yield name, first * grid.itemsize, (last - first) * grid.itemsize


def _bytes_of(t: torch.Tensor) -> torch.Tensor:
    assert t.is_contiguous()
    return t.reshape(-1).view(torch.uint8)


@torch.no_grad()
def reduce_amaxes(shares: list[ShardedWeights], amaxes: list[torch.Tensor], group) -> list[torch.Tensor]:
    """The amaxes of several `ShardedWeights` over the ranks of a group, in one collective; what covers the shards of other
    tensor-parallel ranks too, over these in one more."""
    flat = torch.cat(amaxes)
    if group.size() > 1 and flat.numel():
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
    amaxes = list(flat.split([own.numel() for own in amaxes]))
    over_shards = defaultdict(list)  # by ranks: experts have a group object of their own
    for weights, own in zip(shares, amaxes):
        for shared, at in _over_shards(weights):
            over_shards[tuple(dist.get_process_group_ranks(shared))].append((shared, own[at]))
    for found in over_shards.values():
        parts = [part for _, part in found]
        together = torch.cat(parts)
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=found[0][0])
        torch._foreach_copy_(parts, list(together.split([part.numel() for part in parts])))
    return amaxes


def _over_shards(weights: ShardedWeights):
    """(process group, stretch of the amaxes) of what covers the shards of other tensor-parallel ranks too."""
    for slot in weights.slots:
        if slot.row is None:
            group = weights.params[slot.param]._stale.owner.amaxes_shared(slot.payload.direction, weights.device)
            if group is not None:
                yield group, slice(slot.start, slot.stop)
