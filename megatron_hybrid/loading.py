"""What commands and launchers say besides their work: a sign of life before imports that take seconds, and warnings."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator

LIBRARIES = {"torch": "torch", "megatron.core": "Megatron"}


def say_loading(*modules: str) -> None:
    """Say on stderr, on rank 0, which of these modules are about to be loaded; nothing where all of them are."""
    missing = [LIBRARIES[name] for name in modules if name not in sys.modules]
    if missing and int(os.environ.get("RANK", "0")) == 0:
        print(f"[megatron_hybrid] loading {' and '.join(missing)} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def recipe_warnings_as_lines() -> Iterator[None]:
    """Warnings about a recipe are a line on stderr, on rank 0, without the place in this package that gave them."""
    from .recipe_source import RecipeWarning

    others = warnings.showwarning

    def show(message, category, *place, **where) -> None:
        if not issubclass(category, RecipeWarning):
            others(message, category, *place, **where)
        elif int(os.environ.get("RANK", "0")) == 0:
            print(f"warning: {message}", file=sys.stderr, flush=True)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = others
