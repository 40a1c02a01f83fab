"""Experts whose weights live quantized through Megatron's pretrain(): losses, resumes, files, other layouts, refusals.

All runs are forks of one launch of two CPU ranks. Without clipping: the norm's sum depends on the buffers' layout.
"""

from __future__ import annotations

import json

import pytest
import torch
from mcore_cases import ITERATIONS, MOCK, SCRIPT, Case, assert_ended, numbers, run_cases, same
from test_mcore_moe import ALL_TO_ALL, EP2, FULLY, GROUPED, MOE

import megatron_hybrid as mh

pytestmark = pytest.mark.dist

MIDDLE = ITERATIONS // 2
LIVES = {"weights": "quantized", "param_gather": "both"}
BASE = "nvfp4_rowscaled_fprop_mxfp8_bwd"
ROUNDED = {**LIVES, "master_cast": "param_dtype"}
MIXED = {
    "version": 1, "defaults": "mxfp8_e4m3", **LIVES,
    "rules": [
        {"match": {"experts": "1:2"}, "use": "high_precision"},
        {"match": {"experts": "2:"}, "use": {"fprop": "fp8_rowwise_e4m3", "dgrad": "fp8_delayed_e4m3:history=3"}},
    ],
}  # fmt: skip
HADAMARD = {"version": 1, "defaults": {"fprop": "mxfp8_e4m3", "dgrad": "mxfp8_e4m3", "wgrad": "mxfp8_e4m3"}, **LIVES,
            "rules": [{"match": {"experts": "2:"}, "use": {"dgrad": "nvfp4:rht"}}]}  # fmt: skip
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"]
FRESH = ["--no-load-optim", "--no-load-rng", "--hq-switch-recipe"]


def run(name: str, recipe: str, *flags: str, experts=(*GROUPED, *ALL_TO_ALL), ep=EP2) -> Case:
    files = ["--hq-recipe", f"{{folder}}/{recipe}.json", "--hq-metrics-file", f"{{folder}}/{name}.metrics"]
    return Case(name, [SCRIPT, *MOE, *MOCK, *experts, *ep, *files, "--clip-grad", "0", FULLY, *flags])


def saved(name: str, every: int = MIDDLE) -> list[str]:
    return ["--save", f"{{folder}}/{name}_saved", "--save-interval", str(every)]


def loaded(name: str, step: int = MIDDLE) -> list[str]:
    return ["--load", f"{{folder}}/{name}_saved", "--ckpt-step", str(step)]


CASES = [
    run("plain", "plain", *saved("plain")),
    run("lives", "lives"),
    run("overlap", "lives", *OVERLAP),
    run("plain_ep1", "plain", ep=()),
    run("lives_ep1", "lives", ep=()),
    run("lives32", "lives32", *saved("lives32")),
    run("resumed", "lives32", *OVERLAP, *loaded("lives32")),
    run("sequential", "lives32", *loaded("lives32"), *saved("sequential", 1), experts=ALL_TO_ALL),
    run("grouped_again", "lives32", *loaded("sequential", MIDDLE + 1)),
    run("ep1", "lives32", *loaded("lives32"), *saved("ep1", 1), ep=()),
    run("ep2_again", "lives32", *loaded("ep1", MIDDLE + 1)),
    run("tuned_plain", "plain", *loaded("plain"), *FRESH),
    run("tuned", "lives", *loaded("plain"), *FRESH),
    run("back", "plain", *loaded("lives32"), *FRESH),
    run("delayed", "delayed", *saved("delayed")),
    run("delayed_resumed", "delayed", *loaded("delayed")),
    run("delayed_sequential", "delayed", *loaded("delayed"), experts=ALL_TO_ALL),
    run("mixed", "mixed", *saved("mixed")),
    run("mixed_resumed", "mixed", *loaded("mixed")),
    run("hadamard", "hadamard"),
    run("travelling", "travelling", *saved("travelling")),
    run("travelling_resumed", "travelling", *loaded("travelling")),
    run("travelling_statistics", "travelling", "--hq-stats-interval", "1", "--hq-stats-file", "{folder}/travelling.jsonl"),
]
REFUSED = {
    "hadamard": "decoder.layers.0.mlp.experts.linear_fc1 experts 2:4: its weight lives quantized as nvfp4:rht",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    base, delayed = (mh.Recipe.load(name).to_dict() for name in (BASE, "fp8_delayed"))
    recipes = {
        "plain": base, "lives": {**base, **ROUNDED}, "lives32": {**base, **LIVES}, "delayed": {**delayed, **LIVES},
        "mixed": MIXED, "hadamard": HADAMARD, "travelling": {**base, **ROUNDED, "dispatch": "quantized"},
    }  # fmt: skip
    for name, fields in recipes.items():
        (folder / f"{name}.json").write_text(json.dumps({**fields, "name": name}))
    return folder, run_cases(CASES, folder, timeout=900)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name not in REFUSED])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])


