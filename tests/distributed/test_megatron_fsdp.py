"""Megatron-FSDP beside recipes: the losses of the distributed optimizer, and checkpoints, in one launch of two CPU ranks."""

from __future__ import annotations

import json

import pytest
from mcore_cases import MIXED, MOCK, MODEL, SCRIPT, Case, assert_ended, numbers, run_cases, same

import megatron_hybrid as mh

pytestmark = pytest.mark.dist

FSDP = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--data-parallel-sharding-strategy"]
STRATEGIES = ["optim", "optim_grads", "optim_grads_params"]
SHARDED = [*FSDP, "optim_grads_params"]
# Norms of gradients are sums of shards, whose order differs: they must not reach the weights. (0: Megatron-FSDP logs none.)
UNCLIPPED = ["--clip-grad", "1e6"]
TWO_MICROBATCHES = ["--global-batch-size", "16"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
PARTS = ["--recompute-granularity", "selective", "--recompute-modules", "core_attn", "layernorm", "mlp"]
EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64", "--moe-aux-loss-coeff", "1e-2"),
    *("--moe-token-dispatcher-type", "alltoall"),
]
EP2 = ["--expert-model-parallel-size", "2"]
OF_EXPERTS = "nvfp4_rowscaled_fprop_mxfp8_bwd"
TIED = "--untie-embeddings-and-output-weights"
SHORT = {"version": 1, "name": "short", "defaults": "fp8_delayed_e4m3:history=2"}
HEAD = "version: 1\nname: head\ndefaults: mxfp8_e4m3\nlm_head: true\n"


def case(name: str, recipe: str, *flags: str, model=MODEL) -> Case:
    metrics = ["--hq-metrics-file", f"{{folder}}/{name}.metrics"]
    return Case(name, [SCRIPT, *model, *MOCK, *UNCLIPPED, "--hq-recipe", recipe, *metrics, *flags])


def both(name: str, recipe: str, *flags: str, fsdp=SHARDED, **kw) -> list[Case]:
    return [case(f"{name}-plain", recipe, *flags, **kw), case(name, recipe, *flags, *fsdp, **kw)]


def resumed(name: str, recipe: str, *flags: str) -> list[Case]:
    there = f"{{folder}}/{name}"
    return [
        case(f"{name}-whole", recipe, *flags, "--save", there, "--save-interval", "2"),
        case(f"{name}-resumed", recipe, *flags, "--load", there, "--ckpt-step", "2"),
    ]


def switched(name: str, first: str, to: str, *flags: str) -> list[Case]:
    """The first half of a run with one recipe, the second with another."""
    there = f"{{folder}}/{name}-first"
    return [
        case(f"{name}-first", first, *flags, "--save", there, "--save-interval", "2", "--exit-interval", "2"),
        case(name, to, *flags, "--load", there, "--ckpt-step", "2", "--hq-switch-recipe"),
    ]


EXACT = ["bf16", "fp8_current", "fp8_delayed", MIXED, "tp2", "cp2", "experts", "two-optim"]
CLOSE = ["two-optim_grads", "two-optim_grads_params", "head", "ep2"]
RESUMED = ["r-delayed", "r-optim", "r-grads", "r-experts", "r-ep2", "r-grouped", "r-grouped-optim", "r-grouped-ep2"]
GROUPED = [*EXPERTS, "--moe-grouped-gemm"]
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
SWITCHED = {  # bf16's checkpoints have no histories
    "s-delayed": ["bf16", "fp8_delayed"],
    "s-lives": ["bf16", "{folder}/lives.json"],
    "s-experts": ["bf16", "fp8_delayed", *EXPERTS],
    "s-grouped": ["bf16", "fp8_delayed", *GROUPED],
    "s-length": ["fp8_delayed", "{folder}/short.json"],
    "s-away": ["fp8_delayed", "fp8_current"],
}
CASES = [
    *(c for recipe in EXACT[:4] for c in both(recipe, recipe)),
    *both("tp2", MIXED, *TP2),
    *both("cp2", "fp8_delayed", "--context-parallel-size", "2"),
    *both("experts", OF_EXPERTS, *EXPERTS, "--moe-grouped-gemm"),
    *both("ep2", OF_EXPERTS, *EXPERTS, "--moe-grouped-gemm", *EP2),
    *both("head", "{folder}/head.yaml", model=[flag for flag in MODEL if flag != TIED]),
    case("two-plain", "bf16", *TWO_MICROBATCHES),
    *(case(f"two-{strategy}", "bf16", *TWO_MICROBATCHES, *FSDP, strategy) for strategy in STRATEGIES),
    case("full", MIXED, *FULL, *SHARDED),
    case("parts", MIXED, *PARTS, *SHARDED),
    case("pools", MIXED, "--fsdp-double-buffer", *SHARDED),
    *resumed("r-delayed", "fp8_delayed", *SHARDED),
    *resumed("r-optim", "fp8_delayed", *FSDP, "optim"),
    *resumed("r-grads", MIXED, *FSDP, "optim_grads"),
    *resumed("r-experts", OF_EXPERTS, *EXPERTS, *SHARDED),
    *resumed("r-ep2", OF_EXPERTS, *EXPERTS, *EP2, *SHARDED),
    *resumed("r-grouped", "fp8_delayed", *GROUPED, *SHARDED),
    *resumed("r-grouped-optim", OF_EXPERTS, *GROUPED, *FSDP, "optim"),
    *resumed("r-grouped-ep2", "fp8_delayed", *GROUPED, *EP2, *SHARDED),
    *(c for name in SWITCHED for c in switched(f"{name}-plain", *SWITCHED[name], RESHARDABLE)),
    *(c for name in SWITCHED for c in switched(name, *SWITCHED[name], *SHARDED)),
    case("r-grouped-one", "fp8_delayed", *GROUPED, *SHARDED, "--load", "{folder}/r-grouped-ep2", "--ckpt-step", "2"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron_fsdp")
    (folder / "head.yaml").write_text(HEAD)
    lives = mh.Recipe.load("fp8_delayed").to_dict() | {"weights": "quantized", "param_gather": "both"}
    (folder / "lives.json").write_text(json.dumps(lives))
    (folder / "short.json").write_text(json.dumps(mh.Recipe.from_dict(SHORT).to_dict()))
    return folder, run_cases(CASES, folder, timeout=900)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])


