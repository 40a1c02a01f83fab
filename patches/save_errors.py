"""Say why a checkpoint could not be written: Megatron's writer loses the cause on its way to the log.

A full disk makes `torch.save` fail in its own clean-up ("unexpected pos 704 vs 598"), and the writer then reports the
class of that error alone.
"""

from __future__ import annotations

import functools

from .framework import Change, Patch


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


PATCH = Patch(
    name="save_errors",
    changes=(
        Change(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data",
            raising,
        ),
    ),
    versions=">=0.19.2,<0.20",
    why="a checkpoint that cannot be written (a full disk) ends the run with the class of an error and nothing else",
    remove_when="FileSystemWriterAsync reports the error itself, with the file's name",
)
