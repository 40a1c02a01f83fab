"""The combinations that tests/distributed trains: each two values that may stand beside each other do, somewhere."""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows():
    sys.path.insert(0, str(ROOT / "tests" / "distributed"))
    try:
        import matrix_rows

        yield matrix_rows
    finally:
        sys.path.pop(0)


def pairs_of(rows) -> set:
    return {pair for row in rows for pair in itertools.combinations(asdict(row).items(), 2)}


def test_every_allowed_pair_of_values_has_a_row(rows):
    possible, met = pairs_of(rows.allowed()), pairs_of(rows.ROWS)
    assert not possible - met, sorted(map(str, possible - met))
    assert met == possible  # and no row is refused
    values = {item for pair in met for item in pair}
    assert values == {(axis, value) for axis, of_axis in rows.AXES.items() for value in of_axis}


def test_every_pair_without_a_row_has_its_reason(rows):
    every = {
        pair
        for a, b in itertools.combinations(rows.AXES, 2)
        for pair in itertools.product(((a, v) for v in rows.AXES[a]), ((b, v) for v in rows.AXES[b]))
    }
    assert every - pairs_of(rows.ROWS) == set(rows.never_beside())


def test_rows_are_distinct_and_begin_with_what_is_asked_for(rows):
    assert len({row.name for row in rows.ROWS}) == len(rows.ROWS) < 160
    assert set(rows.GIVEN) <= set(rows.ROWS)
    assert all(row.reference[0] in rows.ROWS for row in rows.ROWS if row.is_recomputed)
    assert not any(row.is_recomputed for row in rows.references(rows.ROWS))


def test_a_dozen_and_two_for_two_gpus(rows):
    assert len(rows.ON_GPUS) == 14 and {row.ranks for row in rows.ON_GPUS} == {2}
    assert all(sum(getattr(row, axis) != rows.NONE for axis in rows.LAYOUT) == 1 for row in rows.ON_GPUS)


def test_the_document_is_made_of_the_rows():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import compatibility

        assert compatibility.TABLE.read_text() == compatibility.text(), "python scripts/compatibility.py --write"
    finally:
        sys.path.remove(str(ROOT / "scripts"))
