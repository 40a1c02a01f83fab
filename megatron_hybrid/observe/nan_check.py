"""Where a NaN or an Inf first appears among the operands and results of quantized linears, at the moment it does.

    ctl = mh.prepare(model, "mxfp8")
    ctl.check_nan()              # then train as ever; `NanFound` says module, tensor, direction, rank, step and microbatch

Casts hide them: Inf becomes the largest number, and one NaN takes its whole block with it. Every operand is looked at
before it is cast, and every gemm's result. The host waits for the device each time, so this is for finding a fault, not
for every day. Compiled code is not checked, nor is an input that came quantized, which its producer's plan sees.
"""

from __future__ import annotations

import torch

from ..formats import COLUMNWISE, ROWWISE
from ..gemm import READ_BY
from ..plan import GemmPlan
from ..random_keys import RandomKeys
from .watched_plan import WatchedPlan

_RESULTS = {"fprop": "output", "dgrad": "input gradient", "wgrad": "weight gradient"}


class NanFound(RuntimeError):
    """A NaN or an Inf in training; the message says where."""


class NanCheck:
    """Checks of one rank. keys: the controller's, for step and microbatch. rank: None where there is only one."""

    def __init__(self, keys: RandomKeys, rank: int | None = None):
        self.keys, self.rank = keys, rank

    def watch(self, plan: GemmPlan) -> CheckedPlan:
        """The same plan, its operands and results looked at."""
        return CheckedPlan(plan, self)

    def look(self, plan: GemmPlan, what: str, x: torch.Tensor) -> None:
        """Raise `NanFound` if `x` is not finite everywhere. Waits for the device."""
        finite = torch.isfinite(x)
        if bool(finite.all()):
            return
        where = torch.nonzero(~finite)[0].tolist()
        nans = int(torch.isnan(x).sum())
        rank = "" if self.rank is None else f"rank {self.rank}, "
        raise NanFound(
            f"{rank}step {self.keys.step}, microbatch {self.keys.microbatch}, {plan.label}: {what} has {nans} NaN and "
            f"{int((~finite).sum()) - nans} Inf in {tuple(x.shape)}, the first at {tuple(where)}"
        )


class CheckedPlan(WatchedPlan):
    """A plan whose operands are looked at before their casts, and its gemms' results after them."""

    def __init__(self, plan: GemmPlan, check: NanCheck):
        super().__init__(plan)
        self._check = check

    def quantize(self, operand, x, *, rowwise=False, columnwise=False, **options):
        asked = [d for d, want in ((ROWWISE, rowwise), (COLUMNWISE, columnwise)) if want]
        read = " and ".join(f"{d} for {READ_BY[operand, d]}" for d in asked)
        self._check.look(self._plan, f"{operand} ({read})", x.detach())
        return self._plan.quantize(operand, x, rowwise=rowwise, columnwise=columnwise, **options)

    def run(self, gemm, *operands, **options):
        out = self._plan.run(gemm, *operands, **options)
        self._check.look(self._plan, f"{_RESULTS[gemm]} ({gemm})", out.detach())
        return out
