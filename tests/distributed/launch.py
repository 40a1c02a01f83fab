"""Start a worker script under torchrun from a test, with its output in the failure message.

    from launch import torchrun                       # tests/distributed is on the path of its own tests
    result = torchrun(2, "run_something.py", "--tensor-model-parallel-size", "2")
    assert "RESULT" in result.stdout

A launch costs 10 to 20 seconds on two cores, most of it imports, so a worker should do many checks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
TAIL_LINES = 80
GRACE_SECONDS = 10
AGENT_TRACEBACK = 500  # characters within which torchrun's own traceback names itself


@contextlib.contextmanager
def script_module(name: str):
    """``scripts/<name>.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


def tail(text: str, num_lines: int = TAIL_LINES) -> str:
    """The last lines of the workers' output, without torchrun's own traceback after them."""
    start = text.rfind("\nTraceback (most recent call last):")
    if start >= 0 and "torch/distributed/run.py" in text[start : start + AGENT_TRACEBACK]:
        text = text[:start]
    lines = text.splitlines()
    cut = [f"... {len(lines) - num_lines} lines left out"] if len(lines) > num_lines else []
    return "\n".join(cut + lines[-num_lines:])


def torchrun(nproc, script, *args, env=None, timeout=240, check=True, cwd=None):
    """Run ``script`` (a path, or a name in this folder) on ``nproc`` ranks of this machine.

    ``script`` may also be ``"-m package.module"``. ``env`` adds to the environment. stdout and stderr of
    all ranks come back together as ``CompletedProcess.stdout``. With ``check``, an exit status other than
    0 fails the test and prints the output's tail; running past ``timeout`` seconds always fails it.
    """
    target = script.split() if str(script).startswith("-m ") else [str(HERE / script)]
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(nproc), "--max-restarts", "0"),
        # Port 0: the store binds a free port itself, so two launches at once cannot meet on one.
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *target,
        *(str(argument) for argument in args),
    ]
    process = started(command, cwd=cwd, env=env)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output = stop(process)
        raise AssertionError(
            f"{script} on {nproc} ranks ran past {timeout} s; its output ends:\n{tail(output)}"
        ) from None
    except BaseException:  # an interrupted test must not leave workers behind
        stop(process)
        raise
    if check and process.returncode != 0:
        raise AssertionError(
            f"{script} on {nproc} ranks exited with {process.returncode}; its output ends:\n{tail(output)}"
        )
    return subprocess.CompletedProcess(command, process.returncode, stdout=output, stderr="")


def started(command: list[str], *, cwd=None, env=None, stdin=None) -> subprocess.Popen:
    """A process in `_environment`, with stdout and stderr together in a pipe."""
    return subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        cwd=cwd or REPOSITORY, env=_environment(env),
    )  # fmt: skip


def read_until(process: subprocess.Popen, line: str, timeout: float) -> str:
    """What a process says before a line. An error if it ends first, or past `timeout` seconds, which ends it."""
    output, deadline = b"", time.monotonic() + timeout
    end = f"{line}\n".encode()
    while not output.endswith(end):
        ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
        new = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        output += new
        if not new:
            output += stop(process).encode()
            why = "ended" if ready else f"ran past {timeout} s"
            raise AssertionError(f"{process.args} {why}; its output ends:\n{tail(output.decode(errors='replace'))}")
    return output.decode(errors="replace")


def _environment(extra) -> dict[str, str]:
    """This process's environment: one thread a rank, the repository importable, stacks on a crash, ``extra`` on top."""
    environment = dict(os.environ)
    path = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    environment["PYTHONFAULTHANDLER"] = "1"
    environment.update({name: str(value) for name, value in (extra or {}).items()})
    return environment


def stop(process) -> str:
    """End a launch and the workers it started (they live in sessions of their own); return its output."""
    workers = []
    if process.poll() is None:
        workers = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
    try:
        output, _ = process.communicate(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        for worker in workers:
            if worker.is_running():
                worker.kill()
        process.kill()
        output, _ = process.communicate()
    return output
