"""A training script in which something goes wrong on one rank.

    run_mcore_fault.py FAULT:RANK:ITERATION script.py <its arguments>

FAULT: ``die`` (killed before the iteration), ``crash`` (aborted before it, as the C library does over a broken heap),
``nan`` (a weight becomes NaN before it), ``full`` (from then on files cannot grow past 100 KB: EFBIG where a full disk
says ENOSPC, the same path), ``kill_saving`` (killed during that iteration's save, on every rank: tensors are written,
what makes them a checkpoint is not).
"""

from __future__ import annotations

import functools
import os
import resource
import runpy
import signal
import sys

LIMIT = 100_000


def main() -> None:
    fault, rank, iteration = sys.argv[1].split(":")
    sys.argv = sys.argv[2:]
    mine = int(os.environ["RANK"]) == int(rank)
    from megatron_hybrid import launch

    launch.prepare()
    if fault == "kill_saving":
        kill_during_save(int(iteration))
    elif mine:
        before_iteration(int(iteration), globals()[fault])
    runpy.run_path(sys.argv[0], run_name="__main__")


def before_iteration(iteration: int, act) -> None:
    import megatron.training.training as training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        from megatron.training import get_args

        if get_args().curr_iteration + 1 == iteration:
            act(kwargs["model"] if "model" in kwargs else args[2])
        return original(*args, **kwargs)

    training.train_step = train_step


def die(model) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash(model) -> None:
    os.abort()


def nan(model) -> None:
    weight = next(p for name, p in model[0].named_parameters() if name.endswith("linear_fc1.weight"))
    weight.data[0, 0] = float("nan")


def full(model) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))


def kill_during_save(iteration: int) -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    original = FileSystemWriterAsync.retrieve_write_results

    def retrieve_write_results(self):
        if f"iter_{iteration:07d}" in str(self.checkpoint_id):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self)

    FileSystemWriterAsync.retrieve_write_results = retrieve_write_results


if __name__ == "__main__":
    main()
