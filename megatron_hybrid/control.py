"""The controller of a training loop: step rules, weight-cache windows, random counters, delayed scaling.

    ctl = mh.prepare(model, recipe, seed=0, num_microbatches=4)
    for i in range(1, steps + 1):
        ctl.begin_step(i)
        for j in range(4):
            ctl.microbatch(j)
            loss(model(batch[j])).backward()
        optimizer.step()
        ctl.end_step()

Megatron's training calls the same object through its hooks.
"""

from __future__ import annotations

import torch

from .linear import WeightCache
from .recipe import Recipe
from .runtime import LinearRuntime, RandomKeys


class Controller:
    """Made by `prepare`. Methods are cheap: they do nothing on the device for recipes that need nothing."""

    def __init__(self, runtimes: list[LinearRuntime], recipe: Recipe | None, seed: int, num_microbatches: int):
        self.runtimes = runtimes
        self.keys = RandomKeys(seed, num_microbatches)
        for runtime in runtimes:
            runtime.keys = self.keys
            runtime.weight_cache = WeightCache()
        if recipe is not None:
            self.switch(recipe)

    def begin_step(self, step: int, num_microbatches: int | None = None) -> None:
        """Start of step `step` (Megatron's 1-based iteration): step rules take effect, a cache window opens."""
        if num_microbatches is not None:
            self.keys.num_microbatches = num_microbatches
        for runtime in self.runtimes:
            runtime.set_step(step)
        self.keys.set(step, 0)
        self.invalidate()

    def microbatch(self, index: int) -> None:
        """Before the forward of microbatch `index` (0-based), and before its backward where others ran in between."""
        self.keys.set(self.keys.step, index)

    def end_step(self, group=None) -> None:
        """After the optimizer's step: the cache window closes, delayed scales move on.

        group: the process group whose ranks share the tensors; all amaxes are max-reduced in one collective.
        """
        self.invalidate()
        states = [pair for runtime in self.runtimes for pair in runtime.states()]
        if not states:
            return
        if group is not None:
            amaxes = torch.stack([state.history[0] for _, state in states])
            torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, group=group)
            for (_, state), amax in zip(states, amaxes):
                state.history[0] = amax
        for fmt, state in states:
            state.update(fmt)

    def invalidate(self) -> None:
        """Drop cached quantized weights: call it after writing to a weight inside a step."""
        for runtime in self.runtimes:
            runtime.weight_cache.invalidate()

    def switch(self, recipe: Recipe | str) -> None:
        """Change the recipe from the next forward on. Every module is planned and checked before any is changed."""
        recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
        recipe.check_matches([r.role for r in self.runtimes])
        for runtime in self.runtimes:
            runtime.check(recipe)
        for runtime in self.runtimes:
            runtime.replan(recipe)


def runtimes_of(model: torch.nn.Module) -> list[LinearRuntime]:
    return [m for m in model.modules() if isinstance(m, LinearRuntime)]


def prepare(model: torch.nn.Module, recipe: Recipe | str | None = None, seed: int = 0, num_microbatches: int = 1):
    """A `Controller` over every quantized module of `model`.

    recipe: gives all of them this recipe; None keeps what they were built with. seed: of stochastic rounding,
    32 bits. Unnamed modules take their path in the model as name. Raises ``ValueError`` when the model has no
    quantized module, `RecipeError` for a rule that matches nothing, `PlanError` for a plan that cannot run.
    """
    named = [(n.removesuffix(".hq"), m) for n, m in model.named_modules() if isinstance(m, LinearRuntime)]
    if not named:
        raise ValueError("prepare: the model has no quantized module (HybridLinear and its kin)")
    for path, runtime in named:
        runtime.name_if_unnamed(path)
    if recipe is not None and not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe)
    return Controller([m for _, m in named], recipe, seed, num_microbatches)
