"""Checks of mixtures of experts in the Megatron modules on two ranks; run_mcore_model.py runs them."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import torch
import torch.distributed as dist
import tp_cases
from mcore_model_common import MIXED, B, F, H, S, bf16, build, config, losses, parallel, rank, summed
from megatron.core import mpu
from megatron.core.activations import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from tp_cases import Ranks, close_sum, compare_gemm, partial_sums, recorded_operands

from megatron_hybrid import Recipe, patches
from megatron_hybrid.grouped_at_once import GroupedPlan
from megatron_hybrid.linear import LOCAL
from megatron_hybrid.mcore import dispatch, driver
from megatron_hybrid.mcore.experts import HybridGroupedMLP
from megatron_hybrid.mcore.graphs import GraphedLayer
from megatron_hybrid.mcore.layers import MOST_ROWS_OF_AN_EXPERT
from megatron_hybrid.mcore.modules import enumerate_modules
from megatron_hybrid.mcore.moe_layer import HybridMoELayer
from megatron_hybrid.mcore.planning import plan_model
from megatron_hybrid.runtime import LinearRuntime

ROWSCALED = "nvfp4_rowscaled_fprop_mxfp8_bwd"


def moe(recipe, *, grouped=True, **changes):
    settings = dict(
        num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=F, moe_grouped_gemm=grouped,
        moe_token_dispatcher_type="alltoall", moe_aux_loss_coeff=1e-2, moe_router_load_balancing_type="aux_loss",
    )  # fmt: skip
    return build(Recipe.load(recipe) if isinstance(recipe, str) else recipe, **{**settings, **changes})


def moe_layers(model):
    return [layer.mlp for layer in getattr(model, "module", model).decoder.layers]


def route_to(model, experts: list[int]) -> None:
    """Every token goes to these experts, two of them, with weight a half."""

    def routing(logits, *args, **kwargs):
        logits = logits.view(-1, logits.shape[-1])
        probs, chosen = torch.zeros_like(logits), torch.zeros_like(logits, dtype=torch.bool)
        probs[:, experts], chosen[:, experts] = 0.5, True
        return probs + 0 * logits, chosen

    for layer in moe_layers(model):
        layer.router.routing = routing


@contextmanager
def all_dispatchers_megatron_s():
    """Layers that are built inside keep them."""
    ours = HybridMoELayer._across_ranks
    HybridMoELayer._across_ranks = lambda self, dispatcher: type(dispatcher)
    try:
        yield
    finally:
        HybridMoELayer._across_ranks = ours


def check_a_rank_whose_experts_get_no_token():
    """c01, c03: gradients there exist and are zero, hooks fire, nobody waits for anybody; grouped and one by one,
    whichever dispatcher brings no token."""
    everyone = itertools.product(("bf16", ROWSCALED, "fp8_delayed", "nvfp4"), (True, False), ("alltoall",))
    for recipe, grouped, dispatcher in (*everyone, (ROWSCALED, True, "allgather"), (ROWSCALED, False, "allgather")):
        parallel(ep=2)
        model = moe(recipe, grouped=grouped, moe_token_dispatcher_type=dispatcher)
        attached = driver.attach([model.module], seed=1)
        if attached is not None:
            attached.controller.begin_step(1)
        route_to(model, [0, 1])
        fired, weights = [], []
        for layer in moe_layers(model):
            for name, weight in layer.experts.named_parameters():
                weight.register_post_accumulate_grad_hook(lambda w, name=name: fired.append(name))
                weights.append(weight)
        losses(model).sum().backward()
        assert len(fired) == len(weights) == (4 if grouped else 8), (recipe, grouped, fired)
        for weight in weights:
            assert torch.isfinite(weight.grad).all()
            assert (weight.grad.abs().sum() > 0) == (rank() == 0), (recipe, grouped, dispatcher)


def check_main_grad_of_experts_without_tokens_is_untouched():
    parallel(ep=2)
    model = moe(ROWSCALED)
    route_to(model, [0, 1])
    for layer in moe_layers(model):
        for weight in layer.experts.parameters():
            weight.main_grad = torch.full(weight.shape, 3.0)
    losses(model).sum().backward()
    for layer in moe_layers(model):
        for weight in layer.experts.parameters():
            assert weight.grad_added_to_main_grad and torch.isfinite(weight.main_grad).all()
            assert (weight.main_grad == 3.0).all() == (rank() == 1)


def check_delayed_scaling_where_each_rank_feeds_another_expert():
    """c15: both ranks hold both experts, one has tokens for the first only, the other for the second: one scale."""
    parallel()
    experts, control = delayed_experts(num_experts=2)
    x = bf16(8, H, seed=3) * (rank() + 1)
    splits = torch.tensor([8, 0] if rank() == 0 else [0, 8])
    experts(x, splits, torch.ones(8))[0].sum().backward()
    control.controller.end_step(control.group, control.expert_groups)
    amax = x.abs().max().float()
    amaxes = [torch.empty_like(amax) for _ in range(2)]
    dist.all_gather(amaxes, amax)
    for runtime, expected in zip(experts.linear_fc1.hq, amaxes):
        assert runtime.input_rowwise_scale == 448 / expected
    for name, buffer in experts.named_buffers():
        both = [torch.empty_like(buffer) for _ in range(2)]
        dist.all_gather(both, buffer)
        assert torch.equal(*both), name


def check_delayed_scales_are_an_expert_s_own():
    """Expert-parallel ranks hold other experts: nothing is reduced between them."""
    parallel(ep=2)
    experts, control = delayed_experts(num_experts=1, expert_model_parallel_size=2, num_moe_experts=2)
    assert control.expert_groups == [] and control.group.size() == 2
    x = bf16(8, H, seed=3) * (rank() + 1)
    experts(x, torch.tensor([8]), torch.ones(8))[0].sum().backward()
    control.controller.end_step(control.group, control.expert_groups)
    assert experts.linear_fc1.hq[0].role.expert == rank()
    assert experts.linear_fc1.hq[0].input_rowwise_scale == 448 / x.abs().max().float()


def check_gradients_of_experts_biases_keep_300_ones():
    """Summed in FP32: in bf16 a sum of ones ends at 256. Sizes known to the host, and to the device only."""
    parallel()
    for where in ("cpu", torch.get_default_device()):
        experts, _ = delayed_experts(num_experts=3, add_bias_linear=True)
        splits = torch.tensor([300, 0, 7], device=where)
        y, bias = experts(bf16(307, H, seed=3), splits, torch.ones(307))
        y.sum().backward()
        assert bias is None and torch.equal(experts.linear_fc2.bias.grad, splits.to(y).view(3, 1).expand(3, H))


def delayed_experts(num_experts: int, **changes):
    """A grouped MLP scaled by history, and its driver in a step."""
    from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig

    from megatron_hybrid.mcore.recipe_hook import carry

    cfg = config(**{"num_moe_experts": num_experts, "moe_ffn_hidden_size": F, "moe_grouped_gemm": True, **changes})
    groups = ProcessGroupCollection.use_mpu_process_groups()
    experts = HybridGroupedMLP(num_experts, cfg, pg_collection=groups)
    carried = carry(Recipe.load("fp8_delayed")).configs["megatron_hybrid"]
    for name in ("linear_fc1", "linear_fc2"):
        path = MatchContext(f"decoder.layers.0.mlp.experts.{name}", 0)
        getattr(experts, name).finish_init(QuantizationConfig(carried, path, "megatron_hybrid"))
    experts.pg_collection = groups
    control = driver.attach([experts], seed=1)
    control.controller.begin_step(1)
    return experts, control


@contextmanager
def routing_of(model, seen: list):
    handles = [
        layer.router.register_forward_hook(lambda module, args, out: seen.append([t.detach().clone() for t in out]))
        for layer in moe_layers(model)
    ]
    yield
    for handle in handles:
        handle.remove()


def check_a_graphed_layer_casts_its_experts_weights_before_a_replay():
    """c42: those of experts at once too, whose cast the first expert's runtime keeps; where they were in the first step."""
    for recipe in ("mxfp8", "fp8_rowwise", ROWSCALED):
        parallel()
        model = moe(recipe, num_layers=1)
        controller = driver.attach([model.module], seed=1).controller
        controller.stand()
        controller.begin_step(1)
        losses(model)
        (layer,) = model.module.decoder.layers
        linears = dict(GraphedLayer._quantized_linears.func(layer))
        experts = [layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2]
        for linear in experts:
            cache, weight = linears[linear][0].weight_cache, linear.weight
            held = [buffer for s in cache._held if s is not None for buffer in s.buffers().values()]
            before, there = [buffer.clone() for buffer in held], [buffer.data_ptr() for buffer in held]
            assert there and isinstance(linear.hq.how(weight), GroupedPlan)
            weight.data.mul_(1.5)
            controller.begin_step(2)
            for runtime in linears[linear]:
                runtime.refresh()
            after = [buffer for s in cache.held() for buffer in s.buffers().values()]
            assert [buffer.data_ptr() for buffer in after] == there
            assert not all(map(torch.equal, before, after))
            _, cast, (rowwise, columnwise), _ = cache._again
            fresh = [s for s in cast(weight, rowwise=rowwise, columnwise=columnwise) if s is not None]
            expected = [buffer for s in fresh for buffer in s.buffers().values()]
            assert len(after) == len(expected) and all(map(torch.equal, after, expected)), (recipe, linear)


