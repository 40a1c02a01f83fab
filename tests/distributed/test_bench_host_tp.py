"""scripts/bench_host.py --tensor-parallel runs without a GPU and without ranks; times here mean nothing."""

import json
import subprocess
import sys

import pytest
from launch import REPOSITORY, tail

pytestmark = pytest.mark.dist


def test_it_runs_every_kind_of_linear(tmp_path):
    out, names = tmp_path / "host.json", ["Megatron's own", "fp8_delayed", "fp8_delayed, by Python", "fp8_delayed, weight cast",
                                          "fp8_delayed, weight cast, by Python"]  # fmt: skip
    sizes = ["--tokens", "64", "--features", "32", "--rounds", "1", "--calls", "1"]
    how = ["--tensor-parallel", "--python", "--device", "cpu", "--recipes", "fp8_delayed", "--json", str(out)]
    command = [sys.executable, REPOSITORY / "scripts" / "bench_host.py", *sizes, *how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, tail(done.stderr)
    rows = json.loads(out.read_text())["results"]
    kinds = ("column SP", "row SP", "column", "row")
    found = {(row["kind"], row["what"], row["autograd_thread"]) for row in rows}
    assert found == {(kind, name, threads) for kind in kinds for name in names for threads in (True, False)}
    assert all(row["us"] > 0 and row["over_torch"] > 0 for row in rows)
