"""The rows of matrix_rows.py for two GPUs, on two ranks: on GPUs with NCCL, or on the CPU.

Runs are forks of this launch (run_mcore_cases.py). On a GPU a layout's kernels may be others than one rank's, so only what
recomputation repeats is compared bit for bit.
"""

from __future__ import annotations

import os

os.environ |= {  # what Megatron's deterministic mode asks for; a GPU is found without touching it
    "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}  # fmt: skip

from functools import partial  # noqa: E402

from checks import arguments, write_errors  # noqa: E402
from matrix_rows import BITS, ON_GPUS  # noqa: E402
from matrix_runs import all_cases, check, write_recipes  # noqa: E402
from mcore_cases import described, outcomes  # noqa: E402
from run_mcore_cases import RANK, WORLD, run_all  # noqa: E402


def main() -> None:
    folder, wanted = arguments().folder, all_cases(ON_GPUS, "--deterministic-mode")
    if RANK == 0:
        write_recipes(folder)
    run_all(described(wanted, folder), folder)
    checks = {}
    if RANK == 0:  # it has seen every case's end
        runs = folder, outcomes(wanted, folder, WORLD)
        checks = {row.name: partial(check, row, runs, exact=(BITS,)) for row in ON_GPUS}
    write_errors(folder / f"{RANK}.json", checks)


if __name__ == "__main__":
    main()