BITS = ("ms", "grad_norm")  # what may differ: the norm is a sum over buffers


@pytest.mark.parametrize(
    "name, original",
    [
        ("lives", "plain"), ("overlap", "plain"), ("lives_ep1", "plain_ep1"),  # P56
        # P38: resumed, and taken over by the other implementation
        ("resumed", "lives32"), ("delayed_resumed", "delayed"), ("mixed_resumed", "mixed"),
        ("sequential", "lives32"), ("grouped_again", "lives32"), ("delayed_sequential", "delayed"),
        # tokens travel quantized, also where recorded steps run experts one after another
        ("travelling", "plain"), ("travelling_resumed", "plain"), ("travelling_statistics", "plain"),
        ("tuned", "tuned_plain"),  # masters start from the loaded values, as bf16 parameters' do
    ],
)  # fmt: skip
def test_p38_p56_is_the_same_bit_for_bit(runs, name, original):
    found = numbers(runs, name)
    assert ITERATIONS in found
    same(found, numbers(runs, original), but=BITS)


@pytest.mark.parametrize("name", ["ep1", "ep2_again"])
def test_other_expert_parallel_sizes_go_on(runs, name):
    """EP 2 to 1, and back; sums over ranks come in another order."""
    found, expected = numbers(runs, name), numbers(runs, "lives32")
    assert ITERATIONS in found
    for iteration, entry in found.items():
        assert entry["loss"] == pytest.approx(expected[iteration]["loss"], rel=1e-6), iteration


def test_the_way_back_is_the_decode(runs):
    found, expected = numbers(runs, "back")[MIDDLE + 1], numbers(runs, "lives32")[MIDDLE + 1]
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.05)


@pytest.mark.parametrize("name", ["lives32", "delayed", "mixed"])
def test_learns(runs, name):
    found = numbers(runs, name)
    assert 0 < found[ITERATIONS]["loss"] < found[1]["loss"] < 6


def test_files_are_those_of_bf16_experts(runs):
    """The same keys, shapes and dtypes, and none of our classes in them."""
    from torch.distributed.checkpoint import FileSystemReader

    layouts = []
    for name in ("plain", "lives32", "sequential"):
        folder = next((runs[0] / f"{name}_saved").glob("iter_*"))
        found = FileSystemReader(folder).read_metadata().state_dict_metadata
        layouts.append({k: (tuple(v.size), v.properties.dtype) for k, v in found.items() if hasattr(v, "size")})
        assert not any(b"rebuild_hybrid" in file.read_bytes() for file in folder.glob("*.distcp"))
    assert layouts[0] == layouts[1] == layouts[2]
    experts = {k: v for k, v in layouts[1].items() if k.endswith("experts.experts.linear_fc1.weight")}
    weights = [dtype for key, (_, dtype) in experts.items() if not key.startswith("optimizer")]
    assert weights and set(weights) == {torch.bfloat16} and len(experts) > len(weights)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_at_start(runs, name):
    case = runs[1][name]
    assert case.exit == [2, 2] and REFUSED[name] in case.output[0] and "Traceback" not in case.output[0]
