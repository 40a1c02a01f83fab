"""Whole training runs through Megatron's pretrain(), all in one launch of two CPU ranks."""

from __future__ import annotations

import pytest
from mcore_cases import (
    ITERATIONS,
    LAUNCHER,
    MIXED,
    MOCK,
    MODEL,
    SCRIPT,
    STOCK,
    STOCK_FLAGS,
    TP2,
    Case,
    assert_ended,
    metrics,
    numbers,
    run_cases,
    same,
    write_dataset,
)

pytestmark = pytest.mark.dist

FIRST_HIGH = """version: 1
name: mine
defaults: mxfp8_e4m3
rules:
  - match: {layers: "first:1"}
    use: high_precision
"""

PAYLOADS = """version: 1
name: payloads
defaults: {fprop: mxfp8_e4m3, dgrad: nvfp4, wgrad: nvfp4}
param_gather: both
"""
FSDP2 = ["--use-torch-fsdp2", "--ckpt-format", "torch_dist"]
# both layers in one: the first is gathered where it is recomputed, before backward asks for it
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2"]
WITHOUT_DISTRIBUTED_OPTIMIZER = [flag for flag in MODEL if flag != "--use-distributed-optimizer"]


def ours(name: str, *flags: str, ranks: int | None = None, parallel=TP2, model=MODEL) -> Case:
    argv = [SCRIPT, *model, *MOCK, *parallel, "--hq-metrics-file", f"{{folder}}/{name}.metrics", *flags]
    return Case(name, argv, ranks)


def on_files(name: str, *flags: str) -> Case:
    files = ["--data-path", "{folder}/data", "--split", "90,10,0", "--data-cache-path", "{folder}/cache"]
    return Case(name, [SCRIPT, *MODEL, *TP2, *files, "--hq-metrics-file", f"{{folder}}/{name}.metrics", *flags])


def stock(name: str, *flags: str, launcher: bool = False, patches: bool = False) -> Case:
    first = [*LAUNCHER, STOCK] if launcher else [STOCK, *STOCK_FLAGS]
    return Case(name, [*first, *MODEL, *MOCK, "--tensor-model-parallel-size", "2", *flags], patches=patches)


