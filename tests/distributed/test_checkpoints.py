"""Checkpoints between layouts and recipes, saves that are cut short, and what a rank's failure does to the others.

All runs are forks of one launch of two CPU ranks, but for two of four.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from launch import HERE, torchrun
from mcore_cases import ITERATIONS, MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, numbers, run_cases

pytestmark = pytest.mark.dist

FAULT = str(HERE / "run_mcore_fault.py")
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
# everything that has state or depends on the layout; no block ends at a bound of a shard
BOTH = """version: 1
name: both
defaults:
  fprop: "fp8_delayed_e4m3:history=4"
  dgrad: {grad_output: "nvfp4:sr", weight: nvfp4}
  wgrad: {grad_output: fp8_current_e5m2, input: fp8_current_e4m3}
rules:
  - match: {layers: "first:1"}
    use: {fprop: fp8_current_e4m3}
"""
WIDE = [*MODEL, "--ffn-hidden-size", "128"]
BIASED = [flag for flag in WIDE if flag != "--disable-bias-linear"]
CHOSEN = ["--hq-recipe", "{folder}/both.yaml"]
PP2 = ["--pipeline-model-parallel-size", "2"]
SECONDS = 60  # within which every rank must have ended


def run(name: str, *flags: str, ranks: int | None = None, fault: str | None = None, model=WIDE) -> Case:
    script = [SCRIPT] if fault is None else [FAULT, fault, SCRIPT]
    argv = [*script, *model, *MOCK, "--hq-metrics-file", f"{{folder}}/{name}.metrics", *flags]
    return Case(name, argv, ranks)


def saving(name: str, *flags: str, **more) -> Case:
    return run(name, *flags, "--save", f"{{folder}}/{name}", "--save-interval", "2", RESHARDABLE, **more)


def loading(name: str, source: str, *flags: str, step: str = "2", **more) -> Case:
    return run(name, *flags, "--load", f"{{folder}}/{source}", "--ckpt-step", step, RESHARDABLE, **more)


CUT_SHORT = {"dist": [], "async": ["--async-save"], "torch": ["--ckpt-format", "torch"]}  # while it saves, by format
FAULTY = {"dies": "die:1:3", "nan": "nan:1:3", "full": "full:1:3"}
FAULTY |= {f"cut_short_{kind}": f"{'kill_torch_save' if kind == 'torch' else 'kill_saving'}:0:4" for kind in CUT_SHORT}


def cut_short(kind: str) -> list[Case]:
    """A run that is killed during its second save, and one that goes on."""
    name, chosen = f"cut_short_{kind}", [*CHOSEN, *TP2, *CUT_SHORT[kind]]
    again = ["--load", f"{{folder}}/{name}", "--save", f"{{folder}}/{name}", "--save-interval", "2"]
    return [saving(name, *chosen, fault=FAULTY[name]), run(f"restarted_{kind}", *chosen, RESHARDABLE, *again)]


CASES = [
    saving("tp2", *CHOSEN, *TP2),
    run("overlapped", *CHOSEN, *TP2, "--overlap-grad-reduce", "--overlap-param-gather"),
    loading("tp2_to_tp1", "tp2", *CHOSEN, ranks=1),
    loading("tp2_to_pp2", "tp2", *CHOSEN, *PP2),
    saving("dp2", *CHOSEN),
    loading("dp2_to_dp1", "dp2", *CHOSEN, ranks=1),
    loading("dp2_to_pp2", "dp2", *CHOSEN, *PP2),
    loading("dp2_to_tp2", "dp2", *CHOSEN, *TP2),
    saving("biased", *CHOSEN, model=BIASED),
    loading("biased_to_tp2", "biased", *CHOSEN, *TP2, model=BIASED),
    saving("bf16", "--hq-recipe", "bf16", *TP2),
    run("bf16_to_quantized", "--hq-recipe", "mxfp8", "--hq-switch-recipe", *TP2, "--load", "{folder}/bf16", "--ckpt-step", "2",
        RESHARDABLE, "--save", "{folder}/back", "--save-interval", "3"),
    run("quantized_to_bf16", "--hq-recipe", "bf16", "--hq-switch-recipe", *TP2, "--load", "{folder}/back", "--ckpt-step", "3",
        RESHARDABLE),
    *(case for kind in CUT_SHORT for case in cut_short(kind)),
    loading("after_restart", "cut_short_dist", *CHOSEN, *TP2, "--train-iters", "5",
            "--override-opt-param-scheduler", step="4"),
    run("dies", *CHOSEN, *TP2, fault=FAULTY["dies"]),
    run("nan", *CHOSEN, *TP2, "--hq-check-nan", fault=FAULTY["nan"]),
    saving("full", *CHOSEN, *TP2, fault=FAULTY["full"]),
    loading("after_full", "full", *CHOSEN, *TP2),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "both.yaml").write_text(BOTH)
    return folder, run_cases(CASES, folder, timeout=900)


@pytest.fixture(scope="module")
def four(runs, tmp_path_factory):
    """Two runs of four ranks, from the checkpoint of two data-parallel ones."""
    folder = tmp_path_factory.mktemp("four")
    common = ["--hq-recipe", f"{runs[0]}/both.yaml", *TP2, "--load", f"{runs[0]}/dp2", "--ckpt-step", "2", RESHARDABLE]
    return folder, run_cases([run("dp2_to_tp2_dp2", *common), run("dp2_to_tp2_pp2", *common, *PP2)], folder, ranks=4)


def seconds(runs, name: str) -> float:
    """Until the last rank had ended."""
    lines = [json.loads(line) for path in runs[0].glob("results.*.jsonl") for line in path.read_text().splitlines()]
    return max(line["seconds"] for line in lines if line["name"] == name)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name not in FAULTY])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])


@pytest.mark.parametrize(
    "name, rel",
    [
        ("dp2_to_dp1", 1e-5),
        ("dp2_to_pp2", 1e-5),
        # operands are the same bytes, sums over tensor-parallel ranks are of bf16 parts
        ("dp2_to_tp2", 2e-4),
        ("tp2_to_tp1", 2e-4),
        ("tp2_to_pp2", 2e-4),
    ],
)
def test_c65_p61_another_layout_goes_on_as_this_one_would(runs, name, rel):
    """Optimizer state and delayed scales too: the second step after the load depends on both."""
    expected, found = numbers(runs, name.partition("_to_")[0]), numbers(runs, name)
    assert sorted(found) == [3, 4]
    for iteration, entry in found.items():
        assert entry["loss"] == pytest.approx(expected[iteration]["loss"], rel=rel), iteration
        assert entry["grad_norm"] == pytest.approx(expected[iteration]["grad_norm"], rel=20 * rel), iteration
    output = runs[1][name].output[0]
    assert "start fresh" not in output


def test_biases_under_tensor_and_sequence_parallelism(runs):
    """Of column and row parallel linears: ranks sum their gradients over parts of the sequence, most of the norm."""
    expected, found = numbers(runs, "biased"), numbers(runs, "biased_to_tp2")
    assert sorted(found) == [3, 4]
    assert found[3]["grad_norm"] == pytest.approx(expected[3]["grad_norm"], rel=2e-3)
    for iteration in found:
        assert found[iteration]["loss"] == pytest.approx(expected[iteration]["loss"], rel=2e-4), iteration


@pytest.mark.parametrize("name", ["dp2_to_tp2_dp2", "dp2_to_tp2_pp2"])
def test_c65_four_ranks_go_on_as_two_would(runs, four, name):
    assert four[1][name].exit == [0] * 4, four[1][name].output[0][-3000:]
    expected, found = numbers(runs, "dp2"), numbers(four, name)
    assert sorted(found) == [3, 4]
    for iteration, entry in found.items():
        assert entry["loss"] == pytest.approx(expected[iteration]["loss"], rel=2e-4), iteration
        assert entry["grad_norm"] == pytest.approx(expected[iteration]["grad_norm"], rel=4e-3), iteration


def test_weights_that_arrive_layer_by_layer_reduce_their_amaxes_one_by_one(runs):
    """With --overlap-param-gather; the same bits as all at once."""
    whole, overlapped = numbers(runs, "tp2"), numbers(runs, "overlapped")
    assert sorted(overlapped) == list(range(1, ITERATIONS + 1))
    assert all(overlapped[i][key] == whole[i][key] for i in overlapped for key in ("loss", "grad_norm"))


def test_c67_bf16_to_quantized_and_back(runs):
    """Said in the log; the next losses are those of a run that never switched, but for the formats."""
    whole = numbers(runs, "bf16")
    to, back = numbers(runs, "bf16_to_quantized"), numbers(runs, "quantized_to_bf16")
    assert sorted(to) == [3, 4] and sorted(back) == [4]
    assert to[3]["loss"] == pytest.approx(whole[3]["loss"], rel=0.02) and to[3]["loss"] != whole[3]["loss"]
    assert back[4]["loss"] == pytest.approx(whole[4]["loss"], rel=0.02)
    for name, theirs, ours in (("bf16_to_quantized", "bf16", "mxfp8"), ("quantized_to_bf16", "mxfp8", "bf16")):
        assert f"was trained with recipe {theirs} " in runs[1][name].output[0]
        assert f"it goes on with recipe {ours} " in runs[1][name].output[0]


@pytest.mark.parametrize("kind", CUT_SHORT)
def test_a_save_cut_short_leaves_the_last_checkpoint_and_the_restart_takes_it(runs, kind):
    folder, done = runs
    name = f"cut_short_{kind}"
    assert done[name].exit == [-9, -9]
    assert (folder / name / "iter_0000004").is_dir()  # what was written of it
    whole, restarted = numbers(runs, "tp2"), numbers(runs, f"restarted_{kind}")
    assert sorted(restarted) == [3, 4]
    for iteration, entry in restarted.items():  # the same run, and so the same bits
        assert all(entry[key] == whole[iteration][key] for key in ("loss", "grad_norm"))
    assert (folder / name / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    if kind == "dist":
        assert sorted(numbers(runs, "after_restart")) == [5]


def test_a_rank_that_dies_ends_the_others(runs):
    done = runs[1]["dies"]
    assert done.exit[1] == -9 and done.exit[0] not in (0, 124) and seconds(runs, "dies") < SECONDS
    assert "onnection" in done.output[0], done.output[0][-1500:]  # gloo names the peer that closed it


def test_torchrun_names_the_rank_that_died(tmp_path):
    """The launcher's own report: rank, signal, and no rank is left."""
    (tmp_path / "both.yaml").write_text(BOTH)
    case = run("dies", *CHOSEN, *TP2)
    argv = [word.format(folder=tmp_path) for word in case.argv[1:]]
    done = torchrun(2, FAULT, FAULTY["dies"], SCRIPT, *argv, check=False, timeout=2 * SECONDS)
    assert done.returncode != 0
    assert "rank      : 1" in done.stdout and "SIGKILL" in done.stdout, done.stdout[-2000:]


