"""Quantized weights over split masters on four CPU ranks; run_param_gather.py does the checks, all in one launch."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import assert_passed, check_names, run_worker

WORKER = Path(__file__).parent / "run_param_gather.py"
CHECKS = check_names(WORKER)

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """Errors by check, of each rank."""
    return run_worker(4, WORKER, tmp_path_factory.mktemp("gather"), CHECKS, timeout=400)


@pytest.mark.parametrize("check", CHECKS)
def test_check(check, errors):
    assert_passed(errors, check)
