"""Let the distributed optimizer load its checkpoint when the model itself is FP32.

The shards that it optimizes are then views of the parameters, and it copies into them with autograd on: "a view
of a leaf Variable that requires grad is being used in an in-place operation". In BF16 the shards are copies.
"""

from __future__ import annotations

import torch

from .framework import Change, Patch

PATCH = Patch(
    name="load_fp32",
    changes=(
        Change(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
            lambda original: torch.no_grad()(original),
        ),
    ),
    versions=">=0.19.2,<0.20",
    why="an FP32 run with the distributed optimizer cannot be resumed from the default checkpoint format",
    remove_when="load_parameter_state_from_dp_reshardable runs under no_grad, as its fully_reshardable twin does",
)
