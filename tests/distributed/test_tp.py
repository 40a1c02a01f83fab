"""Tensor- and sequence-parallel linears against one rank: run_tp.py does the checks, on two ranks and on four."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import assert_passed, check_names, errors_by_rank
from launch import tail, torchrun

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parent / "run_tp.py"
FOUR = ("p60", "c23", "c27")  # what more ranks than two change


def launch(folder: Path, nproc: int, *only: str) -> list[dict]:
    """Errors by check, of each rank; the launch itself must not fail without saying which check did."""
    arguments = ("--only", *only) if only else ()
    done = torchrun(nproc, WORKER, "--backend", "gloo", "--out", folder, *arguments, check=False)
    assert all((folder / f"{rank}.json").is_file() for rank in range(nproc)), tail(done.stdout)
    errors = errors_by_rank(folder, nproc)
    assert done.returncode == 0 or any(error for of_rank in errors for error in of_rank.values()), tail(done.stdout)
    return errors


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("four"), 4, *FOUR)


def passed(errors: list[dict], start: str) -> None:
    checks = [name for name in errors[0] if name.startswith(start)]
    assert checks, f"no check {start}: {list(errors[0])}"
    for name in checks:
        found = [of_rank[name] for of_rank in errors if of_rank[name]]
        assert not found, found[0]


def test_p60_c26_operands_and_results_are_one_ranks(two):
    passed(two, "p60_c26")


def test_p60_c27_four_ranks_and_pairs_of_four(four):
    passed(four, "")


def test_c23_c24_ragged_sequences_are_gathered_in_high_precision_and_counted(two):
    passed(two, "c23_c24")


def test_p62_bytes_on_the_wire_are_payloads_and_scales(two):
    passed(two, "p62")


def test_c30_rowwise_for_100_steps(two):
    passed(two, "c30")


@pytest.mark.parametrize("check", check_names(WORKER, arguments="ranks: Ranks"))
def test_check(two, check):
    assert_passed(two, check)
