"""Changes to packages that we build on: each declared, versioned, reversible. README.md has the table.

Importing this changes nothing. :func:`apply_all` mends Megatron's faults in an installation without
Transformer Engine and Apex, and adds the hooks that it lacks; ``cpu_device.install()`` is separate, and only for
machines without a GPU.
"""

from __future__ import annotations

import importlib

from .framework import Change, Patch, PatchError, Status
from .quiet import quiet_missing_te_warnings

__all__ = [
    "PATCHES",
    "Change",
    "Patch",
    "PatchError",
    "Status",
    "apply_all",
    "quiet_missing_te_warnings",
    "revert_all",
    "statuses",
]

_MODULES = (  # in the order of application
    "compile_helpers",
    "expert_layouts",
    "first_moments",
    "fsdp2_resume",
    "fsdp_experts",
    "fused_adam",
    "load_fp32",
    "megatron_fsdp",
    "moe_permutation",
    "multi_tensor",
    "offload_on_cpu",
    "offload_resume",
    "quantized_params",
    "recompute_outputs",
    "save_errors",
    "save_process",
    "training_steps",
)
PATCHES: dict[str, Patch] = {name: importlib.import_module(f".{name}", __name__).PATCH for name in _MODULES}


def apply_all(names=None) -> list[Status]:
    """Apply the named patches (all, without names), or raise :class:`PatchError` and apply none of them."""
    selected = _select(names)
    with quiet_missing_te_warnings():
        for patch in selected:
            patch.check()
        return [patch.apply() for patch in selected]


def revert_all(names=None) -> list[Status]:
    """Take the named patches (all, without names) back, the last applied first."""
    return [patch.revert() for patch in reversed(_select(names))]


def statuses() -> list[Status]:
    """Every patch's state, for a table. Changes nothing, but imports Megatron."""
    with quiet_missing_te_warnings():
        return [patch.status() for patch in PATCHES.values()]


def _select(names) -> list[Patch]:
    if names is None:
        return list(PATCHES.values())
    unknown = [name for name in names if name not in PATCHES]
    if unknown:
        raise ValueError(f"unknown patch {', '.join(unknown)}; there are: {', '.join(PATCHES)}")
    return [patch for name, patch in PATCHES.items() if name in names]
