#!/usr/bin/env python3
"""Which test shows what: docs/coverage.md from docs/coverage.yaml and the names of the tests.

    python scripts/coverage.py            print the table
    python scripts/coverage.py --write    write docs/coverage.md

A test says in its name which lines it shows: ``test_p03_c75_...`` shows property 3 and case 75. Tests that show a line
without carrying its number are listed in the YAML, as ``file.py::test``. A line without any test must say why there.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TABLE = ROOT / "docs" / "coverage.yaml", ROOT / "docs" / "coverage.md"
_NUMBERS = re.compile(r"_([pc]\d\d)(?=_)")

HEAD = """# What is tested, line by line

Made by `python scripts/coverage.py --write` from docs/coverage.yaml and the names of the tests (`test_p03_...` shows property 3,
`test_c75_...` case 75); a test fails when it is out of date. "Not shown" says what of a line no test shows, and why.
"""


def tests() -> dict[str, str]:
    """Every test function by `file.py::name`, with the path of its file. File names are unique."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[f"{path.name}::{node.name}"] = str(path.relative_to(ROOT))
    return found


def by_number(names) -> dict[str, list[str]]:
    """Line (``p03``, ``c75``) -> tests that carry it in their names."""
    lines = defaultdict(list)
    for name in names:
        head = name.split("::")[1].removeprefix("test")
        while match := _NUMBERS.match(head):
            lines[match[1]].append(name)
            head = head[match.end() :]
    return lines


def check(data: dict, names) -> list[str]:
    """What is wrong with the YAML: unknown tests, lines with neither test nor reason, numbers of no line."""
    wrong, numbered, known = [], by_number(names), set()
    for section, lines in data.items():
        for line, entry in lines.items():
            if line in known:
                wrong.append(f"{section}, {line}: listed twice")
            known.add(line)
            for test in entry.get("tests", []):
                if test not in names:
                    wrong.append(f"{section}, {line}: no test {test}")
            if not entry.get("tests") and line not in numbered and not entry.get("missing"):
                wrong.append(f"{section}, {line}: no test carries it in its name, none is listed, and no reason is given")
    return [*wrong, *(f"{line}: no such line, but in the name of {numbered[line][0]}" for line in sorted(numbered.keys() - known))]


def table(data: dict, names) -> str:
    numbered, out = by_number(names), [HEAD]
    for section, lines in data.items():
        out += [f"\n## {section}\n", "| | what | tests | not shown |", "|---|---|---|---|"]
        for line, entry in lines.items():
            shown = dict.fromkeys([*numbered.get(line, []), *entry.get("tests", [])])
            cells = [line, entry["what"], "<br>".join(map(_short, shown)) or "none", entry.get("missing", "")]
            out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*out, ""])


def _short(test: str) -> str:
    file, name = test.split("::")
    return f"{file.removeprefix('test_').removesuffix('.py')}: {name.removeprefix('test_')}"


def load() -> dict:
    """Section -> line -> {what, tests, missing}; an entry that is only a text is its `what`."""
    data = yaml.safe_load(SOURCE.read_text())
    return {
        section: {line: {"what": entry} if isinstance(entry, str) else entry for line, entry in lines.items()}
        for section, lines in data.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    write, data, names = parser.parse_args().write, load(), tests()
    wrong = check(data, names)
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    if write:
        TABLE.write_text(table(data, names))
    else:
        print(table(data, names))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
