"""Weights that live quantized through Megatron's pretrain(): losses of bf16 parameters, resumes, files, refusals.

All runs are forks of one launch of two CPU ranks. Without clipping: the norm's sum depends on the buffers' layout.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from function_recipe import WIDE
from mcore_cases import (
    ITERATIONS,
    LAUNCHER,
    MOCK,
    MODEL,
    SCRIPT,
    STOCK,
    STOCK_FLAGS,
    TP2,
    Case,
    assert_ended,
    metrics,
    run_cases,
)

import megatron_hybrid as mh

pytestmark = pytest.mark.dist

MIDDLE = ITERATIONS // 2
NARROW = "fp8_delayed_e4m3:history=2"
# formats before and after a step: what a checkpoint before it goes on as, and a rule switches to, is the same
CHANGES = {"delayed": "fp8_delayed", "mixed": "mxfp8_fprop_nvfp4_bwd", "wide": WIDE, "narrow": NARROW}
PAIRS = [(a, b) for a in CHANGES for b in CHANGES if a != b]
# a history that made a scale has dropped out, or the scale is of other formats than before and after
STEPS = {"on": "2:", "between": "2:3", "after": "3:"}
LIVES = {"weights": "quantized", "param_gather": "both"}
RECIPES = {
    "plain": {},
    "lives": {**LIVES, "master_cast": "param_dtype"},
    "lives32": LIVES,
    "gathers": {"weights": "quantized", "param_gather": "high_precision"},
}
BESIDE_RECIPE = [*LAUNCHER, STOCK]  # a script in the folder of function_recipe.py
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"]
FRESH = ["--no-load-optim", "--no-load-rng", "--hq-switch-recipe"]
WITHOUT = [flag for flag in MODEL if flag != "--use-distributed-optimizer"]
RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
TORCH = ["--ckpt-format", "torch"]
LARGER = ["--init-method-std", "0.3"]
PP2 = ["--pipeline-model-parallel-size", "2"]
CLIPPED = ["--clip-grad", "0.3"]  # a quarter of the norm
# loss scaling whose first steps overflow and are skipped
FP16 = ["--fp16" if flag == "--bf16" else flag for flag in MODEL]
FP16 += ["--initial-loss-scale", str(2**23), "--loss-scale-window", "100", "--hysteresis", "1", "--train-iters", "7"]
FSDP = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]
FSDP2 = ["--use-torch-fsdp2", "--ckpt-format", "torch_dist"]
SHARDED = {"fsdp": (FSDP, MODEL), "fsdp2": (FSDP2, WITHOUT)}  # a load in place, before any forward
OTHERS = ["--load", "{folder}/lives32_torch_saved", "--hq-switch-recipe"]
UNRECORDED = [*TORCH, "--load", "{folder}/stock_saved"]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 2".split()


def run(name: str, recipe: str, *flags: str, model=MODEL, ranks: int | None = None, script=(SCRIPT,)) -> Case:
    metrics_file = f"{{folder}}/{name}.metrics"
    chosen = ["--hq-recipe", f"{{folder}}/{recipe}.json", "--hq-metrics-file", metrics_file, "--clip-grad", "0"]
    return Case(name, [*script, *model, *MOCK, *chosen, *RESHARDABLE, *flags], ranks)


def saved(name: str) -> list[str]:
    return ["--save", f"{{folder}}/{name}_saved", "--save-interval", str(MIDDLE)]


def loaded(name: str) -> list[str]:
    return ["--load", f"{{folder}}/{name}_saved", "--ckpt-step", str(MIDDLE)]


def in_torch_format(name: str, *flags: str, recipe: str | None = None) -> list[Case]:
    """The first half of a run, saved with `torch.save`, and the second, whose own initial weights are larger."""
    name, recipe = f"{name}_torch", recipe or name
    return [
        run(name, recipe, *flags, *TORCH, *saved(name), "--exit-interval", str(MIDDLE)),
        run(f"{name}_resumed", recipe, *flags, *TORCH, *LARGER, "--load", f"{{folder}}/{name}_saved"),
    ]


CASES = [
    run("plain", "plain", *saved("plain")),
    run("lives", "lives"),
    run("overlap", "lives", *OVERLAP),
    run("lives32", "lives32", *saved("lives32")),
    run("gathers", "gathers"),
    run("resumed", "lives32", *loaded("lives32")),
    run("resumed_overlap", "lives32", *OVERLAP, *loaded("lives32")),
    run("tuned_plain", "plain", *loaded("plain"), *FRESH),
    run("tuned", "lives", *loaded("plain"), *FRESH),
    run("back", "plain", *loaded("lives32"), *FRESH),
    run("delayed", "delayed", *TP2, *saved("delayed")),
    run("delayed_resumed", "delayed", *TP2, *loaded("delayed")),
    run("delayed_one", "delayed", *loaded("delayed"), "--make-vocab-size-divisible-by", "128", ranks=1),
    run("without", "lives", model=WITHOUT),
    run("one", "lives32", *loaded("lives32"), ranks=1),
    run("stages", "lives32", *PP2, *loaded("lives32")),
    run("delayed_stages", "delayed", *PP2, *loaded("delayed"), "--make-vocab-size-divisible-by", "128"),
    run("block_from_the_step", "late"),
    run("block_from_the_load", "block", "--hq-switch-recipe", *loaded("lives32")),
    *(run(f"clipped_{name}", name, *CLIPPED) for name in ("plain", "lives")),
    *(run(f"clipped_{name}_tp2", name, *TP2, *CLIPPED) for name in ("plain", "lives")),
    *(run(f"fp16_{name}", name, model=FP16) for name in ("plain", "lives", "bf16", "e4m3", "e4m3_lives")),
    run("fp16_overlap", "lives", *OVERLAP, model=FP16),
    *in_torch_format("lives32"),
    *in_torch_format("delayed", *TP2),
    run("delayed_gathers", "delayed_gathers", *TP2),
    run("tuned_delayed_plain", "delayed_plain", *loaded("plain"), *FRESH, *LARGER),
    run("tuned_delayed", "delayed_rounded", *loaded("plain"), *FRESH, *LARGER),
    *in_torch_format("delayed_gathers", *TP2),
    run("experts", "lives32", *EXPERTS),
    *(run(f"change_{name}", f"change_{name}", *saved(f"change_{name}")) for name in CHANGES),
    *(run(f"change_{a}_{b}", f"change_{a}_{b}") for a, b in PAIRS),
    *(run(f"changed_{a}_{b}", f"change_{b}", *loaded(f"change_{a}"), "--hq-switch-recipe") for a, b in PAIRS),
    *(case for name in STEPS for case in (
        run(f"steps_{name}", f"steps_{name}", *saved(f"steps_{name}")),
        run(f"steps_{name}_resumed", f"steps_{name}", *loaded(f"steps_{name}")),
    )),
    *(case for name, (flags, model) in SHARDED.items() for case in (
        run(f"steps_{name}", f"steps_{name}", *flags, *saved(f"steps_{name}"), model=model),
        run(f"steps_{name}_resumed", f"steps_{name}", *flags, *loaded(f"steps_{name}"), model=model),
    )),
    run("changed_fsdp", "change_narrow", *FSDP, *loaded("steps_fsdp"), "--hq-switch-recipe"),
    run("function", "bf16", *saved("function"), "--hq-recipe", "function_recipe:wide", script=BESIDE_RECIPE),
    run("function_narrow", "narrow", *loaded("function"), "--hq-switch-recipe", script=BESIDE_RECIPE),
    run("wide_narrow", "wide_narrow", script=BESIDE_RECIPE),
    *in_torch_format("experts", *EXPERTS, recipe="lives32"),
    run("others", "lives_but_one", *TORCH, *OTHERS),
    run("others_weights_alone", "lives_but_one", *TORCH, *OTHERS, *FRESH),
    Case("stock", [STOCK, *STOCK_FLAGS, *MODEL, *MOCK, *TORCH, *saved("stock"), "--exit-interval", str(MIDDLE)], patches=True),
    run("unrecorded", "lives32", *UNRECORDED),
    run("unrecorded_weights_alone", "lives32", *UNRECORDED, "--no-load-optim", "--no-load-rng"),
]
REFUSED = ("without", "others", "unrecorded")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")

    def write(name: str, formats, fields=(), rules=()) -> None:
        entries = [{"match": {"steps": steps}, "use": use} for steps, use in dict(rules).items()]
        recipe = {"version": 1, "name": name, "defaults": formats, "rules": entries, **dict(fields)}
        (folder / f"{name}.json").write_text(json.dumps(recipe))

    base = mh.Recipe.load("mxfp8_fprop_nvfp4_bwd").to_dict()
    for name, fields in RECIPES.items():
        (folder / f"{name}.json").write_text(json.dumps({**base, **fields}))
    for name, fields in (("", LIVES), ("_gathers", RECIPES["gathers"]), ("_plain", {}), ("_rounded", RECIPES["lives"])):
        delayed = {**mh.Recipe.load("fp8_delayed").to_dict(), **fields}
        (folder / f"delayed{name}.json").write_text(json.dumps(delayed))
    one = {"match": {"name": "*.1.mlp.linear_fc1"}, "use": "high_precision"}
    (folder / "lives_but_one.json").write_text(json.dumps({**base, **LIVES, "rules": [one, *base.get("rules", [])]}))
    (folder / "bf16.json").write_text(json.dumps(mh.Recipe.load("bf16").to_dict()))
    defaults = dict(CHANGES)
    for name in ("delayed", "mixed"):
        defaults[name] = mh.Recipe.load(CHANGES[name]).to_dict()["defaults"]
    for name in CHANGES:
        write(f"change_{name}", defaults[name], LIVES)
    for a, b in PAIRS:
        write(f"change_{a}_{b}", defaults[a], LIVES, {f"{MIDDLE + 1}:": defaults[b]})
    for name, steps in STEPS.items():
        write(f"steps_{name}", NARROW, LIVES, {steps: WIDE})
    for name, weights in (("fsdp", LIVES), ("fsdp2", {"param_gather": "both"})):
        write(f"steps_{name}", NARROW, weights, {STEPS["between"]: WIDE})
    write("narrow", NARROW)
    write("wide_narrow", WIDE, {}, {f"{MIDDLE + 1}:": NARROW})
    for name, first in (("late", MIDDLE + 1), ("block", 1)):
        rule = {"match": {"steps": f"{first}:"}, "use": mh.Recipe.load("fp8_block").to_dict()["defaults"]}
        (folder / f"{name}.json").write_text(json.dumps({**base, **LIVES, "rules": [*base.get("rules", []), rule]}))
    for name, more in (("e4m3", {}), ("e4m3_lives", LIVES)):  # gradients too, which E4M3 cuts at 448
        fields = {"version": 1, "name": name, "defaults": "fp8_delayed_e4m3", **more}
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder, run_cases(CASES, folder, timeout=600)


def numbers(runs, name: str) -> dict[int, dict]:
    found = metrics(runs[0] / f"{name}.metrics")
    return {i: {k: v for k, v in entry.items() if k not in ("ms", "grad_norm")} for i, entry in found.items()}


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name not in REFUSED])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])


def test_p56_losses_are_those_of_bf16_parameters_overlapped_or_not(runs):
    plain = numbers(runs, "plain")
    assert numbers(runs, "lives") == numbers(runs, "overlap") == plain
    assert plain[ITERATIONS]["loss"] < plain[1]["loss"]


def test_gathering_masters_or_payloads_is_the_same(runs):
    assert numbers(runs, "gathers") == numbers(runs, "lives32") != numbers(runs, "lives")


def of_both_halves(runs, name: str) -> dict[int, dict]:
    return {**numbers(runs, f"{name}_torch"), **numbers(runs, f"{name}_torch_resumed")}


@pytest.mark.parametrize(
    "name, whole",
    [
        ("resumed", "lives32"),
        ("resumed_overlap", "lives32"),
        ("delayed_resumed", "delayed"),
        ("one", "lives32"),
        ("stages", "lives32"),
    ],
)
def test_p38_a_resumed_run_repeats_the_uninterrupted_one(runs, name, whole):
    found, expected = numbers(runs, name), numbers(runs, whole)
    assert sorted(found) == list(range(MIDDLE + 1, ITERATIONS + 1))
    assert found == {i: expected[i] for i in found}


@pytest.mark.parametrize("whole", ["lives32", "delayed", "delayed_gathers", "experts"])
def test_files_of_torch_save_resume_bit_for_bit(runs, whole):
    """Whose masters come after the optimizer's state dict, from a file of their own."""
    found, expected = of_both_halves(runs, whole), numbers(runs, whole)
    assert sorted(found) == list(range(1, ITERATIONS + 1))
    assert {i: entry["loss"] for i, entry in found.items()} == {i: entry["loss"] for i, entry in expected.items()}


