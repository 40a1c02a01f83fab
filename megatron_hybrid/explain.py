"""`explain` and `backends`: what runs where, as tables. Data first; `str()` prints them aligned."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field

from .formats import parse_format
from .gemm import BACKENDS, DeviceKind, GemmPair
from .plan import GemmPlan, describe_operands
from .runtime import LinearRuntime


@dataclass(frozen=True)
class Table:
    """Rows of strings under a header; `str()` aligns the columns. `notes` are printed below."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = field(default=())

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def records(self) -> list[dict[str, str]]:
        return [dict(zip(self.header, row)) for row in self.rows]

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(row[i]) for row in lines) for i in range(len(self.header))]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in lines]
        text.insert(1, "  ".join("-" * w for w in widths))
        return "\n".join([*text, *self.notes])


def plans_of(model) -> list[tuple[str, GemmPlan]]:
    """(module name, plan) of every quantized linear, in module order; of a grouped one for every expert."""
    return [
        (runtime.label or path.removesuffix(".hq"), plan)
        for path, runtime in model.named_modules()
        if isinstance(runtime, LinearRuntime)
        for plan in runtime.plans()
    ]


def explain(model) -> Table:
    """The resolved plan of a module, or of a list of (name, `GemmPlan`): a row for every module and gemm.

    Columns: module, gemm, operand A and B with their formats, accumulation, backend, native or emulated, and what
    forward keeps for backward.
    """
    plans = plans_of(model) if hasattr(model, "named_modules") else list(model)
    rows = [row for name, plan in plans for row in _plan_rows(name, plan)]
    header = ("module", "gemm", "operand A", "operand B", "accumulate", "backend", "runs", "kept for backward")
    return Table(header, tuple(rows), (_totals(plans),))


def _plan_rows(name: str, plan: GemmPlan):
    kept = {"dgrad": f"weight {plan.saved['weight']}", "wgrad": f"input {plan.saved['input']}"}
    for gemm, step in plan.steps().items():
        a, b = describe_operands(step.pair)
        yield (name, gemm, a, b, step.accumulation, step.backend.name, step.runs, kept.get(gemm, "-"))


def _totals(plans) -> str:
    counts: dict[str, int] = {}
    for _, plan in plans:
        for step in plan.steps().values():
            counts[step.runs] = counts.get(step.runs, 0) + 1
    gemms = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
    return f"{len(plans)} linears; gemms: {gemms or 'none'}"


_EXAMPLES = (
    ("high_precision", "high_precision"),
    ("fp8_current_e4m3", "fp8_current_e4m3"),
    ("fp8_rowwise_e4m3", "fp8_rowwise_e4m3"),
    ("fp8_block_e4m3", "fp8_block_e4m3:2d"),
    ("fp8_block_e4m3", "fp8_block_e4m3"),
    ("fp8_block_e4m3:2d", "fp8_block_e4m3:2d"),
    ("mxfp8_e4m3", "mxfp8_e4m3"),
    ("nvfp4", "nvfp4"),
    ("mxfp8_e4m3", "high_precision"),
)


def backends(device="cpu") -> Table:
    """Which backend runs which pair of formats on a device, and why the others do not."""
    kind = DeviceKind.of(device)
    rows = []
    for a, b in _EXAMPLES:
        pair = GemmPair("fprop", parse_format(a), parse_format(b), kind)
        usable = False
        for backend in BACKENDS:
            reason = backend.reason(pair)
            verdict = "-" if reason else ("usable" if usable else "chosen")
            usable = usable or not reason
            rows.append((f"{a} x {b}", backend.name, "native" if backend.native else "emulated", verdict, reason or ""))
    return Table(("operands", "backend", "runs", "verdict", "reason"), tuple(rows), (f"device: {kind}",))


class _CallableModule(types.ModuleType):
    """Importing this module makes it the package's attribute `explain`; `mh.explain(model)` must work then too."""

    def __call__(self, model) -> Table:
        return explain(model)


sys.modules[__name__].__class__ = _CallableModule
