"""scripts/measure.py: parts run in turn, end with their processes, and are not run again once they ended well."""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import measure  # noqa: E402
from measure import FAILED, OK, SKIPPED, Folder, Part  # noqa: E402


def python(code: str, seconds: int = 1, gpus: int = 0, name: str = "part") -> Part:
    return Part(name, "", "{python} -c " + shlex.quote(code), seconds, gpus)


def outcomes(folder: Folder, *parts: Part, deadline=None, gpus=0):
    return list(measure.measure(parts, folder, gpus, jobs=1, deadline=deadline, commit="abc"))


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def soon(condition, seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path / "out")


def test_the_last_line_and_the_log(folder):
    (done,) = outcomes(folder, python("print('first'); print('42 us')"))
    assert (done.state, done.detail) == (OK, "42 us")
    assert (folder.path / "part.log").read_text() == "first\n42 us\n"


def test_a_part_that_fails_does_not_stop_the_next(folder):
    bad, good = outcomes(folder, python("raise SystemExit('no such card')", name="bad"), python("", name="good"))
    assert (bad.state, bad.detail) == (FAILED, "exit 1; no such card")
    assert good.state == OK


def test_only_what_did_not_end_well_runs_again(folder):
    parts = python("print('once')", name="good"), python("raise SystemExit(3)", name="bad")
    outcomes(folder, *parts)
    good, bad = outcomes(folder, *parts)
    assert good.state == OK and good.detail.startswith("already there")
    assert bad.detail.startswith("exit 3")
    folder.forget(parts[0])
    assert outcomes(folder, parts[0])[0].detail == "once"


def test_reasons_not_to_start(folder):
    found = outcomes(folder, python("", gpus=2), python("", seconds=90), deadline=60, gpus=1)
    assert [o.state for o in found] == [SKIPPED, SKIPPED]
    assert found[0].detail == "needs 2 GPUs, found 1"
    assert found[1].detail == "takes about 90 s, 60 s before the deadline"
    missing = Part("missing", "", "no-such-command-anywhere", 1, 0)
    assert outcomes(folder, missing)[0].detail == "no-such-command-anywhere is not installed"


def test_the_deadline_ends_a_part_and_its_children(folder, tmp_path):
    child = tmp_path / "child"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    began = time.monotonic()
    (cut,) = outcomes(folder, python(code), deadline=5)
    assert cut.state == FAILED and cut.detail == "cut at the deadline"
    assert time.monotonic() - began < 60
    assert soon(lambda: gone(int(child.read_text())))


def test_commands(folder):
    for part in measure.PARTS:
        words = measure.words(part, folder, 4, "abc def")
        assert not any("{" in word for word in words), part.name
        files = [ROOT / word for word in words if word.endswith(".py")]
        assert all(file.is_file() for file in files), part.name
        source = "".join(file.read_text() for file in files)
        for option in re.findall(r" (--[\w-]+)", part.command.split("{commit}")[0]) if files else ():
            known = source + "--nproc-per-node --tool --error-exitcode"
            assert option in known, (part.name, option)
        if "{commit}" in part.command:
            assert words[-2:] == ["--commit", "abc def"]


def test_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["measure.py", "--list", "--only", "host", "casts"])
    assert measure.main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["casts", "host"]
    monkeypatch.setattr(sys, "argv", ["measure.py", "--only", "moo"])
    with pytest.raises(SystemExit):
        measure.main()
    assert "invalid choice: 'moo' (choose from tests, memcheck" in capsys.readouterr().err.replace("'tests', 'memcheck", "tests, memcheck")