def test_a_crash_in_compiled_code_shows_where(tmp_path):
    """The Python stack of the rank that was aborted, without a setting of the user's, and torchrun's report."""
    (tmp_path / "both.yaml").write_text(BOTH)
    argv = [word.format(folder=tmp_path) for word in run("crashes", *CHOSEN, *TP2).argv[1:]]
    done = torchrun(2, FAULT, "crash:1:3", SCRIPT, *argv, check=False, timeout=2 * SECONDS, env={"PYTHONFAULTHANDLER": ""})
    assert done.returncode != 0
    assert "Fatal Python error: Aborted" in done.stdout and "in train_step" in done.stdout, done.stdout[-3000:]
    assert "rank      : 1" in done.stdout and "SIGABRT" in done.stdout, done.stdout[-2000:]


def test_nan_on_one_rank_is_named_and_ends_all(runs):
    done = runs[1]["nan"]
    assert all(code not in (0, 124) for code in done.exit) and seconds(runs, "nan") < SECONDS
    assert "rank 1, step 3, microbatch 0, module decoder.layers.0.mlp.linear_fc1: weight" in done.output[1]


def test_a_full_disk_on_one_rank_is_named_on_all_and_leaves_the_last_checkpoint(runs):
    folder, done = runs[0], runs[1]["full"]
    assert all(code not in (0, 124) for code in done.exit) and seconds(runs, "full") < SECONDS
    first, second = done.output
    (said,) = [line for line in first.splitlines() if line.startswith("error: ")]
    file = folder / "full" / "iter_0000004" / "__1_0.distcp"
    cause = f"cannot write {file}: [Errno 27] File too large (rank 1); what was written of it is removed"
    assert said == f"error: the checkpoint of iteration 4 cannot be written: {cause}"
    assert str(file) in second and "error: " in second  # Megatron's own log, where it happened
    assert "Traceback" not in first + second and not [x for x in second.splitlines() if x.startswith("error")]
    assert not file.parent.exists()
    assert (folder / "full" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


ALONE = """
import sys
sys.modules["megatron_hybrid"] = None  # importing it fails
import torch
import torch.distributed.checkpoint as dcp
found = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
state = {n: torch.full(m.size, 7, dtype=m.properties.dtype) for n, m in found.items() if hasattr(m, "size")}
assert len(state) > 20 and any(".hq." in n for n in state), list(state)
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
weight = next(t for n, t in state.items() if n.endswith("linear_fc1.weight"))
assert all(type(t) is torch.Tensor for t in state.values()) and 0 < weight.float().std() < 1
"""


def test_files_hold_plain_tensors_that_load_without_this_package(runs):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(runs[0] / "tp2" / "iter_0000002")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
