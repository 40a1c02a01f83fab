#!/usr/bin/env python3
"""Train one model on one order of data under several recipes and seeds; a table and a plot of what they reach.

    python scripts/convergence.py                                # all runs of the list that are not there yet
    python scripts/convergence.py --runs bf16:2 nvfp4:1 --deadline 500
    python scripts/convergence.py --speed                        # tokens a second of every recipe, in short runs of their own
    python scripts/convergence.py --table                        # no training: table and plot of the runs there are

One run is one recipe with one seed on one GPU (`--device cpu`: one at a time on the CPU, for trying it out), on all GPUs at
once; `--a-gpu 2` trains two on each, which is sooner done. A finished run is a file RESULTS/<recipe>_<seed>.json and is not
run again; one that was cut off, or trained another model or other text, does not count. The seed makes the initial weights;
all runs read the same tokens in the same order, and the same validation tokens at the end. Speeds are measured apart, by
short runs that have a GPU to themselves: files RESULTS/speed/<recipe>.json.

The text is the Python source of the standard library and of the installed packages, a token a byte, unless --input names
other files. The table's interval of a gap to bf16 is Student's at 95%, from the spread of bf16's seeds; it assumes that
another recipe's seeds spread alike. One seed of bf16 gives no interval.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import queue
import re
import socket
import statistics
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import prepare_data  # noqa: E402
from bench_common import provenance  # noqa: E402
from demo_lib.launch import TrainingFailed, run_training  # noqa: E402
from demo_lib.settings import ROOT, Run, load_model, megatron_flags  # noqa: E402

from megatron_hybrid.explain import Table  # noqa: E402
from megatron_hybrid.observe.training_log import TrainingLog, TrainPoint, ValidPoint  # noqa: E402
from megatron_hybrid.recipe import Recipe  # noqa: E402
from megatron_hybrid.whole_file import write_whole  # noqa: E402

BASE = "bf16"
RUNS = (
    "bf16:1", "mxfp8_fprop_nvfp4_bwd:1", "fp8_current:1", "fp8_block:1", "bf16:2", "nvfp4:1", "mxfp8:1", "bf16:3",
    "nvfp4_fprop_mxfp8_bwd:1", "configs/convergence/nvfp4_late_at_1300.yaml:1",
)  # fmt: skip
DATA_SEED = 1234
SPEED_ITERATIONS, WARM_UP = 60, 20
# two-sided 95% quantiles of Student's t, by degrees of freedom
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Job:
    """One run: a recipe by name or path, and the seed of the initial weights."""

    recipe: str
    seed: int

    @classmethod
    def parse(cls, text: str) -> Job:
        recipe, _, seed = text.rpartition(":")
        if not recipe or not seed.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r}: RECIPE:SEED is expected, for example bf16:1")
        return cls(recipe, int(seed))

    @property
    def name(self) -> str:
        return f"{Path(self.recipe).stem}_{self.seed}"


@dataclass(frozen=True)
class Setting:
    """What all runs of a table share."""

    model: dict
    iterations: int
    data: dict  # split -> {prefix, tokens, sha256}

    @property
    def key(self) -> str:
        """What a result must have been trained with to count."""
        text = {split: record["sha256"] for split, record in self.data.items()}
        content = json.dumps([self.model, self.iterations, text, DATA_SEED], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def tokens_per_iteration(self) -> int:
        return int(self.model["seq-length"]) * int(self.model["global-batch-size"])


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Job.parse, metavar="RECIPE:SEED", default=[Job.parse(r) for r in RUNS])
    parser.add_argument("--model", type=Path, default=ROOT / "configs" / "models" / "gpt_104m.yaml", help="(%(default)s)")
    parser.add_argument("--iterations", type=int, default=1530, help="50 million tokens with the default model")
    parser.add_argument("--input", nargs="+", metavar="PATH", help="text of one's own")
    parser.add_argument("--max-mib", type=float, default=60.0, help="of text (%(default)s)")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "convergence", metavar="DIR")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "measurements" / "convergence", metavar="DIR")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "convergence", metavar="DIR")
    parser.add_argument("--a-gpu", type=int, default=1, metavar="N", help="runs at once on each GPU (%(default)s)")
    parser.add_argument(
        "--deadline", type=float, metavar="SECONDS",
        help="stop what still runs then; start nothing that would take longer, going by the runs so far",
    )  # fmt: skip
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--commit", help="recorded in place of git's")
    parser.add_argument("--speed", action="store_true", help=f"measure tokens a second, in {SPEED_ITERATIONS} iterations")
    parser.add_argument("--table", action="store_true", help="only read results")
    return parser.parse_args(argv)


# ---- training


def prepare(args) -> Setting:
    """The text as datasets, made once for all runs."""
    paths = sysconfig.get_paths()
    sources = args.input or [paths["stdlib"], *sorted({paths["purelib"], paths["platlib"]})]
    words = ["--input", *sources, "--output", str(args.data / "text"), "--max-mib", str(args.max_mib)]
    if not args.input:
        words += ["--suffixes", ".py"]
    found, tokenizer = prepare_data.run(prepare_data.parse_args(words))
    prepare_data.print_report(found, tokenizer)
    data = {
        split: {"prefix": str(record.prefix), "tokens": record.tokens, "sha256": record.sha256}
        for split, record in found.splits.items()
    }
    return Setting(load_model(args.model), args.iterations, data)


def command(args, setting: Setting, job: Job, folder: Path, iterations: int, seconds: float | None) -> list[str]:
    """The training process; `timeout` ends it when its time is over."""
    flags = megatron_flags(setting.model)
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "258", "--train-iters", str(iterations)]
    for split, record in setting.data.items():
        flags += [f"--{split}-data-path", record["prefix"]]
    flags += ["--data-cache-path", str(args.data / f"cache-{setting.key}"), "--seed", str(job.seed)]
    flags += ["--hq-data-seed", str(DATA_SEED), "--hq-recipe", job.recipe]
    flags += ["--hq-metrics-file", str(folder / "metrics.jsonl")]
    if args.speed:
        flags += ["--lr-warmup-iters", "0"]  # the model's may be longer than these runs
    limit = [] if seconds is None else ["timeout", "--kill-after", "10", str(max(1, int(seconds)))]
    return [*limit, sys.executable, str(ROOT / "scripts" / "pretrain_gpt.py"), *flags]


def environment(args, gpu: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # a number or a UUID each
    card = str(gpu) if visible is None else visible.split(",")[gpu]
    ours |= {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": card if args.device == "gpu" else ""}
    return {**os.environ, **ours}


def run_job(args, setting: Setting, job: Job, gpu: int, iterations: int, seconds: float | None):
    """A finished run and what any record of it says. Raises `TrainingFailed`."""
    folder = args.logs / ("speed" if args.speed else "") / job.name
    words = command(args, setting, job, folder, iterations, seconds)
    done = run_training(Run(job.name, folder, words, environment(args, gpu), 0, iterations), job.name)
    if (last := done.log.train[-1].iteration) != iterations or done.log.first_bad() is not None:
        raise TrainingFailed(f"{job.name}: ended at iteration {last}, first bad value: {done.log.first_bad()}")
    card = {"card": "CPU"} if args.device == "cpu" else {}
    return done, {"recipe": Path(job.recipe).stem, "key": setting.key, **provenance(args.commit), **card}


def speed(args, setting: Setting, job: Job, gpu: int, seconds: float | None) -> dict:
    """How fast a recipe trains."""
    done, record = run_job(args, setting, job, gpu, SPEED_ITERATIONS, seconds)
    ms = statistics.median(p.ms for p in done.log.train[WARM_UP:])
    tokens = 1e3 * setting.tokens_per_iteration / ms
    return {**record, "iterations": SPEED_ITERATIONS, "median_ms": ms, "tokens_per_second": tokens}


def train(args, setting: Setting, job: Job, gpu: int, seconds: float | None) -> dict:
    """What a recipe learns with a seed."""
    done, record = run_job(args, setting, job, gpu, setting.iterations, seconds)
    every = max(1, setting.iterations // 300)
    return {
        **record, "seed": job.seed, "seconds": round(done.seconds, 1), "a_gpu": args.a_gpu,
        "valid_loss": done.log.final_valid_loss(), "formats": Recipe.load(job.recipe).to_dict(),
        "setting": {"model": setting.model, "iterations": setting.iterations, "data_seed": DATA_SEED, "data": {
            split: {k: record[k] for k in ("tokens", "sha256")} for split, record in setting.data.items()}},
        "train": [[p.iteration, round(p.loss, 5)] for p in done.log.train[::every]],
        "valid": [[p.iteration, p.loss] for p in done.log.valid],
    }  # fmt: skip


def train_all(args, setting: Setting, jobs: list[Job], began: float) -> list[str]:
    """Every job on the next free GPU; what failed, a line each. Results are written as runs end."""
    import torch

    make, folder = (speed, args.results / "speed") if args.speed else (train, args.results)
    folder.mkdir(parents=True, exist_ok=True)
    waiting: queue.Queue[Job] = queue.Queue()
    for job in jobs:
        waiting.put(job)
    failures, took = [], [0.0]

    def work(gpu: int) -> None:
        while True:
            left = None if args.deadline is None else args.deadline - (time.monotonic() - began)
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            if left is not None and left <= max(took):
                failures.append(f"{job.name}: not started, {left:.0f} s before the deadline; a run took {max(took):.0f} s")
                continue
            try:
                started = time.monotonic()
                record = make(args, setting, job, gpu, left)
            except TrainingFailed as error:
                failures.append(str(error))
            else:
                took.append(time.monotonic() - started)
                write_whole(folder / f"{record['recipe'] if args.speed else job.name}.json", json.dumps(record) + "\n")
                reached = "tokens_per_second" if args.speed else "valid_loss"
                print(f"[{job.name}] {reached}: {record[reached]:.5g}", flush=True)

    workers = torch.cuda.device_count() if args.device == "gpu" else 1
    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in range(workers) for _ in range(args.a_gpu)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


# ---- results


def results(folder: Path, key: str | None = None) -> list[dict]:
    """The records of one setting: `key`'s, else that of the newest file."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*_[0-9]*.json"), key=lambda p: p.stat().st_mtime)]
    key = key or (found[-1]["key"] if found else None)
    return [record for record in found if record["key"] == key]


