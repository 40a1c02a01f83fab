"""run_training.py on four CPU ranks: schemes that resume bit for bit, and TP 2 x DP 2 against one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import errors_by_rank
from launch import torchrun

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parent / "run_training.py"
CHECKS = [
    *(f"{recipe}_trains_and_resumes" for recipe in ("fp8_delayed", "nvfp4", "mxfp8_fprop_nvfp4_bwd", "fp8_current")),
    "lives_4_ranks_train_as_one",
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    torchrun(4, WORKER, folder)
    found, *others = errors_by_rank(folder, 4)
    assert sorted(found) == sorted(CHECKS) and others == [{}] * 3  # rank 0 looks at what all have written
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_training(errors, check):
    assert not errors[check], errors[check]
