"""From arguments to a checked run: the recipe resolved for the whole model, shown, recorded and handed to Megatron."""

from __future__ import annotations

import math
from collections import Counter

import torch

from ..explain import Table
from ..gemm import GEMMS, DeviceKind
from ..model_shape import ModelShape
from ..observe import run_record
from ..plan import GemmPlan, PlanError, describe_operands
from ..recipe import Recipe
from ..recipe_callable import load_recipe
from . import checkpoint, graphs, host_optimizer, metrics, recipes, validation
from .errors import megatrons_checks
from .planning import cut_shards, explained, headline, high_precision_gathers, plans_by_step
from .spec import HybridLayerSpec

_NAMED = 3  # modules named in a message


def before_validation(args) -> Recipe:
    """Our checks that must come before Megatron's, whose answer would be an assertion's traceback."""
    validation.check_counts(args)
    validation.check_flags(args)
    validation.check_ranks(args)
    recipe = load_recipe(args.hq_recipe)
    if args.hq_backward is not None:
        recipe = recipe.with_backward(args.hq_backward)
    validation.check_data(args)
    if args.reset_attention_mask:
        args.create_attention_mask_in_dataloader = True  # then the mask is more than causal
    return recipe


def after_validation(args, recipe: Recipe) -> None:
    """Resolve the recipe for the model of validated arguments and hand it over as ``args.spec``.

    Raises `UserError`, `RecipeError` or `PlanError` for whatever cannot run; ends the process for --hq-explain.
    """
    from megatron.training.argument_utils import core_transformer_config_from_args

    graphs.choose_rng_tracker(args)
    fused = False if args.hq_plain_layers else None
    spec = HybridLayerSpec(recipe, attention_zeroed=args.hq_demo_disable_attention, fused=fused)
    with megatrons_checks():
        config = core_transformer_config_from_args(args)
    config.hybrid_layer_pattern = args.hybrid_layer_pattern
    recipe = spec.recipe_for(config)
    validation.check_quantized_weights(args, recipe)
    host_optimizer.refuse_unsupported(args)
    device = training_device(args.local_rank)
    shape = ModelShape.of(vars(args), "the arguments")
    at_step = plans_by_step(recipe, config, device, shape)
    validation.check_param_gather(recipe, at_step)
    graphs.check_run(args, at_step)
    if args.hq_explain:
        _say(args, headline(recipe, DeviceKind.of(device)))
        for part in explained(at_step, shape):
            _say(args, part)
        raise SystemExit(0)
    if args.hq_strict:
        for plans in at_step.values():
            check_strict(plans, shape.rows_of_a_rank)
    validation.check_outputs(args)
    lines = summary(recipe, at_step, shape.rows_of_a_rank)
    for line in (*lines, *checkpoint.check_resume(args, recipe, config, switch=args.hq_switch_recipe)):
        _say(args, line)
    for line in recipe.late_rules(args.train_iters or math.inf):
        _say(args, f"warning: {line}")
    _write_record(args, recipe, lines, device)
    checkpoint.record(args, recipe, config)
    recipes.register(args.hq_recipe, spec)
    args.spec = [validation.RECIPES_MODULE, args.hq_recipe]
    if args.hq_metrics_file:
        metrics.install(args.hq_metrics_file)
    if args.hq_offload_optimizer:
        host_optimizer.patch().apply()


def _write_record(args, recipe: Recipe, lines: list[str], device) -> None:
    """What this run is, beside its numbers; by the last rank, which writes those too."""
    path = args.hq_metrics_file or (validation.statistics_path(args) if args.hq_stats_interval else None)
    if path is not None and args.rank == args.world_size - 1:
        run_record.write(path, recipe, lines, vars(args), device)


def _say(args, text) -> None:
    if args.rank == 0:
        print(text, flush=True)


def training_device(local_rank: int) -> torch.device:
    from ..patches import cpu_device

    if cpu_device.is_installed() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def check_strict(plans: dict[str, GemmPlan], rows: int) -> None:
    """Raise `PlanError` for emulated gemms and for gathers in high precision of what is quantized afterwards.

    rows: of a sequence-parallel rank in a microbatch.
    """
    problems = []
    for gemm in GEMMS:
        names = [name for name, plan in plans.items() if getattr(plan, gemm).runs == "emulated"]
        if names:
            step = getattr(plans[names[0]], gemm)
            problems.append(f"{gemm} of {_some(names)} is emulated on {step.pair.device} ({step.pair.a} x {step.pair.b})")
    for what, names in high_precision_gathers(plans, rows).items():
        problems.append(f"{what}, of {_some(names)}")
    if problems:
        raise PlanError("--hq-strict: " + "; ".join(problems))


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def summary(recipe: Recipe, at_step: dict[int, dict[str, GemmPlan]], rows: int) -> list[str]:
    """The lines printed at the start of a run: the recipe, and what runs how, from each step with other rules on.

    rows: of a sequence-parallel rank in a microbatch.
    """
    description = f": {recipe.description}" if recipe.description else ""
    lines = [f"> recipe {recipe.name} ({recipe.fingerprint[:12]}){description}"]
    for step, plans in at_step.items():
        lines.append("> " + (f"from iteration {step} on: " if len(at_step) > 1 else "") + _counts(plans))
        lines += [f">   {line}" for line in str(_table(plans)).splitlines()]
    for what, names in _at_any_step(at_step, lambda plans: high_precision_gathers(plans, rows)).items():
        lines.append(f"> note: {what}, of {len(names)} linears")
    for what, names in _at_any_step(at_step, cut_shards).items():
        lines.append(f"> note: blocks of {what} end at shard bounds, of {len(names)} linears")
    return lines


def _table(plans: dict[str, GemmPlan]) -> Table:
    """A row for each kind of gemm that the linears run, and how many run it."""
    rows: Counter[tuple[str, ...]] = Counter()
    for gemm in GEMMS:
        for plan in plans.values():
            step = getattr(plan, gemm)
            rows[gemm, *describe_operands(step.pair), step.backend.name, step.runs] += 1
    header = ("gemm", "operand A", "operand B", "backend", "runs", "linears")
    return Table(header, tuple((*row, str(count)) for row, count in rows.items()))


def _at_any_step(at_step, find) -> dict[str, set[str]]:
    """What `find` says of plans -> the linears of which it says so at some step."""
    found: dict[str, set[str]] = {}
    for plans in at_step.values():
        for what, names in find(plans).items():
            found.setdefault(what, set()).update(names)
    return found


def _counts(plans: dict[str, GemmPlan]) -> str:
    quantized = sum(any(s.pair.is_quantized for s in plan.steps().values()) for plan in plans.values())
    device = next(iter(plans.values())).device
    counts = []
    for gemm in GEMMS:
        kinds = Counter(getattr(plan, gemm).runs for plan in plans.values())
        counts.append(f"{gemm} " + " + ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))
    return f"{quantized} of {len(plans)} linears quantized on {device}; {'; '.join(counts)}"
