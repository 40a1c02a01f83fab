"""Selective recomputation that discards outputs (``--recompute-modules layernorm`` and others) without Transformer Engine.

Its checkpoint takes ``fp8=False`` for FP8, since that is not None, and asks Transformer Engine for a state. And it
gives the recomputed values to the discarded tensors by a C++ extension that every run compiles, with ninja, at its first
backward; here the storage is filled again, a copy more.
"""

from __future__ import annotations

import functools

from .framework import Change, Patch, value


def around_init(original):
    @functools.wraps(original)
    def __init__(self, fp8=None):
        original(self, fp8 or None)

    return __init__


def fill(output, recomputed) -> None:
    """The discarded storage of `output`, and so of all its views, gets the recomputed bytes; no version moves."""
    storage, source = output.untyped_storage(), recomputed.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)


_RANDOM = "megatron.core.tensor_parallel.random"
PATCH = Patch(
    name="recompute_outputs",
    changes=(
        Change(f"{_RANDOM}:CheckpointWithoutOutput.__init__", around_init),
        Change(f"{_RANDOM}:_get_share_storage", value(lambda: fill)),
    ),
    versions=">=0.19.2,<0.20",
    why="--recompute-modules layernorm fails without Transformer Engine (NameError), and compiles C++ in every run",
    remove_when="CheckpointWithoutOutput(fp8=False) is not FP8, and storages are shared without a compiler",
)
