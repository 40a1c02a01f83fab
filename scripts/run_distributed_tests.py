"""The distributed checks on this machine's ranks, and a table of what ran; started by run_distributed_tests.sh.

Each suite is one torchrun of a worker from tests/distributed that writes FOLDER/<rank>.json, a dict of check -> error
or None.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

WORKERS = Path(__file__).resolve().parents[1] / "tests" / "distributed"
MOST_RANKS = 8
OK, FAILED, SKIPPED = "ok", "FAILED", "not run"


@dataclass(frozen=True)
class Suite:
    """One launch: a worker, its arguments (`{out}` is its folder, `{backend}` the backend), and where it can run."""

    name: str
    worker: str
    arguments: tuple[str, ...]
    backends: tuple[str, ...] = ("gloo", "nccl")
    ranks: tuple[int, ...] = ()  # empty: any number from 2
    seconds: int = 600

    def reason_not(self, backend: str, nproc: int) -> str | None:
        """Why it does not run here, or None."""
        if backend not in self.backends:
            return f"for {', '.join(self.backends)} only"
        if self.ranks and nproc not in self.ranks:
            return f"for {' or '.join(map(str, self.ranks))} ranks"
        return None if (WORKERS / self.worker).is_file() else f"no {self.worker} in tests/distributed"


WORKER = ("{out}", "--backend", "{backend}")
SUITES = (
    Suite("tensor and sequence parallel linears", "run_tp.py", ("--backend", "{backend}", "--out", "{out}")),
    Suite("Megatron's modules", "run_mcore_model.py", WORKER, ranks=(2,)),
    Suite("quantized weights in the distributed optimizer", "run_param_gather.py", WORKER, ranks=(2, 3, 4)),
    Suite("quantized experts in the distributed optimizer", "run_expert_gather.py", WORKER, ranks=(2, 3, 4)),
    Suite("training", "run_training.py", WORKER, ranks=(2, 4)),
    Suite("resumes of every recipe", "run_resumes.py", WORKER, backends=("nccl",), ranks=(2,), seconds=1200),
    Suite("Megatron-FSDP", "run_megatron_fsdp.py", WORKER, ranks=(2,)),
    Suite("FSDP2", "run_fsdp2.py", WORKER, ranks=(2, 4)),
    Suite("combinations", "run_matrix.py", WORKER, ranks=(2,)),
    Suite("CUDA graphs", "run_graphs.py", WORKER, backends=("nccl",), ranks=(2,)),
    Suite("fused parts of a model", "run_fused_parts.py", WORKER, backends=("nccl",), ranks=(2,)),
)


def launch(suite: Suite, backend: str, nproc: int, out: Path) -> tuple[list[dict], str]:
    """(results of each rank that wrote some, why the launch failed or ``""``)."""
    out.mkdir(parents=True)
    words = [word.format(out=out, backend=backend) for word in suite.arguments]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc), "--max-restarts", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with (out / "log").open("w") as log:
        command += [str(WORKERS / suite.worker), *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            code = process.wait(suite.seconds)
        except BaseException as stopped:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            code = f"no end within {suite.seconds} s"
    found = [json.loads(path.read_text()) for path in sorted(out.glob("[0-9]*.json"))]
    return found, "" if code == 0 else f"exit {code}" if isinstance(code, int) else code


def rows(suite: Suite, backend: str, nproc: int, out: Path):
    """(suite, check, outcome, detail) of one suite."""
    if reason := suite.reason_not(backend, nproc):
        yield suite.name, "", SKIPPED, reason
        return
    results, failure = launch(suite, backend, nproc, out)
    if len(results) < nproc:
        wrote = f"{len(results)} of {nproc} ranks wrote results"
        yield suite.name, "", FAILED, f"{failure or 'ended'}, {wrote}; see {out}/log"
    elif failure and not any(error for result in results for error in result.values()):
        yield suite.name, "", FAILED, f"{failure}, after the checks below; see {out}/log"
    for check in results[0] if results else ():
        errors = {rank: result[check] for rank, result in enumerate(results) if result.get(check)}
        detail = "; ".join(f"rank {rank}: {error.strip().splitlines()[-1]}" for rank, error in errors.items())
        yield suite.name, check, FAILED if errors else OK, detail


def table(found: list[tuple[str, ...]]) -> str:
    """Aligned columns; the suite's name once."""
    width = max((len(check) for _, check, *_ in found), default=0)
    lines, last = [], None
    for suite, check, outcome, detail in found:
        if suite != last:
            lines.append(suite)
            last = suite
        lines.append(f"  {outcome:8}{check:{width}}  {detail}".rstrip())
    return "\n".join(lines)


def main() -> int:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(prog="run_distributed_tests.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, help="ranks; default: the GPUs, at most 8, or 2 on the CPU")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl" if gpus > 1 else "gloo")
    parser.add_argument("--share-gpus", action="store_true", help="several ranks on a GPU: slow, the same results")
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[""], help="suites whose name has one of these words")
    args = parser.parse_args()
    suites = [suite for suite in SUITES if any(word in suite.name for word in args.only)]
    if not suites:
        parser.error(f"--only {' '.join(args.only)}: the suites are {', '.join(suite.name for suite in SUITES)}")
    own = min(gpus, MOST_RANKS) if args.backend == "nccl" else 0
    nproc = args.nproc or (own if own and not args.share_gpus else max(own, 2))
    if nproc < 2:
        parser.error(f"--nproc {nproc}: the checks need two ranks; --share-gpus has them on one GPU")
    if args.backend == "nccl" and (nproc > gpus if not args.share_gpus else not gpus):
        parser.error(f"--nproc {nproc} --backend nccl needs as many GPUs, found {gpus}; --share-gpus: one or more")
    folder, began = Path(tempfile.mkdtemp(prefix="distributed_tests_")), time.monotonic()
    device = torch.cuda.get_device_name() if args.backend == "nccl" else "CPU"
    shared = f" of {gpus} GPU{'s' * (gpus > 1)}" if args.backend == "nccl" and nproc > gpus else ""
    print(f"{nproc} ranks{shared}, {args.backend}, {device}, torch {torch.__version__}", flush=True)
    found = []
    for number, suite in enumerate(suites):
        new = list(rows(suite, args.backend, nproc, folder / str(number)))
        print(table(new), flush=True)
        found += new
    counts = {outcome: sum(row[2] == outcome for row in found) for outcome in (OK, FAILED, SKIPPED)}
    said = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    print(f"{said}; {time.monotonic() - began:.0f} s; logs in {folder}")
    return int(counts[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
