"""Weights that live quantized through Megatron's pretrain(): losses of bf16 parameters, resumes, files, refusals.

All runs are forks of one launch of two CPU ranks. Without clipping: the norm's sum depends on the buffers' layout.
"""

from __future__ import annotations

import json

import pytest
import torch
from mcore_cases import ITERATIONS, MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, metrics, run_cases

import megatron_hybrid as mh

pytestmark = pytest.mark.dist

MIDDLE = ITERATIONS // 2
LIVES = {"weights": "quantized", "param_gather": "both"}
RECIPES = {
    "plain": {},
    "lives": {**LIVES, "master_cast": "param_dtype"},
    "lives32": LIVES,
    "gathers": {"weights": "quantized", "param_gather": "high_precision"},
}
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"]
FRESH = ["--no-load-optim", "--no-load-rng", "--hq-switch-recipe"]
WITHOUT = [flag for flag in MODEL if flag != "--use-distributed-optimizer"]


RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]


def run(name: str, recipe: str, *flags: str, model=MODEL, ranks: int | None = None) -> Case:
    metrics_file = f"{{folder}}/{name}.metrics"
    chosen = ["--hq-recipe", f"{{folder}}/{recipe}.json", "--hq-metrics-file", metrics_file, "--clip-grad", "0"]
    return Case(name, [SCRIPT, *model, *MOCK, *chosen, *RESHARDABLE, *flags], ranks)


def saved(name: str) -> list[str]:
    return ["--save", f"{{folder}}/{name}_saved", "--save-interval", str(MIDDLE)]


def loaded(name: str) -> list[str]:
    return ["--load", f"{{folder}}/{name}_saved", "--ckpt-step", str(MIDDLE)]


CASES = [
    run("plain", "plain", *saved("plain")),
    run("lives", "lives"),
    run("overlap", "lives", *OVERLAP),
    run("lives32", "lives32", *saved("lives32")),
    run("gathers", "gathers"),
    run("resumed", "lives32", *loaded("lives32")),
    run("resumed_overlap", "lives32", *OVERLAP, *loaded("lives32")),
    run("tuned_plain", "plain", *loaded("plain"), *FRESH),
    run("tuned", "lives", *loaded("plain"), *FRESH),
    run("back", "plain", *loaded("lives32"), *FRESH),
    run("delayed", "delayed", *TP2, *saved("delayed")),
    run("delayed_resumed", "delayed", *TP2, *loaded("delayed")),
    run("delayed_one", "delayed", *loaded("delayed"), "--make-vocab-size-divisible-by", "128", ranks=1),
    run("without", "lives", model=WITHOUT),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    base = mh.Recipe.load("mxfp8_fprop_nvfp4_bwd").to_dict()
    for name, fields in RECIPES.items():
        (folder / f"{name}.json").write_text(json.dumps({**base, **fields}))
    (folder / "delayed.json").write_text(json.dumps({**mh.Recipe.load("fp8_delayed").to_dict(), **LIVES}))
    return folder, run_cases(CASES, folder, timeout=600)


def numbers(runs, name: str) -> dict[int, dict]:
    found = metrics(runs[0] / f"{name}.metrics")
    return {i: {k: v for k, v in entry.items() if k not in ("ms", "grad_norm")} for i, entry in found.items()}


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name != "without"])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])


def test_p56_losses_are_those_of_bf16_parameters_overlapped_or_not(runs):
    plain = numbers(runs, "plain")
    assert numbers(runs, "lives") == numbers(runs, "overlap") == plain
    assert plain[ITERATIONS]["loss"] < plain[1]["loss"]


def test_gathering_masters_or_payloads_is_the_same(runs):
    assert numbers(runs, "gathers") == numbers(runs, "lives32") != numbers(runs, "lives")


@pytest.mark.parametrize("name, whole", [("resumed", "lives32"), ("resumed_overlap", "lives32"), ("delayed_resumed", "delayed")])
def test_p38_a_resumed_run_repeats_the_uninterrupted_one(runs, name, whole):
    found, expected = numbers(runs, name), numbers(runs, whole)
    assert sorted(found) == list(range(MIDDLE + 1, ITERATIONS + 1))
    assert found == {i: expected[i] for i in found}


def test_two_tensor_parallel_ranks_go_on_as_one(runs):
    found, expected = numbers(runs, "delayed_one")[MIDDLE + 1], numbers(runs, "delayed")[MIDDLE + 1]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_p38_a_bf16_checkpoint_into_quantized_weights_and_back(runs):
    """Masters start from the loaded values, as bf16 parameters' do; the way back is the decode."""
    assert numbers(runs, "tuned") == numbers(runs, "tuned_plain")
    assert numbers(runs, "back")[MIDDLE + 1]["loss"] == pytest.approx(numbers(runs, "lives32")[MIDDLE + 1]["loss"], rel=0.05)


def test_files_hold_bf16_weights(runs):
    from torch.distributed.checkpoint import FileSystemReader

    folder = runs[0] / "lives32_saved" / f"iter_{MIDDLE:07d}"
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {k: v.properties.dtype for k, v in found.items() if k.endswith("linear_fc1.weight") and "optimizer" not in k}
    assert weights and set(weights.values()) == {torch.bfloat16}, list(found)
    assert not any(b"rebuild_hybrid" in file.read_bytes() for file in folder.glob("*.distcp"))


def test_without_masters_it_is_refused(runs):
    case = runs[1]["without"]
    assert case.exit == [2, 2] and "needs --use-distributed-optimizer" in case.output[0]
    assert "Traceback" not in case.output[0]
