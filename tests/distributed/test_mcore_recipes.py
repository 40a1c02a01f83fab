"""Every shipped recipe through Megatron's pretrain(), and what steps, microbatches and ranks mean to them.

All runs are forks of one launch of two CPU ranks.
"""

from __future__ import annotations

import json

import pytest
from mcore_cases import ITERATIONS, MIXED, MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, numbers, run_cases, same

import megatron_hybrid as mh

pytestmark = pytest.mark.dist

LATE = "nvfp4_late_bf16_fprop"  # its switch is moved to the first iteration after the checkpoint
EXPERTS = "nvfp4_rowscaled_fprop_mxfp8_bwd"
RECIPES = [name for name, _ in mh.list_recipes() if name != EXPERTS]
MIDDLE = ITERATIONS // 2
# everything that depends on steps, microbatches and ranks in one recipe
BOTH = """version: 1
name: both
defaults:
  fprop: "fp8_delayed_e4m3:history=4"
  dgrad: {grad_output: "nvfp4:sr", weight: nvfp4}
  wgrad: {grad_output: "nvfp4:rht,sr", input: "nvfp4:rht"}
rules:
  - match: {layers: "first:1"}
    use: {fprop: mxfp8_e4m3}
  - match: {steps: "4:"}
    use: {dgrad: mxfp8_e4m3}
"""
# delayed scaling with other histories: shorter ones, longer ones, longer ones from the second step on
HISTORIES = {"short": [3], "long": [9], "longer": [3, 9]}
# most recipes for NVFP4 leave the first and the last layer alone
THREE = [*MODEL, "--num-layers", "3"]
# four layers, four microbatches a step
DEEP = [*MODEL, "--num-layers", "4", "--micro-batch-size", "2", "--hq-recipe", "{folder}/both.yaml"]
PIPELINE = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
FROM_ONE = ["--load", "{folder}/one", "--ckpt-step", "2", "--no-load-optim", "--no-load-rng"]


def run(name: str, *flags: str, model=THREE, ranks: int | None = None) -> Case:
    return Case(name, [SCRIPT, *model, *MOCK, "--hq-metrics-file", f"{{folder}}/{name}.metrics", *flags], ranks)


def whole_and_resumed(recipe: str) -> list[Case]:
    chosen = ["--hq-recipe", f"{{folder}}/{LATE}.yaml" if recipe == LATE else recipe, *TP2]
    checkpoints = f"{{folder}}/{recipe}"
    return [
        run(recipe, *chosen, "--save", checkpoints, "--save-interval", str(MIDDLE)),
        run(f"{recipe}_resumed", *chosen, "--load", checkpoints, "--ckpt-step", str(MIDDLE)),
    ]


def history(length: int) -> dict:
    fmt = f"fp8_delayed_e4m3:history={length}"
    return {"fprop": fmt, "dgrad": fmt, "wgrad": fmt}


def of_history(name: str, source: str | None = None) -> Case:
    """The recipe of `HISTORIES`, from the start or on from the checkpoint of another one, or of itself."""
    chosen = ["--hq-recipe", f"{{folder}}/{name}.json", *TP2]
    if source is None:
        return run(name, *chosen, "--save", f"{{folder}}/{name}", "--save-interval", str(MIDDLE))
    load = ["--load", f"{{folder}}/{source}", "--ckpt-step", str(MIDDLE), "--hq-switch-recipe"]
    return run(f"{source}_to_{name}", *chosen, *load)


