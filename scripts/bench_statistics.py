"""What `--hq-stats-interval N` costs: the step that is recorded beside those that are not, Llama-8B-shaped layers.

    python scripts/bench_statistics.py [--recipe mxfp8 fp8_current ...] [--every 100] [--json OUT]

One process, one GPU. Recorded and other steps take turns, each timed from start to end on the host, the device waited for.
The share is (recorded - other) / (N x other), at N = --every; above 3% the exit status is 1. GiB is the most that is
allocated in such a step. Without a GPU it runs on the CPU, for trying the script: give small sizes.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path

import torch
from bench_common import median, write_result
from bench_step import GOAL_SHAPE, ON_GPU, batches, clear, ours, start_one_rank

from megatron_hybrid.explain import Table

GOAL = 0.03
RECIPES = ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "mxfp8_fprop_nvfp4_bwd")
HEADER = ("recipe", "step ms", "recorded ms", "casts", "own figure s", "GiB", "recorded GiB", "share", "")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=list(RECIPES), help="names or paths (default: %(default)s)")
    parser.add_argument("--every", type=int, default=100, metavar="N", help="steps from one that is recorded to the next")
    for name, size in {**GOAL_SHAPE, "repeat": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--json", help="write rows, card, versions and commit here")
    parser.add_argument("--commit", help="what to record as the commit where there is no git checkout")
    return parser.parse_args()


def run_step(subject, batch) -> tuple[float, float]:
    """Milliseconds of a step, and the most GiB that were allocated in it."""
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    subject.step(batch)
    if ON_GPU:
        torch.cuda.synchronize()
    ms = (time.perf_counter() - start) * 1e3
    return ms, torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0


def measure(args, recipe: str, folder: Path) -> dict:
    """A recipe's row. Steps 2, 4, ... are recorded."""
    subject, data, said = ours(args, recipe), batches(args), []
    path = folder / f"{Path(recipe).stem}.jsonl"
    subject.controller.record_statistics(2, path, say=said.append)
    steps: tuple[list, list] = [], []
    for i in range(2 * (args.repeat + 1)):
        steps[i % 2].append(run_step(subject, data[i % len(data)]))
        clear(subject)
    (plain, least), (recorded, most) = ([median(found) for found in zip(*turn[1:], strict=True)] for turn in steps)
    casts = len(path.read_text().splitlines()) // (args.repeat + 1)
    own = float(said[-1].split(": ")[1].split(" s")[0])
    share = (recorded - plain) / (args.every * plain)
    return {"recipe": recipe, "ms": plain, "recorded_ms": recorded, "casts": casts, "own_s": own, "gib": least,
            "recorded_gib": most, "share": share}  # fmt: skip


def main() -> int:
    args = parse_args()
    logging.disable(logging.WARNING)
    start_one_rank()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(args, recipe, Path(folder)) for recipe in args.recipe]
    cells = [
        (r["recipe"], f"{r['ms']:.1f}", f"{r['recorded_ms']:.1f}", str(r["casts"]), f"{r['own_s']:.2f}",
         f"{r['gib']:.2f}", f"{r['recorded_gib']:.2f}", f"{r['share']:.2%}", "met" if r["share"] <= GOAL else "missed") for r in rows
    ]  # fmt: skip
    card = torch.cuda.get_device_name() if ON_GPU else "CPU"
    note = f"{card}, torch {torch.__version__}; share of the time at one recorded step in {args.every}; goal {GOAL:.0%}"
    print(Table(HEADER, tuple(cells), (note,)))
    write_result(args.json, rows, every=args.every, sizes={k: getattr(args, k) for k in GOAL_SHAPE}, commit=args.commit)
    torch.distributed.destroy_process_group()
    return int(any(r["share"] > GOAL for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
