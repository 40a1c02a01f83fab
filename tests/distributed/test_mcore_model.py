"""The Megatron modules on two CPU ranks; run_mcore_model.py does the checks, all in one launch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launch import torchrun

WORKER = Path(__file__).parent / "run_mcore_model.py"
SOURCES = WORKER.read_text() + "".join(
    WORKER.with_name(f"mcore_model_{part}.py").read_text() for part in ("steps", "experts")
)
CHECKS = re.findall(r"^def check_(\w+)\((?:recipe: str = MIXED)?\)", SOURCES, re.M)

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """Errors by check, of each rank."""
    folder = tmp_path_factory.mktemp("model")
    torchrun(2, WORKER, folder, timeout=400)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("check", CHECKS)
def test_check(check, errors):
    found = [of_rank[check] for of_rank in errors]
    assert found == [None, None], next(error for error in found if error)
