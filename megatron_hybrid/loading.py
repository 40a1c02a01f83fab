"""A sign of life before imports that take seconds."""

from __future__ import annotations

import os
import sys

LIBRARIES = {"torch": "torch", "megatron.core": "Megatron"}


def say_loading(*modules: str) -> None:
    """Say on stderr, on rank 0, which of these modules are about to be loaded; nothing where all of them are."""
    missing = [LIBRARIES[name] for name in modules if name not in sys.modules]
    if missing and int(os.environ.get("RANK", "0")) == 0:
        print(f"[megatron_hybrid] loading {' and '.join(missing)} ...", file=sys.stderr, flush=True)
