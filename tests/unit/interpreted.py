"""Checks of Triton kernels on the CPU, in Triton's interpreter: a script with ``check_*`` functions, one process for all.

The script ends with ``main(CHECKS)``; a test file has `errors_of` it in a fixture and asserts each check by its name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from triton_interpreter import let_loops_take_scalars  # noqa: E402


def names(script: Path) -> list[str]:
    """The checks that a script defines, without importing it."""
    return re.findall(r"^def check_(\w+)\(", script.read_text(), re.M)


def checks(namespace: dict) -> dict:
    """name -> function (device), of a script's globals."""
    return {name.removeprefix("check_"): f for name, f in namespace.items() if name.startswith("check_")}


def errors_of(script: Path, seconds: int) -> dict:
    """name -> traceback or None."""
    command, env = [sys.executable, "-W", "ignore", script], {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main(found: dict) -> None:
    """Run the checks on the CPU and print what `errors_of` reads."""
    errors = {}
    let_loops_take_scalars()
    for name, check in found.items():
        try:
            check("cpu")
            errors[name] = None
        except Exception:
            errors[name] = traceback.format_exc()
    json.dump(errors, sys.stdout)
