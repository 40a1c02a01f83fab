"""Quantized weights over split masters on four CPU ranks; run_param_gather.py does the checks, all in one launch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launch import torchrun

WORKER = Path(__file__).parent / "run_param_gather.py"
CHECKS = re.findall(r"^def check_(\w+)\(\)", WORKER.read_text(), re.M)
RANKS = 4

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """Errors by check, of each rank."""
    folder = tmp_path_factory.mktemp("gather")
    torchrun(RANKS, WORKER, folder, timeout=400)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("check", CHECKS)
def test_check(check, errors):
    found = [of_rank[check] for of_rank in errors]
    assert found == [None] * RANKS, next(error for error in found if error)
