#!/usr/bin/env python3
"""Train a small GPT on real text with a hybrid recipe, on two ranks, and check what came of it.

Prepares the standard library's source as data, trains through scripts/pretrain_gpt.py, resumes from a checkpoint,
and checks: every iteration finite; validation loss below the text's bigram entropy; the resumed run equal to the
uninterrupted one bit for bit; with --compare, within 2% of the same run in bf16. Exits non-zero if any fails.
Writes runs/demo/summary.json, runs/demo/loss.png, and a folder with log and metrics for each run.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import prepare_data  # noqa: E402
from demo_lib import report  # noqa: E402
from demo_lib.launch import Outcome, TrainingFailed, run_training  # noqa: E402
from demo_lib.settings import DEFAULT_RECIPE, MODEL_CONFIG, ROOT, Settings, load_model, training_run  # noqa: E402

from megatron_hybrid.data.entropy import Entropies  # noqa: E402
from megatron_hybrid.interrupts import imports_end_at_once, say  # noqa: E402
from megatron_hybrid.loading import say_loading  # noqa: E402
from megatron_hybrid.observe.plots import plot_losses  # noqa: E402
from megatron_hybrid.observe.training_log import TrainingLog  # noqa: E402

REFERENCE_RECIPE = "bf16"


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Everything after a lone ``--`` goes to the trainer as it is."""
    own, _, extra = _partition(list(argv), "--")
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- flags of Megatron's or --hq-* ...]",
    )
    parser.add_argument(
        "--model", type=Path, default=MODEL_CONFIG, metavar="FILE", help="Megatron's flags (default configs/models/gpt_demo.yaml)"
    )
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help="a recipe's name or file (default %(default)s)")
    parser.add_argument("--compare", action="store_true", help=f"also train with {REFERENCE_RECIPE}, compare and plot")
    parser.add_argument("--iterations", type=int, default=Settings.iterations,
                        help="(default %(default)s; with many fewer the loss is not yet below the line that is checked)")
    parser.add_argument(
        "--resume-iterations", type=int, default=10, metavar="K",
        help="run the last K iterations again from a checkpoint; 0: leave that out (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1234, help="(default %(default)s)")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "gpu"], default="auto", help="auto: GPUs if there are two, else the CPU"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo", metavar="DIR", help="(default runs/demo)")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "demo", metavar="DIR", help="(default data/demo)")
    parser.add_argument("--max-mib", type=float, default=12.0, help="how much text (default %(default)s)")
    for hidden, kind in (("--trainer", Path), ("--launcher", str)):  # for the tests
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--disable-attention", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(own)
    if args.iterations < 2 or not 0 <= args.resume_iterations < args.iterations:
        parser.error("--iterations must be at least 2, --resume-iterations at least 0 and fewer than --iterations")
    args.extra = tuple(extra)
    return args


def _partition(items: list[str], mark: str) -> tuple[list[str], bool, list[str]]:
    if mark not in items:
        return items, False, []
    at = items.index(mark)
    return items[:at], True, items[at + 1 :]


def prepare(args: argparse.Namespace) -> tuple[Path, str, Entropies]:
    """The demo's data: its prefix, a key of its content, and its entropies."""
    prefix = args.data / "stdlib"
    # small documents, so that the little validation text is drawn from many files
    flags = ["--stdlib", "--max-mib", str(args.max_mib), "--max-document-kib", "8", "--split", "0.98,0.02"]
    flags += ["--output", str(prefix)]
    result, tokenizer = prepare_data.run(prepare_data.parse_args(flags))
    prepare_data.print_report(result, tokenizer)
    assert result.entropies is not None
    return prefix, result.splits["train"].sha256, result.entropies


def choose_device(wanted: str) -> str:
    if wanted == "cpu":
        return "cpu"
    say_loading("torch")
    import torch

    gpus = torch.cuda.device_count()
    if wanted == "gpu" and gpus < 2:
        raise ValueError(f"--device gpu: the demo needs 2 GPUs, found {gpus}")
    device = "gpu" if wanted == "gpu" or (wanted == "auto" and gpus >= 2) else "cpu"
    print(f"[demo] device: {device} (GPUs found: {gpus})")
    return device


def make_settings(args: argparse.Namespace, prefix: Path, key: str) -> Settings:
    chosen = {name: value for name in ("trainer", "launcher") if (value := getattr(args, name)) is not None}
    return Settings(
        out=args.out, data_prefix=prefix, data_key=key, recipe=args.recipe, iterations=args.iterations,
        resumed=args.resume_iterations, seed=args.seed, device=choose_device(args.device),
        disable_attention=args.disable_attention, extra=args.extra, model=load_model(args.model), **chosen,
    )


def train(settings: Settings, recipe: str, kind: str = "plain") -> Outcome:
    run = training_run(settings, recipe, kind)
    shutil.rmtree(run.folder, ignore_errors=True)
    return run_training(run, run.name)


def run_demo(args: argparse.Namespace) -> report.Summary:
    prefix, key, entropies = prepare(args)
    settings = make_settings(args, prefix, key)
    start = time.monotonic()
    logs: dict[str, TrainingLog] = {}
    summary = report.Summary(settings.device, [], entropies.unigram, entropies.bigram, 0.0)

    whole = train(settings, settings.recipe, "saving" if settings.resumed else "plain")
    name = Path(settings.recipe).stem
    _record(summary, logs, settings, name, whole)
    few = settings.iterations < Settings.iterations
    hint = f"; {settings.iterations} iterations are few for it, {Settings.iterations} are the default" if few else ""
    summary.checks.append(report.check_learned(whole.log.final_valid_loss(), entropies.bigram, hint))
    if settings.resumed:
        resumed = train(settings, settings.recipe, "resumed")
        summary.checks.append(report.check_resume(whole.log, resumed.log, settings.resumed))
    if args.compare:
        reference = train(settings, REFERENCE_RECIPE)
        _record(summary, logs, settings, REFERENCE_RECIPE, reference)
        summary.checks.append(report.check_close(whole.log.final_valid_loss(), reference.log.final_valid_loss()))
    summary.seconds = time.monotonic() - start

    levels = {"unigram entropy": entropies.unigram, "bigram entropy": entropies.bigram}
    plot_losses(logs, settings.out / "loss.png", levels=levels, title="Standard library source, byte tokens")
    summary.write(settings.out / "summary.json")
    return summary


def _record(
    summary: report.Summary, logs: dict[str, TrainingLog], settings: Settings, name: str, outcome: Outcome
) -> None:
    logs[name] = outcome.log
    summary.runs.append(report.summarise(name, outcome.log, outcome.seconds, settings.tokens_per_iteration()))
    summary.checks.append(report.check_complete(outcome.log, settings.iterations, f"{name} ran through"))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the training processes too
    try:
        with imports_end_at_once(lambda _: say("\ndemo: stopped")):
            summary = run_demo(args)
    except (TrainingFailed, ValueError, OSError) as exc:
        print(f"\ndemo: error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        return 130
    print(f"\n{summary.table()}\nplot: {args.out / 'loss.png'}   figures: {args.out / 'summary.json'}")
    return 0 if summary.passed else 1


if __name__ == "__main__":
    sys.exit(main())
