"""A worker's checks on its ranks, and their outcome for the tests that started it.

A worker calls `run_checks` on what it defines; a test launches it with `run_worker`, once a module, and asserts each
check by its name with `assert_passed`.
"""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path

from launch import torchrun

PREFIX = "check_"


def run_checks(folder, *namespaces: dict, leave_out=(), only=()) -> None:
    """Call every ``check_*`` function of the namespaces on this rank; FOLDER/<rank>.json: check -> traceback or None.

    leave_out: names of functions that are no checks. only: names without the prefix; all, when empty.
    """
    import torch.distributed as dist

    errors = {}
    for name, check in [item for namespace in namespaces for item in namespace.items()]:
        short = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or name in leave_out or (only and short not in only):
            continue
        errors[short] = None
        try:
            check()
        except Exception:
            errors[short] = traceback.format_exc()
        dist.barrier()
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(errors))


def check_names(*sources: Path, arguments: str = "") -> list[str]:
    """The checks that files define. arguments: a regular expression of what stands between their parentheses."""
    text = "".join(source.read_text() for source in sources)
    return re.findall(rf"^def {PREFIX}(\w+)\({arguments}\)", text, re.M)


def errors_by_rank(folder: Path, nproc: int) -> list[dict]:
    """Errors by check, of each rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nproc)]


def run_worker(nproc: int, worker: Path, folder: Path, checks: list[str], **options) -> list[dict]:
    """Launch a worker whose argument is a folder for its results; `errors_by_rank`, of exactly these checks.

    options: of `torchrun`.
    """
    torchrun(nproc, worker, folder, **options)
    errors = errors_by_rank(folder, nproc)
    assert all(set(of_rank) == set(checks) for of_rank in errors), [sorted(set(e) ^ set(checks)) for e in errors]
    return errors


def assert_passed(errors: list[dict], check: str) -> None:
    """The check passed on every rank; else the first rank's traceback."""
    found = [of_rank[check] for of_rank in errors]
    assert found == [None] * len(errors), next(error for error in found if error)
