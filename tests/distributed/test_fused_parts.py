"""Layers on fused kernels on two CPU ranks, the kernels interpreted; run_fused_parts.py does the checks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launch import torchrun

WORKER = Path(__file__).parent / "run_fused_parts.py"
CHECKS = [name for name in re.findall(r"^def check_(\w+)\(", WORKER.read_text(), re.M) if name != "close"]

pytestmark = pytest.mark.dist
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """Errors by check, of each rank."""
    folder = tmp_path_factory.mktemp("fused")
    torchrun(2, WORKER, folder, env={"TRITON_INTERPRET": "1"}, timeout=300)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("check", CHECKS)
def test_check(check, errors):
    found = [of_rank[check] for of_rank in errors]
    assert found == [None, None], next(error for error in found if error)
