"""docs/coverage.md names every test that shows a line, and every line that none shows."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def script():
    spec = importlib.util.spec_from_file_location("coverage_script", ROOT / "scripts" / "coverage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date():
    coverage = script()
    data, names = coverage.load(), coverage.tests()
    assert not coverage.check(data, names)
    assert coverage.TABLE.read_text() == coverage.table(data, names), "run: python scripts/coverage.py --write"


def test_numbers_are_read_from_names():
    numbered = script().by_number(["a.py::test_p03_c75_p10_of_c99", "b.py::test_c75_x", "b.py::test_parse"])
    assert numbered == {"p03": ["a.py::test_p03_c75_p10_of_c99"], "c75": ["a.py::test_p03_c75_p10_of_c99", "b.py::test_c75_x"],
                        "p10": ["a.py::test_p03_c75_p10_of_c99"]}  # fmt: skip


def test_what_is_wrong_is_said():
    wrong = script().check(
        {"A": {"p01": {"what": "x"}, "p02": {"what": "x", "tests": ["a.py::test_gone"]}, "p03": {"what": "x", "missing": "no GPU"}}},
        {"a.py::test_p09_x"},
    )
    assert len(wrong) == 3 and "p01: no test carries it" in wrong[0] and "no test a.py::test_gone" in wrong[1] and "p09" in wrong[2]
