"""Runs read back for a report: losses, statistics, timers, recipe, whichever of them a run has left."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..quantizer_spec import GEMMS
from . import run_record
from .training_log import TrainingLog, parse_log, read_metrics

METRICS, STATISTICS, LOG, PROFILE = "metrics.jsonl", "hq_stats*.jsonl", "log.txt", "hq_profile*.json"
# Megatron's timers that do not contain each other
TIMERS = (
    "forward-compute", "backward-compute", "forward-recv", "forward-send", "backward-recv", "backward-send",
    "forward-send-forward-recv", "forward-send-backward-recv", "backward-send-forward-recv",
    "backward-send-backward-recv", "all-grads-sync", "optimizer",
)  # fmt: skip
SLOTS = tuple((gemm, operand) for gemm, operands in GEMMS.items() for operand in operands)
_TIMER = re.compile(r"^\s+([a-z-]+) \.+: \(([\d.]+), ([\d.]+)\)", re.MULTILINE)
_DAMAGE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # what reading a damaged line may raise
_FAR, _FEW_DB = 3.5, 2.0  # an outlier's distance from its kind's median, in median deviations and in dB
_SATURATED, _UNDERFLOWN = 1e-3, 0.05


class RunError(ValueError):
    """A path that holds nothing of a run; says what was looked for."""


@dataclass(frozen=True)
class Cell:
    """One cast of one module at the last recorded step; of several ranks the worst."""

    module: str
    layer: int | None
    gemm: str
    operand: str
    format: str
    step: int
    snr_db: float | None
    cosine: float | None
    amax: float | None
    underflow: float | None
    saturation: float | None
    nonfinite: float | None

    @property
    def leaf(self) -> str:
        """``linear_fc1`` of ``decoder.layers.3.mlp.linear_fc1``; experts keep their number."""
        return self.module.rpartition(".")[2]


@dataclass
class Run:
    """What is known of a run.

    cells    by (module, gemm, operand)
    timers   milliseconds an iteration by name
    profile  milliseconds of the profiled step by what they went to, on the slowest rank
    """

    name: str
    path: Path
    log: TrainingLog = field(default_factory=TrainingLog)
    record: dict = field(default_factory=dict)
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)
    timers: dict[str, float] = field(default_factory=dict)
    profile: dict[str, float] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Whether nothing of a run was found."""
        return not (self.log.train or self.log.valid or self.cells or self.timers or self.profile)

    @property
    def recipe_name(self) -> str:
        recipe = self.record.get("recipe")
        return f"{recipe.get('name', 'unnamed')} ({self.record['fingerprint'][:12]})" if recipe else "not recorded"

    def milliseconds(self) -> float | None:
        """The median of an iteration's time, the first tenth left out."""
        times = [point.ms for point in self.log.train if point.ms is not None]
        return statistics.median(times[len(times) // 10 :]) if times else None


def load_run(text: str) -> Run:
    """A run from ``PATH`` or ``NAME=PATH``: a folder with metrics.jsonl, or a metrics file or Megatron log itself.

    Raises `RunError` when nothing is there or nothing of a run in it, and ``ValueError`` with file and line for a
    damaged file.
    """
    name, path = _name_and_path(text)
    if path.is_dir():
        metrics = path / METRICS
        if not metrics.is_file() and not (path / LOG).is_file() and not [*path.glob(STATISTICS), *path.glob(PROFILE)]:
            raise RunError(f"{path}: no {METRICS} (--hq-metrics-file), {LOG}, {STATISTICS} or {PROFILE} in it")
        folder, name = path, name or path.resolve().name
    elif path.is_file():
        metrics, folder, name = path, path.parent, name or path.stem
    else:
        raise RunError(f"{path}: no such file or folder")
    log = folder / LOG
    run = Run(name, path, record=run_record.read(metrics) or run_record.read(folder / "hq_stats.jsonl"))
    run.log = _numbers(metrics) if metrics.is_file() else _numbers(log) if log.is_file() else TrainingLog()
    run.cells = read_cells(sorted(folder.glob(STATISTICS)))
    run.profile = read_profile(sorted(folder.glob(PROFILE)))
    for file in (log, metrics):
        if not run.timers and file.is_file():
            run.timers = read_timers(file.read_text(errors="replace"))
    if run.is_empty():
        raise RunError(
            f"{path}: no iteration, evaluation or cast of a training run in it; give the folder or file of "
            "--hq-metrics-file, or the output of a Megatron run"
        )
    return run


def _name_and_path(text: str) -> tuple[str, Path]:
    """Where a path has an equals sign itself, what exists decides."""
    parts = text.split("=")
    for cut in range(len(parts)):
        if (path := Path("=".join(parts[cut:]))).exists():
            return "=".join(parts[:cut]), path
    return "=".join(parts[:-1]), Path(parts[-1])


def read_profile(paths: Iterable[Path]) -> dict[str, float]:
    """What the profiled step's time went to, in ms, on the rank that took longest. Raises ``ValueError`` with the file."""
    slowest = {"ms": 0.0, "split": {}}
    for path in paths:
        try:
            found = json.loads(path.read_text())
            found["split"] = {str(what): float(ms) for what, ms in found["split"].items()}
            slowest = max(slowest, found, key=lambda record: float(record["ms"]))
        except (*_DAMAGE, AttributeError) as error:
            raise ValueError(f"{path}: not a profile of --hq-profile-step ({error!r})") from None
    return slowest["split"]


def _numbers(path: Path) -> TrainingLog:
    with path.open(errors="replace") as file:
        first = file.readline().lstrip()
        if first.startswith("{"):
            return read_metrics(path)
        file.seek(0)
        return parse_log(file)


def read_cells(paths: Iterable[Path]) -> dict[tuple[str, str, str], Cell]:
    """The last recorded step of every cast, all ranks' files together. Raises ``ValueError`` with file and line."""
    cells: dict[tuple[str, str, str], Cell] = {}
    for path in paths:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(keepends=True), start=1):
            if not line.endswith("\n"):
                break  # of a run that was stopped
            try:
                cell = _cell(json.loads(line))
            except _DAMAGE as error:
                raise ValueError(f"{path}:{number}: not a record of statistics ({error!r})") from None
            key = cell.module, cell.gemm, cell.operand
            old = cells.get(key)
            if old is None or cell.step > old.step or (cell.step == old.step and _worse(cell, old)):
                cells[key] = cell
    return cells


def _cell(entry: dict) -> Cell:
    """Raises one of _DAMAGE."""
    cell = Cell(**{name: entry[name] for name in Cell.__dataclass_fields__})
    words = (cell.module, cell.gemm, cell.operand, cell.format)
    counts = (cell.step, 0 if cell.layer is None else cell.layer)
    shares = (cell.amax, cell.snr_db, cell.cosine, cell.underflow, cell.saturation, cell.nonfinite)
    if (cell.gemm, cell.operand) not in SLOTS or not all(isinstance(word, str) for word in words):
        raise TypeError(f"no operand of a gemm: {words}")
    if not all(isinstance(n, int) for n in counts) or not all(n is None or isinstance(n, (int, float)) for n in shares):
        raise TypeError("a number is expected")
    return cell


def _worse(a: Cell, b: Cell) -> bool:
    bad = [cell.nonfinite or 0.0 for cell in (a, b)]
    return bad[0] > bad[1] or (bad[0] == bad[1] and (a.snr_db or 1e9) < (b.snr_db or 1e9))


def read_timers(text: str) -> dict[str, float]:
    """Milliseconds an iteration that Megatron's timers report (the slowest rank's), the median of all reports."""
    found = defaultdict(list)
    for match in _TIMER.finditer(text):
        if match.group(1) in TIMERS:
            found[match.group(1)].append(float(match.group(3)))
    return {name: statistics.median(found[name]) for name in TIMERS if found[name]}


@dataclass(frozen=True)
class Outlier:
    """A cast that is unlike those of the same linear in other layers, or loses much of its tensor."""

    cell: Cell
    reason: str
    weight: float  # larger is worse


def outliers(cells: Iterable[Cell]) -> list[Outlier]:
    """Not a number, saturation above 0.1%, an SNR far below its kind's median, or underflow above 5% and twice its
    kind's median; worst first. A kind is one linear's operand in one format, in all layers."""
    kinds: dict[tuple, list[Cell]] = defaultdict(list)
    for cell in cells:
        kinds[cell.leaf, cell.gemm, cell.operand, cell.format].append(cell)
    found = []
    for same in kinds.values():
        snrs = [cell.snr_db for cell in same if cell.snr_db is not None]
        middle = statistics.median(snrs) if snrs else 0.0
        spread = statistics.median(abs(snr - middle) for snr in snrs) if snrs else 0.0
        underflow = statistics.median(cell.underflow or 0.0 for cell in same)
        for cell in same:
            below = 0.0 if cell.snr_db is None else middle - cell.snr_db
            if cell.nonfinite:
                found.append(Outlier(cell, f"{cell.nonfinite:.2%} of the tensor is NaN or infinite", 1e6))
            elif (cell.saturation or 0) > _SATURATED:
                found.append(Outlier(cell, f"{cell.saturation:.2%} saturates", 1e3 * cell.saturation))
            elif below > max(_FAR * spread, _FEW_DB):
                found.append(Outlier(cell, f"{below:.1f} dB below the median of {len(same)} layers", below))
            elif (cell.underflow or 0.0) > max(_UNDERFLOWN, 2 * underflow):
                reason = f"{cell.underflow:.1%} underflows to zero; median of {len(same)} layers {underflow:.1%}"
                found.append(Outlier(cell, reason, 10 * cell.underflow))
    return sorted(found, key=lambda outlier: -outlier.weight)
