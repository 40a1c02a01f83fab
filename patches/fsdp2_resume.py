"""Restore Adam's step count when a run with ``--use-torch-fsdp2`` is resumed.

Its tensors are loaded in place, and Megatron then skips ``load_state_dict`` of model and optimizer
(``skip_load_to_model_and_opt``). The count is no tensor: it starts again, and with it the bias correction, while the
moments go on.
"""

from __future__ import annotations

import functools
import inspect

from .framework import Change, Patch


def around_load_checkpoint(original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args, **kwargs):
        result = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if given.get("skip_load_to_model_and_opt") and given.get("optimizer") is not None:
            restore_steps(given["optimizer"], iteration=result[0])
        return result

    return load_checkpoint


def restore_steps(optimizer, iteration: int) -> None:
    """A step an iteration: Megatron stops at losses that are not finite, and FP16's skipped steps FSDP2 does not have."""
    from megatron.training import get_args

    args = get_args()
    if args.no_load_optim or args.finetune or not iteration:
        return
    for group in optimizer.param_groups:
        if group["params"] and not group.get("step"):
            group["step"] = iteration


_LOAD = "load_checkpoint"
PATCH = Patch(
    name="fsdp2_resume",
    changes=(
        Change(f"megatron.training.checkpointing:{_LOAD}", around_load_checkpoint),
        Change(f"megatron.training.training:{_LOAD}", around_load_checkpoint),
    ),
    versions=">=0.19.2,<0.20",
    why="a run with --use-torch-fsdp2 resumes with Adam's step count at 0, hence with another bias correction",
    remove_when="the optimizer's param_groups are loaded although skip_load_to_model_and_opt is set",
)
