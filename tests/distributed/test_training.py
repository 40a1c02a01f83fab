"""run_training.py on four CPU ranks: schemes that resume bit for bit, and TP 2 x DP 2 against one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import errors_by_rank
from launch import torchrun

import megatron_hybrid as mh

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


@pytest.mark.slow
def test_every_other_recipe_resumes_bit_for_bit(tmp_path):
    """run_resumes.py, for GPUs: under `--deterministic-mode`."""
    torchrun(2, WORKER.with_name("run_resumes.py"), tmp_path, timeout=500)
    found = errors_by_rank(tmp_path, 2)[0]
    recipes = {name.removesuffix("_trains_and_resumes") for name in (*found, *CHECKS[:-1])}
    assert recipes == {name for name, _ in mh.list_recipes()}
    assert not any(found.values()), next(error for error in found.values() if error)


@pytest.mark.parametrize("check", CHECKS)
def test_training(errors, check):
    assert not errors[check], errors[check]
