"""Give Megatron an Adam that can resume, where neither Transformer Engine nor Apex is installed.

Megatron then falls back to torch's AdamW, and its distributed optimizer cannot load a checkpoint with that:
the state dict of a fresh optimizer fails an assertion, all parameters share one ``step`` tensor, the loaded
step is overwritten with a stale one, or a KeyError 'step' is raised, depending on the checkpoint's format.
Our FusedAdam has Apex's interface; Megatron is told that Apex's optimizer is there.
"""

from __future__ import annotations

import importlib

from megatron_hybrid.optimizer import FusedAdam

from .framework import Change, Patch, value

_OPTIMIZER = "megatron.core.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"


def _not_needed() -> str | None:
    if not importlib.import_module(_OPTIMIZER).USING_PYTORCH_OPTIMIZER:
        return "Transformer Engine or Apex brings a fused Adam"
    return None


PATCH = Patch(
    name="fused_adam",
    changes=(
        Change(f"{_OPTIMIZER}:Adam", value(FusedAdam)),
        Change(f"{_OPTIMIZER}:USING_PYTORCH_OPTIMIZER", value(False)),
        Change(f"{_DISTRIBUTED}:Adam", value(FusedAdam)),
        Change(f"{_DISTRIBUTED}:HAVE_APEX_OR_TE", value(True)),
        Change(f"{_DISTRIBUTED}:USING_APEX_OPTIMIZER", value(True)),
    ),
    versions=">=0.19.2,<0.20",
    why="with torch's AdamW the distributed optimizer cannot load its own checkpoint, or resumes at a wrong step",
    remove_when="a run with torch's AdamW resumes exactly in every checkpoint format (tests/distributed tells)",
    not_needed=_not_needed,
)
