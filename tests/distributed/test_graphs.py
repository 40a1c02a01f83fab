"""run_graphs.py on two CPU ranks: training with CUDA graphs, of the stand-in, is training without, bit for bit (case 40)."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import errors_by_rank
from launch import torchrun

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parent / "run_graphs.py"
RUNS = (
    "bf16", "delayed", "current", "stochastic", "mixed", "lives", "block", "stages", "interleaved", "context", "growing",
    "lives_scaled",
)  # fmt: skip
CHECKS = [*(f"{run}_trains_as_without" for run in RUNS), "resumed"]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    torchrun(2, WORKER, folder, timeout=600)
    found, other = errors_by_rank(folder, 2)
    assert sorted(found) == sorted(CHECKS) and other == {}
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_c40_graphs(errors, check):
    assert not errors[check], errors[check]
