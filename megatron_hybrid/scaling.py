"""What a cast reads besides the tensor: delayed-scaling state and the stochastic-rounding key.

Both are plain device tensors, so that they go into state dicts as they are, can be captured in CUDA graphs
and never travel as pickled objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .formats import ELEMENTS, Format

FLT_MAX = torch.finfo(torch.float32).max
COUNTER, ROW_OFFSET, GLOBAL_K = 2, 3, 5  # of the words of an `Rng`; RngField of csrc/numerics/format.h has all six


@dataclass(frozen=True, eq=False)
class DelayedState:
    """Amax history and scale of one direction of one tensor (delayed scaling).

    scale    float32 (): the encode scale in use; starts at 1
    history  float32 (H,): history[0] collects the running step's amax; None: do not record (eval, recompute)
    """

    scale: torch.Tensor
    history: torch.Tensor | None

    @classmethod
    def new(cls, fmt: Format, device) -> DelayedState:
        """Scale 1 and an empty history. Raises ``ValueError`` for a format without one."""
        if not fmt.is_stateful:
            raise ValueError(f"{fmt} keeps no state; only delayed scaling does")
        return cls(torch.ones((), device=device), torch.zeros(fmt.option("history"), device=device))

    def frozen(self) -> DelayedState:
        """The same scale without recording."""
        return DelayedState(self.scale, None)

    def record(self, amax: torch.Tensor, noop: torch.Tensor | None = None) -> None:
        """Keep the maximum with this step's amaxes so far; nothing without a history. noop: see `update`."""
        if self.history is None:
            return
        new = torch.maximum(self.history[0], amax)  # propagates NaN
        self.history[0] = new if noop is None else torch.where(noop.bool(), self.history[0], new)

    def update(self, fmt: Format) -> None:
        """End of a step: the next scale from the history, then roll it by one to the higher index."""
        update_states(fmt, [self])


def frozen(states):
    """A pair of states, or None for no states, without recording; what has none stays None."""
    return None if states is None else tuple(None if state is None else state.frozen() for state in states)


def scale_for(fmt: Format, amax: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """float32: the scale that maps an amax to the format's largest number; `otherwise` where there is no usable amax."""
    # tensor / tensor: torch turns `number / tensor` into a reciprocal and a product, which rounds twice
    scale = torch.full_like(amax, ELEMENTS[fmt.element].max * 2.0 ** -fmt.option("margin")) / amax
    return torch.where(torch.isfinite(amax) & (amax > 0), scale.clamp(max=FLT_MAX), otherwise)


def rescale(fmt: Format, state: DelayedState) -> None:
    """The scale of the history for another format: what was recorded stays, what it is mapped to is another number."""
    latest = state.history if fmt.option("algo") == "max" else state.history[:2]  # the step's own, and the last one's
    state.scale.copy_(scale_for(fmt, latest.amax(), state.scale))


def resized(history: torch.Tensor, length: int) -> torch.Tensor:
    """A new history (length,): the running step's amax and the newest ones before it, zeros where there were none."""
    out = history.new_zeros(length)
    kept = min(length, len(history))
    out[:kept] = history[:kept]
    return out


def update_states(fmt: Format, states: list[DelayedState], noop: torch.Tensor | None = None) -> None:
    """`DelayedState.update` of many states of one format on one device, in as many kernels as for one.

    noop: int32 device scalar; non-zero changes nothing.
    """
    histories = torch.stack([state.history for state in states])
    scales = torch.stack([state.scale for state in states])
    amax = histories.amax(dim=1) if fmt.option("algo") == "max" else histories[:, 0]
    scale = scale_for(fmt, amax, scales)
    rolled = torch.roll(histories, 1, dims=1)
    rolled[:, 0] = 0
    if noop is not None:
        skip = noop.reshape(()).bool()
        scale, rolled = torch.where(skip, scales, scale), torch.where(skip, histories, rolled)
    torch._foreach_copy_([state.scale for state in states], list(scale.unbind()))
    torch._foreach_copy_([state.history for state in states], list(rolled.unbind()))


class Pieces(NamedTuple):
    """Where a shard lies that is made of equally long runs of the whole tensor: an index map for each.

    dim: 0 when the runs are rows of (M, K), 1 when they are columns.
    """

    dim: int
    maps: tuple[tuple[int, int, int], ...]


class Rng:
    """Key of stochastic rounding: what is drawn depends only on these values and an element's global position.

    seed, tensor_id: 32 bits each; step, microbatch: counters (`num_microbatches` a step).
    index_map: (row offset, column offset, global K) of this shard in the global (M, K), `Pieces` of such, or an int64
    (M,) tensor of source row ids; None: the tensor is whole. A global K of 0 is the K of the tensor that is cast.
    """

    own_columns = True  # the global K may be 0; a host-side hint that saves three small operations a cast
    parts: tuple[int, tuple[Rng, ...]] | None = None  # (dim, keys) of equally long runs of rows or columns

    def __init__(self, seed, tensor_id, step, microbatch, index_map=None, *, num_microbatches=1, device="cpu"):
        row, col, global_k, self.row_ids = 0, 0, 0, None
        if isinstance(index_map, torch.Tensor):
            self.row_ids = index_map.to(device=device, dtype=torch.int64)
        elif index_map is not None:
            row, col, global_k = index_map.maps[0] if isinstance(index_map, Pieces) else index_map
        counter = (step * num_microbatches + microbatch) & 0xFFFFFFFF
        words = [seed & 0xFFFFFFFF, tensor_id & 0xFFFFFFFF, counter, row, col, global_k]
        self.values = torch.tensor(words, dtype=torch.int64, device=device)
        self.own_columns = not global_k
        if isinstance(index_map, Pieces):
            more = dict(num_microbatches=num_microbatches, device=device)
            keys = (Rng(seed, tensor_id, step, microbatch, piece, **more) for piece in index_map.maps)
            self.parts = index_map.dim, tuple(keys)

    def words(self, K: int) -> torch.Tensor:
        """int64 (6,): what a kernel reads for a tensor of K columns: `values` with the global K filled in."""
        if not self.own_columns:
            return self.values
        last = self.values[GLOBAL_K:]
        return torch.cat((self.values[:GLOBAL_K], last.masked_fill(last == 0, K)))

    @property
    def plain_words(self) -> torch.Tensor | None:
        """`words` of any K, of one part and with rows counted from one place; None for other keys."""
        return None if self.own_columns or self.parts is not None or self.row_ids is not None else self.values

    def moved(self, rows: int) -> Rng:
        """The key of rows that begin `rows` further down in the whole tensor."""
        assert self.row_ids is None, "rows that draw by their sources have no place to count from"
        values = self.values.clone()
        values[ROW_OFFSET] += rows
        other = Rng.view(values, own_columns=self.own_columns)
        if self.parts is not None:
            dim, keys = self.parts
            other.parts = dim, tuple(key.moved(rows) for key in keys)
        return other

    @classmethod
    def view(cls, values: torch.Tensor, row_ids: torch.Tensor | None = None, *, own_columns: bool = True) -> Rng:
        """An `Rng` over key words that live in device memory already. own_columns: their global K may be 0."""
        self = cls.__new__(cls)
        self.values, self.row_ids, self.own_columns = values, row_ids, own_columns
        return self