def speeds(folder: Path, key: str) -> dict[str, dict]:
    """The measured speeds of one setting, by recipe."""
    found = [json.loads(path.read_text()) for path in sorted((folder / "speed").glob("*.json"))]
    return {record["recipe"]: record for record in found if record["key"] == key}


def half_width(base: list[float], n: int) -> float | None:
    """Half of the 95% interval of (mean of n runs - mean of the base), from the base's spread; None of one base run."""
    if len(base) < 2:
        return None
    return T_95[min(len(base) - 1, len(T_95)) - 1] * statistics.stdev(base) * math.sqrt(1 / len(base) + 1 / n)


def rows(records: list[dict], speed_of: dict[str, dict] | None = None) -> list[dict]:
    """A row a recipe, the base first: mean loss of its seeds, gap to the base with its interval, tokens a second."""
    speed_of = speed_of or {}
    by_recipe: dict[str, list[dict]] = {}
    for record in sorted(records, key=lambda r: (r["recipe"] != BASE, r["recipe"], r["seed"])):
        by_recipe.setdefault(record["recipe"], []).append(record)
    base = [r["valid_loss"] for r in by_recipe.get(BASE, ())]
    found = []
    for recipe, runs in by_recipe.items():
        loss = statistics.fmean(r["valid_loss"] for r in runs)
        gap = None if recipe == BASE or not base else loss - statistics.fmean(base)
        speed = speed_of.get(recipe, {})
        found.append({
            "recipe": recipe, "seeds": len(runs), "valid_loss": loss, "gap": gap,
            "half_width": None if gap is None else half_width(base, len(runs)), "tokens_per_second": speed.get("tokens_per_second"),
            "cards": sorted({r["card"] for r in runs}), "speed_card": speed.get("card"),
        })  # fmt: skip
    return found