def plain(runs, name: str) -> dict[int, dict]:
    return numbers(runs, "two-plain" if name.startswith("two-") else f"{name}-plain")


@pytest.mark.parametrize("name", EXACT)
def test_losses_are_those_of_the_distributed_optimizer(runs, name):
    found, expected = numbers(runs, name), plain(runs, name)
    same(found, expected, but=("ms", "grad_norm"))
    for iteration, entry in found.items():  # FP32 sums of a hundred thousand squares
        assert entry["grad_norm"] == pytest.approx(expected[iteration]["grad_norm"], rel=2.0**-20)


@pytest.mark.parametrize("name", CLOSE)
def test_other_orders_of_sums_stay_close(runs, name):
    """Microbatches reduced one by one, a tied weight's gradient in bf16, means over experts' own ranks."""
    found, expected = numbers(runs, name), plain(runs, name)
    assert sorted(found) == sorted(expected)
    for iteration, entry in found.items():
        assert entry["loss"] == pytest.approx(expected[iteration]["loss"], rel=2.0**-12)
        assert entry["grad_norm"] == pytest.approx(expected[iteration]["grad_norm"], rel=2.0**-8)


@pytest.mark.parametrize("name", ["full", "parts", "pools"])
def test_recomputation_and_pooled_buffers_change_no_bit(runs, name):
    same(numbers(runs, name), numbers(runs, MIXED))


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_exact(runs, name):
    whole, resumed = numbers(runs, f"{name}-whole"), numbers(runs, f"{name}-resumed")
    assert sorted(resumed) == [3, 4]
    same(resumed, whole)


@pytest.mark.parametrize("name", SWITCHED)
def test_c67_another_recipe_goes_on_as_under_the_distributed_optimizer(runs, name):
    found, expected = numbers(runs, name), numbers(runs, f"{name}-plain")
    assert sorted(found) == [3, 4]
    same(found, expected, but=("ms", "grad_norm"))


def test_experts_go_on_with_other_numbers_of_ranks(runs):
    """Every expert is the one that it was, moments and scales included."""
    whole, resumed = numbers(runs, "r-grouped-ep2-whole"), numbers(runs, "r-grouped-one")
    assert sorted(resumed) == [3, 4]
    for iteration, entry in resumed.items():
        assert entry["loss"] == pytest.approx(whole[iteration]["loss"], rel=2.0**-10)


def test_files_have_a_tensor_an_expert(runs):
    from torch.distributed.checkpoint import FileSystemReader

    found = FileSystemReader(runs[0] / "r-grouped-ep2" / "iter_0000002").read_metadata().state_dict_metadata
    experts = {key for key in found if ".experts.linear_fc1.weight" in key and key.startswith("model.")}
    names = {key.rpartition(".")[2] for key in experts}
    assert names == {f"weight{e}_{part}" for e in range(4) for part in "wv"}, names
    histories = {key.partition(".linear_fc1.hq.")[2].partition(".")[0] for key in found if ".linear_fc1.hq." in key}
    assert histories >= {"0", "1", "2", "3"}, histories
