"""A recipe's plans for a whole model, all pipeline stages together, from its sizes alone. Imports no Megatron.

`--hq-explain` and `megatron-hybrid explain` both print `explained`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..explain import Table, explain
from ..model_shape import ModelShape
from ..plan import GemmPlan, build_plan
from ..recipe import Recipe
from ..roles import DPA, ModuleRole
from .modules import enumerate_modules


def with_bf16_edges(recipe: Recipe, config) -> Recipe:
    """The recipe with Megatron's ``--first-last-layers-bf16`` as a rule before the others."""
    if not config.first_last_layers_bf16:
        return recipe
    edges = {"first": config.num_layers_at_start_in_bf16, "last": config.num_layers_at_end_in_bf16}
    layers = ",".join(f"{edge}:{count}" for edge, count in edges.items() if count)
    return recipe.with_first_rule({"layers": layers}, "high_precision") if layers else recipe


def modules_alike(recipe: Recipe, config, step: int = 1) -> Iterator[tuple[str, list[ModuleRole], object]]:
    """(name, roles, what the recipe says of them) of the whole model's linears at a step.

    Experts of a layer that follow each other with the same plan are one entry, named with their numbers.
    """
    by_name: dict[str, list] = {}
    for role in enumerate_modules(config):
        if role.module_type == DPA:
            continue
        resolved, runs = recipe.resolve(role, step=step), by_name.setdefault(role.name, [])
        if runs and replace(runs[-1][1], module=resolved.module) == resolved:
            runs[-1][0].append(role)
        else:
            runs.append(([role], resolved))
    for runs in by_name.values():
        for roles, resolved in runs:
            yield _label(roles), roles, resolved


def _label(roles: list[ModuleRole]) -> str:
    """The module's name, for experts with their numbers as a recipe's rule would name them."""
    if roles[0].expert is None:
        return roles[0].name
    return f"{roles[0].name} experts {roles[0].expert}:{roles[-1].expert + 1}"


def plan_model(recipe: Recipe, config, device, *, step: int = 1) -> dict[str, GemmPlan]:
    """Plans of all linears of the whole model at a step, by `modules_alike`'s name. Raises `PlanError` for what
    cannot run here."""
    return {label: build_plan(resolved, label, device) for label, _, resolved in modules_alike(recipe, config, step)}


def plans_by_step(recipe: Recipe, config, device) -> dict[int, dict[str, GemmPlan]]:
    """`plan_model` at the first step and at every one from which other rules hold."""
    return {step: plan_model(recipe, config, device, step=step) for step in (1, *recipe.change_steps())}


def explained(at_step: dict[int, dict[str, GemmPlan]], shape: ModelShape) -> Iterator[str | Table]:
    """What is printed: a table for each step at which the rules change, under a line that says from when on."""
    roles = {role.name: role for role in enumerate_modules(shape)}  # of experts one: they have one size
    for step, plans in at_step.items():
        if len(at_step) > 1:
            yield f"from iteration {step} on:"
        sizes = {name: shape.linear(roles[name.partition(" ")[0]]) for name in plans if name.partition(" ")[0] in roles}
        yield explain(list(plans.items()), sizes)
