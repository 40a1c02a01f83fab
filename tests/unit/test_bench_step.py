"""scripts/bench_step.py runs in one process, without a launcher; its own check is that of fused against plain layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_step.py"
SHAPE = "--layers 2 --hidden 256 --ffn 512 --heads 4 --groups 2 --vocab 512 --repeat 1".split()


def bench(tmp_path, *more) -> dict:
    out = tmp_path / "step.json"
    command = [sys.executable, SCRIPT, *SHAPE, "--json", out, *more]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())


def test_on_the_cpu(tmp_path):
    found = bench(tmp_path, "--seq", 64, "--recipe", "fp8_delayed", "--peers", "local", "--main-grad", "fp8_delayed")
    assert [row["what"] for row in found["results"]] == ["fp8_delayed", "fp8_delayed main_grad", "Megatron local bf16"]
    assert all(row["ms"] > 0 and row["goal"] is None for row in found["results"])
    assert found["sizes"]["layers"] == 2 and found["checks"][0]["ok"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fused_layers_are_as_close_to_fp32_as_plain_ones(tmp_path):
    found = bench(tmp_path, "--seq", 1024, "--recipe", "bf16", "fp8_delayed", "fp8_block", "--profile", "--apart", "fp8_block")
    assert [c["ok"] for c in found["checks"]] == [True] * 3
    for row in found["results"]:
        assert row["profile"]["kinds"]["fused"] > 0 and row["profile"]["kinds"]["attention"] > 0