def check_routing_and_aux_loss_do_not_see_padding():
    """c11: with experts in formats that need padded groups, or that need none, routing and auxiliary loss are equal."""
    parallel(ep=2)
    found = []
    for use in ("high_precision", "mxfp8_e4m3", "nvfp4"):
        rules = [{"match": {"module_type": "grouped_linear"}, "use": use}]
        recipe = Recipe.from_dict({"version": 1, "name": "t", "defaults": "high_precision", "rules": rules})
        parallel(ep=2)
        model = moe(recipe, num_layers=1)
        get_moe_metrics_tracker().clear()
        seen: list = []
        with routing_of(model, seen):
            losses(model)
        found.append((*seen[0], get_moe_metrics_tracker().metrics["load_balancing_loss"].values.clone()))
    assert len(found[0]) == 3 and found[0][2].abs().sum() > 0
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def either_implementation(recipe, **changes):
    """(a model of one layer, its experts' parameters by name: a stack, or a list), grouped and then one by one: the
    same values, biases drawn too."""
    source = None
    for grouped in (True, False):
        parallel(ep=2)
        model = moe(recipe, grouped=grouped, num_layers=1, **changes)
        rest = {n: p for n, p in model.named_parameters() if ".experts." not in n}
        experts = moe_layers(model)[0].experts
        each = [experts] if grouped else experts.local_experts
        own = {name: [expert.get_parameter(name) for expert in each] for name, _ in each[0].named_parameters()}
        with torch.no_grad():
            for name, stack in own.items() if grouped else ():
                if name.endswith("bias"):
                    stack[0].copy_(bf16(*stack[0].shape, seed=len(name)) / 4)
            if source is not None:
                pairs = [(p, source[0][name]) for name, p in rest.items()]
                pairs += [pair for name, of in own.items() for pair in zip(of, source[1][name][0], strict=True)]
                for mine, value in pairs:
                    mine.copy_(value)
        source = rest, own
        yield model, own


