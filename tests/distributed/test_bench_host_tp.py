"""scripts/bench_host.py --tensor-parallel and --grouped --no-kernels run without a GPU and without ranks; times here mean
nothing."""

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


def test_it_runs_grouped_linears_without_kernels(tmp_path):
    pytest.importorskip("triton", reason="the map of blocks is in its module")
    out, recipes = tmp_path / "host.json", ("fp8_rowwise", "fp8_block")
    sizes = ["--grouped", "4", "--rounds", "1", "--calls", "1"]
    how = ["--no-kernels", "--python", "--device", "cpu", "--json", str(out)]
    command = [sys.executable, REPOSITORY / "scripts" / "bench_host.py", *sizes, *how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, tail(done.stderr)
    said = [f"{name}{cached}" for name in recipes for cached in ("", ", weight cached")]
    found = {(row["what"], row["autograd_thread"]) for row in json.loads(out.read_text())["results"]}
    assert found >= {(name, threads) for name in ("autograd", *said) for threads in (True, False)}
