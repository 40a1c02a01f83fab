"""A run's numbers as JSON lines, in full precision: Megatron's log rounds them to seven digits."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path

from ..patches.framework import Change, Patch
from . import versions
from .errors import UserError

LOSS = "lm loss"
_MODULE = "megatron.training.training"


def install(path: str) -> None:
    """Write to this file from now on; the last rank writes, which has the losses."""
    target = Path(path)
    if target.is_dir() or (target.parent.exists() and not target.parent.is_dir()):
        raise UserError(f"--hq-metrics-file {path}: not a file that can be written")
    patch(Recorder(target)).apply()


def patch(recorder: Recorder) -> Patch:
    """Megatron's logging functions, watched by a recorder."""
    return Patch(
        name="metrics",
        changes=(
            Change(f"{_MODULE}:training_log", recorder.around_training_log),
            Change(f"{_MODULE}:evaluate", recorder.around_evaluate),
            Change(f"{_MODULE}:evaluate_and_print_results", recorder.around_evaluation),
        ),
        versions=versions.SUPPORTED,
        why="Megatron hands its numbers only to its log, rounded, and to TensorBoard",
        remove_when="Megatron has a hook for a run's numbers",
    )


class Recorder:
    """Watches Megatron's logging functions. Its numbers are means over the iterations since the last line."""

    def __init__(self, path: Path):
        self.path = path
        self._loss = None
        self._iterations = 0
        self._elapsed = 0.0
        self._evaluation: tuple[int, str] | None = None  # iteration and key of the evaluation that runs

    def around_training_log(self, original):
        bind = inspect.signature(original).bind

        @functools.wraps(original)
        def training_log(*args, **kwargs):
            from megatron.training import get_args, get_timers

            given = bind(*args, **kwargs).arguments
            self._iterations += 1
            if (loss := given["loss_dict"].get(LOSS)) is not None:
                self._loss = loss if self._loss is None else self._loss + loss
            timer = get_timers()("interval-time")
            logs = given["iteration"] % get_args().log_interval == 0
            if logs:
                self._log(given["iteration"], given["learning_rate"], given["grad_norm"], timer)
            result = original(*args, **kwargs)
            if logs:
                self._elapsed = timer.elapsed(reset=False)  # 0 where the original has reset it
            return result

        return training_log

    def _log(self, iteration, learning_rate, grad_norm, timer) -> None:
        seconds = timer.elapsed(reset=False) - self._elapsed
        self._write(
            iteration=iteration,
            loss=None if self._loss is None else float(self._loss) / self._iterations,
            grad_norm=None if grad_norm is None else float(grad_norm),
            lr=learning_rate,
            ms=seconds * 1e3 / self._iterations,
        )
        self._loss, self._iterations = None, 0

    def around_evaluation(self, original):
        bind = inspect.signature(original).bind

        @functools.wraps(original)
        def evaluate_and_print_results(*args, **kwargs):
            given = bind(*args, **kwargs).arguments
            self._evaluation = given["iteration"], "test_loss" if "test set" in given["prefix"] else "valid_loss"
            return original(*args, **kwargs)

        return evaluate_and_print_results

    def around_evaluate(self, original):
        @functools.wraps(original)
        def evaluate(*args, **kwargs):
            result = original(*args, **kwargs)
            losses = result[0] or {}
            if self._evaluation and LOSS in losses:
                iteration, key = self._evaluation
                self._write(iteration=iteration, **{key: float(losses[LOSS])})
            return result

        return evaluate

    def _write(self, **numbers) -> None:
        from megatron.training import is_last_rank

        if not is_last_rank():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(numbers) + "\n")
