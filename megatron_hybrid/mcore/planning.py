"""A recipe's plans for a whole model, all pipeline stages together, from its sizes alone. Imports no Megatron.

`--hq-explain` and `megatron-hybrid explain` both print `explained`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..explain import Table, explain
from ..model_shape import ModelShape
from ..plan import GemmPlan, build_plan
from ..recipe import Recipe
from ..roles import DPA
from .modules import enumerate_modules


def with_bf16_edges(recipe: Recipe, config) -> Recipe:
    """The recipe with Megatron's ``--first-last-layers-bf16`` as a rule before the others."""
    if not config.first_last_layers_bf16:
        return recipe
    edges = {"first": config.num_layers_at_start_in_bf16, "last": config.num_layers_at_end_in_bf16}
    layers = ",".join(f"{edge}:{count}" for edge, count in edges.items() if count)
    return recipe.with_first_rule({"layers": layers}, "high_precision") if layers else recipe


def plan_model(recipe: Recipe, config, device, *, step: int = 1) -> dict[str, GemmPlan]:
    """Plans of all linears of the whole model at a step, by name. Raises `PlanError` for what cannot run here."""
    return {
        role.name: build_plan(recipe.resolve(role, step=step), role.name, device)
        for role in enumerate_modules(config)
        if role.module_type != DPA
    }


def plans_by_step(recipe: Recipe, config, device) -> dict[int, dict[str, GemmPlan]]:
    """`plan_model` at the first step and at every one from which other rules hold."""
    return {step: plan_model(recipe, config, device, step=step) for step in (1, *recipe.change_steps())}


def explained(at_step: dict[int, dict[str, GemmPlan]], shape: ModelShape) -> Iterator[str | Table]:
    """What is printed: a table for each step at which the rules change, under a line that says from when on."""
    roles = {role.name: role for role in enumerate_modules(shape)}
    for step, plans in at_step.items():
        if len(at_step) > 1:
            yield f"from iteration {step} on:"
        yield explain(list(plans.items()), {name: shape.linear(roles[name]) for name in plans if name in roles})
