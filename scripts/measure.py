#!/usr/bin/env python3
"""Everything that is tested and measured on GPUs, one part after the other, and a table of what came of it.

    python scripts/measure.py --list
    python scripts/measure.py [--only PART ...] [--deadline SECONDS] [--out DIR]

A part is a command: the GPU tests, the checks over NCCL, the benchmarks of docs/performance.md. Its output is
DIR/<part>.log, and what it measured DIR/<part>.json. A part that ended well in DIR is not run again, so that a queue's
time limit only cuts the list: the next job goes on (--again: all anew). With --deadline no part is started whose
estimate (--list, for one H200) reaches beyond it, and none runs on after it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_common import provenance  # noqa: E402
from demo_lib.launch import end_tree  # noqa: E402

from megatron_hybrid.explain import Table  # noqa: E402
from megatron_hybrid.whole_file import write_whole  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
OK, FAILED, SKIPPED = "ok", "FAILED", "not run"


@dataclass(frozen=True)
class Part:
    """A command. `{python}` and `{torchrun}` start it, `{json}` is the file for its results, `{jobs}` a number of
    processes, `{commit}` the option that names the source.

    seconds: an estimate for H200s, the kernels built; generous.
    """

    name: str
    about: str
    command: str
    seconds: int
    gpus: int = 1


def bench(name: str, about: str, script: str, seconds: int, gpus: int = 1) -> Part:
    start = "{python}" if gpus == 1 else "{torchrun}"
    return Part(name, about, f"{start} scripts/{script} --json {{json}} {{commit}}", seconds, gpus)


GPU_TESTS = "{python} -m pytest -q -m gpu -n {jobs} --dist loadfile tests --record-gpu {json}"
SANITIZE = "compute-sanitizer --tool {tool} --error-exitcode 1 {{python}} tests/numerics/sanitize_casts.py"
UNCACHED = "env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "  # for memcheck to see where a tensor ends
NCCL_CHECKS = "{python} scripts/run_distributed_tests.py --backend nccl --share-gpus --nproc"
PARTS = (
    Part("tests", "every test marked gpu", GPU_TESTS, 420),
    Part("memcheck", "casts and grouped GEMMs, compute-sanitizer", UNCACHED + SANITIZE.format(tool="memcheck") + " --products", 200),
    Part("racecheck", "casts under compute-sanitizer", SANITIZE.format(tool="racecheck"), 200),
    bench("casts", "P1 to P4", "bench_cast.py", 120),
    bench("linear", "P5, P6, P7, P11: 4096 -> 14336", "bench_linear.py", 90),
    bench("linear_down", "the same: 14336 -> 4096", "bench_linear.py --shapes 14336x4096", 90),
    bench("grouped", "P8 and its host time", "bench_grouped.py --profile", 120),
    bench("host", "P9", "bench_host.py --python", 60),
    bench("step", "P10", "bench_step.py --profile --main-grad bf16 fp8_delayed", 120),
    bench("statistics", "cost of --hq-stats-interval", "bench_statistics.py", 120),
    bench("moe", "layers of experts against bf16", "bench_moe.py --profile --peers te", 240),
    bench("group_casts", "casts of groups, against their bytes alone", "bench_group_casts.py", 60),
    Part("speed", "tokens a second where not measured yet", "{python} scripts/convergence.py --speed {commit}", 60),
    Part("nccl", "checks over NCCL, two ranks, on one GPU or two", f"{NCCL_CHECKS} 2", 1500),
    bench("tp", "tensor-parallel linears", "bench_tp.py --graphs", 120, gpus=2),
    bench("tp_caller", "the same, backward in the caller's thread", "bench_tp.py --main-thread", 90, gpus=2),
    bench("moe_ep", "experts spread over two GPUs",
          "bench_moe.py --expert-parallel 2 --experts 64 --dispatch high_precision quantized", 240, gpus=2),
    Part("training", "a GPT over NCCL, with CUDA graphs and without",
         "{python} scripts/bench_training.py --graphs --json {json} {commit}", 400, gpus=2),
    Part("nccl_4", "checks over NCCL, four ranks, on any number of GPUs", f"{NCCL_CHECKS} 4", 800),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a part ended: one of OK, FAILED, SKIPPED, with a reason or the last line of its output."""

    part: str
    state: str
    seconds: float = 0.0
    detail: str = ""


