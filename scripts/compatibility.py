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

from matrix_rows import BITS, LOSSES, MODELS, NONE, OBVIOUS, ON_GPUS, RECIPES, REFUSED, ROWS, TIED, never_beside  # noqa: E402

HEAD = """# What runs together with what

Made by `python scripts/compatibility.py --write` of the rows that tests/distributed/test_matrix.py trains for two steps each, on CPU
ranks, from one checkpoint, on the same eight sequences a step. Every two values that may stand beside each other, of layout, recipe,
recomputation, model, embeddings and microbatches, do so in a row.

- **bits**: every number of the run without recomputation; where weights or tokens travel as payloads, of one where bf16 does.
- **losses**: one rank's losses, bit for bit.
- **close**: one rank's losses and gradient norms within what other sums and other blocks can do (the bounds stand in matrix_runs.py).
- *on GPUs too*: a row that `scripts/run_distributed_tests.sh --backend nccl` runs on two of them.

Step rules, checkpoints between layouts, Megatron-FSDP, offload and dispatchers of experts have tests of their own ([status.md](status.md)).
"""
RESULTS = {BITS: "bits", LOSSES: "losses"}


def text() -> str:
    lines = [HEAD]
    for model, (what, _) in MODELS.items():
        lines += [f"\n## {what[0].upper()}{what[1:]}\n", "| layout | recipe | recomputation | microbatches | result |"]
        lines += ["|---|---|---|---|---|", *(line(row) for row in ROWS if row.model == model)]
    lines += ["\n## Never beside each other\n", "| | | reason |", "|---|---|---|"]
    lines += [f"| {said(a)} | {said(b)} | {reason} |" for (a, b), reason in never_beside().items() if reason not in OBVIOUS]
    lines += ["\n## Refused at start\n", "| flags | message |", "|---|---|"]
    lines += [f"| `{' '.join(refusal.flags)}` | … {refusal.message} … |" for refusal in REFUSED]
    return "\n".join([*lines, ""])


def line(row) -> str:
    result = RESULTS.get(row.reference[1]) or f"close: {row.other_sums}"
    gpus = ", *on GPUs too*" if row in ON_GPUS else ""
    tied = ", tied embeddings" if row.output == TIED else ""
    cells = (row.layout + tied, f"`{RECIPES[row.recipe][0]}`", row.recompute, str(row.microbatches), result + gpus)
    return f"| {' | '.join(cells)} |"


def said(pair: tuple) -> str:
    axis, value = pair
    value = RECIPES[value][0] if axis == "recipe" else value
    return f"{axis}: {'none' if value == NONE else value}"


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
