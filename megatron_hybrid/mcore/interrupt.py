"""Ctrl-C in training ends in a line of rank 0 and at once, instead of in the stacks of all ranks.

A rank ends by the signal itself. Python's own end would take the process groups apart first, which wait for what peers
have begun and will not finish; a peer that waits inside a collective is freed by the connection that closes here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from .. import interrupts

_LATEST = "latest_checkpointed_iteration.txt"
_PHASES = {"save_checkpoint": "while a checkpoint was saved", "evaluate": "in an evaluation"}  # functions of Megatron's


@contextlib.contextmanager
def ending_quietly() -> Iterator[None]:
    """A KeyboardInterrupt that nobody catches ends as `leave` does, wherever it is raised from here on; within, a SIGINT in
    an import, which might lose the exception, does so too."""
    original = sys.excepthook

    def hook(kind, error, trace):
        if not issubclass(kind, KeyboardInterrupt):
            return original(kind, error, trace)
        leave({frame.f_code.co_name for frame, _ in traceback.walk_tb(trace)})

    sys.excepthook = hook
    with interrupts.imports_end_at_once(lambda frame: leave({caller.f_code.co_name for caller in interrupts.stack(frame)})):
        yield


def leave(functions: set[str]) -> None:
    """Say on rank 0 what was interrupted, and end by SIGINT. functions: the names of those that the interrupt ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the line first
    with contextlib.suppress(Exception):
        if int(os.environ.get("RANK", "0")) == 0:
            interrupts.say(f"\n{describe(functions)}")
        for child in multiprocessing.active_children():  # they would stay: Python's own end stops them
            child.terminate()
        sys.stdout.flush()
        _flush_tensorboard()
    interrupts.end_by_signal()


def describe(functions: set[str]) -> str:
    """``interrupted in iteration 5 of 100; the last checkpoint in ... is of iteration 4``."""
    args = _arguments()
    if args is None or not hasattr(args, "curr_iteration"):
        return "interrupted before the first iteration"
    number = max(args.curr_iteration, getattr(args, "iteration", 0)) + 1  # that goes on, or that was the last
    phase = next((said for name, said in _PHASES.items() if name in functions), None)
    if phase is None:
        where = f"in iteration {number} of {args.train_iters}"
    else:
        where = f"{phase}, after iteration {number} of {args.train_iters}" if "train" in functions else phase
    return f"interrupted {where}; {_saved(args.save)}"


def _saved(folder: str | None) -> str:
    if not folder:
        return "nothing was saved: there is no --save"
    try:
        latest = (Path(folder) / _LATEST).read_text().strip()
    except OSError:
        return f"no checkpoint is in {folder} yet"
    return f"the last checkpoint in {folder} is of iteration {latest}"


def _arguments():
    """Megatron's, if it has parsed any."""
    module = sys.modules.get("megatron.training.global_vars")
    return None if module is None else getattr(module, "_GLOBAL_ARGS", None)


def _flush_tensorboard() -> None:
    module = sys.modules.get("megatron.training.global_vars")
    writer = getattr(module, "_GLOBAL_TENSORBOARD_WRITER", None)
    if writer is not None:
        writer.flush()
