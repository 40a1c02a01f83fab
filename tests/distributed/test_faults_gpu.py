"""Faults on one of two GPUs over NCCL, whose collectives wait for a rank that is gone: torchrun ends all, the cause named."""

from __future__ import annotations

import time

import pytest
import torch
from launch import torchrun
from mcore_cases import SCRIPT, TP2
from test_checkpoints import BOTH, CHOSEN, FAULT, SECONDS, run, saving

pytestmark = [
    pytest.mark.gpu, pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]  # fmt: skip
START = 60  # imports, NCCL, the first step's kernels


@pytest.mark.parametrize(
    "fault, flags, said",
    [
        ("die:1:3", [], ["rank      : 1", "SIGKILL"]),
        ("crash:1:3", [], ["rank      : 1", "SIGABRT", "Fatal Python error: Aborted", "in train_step"]),
        ("nan:1:3", ["--hq-check-nan"], ["rank 1, step 3, microbatch 0, module decoder.layers.0.mlp.linear_fc1: weight"]),
        ("full:1:3", None, ["iter_0000004/__1_0.distcp: [Errno 27] File too large"]),
    ],
)
def test_every_rank_ends_and_the_cause_is_named(fault, flags, said, tmp_path):
    (tmp_path / "both.yaml").write_text(BOTH)
    case = saving("full", *CHOSEN, *TP2) if flags is None else run("fault", *CHOSEN, *TP2, *flags)
    argv = [word.format(folder=tmp_path) for word in case.argv[1:]]
    started = time.monotonic()
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # Megatron asks for it beside tensor parallelism
    done = torchrun(2, FAULT, fault, SCRIPT, *argv, check=False, timeout=START + 2 * SECONDS, env=environment)
    assert done.returncode != 0 and time.monotonic() - started < START + SECONDS
    for text in said:
        assert text in done.stdout, done.stdout[-3000:]
    if flags is None:
        assert (tmp_path / "full" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
