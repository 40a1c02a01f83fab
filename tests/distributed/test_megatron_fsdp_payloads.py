"""Megatron-FSDP that gathers payloads of weights that live quantized: losses, bytes, checkpoints.

One launch of two ranks, and one of four, two of them tensor-parallel.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from launch import HERE
from mcore_cases import MIXED, MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, numbers, run_cases, same
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import megatron_hybrid as mh

pytestmark = pytest.mark.dist

WATCHED = str(HERE / "watched_pretrain.py")
SHARDED, GRADS, OPTIM = "optim_grads_params", "optim_grads", "optim"
UNCLIPPED = ["--clip-grad", "1e6"]  # norms of gradients are sums of shards, whose order differs
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
TWO_MICROBATCHES = ["--global-batch-size", "16"]
EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64", "--moe-aux-loss-coeff", "1e-2"),
    *("--moe-token-dispatcher-type", "alltoall"),
]
GROUPED = [*EXPERTS, "--moe-grouped-gemm"]
EP2 = ["--expert-model-parallel-size", "2"]
LIVES = {"weights": "quantized", "param_gather": "both"}
ROWS = {"weights": "quantized", "param_gather": "rowwise"}
DERIVED = {"columnwise_source": {"weight": "rowwise_dequantized"}}
LATE = {"rules": [{"match": {"steps": "3:"}, "use": "fp8_block_e4m3"}]}
RECIPES = {
    "plain": (MIXED, {}),
    "lives": (MIXED, LIVES),
    "rounded": (MIXED, {**LIVES, "master_cast": "param_dtype"}),
    "gathers": (MIXED, {"weights": "quantized", "param_gather": "high_precision"}),
    "tiles": ("fp8_block", ROWS),
    "squares": ("nvfp4", LIVES),
    "current": ("fp8_current", ROWS),
    "delayed": ("fp8_delayed", LIVES),
    "delayed_gathers": ("fp8_delayed", {"weights": "quantized", "param_gather": "high_precision"}),
    "derived": ("mxfp8", ROWS | {"defaults": {"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "mxfp8_e4m3"} | DERIVED}),
    "steps": (MIXED, LIVES | LATE),
    "head": ("mxfp8", LIVES | {"lm_head": True}),
    "stacked": ("mxfp8", LIVES),
    "stacked-steps": ("mxfp8", LIVES | LATE),
}


def case(name: str, recipe: str, *flags: str, fsdp: str | None = SHARDED, mode: str = "count", ranks: int | None = None) -> Case:
    """fsdp: the strategy, or None for the distributed optimizer. mode: ``check`` to compare the payloads gathered."""
    sharding = [] if fsdp is None else ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]
    sharding += [] if fsdp is None else ["--data-parallel-sharding-strategy", fsdp]
    chosen = ["--hq-recipe", f"{{folder}}/{recipe}.json", "--hq-metrics-file", f"{{folder}}/{name}.metrics"]
    watched = [WATCHED, f"{{folder}}/{name}.counts", mode]
    return Case(name, [*watched, SCRIPT, *MODEL, *MOCK, *UNCLIPPED, *chosen, *sharding, *flags], ranks)


def resumed(name: str, recipe: str, *flags: str, **kw) -> list[Case]:
    there = f"{{folder}}/{name}"
    return [
        case(name, recipe, *flags, "--save", there, "--save-interval", "2", **kw),
        case(f"{name}-resumed", recipe, *flags, "--load", there, "--ckpt-step", "2", **kw),
    ]


AS_ELSEWHERE = {  # a run -> the same under the distributed optimizer, or with weights in high precision
    "lives": "lives-plain", "optim": "lives-plain", "grads": "lives-plain", "delayed": "delayed-plain", "derived": "derived-plain",
    "steps": "steps-plain", "tp2": "tp2-plain", "experts": "experts-plain", "grouped": "grouped-plain",
    "stacked": "stacked-plain", "stacked-grads": "stacked-plain", "stacked-steps": "stacked-steps-plain", "rounded": "plain",
}  # fmt: skip
AS_EACH_OTHER = {  # runs under Megatron-FSDP
    "gathers": "lives", "full": "lives", "pools": "lives", "two-gathers": "two", "delayed_gathers": "delayed",
}  # fmt: skip
RESUMED = ["lives", "grads", "delayed", "delayed_gathers", "derived", "ep2", "grouped", "grouped-ep2"]
CHECKED = ["lives", "grads", "tiles", "squares", "current", "derived", "head"]
CASES = [
    *(case(f"{name}-plain", name, fsdp=None) for name in ("lives", "delayed", "derived", "steps")),
    case("tp2-plain", "derived", *TP2, fsdp=None),
    case("experts-plain", "lives", *EXPERTS, fsdp=None),
    case("grouped-plain", "delayed", *GROUPED, fsdp=None),
    *(case(f"{name}-plain", name, *GROUPED, fsdp=None) for name in ("stacked", "stacked-steps")),
    *(case(name, name, *GROUPED, mode="check") for name in ("stacked", "stacked-steps")),
    *resumed("lives", "lives", mode="check"),
    *resumed("grads", "lives", fsdp=GRADS, mode="check"),
    *resumed("delayed", "delayed"),
    *resumed("delayed_gathers", "delayed_gathers"),
    *resumed("derived", "derived", mode="check"),
    *resumed("ep2", "lives", *EXPERTS, *EP2),
    *resumed("grouped", "delayed", *GROUPED),
    *resumed("grouped-ep2", "delayed", *GROUPED, *EP2),
    case("optim", "lives", fsdp=OPTIM),
    case("plain", "plain"),
    *(case(name, name) for name in ("rounded", "gathers", "steps")),
    *(case(name, name, mode="check") for name in ("tiles", "squares", "current", "head")),
    case("full", "lives", *FULL),
    case("pools", "lives", "--fsdp-double-buffer"),
    case("two", "lives", *TWO_MICROBATCHES),
    case("two-gathers", "gathers", *TWO_MICROBATCHES),
    case("tp2", "derived", *TP2),
    case("experts", "lives", *EXPERTS),
    case("stacked-grads", "stacked", *GROUPED, fsdp=GRADS),
]
TP2_DP2 = ["derived", "current"]  # a column from the row, with an amax over all shards; one scale a tensor
WIDE = [case(f"{name}-{kind}", name, *TP2, fsdp=fsdp, ranks=4) for name in TP2_DP2 for kind, fsdp in
        (("fsdp", SHARDED), ("plain", None))]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = with_recipes(tmp_path_factory.mktemp("payloads"))
    return folder, run_cases(CASES, folder, timeout=900)


def with_recipes(folder):
    for name, (base, fields) in RECIPES.items():
        (folder / f"{name}.json").write_text(json.dumps({**mh.Recipe.load(base).to_dict(), **fields, "name": name}))
    return folder


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_runs_to_the_end(runs, name):
    """Where payloads are compared, with those of the whole masters."""
    assert_ended(runs[1][name])


@pytest.mark.parametrize("name", AS_ELSEWHERE)
def test_losses_are_those_of_the_distributed_optimizer_and_of_high_precision_weights(runs, name):
    """Gradients' buffers are others there, and so is the order of sums in their norms."""
    found, expected = numbers(runs, name), numbers(runs, AS_ELSEWHERE[name])
    same(found, expected, but=("ms", "grad_norm"))
    assert found[4]["loss"] < found[1]["loss"]
    for iteration, entry in found.items():
        assert entry["grad_norm"] == pytest.approx(expected[iteration]["grad_norm"], rel=2.0**-20)


