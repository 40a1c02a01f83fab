"""Read back what a training run said: Megatron's log on stdout, or the metrics file of ``--hq-metrics-file``.

The log prints few digits, and its loss at the second iteration after a start is the mean of two; the metrics
file holds every value in full. To compare two runs exactly, read the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|")
_VALIDATION = re.compile(r"\bvalidation(\S*) loss at iteration (\d+)( on test set)?.*?\| lm loss value: (\S+) \|")
_FIELDS = {
    "loss": re.compile(r"\blm loss: (\S+) \|"),
    "grad_norm": re.compile(r"\bgrad norm: (\S+) \|"),
    "lr": re.compile(r"\blearning rate: (\S+) \|"),
    "ms": re.compile(r"\belapsed time per iteration \(ms\): (\S+) \|"),
}


@dataclass(frozen=True)
class TrainPoint:
    """One logged iteration. A field the run did not report is None."""

    iteration: int
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    ms: float | None = None
    total: int | None = None  # iterations of the whole run; only the log says so


@dataclass(frozen=True)
class ValidPoint:
    """One evaluation on the validation set (``test``: on the test set)."""

    iteration: int
    loss: float
    test: bool = False


@dataclass
class TrainingLog:
    """A run's points in the order they were reported."""

    train: list[TrainPoint] = field(default_factory=list)
    valid: list[ValidPoint] = field(default_factory=list)

    def add(self, point: TrainPoint | ValidPoint | None) -> None:
        if isinstance(point, TrainPoint):
            self.train.append(point)
        elif isinstance(point, ValidPoint) and not point.test:
            self.valid.append(point)

    def final_valid_loss(self) -> float | None:
        return self.valid[-1].loss if self.valid else None

    def first_bad(self) -> TrainPoint | ValidPoint | None:
        """The first point whose loss or gradient norm is NaN or infinite."""
        for point in [*self.train, *self.valid]:
            values = [point.loss, getattr(point, "grad_norm", None)]
            if any(value is not None and not math.isfinite(value) for value in values):
                return point
        return None


def parse_line(line: str) -> TrainPoint | ValidPoint | None:
    """The point that a line of Megatron's stdout reports, if it reports one."""
    if match := _ITERATION.search(line):
        values = {name: float(m.group(1)) if (m := regex.search(line)) else None for name, regex in _FIELDS.items()}
        return TrainPoint(int(match.group(1)), total=int(match.group(2)), **values)
    if match := _VALIDATION.search(line):
        return ValidPoint(int(match.group(2)), float(match.group(4)), test=match.group(3) is not None)
    return None


def parse_log(lines: Iterable[str]) -> TrainingLog:
    """A whole log; lines that report nothing are passed over."""
    log = TrainingLog()
    for line in lines:
        log.add(parse_line(line))
    return log


def read_metrics(path: str | Path) -> TrainingLog:
    """The file of ``--hq-metrics-file``: one JSON object a line, with ``iteration`` and either ``valid_loss``
    or ``loss``, ``grad_norm``, ``lr``, ``ms``.

    A last line without its end is that of a run that was stopped, and is left out. Any other fault raises
    ``ValueError`` with file and line.
    """
    log = TrainingLog()
    for number, line in enumerate(Path(path).read_text(errors="replace").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
            iteration = int(record["iteration"])
            if "valid_loss" in record:
                log.add(ValidPoint(iteration, float(record["valid_loss"])))
            elif "test_loss" not in record:
                log.add(TrainPoint(iteration, **{name: _number(record.get(name)) for name in _FIELDS}))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as exc:
            raise ValueError(f"{path}:{number}: not a metrics record ({exc})") from None
    return log


def _number(value: object) -> float | None:
    return None if value is None else float(value)


def differences(whole: TrainingLog, resumed: TrainingLog) -> list[str]:
    """Where a resumed run departs from the uninterrupted one: gradient norms and validation losses, bit for bit.

    Compared are the iterations that ``resumed`` ran; one that ``whole`` lacks is a difference too. Training
    losses are left out: Megatron's first report after a start averages differently.
    """
    found: list[str] = []
    norms = {point.iteration: point.grad_norm for point in whole.train}
    for point in resumed.train:
        if point.iteration not in norms:
            found.append(f"iteration {point.iteration}: only the resumed run has it")
        elif norms[point.iteration] != point.grad_norm:
            found.append(f"iteration {point.iteration}: grad norm {norms[point.iteration]} became {point.grad_norm}")
    start = min((point.iteration for point in resumed.train), default=None)
    if start is None:
        return ["the resumed run logged no iteration"]
    expected = [(point.iteration, point.loss) for point in whole.valid if point.iteration >= start]
    got = [(point.iteration, point.loss) for point in resumed.valid]
    if not got:
        found.append("the resumed run logged no validation loss")
    elif expected != got:
        found.append(f"validation losses {_pairs(expected)} became {_pairs(got)}")
    return found


def _pairs(points: list[tuple[int, float]]) -> str:
    return ", ".join(f"{loss} at {iteration}" for iteration, loss in points) or "(none)"
