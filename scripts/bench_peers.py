"""What benchmarks share of their peers: whether Transformer Engine is there, and how Megatron is asked for its layers.

A peer runs beside ours in the same rounds, on the same values, and is checked as ours are. Import nothing of Megatron's
before the benchmark has said how (bench_step.py, bench_moe.py).
"""

from __future__ import annotations

import contextlib
import importlib

TE = "te"
HISTORY = 1024  # of amaxes, as in our fp8_delayed

# what a recipe of ours is in Megatron's configuration, its formats and its history too; other recipes have no peer
TE_RECIPES = {
    "bf16": {},
    "fp8_delayed": {
        "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": HISTORY, "fp8_amax_compute_algo": "max",
    },
    "fp8_current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8_block": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}  # fmt: skip


def te_missing() -> str | None:
    """Why Transformer Engine cannot be imported; None where it can."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        return f"not importable: {error}"
    return None


def of_peer(recipe: str) -> str:
    """The row of Transformer Engine beside this recipe's."""
    return f"TE {recipe}"


@contextlib.contextmanager
def swapped(module, values: dict):
    """These attributes of the module inside, what they were outside."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)
