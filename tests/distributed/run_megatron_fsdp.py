"""Checks of training under Megatron-FSDP, on two ranks: on GPUs with NCCL, or on the CPU.

Losses are those of the distributed optimizer, whichever way the weights are gathered; runs resume bit for bit; payloads
gathered are a cast of the whole master, compared while the runs train.
"""

from __future__ import annotations

from functools import partial

from deterministic_runs import run_and_check  # before torch
from mcore_cases import assert_ended, numbers, same
from megatron_fsdp_cases import AS_EACH_OTHER, AS_ELSEWHERE, CASES, with_recipes

# every strategy, gathers in high precision and of payloads, delayed scales, experts in common memory, expert-parallel ones
NAMES = (
    "lives-plain", "lives", "lives-resumed", "gathers", "optim", "grads", "grads-resumed", "full", "parts", "delayed-plain",
    "delayed", "delayed-resumed", "stacked-plain", "stacked", "ep2", "ep2-resumed",
)  # fmt: skip
# of a loss: the two sum gradients over ranks in other orders, of which kernels on a GPU make other roundings to bf16
CLOSE = 2.0**-8


def cases() -> list:
    """Megatron-FSDP wants other connections than tensor parallelism does."""
    found = {case.name: case for case in CASES}
    for name in NAMES:
        found[name].argv.append("--deterministic-mode")
        found[name].environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    return [found[name] for name in NAMES]


def ends(runs, name: str) -> None:
    assert_ended(runs[1][name])


def as_elsewhere(runs, name: str) -> None:
    found, expected = numbers(runs, name), numbers(runs, AS_ELSEWHERE[name])
    assert sorted(found) == sorted(expected)
    for i, entry in found.items():
        assert abs(entry["loss"] - expected[i]["loss"]) <= CLOSE * expected[i]["loss"], (i, entry, expected[i])


def as_each_other(runs, name: str) -> None:
    same(numbers(runs, name), numbers(runs, AS_EACH_OTHER[name]))


def resumes(runs, name: str) -> None:
    resumed = numbers(runs, f"{name}-resumed")
    assert sorted(resumed) == [3, 4]
    same(resumed, numbers(runs, name))


def checks(runs) -> dict:
    found = {f"{name}_ends": partial(ends, runs, name) for name in NAMES}
    found |= {f"{name}_as_{AS_ELSEWHERE[name]}": partial(as_elsewhere, runs, name) for name in NAMES if name in AS_ELSEWHERE}
    found |= {f"{name}_as_{AS_EACH_OTHER[name]}": partial(as_each_other, runs, name) for name in NAMES if name in AS_EACH_OTHER}
    whole = [name.removesuffix("-resumed") for name in NAMES if name.endswith("-resumed")]
    return found | {f"{name}_resumes": partial(resumes, runs, name) for name in whole}


def main() -> None:
    run_and_check(cases(), with_recipes, checks)


if __name__ == "__main__":
    main()