def gradients_of_stacks(own: dict) -> list[torch.Tensor]:
    """Of experts' parameters, whichever implementation has them."""
    return [of[0].grad if len(of) == 1 else torch.stack([p.grad for p in of]) for of in own.values()]


def check_grouped_and_sequential_experts_agree():
    """The same weights give the same bits in either implementation, whatever the recipe: losses and gradients; also
    where tokens are dropped."""
    dropped = dict(moe_expert_capacity_factor=0.75)
    cases = [(recipe, {}) for recipe in ("bf16", ROWSCALED, MIXED, "fp8_rowwise")] + [(ROWSCALED, dropped)]
    for recipe, changes in cases:
        results = []
        for model, own in either_implementation(recipe, **changes):
            attached = driver.attach([model.module], seed=1)
            for runtime in moe_runtimes(model):  # a GPU's own products of many experts at once sum in another order
                runtime.backend = "reference"
                runtime.replan(runtime.recipe)
            if attached is not None:
                attached.controller.begin_step(1)
            loss = losses(model)
            loss.sum().backward()
            results.append([loss, *gradients_of_stacks(own)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (recipe, changes)


def moe_runtimes(model) -> list[LinearRuntime]:
    return [module for module in model.modules() if isinstance(module, LinearRuntime)]


# what a configuration may ask of experts: each changes numbers, and must in both implementations alike
SETTINGS = {
    "": {},
    "biases": dict(add_bias_linear=True),
    "not gated, biases": dict(gated_linear_unit=False, activation_func=torch.nn.functional.gelu, add_bias_linear=True),
    "clamped": dict(activation_func=quick_gelu, activation_func_clamp_value=0.01, glu_linear_offset=1.0),
    "one expert": dict(moe_router_topk=1, moe_router_pre_softmax=True),
    "weights before": dict(moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True),
    "shared": dict(moe_shared_expert_intermediate_size=F),
    "shared, overlapped": dict(moe_shared_expert_intermediate_size=F, moe_shared_expert_overlap=True),
    "dropped": dict(moe_expert_capacity_factor=0.75),
    "padded": dict(moe_expert_capacity_factor=0.75, moe_pad_expert_input_to_capacity=True),
    "sigmoid": dict(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5, moe_router_dtype="fp32"),
}
ALIKE = ("shared, overlapped", "shared"), ("padded", "dropped")


def check_settings_of_experts_act_as_in_megatron_s_own_mlp():
    """Grouped experts against Megatron's own MLP an expert, in FP32: losses and gradients within some roundings."""
    fp32 = dict(bf16=False, params_dtype=torch.float32, pipeline_dtype=torch.float32)
    found = {}
    for what, changes in SETTINGS.items():
        results = []
        for model, own in either_implementation("bf16", **fp32, **changes):
            loss = losses(model)
            loss.sum().backward()
            results.append([loss.detach(), *gradients_of_stacks(own)])
        for a, b in zip(*results, strict=True):
            assert (a - b).norm() <= 512 * 2.0**-24 * b.norm(), (what, float((a - b).norm() / b.norm()))
        found[what] = results[0][0]
    for one, other in itertools.combinations(SETTINGS, 2):
        alike = {one, other} in map(set, ALIKE)
        assert alike == ((found[one] - found[other]).norm() <= 2.0**-18 * found[one].norm()), (one, other)


def check_permutation_in_our_kernels_places_is_megatron_s():
    """`--moe-permute-fusion`, its torch operations here: with two experts a token the same bits, whichever dispatcher."""
    patches.apply_all(["moe_permutation"])
    travels = Recipe.from_dict({**Recipe.load(ROWSCALED).to_dict(), "dispatch": "quantized"})
    cases = [("bf16", 2, {}), ("bf16", 2, {"moe_token_dispatcher_type": "allgather"}), ("fp8_rowwise", 1, {}),
             ("fp8_block", 1, {"moe_token_dispatcher_type": "allgather"}), (travels, 2, {}), (travels, 1, {}),
             ("bf16", 2, {"moe_expert_capacity_factor": 0.75}),
             ("bf16", 2, {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
             ("bf16", 2, {"grouped": False})]  # fmt: skip
    for recipe, ep, changes in cases:
        results = []
        for fused in (False, True):
            parallel(ep=ep)
            model = moe(recipe, num_layers=1, moe_permute_fusion=fused, **changes)
            attached = driver.attach([model.module], seed=1)
            if attached is not None:
                attached.controller.begin_step(1)
            loss = losses(model)
            loss.sum().backward()
            results.append([loss, *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (recipe, ep, changes)


def check_experts_split_over_ranks_are_one_rank_s_cut():
    """ETP 2 against one rank, grouped and one by one, an expert without a token: codes, scales and random bits of every
    gemm, weight gradients and delayed scales are the same bits, outputs and input gradients within their sum's rounding."""
    recipes = {name: Recipe.load(name) for name in (ROWSCALED, "fp8_delayed")}
    recipes["random"] = Recipe.from_dict({"version": 1, "name": "random", "defaults": "nvfp4:sr"})
    kinds = [(*kind, True) for kind in itertools.product(recipes, (True, False))] + [("random", True, False)]
    layouts = ((1, 1), (2, 2), (1, 2))  # (TP, ETP): in the last the ranks are two replicas
    found = {(*to, *kind): run_split_experts(*to, recipes[kind[0]], *kind[1:]) for to in layouts for kind in kinds}
    ranks = Ranks(mpu.get_expert_tensor_parallel_group(), bf16(1).device)
    for (tp, etp), kind in itertools.product(layouts[1:], kinds):
        one, split, kind = found[1, 1, *kind], found[tp, etp, *kind], (*kind, tp)
        fc1 = "gated column" if kind[2] else "column"
        compare_split_experts(ranks, {"linear_fc1": fc1, "linear_fc2": "row"}, one, split, kind)
        assert one["states"].keys() == split["states"].keys() and bool(one["states"]) == (kind[0] == "fp8_delayed")
        for name, state in one["states"].items():
            assert torch.equal(state, split["states"][name]), (kind, name)


def compare_split_experts(ranks, layouts: dict, one: dict, split: dict, kind) -> None:
    """Operands, weight gradients and sums over ranks of two runs. layouts: of each linear."""
    gemms, results = one["operands"], {"linear_fc1": ("dgrad", "dx"), "linear_fc2": ("fprop", "y")}
    assert len(gemms) == len(split["operands"]) == 3 * 2 * 2, kind  # three gemms of two linears of two experts
    for axis, (name, layout) in enumerate(layouts.items(), 1):
        own = {key: pair for key, pair in gemms.items() if name in key[0]}
        for key, pair in own.items():
            compare_gemm(ranks, layout, key[1], pair, split["operands"][key], f"{kind} {key}")
        gemm, result = results[name]
        sums = [partial_sums(ranks, layout, own[key]) for key in sorted(own) if key[1] == gemm]
        total, magnitude = (torch.cat(parts) for parts in zip(*sums))
        close_sum(summed(split[result]), total, magnitude, ranks.size, f"{kind} {result}")
        pieces = 1 + ("gated" in layout)
        assert torch.equal(ranks.part(one["dw"][name], axis, pieces), split["dw"][name]), kind


def run_split_experts(tp: int, etp: int, recipe, grouped: bool, gated: bool) -> dict:
    """Forward and backward of two experts on as many expert-tensor-parallel ranks, one of them without a token, and the
    end of the step. The largest numbers are all on one rank."""
    parallel(tp=tp, etp=etp)
    size, rows = 128, (1 + gated) * 128
    model = moe(recipe, grouped=grouped, num_layers=1, num_moe_experts=2, moe_ffn_hidden_size=size, sequence_parallel=tp > 1,
                gated_linear_unit=gated, expert_tensor_parallel_size=etp)  # fmt: skip
    hooks = driver.attach([model.module], seed=1)
    for runtime in hooks.controller.runtimes:
        runtime.backend = "reference"
        runtime.replan(runtime.recipe)
    if tp == etp:
        hooks.controller.keys.replica, hooks.controller.keys.num_replicas = 0, 2  # what ranks of two replicas have
    hooks.controller.begin_step(1)
    experts = moe_layers(model)[0].experts
    whole = bf16(2, rows, H, seed=5), bf16(2, H, size, seed=6)
    whole[0][:, -1], whole[1][..., -1] = 9, 7
    cut = [torch.cat([run.chunk(etp, 1)[rank() % etp] for run in whole[0].chunk(1 + gated, 1)], 1),
           whole[1].chunk(etp, 2)[rank() % etp]]  # fmt: skip
    weights = [expert_weights(experts, name) for name in ("linear_fc1", "linear_fc2")]
    with torch.no_grad():
        for own, values in zip(weights, cut):
            for weight, value in zip(own, values):
                weight.copy_(value)
    x = bf16(24, H, seed=3).requires_grad_()
    with recorded_operands() as operands:
        y, _ = experts(x, torch.tensor([24, 0]), torch.linspace(0.1, 1, 24))
        y.backward(bf16(24, H, seed=4))
    hooks.controller.end_step(hooks.group, hooks.expert_groups)
    runtimes = [module for module in experts.modules() if isinstance(module, LinearRuntime)]
    states = {f"{hq.label}, {name}": state.clone() for hq in runtimes for name, state in hq.named_buffers()}
    dw = {name: torch.stack(expert_weights(experts, name, "grad")) for name in ("linear_fc1", "linear_fc2")}
    return dict(operands=operands, y=y.detach(), dx=x.grad, dw=dw, states=states)


def check_collectives_do_not_hang_on_where_a_rank_s_weights_lie():
    """FSDP gives weights other memory in every gather: other addresses on this rank, and the old ones on that. Both ask
    each other for the same amaxes then, those that derived columns find inside of a cast too."""
    for name, grouped in itertools.product(("fp8_current", "mxfp8 / nvfp4 derived"), (True, False)):
        parallel(tp=2, etp=2)
        model = moe(tp_cases.recipe(name), grouped=grouped, sequence_parallel=True, expert_tensor_parallel_size=2,
                    moe_router_load_balancing_type="none").module  # fmt: skip
        control = driver.attach([model], seed=1, weights_at_once=False, weights_move=True).controller
        control.begin_step(1)
        expected, before = losses(model), []
        for parameter in model.parameters() if rank() == 0 else ():
            before.append(parameter.data)  # its memory stays taken
            parameter.data = parameter.data.clone()
        assert torch.equal(losses(model), expected), (name, grouped)


def expert_weights(experts, name: str, attribute: str = "data") -> list[torch.Tensor]:
    """Of every expert of either implementation: its weight's ``data`` or ``grad``."""
    if isinstance(experts, HybridGroupedMLP):
        return list(getattr(getattr(experts, name).weight, attribute))
    return [getattr(getattr(expert, name).weight, attribute) for expert in experts.local_experts]


def check_names_and_roles_of_experts():
    """Both implementations have the roles that the configuration says, on each rank for its own experts."""
    for grouped in (True, False):
        parallel(ep=2)
        model = moe("mxfp8", grouped=grouped, moe_shared_expert_intermediate_size=F, moe_layer_freq=[0, 1])
        roles = [runtime.role for runtime in driver.attach([model.module], seed=1).controller.runtimes]
        listed = enumerate_modules(model.module.config)
        assert set(roles) <= set(listed)
        mine = {role for role in listed if role.module_type != "dpa" and not role.lm_head}
        mine = {role for role in mine if role.expert is None or role.expert // 2 == rank()}
        assert set(roles) == mine
        plans = plan_model(Recipe.load("mxfp8"), model.module.config, "cpu")
        assert "decoder.layers.1.mlp.experts.linear_fc1 experts 0:4" in plans
        assert "decoder.layers.1.mlp.shared_experts.linear_fc2" in plans and "decoder.layers.0.mlp.linear_fc1" in plans


def check_experts_do_not_repeat_each_other_s_random_bits():
    """One by one and grouped: every expert's tensors lie at rows of their own, weights at the same ones in both."""
    recipe = Recipe.from_dict({"version": 1, "name": "random", "defaults": "nvfp4:sr"})
    weights = []
    for grouped in (True, False):
        parallel(ep=2)
        model = moe(recipe, grouped=grouped, num_layers=1)
        keys = driver.attach([model.module], seed=1).controller.keys
        runtimes = [m for m in model.modules() if isinstance(m, LinearRuntime) and m.role.expert is not None]
        found = {}
        for runtime in runtimes:
            rows = runtime.role.expert * (2 * F if "fc1" in runtime.role.name else H) if grouped else 0
            for operand in ("input", "weight", "grad_output"):
                values = keys.rng(runtime.role, operand, "cpu", runtime.index_maps.get(operand)).values.tolist()
                found[runtime.role.name, operand, runtime.role.expert] = [*values[:3], values[3] + rows, *values[4:]]
        weights.append({key: value[:4] for key, value in found.items() if key[1] == "weight"})
        own = [key[:2] + tuple(value) for key, value in found.items() if not grouped or key[1] == "weight"]
        assert len(own) == len(set(own)) and len(runtimes) == 4
    assert weights[0] == weights[1]


def first_expert_draws(x, grouped: bool, **layout) -> tuple[list[dict], list[torch.Tensor]]:
    """Of both ranks, in a step with counter 12: the key words of every operand of their first expert's first linear, and
    what `x` is cast to there."""
    parallel(**layout)
    etp = layout.get("etp", 1)
    model = moe(Recipe.from_dict({"version": 1, "name": "random", "defaults": "nvfp4:sr"}), grouped=grouped, num_layers=1,
                sequence_parallel="tp" in layout, expert_tensor_parallel_size=etp)  # fmt: skip
    control = driver.attach([model.module], seed=1).controller
    control.begin_step(12 // control.keys.num_replicas)
    hq = next(hq for hq in control.runtimes if hq.role.expert is not None)
    call = hq.call(x.device, LOCAL, training=True)
    words, drawn = [None, None], [torch.empty_like(x) for _ in range(2)]
    dist.all_gather_object(words, {operand: rng.values.tolist() for operand, rng in call.rng.items()})
    dist.all_gather(drawn, call.quantize("input", x, rowwise=True)[0].dequantize(x.dtype))
    return words, drawn


def check_ranks_of_one_replica_draw_apart_at_their_experts():
    """More tensor-parallel than expert-tensor-parallel ranks, which have tokens of their own: each at rows of its own. The
    weight they share draws alike, and so do all operands where ranks split an expert. Ranks that are replicas have
    counters, and rows from 0."""
    x = bf16(16, H, seed=3)
    for grouped, ep in itertools.product((True, False), (1, 2)):
        (one, two), drawn = first_expert_draws(x, grouped, tp=2, etp=1, ep=ep)
        experts = 0 if grouped else 2 * MOST_ROWS_OF_AN_EXPERT * (ep - 1)  # to the first of the other rank
        for operand in ("input", "grad_output"):
            assert one[operand][2] == two[operand][2] == 12 and one[operand][3] == 0, (grouped, ep, one, two)
            assert two[operand][3] - experts > 4 * MOST_ROWS_OF_AN_EXPERT, (grouped, ep, one, two)
        assert ep == 2 or one["weight"] == two["weight"]
        assert not torch.equal(*drawn)
    for grouped in (True, False):
        (one, two), drawn = first_expert_draws(x, grouped, tp=2, etp=2)
        assert all(one[operand][:4] == two[operand][:4] for operand in ("input", "grad_output")) and torch.equal(*drawn)
        (one, two), drawn = first_expert_draws(x, grouped, ep=2)
        assert (one["input"][2], two["input"][2]) == (12, 13) and not torch.equal(*drawn)
        assert two["input"][3] == one["input"][3] + (0 if grouped else 2 * MOST_ROWS_OF_AN_EXPERT)


def check_replicas_draw_apart_without_a_group_that_splits_experts():
    """A collection of groups may lack the expert-tensor-parallel one: the ranks that hold the same experts are replicas."""
    parallel()
    model = moe("mxfp8", num_layers=1)
    model.module.pg_collection.expt_tp = None
    hooks = driver.attach([model.module], seed=1)
    keys = [runtime.keys for runtime in hooks.controller.runtimes if runtime.role.expert is not None]
    assert {(k.replica, k.num_replicas, k.part) for k in keys} == {(rank(), 2, 0)}
    assert [group.size() for group in hooks.expert_groups] == [2]


def check_tokens_travel_quantized():
    """The same bits as with casts after the dispatch, and on the wire exactly the rows' codes and scales."""
    results = []
    for travels in ("high_precision", "quantized"):
        parallel(ep=2)
        recipe = Recipe.from_dict({**Recipe.load(ROWSCALED).to_dict(), "dispatch": travels})
        model = moe(recipe, num_layers=1)
        driver.attach([model.module], seed=1).controller.begin_step(1)
        loss = losses(model)
        loss.sum().backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    sent = moe_layers(model)[0].token_dispatcher.sent
    rows = 2 * loss.numel()  # every token goes to two experts
    assert sent == {"quantized": rows * (H // 2 + H // 16 + 4), "high_precision": rows * 2 * H}


SR_INPUT = Recipe.from_dict({
    "version": 1, "name": "random", "defaults": "high_precision", "dispatch": "quantized",
    "rules": [{"match": {"module_type": "grouped_linear"}, "use": {
        "fprop": {"input": "nvfp4:row_scaled,sr", "weight": "nvfp4:row_scaled"}, "dgrad": "mxfp8_e4m3", "wgrad": "mxfp8_e4m3",
        "columnwise_source": {"input": "rowwise_dequantized"}}}],
})  # fmt: skip


def dispatched(recipe, routing=None, *, micro_batches=(0,), backward=False, changes=None, **layout):
    """A model of one layer after forwards of step 3, what its experts' first linear got, and what left this rank: of
    each row its source and the payload."""
    parallel(**layout)
    settings = dict(num_layers=1, sequence_parallel=layout.get("tp", 1) > 1, expert_tensor_parallel_size=1)
    model = moe(recipe, **settings, **changes or {})
    control = driver.attach([model.module], seed=1).controller
    control.begin_step(3, num_microbatches=2)
    if routing is not None:
        for layer in moe_layers(model):
            layer.router.routing = routing
    experts, got, sent = moe_layers(model)[0].experts, [], {}
    experts.linear_fc1.register_forward_pre_hook(lambda module, args: got.append(args[0].detach()))

    def pack(s):
        ids = moe_layers(model)[0].token_dispatcher.source_rows(s.shape[0])
        packed = dispatch_pack(s)
        sent.update(zip(ids.tolist(), packed))
        return packed

    dispatch_pack, dispatch.pack = dispatch.pack, pack
    try:
        for index in micro_batches:
            control.microbatch(index)
            loss = losses(model)
    finally:
        dispatch.pack = dispatch_pack
    if backward:
        loss.sum().backward()
    return model, got[-1], sent, loss


def check_random_bits_of_dispatched_tokens_follow_their_source():
    """The bytes that arrive are those of a cast after the dispatch with the same keys. A token's bytes depend neither on
    the number of expert-parallel ranks nor on other tokens' experts; replicas, slots and microbatches draw apart."""
    after = Recipe.from_dict({**SR_INPUT.to_dict(), "dispatch": "high_precision"})
    with all_dispatchers_megatron_s():
        model, travelled, sent, _ = dispatched(SR_INPUT, ep=2, backward=True)
        _, tokens, _, _ = dispatched(after, ep=2)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    dispatcher, hq = moe_layers(model)[0].token_dispatcher, moe_layers(model)[0].experts.linear_fc1.hq[0]
    ids = dispatcher.source_rows(sum(dispatcher.input_splits)).unsqueeze(1)
    came = dispatch.exchange(ids, dispatcher.ep_group, dispatcher.output_splits, dispatcher.input_splits)
    came = came[dispatcher._order(len(came), came.device), 0]
    key = hq.keys.rng_of_rows(hq.role, "input", tokens.device, came)
    expected = hq.plan_for(tokens.device).quantize("input", tokens, rowwise=True, rng=key)[0]
    for name, buffer in expected.buffers().items():
        assert torch.equal(buffer, travelled.rowwise.buffers()[name]), name

    num, topk = 2 * B * S, 2  # one rank's tokens, of two replicas, to two experts each
    assert sorted(sent) == list(range(rank() * num // 2 * topk, (rank() + 1) * num // 2 * topk)), sorted(sent)
    _, _, alone, _ = dispatched(SR_INPUT)  # every rank has every expert
    assert sent.keys() == alone.keys() and all(torch.equal(sent[source], alone[source]) for source in sent)


def check_sources_of_rows_where_tokens_are_dropped_or_padded():
    """Rows that leave a rank are sorted by expert and then token; after an expert's tokens there may be padding."""
    capacity = dict(moe_expert_capacity_factor=0.75)
    for changes in ({}, capacity, {**capacity, "moe_pad_expert_input_to_capacity": True}):
        d = moe_layers(dispatched(SR_INPUT, changes=changes, ep=2)[0])[0].token_dispatcher
        chosen, first = d.routing_map, rank() * B * S
        sizes = [d.capacity] * 4 if d.drop_and_pad else chosen.sum(0).tolist()
        assert bool(changes) == (chosen.sum() < 2 * B * S), changes
        for expert, found in enumerate(d.source_rows(sum(sizes)).split(sizes)):
            token = chosen[:, expert].nonzero()[:, 0]
            source = (first + token) * 2 + chosen[token, :expert].sum(1)
            assert torch.equal(found[: len(token)], source), (changes, expert)


def check_a_rank_s_share_of_tokens_draws_as_the_whole_would():
    """Sequence-parallel ranks: sources count through the replica's tokens, whichever rank has them."""
    _, _, sent, _ = dispatched(SR_INPUT, tp=2, etp=1, ep=2)
    assert sorted(sent) == list(range(rank() * B * S, (rank() + 1) * B * S))


def check_other_tokens_experts_change_no_random_bit():
    def to(experts_of_odd):
        def routing(logits, *args, **kwargs):
            logits = logits.view(-1, logits.shape[-1])
            chosen = torch.zeros_like(logits, dtype=torch.bool)
            chosen[0::2, [1, 3]] = True
            chosen[1::2, experts_of_odd] = True
            return 0.5 * chosen + 0 * logits, chosen

        return routing

    found = [dispatched(SR_INPUT, to(experts), ep=2)[2] for experts in ([0, 1], [2, 3])]
    evens = [source for source in found[0] if source // 2 % 2 == 0]
    assert len(evens) == B * S and all(torch.equal(found[0][source], found[1][source]) for source in evens)
    first, second = (torch.stack([found[0][source] for source in sorted(evens)][slot::2]) for slot in (0, 1))
    assert not torch.equal(first, second)  # the same tokens to another expert
    again, later = (dispatched(SR_INPUT, to([0, 1]), ep=2, micro_batches=m)[2] for m in ((0, 1, 0), (0, 1)))
    assert all(torch.equal(found[0][source], again[source]) for source in again)
    assert any(not torch.equal(found[0][source], later[source]) for source in later)
    mine = torch.stack([found[0][source] for source in sorted(found[0])])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert not torch.equal(*both)  # both replicas have the same tokens


def check_a_recipe_whose_columns_need_the_original_cannot_travel_quantized():
    parallel(ep=2)
    recipe = Recipe.from_dict({**Recipe.load("mxfp8").to_dict(), "dispatch": "quantized"})
    for changes, words in (
        ({}, "decoder.layers.0.mlp.experts.linear_fc1, expert"),
        ({"moe_token_dispatcher_type": "allgather"}, "alltoall"),
        ({"grouped": False}, "--moe-grouped-gemm"),
    ):
        try:
            moe(recipe, **changes)
        except ValueError as error:
            assert words in str(error) and "dispatch: quantized" in str(error), error
        else:
            raise AssertionError(f"{changes}: no error")
