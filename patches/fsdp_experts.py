"""Let Megatron-FSDP's checkpoints hold grouped experts whose weights are one parameter.

Megatron takes every expert's weight for a parameter of its own. What stands for them, and under which names, is
`megatron_hybrid.mcore.fsdp_experts`. Models without such experts pass untouched.
"""

from __future__ import annotations

from .framework import Change, Patch
from .megatron_fsdp import not_needed, ours

_EXPERTS = "megatron_hybrid.mcore.fsdp_experts"

PATCH = Patch(
    name="fsdp_experts",
    changes=(
        Change(
            "megatron.training.checkpointing:preprocess_fsdp_dtensor_state_dict", ours(_EXPERTS, "around_preprocess")
        ),
        Change(
            "megatron.core.transformer.fsdp_dtensor_checkpoint:get_expert_index_from_key",
            ours(_EXPERTS, "around_expert_index"),
        ),
    ),
    versions=">=0.19.2,<0.20",
    why="experts whose weights are one parameter have no names of their own, by which fsdp_dtensor checkpoints tell them "
    "apart: the save fails",
    remove_when="parameters say themselves how a checkpoint takes them apart",
    not_needed=not_needed,
)
