"""scripts/demo.py with a stand-in for the trainer: what it checks, what it says, how it fails."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "fixtures" / "fake_trainer.py"
sys.path.insert(0, str(ROOT / "scripts"))

from demo_lib import report  # noqa: E402
from demo_lib.launch import last_words  # noqa: E402
from demo_lib.settings import load_model, megatron_flags  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def demo(tmp_path, data, *flags: str, fault: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--trainer", str(FAKE), "--launcher", "none"]
    command += ["--out", str(tmp_path / "out"), "--data", str(data), "--max-mib", "2", "--iterations", "40"]
    command += ["--device", "cpu", *flags]
    env = os.environ | {"FAKE_TRAINER": fault}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def test_a_good_run(tmp_path, data):
    done = demo(tmp_path, data)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["passed"] and [check["name"] for check in summary["checks"]] == [
        "mxfp8_fprop_nvfp4_bwd ran through", "learned from context", "resume is exact",
    ]
    assert summary["runs"][0]["tokens_per_second"] == pytest.approx(128 * 16 / 0.010)
    assert (tmp_path / "out" / "loss.png").stat().st_size > 1000
    assert "iteration 40/40" in done.stdout and "PASS  resume is exact" in done.stdout
    log = (tmp_path / "out" / "mxfp8_fprop_nvfp4_bwd" / "log.txt").read_text()
    assert "--hq-recipe mxfp8_fprop_nvfp4_bwd" in log and "--save-interval 30" in log
    assert "--ckpt-step 30" in (tmp_path / "out" / "mxfp8_fprop_nvfp4_bwd_resumed" / "log.txt").read_text()


def test_compare_plots_and_judges_both(tmp_path, data):
    done = demo(tmp_path, data, "--compare", "--resume-iterations", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [run["recipe"] for run in summary["runs"]] == ["mxfp8_fprop_nvfp4_bwd", "bf16"]
    assert "PASS  close to bf16" in done.stdout


@pytest.mark.parametrize(
    "fault, flags, message",
    [
        ("slow_learner", (), "FAIL  learned from context"),
        ("", ("--disable-attention",), "FAIL  learned from context"),
        ("drift", (), "FAIL  resume is exact: iteration 31: grad norm"),
        ("nan", (), "not finite at iteration 4"),
        ("crash", (), "training ended with exit code 7"),
        ("silent_metrics", (), "wrote no"),
    ],
)
def test_failures_are_loud(tmp_path, data, fault, flags, message):
    done = demo(tmp_path, data, *flags, fault=fault)
    assert done.returncode == 1
    assert message in done.stdout + done.stderr
    assert "Traceback (most recent call last):\n  File" not in done.stderr
    if fault == "crash":
        assert "RuntimeError: the fake broke" in done.stderr and "torch.distributed.elastic" not in done.stderr


def test_the_error_that_came_first_is_shown_among_many(tmp_path):
    """Ranks that lose a peer report it after the rank that broke, and there may be many of them."""
    log = tmp_path / "log.txt"
    lost = [f"[rank{n}]: DistBackendError: connection closed by rank 0" for n in range(1, 31)]
    log.write_text("\n".join(["iteration 1", "[rank0]: ValueError: the cause", *lost, "ChildFailedError: x"]))
    shown = last_words(SimpleNamespace(log=log)).splitlines()
    assert shown[0].strip() == "[rank0]: ValueError: the cause" and len(shown) == 12
    assert shown[-1].strip() == lost[-1]


def test_flags_after_the_dashes_reach_the_trainer(tmp_path, data):
    demo(tmp_path, data, "--resume-iterations", "0", "--", "--hq-strict", "--lr", "1e-3")
    log = (tmp_path / "out" / "mxfp8_fprop_nvfp4_bwd" / "log.txt").read_text().splitlines()[0]
    assert log.endswith("--hq-strict --lr 1e-3")


@pytest.mark.parametrize(
    "flags", [("--iterations", "1"), ("--resume-iterations", "40"), ("--device", "tpu"), ("--nonsense",)]
)
def test_bad_options(tmp_path, data, flags):
    done = demo(tmp_path, data, *flags)
    assert done.returncode == 2 and "demo.py: error:" in done.stderr


def test_help():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "demo.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--compare" in done.stdout and "disable-attention" not in done.stdout


def test_the_model_file_is_flags():
    flags = megatron_flags(load_model())
    assert "--sequence-parallel" in flags and flags[flags.index("--num-layers") + 1] == "4"
    assert not any(flag in ("True", "False") for flag in flags)


def test_the_two_percent_line():
    assert report.check_close(2.039, 2.0).passed and report.check_close(1.961, 2.0).passed
    assert not report.check_close(2.041, 2.0).passed
    assert not report.check_close(float("nan"), 2.0).passed
    assert not report.check_learned(float("nan"), 2.0).passed


def test_a_loss_that_is_not_low_enough_comes_with_the_hint():
    assert report.check_learned(2.5, 2.0, "; few").detail == "validation loss 2.5000 >= bigram entropy 2.0000; few"
    assert report.check_learned(1.5, 2.0, "; few").detail == "validation loss 1.5000 < bigram entropy 2.0000"


def test_a_stopped_demo_leaves_no_trainer(tmp_path, data):
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--trainer", str(FAKE), "--launcher", "none"]
    command += ["--out", str(tmp_path / "out"), "--data", str(data), "--max-mib", "2", "--device", "cpu"]
    env = os.environ | {"FAKE_TRAINER": "sleep"}
    # as in the background of a script, where the shell has SIGINT ignored
    background = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    demo_process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, preexec_fn=background
    )
    log = tmp_path / "out" / "mxfp8_fprop_nvfp4_bwd" / "log.txt"
    deadline = time.monotonic() + 120
    while not (log.is_file() and "process " in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    trainer = int(log.read_text().split("process ")[1].split()[0])
    demo_process.terminate()
    assert demo_process.wait(timeout=60) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(trainer, 0)
