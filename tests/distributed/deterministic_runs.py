"""Runs of whole scripts under Megatron's deterministic mode, on GPUs with NCCL or on CPUs, and checks of what they left.

Imported before anything that imports torch. Runs are forks of rank 0 (run_mcore_cases.py).
"""

from __future__ import annotations

import os

os.environ |= {  # what Megatron's deterministic mode asks for; a GPU is found without touching it
    "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}  # fmt: skip

from checks import arguments, write_errors  # noqa: E402
from mcore_cases import Case, described, outcomes  # noqa: E402

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def run_and_check(cases: list[Case], write, checks) -> None:
    """Rank 0 runs the cases, whatever their ranks, in the command line's folder and leaves the checks' errors there.

    write: folder -> None, of files that cases read. checks: (folder, cases by name) -> the checks by name.
    """
    folder, found = arguments().folder, {}
    if RANK == 0:
        from run_mcore_cases import run_all

        write(folder)
        run_all(described(cases, folder), folder, WORLD)
        found = checks((folder, outcomes(cases, folder, WORLD)))
    write_errors(folder / f"{RANK}.json", found)
