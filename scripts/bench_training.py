#!/usr/bin/env python3
"""Train the same GPT with several recipes and parallel layouts on GPUs, and record losses, times and a plot.

    python scripts/bench_training.py --layouts tp2 dp2 --recipes bf16 fp8_current mxfp8_fprop_nvfp4_bwd --json OUT.json

The text is the standard library's source, the trainer scripts/pretrain_gpt.py over NCCL. Every run's checks are
those of the demo: complete, finite, below the text's bigram entropy.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import prepare_data  # noqa: E402
import torch  # noqa: E402
from bench_common import provenance  # noqa: E402
from demo_lib import report  # noqa: E402
from demo_lib.launch import TrainingFailed, run_training  # noqa: E402
from demo_lib.settings import ROOT, Settings, load_model, training_run  # noqa: E402

from megatron_hybrid.explain import Table  # noqa: E402
from megatron_hybrid.observe.plots import plot_losses  # noqa: E402

LAYOUTS = {
    "tp2": {"tensor-model-parallel-size": 2, "sequence-parallel": True},
    "dp2": {"tensor-model-parallel-size": 1},
}
GRAPHS = {"cuda-graph-impl": "local"}
MODEL = ROOT / "configs" / "models" / "gpt_two_gpus.yaml"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8_current", "mxfp8_fprop_nvfp4_bwd"])
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--graphs", action="store_true", help="every run once more with --cuda-graph-impl local")
    parser.add_argument("--model", type=Path, default=MODEL, help="a file of Megatron flags (default %(default)s)")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="cpu: try the script without GPUs")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "training", metavar="DIR")
    parser.add_argument("--json", type=Path, help="write every run's figures and curves, card, versions and commit here")
    parser.add_argument("--commit", help="what to record as the commit where there is no git checkout")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    prefix = ROOT / "data" / "demo" / "stdlib"
    data, tokenizer = prepare_data.run(
        prepare_data.parse_args(["--stdlib", "--max-mib", "12.0", "--output", str(prefix)])
    )
    prepare_data.print_report(data, tokenizer)
    record = {
        **provenance(args.commit), "gpus": torch.cuda.device_count(), "model": load_model(args.model),
        "iterations": args.iterations, "runs": [],
    }  # fmt: skip
    rows, failed = [], False
    layouts = {layout: LAYOUTS[layout] for layout in args.layouts}
    if args.graphs:
        layouts |= {f"{layout} graphs": flags | GRAPHS for layout, flags in layouts.items()}
    for layout, flags in layouts.items():
        logs = {}
        for recipe in args.recipes:
            settings = Settings(
                out=args.out / layout.replace(" ", "_"), data_prefix=prefix, data_key=data.splits["train"].sha256, recipe=recipe,
                iterations=args.iterations, resumed=0, device=args.device,
                model={**record["model"], **flags},
            )  # fmt: skip
            try:
                outcome = run_training(training_run(settings, recipe), f"{layout} {recipe}")
            except TrainingFailed as exc:
                print(exc, file=sys.stderr)
                failed = True
                continue
            name = Path(recipe).stem
            logs[name] = outcome.log
            figures = report.summarise(name, outcome.log, outcome.seconds, settings.tokens_per_iteration())
            checks = [
                report.check_complete(outcome.log, args.iterations, "complete"),
                report.check_learned(figures.valid_loss, data.entropies.bigram),
            ]
            failed |= not all(c.passed for c in checks)
            steps = sorted(p.ms for p in outcome.log.train[1:])
            rows.append((layout, name, f"{steps[len(steps) // 2]:.1f}", f"{figures.tokens_per_second:,.0f}",
                         f"{figures.train_loss:.4f}", f"{figures.valid_loss:.4f}",
                         "ok" if all(c.passed for c in checks) else "; ".join(c.detail for c in checks)))  # fmt: skip
            record["runs"].append({
                "layout": layout, "recipe": name, "median_ms": steps[len(steps) // 2], "seconds": outcome.seconds,
                "tokens_per_second": figures.tokens_per_second, "valid_loss": figures.valid_loss,
                "train": [[p.iteration, p.loss, p.grad_norm] for p in outcome.log.train[::5]],
                "valid": [[p.iteration, p.loss] for p in outcome.log.valid],
            })  # fmt: skip
        levels = {"unigram entropy": data.entropies.unigram, "bigram entropy": data.entropies.bigram}
        if logs:
            title = f"{record['card']} x 2, {layout}: standard library source, byte tokens"
            plot_losses(logs, args.out / f"loss_{layout.replace(' ', '_')}.png", levels=levels, title=title)
    header = ("layout", "recipe", "ms/step", "tokens/s", "train loss", "valid loss", "checks")
    print(Table(header, tuple(rows), (f"bigram entropy {data.entropies.bigram:.4f} nats/token",)))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
