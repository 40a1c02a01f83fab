"""Run one training command: its whole output to a file, one live line to the terminal, its last words on failure."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from megatron_hybrid.observe.training_log import TrainingLog, TrainPoint, parse_line, read_metrics

from .settings import Run

_STALL_SECONDS = 600.0
_PLAIN_INTERVAL = 20.0
_TELLING = re.compile(r"\b\w*(Error|Exception)\b:|\berror:|\bFATAL\b|Killed|Segmentation fault", re.IGNORECASE)
# torchrun's own summary of a failed rank says nothing that the rank has not said.
_BOILERPLATE = re.compile(r"torch\.distributed\.elastic|ChildFailedError|traceback : To enable|^\s*[-=]{5,}\s*$|warn")


class TrainingFailed(Exception):
    """A run that did not end well; the message is for the user."""


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    log: TrainingLog
    seconds: float


def run_training(run: Run, label: str) -> Outcome:
    """Start the run, show where it is, wait for it. Raises `TrainingFailed` when it fails or says nothing for long."""
    run.folder.mkdir(parents=True, exist_ok=True)
    run.metrics.unlink(missing_ok=True)
    start = time.monotonic()
    progress = Progress(label, run.first_iteration, run.last_iteration)
    with run.log.open("w") as log, _process(run) as process:
        log.write("$ " + " ".join(run.command) + "\n")
        watchdog = _Watchdog(process)
        assert process.stdout is not None
        for line in process.stdout:
            watchdog.touch()
            log.write(line)
            log.flush()
            point = parse_line(line)
            if isinstance(point, TrainPoint):
                progress.show(point)
        code = process.wait()
        watchdog.stop()
    progress.close()
    if watchdog.fired:
        raise TrainingFailed(f"{label}: no output for {_STALL_SECONDS:.0f} s, stopped. The whole log: {run.log}")
    if code != 0:
        words = last_words(run)
        raise TrainingFailed(f"{label}: training ended with exit code {code}.\n{words}\nThe whole log: {run.log}")
    return Outcome(_read_result(run, label), time.monotonic() - start)


def _read_result(run: Run, label: str) -> TrainingLog:
    if not run.metrics.is_file():
        raise TrainingFailed(f"{label}: the run wrote no {run.metrics}. The whole log: {run.log}")
    try:
        return read_metrics(run.metrics)
    except ValueError as exc:
        raise TrainingFailed(f"{label}: {exc}") from None


def last_words(run: Run, limit: int = 12) -> str:
    """The lines of a log that tell why it ended: those that name an error, else the last ones.

    Of more errors than ``limit`` the first and last halves: what broke first is above, not what other ranks said of it.
    """
    lines = [line.rstrip() for line in run.log.read_text(errors="replace").splitlines()]
    useful = [line for line in lines if line.strip() and not _BOILERPLATE.search(line)]
    telling = list(dict.fromkeys(line for line in useful if _TELLING.search(line)))
    if len(telling) > limit:
        telling = telling[: limit // 2] + telling[-(limit // 2) :]
    return "\n".join("  " + line[:300] for line in telling or useful[-limit:])


class Progress:
    """One line that moves on a terminal; elsewhere a new line now and then."""

    def __init__(self, label: str, first: int, last: int):
        self._label, self._first, self._last = label, first, last
        self._start: float | None = None
        self._shown = 0.0
        self._live = sys.stdout.isatty()
        self._emit(f"[{label}] starting", final=not self._live)

    def show(self, point: TrainPoint) -> None:
        now = time.monotonic()
        if self._start is None:  # the first iteration carries the start-up; time is counted from its end
            self._start = now
            self._first = point.iteration
        ended = point.iteration == self._last
        if not ended and not self._live and now - self._shown < _PLAIN_INTERVAL:
            return
        self._shown = now
        self._emit(self._describe(point, now - self._start), final=not self._live)

    def close(self) -> None:
        if self._live:
            print(flush=True)

    def _describe(self, point: TrainPoint, elapsed: float) -> str:
        done = point.iteration - self._first
        left = (self._last - point.iteration) * elapsed / done if done else None
        remaining = f"{left:.0f} s left" if left is not None else "time left unknown"
        loss = f"loss {point.loss:.3f}" if point.loss is not None else "loss unknown"
        return f"[{self._label}] iteration {point.iteration}/{self._last}  {loss} nats/token  {remaining}"

    def _emit(self, text: str, final: bool) -> None:
        print(text if final else f"\r\033[K{text}", end="\n" if final else "", flush=True)


class _Watchdog:
    """Ends a process group that has been silent for too long."""

    def __init__(self, process: subprocess.Popen):
        self.fired = False
        self._process = process
        self._last = time.monotonic()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def touch(self) -> None:
        self._last = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(1.0):
            if time.monotonic() - self._last > _STALL_SECONDS:
                self.fired = True
                end_tree(self._process)
                return


@contextmanager
def _process(run: Run) -> Iterator[subprocess.Popen]:
    """The child in a process group of its own, ended with us whatever happens."""
    process = subprocess.Popen(
        run.command, env=run.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            end_tree(process)


def end_tree(process: subprocess.Popen) -> None:
    """Ask the whole tree to end, then make it: torchrun's ranks are in sessions of their own, out of its group."""
    try:
        tree = [parent := psutil.Process(process.pid), *parent.children(recursive=True)]
        parent.terminate()  # torchrun passes it on to its ranks
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs(tree, timeout=10)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
