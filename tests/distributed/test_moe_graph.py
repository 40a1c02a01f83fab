"""A mixture-of-experts layer repeated with new routing, and in a CUDA graph where there is a GPU; run_moe_graph.py does it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks import assert_passed, check_names, errors_by_rank
from launch import torchrun

WORKER = Path(__file__).parent / "run_moe_graph.py"
CHECKS = check_names(WORKER)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", params=[pytest.param("gloo", marks=pytest.mark.dist), pytest.param("nccl", marks=ON_GPU)])
def errors(request, tmp_path_factory) -> list[dict]:
    """Errors by check, of the one rank."""
    folder = tmp_path_factory.mktemp("moe_graph")
    torchrun(1, WORKER, folder, "--backend", request.param, timeout=500)
    return errors_by_rank(folder, 1)


@pytest.mark.parametrize("check", CHECKS)
def test_c14_replays_with_new_routing(check, errors):
    assert_passed(errors, check)
