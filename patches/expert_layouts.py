"""Let a checkpoint's optimizer state be loaded with another number of expert-parallel ranks.

Megatron keeps one optimizer for all parameters without expert parallelism, and one each for experts and the rest
with it. The tensors of a fully reshardable checkpoint have names that do not depend on that, but the parameter groups'
settings are stored an optimizer, and a load with another number of optimizers ends in "KeyError: 'optimizer'".
"""

from __future__ import annotations

import functools

from .framework import Change, Patch

_GROUPS, _EXPERT = "param_groups", "is_expert_parallel"


def regroup(loaded, num_optimizers: int):
    """A loaded state dict for this number of optimizers: what it is where the numbers agree.

    Settings are those of the saved groups; an expert group that was not saved apart takes those of the other.
    """
    if not isinstance(loaded, dict):
        return loaded
    apart = {key: value for key, value in loaded.items() if isinstance(key, int)}
    whole = {key: value for key, value in loaded.items() if not isinstance(key, int)}
    saved = [whole] if "optimizer" in whole else [part for _, part in sorted(apart.items()) if "optimizer" in part]
    if not saved or len(saved) == num_optimizers:
        return loaded
    groups = [group for part in saved for group in part["optimizer"][_GROUPS]]
    groups = [{**group, _EXPERT: not group.get(_EXPERT)} for group in groups] + groups  # those that were saved win
    settings = {**saved[0], "optimizer": {**saved[0]["optimizer"], _GROUPS: groups}}
    if num_optimizers == 1:
        return {**settings, **whole, "optimizer": settings["optimizer"]}
    return {index: {**settings, **apart.get(index, {})} for index in range(num_optimizers)}


def _regrouping(original):
    @functools.wraps(original)
    def load_state_dict(self, state_dict):
        return original(self, regroup(state_dict, len(self.chained_optimizers)))

    return load_state_dict


PATCH = Patch(
    name="expert_layouts",
    changes=(Change("megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict", _regrouping),),
    versions=">=0.19.2,<0.20",
    why="a checkpoint with optimizer state of expert-parallel ranks cannot be loaded without them, or the other way",
    remove_when="ChainedOptimizer.load_state_dict takes the state of another number of optimizers",
)
