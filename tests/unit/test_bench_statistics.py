"""scripts/bench_statistics.py: a recorded step beside others. The goal, 3% of the time at every 100th step, is a GPU's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_statistics.py"


def bench(tmp_path, *more) -> tuple[int, list[dict], str]:
    command = [sys.executable, SCRIPT, *more, "--json", tmp_path / "statistics.json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    return done.returncode, json.loads((tmp_path / "statistics.json").read_text())["results"], done.stdout


def test_on_the_cpu(tmp_path):
    shape = "--layers 2 --hidden 128 --ffn 256 --heads 4 --groups 2 --vocab 512 --seq 64 --repeat 2 --recipe mxfp8 bf16".split()
    code, (quantized, bf16), printed = bench(tmp_path, *shape, "--every", "10000")
    assert quantized["casts"] == 2 * 4 * 6 and bf16["casts"] == 0
    assert quantized["recorded_ms"] > quantized["ms"] > 0 and code == 0 and "goal 3%" in printed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_statistics_cost_at_most_three_percent_at_every_hundredth_step(tmp_path):
    code, rows, printed = bench(tmp_path)
    print(printed)
    assert code == 0 and all(row["share"] <= 0.03 for row in rows), printed
