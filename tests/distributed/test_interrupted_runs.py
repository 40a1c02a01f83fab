"""Ctrl-C in training: torchrun hands it to its ranks; one line, every rank ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from launch import tail
from mcore_cases import MIXED, MOCK, MODEL, SCRIPT, TP2

pytestmark = pytest.mark.dist
SECONDS = 20  # within which every rank must have ended; on a free machine it takes half of one
LONG = [*MODEL, *MOCK, *TP2, "--hq-recipe", MIXED, "--train-iters", "100000"]


def loads_torch(rank: psutil.Process) -> bool:
    return SCRIPT in rank.cmdline() and any("libtorch" in mapped.path for mapped in rank.memory_maps())


def interrupted(tmp_path, wait_for: str, *flags: str) -> str:
    """What a run of two ranks prints after a SIGINT that comes when it has said `wait_for`, torchrun's own words left out."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", SCRIPT, *LONG, *flags),
    ]
    said = tmp_path / "said"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with said.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while wait_for not in (before := said.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, tail(before)
            time.sleep(0.1)
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) >= 2
        while sum(map(loads_torch, ranks)) < 2:  # before, an interrupt is Python's own to end
            assert process.poll() is None and time.monotonic() < deadline, tail(before)
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
        assert not psutil.wait_procs(ranks, timeout=SECONDS)[1]
    finally:
        for left in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            left.kill()
        process.kill()
    after = said.read_text()[len(before) :]
    torchruns = after.find("torch/distributed/run.py")
    return after if torchruns < 0 else after[: after.rindex("Traceback (most recent call last):\n", 0, torchruns)]


def test_training_says_where_it_was_and_what_is_saved(tmp_path):
    said = interrupted(tmp_path, " iteration        3/", "--save", str(tmp_path / "ckpt"), "--save-interval", "2")
    line = [line for line in said.splitlines() if line.startswith("interrupted ")]
    assert len(line) == 1 and " of 100000; the last checkpoint in " in line[0] and " is of iteration " in line[0], said
    latest = (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text().strip()
    assert line[0].endswith(f" {latest}")
    assert "[rank" not in said and "Traceback" not in said and "KeyboardInterrupt" not in said, said


def test_before_training(tmp_path):
    said = interrupted(tmp_path, "[megatron_hybrid] loading torch and Megatron ...")
    assert "\ninterrupted before the first iteration\n" in said and "Traceback" not in said, said
