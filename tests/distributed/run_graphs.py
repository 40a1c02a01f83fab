"""Checks of training with Megatron's CUDA graphs (--cuda-graph-impl local): every number of a run without, bit for bit.

On GPUs with NCCL. On CPUs with the stand-in of graph_stand_in.py, which knows no sizes that are on the device: no experts.
Evaluations come in between, and every step has more than one microbatch.
"""

from __future__ import annotations

import json
import re
from functools import partial

from deterministic_runs import run_and_check  # before torch
from checks import arguments
from launch import HERE
from mcore_cases import MOCK, MODEL, TP2, Case, assert_ended, numbers, same

SCRIPT = str(HERE / "pretrain_with_graphs.py")
STEPS = 6
GRAPHS = ["--cuda-graph-impl", "local"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--global-batch-size", "16"]
STAGES = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "16"]
LIVES = {"version": 1, "weights": "quantized", "param_gather": "both"}
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall"
).split()
# name -> (recipe, flags, ranks)
RUNS = {
    "bf16": ("bf16", TP2, 2),
    "delayed": ("fp8_delayed", TP2, 2),
    "current": ("fp8_current", TP2, 2),
    "stochastic": ("nvfp4", TP2, 2),
    "mixed": ("mxfp8_fprop_nvfp4_bwd", OVERLAP, 2),
    "lives": ("{folder}/lives.json", OVERLAP, 2),
    "block": ("fp8_block", [], 1),
    "stages": ("fp8_delayed", STAGES, 2),
    "interleaved": ("nvfp4", [*STAGES, "--num-layers-per-virtual-pipeline-stage", "1"], 2),
    "context": ("mxfp8", ["--context-parallel-size", "2"], 2),
    "growing": ("fp8_delayed", [*TP2, "--rampup-batch-size", "4", "4", "12"], 2),
    "lives_scaled": ("{folder}/lives_scaled.json", TP2, 2),
}
ON_GPUS = {
    "experts": ("mxfp8", [*EXPERTS, *OVERLAP], 2),
    "experts_in_place": ("mxfp8", [*EXPERTS, *OVERLAP, "--moe-permute-fusion"], 2),
}
RESUMED, HALF = "resumed", str(STEPS // 2)


def runs() -> dict:
    """Those of the command line's ``--only``, of all that these devices have."""
    found, only = RUNS | (ON_GPUS if arguments().backend == "nccl" else {}), arguments().only
    return {name: run for name, run in found.items() if not only or name in only}


def case(name: str, recipe: str, flags: list[str], ranks: int) -> Case:
    steps = ["--num-layers", "4", "--train-iters", str(STEPS), "--eval-interval", "2"]
    wanted = ["--hq-recipe", recipe, "--hq-metrics-file", f"{{folder}}/{name}.metrics", "--deterministic-mode"]
    one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # Megatron asks for it
    return Case(name, [SCRIPT, *MODEL, *steps, *MOCK, *wanted, *flags], ranks, environment=one_queue)


def cases() -> list[Case]:
    found = []
    for name, (recipe, flags, ranks) in runs().items():
        found += [case(name, recipe, flags, ranks), case(f"{name}_graphs", recipe, [*flags, *GRAPHS], ranks)]
    if not arguments().only or RESUMED in arguments().only:
        save = ["--save", "{folder}/saved", "--save-interval", HALF]
        load = ["--load", "{folder}/saved", "--ckpt-step", HALF]
        found += [case(name, "nvfp4", [*TP2, *GRAPHS, *f], 2) for name, f in (("saved", save), (RESUMED, load))]
    return found


def trains_as_without(found, name: str) -> None:
    for run in (name, f"{name}_graphs"):
        assert_ended(found[1][run])
    said = re.search(r"CUDA graphs: (\d+) of (\d+) forwards and backwards of (\d+) layers", found[1][f"{name}_graphs"].output[0])
    captured, wanted, layers = map(int, said.groups())
    assert captured == wanted > 0 and layers > 0, said.group()
    without, graphs = numbers(found, name), numbers(found, f"{name}_graphs")
    assert sorted(without) == sorted(graphs) == list(range(1, STEPS + 1)), (sorted(without), sorted(graphs))
    assert len({entry["loss"] for entry in without.values()}) == STEPS
    same(graphs, without)


def resumes(found) -> None:
    for run in ("saved", RESUMED):
        assert_ended(found[1][run])
    resumed = numbers(found, RESUMED)
    assert sorted(resumed) == list(range(STEPS // 2 + 1, STEPS + 1)), sorted(resumed)
    same(resumed, numbers(found, "saved"))


def write(folder) -> None:
    for name, formats in (("lives", "mxfp8_e4m3"), ("lives_scaled", "fp8_delayed_e4m3:history=3")):
        (folder / f"{name}.json").write_text(json.dumps(LIVES | {"name": name, "defaults": formats}))


def checks(found) -> dict:
    as_without = {f"{name}_trains_as_without": partial(trains_as_without, found, name) for name in runs()}
    return as_without | ({RESUMED: partial(resumes, found)} if RESUMED in found[1] else {})


def main() -> None:
    run_and_check(cases(), write, checks)


if __name__ == "__main__":
    main()
