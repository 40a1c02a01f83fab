"""Say why a checkpoint could not be written, once: Megatron's writer loses the cause on its way to the log.

A full disk makes `torch.save` fail in its own clean-up ("unexpected pos 704 vs 598"), and the writer then reports the
class of that error alone. `CannotSave` takes the place of the stacks of all ranks, and what was written of such a
checkpoint is removed.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from pathlib import Path

from .framework import Change, Patch


class CannotSave(OSError):
    """A checkpoint could not be written. alone: other ranks may not know of it."""

    def __init__(self, message: str, *, alone: bool):
        super().__init__(message)
        self.alone = alone


def root_cause(error: BaseException) -> BaseException:
    """The first of the errors that led to this one."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def raising(original):
    """`write_preloaded_data` that raises, with file and cause, where the main worker would hand an error back."""
    write = original.__func__

    @functools.wraps(write)
    def write_preloaded_data(transform_list, local_proc_idx, write_bucket, results_queue, *args, **kwargs):
        output = write(transform_list, local_proc_idx, write_bucket, results_queue, *args, **kwargs)
        if results_queue is None and isinstance(output[1], Exception):
            raise OSError(f"cannot write {write_bucket[0]}: {root_cause(output[1])}") from output[1]
        return output

    return staticmethod(write_preloaded_data)


def naming_the_cause(original):
    """`save_checkpoint`, or the end of an asynchronous save, that raises `CannotSave`."""

    @functools.wraps(original)
    def saving(*args, **kwargs):
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            return original(*args, **kwargs)
        except (CheckpointException, OSError) as error:
            everywhere = isinstance(error, CheckpointException)
            iteration = args[0] if args and isinstance(args[0], int) else kwargs.get("iteration")
            removed = _remove(iteration) if everywhere else ""
            what = "a checkpoint" if iteration is None else f"the checkpoint of iteration {iteration}"
            cause = _causes(error.failures) if everywhere else str(error)
            raise CannotSave(f"{what} cannot be written: {cause}{removed}", alone=not everywhere) from error

    return saving


def _causes(failures: dict) -> str:
    """What went wrong on which rank; only the first rank of a save is told."""
    said = {rank: str(root_cause(error)).rpartition("error: ")[2] for rank, (error, _) in failures.items()}
    return "; ".join(f"{cause} (rank {rank})" for rank, cause in said.items()) or "the first rank of the save says why"


def _remove(iteration: int | None) -> str:
    """Remove, on rank 0, what a failed save has written; every rank has ended its part."""
    from megatron.training import get_args

    args = get_args()
    if iteration is None or args.rank:
        return ""
    folder = Path(args.save) / f"iter_{iteration:07d}"
    if not folder.is_dir() or (folder / ".metadata").exists():  # a whole one from before
        return ""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    return "; what was written of it is left" if folder.exists() else "; what was written of it is removed"


_TRAINING = "megatron.training.training"
PATCH = Patch(
    name="save_errors",
    changes=(
        Change(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data",
            raising,
        ),
        Change(f"{_TRAINING}:save_checkpoint", naming_the_cause),
        Change(f"{_TRAINING}:maybe_finalize_async_save", naming_the_cause),
    ),
    versions=">=0.19.2,<0.20",
    why="a checkpoint that cannot be written (a full disk) ends the run with the class of an error in the stacks of all ranks",
    remove_when="FileSystemWriterAsync reports the error itself, with the file's name",
)
