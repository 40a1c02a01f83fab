"""A worker's checks on its ranks, and their outcome for the tests that started it.

A worker calls `start` and `run_checks` on what it defines; a test launches it with `run_worker`, once a module, and
asserts each check by its name with `assert_passed`.

    torchrun --nproc-per-node 2 run_something.py FOLDER [--backend gloo|nccl] [--only CHECK ...]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import traceback
from datetime import timedelta
from pathlib import Path

from launch import torchrun
from shared_gpus import take_device

PREFIX = "check_"
COLLECTIVE_SECONDS = 90  # then NCCL ends a rank that waits for one whose check failed


@functools.cache
def arguments() -> argparse.Namespace:
    """A worker's command line."""
    parser = argparse.ArgumentParser(description="Checks on the ranks of torchrun.")
    parser.add_argument("folder", type=Path, help="rank r writes FOLDER/<r>.json, check -> traceback or null")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="nccl: on GPUs")
    parser.add_argument("--only", nargs="*", default=[], metavar="CHECK")
    return parser.parse_args()


def start(threads: int | None = None):
    """The process group of all ranks. Tensors are made on this rank's device, which is returned, from now on."""
    import torch

    backend = arguments().backend
    device = take_device(backend)
    if device.type == "cuda":
        torch.set_default_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    # without `device_id`, with which NCCL would connect each of Megatron's groups at once, used or not
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    return device


def run_checks(*namespaces: dict, leave_out=()) -> None:
    """Call every ``check_*`` function of the namespaces on this rank; FOLDER/<rank>.json: check -> traceback or None.

    leave_out: names of functions that are no checks, or not for these ranks.
    """
    import torch.distributed as dist

    folder, only = arguments().folder, arguments().only
    file, errors = Path(folder) / f"{dist.get_rank()}.json", {}
    for name, check in [item for namespace in namespaces for item in namespace.items()]:
        short = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or name in leave_out or (only and short not in only):
            continue
        errors[short] = error_of(check)
        file.write_text(json.dumps(errors))  # what is known, should the next check never end
        dist.barrier()


@contextlib.contextmanager
def raises(kind, text: str):
    """What is inside raises an error of this kind, or of one of these, whose message has `text`."""
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing raised; expected: {text}")


def write_errors(file: Path, checks: dict) -> None:
    """Call functions without arguments, by name; the file: name -> traceback or None. For a rank that checks alone."""
    file.write_text(json.dumps({name: error_of(check) for name, check in checks.items()}))


def error_of(check) -> str | None:
    """The traceback of a function that raises."""
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return None


def check_names(*sources: Path, arguments: str = "") -> list[str]:
    """The checks that files define. arguments: a regular expression of what stands between their parentheses."""
    text = "".join(source.read_text() for source in sources)
    return re.findall(rf"^def {PREFIX}(\w+)\({arguments}\)", text, re.M)


def errors_by_rank(folder: Path, nproc: int) -> list[dict]:
    """Errors by check, of each rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nproc)]


def run_worker(nproc: int, worker: Path, folder: Path, checks: list[str], *, some=False, **options) -> list[dict]:
    """Launch a worker whose argument is a folder for its results; `errors_by_rank`, of exactly these checks.

    some: it has others, which are left out. options: of `torchrun`.
    """
    torchrun(nproc, worker, folder, *(["--only", *checks] if some else []), **options)
    errors = errors_by_rank(folder, nproc)
    assert all(set(of_rank) == set(checks) for of_rank in errors), [sorted(set(e) ^ set(checks)) for e in errors]
    return errors


def assert_passed(errors: list[dict], check: str) -> None:
    """The check passed on every rank; else the first rank's traceback."""
    found = [of_rank[check] for of_rank in errors]
    assert found == [None] * len(errors), next(error for error in found if error)
