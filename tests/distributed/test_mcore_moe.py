"""Mixtures of experts through Megatron's pretrain(): layouts, dispatchers, both implementations, checkpoints.

All runs are forks of one launch of four CPU ranks.
"""

from __future__ import annotations

import json

import pytest
from mcore_cases import ITERATIONS, MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, numbers, run_cases, same

import megatron_hybrid as mh

pytestmark = pytest.mark.dist

RECIPE = "nvfp4_rowscaled_fprop_mxfp8_bwd"
MIDDLE = ITERATIONS // 2
LONG = 50
MOE = [*MODEL, *"--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2".split()]
GROUPED = ["--moe-grouped-gemm"]
ALL_TO_ALL = ["--moe-token-dispatcher-type", "alltoall"]
EP2 = ["--expert-model-parallel-size", "2"]
MIXED_EXPERTS = """version: 1
name: mixed_experts
defaults: mxfp8_e4m3
rules:
  - match: {experts: "1:3"}
    use: {fprop: fp8_rowwise_e4m3, dgrad: "fp8_delayed_e4m3:history=3"}
  - match: {name: "*.shared_experts.*"}
    use: high_precision
"""


def run(name: str, *flags: str, ranks: int = 2, recipe: str = RECIPE, experts=(*GROUPED, *ALL_TO_ALL)) -> Case:
    files = ["--hq-metrics-file", f"{{folder}}/{name}.metrics", "--hq-recipe", recipe]
    return Case(name, [SCRIPT, *MOE, *MOCK, *experts, *files, *flags], ranks)


def fsdp2(name: str, recipe: str, *flags: str, ranks: int = 2) -> Case:
    case = run(name, "--use-torch-fsdp2", "--ckpt-format", "torch_dist", *flags, ranks=ranks, recipe=recipe)
    case.argv.remove("--use-distributed-optimizer")
    return case


def from_ep2(*flags: str) -> tuple[str, ...]:
    return ("--load", "{folder}/ep2", "--ckpt-step", str(MIDDLE), FULLY, *flags)


