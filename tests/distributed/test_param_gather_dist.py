"""Quantized weights over split masters on four and three CPU ranks; run_param_gather.py does the checks, in two launches."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import assert_passed, check_names, run_worker

WORKER = Path(__file__).parent / "run_param_gather.py"
CHECKS = check_names(WORKER, WORKER.with_name("mcore_groups.py"))
# shares that divide nothing evenly
THREE = [
    "after_a_step_the_bytes_are_the_whole_master_s", "bytes_on_the_wire_are_payloads_and_scales",
    "state_of_the_optimizer_brings_the_weights_back", "amaxes_of_delayed_scaling_in_every_layout",
]  # fmt: skip

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """Errors by check, of each rank."""
    return run_worker(4, WORKER, tmp_path_factory.mktemp("gather"), CHECKS, timeout=400)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> list[dict]:
    return run_worker(3, WORKER, tmp_path_factory.mktemp("three"), THREE, some=True)


@pytest.mark.parametrize("check", CHECKS)
def test_check(check, errors):
    assert_passed(errors, check)


@pytest.mark.parametrize("check", THREE)
def test_three_ranks(check, three):
    assert_passed(three, check)