FULLY = "--dist-ckpt-optim-fully-reshardable"
HYBRID = ["--hybrid-layer-pattern", "*-*-"]
CASES = [
    ours("whole", "--hq-recipe", MIXED, "--save", "{folder}/ckpt", "--load", "{folder}/ckpt", "--save-interval", "2"),
    ours("resumed", "--hq-recipe", MIXED, "--load", "{folder}/ckpt", "--ckpt-step", "2"),
    ours("offloaded", "--hq-recipe", MIXED, "--hq-offload-layers", "1", "--hq-offload-least-bytes", "1"),
    ours("tp1", "--hq-recipe", MIXED, "--load", "{folder}/ckpt", "--ckpt-step", "2", "--no-load-optim", "--no-load-rng",
         "--make-vocab-size-divisible-by", "128", parallel=[], ranks=1),
    ours("switched", "--hq-recipe", "{folder}/mine.yaml", "--hq-switch-recipe", "--load", "{folder}/ckpt",
         "--ckpt-step", "2"),
    ours("other", "--hq-recipe", "mxfp8", "--load", "{folder}/ckpt", "--ckpt-step", "2"),
    ours("default", "--hq-full-log"),
    on_files("files", "--hq-recipe", MIXED, "--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"),
    ours("no_attention", "--hq-demo-disable-attention"),
    ours("pipeline", "--hq-recipe", "{folder}/mine.yaml", parallel=["--pipeline-model-parallel-size", "2"]),
    ours("odd_sizes", "--hq-recipe", MIXED, "--hidden-size", "60", "--num-attention-heads", "6",
         "--ffn-hidden-size", "92", "--normalization", "LayerNorm"),
    stock("spec_name", "--sequence-parallel", "--spec", "megatron_hybrid.mcore.recipes", "mxfp8",
          "--save", "{folder}/spec_ckpt", "--save-interval", "2"),
    stock("spec_path", "--sequence-parallel", "--spec", "megatron_hybrid.mcore.recipes", "{folder}/mine.yaml"),
    stock("spec_other", "--sequence-parallel", "--spec", "megatron_hybrid.mcore.recipes", "nvfp4_fprop_mxfp8_bwd",
          "--load", "{folder}/spec_ckpt"),
    stock("launched", "--sequence-parallel", "--hq-recipe", "mxfp8", "--hq-metrics-file", "{folder}/launched.metrics",
          launcher=True),
    stock("function", "--sequence-parallel", "--hq-recipe", "function_recipe:hybrid", "--hq-metrics-file",
          "{folder}/function.metrics", launcher=True),
    ours("nan", "--hq-check-nan", "--lr", "1e38", "--hq-recipe", "fp8_current"),
    stock("plain", "--save", "{folder}/plain_ckpt", "--save-interval", "2", patches=True),
    ours("from_plain", "--hq-recipe", "bf16", "--load", "{folder}/plain_ckpt", "--ckpt-step", "2",
         parallel=TP2[:2]),
    ours("fsdp2", "--hq-recipe", "{folder}/high.yaml", parallel=FSDP2, model=WITHOUT_DISTRIBUTED_OPTIMIZER),
    ours("fsdp2_payloads", "--hq-recipe", "{folder}/payloads.yaml", "--save", "{folder}/fsdp2_ckpt", "--save-interval", "2",
         parallel=FSDP2, model=WITHOUT_DISTRIBUTED_OPTIMIZER),
    ours("fsdp2_resumed", "--hq-recipe", "{folder}/payloads.yaml", "--load", "{folder}/fsdp2_ckpt", "--ckpt-step", "2",
         parallel=FSDP2, model=WITHOUT_DISTRIBUTED_OPTIMIZER),
    ours("fsdp2_recomputed", "--hq-recipe", "{folder}/payloads.yaml", *RECOMPUTE, parallel=FSDP2,
         model=WITHOUT_DISTRIBUTED_OPTIMIZER),
    ours("gpt", "--hq-recipe", MIXED, "--save", "{folder}/gpt", "--save-interval", "2", FULLY),
    ours("hybrid", "--hq-recipe", MIXED, *HYBRID, "--load", "{folder}/gpt", "--ckpt-step", "2", FULLY,
         "--save", "{folder}/hybrid", "--save-interval", "3"),
    ours("hybrid_resumed", "--hq-recipe", MIXED, *HYBRID, "--load", "{folder}/hybrid", "--ckpt-step", "3", FULLY),
    ours("hybrid_pipeline", "--hq-recipe", "{folder}/mine.yaml", "--hybrid-layer-pattern", "*-|*-",
         parallel=["--pipeline-model-parallel-size", "2"]),
    ours("explain", "--hq-recipe", "{folder}/mine.yaml", "--hq-explain"),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    (folder / "mine.yaml").write_text(FIRST_HIGH)
    (folder / "payloads.yaml").write_text(PAYLOADS)
    (folder / "high.yaml").write_text(PAYLOADS.replace("both", "high_precision"))
    write_dataset(folder / "data", [500] * 20)
    return folder, run_cases(CASES, folder)


FAILING = {"other", "spec_other", "nan"}


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name not in FAILING])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])


def test_metrics_are_whole_and_finite(runs):
    found = numbers(runs, "whole")
    assert sorted(found) == list(range(1, ITERATIONS + 1))
    for entry in found.values():
        assert 0 < entry["loss"] < 6 and entry["grad_norm"] > 0 and entry["lr"] > 0 and entry["ms"] > 0
    assert found[ITERATIONS]["loss"] < found[1]["loss"]
    assert 0 < found[ITERATIONS]["valid_loss"] < 6 and found[ITERATIONS]["test_loss"] > 0