CASES = [
    *map(of_history, HISTORIES),
    of_history("long", "short"), of_history("short", "long"), of_history("longer", "longer"),
    *(case for recipe in RECIPES for case in whole_and_resumed(recipe)),
    run("statistics", "--hq-recipe", MIXED, *TP2, "--load", f"{{folder}}/{MIXED}", "--ckpt-step", str(MIDDLE),
        "--hq-stats-interval", "2"),
    # on from what `nvfp4` left, with the rules that LATE has by then
    run("switched", "--hq-recipe", f"{{folder}}/{LATE}_now.yaml", "--hq-switch-recipe", *TP2, "--load", "{folder}/nvfp4",
        "--ckpt-step", str(MIDDLE)),
    run("experts", "--hq-recipe", EXPERTS, *TP2),
    run("tp1", "--hq-recipe", "fp8_delayed", "--load", "{folder}/fp8_delayed", "--ckpt-step", str(MIDDLE),
        "--no-load-optim", "--no-load-rng", "--make-vocab-size-divisible-by", "128", ranks=1),
    run("fresh", "--hq-recipe", "fp8_delayed", "--hq-switch-recipe", *TP2, "--load", "{folder}/mxfp8",
        "--ckpt-step", str(MIDDLE)),
    run("one", "--save", "{folder}/one", "--save-interval", "2", model=DEEP, ranks=1),
    run("one_again", *FROM_ONE, model=DEEP, ranks=1),
    run("data_parallel", *FROM_ONE, model=DEEP),
    run("pipeline", *FROM_ONE, *PIPELINE, "--save", "{folder}/pipeline", "--save-interval", "3", model=DEEP),
    run("pipeline_recomputed", *FROM_ONE, *PIPELINE, *RECOMPUTE, model=DEEP),
    run("pipeline_statistics", *FROM_ONE, *PIPELINE, "--hq-stats-interval", "1", "--hq-stats-file",
        "{folder}/pipeline.jsonl", "--tensorboard-dir", "{folder}/tb", model=DEEP),
    run("pipeline_resumed", *PIPELINE, "--load", "{folder}/pipeline", "--ckpt-step", "3", model=DEEP),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    late = mh.Recipe.load(LATE).to_dict()
    for rule in late["rules"]:
        if "steps" in rule["match"]:
            rule["match"]["steps"] = f"{MIDDLE + 1}:"
    (folder / f"{LATE}.yaml").write_text(json.dumps(late))
    now = json.dumps(late).replace(f'"{MIDDLE + 1}:"', '"1:"')
    (folder / f"{LATE}_now.yaml").write_text(now)
    (folder / "both.yaml").write_text(BOTH)
    for name, (first, *later) in HISTORIES.items():
        rules = [{"match": {"steps": "2:"}, "use": history(length)} for length in later]
        fields = {"version": 1, "name": name, "defaults": history(first), "rules": rules}
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder, run_cases(CASES, folder, timeout=900)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name != "experts"])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_and_resumes_bit_for_bit(runs, recipe):
    whole, resumed = numbers(runs, recipe), numbers(runs, f"{recipe}_resumed")
    assert sorted(whole) == list(range(1, ITERATIONS + 1)) and sorted(resumed) == list(whole)[MIDDLE:]
    for entry in whole.values():
        assert 0 < entry["loss"] < 6 and 0 < entry["grad_norm"] < 100
    assert whole[ITERATIONS]["loss"] < whole[1]["loss"] and 0 < whole[ITERATIONS]["valid_loss"] < 6
    same(resumed, whole)


