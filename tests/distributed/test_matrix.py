"""Every row of matrix_rows.py through pretrain(), two steps from one checkpoint, in one launch of four CPU ranks."""

from __future__ import annotations

import pytest
from matrix_rows import MOST_RANKS, REFUSED, ROWS
from matrix_runs import all_cases, check, refused, write_recipes
from mcore_cases import run_cases

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    write_recipes(folder)
    return folder, run_cases([*all_cases(ROWS), *map(refused, REFUSED)], folder, ranks=MOST_RANKS, timeout=1400)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row, runs):
    check(row, runs)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refused(refusal).name)
def test_refusal(refusal, runs):
    done = runs[1][refused(refusal).name]
    assert len(done.exit) == refusal.ranks and all(done.exit) and refusal.message in done.output[0]
    assert "Traceback" not in done.output[0]
