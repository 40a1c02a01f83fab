"""Layers on fused kernels on two CPU ranks, the kernels interpreted; run_fused_parts.py does the checks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from checks import assert_passed, check_names, run_worker

WORKER = Path(__file__).parent / "run_fused_parts.py"
CHECKS = check_names(WORKER)

pytestmark = pytest.mark.dist
if sys.platform != "linux":
    pytest.skip("the lock has Triton for Linux only", allow_module_level=True)


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """Errors by check, of each rank."""
    return run_worker(2, WORKER, tmp_path_factory.mktemp("fused"), CHECKS, env={"TRITON_INTERPRET": "1"}, timeout=300)


@pytest.mark.parametrize("check", CHECKS)
def test_check(check, errors):
    assert_passed(errors, check)
