"""FSDP2 with payload gathers on four CPU ranks; run_fsdp2.py does the checks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launch import torchrun

WORKER = Path(__file__).parent / "run_fsdp2.py"
CHECKS = re.findall(r"^def check_(\w+)\(", WORKER.read_text(), re.M)

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """Errors by check, of each rank."""
    folder = tmp_path_factory.mktemp("fsdp2")
    torchrun(4, WORKER, folder, timeout=400)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("check", CHECKS)
def test_check(check, errors):
    found = [of_rank[check] for of_rank in errors]
    assert found == [None] * 4, next(error for error in found if error)
