"""Megatron's own pretrain() on CPU and gloo: it trains in every layout, and resumes bit for bit."""

import json

import pytest
from launch import torchrun

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

CASES = ("tp2", "tp2_fp32", "tp2_sp_fp32", "tp2_sp", "dp2", "dp2_overlap", "dp2_plain_optimizer", "pp2", "ep2")
CASES_OF_4 = ("tp2_sp_dp2_overlap", "tp2_sp_pp2_interleaved", "tp2_ep2_allgather")
HALF = 3  # the iteration that the checkpoint holds
PARAMETERS = 1e5  # at most, of the model
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def train(folder, num_ranks, cases):
    """Exact gradient norms and validation losses by (case, "first" | "resume")."""
    for mode in ("first", "resume"):
        torchrun(num_ranks, "run_patches_pretrain.py", folder, mode, *cases, env=NO_GPU, timeout=400)
    return {
        (case, mode): json.loads((folder / f"{case}.{mode}.json").read_text())
        for case in cases
        for mode in ("first", "resume")
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return train(tmp_path_factory.mktemp("pretrain"), 2, CASES)


def assert_resumed_equals_uninterrupted(results, case):
    first, resumed = results[case, "first"], results[case, "resume"]
    assert len(resumed["grad_norm"]) == 3 and len(resumed["validation"]) >= 2
    assert resumed["grad_norm"] == first["grad_norm"][HALF:]
    assert resumed["validation"] == first["validation"]


def numbers(result):
    return [float.fromhex(number) for number in result["grad_norm"] + result["validation"]]


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_the_uninterrupted_one(results, case):
    assert_resumed_equals_uninterrupted(results, case)


@pytest.mark.slow
def test_layouts_of_four_ranks(tmp_path):
    results = train(tmp_path, 4, CASES_OF_4)
    for case in CASES_OF_4:
        assert_resumed_equals_uninterrupted(results, case)


def test_distributed_optimizer_and_overlap_change_no_bit(results):
    sharded, whole = results["dp2", "first"], results["dp2_plain_optimizer", "first"]
    assert sharded == results["dp2_overlap", "first"]
    assert sharded["validation"] == whole["validation"]
    norms = [[float.fromhex(x) for x in result["grad_norm"]] for result in (sharded, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=PARAMETERS * 2.0**-24)  # FP32 sums of squares in another order


def test_sequence_parallelism_changes_only_the_rounding(results):
    plain, parallel = (numbers(results[case, "first"]) for case in ("tp2_fp32", "tp2_sp_fp32"))
    assert parallel == pytest.approx(plain, rel=1e-4)


def test_collectives():
    """What gloo alone cannot do: see the worker."""
    result = torchrun(2, "run_patches_collectives.py", env=NO_GPU, timeout=120)
    assert result.stdout.count("OK check_") == 7