def cells(row: dict) -> tuple[str, ...]:
    gap, width = row["gap"], row["half_width"]
    shown = "" if gap is None else f"{gap:+.4f}" + ("" if width is None else f" +- {width:.4f}")
    return (
        row["recipe"], str(row["seeds"]), f"{row['valid_loss']:.4f}", shown,
        ", ".join(row["cards"]),
        "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f} ({row['speed_card']})",
    )  # fmt: skip


HEADER = ("recipe", "seeds", "final validation loss", "gap to bf16 (95%)", "trained on", "tokens/s, alone on")


def markdown(found: list[dict]) -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells(row)) + " |" for row in found)]) + "\n"


def publish(args, records: list[dict]) -> None:
    """Print the table; write it, the plot, and where a document has a place for it, there."""
    from megatron_hybrid.observe.plots import plot_losses

    found = rows(records, speeds(args.results, records[0]["key"]))
    print(Table(HEADER, tuple(map(cells, found)), (f"{len(records)} runs in {args.results}",)))
    write_whole(args.results / "table.md", markdown(found))
    write_whole(args.results / "table.json", json.dumps(found, indent=1) + "\n")
    logs = {
        f"{r['recipe']}, seed {r['seed']}": TrainingLog(
            [TrainPoint(i, loss) for i, loss in r["train"]], [ValidPoint(i, loss) for i, loss in r["valid"]]
        )
        for r in sorted(records, key=lambda r: (r["recipe"] != BASE, r["recipe"], r["seed"]))
    }
    plot_losses(logs, args.results / "losses.png", title="Loss, nats a byte")


def to_do(args, key: str) -> list[Job]:
    """Runs without a result; for speeds one a recipe."""
    if args.speed:
        # what changes later than these runs end has no one speed
        runs = [job for job in args.runs if not Recipe.load(job.recipe).late_rules(SPEED_ITERATIONS)]
        done, first = speeds(args.results, key), {Path(job.recipe).stem: job for job in reversed(runs)}
        return [job for recipe, job in reversed(first.items()) if recipe not in done]
    done = {f"{r['recipe']}_{r['seed']}" for r in results(args.results, key)}
    return [job for job in args.runs if job.name not in done]


def main(argv=None) -> int:
    args, began = parse_args(argv), time.monotonic()
    failures, key = [], None
    if not args.table:
        for job in args.runs:
            if late := Recipe.load(job.recipe).late_rules(args.iterations):  # a wrong name fails here, before training
                raise SystemExit(f"error: {late[0]}")
        setting = prepare(args)
        key = setting.key
        jobs = to_do(args, key)
        print(f"{len(jobs)} runs to do, the others are there already; {setting.iterations} iterations of "
              f"{setting.tokens_per_iteration:,} tokens", flush=True)  # fmt: skip
        failures = train_all(args, setting, jobs, began)
    records = results(args.results, key)
    if records:
        publish(args, records)
    for line in failures:
        print(re.sub(r"\n+", "\n  ", line), file=sys.stderr)
    return int(bool(failures) or not records)


if __name__ == "__main__":
    sys.exit(main())