def test_resume_is_bit_exact(runs):
    whole, resumed = numbers(runs, "whole"), numbers(runs, "resumed")
    assert sorted(resumed) == [3, 4]
    same(resumed, whole)


def test_offloaded_activations_change_no_bit(runs):
    same(numbers(runs, "offloaded"), numbers(runs, "whole"))


def test_fsdp2_gathers_payloads_and_resumes(runs):
    """Under --use-torch-fsdp2: payload gathers train as high-precision ones do, and resume, bit for bit."""
    high, payloads, resumed = (numbers(runs, name) for name in ("fsdp2", "fsdp2_payloads", "fsdp2_resumed"))
    drop = lambda entry: {k: v for k, v in entry.items() if k != "ms"}  # noqa: E731
    assert {i: drop(e) for i, e in payloads.items()} == {i: drop(e) for i, e in high.items()}
    assert sorted(resumed) == [3, 4] and all(drop(e) == drop(payloads[i]) for i, e in resumed.items())
    same(numbers(runs, "fsdp2_recomputed"), payloads)
    assert "bytes a rank sends" in runs[1]["fsdp2_payloads"].output[0]
    assert "bytes a rank sends" not in runs[1]["fsdp2"].output[0]


def test_tensor_parallel_agrees_with_one_rank(runs):
    """From the same checkpoint: formats see other blocks only where a matrix is split, sums another order."""
    whole, tp1 = numbers(runs, "whole")[3], numbers(runs, "tp1")[3]
    assert tp1["loss"] == pytest.approx(whole["loss"], rel=5e-3)
    assert tp1["grad_norm"] == pytest.approx(whole["grad_norm"], rel=0.1)


def test_recipe_of_a_checkpoint(runs):
    """Another recipe is refused by name on every rank, unless asked for; a checkpoint without one loads with a note."""
    other = runs[1]["other"]
    assert other.exit == [2, 2] and "Traceback" not in "".join(other.output)
    assert f"trained with recipe {MIXED}" in other.output[0] and "this run has recipe mxfp8" in other.output[0]
    assert "--hq-switch-recipe" in other.output[0] and "error" not in other.output[1]
    assert f"note: the checkpoint in {runs[0]}/ckpt was trained with recipe {MIXED}" in runs[1]["switched"].output[0]
    assert "records no recipe; it goes on with recipe bf16" in runs[1]["from_plain"].output[0]
    assert sorted(numbers(runs, "from_plain")) == [3, 4]


def test_bf16_recipe_trains_as_megatron_does(runs):
    """The same weights give the same loss in Megatron's own layers (its log has 6 digits)."""
    line = next(l for l in runs[1]["plain"].output[1].splitlines() if " iteration        3/" in l)
    logged = {part.rpartition(": ")[0].strip(): part.rpartition(": ")[2] for part in line.split("|")}
    found = numbers(runs, "from_plain")[3]
    assert found["loss"] == pytest.approx(float(logged["lm loss"]), rel=2e-3)
    assert found["grad_norm"] == pytest.approx(float(logged["grad norm"]), rel=2e-2)


def test_a_hybrid_model_is_the_gpt_of_its_pattern(runs):
    """Megatron's HybridModel loads the GPT's checkpoint, optimizer and all, and goes on as the GPT does, bit for bit; so
    does it from its own."""
    expected = numbers(runs, "gpt")
    for name, iterations in (("hybrid", [3, 4]), ("hybrid_resumed", [4])):
        found = numbers(runs, name)
        assert sorted(found) == iterations
        same(found, expected)
    assert "> 8 of 9 linears quantized" in runs[1]["hybrid"].output[0]
    # of four layers the first is left alone: its attention, two linears of eight
    assert "> 6 of 9 linears quantized" in runs[1]["hybrid_pipeline"].output[0]
    assert 0 < numbers(runs, "hybrid_pipeline")[ITERATIONS]["loss"] < numbers(runs, "hybrid_pipeline")[1]["loss"]


