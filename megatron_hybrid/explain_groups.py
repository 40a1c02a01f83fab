"""`explain` for a terminal: layers that are alike together, their linears' gemms in one table, their bytes in another.

Nothing is left out that a row for each module and gemm (`explain`) has.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from .explain import Table, bytes_gathered, bytes_saved, totals
from .gemm import OPERANDS
from .model_shape import LinearShape
from .plan import INPUT, WEIGHT, GemmPlan, describe_operands

WIDTH = 120
_LAYER = re.compile(r"(?P<before>.*\blayers)\.(?P<number>\d+)\.(?P<leaf>.+)")
_SHORT = {".rowwise ": ".row ", ".columnwise ": ".col "}
_INDENT, _KEPT = "  ", "\0"
_LEGEND = "row, col: scaled along rows or columns; sums: accumulation; kept: for backward, by one linear of one layer"


def explain_alike(plans: Iterable[tuple[str, GemmPlan]], shapes: Mapping[str, LinearShape]) -> str:
    """The plans of (module name, plan) as text of at most WIDTH columns, unless a format's own name is longer.

    shapes: sizes by module name, for the bytes that forward keeps for backward and those that a rank receives.
    """
    plans = list(plans)
    parts = [part for where, linears in _alike(plans, shapes) for part in _group(where, linears, shapes)]
    notes = [_LEGEND, *totals(plans, shapes)]
    return "\n".join([*parts, *(line for note in notes for line in wrapped(note))])


def wrapped(note: str) -> list[str]:
    return textwrap.wrap(note, WIDTH, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)


def _alike(plans, shapes) -> Iterator[tuple[str, dict[str, tuple[str, GemmPlan]]]]:
    """(which layers, {linear: (its whole name in the first of them, its plan)}), in the order of the first layers."""
    layers: dict[tuple[str, int | None], dict[str, tuple[str, GemmPlan]]] = {}
    for name, plan in plans:
        found = _LAYER.fullmatch(name)
        key, leaf = ((found["before"], int(found["number"])), found["leaf"]) if found else ((name, None), "")
        layers.setdefault(key, {})[leaf] = name, plan
    groups: dict[tuple, list] = {}
    for (before, number), linears in layers.items():
        looks = tuple((leaf, _gemms(plan), _bytes(plan, shapes.get(name))) for leaf, (name, plan) in linears.items())
        alike = groups.setdefault((before, looks), [[], linears])
        alike[0].append(number)
    for (before, _), (numbers, linears) in groups.items():
        yield (before if numbers == [None] else f"{before}.{_ranges(numbers)}{_count(numbers)}"), linears


def _count(numbers: list[int]) -> str:
    return f" ({len(numbers)} layers alike)" if len(numbers) > 1 else ""


def _ranges(numbers: list[int]) -> str:
    """``0,2-5`` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _group(where: str, linears: dict[str, tuple[str, GemmPlan]], shapes) -> Iterator[str]:
    yield from textwrap.wrap(where, WIDTH, subsequent_indent=_INDENT, break_on_hyphens=False)
    by_gemms: dict[tuple, list[str]] = {}
    for leaf, (_, plan) in linears.items():
        by_gemms.setdefault(_gemms(plan), []).append(leaf)
    for gemms, leaves in by_gemms.items():
        if leaves != [""]:
            whole = ", ".join(leaf.replace(" ", _KEPT) for leaf in leaves)  # lines end between names
            for line in textwrap.wrap(whole, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT):
                yield line.replace(_KEPT, " ")
        yield _indented(Table(("gemm", "operand A", "operand B", "sums", "runs", "pads to"), gemms))
    rows = tuple((leaf or where, *_bytes(plan, shapes.get(name))) for leaf, (name, plan) in linears.items())
    yield _indented(Table(("bytes", "input kept", "weight kept", "gathered before"), rows))
    yield ""


def _indented(table: Table) -> str:
    return textwrap.indent(str(table), 2 * _INDENT)


def _gemms(plan: GemmPlan) -> tuple[tuple[str, ...], ...]:
    return tuple(_gemm(gemm, step) for gemm, step in plan.steps().items())


def _gemm(gemm: str, step) -> tuple[str, ...]:
    a, b = describe_operands(step.pair)
    for long, short in _SHORT.items():
        a, b = a.replace(long, short), b.replace(long, short)
    backend = step.backend.name
    runs = step.runs if backend.replace("_", " ") == step.runs else f"{step.runs}: {backend}"
    pads = ", ".join(f"{dim} {n}" for dim, n in step.alignment().items() if n > 1) or "-"
    return gemm, a, b, step.accumulation, runs, pads


def _bytes(plan: GemmPlan, shape: LinearShape | None) -> tuple[str, ...]:
    """The cells of a linear: input and weight kept, and gathers by the gemm before which they come."""
    kept = (f"{plan.saved[operand]} {bytes_saved(plan, operand, shape)}" for operand in (INPUT, WEIGHT))
    gathers = {gemm: bytes_gathered(plan, gemm, shape) for gemm in OPERANDS}
    return *kept, ", ".join(f"{gemm} {count}" for gemm, count in gathers.items() if count != "-") or "-"
