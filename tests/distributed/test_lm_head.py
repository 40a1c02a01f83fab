"""A quantized output layer, its weight the embedding's or its own: whatever lives or travels quantized changes no bit.

All runs are forks of one launch of two CPU ranks.
"""

from __future__ import annotations

import json

import pytest
from mcore_cases import ITERATIONS, MIXED, MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, numbers, run_cases, same

import megatron_hybrid as mh

pytestmark = pytest.mark.dist

UNTIED, DISTRIBUTED = "--untie-embeddings-and-output-weights", "--use-distributed-optimizer"
FSDP2 = ["--use-torch-fsdp2", "--ckpt-format", "torch_dist"]
MEGATRON_FSDP = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]
MEGATRON_FSDP += ["--data-parallel-sharding-strategy", "optim_grads_params"]
ALIKE = ["--make-vocab-size-divisible-by", "128", "--clip-grad", "0"]  # norms are sums over buffers
STAGES = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "16"]
HIGH, LIVES, GATHERS = "high", "lives", "gathers"
_HEAD = {**mh.Recipe.load(MIXED).to_dict(), "lm_head": True}
RECIPES = {
    HIGH: _HEAD,
    LIVES: {**_HEAD, "weights": "quantized", "param_gather": "both", "master_cast": "param_dtype"},
    GATHERS: {**_HEAD, "param_gather": "both"},
    "plain": {**_HEAD, "lm_head": False},
}
# name -> (flags that every model here has and this one has not, flags, recipe to compare with `high`)
RUNS = {
    "own": ([], [], LIVES),
    "tied": ([UNTIED], [], LIVES),
    "tied_stages": ([UNTIED], STAGES, LIVES),
    "tied_interleaved": ([UNTIED], [*STAGES, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"], LIVES),
    "tied_tensor_parallel": ([UNTIED], TP2, LIVES),
    "tied_megatron_fsdp": ([UNTIED], MEGATRON_FSDP, LIVES),
    "fsdp2": ([DISTRIBUTED], FSDP2, GATHERS),
}


def case(name: str, recipe: str) -> Case:
    without, flags, _ = RUNS[name]
    files = ["--hq-recipe", f"{{folder}}/{recipe}.json", "--hq-metrics-file", f"{{folder}}/{name}_{recipe}.metrics"]
    model = [flag for flag in MODEL if flag not in without]
    return Case(f"{name}_{recipe}", [SCRIPT, *model, *MOCK, *ALIKE, *files, *flags])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    for name, fields in RECIPES.items():
        (folder / f"{name}.json").write_text(json.dumps({**fields, "name": name}))
    cases = [case(name, recipe) for name, (*_, other) in RUNS.items() for recipe in (HIGH, other)]
    return folder, run_cases([*cases, case("tied", "plain")], folder)


@pytest.mark.parametrize("name", RUNS)
def test_bit_for_bit_with_weights_in_high_precision(runs, name):
    other = f"{name}_{RUNS[name][-1]}"
    for run in (f"{name}_{HIGH}", other):
        assert_ended(runs[1][run])
        assert "> 9 of 9 linears quantized" in runs[1][run].output[0] or name in ("tied_stages", "tied_interleaved")
    found = numbers(runs, other)
    assert sorted(found) == list(range(1, ITERATIONS + 1))
    same(found, numbers(runs, f"{name}_{HIGH}"), but=("ms", "grad_norm"))


def test_the_head_is_quantized(runs):
    assert numbers(runs, "tied_plain")[1]["loss"] != numbers(runs, f"tied_{HIGH}")[1]["loss"]
