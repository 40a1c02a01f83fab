"""Let a run with ``--optimizer-cpu-offload`` resume exactly.

Megatron's optimizer of two devices has optimizers inside, with states of their own. The default checkpoint format's load
sets the outer state alone, its step count to a stale one, and after any load the outer groups' ``step``, which no step
advances, is what the inner Adam on the device is told before each.
"""

from __future__ import annotations

import functools

import torch

from .framework import Change, Patch

STEP = "step"


def _is_offloaded(distributed) -> bool:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    return isinstance(distributed.optimizer, HybridDeviceOptimizer)


def _without_steps(state):
    """The same nested state, but for step counts: the groups have brought the right ones."""
    if isinstance(state, dict):
        return {name: _without_steps(value) for name, value in state.items() if name != STEP}
    return [_without_steps(value) for value in state] if isinstance(state, list) else state


def around_load(original):
    @functools.wraps(original)
    def load_parameter_state_from_dp_reshardable(self, state_dict):
        if not _is_offloaded(self):
            return original(self, state_dict)
        original(self, _without_steps(state_dict))
        with torch.no_grad():
            return self.optimizer._sync_hdo_state_to_sub_optimizers()

    return load_parameter_state_from_dp_reshardable


def around_sync(original):
    @functools.wraps(original)
    def _sync_sub_optimizers_state_to_hdo(self):
        original(self)
        for inner in self.sub_optimizers:
            for group in inner.param_groups:
                if STEP not in group:
                    continue
                param = self.inner_param_to_orig_param[group["params"][0]]
                for outer in self.param_groups:
                    if any(param is p for p in outer["params"]):
                        outer[STEP] = group[STEP]

    return _sync_sub_optimizers_state_to_hdo


_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_TWO_DEVICES = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
PATCH = Patch(
    name="offload_resume",
    changes=(
        Change(f"{_DISTRIBUTED}.load_parameter_state_from_dp_reshardable", around_load),
        Change(f"{_TWO_DEVICES}._sync_sub_optimizers_state_to_hdo", around_sync),
    ),
    versions=">=0.19.2,<0.20",
    why="a run with --optimizer-cpu-offload resumes with fresh moments, or with Adam's step count at the resumed step for ever",
    remove_when="such a run resumes exactly in every checkpoint format (tests/distributed/test_optimizer_offload.py tells)",
)
