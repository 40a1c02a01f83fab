"""The maximum of amaxes over ranks, exactly as one rank would find it: NaN wins, as it does in the kernels.

Amaxes are not negative, so their bits order as integers, with Inf and then NaN on top. A maximum of floats would lose
a NaN on one rank or not, as the backend and the order of ranks have it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ..plan import WEIGHT
from ..tensor import HybridTensor
from ..weight_cache import WeightCache


def start_max(amaxes: list[torch.Tensor], group: dist.ProcessGroup):
    """Start the maximum of float32 amaxes of any shapes over the ranks of a group, in one collective.

    Returns a function that waits and gives them in their shapes. One amax alone is reduced where it is.
    """
    if len(amaxes) == 1 and amaxes[0].is_contiguous():
        work = dist.all_reduce(amaxes[0].view(torch.int32), op=dist.ReduceOp.MAX, group=group, async_op=True)
        return lambda: (work.wait(), amaxes)[1]
    flat = torch.cat([a.reshape(-1) for a in amaxes])
    work = dist.all_reduce(flat.view(torch.int32), op=dist.ReduceOp.MAX, group=group, async_op=True)

    def finish() -> list[torch.Tensor]:
        work.wait()
        return [part.view(a.shape) for part, a in zip(flat.split([a.numel() for a in amaxes]), amaxes)]

    return finish


class WeightAmaxes:
    """Amaxes of several weights that the same ranks split, reduced over these ranks in one collective.

    They are found at the first request after an `invalidate`, or for a weight that was written since, for all weights at
    once, so every rank must ask at the same point, and all weights must be there: not with gathers of parameters that run
    layer by layer. Who writes a weight must write it on all of these ranks, as optimizers and loads do: else the one that
    did waits for the others.

    weights: `LinearRuntime` -> a function that gives its weight (N, K) of now, or None.
    move: gathers give weights their memory anew (FSDP). Its address then says nothing of a change, and whether it is the
    old one depends on each rank's allocator, on which a collective must not depend.
    """

    def __init__(self, group: dist.ProcessGroup, weights: dict, *, move: bool = False):
        self.group, self.weights, self.move, self._found, self._versions = group, weights, move, None, {}
        for runtime in weights:
            runtime.weight_cache = PooledWeightCache(self, runtime)

    def invalidate(self) -> None:
        self._found = None

    def pair(self, runtime):
        """(rowwise, columnwise) reduced amaxes of a linear's weight, None for those its cast finds itself; or None for
        a linear that is not one of these."""
        if self._found is None or self._version(runtime) != self._versions.get(runtime):
            self._versions = {hq: self._version(hq) for hq in self.weights}
            self._found = self._reduce()
        return self._found.get(runtime)

    def _version(self, runtime) -> tuple | None:
        """What changes when torch knows that a linear's weight did."""
        weight = self._plain(runtime)
        if weight is None:
            return None
        if self.move:
            return (weight._version,)
        return StorageWeakRef(weight.untyped_storage()), weight.data_ptr(), weight._version  # see `WeightCache`

    def _plain(self, runtime) -> torch.Tensor | None:
        """A linear's weight, unless it lives quantized."""
        weight = self.weights[runtime]()
        return None if isinstance(weight, HybridTensor) else weight

    def _reduce(self) -> dict:
        pairs = {}
        for runtime in self.weights:
            if (weight := self._plain(runtime)) is None:
                continue
            plan = runtime.plan_for(weight.device)
            if wanted := plan.reduced.get(WEIGHT):
                pairs[runtime] = plan.quantizers[WEIGHT].outer_amaxes(weight.detach(), *wanted)
        distinct = {id(a): a for pair in pairs.values() for a in pair if a is not None}
        if distinct:
            distinct = dict(zip(distinct, start_max(list(distinct.values()), self.group)()))
        return {hq: tuple(None if a is None else distinct[id(a)] for a in pair) for hq, pair in pairs.items()}


class PooledWeightCache(WeightCache):
    """A weight cache whose end of a window ends that of the amaxes too.

    Weights that move and share amaxes are cast at every call: a cast may ask other ranks (for the amax of a derived column).
    """

    def __init__(self, pool: WeightAmaxes, runtime):
        self.pool, self.runtime = pool, runtime
        super().__init__()

    def __reduce__(self):
        return WeightCache, (False,)

    def amaxes(self):
        return self.pool.pair(self.runtime)

    def get(self, weight, cast, wanted: tuple[bool, bool], **options):
        if self.pool.move and WEIGHT in self.runtime.plan_for(weight.device).reduced:
            return cast(weight, rowwise=wanted[0], columnwise=wanted[1])
        return super().get(weight, cast, wanted, **options)

    def invalidate(self) -> None:
        self.pool.invalidate()
        super().invalidate()
