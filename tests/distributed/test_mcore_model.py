"""The Megatron modules on two CPU ranks; run_mcore_model.py does the checks, all in one launch."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import assert_passed, check_names, run_worker

WORKER = Path(__file__).parent / "run_mcore_model.py"
PARTS = (WORKER.with_name(f"mcore_model_{part}.py") for part in ("steps", "experts", "sizes", "across"))
CHECKS = check_names(WORKER, *PARTS, arguments="(?:recipe: str = MIXED)?")

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """Errors by check, of each rank."""
    return run_worker(2, WORKER, tmp_path_factory.mktemp("model"), CHECKS, timeout=500)


@pytest.mark.parametrize("check", CHECKS)
def test_check(check, errors):
    assert_passed(errors, check)
