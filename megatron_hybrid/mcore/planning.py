"""A recipe's plans for a whole model, all pipeline stages together, from its sizes alone. Imports no Megatron.

`--hq-explain` and `megatron-hybrid explain` both print `explained`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..distributed.tp import column_sharding, row_sharding
from ..explain import Table, explain
from ..explain_groups import explain_alike, wrapped
from ..formats import DIRECTIONS
from ..gemm import DeviceKind
from ..grouped_at_once import build, why_not
from ..model_shape import LinearShape, ModelShape
from ..plan import GRAD_OUTPUT, ORIGINAL, PAYLOAD, WEIGHT, GemmPlan, build_plan
from ..recipe import QUANTIZED, Recipe
from ..roles import DPA, ModuleRole
from ..sharding import HIGH_PRECISION, Sharding, block_along
from .modules import OUTPUT_LAYER, enumerate_modules


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


def sharding(role: ModuleRole, shape: ModelShape | None) -> Sharding | None:
    """How the ranks of a tensor-parallel group split a linear's operands; None for one rank and for unknown sizes."""
    size = None if shape is None else shape.linear(role)
    ranks = 1 if size is None else shape.ranks(role)
    if ranks == 1:
        return None
    leaf, sequence = role.name.rpartition(".")[2], shape.sequence_parallel and role.expert is None
    if size.gathered == GRAD_OUTPUT:
        return row_sharding(ranks, size.in_features * ranks, sequence_parallel=sequence)
    pieces = 2 if leaf == "linear_fc1" and shape.swiglu else 1
    return column_sharding(ranks, size.out_features * ranks, sequence_parallel=sequence, pieces=pieces)


def plan_model(
    recipe: Recipe, config, device, *, step: int = 1, shape: ModelShape | None = None
) -> dict[str, GemmPlan]:
    """Plans of all linears of the whole model at a step, by `modules_alike`'s name. Raises `PlanError` for what
    cannot run here. shape: sizes and ranks, without which plans are those of one rank."""
    casts_in_backward = shape is not None and shape.shards_weights and recipe.weights != QUANTIZED
    save_weight = ORIGINAL if casts_in_backward else PAYLOAD
    return {
        label: build_plan(resolved, label, device, save_weight=save_weight, sharding=sharding(roles[0], shape))
        for label, roles, resolved in modules_alike(recipe, config, step)
    }


def living(recipe: Recipe, config, *, own_head: bool = True) -> dict[str, list[int | None]]:
    """The linears of the whole model whose weights live quantized, by name: the numbers of those of their experts that do,
    None for a linear that is no expert's. own_head: whether the output layer has a weight of its own."""
    found: dict[str, list[int | None]] = {}
    for role in enumerate_modules(config) if recipe.weights == QUANTIZED else ():
        if role.module_type == DPA or (role.lm_head and not own_head):
            continue
        row, column, _ = recipe.resolve(role).quantizer(WEIGHT)
        if row.is_quantized or column.is_quantized:
            found.setdefault(role.name, []).append(role.expert)
    return found


def plans_by_step(recipe: Recipe, config, device, shape: ModelShape | None = None) -> dict[int, dict[str, GemmPlan]]:
    """`plan_model` at the first step and at every one from which other rules hold."""
    steps = (1, *recipe.change_steps())
    return {step: plan_model(recipe, config, device, step=step, shape=shape) for step in steps}


def high_precision_gathers(plans: dict[str, GemmPlan], rows: int) -> dict[str, list[str]]:
    """What is gathered in high precision though it is quantized, as a sentence, and of which linears.

    rows: of a sequence-parallel rank in a microbatch.
    """
    found: dict[str, list[str]] = {}
    for name, plan in plans.items():
        for direction in DIRECTIONS if plan.gathered else ():
            if plan.gather(direction, rows) == HIGH_PRECISION:
                fmt = getattr(plan.quantizers[plan.gathered], direction)
                block = block_along(fmt, direction, 0)
                what = f"{plan.gathered}.{direction} {fmt} is gathered in high precision ({rows} rows a rank"
                found.setdefault(f"{what} are not whole blocks of {block})", []).append(name)
    return found


def cut_shards(plans: dict[str, GemmPlan]) -> dict[str, list[str]]:
    """Operands whose scale blocks end at shard bounds, and of which linears; see `GemmPlan.cut_shards`."""
    found: dict[str, list[str]] = {}
    for name, plan in plans.items():
        for what in plan.cut_shards():
            found.setdefault(what, []).append(name)
    return found


def headline(recipe: Recipe, device: DeviceKind) -> str:
    """What `explained` is about: which recipe, on which device."""
    return f"recipe {recipe.name} ({recipe.fingerprint[:12]}) on {device}"


def explained(
    at_step: dict[int, dict[str, GemmPlan]], shape: ModelShape, *, per_layer: bool = False
) -> Iterator[str | Table]:
    """What is printed: layers that are alike together, for each step at which the rules change, under a line that says
    from when on. per_layer: a row for every linear and gemm instead."""
    roles = {role.name: role for role in enumerate_modules(shape)}  # of experts one: they have one size
    for step, plans in at_step.items():
        if len(at_step) > 1:
            yield f"from iteration {step} on:"
        sizes = {label: _size(label, plan, roles, shape) for label, plan in plans.items()}
        yield (explain if per_layer else explain_alike)(list(plans.items()), sizes)
        for note in grouped_notes(plans, sizes):
            yield "\n".join(wrapped(note))


def _size(label: str, plan: GemmPlan, roles: dict[str, ModuleRole], shape: ModelShape) -> LinearShape | None:
    """Of a row of `modules_alike`; its experts are those of the rank that has most of them. Payloads of the output layer
    stay where it is Megatron-FSDP that brings them: it is no unit there."""
    name, _, experts = label.partition(" experts ")
    size = shape.linear(roles[name])
    if size is not None and name == OUTPUT_LAYER and plan.saved[WEIGHT] != ORIGINAL:
        size = replace(size, sharded_weight=False)
    if size is None or not experts:
        return size
    first, last = map(int, experts.split(":"))
    local = (shape.num_experts or 1) // shape.expert_model_parallel_size
    return replace(size, experts=min(last - first, max(local, 1)))


def grouped_notes(plans: dict[str, GemmPlan], sizes: dict) -> Iterator[str]:
    """How the experts of grouped linears run together, or why one by one; a line for all that do alike.

    What runs expert by expert needs the sizes of groups on the host; see mcore/moe_layer.py for where they are.
    """
    found: dict[str, list[str]] = {}
    several = Counter(name.partition(" experts ")[0] for name in plans)
    for name, plan in plans.items():
        size = sizes.get(name)
        if " experts " not in name or size is None:
            continue
        shape = size.out_features, size.in_features
        mixed = several[name.partition(" experts ")[0]] > 1
        why = "experts have different plans" if mixed else why_not([plan], shape)
        how = f"one by one: {why}" if why else f"at once: {build([plan], shape, torch.bfloat16)}"
        found.setdefault(how, []).append(name)
    for how, names in found.items():
        yield f"experts run {how} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
