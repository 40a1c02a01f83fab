"""Megatron-FSDP that gathers payloads of weights that live quantized: losses, bytes, checkpoints.

One launch of two ranks, and one of four, two of them tensor- or expert-parallel.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from mcore_cases import assert_ended, numbers, run_cases, same
from megatron_fsdp_cases import AS_EACH_OTHER, AS_ELSEWHERE, CASES, FOUR, RESUMED, WIDE, with_recipes
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = with_recipes(tmp_path_factory.mktemp("payloads"))
    return folder, run_cases(CASES, folder, timeout=900)


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


@pytest.mark.parametrize("name", FOUR)
def test_tensor_and_expert_parallel_shards_that_are_sharded_again(wide_runs, name):
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
