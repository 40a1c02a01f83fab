"""Checks of experts whose weights live quantized, under Megatron's distributed optimizer on 2, 3 or 4 ranks.

The masters of an expert are split among the ranks that hold it: WORLD / EP of them.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from checks import run_checks, start
from mcore_model_common import mpu
from mcore_model_experts import moe
from run_param_gather import (
    LIVES,
    TILES,
    WORLD,
    assert_follows_step_rules,
    assert_losses_of_bf16_parameters,
    assert_masters_are_cast,
    recipe,
    step,
    tensor_parallel_whole,
    trained_by_step_rules,
    training,
    whole_masters,
)

import megatron_hybrid as mh
from megatron_hybrid import patches
from megatron_hybrid.grouped_at_once import GroupedPlan

EXPERTS, STEPS = 4, 30
MIXED_EXPERTS = {
    "version": 1, "name": "mixed", "defaults": "mxfp8_e4m3",
    "rules": [
        {"match": {"experts": "1:2"}, "use": "high_precision"},
        {"match": {"experts": "2:"}, "use": {"fprop": "fp8_rowwise_e4m3", "dgrad": "fp8_delayed_e4m3:history=3"}},
    ],
}  # fmt: skip
# recipe, param_gather, master_cast, EP, grouped or one by one: every kind of scale
RUNS = [
    *(("mxfp8", "both", "fp32", ep, grouped) for ep in (1, 2) for grouped in (True, False)),
    ("fp8_block", "both", "param_dtype", 1, True), ("fp8_block", "both", "fp32", 2, False),
    ("fp8_delayed", "both", "param_dtype", 2, True), ("fp8_delayed", "high_precision", "fp32", 1, False),
    ("fp8_current", "rowwise", "fp32", 1, True), ("fp8_rowwise", "both", "fp32", 2, True),
    ("mxfp8_fprop_nvfp4_bwd", "both", "fp32", 1, True), ("nvfp4_fprop_mxfp8_bwd", "high_precision", "fp32", 2, True),
    ("nvfp4_rowscaled_fprop_mxfp8_bwd", "both", "fp32", 2, True), (TILES, "rowwise", "fp32", 2, True),
    (MIXED_EXPERTS, "both", "fp32", 1, True), (MIXED_EXPERTS, "both", "fp32", 2, False),
]  # fmt: skip
AT_ONCE = ("mxfp8", "fp8_rowwise", "nvfp4_rowscaled_fprop_mxfp8_bwd")


def experts(grouped: bool, **changes):
    return lambda chosen: moe(chosen, grouped=grouped, num_layers=1, **changes)


def check_after_a_step_the_bytes_are_the_whole_master_s():
    """P52, c45: grouped and one by one, over the ranks that hold an expert; every weight moves."""
    for name, gather, cast, ep, grouped in RUNS:
        if WORLD % ep:
            continue
        run = training(recipe(name, weights="quantized", param_gather=gather, master_cast=cast),
                       ep=ep, make=experts(grouped), clip=1.0)  # fmt: skip
        before = {n: p.detach().clone() for n, p in run[0].named_parameters()}
        for i in (1, 2):
            step(run, i)
            assert_masters_are_cast(run, before if i == 2 else {}, (name, gather, ep, grouped, i))
        mine = {n: p for n, p in run[0].named_parameters() if ".experts." in n}
        quantized = [n for n, p in mine.items() if isinstance(p, mh.HybridTensor)]
        assert len(mine) == 2 * EXPERTS // ep, list(mine)
        left = {"mixed": [1]}.get(run[2].controller.runtimes[0].recipe.name, [])  # in high precision, of all experts
        first = mpu.get_expert_model_parallel_rank() * EXPERTS // ep
        assert len(mine) - len(quantized) == 2 * sum(first <= e < first + EXPERTS // ep for e in left), quantized
        assert set(quantized) <= whole_masters(run[0]).keys()
        assert all(mine[n].get_high_precision_init_val() is None for n in quantized)
        if grouped and name in AT_ONCE:
            assert_gathers_into_the_stack(run[0])


def assert_gathers_into_the_stack(model):
    """Experts run at once, over the memory that the gather writes."""
    mlp = model.module.module.decoder.layers[0].mlp.experts
    for linear in (mlp.linear_fc1, mlp.linear_fc2):
        weights, stack = linear.weights(), linear.hq.stack
        gather = weights[0]._stale.owner.gather
        assert gather.weights.is_current()
        assert isinstance(linear.hq.how_each(weights), GroupedPlan) and gather.weights.is_current()
        first, size = stack.rowwise.qdata.data_ptr(), weights[0].rowwise.qdata.nbytes
        assert [w.rowwise.qdata.data_ptr() for w in weights] == [first + e * size for e in range(len(weights))]


OF_EVEN_RANKS = (
    "losses_are_those_of_bf16_parameters", "step_rules_cast_from_the_split_masters",
    "scales_over_expert_tensor_parallel_ranks_are_of_the_whole_weight",
)  # fmt: skip


def losses_of(chosen, steps: int, *, ep: int, grouped=True, **ddp) -> list[float]:
    run = training(chosen, ep=ep, make=experts(grouped), **ddp)
    return [step(run, i) for i in range(1, steps + 1)]


def check_losses_are_those_of_bf16_parameters():
    """P56: `master_cast: param_dtype`, no difference at all; with overlap, one by one, and with delayed scales, too."""
    of = partial(losses_of, ep=WORLD // 2)  # two ranks hold an expert: a sum of two gradients has one order
    assert_losses_of_bf16_parameters(of, STEPS, overlapped=5)
    one_by_one = of(recipe("mxfp8"), 5, grouped=False)  # drawn in another order
    assert of(recipe("mxfp8", **LIVES), 5, grouped=False) == one_by_one


def check_step_rules_cast_from_the_split_masters():
    run = trained_by_step_rules({"steps": "2:", "experts": ":3"}, partial(training, ep=WORLD // 2, make=experts(True)))
    assert_follows_step_rules(run[0].module.module.decoder.layers[0].mlp.experts.linear_fc1.weight0)


def check_scales_over_expert_tensor_parallel_ranks_are_of_the_whole_weight():
    """ETP 2: at the start and after a step every shard has the codes and scales of the whole weight, cut."""
    whole_blocks = dict(sequence_parallel=True, moe_ffn_hidden_size=128)  # 64 columns a rank
    for name, gather, grouped in (
        ("fp8_current", "both", True), ("mxfp8_fprop_nvfp4_bwd", "both", False), ("mxfp8_fprop_nvfp4_bwd", "both", True),
        ("fp8_rowwise", "high_precision", True),
    ):  # fmt: skip
        run = training(recipe(name, weights="quantized", param_gather=gather), tp=2, make=experts(grouped, **whole_blocks))
        parameters = dict(run[0].named_parameters())
        for i in (0, 1):
            if i:
                step(run, i)
            masters = {n: m for n, m in whole_masters(run[0]).items() if ".experts." in n}
            assert len(masters) == 2 * EXPERTS
            for n, master in masters.items():
                p, dim = parameters[n], int("linear_fc2" in n)
                whole = p.quantizer.quantize(tensor_parallel_whole(master, dim))
                for mine, one in ((p.rowwise, whole.rowwise), (p.columnwise, whole.columnwise)):
                    part = one.dequantize().chunk(2, dim)[mpu.get_expert_tensor_parallel_rank()]
                    assert torch.equal(mine.dequantize(), part), (name, gather, n, i, mine.direction)


def main() -> None:
    start()
    patches.apply_all()
    run_checks(globals(), leave_out={f"check_{name}" for name in OF_EVEN_RANKS} if WORLD % 2 else ())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
