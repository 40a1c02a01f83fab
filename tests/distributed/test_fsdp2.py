"""FSDP2 with payload gathers on four CPU ranks; run_fsdp2.py and fsdp2_experts.py do the checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import assert_passed, check_names, run_worker

WORKER = Path(__file__).parent / "run_fsdp2.py"
CHECKS = check_names(WORKER, WORKER.with_name("fsdp2_experts.py"))

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """Errors by check, of each rank."""
    return run_worker(4, WORKER, tmp_path_factory.mktemp("fsdp2"), CHECKS, timeout=600)


@pytest.mark.parametrize("check", CHECKS)
def test_check(check, errors):
    assert_passed(errors, check)
