"""Give an optimizer its moments before loss scaling lets it take its first step, so that every checkpoint has them.

With ``--fp16`` the first steps usually overflow and are skipped. Adam makes its moments when it steps, and Megatron's
checkpoints before then fail in the save, or, worse, are written without them and cannot be loaded. Zeros are what the
first step would start from.
"""

from __future__ import annotations

import functools

import torch

from .framework import Change, Patch


def around_prepare(original):
    """`prepare_grads`, after which there are moments wherever loss scaling may skip the step."""

    @functools.wraps(original)
    def prepare_grads(self):
        found_inf = original(self)
        if self.grad_scaler is not None and not self.is_stub_optimizer and not self.optimizer.state:
            make_moments(self)
        return found_inf

    return prepare_grads


@torch.no_grad()
def make_moments(mixed_precision) -> None:
    """Moments of zero, by what Megatron fills an optimizer before a load with; of those that it has on two devices too."""
    inner = mixed_precision.optimizer
    if mixed_precision.init_state_fn is not None:
        mixed_precision.init_state_fn(inner, mixed_precision.config)
    elif hasattr(inner, "sub_optimizers"):
        for optimizer in inner.sub_optimizers:
            _make_adams(optimizer)
        inner._sync_sub_optimizers_state_to_hdo()


def _make_adams(adam) -> None:
    """The state of torch's Adam, or of one that counts steps in its groups, before its first step; nothing of another
    optimizer."""
    for group in adam.param_groups:
        for param in group["params"] if "betas" in group else ():
            state = adam.state[param]
            state |= {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            if isinstance(adam, torch.optim.Adam):
                state["step"] = torch.zeros((), dtype=torch.float32)


PATCH = Patch(
    name="first_moments",
    changes=(Change("megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.prepare_grads", around_prepare),),
    versions=">=0.19.2,<0.20",
    why="a checkpoint before the first step that loss scaling does not skip fails, or is written without moments and cannot be loaded",
    remove_when="a run with --fp16 saves and resumes exactly before its first finite step, in every checkpoint format",
)
