"""Run many scripts on ranks that are forks of one process: imports are paid once, whatever the scripts and their ranks.

    python run_mcore_cases.py           # serves mcore_cases.py: a line of JSON in, the results in files, a line END out

A line is {"cases", "folder", "ranks"}. A case is {"name", "argv": [script, ...] or ["-m", module, ...]} and maybe
"ranks": 1, "patches": true (applied first, for scripts that do not ask for them), "environment", "seconds". It runs on
its ranks at the same time, with a process group of its own and the environment that torchrun gives; the next begins
when all have ended. For every case and rank the folder gets <name>.<rank>.out and a line in results.<rank>.jsonl:
{"name", "exit", "seconds"}.

Also run_training.py's cases are forks of this module's process, on GPUs with NCCL: it never touches those, so that
they can.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
from mcore_cases import END
from shared_gpus import take_gpu

from megatron_hybrid import patches
from megatron_hybrid.patches import cpu_device

if "nccl" not in sys.argv:
    cpu_device.install()

import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async  # noqa: E402
import megatron.training  # noqa: E402, F401
from megatron.training.argument_utils import ArgumentGroupFactory  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

import megatron_hybrid.mcore.run  # noqa: E402, F401


def prepare() -> None:
    """What is the same in every case and rank, done once: Megatron reads its own source for help texts of flags."""
    found, read = {}, ArgumentGroupFactory._get_field_docstrings

    def once(self, source):
        if source not in found:
            found[source] = read(self, source)
        return dict(found[source])

    ArgumentGroupFactory._get_field_docstrings = once
    add_megatron_arguments(argparse.ArgumentParser())
    gc.collect()
    gc.freeze()  # what is here is not looked at again, and its pages stay shared


def free_port() -> int:
    """One below those that the system gives to connections: it is bound again later, and must be free still."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def become(case: dict, rank: int, ranks: int, port: int, output: Path) -> None:
    """In the child: the environment and output of a rank that torchrun would have started."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **case.get("environment", {})}
    if "nccl" in sys.argv:
        take_gpu(ranks, torch.cuda.device_count())
    # Megatron starts a process for this queue in every run that saves, which imports everything again
    filesystem_async._results_queue = queue.Queue()
    sys.argv = [word for word in case["argv"] if word != "-m"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)


def run_child(case: dict) -> int:
    try:
        if case.get("patches"):
            patches.apply_all()
        if case["argv"][0] == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1


def start(case: dict, rank: int, ranks: int, port: int, folder: Path) -> int:
    """The process of a rank."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            become(case, rank, ranks, port, folder / f"{case['name']}.{rank}.out")
            code = run_child(case)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pid


def wait_for(pids: list[int], seconds: float):
    """(rank, exit status) of every process, in the order in which they end; 124 of those that take longer."""
    deadline, left = time.monotonic() + seconds, dict(enumerate(pids))
    while left:
        late = time.monotonic() > deadline
        for rank, pid in list(left.items()):
            if late:
                end_group(pid)
            done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if done:
                end_group(pid)  # what the case left behind: Megatron's checkpoint writers outlive an `os._exit`
                yield rank, 124 if late else os.waitstatus_to_exitcode(status)
                del left[rank]
        time.sleep(0.02)


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_all(cases: list[dict], folder: Path, most_ranks: int) -> None:
    """Every case in turn."""
    for case in cases:
        ranks, port, started = case.get("ranks") or most_ranks, free_port(), time.monotonic()
        pids = [start(case, rank, ranks, port, folder) for rank in range(ranks)]
        for rank, code in wait_for(pids, case.get("seconds", 120)):
            line = {"name": case["name"], "exit": code, "seconds": round(time.monotonic() - started, 1)}
            with (folder / f"results.{rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"rank {rank}: {line}", flush=True)


def serve() -> None:
    """The lists of cases on the input, until it is closed."""
    prepare()
    for line in sys.stdin:
        request = json.loads(line)
        run_all(request["cases"], Path(request["folder"]), request["ranks"])
        print(END, flush=True)


if __name__ == "__main__":
    serve()
