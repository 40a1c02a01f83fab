"""Megatron's wheel has the compiled dataset helpers but not the Makefile that it insists on running.

``initialize_megatron`` runs ``make`` in its datasets folder on rank 0 and exits the process when that fails.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from .framework import Change, Patch, value


def _compiled_already() -> None:
    """Nothing to compile: ``helpers_cpp`` came with the wheel."""


def _not_needed() -> str | None:
    spec = importlib.util.find_spec("megatron.core.datasets")
    folder = Path(spec.submodule_search_locations[0])
    if (folder / "Makefile").exists():
        return f"{folder} has its Makefile"
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as error:
        return f"helpers_cpp is not built either ({error}): Megatron must compile it"
    return None


PATCH = Patch(
    name="compile_helpers",
    changes=(Change("megatron.core.datasets.utils:compile_helpers", value(_compiled_already)),),
    versions=">=0.19.2,<0.20",
    why="the wheel lacks datasets/Makefile, so initialize_megatron's call of make ends every run on rank 0",
    remove_when="the wheel ships the Makefile, or Megatron skips make when helpers_cpp imports",
    not_needed=_not_needed,
)
