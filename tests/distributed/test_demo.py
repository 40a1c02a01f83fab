"""The demo with the real trainer on two ranks: it passes as it is, and fails its own line without attention."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def demo(out: Path, data: Path, *flags: str) -> tuple[int, dict, str]:
    """Exit code, checks by name and figures, output."""
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--out", str(out), "--data", str(data), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    output = done.stdout + done.stderr
    path = out / "summary.json"
    assert path.is_file(), output
    return done.returncode, json.loads(path.read_text()), output


def test_the_demo_passes(tmp_path, data):
    code, summary, output = demo(tmp_path, data)
    assert code == 0 and summary["passed"], output
    assert [check["name"] for check in summary["checks"]] == [
        "mxfp8_fprop_nvfp4_bwd ran through", "learned from context", "resume is exact",
    ]
    log = (tmp_path / "mxfp8_fprop_nvfp4_bwd" / "log.txt").read_text()
    assert "linears quantized" in log and "0 of" not in log.split("linears quantized")[0].splitlines()[-1]
    assert (tmp_path / "loss.png").is_file()


def test_without_attention_the_bigram_line_is_not_passed(tmp_path, data):
    """In bf16, the better learner: what is missing is context, not precision."""
    flags = ("--recipe", "bf16", "--resume-iterations", "0", "--disable-attention")
    code, summary, output = demo(tmp_path, data, *flags)
    passed = {check["name"]: check["passed"] for check in summary["checks"]}
    assert code == 1, output
    assert passed == {"bf16 ran through": True, "learned from context": False}
    loss = summary["runs"][0]["valid_loss"]
    assert summary["bigram_entropy"] <= loss < summary["unigram_entropy"], "it learned which byte follows which"


def test_the_mixture_of_experts_demo_passes_in_two_thirds_of_its_length(tmp_path, data):
    """Two expert-parallel ranks, experts in row-scaled NVFP4: below the same line."""
    recipe = "nvfp4_rowscaled_fprop_mxfp8_bwd"
    model = str(ROOT / "configs" / "models" / "moe_demo.yaml")
    flags = ("--model", model, "--recipe", recipe, "--iterations", "110", "--resume-iterations", "0")
    code, summary, output = demo(tmp_path, data, *flags)
    assert code == 0 and summary["passed"], output
    log = (tmp_path / recipe / "log.txt").read_text()
    assert "16 of 17 linears quantized" in log  # of each layer: two of attention, two of all experts
