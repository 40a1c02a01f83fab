"""Run many scripts on the ranks of one launch: imports are paid once, then every case is a fork of this process.

    torchrun ... run_mcore_cases.py cases.json results_folder

Also run_training.py's, whose cases run on GPUs with NCCL: this process itself never touches those, so that its forks can.

cases.json: a list of {"name", "argv": [script, ...] or ["-m", module, ...]} and maybe "ranks": 1, "patches": true (applied first, for scripts
that do not ask for them), "environment", "seconds". A case runs on its ranks at the
same time, with a process group of its own; the next begins when all have ended. For every case and rank the folder
gets <name>.<rank>.out and a line in results.<rank>.jsonl: {"name", "exit", "seconds"}.
"""

from __future__ import annotations

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

import torch.distributed as dist

from megatron_hybrid import patches
from megatron_hybrid.patches import cpu_device

if "nccl" not in sys.argv:
    cpu_device.install()

import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async  # noqa: E402
import megatron.training  # noqa: E402, F401
import megatron.training.argument_utils  # noqa: E402, F401
import megatron.training.arguments  # noqa: E402, F401

import megatron_hybrid.mcore.run  # noqa: E402, F401

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def free_port() -> int:
    """One below those that the system gives to connections: it is bound again later, and must be free still."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def become(case: dict, ranks: int, port: int, output: Path) -> None:
    """In the child: the environment and output of a rank that torchrun would have started."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ |= case.get("environment", {})
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
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


def wait_for(pid: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            end_group(pid)  # what the case left behind: Megatron's checkpoint writers outlive an `os._exit`
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    end_group(pid)
    os.waitpid(pid, 0)
    return 124


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_all(cases: list[dict], folder: Path) -> None:
    """Every case in turn, on this rank where it is one of the case's."""
    # a store apart from the cases' own, for port numbers and turns
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for index, case in enumerate(cases):
        ranks = case.get("ranks") or WORLD
        if RANK == 0:
            store.set(f"port{index}", str(free_port()))
        port = int(store.get(f"port{index}"))
        if RANK < ranks:
            started = time.monotonic()
            pid = os.fork()
            if pid == 0:
                become(case, ranks, port, folder / f"{case['name']}.{RANK}.out")
                code = run_child(case)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            code = wait_for(pid, case.get("seconds", 120))
            line = {"name": case["name"], "exit": code, "seconds": round(time.monotonic() - started, 1)}
            with (folder / f"results.{RANK}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"rank {RANK}: {line}", flush=True)
        store.add(f"done{index}", 1)
        while int(store.add(f"done{index}", 0)) < WORLD:
            time.sleep(0.05)


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
