"""Checkpoints of `--fp16` before the first step that loss scaling does not skip: saved, loaded, and gone on from bit for bit.

All runs are forks of one launch of two CPU ranks.
"""

from __future__ import annotations

import json

import pytest
from mcore_cases import MOCK, MODEL, SCRIPT, Case, assert_ended, numbers, run_cases, same

import megatron_hybrid as mh

pytestmark = pytest.mark.dist

SAVED, FIRST, LAST = 2, 5, 6  # iterations: of the checkpoint, of the first step that is not skipped, of the last
FP16 = ["--fp16" if flag == "--bf16" else flag for flag in MODEL]
FP16 += ["--initial-loss-scale", str(2**23), "--loss-scale-window", "100", "--hysteresis", "1", "--train-iters", str(LAST)]
WITHOUT = [flag for flag in FP16 if flag != "--use-distributed-optimizer"]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 2".split()
RESHARDABLE, TORCH = ["--dist-ckpt-optim-fully-reshardable"], ["--ckpt-format", "torch"]
TWO_DEVICES = ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5", "--use-precision-aware-optimizer", "--clip-grad", "0"]
HIGH, LIVES = "high", "lives"
RUNS = {
    "reshardable": (HIGH, FP16, RESHARDABLE),
    "buffers": (HIGH, FP16, []),
    "torch": (HIGH, FP16, TORCH),
    "lives": (LIVES, FP16, RESHARDABLE),
    "lives_buffers": (LIVES, FP16, []),
    "lives_torch": (LIVES, FP16, TORCH),
    "one_optimizer": (HIGH, WITHOUT, []),
    "one_optimizer_torch": (HIGH, WITHOUT, TORCH),
    "host": (HIGH, FP16, ["--hq-offload-optimizer"]),
    "two_devices": (HIGH, FP16, TWO_DEVICES),
    "two_devices_reshardable": (HIGH, FP16, [*TWO_DEVICES, *RESHARDABLE]),
    "experts": (HIGH, FP16, [*EXPERTS, *RESHARDABLE]),
    "async": (HIGH, FP16, ["--async-save"]),
}


def cases(name: str) -> list[Case]:
    """The whole run; its first part, which saves and ends; what goes on from there."""
    recipe, model, flags = RUNS[name]
    folder, end = f"{{folder}}/{name}_saved", ["--exit-interval", str(SAVED)]
    parts = {"": [], "_first": ["--save", folder, "--save-interval", str(SAVED), *end], "_resumed": ["--load", folder]}
    return [
        Case(f"{name}{part}", [SCRIPT, *model, *MOCK, "--hq-recipe", f"{{folder}}/{recipe}.json", *flags, *more,
                               "--hq-metrics-file", f"{{folder}}/{name}{part}.metrics"])
        for part, more in parts.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp16")
    recipe = mh.Recipe.load("fp8_delayed").to_dict()
    for name, fields in ((HIGH, {}), (LIVES, {"weights": "quantized", "param_gather": "both"})):
        (folder / f"{name}.json").write_text(json.dumps({**recipe, **fields, "name": name}))
    return folder, run_cases([case for name in RUNS for case in cases(name)], folder)


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_before_the_first_finite_step_is_gone_on_from_bit_for_bit(runs, name):
    for part in ("", "_first", "_resumed"):
        assert_ended(runs[1][f"{name}{part}"])
    whole, resumed = numbers(runs, name), numbers(runs, f"{name}_resumed")
    assert sorted(resumed) == list(range(SAVED + 1, LAST + 1))
    assert [i for i, entry in whole.items() if entry.get("grad_norm") is not None][0] == FIRST
    same(resumed, whole)
    same(numbers(runs, f"{name}_first"), whole)