@pytest.fixture(scope="module")
def wide_runs(tmp_path_factory):
    folder = with_recipes(tmp_path_factory.mktemp("wide"))
    return folder, run_cases(WIDE, folder, timeout=400, ranks=4)


@pytest.mark.parametrize("name", TP2_DP2)
def test_tensor_parallel_shards_that_are_sharded_again(wide_runs, name):
    for kind in ("fsdp", "plain"):
        assert_ended(wide_runs[1][f"{name}-{kind}"])
    same(numbers(wide_runs, f"{name}-fsdp"), numbers(wide_runs, f"{name}-plain"), but=("ms", "grad_norm"))


@pytest.mark.parametrize("name", AS_EACH_OTHER)
def test_what_is_gathered_and_when_changes_no_bit(runs, name):
    same(numbers(runs, name), numbers(runs, AS_EACH_OTHER[name]))


@pytest.mark.parametrize("name", RESUMED)
def test_p38_resume_is_bit_exact(runs, name):
    whole, resumed = numbers(runs, name), numbers(runs, f"{name}-resumed")
    assert sorted(resumed) == [3, 4]
    same(resumed, whole)


def gathers(runs, name: str, iteration: int = 3) -> Counter:
    """(dtype, bytes of a rank) -> how many in an iteration."""
    lines = map(json.loads, (runs[0] / f"{name}.counts.0").read_text().splitlines())
    return Counter((dtype, size) for at, dtype, size in lines if at == iteration)


def test_gathers_are_payloads(runs):
    """A rank's elements are those of the FP32 masters that ``high_precision`` sends; weights of four linears a layer."""
    layers, linears = 2, 4
    (size, sent), = ((size, n) for (dtype, size), n in gathers(runs, "gathers").items() if dtype == "uint8")  # fmt: skip
    elements = size // 4
    assert sent == 2 * layers
    rows, columns = elements * 33 // 32, elements * 9 // 16 + 4 * linears  # MXFP8; NVFP4 and its outer scale
    found = {size: n for (dtype, size), n in gathers(runs, "lives").items() if dtype == "uint8"}
    assert sum(found.values()) == 2 * layers and found[rows] == layers
    (backward,) = found.keys() - {rows}
    assert elements * 9 // 16 <= backward <= columns and found[backward] == layers
    assert gathers(runs, "derived")["uint8", rows] == 2 * layers  # the row in both passes
    quantized = sum(size * n for (dtype, size), n in gathers(runs, "lives").items() if dtype == "uint8")
    assert quantized < 0.4 * 2 * 2 * elements * 2 * layers  # bf16 in both passes


def test_where_weights_stay_one_gather_a_step_brings_both(runs):
    sent = {size: n for (dtype, size), n in gathers(runs, "grads").items() if dtype == "uint8"}
    assert list(sent.values()) == [1]
    assert {size: n for (dtype, size), n in gathers(runs, "optim").items() if dtype == "uint8"} == sent


@pytest.mark.parametrize("name", ["lives", "grads", "delayed", "derived", "ep2", "grouped-ep2"])
def test_every_weight_moves(runs, name, tmp_path):
    states = []
    for step in (2, 4):
        dcp_to_torch_save(runs[0] / name / f"iter_{step:07d}", tmp_path / f"{step}.pt")
        states.append(torch.load(tmp_path / f"{step}.pt", weights_only=False)["model"])
    weights = [key for key in states[0] if "weight" in key and isinstance(states[0][key], torch.Tensor)]
    assert len(weights) > 10
    for key in weights:
        assert not torch.equal(states[0][key], states[1][key]), key
