"""The process that Megatron starts at the first save ends with its rank, however that ends.

It keeps the queue for what writers report, lives until Python's own end of the rank, and ignores SIGINT: a rank that is
killed (out of memory, by a launcher) left it behind, half a GB each.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import signal

from .framework import Change, Patch

_MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Called in the new process; `parent` is who started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # gone already
        os.kill(os.getpid(), signal.SIGTERM)


def ending_with_the_rank(original):
    @functools.wraps(original)
    def get_write_results_queue(mp_mode="spawn"):
        from multiprocessing import get_context
        from multiprocessing.managers import SyncManager

        module = importlib.import_module(_MODULE)
        if module._results_queue is None:
            manager = SyncManager(ctx=get_context(mp_mode))
            manager.start(initializer=end_with, initargs=(os.getpid(),))
            module._results_queue = manager.Queue()
        return module._results_queue

    return get_write_results_queue


PATCH = Patch(
    name="save_process",
    changes=(Change(f"{_MODULE}:get_write_results_queue", ending_with_the_rank),),
    versions=">=0.19.2,<0.20",
    why="a rank that is killed after its first save leaves a process of half a GB behind, for ever",
    remove_when="that process ends with the rank that started it",
)
