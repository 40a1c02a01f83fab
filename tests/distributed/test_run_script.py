"""scripts/run_distributed_tests.sh: what it runs where, and its table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launch import REPOSITORY, script_module
from shared_gpus import take_gpu

pytestmark = pytest.mark.dist

WORKER = """
import json, os, sys, time
rank = os.environ["RANK"]
errors = {"right": None, "wrong": "Traceback\\nAssertionError: 1 is not 2" if rank == "1" else None}
open(f"{sys.argv[1]}/{rank}.json", "w").write(json.dumps(errors))
while not os.path.exists(f"{sys.argv[1]}/0.json"):
    time.sleep(0.05)  # torchrun ends the others when one fails
sys.exit(int(rank))
"""


@pytest.fixture(scope="module")
def script():
    with script_module("run_distributed_tests") as module:
        yield module


def test_what_runs_where(script):
    for suite in script.SUITES:
        assert (script.WORKERS / suite.worker).is_file()
    tensor, megatron, *_, training, resumes, _, fsdp, combinations, graphs, fused = script.SUITES
    assert [tensor.reason_not(backend, n) for backend in ("gloo", "nccl") for n in (2, 8)] == [None] * 4
    assert megatron.reason_not("nccl", 2) is None and megatron.reason_not("nccl", 4) == "for 2 ranks"
    assert training.reason_not("nccl", 4) is None and training.reason_not("nccl", 8) == "for 2 or 4 ranks"
    assert fsdp.reason_not("gloo", 4) is None and fsdp.reason_not("nccl", 2) is None
    assert fused.reason_not("gloo", 2) == graphs.reason_not("gloo", 2) == resumes.reason_not("gloo", 2) == "for nccl only"
    assert combinations.reason_not("nccl", 2) is None and combinations.reason_not("nccl", 4) == "for 2 ranks"


def test_a_failure_names_check_and_rank(script, tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(script, "WORKERS", tmp_path)
    found = list(script.rows(script.Suite("two", "worker.py", ("{out}",)), "gloo", 2, tmp_path / "out"))
    assert found == [("two", "right", "ok", ""), ("two", "wrong", "FAILED", "rank 1: AssertionError: 1 is not 2")]
    assert script.table(found).splitlines() == ["two", "  ok      right", "  FAILED  wrong  rank 1: AssertionError: 1 is not 2"]


def test_a_launch_that_fails_after_its_checks_is_a_failure(script, tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER.replace('"Traceback\\nAssertionError: 1 is not 2"', "None"))
    monkeypatch.setattr(script, "WORKERS", tmp_path)
    found = list(script.rows(script.Suite("two", "worker.py", ("{out}",)), "gloo", 2, tmp_path / "out"))
    assert [row[1:3] for row in found] == [("", "FAILED"), ("right", "ok"), ("wrong", "ok")] and "exit 1" in found[0][3]


def test_mistakes_end_with_a_line():
    done = subprocess.run(
        [REPOSITORY / "scripts" / "run_distributed_tests.sh", "--nproc", "1", "--backend", "gloo"],
        capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 2 and "the checks need two ranks" in done.stderr


@pytest.mark.parametrize("ranks, gpus, gpu, told_apart", [(2, 2, 1, False), (2, 1, 0, True), (4, 2, 1, True)])
def test_a_rank_s_gpu(monkeypatch, ranks, gpus, gpu, told_apart):
    """The last of the ranks: NCCL takes two ranks of a GPU for two machines, ranks with GPUs of their own for one."""
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(ranks - 1))
    assert take_gpu(ranks, gpus) == gpu == int(os.environ["LOCAL_RANK"])
    assert ("NCCL_HOSTID" in os.environ) is told_apart
