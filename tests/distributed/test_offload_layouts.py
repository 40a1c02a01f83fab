"""Activations in host memory beside everything that moves weights and tokens: bit for bit the run without.

All runs are forks of one launch of two CPU ranks.
"""

from __future__ import annotations

import json

import pytest
from mcore_cases import ITERATIONS, MIXED, MOCK, MODEL, SCRIPT, Case, assert_ended, numbers, run_cases, same

import megatron_hybrid as mh

pytestmark = pytest.mark.dist

OFFLOAD = ["--hq-offload-layers", "1", "--hq-offload-least-bytes", "1"]
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
).split()
EP2 = [*EXPERTS, "--expert-model-parallel-size", "2"]
FSDP2 = ["--use-torch-fsdp2", "--ckpt-format", "torch_dist"]
MEGATRON_FSDP = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]
MEGATRON_FSDP += ["--data-parallel-sharding-strategy", "optim_grads_params"]
STAGES = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1".split()
TWO_MICROBATCHES = ["--global-batch-size", "16"]
OF_EXPERTS = "nvfp4_rowscaled_fprop_mxfp8_bwd"
GATHERS, LIVES = {"param_gather": "both"}, {"weights": "quantized", "param_gather": "both"}
# name -> (recipe, its fields that change, flags)
LAYOUTS = {
    "fsdp2": (MIXED, GATHERS, FSDP2),
    "fsdp2_experts": (OF_EXPERTS, GATHERS, [*FSDP2, *EXPERTS]),
    "megatron_fsdp": (MIXED, LIVES, MEGATRON_FSDP),
    "megatron_fsdp_experts": (OF_EXPERTS, LIVES, [*MEGATRON_FSDP, *EXPERTS]),
    "quantized_weights": (OF_EXPERTS, LIVES, [*EP2, "--overlap-grad-reduce", "--overlap-param-gather"]),
    "quantized_tokens": (OF_EXPERTS, {"dispatch": "quantized"}, [*EP2, *TWO_MICROBATCHES]),
    "tokens_stay": ("mxfp8", {}, [*EXPERTS, "--moe-permute-fusion"]),
    "interleaved": ("fp8_delayed", {}, [*STAGES, *TWO_MICROBATCHES]),
    "context": ("nvfp4", {}, ["--context-parallel-size", "2"]),
}  # fmt: skip


def case(name: str, flags: list[str], recipe: str) -> Case:
    model = [flag for flag in MODEL if flag != "--use-distributed-optimizer" or "--use-torch-fsdp2" not in flags]
    files = ["--hq-recipe", f"{{folder}}/{recipe}.json", "--hq-metrics-file", f"{{folder}}/{name}.metrics"]
    return Case(name, [SCRIPT, *model, *MOCK, *files, *flags])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, cases = tmp_path_factory.mktemp("offload"), []
    for name, (recipe, fields, flags) in LAYOUTS.items():
        changed = {**mh.Recipe.load(recipe).to_dict(), **fields, "name": name}
        (folder / f"{name}.json").write_text(json.dumps(changed))
        cases += [case(name, flags, name), case(f"{name}_offloaded", [*flags, *OFFLOAD], name)]
    return folder, run_cases(cases, folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_bit_for_bit_the_run_without(runs, name):
    for run in (name, f"{name}_offloaded"):
        assert_ended(runs[1][run])
    found = numbers(runs, f"{name}_offloaded")
    assert sorted(found) == list(range(1, ITERATIONS + 1))
    same(found, numbers(runs, name))