ALONE = """
import sys
sys.modules["megatron_hybrid"] = None  # importing it fails
import torch
from megatron.core.safe_globals import register_safe_globals
register_safe_globals()
found = torch.load(sys.argv[1], weights_only=True)["model"]
tensors = {name: value for name, value in found.items() if value is not None}
assert all(type(value) is torch.Tensor for value in tensors.values()), tensors
weights = [value for name, value in tensors.items() if "linear_fc1.weight" in name]
assert weights and all(w.dtype == torch.bfloat16 and 0 < w.float().std() < 1 for w in weights)
"""


@pytest.mark.parametrize(
    "name, part", [("lives32", "mp_rank_00"), ("delayed", "mp_rank_01"), ("experts", "mp_rank_00_001")]
)
def test_files_of_torch_save_hold_plain_tensors(runs, name, part):
    file = runs[0] / f"{name}_torch_saved" / f"iter_{MIDDLE:07d}" / part / "model_optim_rng.pt"
    done = subprocess.run([sys.executable, "-c", ALONE, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", ["delayed_one", "delayed_stages"])
def test_two_tensor_parallel_ranks_go_on_as_one(runs, name):
    """The second step after the load depends on the optimizer's state and on delayed scales too."""
    found, expected = numbers(runs, name), numbers(runs, "delayed")
    for i in (MIDDLE + 1, MIDDLE + 2):
        assert found[i]["loss"] == pytest.approx(expected[i]["loss"], rel=1e-4), i


def test_c67_a_switch_of_formats_at_resume_casts_the_masters_anew(runs):
    """Bit for bit the run whose rules switched at that step."""
    found, expected = numbers(runs, "block_from_the_load"), numbers(runs, "block_from_the_step")
    assert found == {i: expected[i] for i in range(MIDDLE + 1, ITERATIONS + 1)} != numbers(runs, "resumed")
    assert "it goes on with recipe" in runs[1]["block_from_the_load"].output[0]


@pytest.mark.parametrize("a, b", PAIRS)
def test_c67_weights_and_scales_follow_another_recipe_at_a_resume(runs, a, b):
    """Bit for bit the run whose rules switched at that step: delayed scales are made anew first."""
    found, expected = numbers(runs, f"changed_{a}_{b}"), numbers(runs, f"change_{a}_{b}")
    assert found == {i: expected[i] for i in range(MIDDLE + 1, ITERATIONS + 1)}


@pytest.mark.parametrize("name", [*STEPS, *SHARDED])
def test_p38_step_rules_over_delayed_scales_resume_bit_for_bit(runs, name):
    found, expected = numbers(runs, f"steps_{name}_resumed"), numbers(runs, f"steps_{name}")
    assert found == {i: expected[i] for i in range(MIDDLE + 1, ITERATIONS + 1)}


def test_a_switch_at_a_resume_of_megatron_fsdp(runs):
    """To the formats that the recipe before has from this step on."""
    found, expected = numbers(runs, "changed_fsdp"), numbers(runs, "steps_fsdp")
    assert found == {i: expected[i] for i in range(MIDDLE + 1, ITERATIONS + 1)}


def test_scales_that_a_function_left_are_made_anew(runs):
    """Nobody knows its formats: E5M2's scales would cut E4M3 at a 32th of its range."""
    found, expected = numbers(runs, "function_narrow"), numbers(runs, "wide_narrow")
    assert found == {i: expected[i] for i in range(MIDDLE + 1, ITERATIONS + 1)}


@pytest.mark.parametrize("layout", ["", "_tp2"])
def test_clipping_by_the_norm_of_all_gradients(runs, layout):
    """As of bf16 parameters, but for the order of the norm's sums: 10^5 squares in FP32."""
    lives, plain = (metrics(runs[0] / f"clipped_{name}{layout}.metrics") for name in ("lives", "plain"))
    for i in range(1, ITERATIONS + 1):
        assert plain[i]["grad_norm"] > 3 * float(CLIPPED[1])
        for key in ("grad_norm", "loss"):
            assert lives[i][key] == pytest.approx(plain[i][key], rel=1e-5), (i, key)


def finite_steps(runs, name: str) -> dict[int, dict]:
    """Steps that loss scaling did not skip: they have a norm."""
    found = metrics(runs[0] / f"{name}.metrics")
    return {i: entry for i, entry in found.items() if entry.get("grad_norm") is not None}


def test_loss_scaling(runs):
    """Steps that are skipped, then some that are not: losses of FP16 parameters, bit for bit, overlapped or not."""
    plain, steps = numbers(runs, "fp16_plain"), finite_steps(runs, "fp16_plain")
    assert numbers(runs, "fp16_lives") == numbers(runs, "fp16_overlap") == plain
    assert 1 not in steps and 2 not in steps and len(steps) >= 2
    assert plain[7]["loss"] < plain[1]["loss"] - 0.5


@pytest.mark.parametrize("name", ["e4m3", "e4m3_lives"])
def test_a_step_that_loss_scaling_skips_freezes_no_delayed_scale(runs, name):
    """An Inf in a history of 1024 steps would keep the first scale, 1, with which E4M3 cuts scaled gradients at 448."""
    found, expected = finite_steps(runs, f"fp16_{name}"), finite_steps(runs, "fp16_bf16")
    steps = sorted(found.keys() & expected.keys())
    assert len(steps) >= 2 and 1 not in found
    for i in steps:
        assert found[i]["grad_norm"] == pytest.approx(expected[i]["grad_norm"], rel=0.06), i


def test_p38_a_bf16_checkpoint_into_quantized_weights_and_back(runs):
    """Masters start from the loaded values, as bf16 parameters' do; the way back is the decode."""
    assert numbers(runs, "tuned") == numbers(runs, "tuned_plain")
    assert numbers(runs, "tuned_delayed") == numbers(runs, "tuned_delayed_plain")
    assert numbers(runs, "back")[MIDDLE + 1]["loss"] == pytest.approx(numbers(runs, "lives32")[MIDDLE + 1]["loss"], rel=0.05)


def test_files_hold_bf16_weights(runs):
    from torch.distributed.checkpoint import FileSystemReader

    folder = runs[0] / "lives32_saved" / f"iter_{MIDDLE:07d}"
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {k: v.properties.dtype for k, v in found.items() if k.endswith("linear_fc1.weight") and "optimizer" not in k}
    assert weights and set(weights.values()) == {torch.bfloat16}, list(found)
    assert not any(b"rebuild_hybrid" in file.read_bytes() for file in folder.glob("*.distcp"))


@pytest.mark.parametrize(
    "name, words",
    [
        ("others", "of a weight of 'decoder.layers.1.mlp.linear_fc1' that lives quantized, this run has one that lives in high"),
        ("unrecorded", "of `weights: high_precision` (it records no recipe), this run has `weights: quantized`"),
    ],
)
def test_an_optimizers_state_of_other_weights_is_refused_by_every_rank(runs, name, words):
    """Before training, in one line; the weights alone are welcome."""
    case = runs[1][name]
    assert case.exit == [2, 2]
    for output in case.output:
        assert "Traceback" not in output and "iteration" not in output
    assert f"the optimizer's state {words}" in case.output[0]
    assert sorted(numbers(runs, f"{name}_weights_alone")) == list(range(MIDDLE + 1, ITERATIONS + 1))


def test_without_masters_it_is_refused(runs):
    case = runs[1]["without"]
    assert case.exit == [2, 2] and "needs --use-distributed-optimizer" in case.output[0]
    assert "Traceback" not in case.output[0]
