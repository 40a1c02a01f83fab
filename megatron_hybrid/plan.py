"""GemmPlan: everything about a module's three GEMMs, decided and checked once, at build.

Saving for backward, gathering, offload, tests and `explain` read the plan; nothing is decided again at run time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from . import gemm as gemms
from .formats import COLUMNWISE, ROWWISE
from .gemm import OPERANDS, DeviceKind, GemmBackend, GemmPair
from .quantizer import HybridQuantizer
from .storage import QuantizedStorage, derive_columnwise

INPUT, WEIGHT, GRAD_OUTPUT = "input", "weight", "grad_output"
ORIGINAL = "original"


class PlanError(ValueError):
    """A recipe asks a module for something it cannot do; names module, gemm, operands, formats and device."""


@dataclass(frozen=True)
class GemmStep:
    """One GEMM of the plan: which payloads it multiplies and on which backend."""

    pair: GemmPair
    backend: GemmBackend

    @property
    def native(self) -> bool:
        return self.backend.native

    def run(self, a: QuantizedStorage, b: QuantizedStorage, out_dtype, accumulate_into=None) -> torch.Tensor:
        """`A @ B.T`, both payloads in the directions this gemm contracts. Shapes: gemm/backend.py."""
        for s, (operand, direction) in zip((a, b), OPERANDS[self.pair.gemm]):
            if s is None or s.direction != direction:
                found = "nothing" if s is None else s.direction
                raise PlanError(f"{self.pair.gemm} needs {operand}.{direction}, found {found}")
        return self.backend.run(a, b, self.pair, out_dtype, accumulate_into)


@dataclass(frozen=True)
class GemmPlan:
    """The resolved plan of one linear.

    quantizers  operand -> HybridQuantizer
    saved       operand -> what is kept for backward: ``columnwise`` payload, ``rowwise`` payload (the column is
                decoded from it in backward) or ``original`` (the high-precision tensor, cast in backward)
    calls       counts of GEMMs run, by (gemm, backend name); for tests and reports
    """

    name: str
    device: DeviceKind
    fprop: GemmStep
    dgrad: GemmStep
    wgrad: GemmStep
    quantizers: dict[str, HybridQuantizer]
    saved: dict[str, str]
    calls: Counter = field(default_factory=Counter, compare=False)

    def steps(self) -> dict[str, GemmStep]:
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def uses_rng(self) -> bool:
        return any(f.sr for q in self.quantizers.values() for f in q.formats())

    def transposed(self, operand: str) -> bool:
        """Whether this operand's columnwise payload is written contraction-contiguous."""
        step = self.dgrad if operand == WEIGHT else self.wgrad
        return step.backend.wants_transposed(step.pair)

    def quantize(self, operand: str, x: torch.Tensor, *, rowwise=False, columnwise=False, rng=None, state=None):
        """(rowwise, columnwise) payloads of `x` (..., K) for the directions asked for."""
        quantizer = self.quantizers[operand]
        return quantizer.cast(
            x.reshape(-1, x.shape[-1]), rowwise=rowwise, columnwise=columnwise, rng=rng, state=state,
            transposed=self.transposed(operand),
        )  # fmt: skip

    def columnwise(self, operand: str, kept: QuantizedStorage | torch.Tensor, *, rng=None, state=None):
        """The columnwise payload, from what `saved` kept of the operand."""
        if isinstance(kept, torch.Tensor):
            return self.quantize(operand, kept, columnwise=True, rng=rng, state=state)[1]
        if kept.direction == COLUMNWISE:
            return kept
        return derive_columnwise(kept, self.quantizers[operand].columnwise)

    def run(self, gemm: str, a, b, out_dtype, accumulate_into=None) -> torch.Tensor:
        step = getattr(self, gemm)
        self.calls[gemm, step.backend.name] += 1
        return step.run(a, b, out_dtype, accumulate_into)


def _saved(quantizer: HybridQuantizer) -> str:
    if quantizer.columnwise.is_quantized or not quantizer.derives_columnwise:
        return COLUMNWISE
    return ROWWISE  # a high-precision column decoded from the row: keep the smaller row


def build_plan(resolved, name: str, device, *, backend: str | None = None) -> GemmPlan:
    """Build and check the plan of one module.

    resolved: a recipe's `ModuleQuant` (operand -> formats, accumulate). name: the module's full name, for
    messages. device: a torch device. backend: force one by name (tests). Raises `PlanError`.
    """
    kind = DeviceKind.of(device)
    quantizers = {op: HybridQuantizer(*resolved.quantizer(op)) for op in (INPUT, WEIGHT, GRAD_OUTPUT)}
    steps = {}
    for gemm, ((op_a, dir_a), (op_b, dir_b)) in OPERANDS.items():
        a, b = getattr(quantizers[op_a], dir_a), getattr(quantizers[op_b], dir_b)
        pair = GemmPair(gemm, a, b, kind, getattr(resolved.accumulate, gemm))
        try:
            steps[gemm] = GemmStep(pair, gemms.choose(pair, backend))
        except ValueError as exc:
            raise PlanError(
                f"module {name or '(unnamed)'}, {gemm}: {op_a}.{dir_a} {a} x {op_b}.{dir_b} {b} on {kind}: {exc}"
            ) from None
    saved = {INPUT: _saved(quantizers[INPUT]), WEIGHT: _saved(quantizers[WEIGHT])}
    return GemmPlan(name, kind, **steps, quantizers=quantizers, saved=saved)