class Folder:
    """DIR: a log and results by part, and what each part took."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def log(self, part: Part) -> Path:
        return self.path / f"{part.name}.log"

    def results(self, part: Part) -> Path:
        return self.path / f"{part.name}.json"

    def record(self, part: Part) -> dict | None:
        """What `write` kept of a part that ended well."""
        file = self._kept(part)
        return json.loads(file.read_text()) if file.is_file() else None

    def write(self, part: Part, seconds: float, commit: str | None) -> None:
        write_whole(self._kept(part), json.dumps({**provenance(commit), "seconds": round(seconds, 1)}))

    def forget(self, part: Part) -> None:
        self._kept(part).unlink(missing_ok=True)

    def _kept(self, part: Part) -> Path:
        return self.path / f".{part.name}.done"


def words(part: Part, folder: Folder, jobs: int, commit: str | None) -> list[str]:
    """The command of a part."""
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node {part.gpus}"
    named = f"--commit {shlex.quote(commit)}" if commit else ""
    values = dict(json=shlex.quote(str(folder.results(part))), jobs=jobs, commit=named)
    return shlex.split(part.command.format(python=sys.executable, torchrun=torchrun, **values))


def run(part: Part, folder: Folder, jobs: int, left: float | None, commit: str | None) -> Outcome:
    """Run one part for at most `left` seconds; its processes end with it."""
    folder.forget(part)
    began = time.monotonic()
    with folder.log(part).open("w") as log:
        command = words(part, folder, jobs, commit)
        try:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        except FileNotFoundError:
            return Outcome(part.name, SKIPPED, detail=f"{command[0]} is not installed")
        try:
            code = process.wait(left)
            problem = "" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            problem = "cut at the deadline"
        finally:
            end_tree(process)
    took = time.monotonic() - began
    if not problem:
        folder.write(part, took, commit)
    detail = "; ".join(filter(None, [problem, last_line(folder.log(part))]))
    return Outcome(part.name, FAILED if problem else OK, took, detail)


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:100] if lines else ""


def reason_not(part: Part, gpus: int, left: float | None) -> str | None:
    """Why a part is not started now, or None."""
    if part.gpus > gpus:
        return f"needs {part.gpus} GPUs, found {gpus}"
    if left is not None and part.seconds > left:
        return f"takes about {part.seconds} s, {max(left, 0):.0f} s before the deadline"
    return None


def measure(parts, folder: Folder, gpus: int, jobs: int, deadline: float | None, commit: str | None):
    """The outcome of each part, as it comes."""
    began = time.monotonic()
    for part in parts:
        kept = folder.record(part)
        left = None if deadline is None else deadline - (time.monotonic() - began)
        if kept:
            yield Outcome(part.name, OK, kept["seconds"], f"already there, of {kept['date']}")
        elif reason := reason_not(part, gpus, left):
            yield Outcome(part.name, SKIPPED, detail=reason)
        else:
            print(f"{part.name}: {part.about} (about {part.seconds} s) ...", file=sys.stderr, flush=True)
            yield run(part, folder, jobs, left, commit)


def table(outcomes: list[Outcome]) -> Table:
    rows = [(o.part, o.state, f"{o.seconds:.0f}" if o.seconds else "", o.detail) for o in outcomes]
    return Table(("part", "outcome", "s", "last line, or why not"), tuple(rows))


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", default=names, help="these parts")
    parser.add_argument("--list", action="store_true", help="print the parts and stop")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "measure", metavar="DIR", help="(runs/measure)")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="from now")
    parser.add_argument("--jobs", type=int, default=8, help="processes of the GPU tests (8)")
    parser.add_argument("--again", action="store_true", help="parts that ended well in DIR too")
    parser.add_argument("--commit", help="recorded in place of git's")
    args = parser.parse_args()
    parts = [part for part in PARTS if part.name in args.only]
    if args.list:
        rows = tuple((p.name, str(p.gpus), str(p.seconds), p.about) for p in parts)
        print(Table(("part", "GPUs", "s", "what"), rows))
        return 0
    folder = Folder(args.out.resolve())
    if args.again:
        for part in parts:
            folder.forget(part)
    outcomes = []
    for outcome in measure(parts, folder, torch.cuda.device_count(), args.jobs, args.deadline, args.commit):
        outcomes.append(outcome)
        print(f"{outcome.part}: {outcome.state} {outcome.detail}", file=sys.stderr, flush=True)
    print(table(outcomes))
    print(f"logs and results: {folder.path}")
    return int(any(outcome.state == FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
