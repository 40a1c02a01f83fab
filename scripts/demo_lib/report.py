"""What the demo claims, checked; and its summary."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_hybrid.observe.training_log import TrainingLog, differences
from megatron_hybrid.whole_file import write_whole

COMPARE_TOLERANCE = 0.02


@dataclass(frozen=True)
class Check:
    """A claim, whether it holds, and the figures."""

    name: str
    passed: bool
    detail: str


@dataclass
class RunSummary:
    """One finished run in figures. Losses in nats a token."""

    recipe: str
    iterations: int
    seconds: float
    train_loss: float | None
    valid_loss: float | None
    tokens_per_second: float | None


@dataclass
class Summary:
    """Everything the demo prints at its end and writes to summary.json."""

    device: str
    runs: list[RunSummary]
    unigram_entropy: float
    bigram_entropy: float
    seconds: float
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps({**asdict(self), "passed": self.passed}, indent=2) + "\n")

    def table(self) -> str:
        rows = [("recipe", "steps", "time", "tokens/s", "train loss", "valid loss")]
        for run in self.runs:
            rows.append((
                run.recipe, str(run.iterations), f"{run.seconds:.0f} s", _figure(run.tokens_per_second, ",.0f"),
                _figure(run.train_loss, ".4f"), _figure(run.valid_loss, ".4f"),
            ))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
            lines.append("  ".join(cells))
        lines.insert(1, "-" * len(lines[0]))
        lines.append(f"text: unigram entropy {self.unigram_entropy:.4f}, bigram entropy {self.bigram_entropy:.4f}; "
                     f"losses and entropies in nats/token; device: {self.device}; {self.seconds:.0f} s in all")
        lines += [f"{'PASS' if check.passed else 'FAIL'}  {check.name}: {check.detail}" for check in self.checks]
        return "\n".join(lines)


def _figure(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def summarise(recipe: str, log: TrainingLog, seconds: float, tokens_per_iteration: int) -> RunSummary:
    """Speed from the median iteration: the first one carries the start-up, some carry an evaluation."""
    times = sorted(point.ms for point in log.train if point.ms is not None)
    speed = tokens_per_iteration / (times[len(times) // 2] / 1000) if times else None
    last = [point.loss for point in log.train[-10:] if point.loss is not None]
    train_loss = sum(last) / len(last) if last else None
    return RunSummary(recipe, len(log.train), seconds, train_loss, log.final_valid_loss(), speed)


def check_complete(log: TrainingLog, iterations: int, name: str) -> Check:
    """Every iteration reported, everything finite, and a validation loss at the end."""
    seen = [point.iteration for point in log.train]
    bad = log.first_bad()
    if bad is not None:
        return Check(name, False, f"not finite at iteration {bad.iteration}")
    if seen != list(range(1, iterations + 1)):
        return Check(name, False, f"{len(seen)} of {iterations} iterations reported")
    if not log.valid or log.valid[-1].iteration != iterations:
        return Check(name, False, f"no validation loss at iteration {iterations}")
    return Check(name, True, f"{iterations} iterations, all finite")


def check_learned(valid_loss: float | None, bigram_entropy: float, hint: str = "") -> Check:
    """Below the bigram entropy a model must have used more context than one token: attention works.

    hint: what to say besides where it is above.
    """
    name = "learned from context"
    if valid_loss is None or not math.isfinite(valid_loss):
        return Check(name, False, "no finite validation loss")
    passed = valid_loss < bigram_entropy
    sign, after = ("<", "") if passed else (">=", hint)
    return Check(name, passed, f"validation loss {valid_loss:.4f} {sign} bigram entropy {bigram_entropy:.4f}{after}")


def check_resume(whole: TrainingLog, resumed: TrainingLog, expected: int) -> Check:
    """The resumed iterations repeat the uninterrupted run's bit for bit."""
    name = "resume is exact"
    found = differences(whole, resumed)
    if not found and len(resumed.train) != expected:
        found = [f"{len(resumed.train)} of {expected} resumed iterations reported"]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return Check(name, False, found[0] + more)
    return Check(name, True, f"{expected} grad norms and the validation loss equal the uninterrupted run's bit for bit")


def check_close(valid_loss: float | None, reference: float | None) -> Check:
    """Within the tolerance of the bf16 run."""
    name = "close to bf16"
    if valid_loss is None or reference is None:
        return Check(name, False, "no validation loss to compare")
    gap = valid_loss / reference - 1
    return Check(name, abs(gap) <= COMPARE_TOLERANCE, f"validation loss {valid_loss:.4f} against {reference:.4f} "
                 f"({gap:+.2%}, allowed {COMPARE_TOLERANCE:.0%})")
