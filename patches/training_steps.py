"""Tell a model's driver where Megatron's training is: the step, and the microbatch of each forward and backward.

A driver (`megatron_hybrid.mcore.driver`) is the attribute ``hq_driver`` of a model chunk; other models pass untouched.
The output of a forward carries its microbatch to its backward, which pipeline schedules run after the forwards of
later microbatches: recomputation inside it then draws what the forward drew.
"""

from __future__ import annotations

import functools
import inspect

import torch

from .framework import Change, Patch

DRIVER, MARK = "hq_driver", "hq_microbatch"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_TRAINING = "megatron.training.training"
# places in train_step's result: loss scaling skipped the optimizer's step; it stopped before that
_SKIPPED, _SHOULD_EXIT = 1, 3


def driver_of(model):
    """The driver of a model chunk, wrapped or not; None for a model that has none."""
    while model is not None:
        if (driver := getattr(model, "__dict__", {}).get(DRIVER)) is not None:
            return driver
        model = getattr(model, "module", None)
    return None


def around_train_step(original):
    bind = inspect.signature(original).bind

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        given = bind(*args, **kwargs).arguments
        driver = driver_of(given["model"][0])
        if driver is None:
            return original(*args, **kwargs)
        completed = skipped = False
        driver.begin_step(given.get("iteration"))
        try:
            result = original(*args, **kwargs)
            completed, skipped = not result[_SHOULD_EXIT], bool(result[_SKIPPED])
            return result
        finally:
            driver.end_step(completed, skipped)

    return train_step


def around_forward_step(original):
    bind = inspect.signature(original).bind

    @functools.wraps(original)
    def forward_step(*args, **kwargs):
        given = bind(*args, **kwargs).arguments
        driver, microbatch = driver_of(given["model"]), given.get("current_microbatch")
        if driver is None or microbatch is None:
            return original(*args, **kwargs)
        driver.forward(microbatch)
        output, num_tokens = original(*args, **kwargs)
        for tensor in output if isinstance(output, list) else [output]:
            if isinstance(tensor, torch.Tensor):
                setattr(tensor, MARK, (driver, microbatch))
        return output, num_tokens

    return forward_step


def around_backward_step(original):
    bind = inspect.signature(original).bind

    @functools.wraps(original)
    def backward_step(*args, **kwargs):
        output = bind(*args, **kwargs).arguments["output_tensor"]
        mark = getattr(output[0] if isinstance(output, list) else output, MARK, None)
        if mark is not None:
            driver, microbatch = mark
            driver.backward(microbatch)
        return original(*args, **kwargs)

    return backward_step


PATCH = Patch(
    name="training_steps",
    changes=(
        Change(f"{_TRAINING}:train_step", around_train_step),
        Change(f"{_SCHEDULES}:forward_step", around_forward_step),
        Change(f"{_SCHEDULES}:backward_step", around_backward_step),
    ),
    versions=">=0.19.2,<0.20",
    why="step rules, stochastic rounding and delayed scaling depend on the step and the microbatch, and Megatron tells "
    "modules only of the first microbatch",
    remove_when="Megatron has hooks around a training step and around each microbatch's forward and backward",
)
