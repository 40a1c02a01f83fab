"""scripts/bench_moe.py runs on one and on two CPU ranks and writes what it measured; times there mean nothing, bytes do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from launch import REPOSITORY, torchrun

pytestmark = pytest.mark.dist
SCRIPT = REPOSITORY / "scripts" / "bench_moe.py"
STAND_IN = REPOSITORY / "tests" / "fixtures" / "transformer_engine_stand_in"
HIDDEN, TOKENS, TOPK = 128, 64, 2
MODEL = f"""
hidden-size: {HIDDEN}
ffn-hidden-size: 128
num-attention-heads: 2
num-experts: 4
moe-router-topk: {TOPK}
moe-ffn-hidden-size: 128
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(MODEL)
    return path


def alone(model, *more, path="") -> subprocess.CompletedProcess:
    """path: goes before PYTHONPATH."""
    command = [sys.executable, SCRIPT, "--model", model, "--tokens", TOKENS, "--repeat", 1, *more]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))}
    how = dict(capture_output=True, text=True, timeout=300, cwd=REPOSITORY, env=env)
    return subprocess.run([str(word) for word in command], **how)


def test_one_rank(model, tmp_path):
    done = alone(model, "--recipe", "bf16", "fp8_block", "--json", tmp_path / "moe.json")
    assert done.returncode == 0, done.stderr[-3000:]
    bf16, block = json.loads((tmp_path / "moe.json").read_text())["results"]
    assert (bf16["what"], block["what"], block["experts"]) == ("bf16", "fp8_block", 4)
    assert bf16["off"] == 0 and 0 < block["off"] < 0.2 and "all_to_all" not in block and "all-to-all" not in done.stdout


@pytest.mark.parametrize("inside", [False, True])
def test_transformer_engines_experts_beside_ours(model, tmp_path, inside):
    """With a stand-in: Megatron's layer, its permutation, over their grouped linears in their contexts, on our weights."""
    recipes, out = ["bf16", "fp8_block", "fp8_rowwise", "fp8_delayed", "fp8_current"], tmp_path / "moe.json"
    more = ["--cast-weights"] if inside else []
    done = alone(model, "--recipe", *recipes, "--peers", "te", "--json", out, *more, path=STAND_IN)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["what"]: row for row in json.loads(out.read_text())["results"]}
    both = ["bf16", "fp8_block", "fp8_delayed", "fp8_current"]  # there is no peer with scales of rows
    assert list(rows) == [*recipes, *(f"TE {recipe}" for recipe in both)] and "x peer" in done.stdout
    assert rows["TE bf16"]["off"] < 0.01 and all(0 < rows[f"TE {recipe}"]["off"] < 0.2 for recipe in both[1:])
    for recipe in both:
        peer, ours = rows[f"TE {recipe}"], rows[recipe]
        assert peer["how"] == "Transformer Engine 2.8.0" and peer["goal"] is None
        assert ours["over_peer"] == peer["us"] / ours["us"] and "over_peer" not in peer
    assert "over_peer" not in rows["fp8_rowwise"]
    asked = json.loads(done.stderr.rpartition("stand-in: ")[2])
    steps = len(asked["contexts"]) // 3
    assert steps > 3 and asked["contexts"][:3] == [["block", "e4m3"], ["delayed", "hybrid"], ["current", "hybrid"]]
    assert asked["permuted"] == 4 * steps and asked["casts"] == (6 * steps if inside else 6)  # two linears a layer


def test_a_peer_that_is_not_there(model, tmp_path):
    (tmp_path / "transformer_engine.py").write_text("raise ModuleNotFoundError('not installed')\n")
    done = alone(model, "--recipe", "bf16", "--peers", "te", "--json", tmp_path / "moe.json", path=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Transformer Engine: not importable: not installed\n" in done.stdout and "x peer" not in done.stdout
    assert [row["what"] for row in json.loads((tmp_path / "moe.json").read_text())["results"]] == ["bf16"]


def test_experts_over_two_ranks(model, tmp_path):
    """fp8_rowwise: a row of codes and one FP32 scale in place of a row of bf16, where tokens go to their experts. Gradients and
    what experts give back stay bf16. Probabilities travel in bf16, and their gradients back."""
    out = tmp_path / "moe.json"
    which = ["--recipe", "bf16", "fp8_rowwise", "--dispatch", "high_precision", "quantized", "--expert-parallel", 2]
    done = torchrun(2, SCRIPT, "--model", model, "--tokens", TOKENS, "--repeat", 1, *which, "--json", out)
    assert done.stdout.count("2 ranks (gloo), of 4 experts 2 on each: 0 to 1, 2 to 3") == 1, done.stdout
    found = json.loads(out.read_text())
    bf16, plain, quantized = found["results"]
    assert [row["what"] for row in found["results"]] == ["bf16", "fp8_rowwise", "fp8_rowwise, tokens quantized"]
    assert found["ranks"] == 2 and [row["dispatch"] for row in found["results"]] == ["high_precision"] * 2 + ["quantized"]
    for row in found["results"]:
        assert row["experts"] == 2 and len(row["off_by_rank"]) == 2 and row["off"] == max(row["off_by_rank"]) < 0.2
        assert row["all_to_all"]["calls"] == 6 and 0 < row["all_to_all"]["us"]  # tokens, probabilities, results; and back
    sent = [row["all_to_all"]["bytes"] for row in (bf16, plain, quantized)]
    rows, rest = divmod(sent[0], 2 * 2 * HIDDEN + 2)  # of both ranks that go to the other: out and back, or in and back
    assert sent[1] == sent[0] and rest == 0 and 0 < rows < 2 * TOKENS * TOPK
    saved, rest = divmod(sent[0] - sent[2], 2 * HIDDEN - (HIDDEN + 4))  # rows of the rank that sends fewer
    assert rest == 0 and 0 < saved <= rows / 2


def test_as_many_ranks_as_are_said(model):
    done = alone(model, "--expert-parallel", 2)
    assert done.returncode == 1 and "--expert-parallel 2: start as many ranks" in done.stderr and "found 1" in done.stderr
