"""The optimizer's state in host memory: bit for bit the run without, resumed too; one launch of two CPU ranks."""

from __future__ import annotations

import json

import pytest
from mcore_cases import ITERATIONS, MIXED, MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, numbers, run_cases, same

import megatron_hybrid as mh

pytestmark = pytest.mark.dist
MIDDLE = ITERATIONS // 2
OURS = ("--hq-offload-optimizer",)
MEGATRONS = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--optimizer-offload-fraction")
WITHOUT = [flag for flag in MODEL if flag != "--use-distributed-optimizer"]
MEGATRON_FSDP = ("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--data-parallel-sharding-strategy", "optim_grads_params")
RESHARDABLE = ("--dist-ckpt-optim-fully-reshardable",)


def run(name: str, recipe: str, *flags: str, model=MODEL) -> Case:
    metrics = f"{{folder}}/{name}.metrics"
    return Case(name, [SCRIPT, *model, *MOCK, "--hq-recipe", recipe, "--hq-metrics-file", metrics, *flags])


def saved(name: str) -> tuple[str, ...]:
    return "--save", f"{{folder}}/{name}_saved", "--save-interval", str(MIDDLE)


def loaded(name: str) -> tuple[str, ...]:
    return "--load", f"{{folder}}/{name}_saved", "--ckpt-step", str(MIDDLE)


LIVES = "{folder}/lives.json"
CASES = [
    run("plain", MIXED, *saved("plain")),
    run("all", MIXED, *MEGATRONS, "1.0"),
    run("half", MIXED, *MEGATRONS, "0.5", "--overlap-cpu-optimizer-d2h-h2d", *saved("half")),
    run("half_resumed", MIXED, *MEGATRONS, "0.5", *loaded("half")),
    run("whole", MIXED, *MEGATRONS, "0.5", *saved("whole"), *RESHARDABLE),
    run("whole_resumed", MIXED, *MEGATRONS, "0.5", *loaded("whole"), *RESHARDABLE),
    run("ours", MIXED, *OURS, *saved("ours")),
    run("ours_resumed", MIXED, *OURS, *loaded("ours")),
    run("ours_left", MIXED, *loaded("ours")),
    run("lives", LIVES),
    run("lives_ours", LIVES, *OURS, *saved("lives_ours")),
    run("lives_ours_resumed", LIVES, *OURS, *loaded("lives_ours")),
    run("tp", "fp8_delayed", *TP2, model=WITHOUT),
    run("tp_ours", "fp8_delayed", *TP2, *OURS, model=WITHOUT),
]
REFUSED = {
    "lives_all": (run("lives_all", LIVES, *MEGATRONS, "1.0"), "--hq-offload-optimizer keeps moments in host memory"),
    "both": (run("both", MIXED, *OURS, *MEGATRONS, "1.0"), "both move the optimizer's state"),
    "fsdp2": (run("fsdp2", MIXED, *OURS, "--use-torch-fsdp2", model=WITHOUT), "its parameters are DTensors"),
    "megatron_fsdp": (run("megatron_fsdp", MIXED, *OURS, *MEGATRON_FSDP), "beside --use-megatron-fsdp: its parameters are"),
    "sgd": (run("sgd", MIXED, *OURS, "--optimizer", "sgd"), "beside --optimizer sgd"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizer")
    fields = {**mh.Recipe.load(MIXED).to_dict(), "weights": "quantized", "param_gather": "both"}
    (folder / "lives.json").write_text(json.dumps(fields))
    return folder, run_cases([*CASES, *(case for case, _ in REFUSED.values())], folder)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])


@pytest.mark.parametrize(
    "found, expected",
    [("all", "plain"), ("half", "plain"), ("whole", "plain"), ("ours", "plain"), ("lives_ours", "lives"),
     ("tp_ours", "tp")],
)  # fmt: skip
def test_bit_for_bit_the_run_without(runs, found, expected):
    assert sorted(numbers(runs, found)) == list(range(1, ITERATIONS + 1))
    same(numbers(runs, found), numbers(runs, expected))


@pytest.mark.parametrize("name", ["half", "whole", "ours", "lives_ours"])
def test_resumes_bit_for_bit(runs, name):
    found = numbers(runs, f"{name}_resumed")
    assert sorted(found) == list(range(MIDDLE + 1, ITERATIONS + 1))
    same(found, numbers(runs, name))


def test_its_checkpoint_goes_on_without(runs):
    same(numbers(runs, "ours_left"), numbers(runs, "plain"))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_start(runs, name):
    done = runs[1][name]
    assert done.exit == [2, 2] and REFUSED[name][1] in done.output[0], done.output[0][-2000:]
    assert "Traceback" not in done.output[0]
