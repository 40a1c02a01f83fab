"""`explain` and `backends`: what runs where, as tables. Data first; `str()` prints them aligned."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field

from .formats import DIRECTIONS, parse_format
from .gemm import BACKENDS, OPERANDS, DeviceKind, GemmPair
from .model_shape import LinearShape
from .plan import INPUT, WEIGHT, GemmPlan, describe_operands, describe_runs
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


def explain(model, shapes: Mapping[str, LinearShape] | None = None) -> Table:
    """The resolved plan of a module, or of a list of (name, `GemmPlan`): a row for every module and gemm.

    Columns: module, gemm, operand A and B with their formats, accumulation, backend, native or emulated, the multiples
    to which the backend pads M, N and K, and what forward keeps for backward. shapes: sizes by module name; then also
    the bytes kept and the bytes that a rank receives when an operand is gathered, and below the table their sums beside
    bf16's.
    """
    plans = plans_of(model) if hasattr(model, "named_modules") else list(model)
    shapes = shapes or {}
    rows = [row for name, plan in plans for row in _plan_rows(name, plan, shapes)]
    header = (
        "module",
        "gemm",
        "operand A",
        "operand B",
        "accumulate",
        "backend",
        "runs",
        "pads to",
        "kept for backward",
    )
    return Table(header + (("saved", "gathered") if shapes else ()), tuple(rows), totals(plans, shapes))


def _plan_rows(name: str, plan: GemmPlan, shapes):
    kept = {"dgrad": WEIGHT, "wgrad": INPUT}
    for gemm, step in plan.steps().items():
        a, b = describe_operands(step.pair)
        saved = f"{kept[gemm]} {plan.saved[kept[gemm]]}" if gemm in kept else "-"
        pads = ", ".join(f"{dim} {n}" for dim, n in step.alignment().items() if n > 1) or "-"
        row = (name, gemm, a, b, step.accumulation, step.backend.name, step.runs, pads, saved)
        if shapes:
            shape = shapes.get(name)
            row += (bytes_saved(plan, kept[gemm], shape) if gemm in kept else "-", bytes_gathered(plan, gemm, shape))
        yield row


def bytes_saved(plan: GemmPlan, operand: str, shape: LinearShape | None) -> str:
    """What a linear's forward keeps of an operand; ``?`` without its size."""
    return "?" if shape is None else format_bytes(shape.saved_bytes(plan, operand))


def bytes_gathered(plan: GemmPlan, gemm: str, shape: LinearShape | None) -> str:
    """What a rank receives before a gemm: an input for fprop and wgrad, a gradient for dgrad and wgrad; ``-``: nothing."""
    direction = dict(OPERANDS[gemm]).get(plan.gathered)
    if direction is None:
        return "-"
    return "?" if shape is None else format_bytes(shape.gathered_bytes(plan, direction))


def totals(plans: list[tuple[str, GemmPlan]], shapes: Mapping[str, LinearShape]) -> tuple[str, ...]:
    """Lines below a table: how many linears and what they run; with sizes, sums of bytes beside bf16's."""
    counted = f"{len(plans)} linears; {describe_runs(plan for _, plan in plans)}"
    return counted, *(_byte_totals(plans, shapes) if shapes else ())


def _byte_totals(plans, shapes) -> tuple[str, ...]:
    """On one tensor-parallel rank, all layers together."""
    known = [(plan, shapes[name]) for name, plan in plans if shapes.get(name) is not None]
    hp = sum(shape.hp_input_bytes for _, shape in known)
    saved = sum(shape.saved_bytes(plan, INPUT) for plan, shape in known)
    casts = sum(shape.held_weight_bytes(plan) for plan, shape in known)
    weights = sum(shape.hp_weight_bytes for _, shape in known)
    gathered = sum(shape.gathered_bytes(plan, direction) for plan, shape in known for direction in DIRECTIONS)
    hp_gathered = sum(shape.hp_gathered_bytes for plan, shape in known if plan.gathered)
    lines = [
        f"inputs kept for backward, a microbatch: {format_bytes(saved)}; bf16: {format_bytes(hp)} ({_percent(saved, hp)})",
        f"cast weights, held through a step: {format_bytes(casts)} beside parameters of {format_bytes(weights)} in bf16",
        f"inputs and gradients gathered, a microbatch: {format_bytes(gathered)}; bf16: {format_bytes(hp_gathered)} "
        f"({_percent(gathered, hp_gathered)})",
    ]
    missing = [name for name, _ in plans if shapes.get(name) is None]
    return (*lines, *([f"left out of the sums, of unknown size: {', '.join(missing)}"] if missing else []))


def format_bytes(count: int) -> str:
    """``0``, ``512 B``, ``1.5 KiB``, ... with three significant digits."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return "0" if count == 0 else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


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

    def __call__(self, model, shapes=None) -> Table:
        return explain(model, shapes)


sys.modules[__name__].__class__ = _CallableModule
