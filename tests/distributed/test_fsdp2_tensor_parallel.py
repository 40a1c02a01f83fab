"""`--use-torch-fsdp2` over weights that tensor-parallel ranks split: gathers of payloads against high-precision ones, on four
CPU ranks, two by two, in one launch."""

from __future__ import annotations

import json

import pytest
from mcore_cases import MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, numbers, run_cases, same

import megatron_hybrid as mh
from megatron_hybrid.checkpoint_file import Checkpoint

pytestmark = pytest.mark.dist
WITHOUT = [flag for flag in MODEL if flag != "--use-distributed-optimizer"]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-grouped-gemm".split()
EXPERTS += "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 2".split()
# scales of rows, blocks, tiles and whole tensors, amaxes of which other ranks' shards have a part
FORMATS = {
    "mixed": {"fprop": "mxfp8_e4m3", "dgrad": "nvfp4:2d", "wgrad": "nvfp4"},
    "tensors": "fp8_current_e4m3",
    "rows": "fp8_rowwise_e4m3",
    "tiles": {"fprop": "fp8_block_e4m3:2d", "dgrad": "nvfp4", "wgrad": "mxfp8_e4m3"},
    "delayed": {"fprop": "fp8_delayed_e4m3:history=3", "dgrad": "fp8_delayed_e5m2:history=3", "wgrad": "mxfp8_e4m3"},
    "row_scaled": {"fprop": "nvfp4:row_scaled", "dgrad": "fp8_current_e4m3", "wgrad": "mxfp8_e4m3"},
}
SAVED = ("mixed", "delayed")
GATHERS = ("high_precision", "both")


def case(name: str, recipe: str, *flags: str, parallel=TP2) -> Case:
    argv = [SCRIPT, *WITHOUT, *MOCK, *parallel, "--use-torch-fsdp2", "--ckpt-format", "torch_dist", "--hq-recipe", recipe]
    return Case(name, [*argv, "--hq-metrics-file", f"{{folder}}/{name}.metrics", *flags], 4)


def gathered(formats: str, gather: str) -> Case:
    name = f"{formats}_{gather}"
    parallel = TP2[:2] if formats == "tensors" else TP2  # with sequence parallelism and without
    save = ["--save", f"{{folder}}/{name}", "--save-interval", "2"] if formats in SAVED else []
    return case(name, f"{{folder}}/{name}.json", *save, parallel=parallel)


CASES = [
    *(gathered(formats, gather) for formats in FORMATS for gather in GATHERS),
    *(case(f"{name}_resumed", f"{{folder}}/{name}_both.json", "--load", f"{{folder}}/{name}_both", "--ckpt-step", "2")
      for name in SAVED),
    *(case(f"experts_{gather}", f"{{folder}}/tensors_{gather}.json", *EXPERTS) for gather in GATHERS),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2_tp")
    for formats, defaults in FORMATS.items():
        for gather in GATHERS:
            recipe = dict(version=1, name=formats, defaults=defaults, param_gather=gather)
            mh.Recipe.from_dict(recipe)
            (folder / f"{formats}_{gather}.json").write_text(json.dumps(recipe))
    return folder, run_cases(CASES, folder, ranks=4)


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])


@pytest.mark.parametrize("formats", [*FORMATS, "experts"])
def test_trains_as_with_high_precision_gathers(runs, formats):
    """P47, bit for bit; every linear's weight is gathered as payloads."""
    same(numbers(runs, f"{formats}_both"), numbers(runs, f"{formats}_high_precision"))
    output = runs[1][f"{formats}_both"].output[0]
    table = output[output.index("bytes a rank sends") :].splitlines()[1:9]
    assert len(table) == 8 and all("decoder.layers." in line and "high precision" not in line for line in table), table


@pytest.mark.parametrize("name", SAVED)
def test_resumes_bit_for_bit(runs, name):
    resumed = numbers(runs, f"{name}_resumed")
    assert sorted(resumed) == [3, 4]
    same(resumed, numbers(runs, f"{name}_both"))


def test_delayed_scales_are_those_of_whole_weights(runs):
    """Histories of weights in the checkpoints of both gathers: the same amaxes."""
    found, expected = (Checkpoint(runs[0] / f"delayed_{gather}" / "iter_0000002") for gather in reversed(GATHERS))
    names = [name for name in found.tensors() if ".weight_" in name and name.endswith("_history")]
    assert len(names) == 16
    a, b = found.load(names), expected.load(names)
    assert all(a[name].any() and (a[name] == b[name]).all() for name in names)
