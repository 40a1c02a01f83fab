"""The rows of matrix_rows.py for two GPUs, on two ranks: on GPUs with NCCL, or on the CPU.

On a GPU a layout's kernels may be others than one rank's, so only what
recomputation repeats is compared bit for bit.
"""

from __future__ import annotations

from functools import partial

from deterministic_runs import run_and_check  # before torch
from matrix_rows import BITS, ON_GPUS
from matrix_runs import all_cases, check, write_recipes


def checks(runs) -> dict:
    return {row.name: partial(check, row, runs, exact=(BITS,)) for row in ON_GPUS}


def main() -> None:
    run_and_check(all_cases(ON_GPUS, "--deterministic-mode"), write_recipes, checks)


if __name__ == "__main__":
    main()