def test_statistics_of_every_module_on_every_rank_change_no_bit(runs):
    same(numbers(runs, "statistics"), numbers(runs, MIXED))
    for rank in range(2):
        lines = (runs[0] / f"hq_stats.rank{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert {r["step"] for r in records} == {ITERATIONS}
        assert len({(r["module"], r["operand"], r["direction"]) for r in records}) == len(records) == 3 * 4 * 6
        assert {r["layer"] for r in records} == {1, 2, 3}
        assert all((25 if r["format"] == "mxfp8_e4m3" else 12) < r["snr_db"] < 50 for r in records)
    assert f"> statistics of 72 casts at step {ITERATIONS}:" in "".join(runs[1]["statistics"].output)


def test_every_stage_writes_to_tensorboard(runs):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    same(numbers(runs, "pipeline_statistics"), numbers(runs, "pipeline"))
    layers = []
    for folder in ("tb/hq_rank0", "tb"):
        tags = accumulator.EventAccumulator(str(runs[0] / folder)).Reload().Tags()
        shown = {tag.split("/")[1] for tag in tags["scalars"] if tag.startswith("hq-snr_db/")}
        assert shown and {tag.split("/")[1] for tag in tags["histograms"]} == shown
        layers.append({int(name.split(".")[2]) for name in shown})
    assert layers[0] and layers[1] and not layers[0] & layers[1]


def test_recipes_differ(runs):
    losses = {recipe: numbers(runs, recipe)[ITERATIONS]["loss"] for recipe in RECIPES}
    assert len(set(losses.values())) == len(losses), losses


def test_a_recipe_for_experts_says_that_there_are_none(runs):
    case = runs[1]["experts"]
    assert case.exit == [2, 2] and "grouped_linear" in case.output[0] and "Traceback" not in case.output[0]


def test_step_rules_take_effect_exactly_at_the_step(runs):
    late, always = numbers(runs, LATE), numbers(runs, "nvfp4")
    for iteration in range(1, MIDDLE + 1):
        assert late[iteration]["loss"] == always[iteration]["loss"]
        assert late[iteration]["grad_norm"] == always[iteration]["grad_norm"]
    assert late[MIDDLE + 1]["loss"] != always[MIDDLE + 1]["loss"]
    assert f"from iteration {MIDDLE + 1} on" in runs[1][LATE].output[0]


def test_c67_a_switch_at_resume_equals_the_run_whose_rules_switched_then(runs):
    """A checkpoint of the old recipe, gone on with under the new one, bit for bit."""
    found = numbers(runs, "switched")
    assert sorted(found) == list(range(MIDDLE + 1, ITERATIONS + 1))
    same(found, numbers(runs, LATE))
    assert "was trained with recipe nvfp4 (" in runs[1]["switched"].output[0]
    assert f"> step {MIDDLE + 1}: rules on steps change 4 of 12 linears; gemms:" in runs[1][LATE].output[0]


@pytest.mark.parametrize(
    "name, whole", [("short_to_long", "long"), ("long_to_short", "short"), ("longer_to_longer", "longer")]
)
def test_c67_histories_of_another_length_keep_what_a_checkpoint_has(runs, name, whole):
    """The run that had the length from the start, bit for bit; said in the log."""
    found = numbers(runs, name)
    assert sorted(found) == list(range(MIDDLE + 1, ITERATIONS + 1))
    same(found, numbers(runs, whole))
    output = runs[1][name].output[0]
    assert "has another length for 72 of this stage's histories of delayed scaling; the newest amaxes" in output
    assert "start fresh" not in output


def test_delayed_scaling_resharded_from_two_ranks_to_one(runs):
    whole, tp1 = numbers(runs, "fp8_delayed")[MIDDLE + 1], numbers(runs, "tp1")[MIDDLE + 1]
    assert tp1["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert tp1["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-2)
    assert "tensors of delayed scaling" not in runs[1]["tp1"].output[0]


def test_delayed_scaling_starts_fresh_where_the_checkpoint_has_none(runs):
    assert "tensors of delayed scaling; they start fresh" in runs[1]["fresh"].output[0]
    assert 0 < numbers(runs, "fresh")[ITERATIONS]["loss"] < 6


def test_random_bits_and_scales_do_not_depend_on_data_parallel_ranks_or_pipeline_stages(runs):
    expected = numbers(runs, "one_again")
    for name in ("data_parallel", "pipeline"):
        found = numbers(runs, name)
        for iteration in (3, 4):
            assert found[iteration]["loss"] == pytest.approx(expected[iteration]["loss"], rel=1e-6), (name, iteration)
            assert found[iteration]["grad_norm"] == pytest.approx(expected[iteration]["grad_norm"], rel=1e-5)


def test_recomputation_in_an_interleaved_pipeline_repeats_the_forward(runs):
    same(numbers(runs, "pipeline_recomputed"), numbers(runs, "pipeline"))


def test_interleaved_pipeline_resumes_bit_for_bit(runs):
    resumed = numbers(runs, "pipeline_resumed")
    assert sorted(resumed) == [4]
    same(resumed, numbers(runs, "pipeline"))