def test_start_says_what_is_quantized(runs):
    out = runs[1]["whole"].output
    assert f"note: no checkpoint in {runs[0]}/ckpt: the run begins anew" in out[0]
    assert f"> recipe {MIXED} (" in out[0] and "> 8 of 9 linears quantized on cpu; fprop 8 emulated" in out[0]
    assert "> recipe" not in out[1]
    assert "> recipe bf16" in runs[1]["default"].output[0] and "> 0 of 9 linears" in runs[1]["default"].output[0]


def test_the_first_screen_shows_recipe_and_progress(runs):
    """Megatron's lists of arguments, parameters and dataset files need --hq-full-log; warnings do not."""
    short, full = (runs[1][name].output[0].splitlines() for name in ("files", "default"))
    begin = next(i for i, line in enumerate(short) if " iteration        1/" in line or "(after 1 iterations)" in line)
    assert begin < 60 and sum("WARNING:" in line for line in short[:begin]) >= 1
    assert any(line.split() == [*">   wgrad  grad_output.columnwise nvfp4  input.columnwise nvfp4  emulated  emulated  8".split()]
               for line in short)  # fmt: skip
    for text in ("end of arguments", "Params for bucket 1", "megatron.core.datasets"):
        assert not any(text in line for line in short) and any(text in line for line in full), text


def test_unmodified_scripts(runs):
    """Through --spec, by name and by path; through the launcher, with our flags and defaults."""
    assert "> 8 of 9 linears quantized" in runs[1]["launched"].output[0]
    assert sorted(metrics(runs[0] / "launched.metrics")) == list(range(1, ITERATIONS + 1))
    other = runs[1]["spec_other"]
    assert all(code != 0 for code in other.exit) and "trained with recipe mxfp8" in other.output[0]
    for name in ("spec_name", "spec_path"):
        assert "number of nan iterations:   0" in runs[1][name].output[1]


def test_a_function_as_recipe_trains_as_the_file_does(runs):
    launched, function = (numbers(runs, name) for name in ("launched", "function"))
    assert {i: e["loss"] for i, e in function.items()} == {i: e["loss"] for i, e in launched.items()}
    assert "> recipe hybrid (" in runs[1]["function"].output[0]


def test_the_first_nan_is_named(runs):
    """An absurd learning rate: the weights of iteration 2 are Inf or NaN, and the first linear that sees it says so."""
    nan = runs[1]["nan"]
    assert all(code != 0 for code in nan.exit)
    said = "".join(nan.output)
    assert "NanFound: rank " in said and "step 2, microbatch 0, module decoder.layers.0.self_attention.linear_qkv: " in said
    assert "linear_qkv: input (rowwise for fprop and columnwise for wgrad) has " in said


def test_dataset_files(runs):
    """One token over and over: learnt fast. Resetting masks makes attention see an explicit one."""
    found = numbers(runs, "files")
    assert found[ITERATIONS]["loss"] < 0.75 * found[1]["loss"] and found[ITERATIONS]["valid_loss"] < found[1]["loss"]


def test_attention_can_be_disabled_for_the_control(runs):
    assert numbers(runs, "no_attention")[1]["loss"] != numbers(runs, "default")[1]["loss"]


def test_explain_lists_every_module_and_stops(runs):
    first, second = runs[1]["explain"].output
    lines = first.splitlines()
    names = "self_attention.linear_qkv, self_attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2"
    for layer, fmt in enumerate(("high_precision", "mxfp8_e4m3")):
        at = lines.index(f"decoder.layers.{layer}")
        assert lines[at + 1].strip() == names
        rows = [row.split() for row in lines[at + 4 : at + 7]]
        assert [(row[0], row[2], row[4]) for row in rows] == [(gemm, fmt, fmt) for gemm in ("fprop", "dgrad", "wgrad")]
    assert max(map(len, lines)) <= 120
    assert any(line.startswith("recipe mine (") and line.endswith(") on cpu") for line in lines)
    assert "output_layer" in first and "9 linears" in first
    assert "iteration" not in first and "end of arguments" not in first and "decoder" not in second
