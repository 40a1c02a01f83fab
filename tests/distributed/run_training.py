"""Checks of whole training runs through Megatron's pretrain(): every scheme trains, and resumes bit for bit.

On GPUs with NCCL or on CPUs. On four ranks also TP 2 x DP 2 with
weights that live quantized in the distributed optimizer, from one rank's checkpoint on as that rank.
"""

from __future__ import annotations

import json
import math
from functools import partial

from deterministic_runs import WORLD, run_and_check  # before torch
from mcore_cases import MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, numbers, same

RECIPES = ("fp8_delayed", "nvfp4", "mxfp8_fprop_nvfp4_bwd", "fp8_current")
LIVES = {
    "version": 1, "name": "lives", "defaults": "mxfp8_e4m3", "weights": "quantized", "param_gather": "both",
    "master_cast": "param_dtype",
}  # fmt: skip
# of a loss: sums over ranks are rounded to bf16 where one rank sums in FP32. A rounding of 2^-8 of every logit, all to
# the same side, would be as much; means over 256 tokens of roundings to both sides are far less
CLOSE = 2.0**-8


def run(name: str, recipe: str, *flags: str, ranks: int | None = 2) -> Case:
    wanted = ["--hq-recipe", recipe, "--hq-metrics-file", f"{{folder}}/{name}.metrics", "--deterministic-mode"]
    layers = ["--num-layers", "4"]  # more than the first and the last, which some recipes leave alone
    tensor_parallel = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # Megatron asks for it
    return Case(name, [SCRIPT, *MODEL, *layers, *MOCK, *wanted, *flags], ranks, environment=tensor_parallel)


def saved_and_resumed(name: str, recipe: str, *flags: str) -> list[Case]:
    """A run on two tensor-parallel ranks, and the same from its middle on."""
    save = ["--save", f"{{folder}}/{name}_saved", "--save-interval", "2"]
    load = ["--load", f"{{folder}}/{name}_saved", "--ckpt-step", "2"]
    return [run(name, recipe, *TP2, *flags, *save), run(f"{name}_resumed", recipe, *TP2, *flags, *load)]


def cases() -> list[Case]:
    found = [case for recipe in RECIPES for case in saved_and_resumed(recipe, recipe)]
    if WORLD == 4:
        lives = "{folder}/lives.json"
        one = ["--make-vocab-size-divisible-by", "128", "--save", "{folder}/lives_saved", "--save-interval", "2"]
        load = [*TP2, "--load", "{folder}/lives_saved", "--ckpt-step", "2"]  # the same weights: the first are drawn by rank
        layout = "--dist-ckpt-optim-fully-reshardable"
        found += [run("lives_1", lives, *one, layout, ranks=1), run("lives_4", lives, *load, layout, ranks=4)]
    return found


def trains_and_resumes(runs, recipe: str) -> None:
    for name in (recipe, f"{recipe}_resumed"):
        assert_ended(runs[1][name])
    whole, resumed = numbers(runs, recipe), numbers(runs, f"{recipe}_resumed")
    assert all(math.isfinite(entry["loss"]) for entry in whole.values() if "loss" in entry), whole
    assert sorted(resumed) == [3, 4], sorted(resumed)
    same(resumed, whole)


def four_ranks_train_as_one(runs) -> None:
    for name in ("lives_4", "lives_1"):
        assert_ended(runs[1][name])
    four, one = numbers(runs, "lives_4"), numbers(runs, "lives_1")
    assert sorted(four) == [3, 4], sorted(four)
    for i, entry in four.items():
        assert abs(entry["loss"] - one[i]["loss"]) <= CLOSE * one[i]["loss"], (i, entry, one[i])


def write(folder) -> None:
    (folder / "lives.json").write_text(json.dumps(LIVES))


def checks(runs) -> dict:
    found = {f"{recipe}_trains_and_resumes": partial(trains_and_resumes, runs, recipe) for recipe in RECIPES}
    return found | ({"lives_4_ranks_train_as_one": partial(four_ranks_train_as_one, runs)} if WORLD == 4 else {})


def main() -> None:
    run_and_check(cases(), write, checks)


if __name__ == "__main__":
    main()
