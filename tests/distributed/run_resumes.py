"""Checks that every shipped recipe resumes bit for bit under Megatron's deterministic mode; run_training.py has some more.

On two GPUs with NCCL; on CPUs test_mcore_recipes.py and test_mcore_moe.py do it, without that mode.
"""

from __future__ import annotations

import json
from functools import partial

from deterministic_runs import run_and_check  # before torch
from mcore_cases import ITERATIONS
from run_training import RECIPES, saved_and_resumed, trains_and_resumes

import megatron_hybrid as mh

OTHERS = [name for name, _ in mh.list_recipes() if name not in RECIPES]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64".split()


def flags_of(recipe: str) -> list[str]:
    """Of the model that a recipe is for, if it is not any."""
    rules = mh.Recipe.load(recipe).to_dict().get("rules", [])
    return EXPERTS if any(rule["match"].get("module_type") == "grouped_linear" for rule in rules) else []


def cases():
    chosen = [(name, f"{{folder}}/{name}.json", *flags_of(name)) for name in OTHERS]
    return [case for words in chosen for case in saved_and_resumed(*words)]


def write(folder) -> None:
    """The recipes, those that change late in a run at the first step after the resume."""
    for name in OTHERS:
        fields = mh.Recipe.load(name).to_dict()
        for rule in fields.get("rules", []):
            if "steps" in rule["match"]:
                rule["match"]["steps"] = f"{ITERATIONS // 2 + 1}:"
        (folder / f"{name}.json").write_text(json.dumps(fields))


def checks(runs) -> dict:
    return {f"{recipe}_trains_and_resumes": partial(trains_and_resumes, runs, recipe) for recipe in OTHERS}


if __name__ == "__main__":
    run_and_check(cases(), write, checks)
