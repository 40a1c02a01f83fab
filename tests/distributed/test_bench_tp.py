"""scripts/bench_tp.py runs on two CPU ranks and writes what it measured; times there mean nothing."""

from __future__ import annotations

import json

import pytest
from launch import REPOSITORY, torchrun

pytestmark = pytest.mark.dist


def test_rows_and_file(tmp_path):
    out = tmp_path / "tp.json"
    sizes = ["--tokens", "64", "--shapes", "64x128", "--depth", "1", "--rounds", "1", "--calls", "1"]
    recipes = ["--recipes", "fp8_delayed", "nvfp4"]
    done = torchrun(2, REPOSITORY / "scripts" / "bench_tp.py", *sizes, *recipes, "--main-thread", "--json", out)
    assert "2 ranks, cpu, 64 tokens, 2 linears" in done.stdout
    found = json.loads(out.read_text())
    assert [row["recipe"] for row in found["results"]] == ["Megatron's own, bf16", "fp8_delayed", "nvfp4"]
    assert found["ranks"] == 2 and found["main_thread"] and found["results"][0]["ms_speedup"] == 1.0
    assert all(0 < row["host_ms"] <= row["ms"] for row in found["results"])
