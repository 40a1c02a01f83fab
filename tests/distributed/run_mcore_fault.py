"""A training script in which something goes wrong on one rank.

    run_mcore_fault.py FAULT:RANK:ITERATION script.py <its arguments>

FAULT: ``die`` (killed before the iteration), ``crash`` (aborted before it, as the C library does over a broken heap),
``nan`` (a weight becomes NaN before it), ``full`` (from then on files cannot grow past 100 KB: EFBIG where a full disk
says ENOSPC, the same path), ``kill_saving`` (killed during that iteration's save, on every rank: tensors are written,
what makes them a checkpoint is not), ``kill_torch_save`` (the same of `--ckpt-format torch`: half of a file is written).
"""

from __future__ import annotations

import functools
import io
import os
import resource
import runpy
import signal
import sys
from pathlib import Path

import torch

LIMIT = 100_000


def main() -> None:
    fault, rank, iteration = sys.argv[1].split(":")
    sys.argv = sys.argv[2:]
    mine = int(os.environ["RANK"]) == int(rank)
    from megatron_hybrid import launch

    launch.prepare()
    if fault in SAVES:
        SAVES[fault](f"iter_{int(iteration):07d}")
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


def kill_during_save(folder: str) -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    original = FileSystemWriterAsync.retrieve_write_results

    def retrieve_write_results(self):
        if folder in str(self.checkpoint_id):
            die(None)
        return original(self)

    FileSystemWriterAsync.retrieve_write_results = retrieve_write_results


def kill_during_torch_save(folder: str) -> None:
    original = torch.save

    @functools.wraps(original)
    def save(obj, f, *args, **kwargs):
        if folder not in str(f):
            return original(obj, f, *args, **kwargs)
        whole = io.BytesIO()
        original(obj, whole, *args, **kwargs)
        Path(f).write_bytes(whole.getvalue()[: whole.tell() // 2])
        die(None)

    torch.save = save


SAVES = {"kill_saving": kill_during_save, "kill_torch_save": kill_during_torch_save}


if __name__ == "__main__":
    main()
