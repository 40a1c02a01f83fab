"""scripts/convergence.py: runs that are skipped, cut off or of another setting, and the table's arithmetic."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import pytest
import yaml
from launch import REPOSITORY, script_module

from megatron_hybrid import Recipe

pytestmark = pytest.mark.dist
SCRIPT = REPOSITORY / "scripts" / "convergence.py"
LATE = REPOSITORY / "configs" / "convergence" / "nvfp4_late_at_1300.yaml"
LOADING = "[megatron_hybrid] loading torch ...\n"  # all that is on stderr where nothing is wrong
TINY = {
    "num-layers": 1, "hidden-size": 64, "ffn-hidden-size": 128, "num-attention-heads": 2, "seq-length": 64,
    "max-position-embeddings": 64, "position-embedding-type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "disable-bias-linear": True, "untie-embeddings-and-output-weights": True, "make-vocab-size-divisible-by": 128,
    "attention-dropout": 0.0, "hidden-dropout": 0.0, "bf16": True, "micro-batch-size": 4, "global-batch-size": 4,
    "lr": 1e-3, "clip-grad": 1.0, "eval-interval": 4, "eval-iters": 2, "log-interval": 1, "num-workers": 0,
    "lr-warmup-iters": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def script():
    with script_module("convergence") as module:
        yield module


def record(recipe, seed, loss, key="k"):
    return dict(recipe=recipe, seed=seed, valid_loss=loss, key=key, card="X")


def test_gaps_and_intervals(script):
    """Student's interval of a difference of means, written out; none from one seed of the base."""
    losses = [1.0, 1.02, 1.01]
    rows = script.rows([record("bf16", i, x) for i, x in enumerate(losses)] + [record("mxfp8", 1, 1.05), record("mxfp8", 2, 1.03)])
    assert [row["recipe"] for row in rows] == ["bf16", "mxfp8"] and rows[0]["gap"] is None
    assert rows[1]["gap"] == pytest.approx(0.03)
    assert rows[1]["half_width"] == pytest.approx(4.303 * statistics.stdev(losses) * (1 / 3 + 1 / 2) ** 0.5)
    assert script.rows([record("bf16", 1, 1.0), record("mxfp8", 1, 1.1)])[1]["half_width"] is None
    assert script.cells(rows[1])[3:] == ("+0.0300 +- 0.0393", "X", "")
    (row,) = script.rows([record("bf16", 1, 1.0)], {"bf16": {"tokens_per_second": 123456.7, "card": "Y"}})
    assert script.cells(row)[5] == "123,457 (Y)"


def test_the_late_switch_is_the_shipped_recipe_s_at_a_step_of_these_runs():
    ours, shipped = (Recipe.load(r).to_dict() for r in (LATE, "nvfp4_late_bf16_fprop"))
    changed = {"name", "description"}
    assert ours["rules"][1].pop("match") == {"steps": "1300:"} and shipped["rules"][1].pop("match") == {"steps": "9000:"}
    assert {k: v for k, v in ours.items() if k not in changed} == {k: v for k, v in shipped.items() if k not in changed}


def test_results_of_another_setting_are_left_out(script, tmp_path):
    for i, (name, key) in enumerate((("bf16_1", "old"), ("mxfp8_1", "new"), ("bf16_2", "new"))):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(record(*name.split("_"), 1.0, key)))
        os.utime(path, (i, i))
    assert {r["recipe"] + r["seed"] for r in script.results(tmp_path)} == {"mxfp81", "bf162"}
    assert [r["key"] for r in script.results(tmp_path, "old")] == ["old"]


def test_runs_are_trained_once_and_cut_off_at_the_deadline(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i, path in enumerate(sorted((REPOSITORY / "megatron_hybrid").rglob("*.py"))):
        (text / f"{i}.py").write_text(path.read_text())
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(TINY))
    folders = ["--data", tmp_path / "data", "--results", tmp_path / "results", "--logs", tmp_path / "logs"]
    common = [sys.executable, SCRIPT, "--device", "cpu", "--model", tmp_path / "model.yaml", "--input", text, *folders]

    def run(*words):
        return subprocess.run([*map(str, [*common, *words])], capture_output=True, text=True, timeout=300)

    first = run("--iterations", 8, "--runs", "bf16:1", "mxfp8:1")
    assert first.returncode == 0, first.stdout + first.stderr
    saved = json.loads((tmp_path / "results" / "mxfp8_1.json").read_text())
    assert len(saved["train"]) == 8 and saved["valid"][-1][0] == 8 and saved["formats"]["name"] == "mxfp8"
    again = run("--iterations", 8, "--runs", "bf16:1", "mxfp8:1", "bf16:2", "--deadline", 0)
    assert again.returncode == 1 and "1 runs to do, the others" in again.stdout
    assert "bf16_2: not started, " in again.stderr and not (tmp_path / "results" / "bf16_2.json").exists()
    cut = run("--iterations", 9, "--runs", "bf16:1", "--deadline", 3)  # another setting, and not enough time
    assert cut.returncode == 1 and "exit code 124" in cut.stderr, cut.stderr
    assert json.loads((tmp_path / "results" / "bf16_1.json").read_text())["setting"]["iterations"] == 8
    (tmp_path / "late.yaml").write_text(LATE.read_text().replace("1300", "190"))
    late = run("--iterations", 8, "--runs", "nvfp4_late_bf16_fprop:1")
    assert late.returncode == 1 and "rules[1] never takes effect: its steps are 9000:" in late.stderr
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({**TINY, "lr-warmup-iters": 100}))
    fast = run("--iterations", 200, "--runs", "mxfp8:1", "mxfp8:2", tmp_path / "late.yaml:1", "--speed")
    assert fast.stderr == LOADING and "1 runs to do" in fast.stdout, fast.stdout + fast.stderr  # no losses of this setting: no table
    assert json.loads((tmp_path / "results" / "speed" / "mxfp8.json").read_text())["tokens_per_second"] > 0
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(TINY))
    assert run("--iterations", 8, "--runs", "mxfp8:1", "--speed").returncode == 0
    table = run("--table")
    assert table.returncode == 0 and " (CPU)" in table.stdout and "mxfp8" in table.stdout
    assert (tmp_path / "results" / "losses.png").stat().st_size > 5000
