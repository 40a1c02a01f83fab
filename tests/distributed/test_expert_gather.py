"""Experts whose weights live quantized, on two, three and four CPU ranks; run_expert_gather.py does the checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import assert_passed, check_names, run_worker

WORKER = Path(__file__).parent / "run_expert_gather.py"
CHECKS = check_names(WORKER)

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=[2, 4])
def errors(request, tmp_path_factory) -> list[dict]:
    """Errors by check, of each rank."""
    return run_worker(request.param, WORKER, tmp_path_factory.mktemp("experts"), CHECKS, timeout=500)


@pytest.mark.parametrize("check", CHECKS)
def test_check(check, errors):
    assert_passed(errors, check)


def test_three_ranks(tmp_path):
    """Shares of an expert that divide nothing evenly."""
    check = "after_a_step_the_bytes_are_the_whole_master_s"
    assert_passed(run_worker(3, WORKER, tmp_path, [check], some=True), check)
