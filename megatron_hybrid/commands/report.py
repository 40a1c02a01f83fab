"""One HTML page about one run or several beside each other: losses, signal-to-noise ratios by layer and operand,
outlier layers, where the time goes, between steps and inside one, how the recipes differ. Everything is in the page;
its pictures are PNG files beside it too.

A run is a folder with metrics.jsonl (--hq-metrics-file), hq_stats*.jsonl (--hq-stats-interval), hq_profile*.json
(--hq-profile-step) and log.txt, whichever of them there are, or a metrics file or log of Megatron's itself; NAME=PATH
gives it another name.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN..., --out."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="PATH or NAME=PATH; others are compared with the first")
    parser.add_argument("--out", default="report", metavar="DIR", help="where the page goes (default: report)")


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is. Raises ``ValueError`` for a path that holds nothing of a run."""
    from pathlib import Path

    from ..observe.report import write_report
    from ..observe.runs import load_run

    page = write_report([load_run(text) for text in args.runs], Path(args.out))
    print(page)
    return 0