SEQUENTIAL = ALL_TO_ALL
FULLY = "--dist-ckpt-optim-fully-reshardable"  # other layouts can only load the optimizer's state in this form
SAVED = ("--save-interval", str(MIDDLE))
FEW = ("--num-experts", "3", "--micro-batch-size", "2")  # over four ranks, one of which has none
SHARED = (*EP2, "--moe-shared-expert-intermediate-size", "96", "--moe-layer-freq", "[0,1]")
IN_PLACE = ("--moe-permute-fusion", "--recompute-granularity", "selective")  # experts' linears read rows as they come
CASES = [
    run("long_bf16", "--train-iters", str(LONG), ranks=1, recipe="bf16"),
    run("long", "--train-iters", str(LONG), "--save", "{folder}/long", "--save-interval", str(LONG // 2), ranks=1),
    run("long_resumed", "--train-iters", str(LONG), "--load", "{folder}/long", "--ckpt-step", str(LONG // 2), ranks=1),
    run("ep2", *EP2, "--save", "{folder}/ep2", *SAVED, FULLY),
    run("ep2_resumed", *EP2, *from_ep2()),
    run("ep2_statistics", *EP2, *from_ep2(), "--hq-stats-interval", "1", "--hq-stats-file", "{folder}/ep2.jsonl"),
    run("ep2_gathered", *EP2, experts=GROUPED),
    run("ep2_sequential", *EP2, *from_ep2(), "--save", "{folder}/ep2_sequential", "--save-interval", "1",
        experts=SEQUENTIAL),
    run("ep2_grouped_again", *EP2, "--load", "{folder}/ep2_sequential", "--ckpt-step", str(MIDDLE + 1), FULLY),
    run("ep1", *from_ep2(), "--save", "{folder}/ep1", "--save-interval", "1"),
    run("ep2_again", *EP2, "--load", "{folder}/ep1", "--ckpt-step", str(MIDDLE + 1), FULLY),
    run("ep4", "--expert-model-parallel-size", "4", "--micro-batch-size", "2", *from_ep2(), ranks=4),
    run("etp2", *TP2, "--expert-tensor-parallel-size", "2", *from_ep2()),
    run("etp2_of_dp2", "--expert-tensor-parallel-size", "2", "--hq-stats-interval", "1", *from_ep2()),
    run("tp2_ep2", *TP2, "--expert-tensor-parallel-size", "1", *EP2, *from_ep2()),
    run("shared", *SHARED, "--save", "{folder}/shared", *SAVED, recipe="{folder}/mixed.yaml"),
    run("shared_resumed", *SHARED, "--load", "{folder}/shared", "--ckpt-step", str(MIDDLE),
        recipe="{folder}/mixed.yaml"),
    run("delayed", *EP2, "--save", "{folder}/delayed", *SAVED, FULLY, recipe="fp8_delayed", experts=SEQUENTIAL),
    run("delayed_grouped", *EP2, "--load", "{folder}/delayed", "--ckpt-step", str(MIDDLE), FULLY, recipe="fp8_delayed"),
    run("dropped", *EP2, "--moe-expert-capacity-factor", "1.0"),
    run("padded", *EP2, "--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity"),
    run("travelling", *EP2, recipe="{folder}/travelling.yaml"),
    run("recomputed", *EP2, "--recompute-granularity", "selective", "--recompute-modules", "moe"),
    run("act_recomputed", *EP2, "--recompute-granularity", "selective", "--recompute-modules", "moe_act"),
    run("fused_permutation", *EP2, "--moe-permute-fusion"),
    run("in_place", *EP2, *IN_PLACE, "--recompute-modules", "moe", recipe="{folder}/travelling.yaml"),
    run("ep4_in_place", "--expert-model-parallel-size", "4", "--micro-batch-size", "2", *IN_PLACE, "--recompute-modules",
        "moe_act", *from_ep2(), ranks=4),
    run("tp2_ep2_in_place", *TP2, "--expert-tensor-parallel-size", "1", *EP2, "--moe-permute-fusion", *from_ep2()),
    run("top1_in_place", *EP2, "--moe-router-topk", "1", "--moe-router-pre-softmax", "--moe-permute-fusion"),
    run("shared_in_place", *SHARED, "--moe-permute-fusion", recipe="{folder}/mixed.yaml"),
    run("one_rank", ranks=1),
    run("tokens_stay", "--moe-permute-fusion", "--recompute-granularity", "selective", "--recompute-modules", "moe", ranks=1),
    run("hybrid", *EP2, *from_ep2(), "--hybrid-layer-pattern", "*E*E"),
    run("top1", *EP2, "--moe-router-topk", "1", "--moe-router-pre-softmax"),
    fsdp2("fsdp2", RECIPE),
    fsdp2("fsdp2_payloads", "{folder}/payloads.yaml", "--save", "{folder}/fsdp2", *SAVED),
    fsdp2("fsdp2_payloads_resumed", "{folder}/payloads.yaml", "--load", "{folder}/fsdp2", "--ckpt-step", str(MIDDLE)),
    fsdp2("fsdp2_delayed", "{folder}/delayed_payloads.yaml", "--save", "{folder}/fsdp2_delayed", *SAVED),
    fsdp2("fsdp2_delayed_resumed", "{folder}/delayed_payloads.yaml", "--load", "{folder}/fsdp2_delayed",
          "--ckpt-step", str(MIDDLE)),
    fsdp2("fsdp2_few", RECIPE, *FEW, ranks=4),
    fsdp2("fsdp2_few_payloads", "{folder}/payloads.yaml", *FEW, ranks=4),
    run("ep2_from_fsdp2", *EP2, "--load", "{folder}/fsdp2", "--ckpt-step", str(MIDDLE), "--no-load-optim", "--no-load-rng",
        "--hq-switch-recipe"),
    run("explain", *EP2, "--moe-shared-expert-intermediate-size", "96", "--hq-explain", recipe="{folder}/mixed.yaml"),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    (folder / "mixed.yaml").write_text(MIXED_EXPERTS)
    travelling = {**mh.Recipe.load(RECIPE).to_dict(), "name": "travelling", "dispatch": "quantized"}
    (folder / "travelling.yaml").write_text(json.dumps(travelling))
    for name, shipped in (("payloads", RECIPE), ("delayed_payloads", "fp8_delayed")):
        payloads = {**mh.Recipe.load(shipped).to_dict(), "name": name, "param_gather": "both"}
        (folder / f"{name}.yaml").write_text(json.dumps(payloads))
    return folder, run_cases(CASES, folder, timeout=600, ranks=4)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])


@pytest.mark.parametrize("name", ["long_bf16", "long"])
def test_fifty_steps_are_finite_and_fall(runs, name):
    found = numbers(runs, name)
    assert sorted(found) == list(range(1, LONG + 1))
    assert all(0 < entry["loss"] < 6 and 0 < entry["grad_norm"] < 100 for entry in found.values())
    assert found[LONG]["loss"] < 0.5 * found[1]["loss"]


@pytest.mark.parametrize(
    "name, original",
    [
        *((f"{name}_resumed", name) for name in ("long", "ep2", "shared", "fsdp2_payloads", "fsdp2_delayed")),
        *((f"{name}_payloads", name) for name in ("fsdp2", "fsdp2_few")),
        # neither dispatchers, quantized or not, nor recomputation change a bit, nor does padding to capacity
        *((name, "ep2") for name in ("ep2_gathered", "recomputed", "act_recomputed", "travelling")),
        ("padded", "dropped"),
        ("fused_permutation", "ep2"),  # with two experts a token sums are rounded once either way
        ("in_place", "ep2"),
        *((f"{name}_in_place", name) for name in ("ep4", "tp2_ep2", "top1", "shared")),
        ("tokens_stay", "one_rank"),
        ("hybrid", "ep2"),  # Megatron's HybridModel of the same layers, from the GPT's checkpoint
    ],
)
def test_is_the_same_bit_for_bit(runs, name, original):
    same(numbers(runs, name), numbers(runs, original))


@pytest.mark.parametrize(
    "name, original",
    [
        # the other implementation, and other expert-parallel layouts, with the optimizer's state taken over
        *((name, "ep2") for name in ("ep2_sequential", "ep2_grouped_again", "ep1", "ep2_again")),
        ("delayed_grouped", "delayed"),
    ],
)
def test_differs_only_in_the_order_of_the_gradient_norm_s_sum(runs, name, original):
    found, expected = numbers(runs, name), numbers(runs, original)
    assert ITERATIONS in found
    for iteration, entry in found.items():
        for key in entry.keys() & {"loss", "grad_norm", "valid_loss"}:
            assert entry[key] == pytest.approx(expected[iteration][key], rel=1e-6), (iteration, key)


@pytest.mark.parametrize("name", ["ep4", "etp2", "etp2_of_dp2", "tp2_ep2"])
def test_other_layouts_go_on_from_the_checkpoint(runs, name):
    """Sums come in another order: other microbatches, other parts of the attention."""
    found, expected = numbers(runs, name), numbers(runs, "ep2")
    assert sorted(found) == [3, 4]
    for iteration in found:
        assert found[iteration]["loss"] == pytest.approx(expected[iteration]["loss"], rel=5e-3)
    assert found[3]["grad_norm"] == pytest.approx(expected[3]["grad_norm"], rel=5e-2)


def test_fsdp2_gathers_experts_as_payloads_into_checkpoints_of_any_layout(runs):
    """Experts that a rank has whole, or none; the optimizer's state is another one, so one step is compared."""
    for name in ("fsdp2_payloads", "fsdp2_delayed", "fsdp2_few_payloads"):
        output = runs[1][name].output[0].splitlines()
        lines = [line for line in output if ".mlp.experts.linear_fc" in line and "experts:" in line]
        assert len(lines) == 4 and not any("high precision" in line for line in lines), name
    found, expected = (numbers(runs, name)[3] for name in ("ep2_from_fsdp2", "fsdp2_payloads"))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2.0**-6)  # FSDP2 sums gradients in bf16


def test_statistics_hold_every_expert_of_every_rank(runs):
    """The ranks that hold other experts measure those, and nothing else twice; no number of the run changes."""
    same(numbers(runs, "ep2_statistics"), numbers(runs, "ep2_resumed"))
    records = [[json.loads(line) for line in (runs[0] / f"ep2.rank{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)]
    modules = [{r["module"] for r in found} for found in records]
    assert all(".experts." in name for name in modules[0]) and not modules[0] & modules[1]
    assert len(modules[0]) == 2 * 2 * 2  # layers, experts of a rank, linears
    assert len(modules[1]) == len(modules[0]) + 2 * 2  # and both layers' attention


@pytest.mark.parametrize("name", ["shared", "delayed", "dropped", "padded", "top1"])
def test_learns(runs, name):
    found = numbers(runs, name)
    assert 0 < found[ITERATIONS]["loss"] < found[1]["loss"] < 6


def test_recipes_differ(runs):
    names = ("ep2", "dropped", "top1", "shared", "delayed")
    assert len({numbers(runs, name)[ITERATIONS]["loss"] for name in names}) == len(names)


def test_explain_has_a_row_for_experts_with_the_same_plan(runs):
    lines = runs[1]["explain"].output[0].splitlines()
    for experts, fmt in (("0:1", "mxfp8_e4m3"), ("1:3", "fp8_rowwise_e4m3"), ("3:4", "mxfp8_e4m3")):
        at = next(i for i, line in enumerate(lines) if f"mlp.experts.linear_fc2 experts {experts}" in line)
        fprop = next(line for line in lines[at:] if line.split()[:1] == ["fprop"])
        assert fprop.count(fmt) == 2
    assert any(line.split()[:1] == ["mlp.shared_experts.linear_fc1"] for line in lines)
    assert not any("mlp.linear_fc1" in line for line in lines)
