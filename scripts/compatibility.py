"""What runs together with what: docs/compatibility.md, made of the rows that tests/distributed/test_matrix.py runs.

    python scripts/compatibility.py [--write]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "compatibility.md"
sys.path.insert(0, str(ROOT / "tests" / "distributed"))

from matrix_rows import LAYOUTS, MODELS, NONE, RECIPES, REFUSED, ROWS  # noqa: E402

HEAD = """# What runs together with what

Made by `python scripts/compatibility.py --write` of the rows that tests/distributed/test_matrix.py trains for two steps each, on CPU
ranks, from one checkpoint. "Bits": every number of the run without recomputation. "Close": loss and gradient norm of one rank on the
same tokens, within what another order of sums in bf16, and blocks that end at other places, can do (the bounds stand in the test).
Step rules, checkpoints between layouts, FSDP2, offload and dispatch of experts have tests of their own ([status.md](status.md)).
"""


def text() -> str:
    lines = [HEAD]
    for model, (what, _) in MODELS.items():
        lines += [f"\n## {what[0].upper()}{what[1:]}\n", "| layout | recipe | recomputation | result |", "|---|---|---|---|"]
        for row in ROWS:
            if row.model == model:
                mode = "-" if row.recompute == NONE else row.recompute
                cells = (LAYOUTS[row.layout].what, f"`{RECIPES[row.recipe][0]}`", mode, row.result)
                lines.append("| " + " | ".join(cells) + " |")
    lines += ["\n## Refused at start\n", "| flags | message |", "|---|---|"]
    lines += [f"| `{' '.join(refusal.flags)}` | … {refusal.message} … |" for refusal in REFUSED]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    if parser.parse_args().write:
        TABLE.write_text(text())
    else:
        print(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
