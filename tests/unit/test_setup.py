"""The set-up scripts, without installing anything: which Python is taken, what is said when there is none."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIND = ROOT / "scripts" / "find_python.sh"


def stub(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + body + "\n")
    path.chmod(0o755)
    return path


def good(path: Path) -> Path:
    """A Python that passes every question, and calls itself by this path."""
    return stub(path, f'case "$2" in *executable*) echo {path};; *version_info\\[:3\\]*) echo "Python 3.12.9";; esac')


def old(path: Path) -> Path:
    return stub(path, 'case "$2" in *print*) echo "Python 3.9.2";; *) exit 1;; esac')


def find(tmp_path: Path, **env: str) -> subprocess.CompletedProcess:
    base = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path / "home")}
    # the machine's own python3 must not be the answer
    old(tmp_path / "bin" / "python3")
    for name in ("python", "python3.12", "python3.13", "python3.14"):
        if not (tmp_path / "bin" / name).exists():
            old(tmp_path / "bin" / name)
    return subprocess.run(["bash", str(FIND)], env=base | env, capture_output=True, text=True)


def test_a_python_on_path(tmp_path):
    wanted = good(tmp_path / "bin" / "python3.13")
    assert find(tmp_path).stdout.strip() == str(wanted)


def test_pyenv_versions_behind_a_shim_that_fails(tmp_path):
    wanted = good(tmp_path / "home" / ".pyenv" / "versions" / "3.12.10" / "bin" / "python")
    good(tmp_path / "home" / ".pyenv" / "versions" / "3.12.2" / "bin" / "python")
    old(tmp_path / "home" / ".pyenv" / "versions" / "3.9.2" / "bin" / "python")
    assert find(tmp_path).stdout.strip() == str(wanted)


def test_pyenv_root(tmp_path):
    wanted = good(tmp_path / "elsewhere" / "versions" / "3.13.1" / "bin" / "python")
    assert find(tmp_path, PYENV_ROOT=str(tmp_path / "elsewhere")).stdout.strip() == str(wanted)


def test_the_named_python_and_no_other(tmp_path):
    good(tmp_path / "bin" / "python3.12")
    wanted = good(tmp_path / "mine")
    assert find(tmp_path, PYTHON=str(wanted)).stdout.strip() == str(wanted)
    done = find(tmp_path, PYTHON=str(old(tmp_path / "ancient")))
    assert done.returncode == 1 and "Python 3.9.2; needed is Python >= 3.12" in done.stderr
    assert "cannot be used: does not run" in find(tmp_path, PYTHON="/no/such/python").stderr


def test_none_found_says_what_to_do(tmp_path):
    done = find(tmp_path)
    assert done.returncode == 1 and not done.stdout
    for part in ("python3 is Python 3.9.2", "pyenv install 3.12", "PYTHON=/path/to"):
        assert part in done.stderr


def test_a_python_without_venv_is_named(tmp_path):
    stub(tmp_path / "bin" / "python3.12", 'case "$2" in *venv*) exit 1;; *print*) echo "Python 3.12.9";; esac')
    done = find(tmp_path)
    assert done.returncode == 1 and "lacks the venv module" in done.stderr and "python3-venv" in done.stderr


@pytest.mark.parametrize(
    "command", [["make", "-s", "help"], ["bash", "scripts/setup_env.sh", "--help"], ["bash", str(FIND), "--help"]]
)
def test_help(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "PYTHON" in done.stdout


def test_lock_pins_everything_and_names_no_place():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'[\w.-]+==[\w.]+( ; sys_platform == "linux")?', line) for line in lines), lines
    names = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    declared = (ROOT / "pyproject.toml").read_text()
    for name in "torch megatron-core psutil pyyaml einops numpy tqdm matplotlib pytest ml-dtypes".split():
        assert name in names
        assert re.search(name.replace("-", "[-_]"), declared, re.IGNORECASE)


def test_what_is_tested_is_what_is_pinned():
    from importlib.metadata import version

    text = (ROOT / "requirements.lock").read_text()
    if os.environ.get("VIRTUAL_ENV") is None and sys.prefix == sys.base_prefix:
        pytest.skip("not in a virtual environment (VENV=none): its versions are its own")
    for name in ("torch", "megatron-core", "numpy", "pybind11"):
        assert f"{name}=={version(name).split('+')[0]}\n" in text


def test_ci_runs_the_readmes_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()


def test_the_files_that_begin_first_are_there():
    assert all((ROOT / name).is_file() for name in json.loads((ROOT / "tests" / "seconds.json").read_text()))
