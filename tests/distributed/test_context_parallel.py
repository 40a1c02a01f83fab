"""Training with the sequence split over context-parallel ranks, against one rank on the same tokens; one launch of four."""

from __future__ import annotations

import json

import pytest
from mcore_cases import ITERATIONS, MIXED, MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, numbers, run_cases, same

import megatron_hybrid as mh
from megatron_hybrid.checkpoint_file import Checkpoint

pytestmark = pytest.mark.dist
CP2, CP4 = ["--context-parallel-size", "2"], ["--context-parallel-size", "4"]
GROUPS = ["--group-query-attention", "--num-query-groups", "2"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]

DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]


def case(name: str, ranks: int, *flags: str, model=MODEL) -> Case:
    return Case(name, [SCRIPT, *model, *MOCK, *GROUPS, "--hq-metrics-file", f"{{folder}}/{name}.metrics", *flags], ranks)


def fsdp2(name: str, ranks: int, *flags: str) -> Case:
    model = [flag for flag in MODEL if flag != "--use-distributed-optimizer"]
    return case(name, ranks, "--use-torch-fsdp2", "--ckpt-format", "torch_dist", *flags, model=model)


def recipe(name: str) -> list[str]:
    return ["--hq-recipe", name]


def saved(name: str, *, every: int) -> list[str]:
    return ["--save", f"{{folder}}/{name}", "--save-interval", str(every)]


PAYLOADS = "{folder}/payloads.json"  # MIXED, weights gathered as payloads
CASES = [
    case("bf16_one", 1, *recipe("bf16")),
    case("bf16_cp2", 2, *CP2, *recipe("bf16")),
    case("bf16_cp4", 4, *CP4, *recipe("bf16")),
    case("bf16_tp2_one", 2, *TP2, *recipe("bf16")),
    case("bf16_tp2_cp2", 4, *TP2, *CP2, *recipe("bf16")),
    case("mixed_one", 1, *recipe(MIXED)),
    case("mixed_cp2", 2, *CP2, *recipe(MIXED), "--save", "{folder}/ckpt", "--save-interval", "2"),
    case("mixed_resumed", 2, *CP2, *recipe(MIXED), "--load", "{folder}/ckpt", "--ckpt-step", "2"),
    case("mixed_recomputed", 2, *CP2, *recipe(MIXED), *RECOMPUTE),
    case("dropout_cp2", 2, *CP2, *recipe(MIXED), *DROPOUT, "--save", "{folder}/dropout_ckpt", "--save-interval", "2"),
    case("dropout_resumed", 2, *CP2, *recipe(MIXED), *DROPOUT, "--load", "{folder}/dropout_ckpt", "--ckpt-step", "2"),
    case("dropout_recomputed", 2, *CP2, *recipe(MIXED), *DROPOUT, *RECOMPUTE),
    case("dropout_tp2_cp2", 4, *TP2, *CP2, *recipe("bf16"), *DROPOUT),
    case("delayed_one", 1, *recipe("fp8_delayed"), *saved("delayed_one", every=1)),
    case("delayed_cp2", 2, *CP2, *recipe("fp8_delayed")),
    fsdp2("bf16_fsdp2_cp2", 2, *CP2, *recipe("bf16")),
    fsdp2("bf16_fsdp2_cp4", 4, *CP4, *recipe("bf16")),
    fsdp2("bf16_fsdp2_dp2_cp2", 4, *CP2, *recipe("bf16")),
    fsdp2("bf16_fsdp2_tp2_cp2", 4, *TP2, *CP2, *recipe("bf16")),
    fsdp2("mixed_fsdp2_cp2", 2, *CP2, *recipe(MIXED)),
    fsdp2("payloads_fsdp2_cp2", 2, *CP2, *recipe(PAYLOADS), *saved("payloads", every=2)),
    fsdp2("payloads_fsdp2_resumed", 2, *CP2, *recipe(PAYLOADS), "--load", "{folder}/payloads", "--ckpt-step", "2"),
    fsdp2("payloads_fsdp2_cp4", 4, *CP4, *recipe(PAYLOADS)),
    fsdp2("delayed_fsdp2_cp2", 2, *CP2, *recipe("fp8_delayed"), *saved("delayed_fsdp2_cp2", every=1)),
    fsdp2("delayed_fsdp2_cp4", 4, *CP4, *recipe("fp8_delayed"), *saved("delayed_fsdp2_cp4", every=1)),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cp")
    payloads = {**mh.Recipe.load(MIXED).to_dict(), "name": "payloads", "param_gather": "both"}
    (folder / "payloads.json").write_text(json.dumps(payloads))
    return folder, run_cases(CASES, folder, ranks=4)


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_runs_to_the_end(runs, name):
    assert_ended(runs[1][name])
    assert sorted(numbers(runs, name))[-1] == ITERATIONS


@pytest.mark.parametrize(
    "found, expected",
    [("bf16_cp2", "bf16_one"), ("bf16_cp4", "bf16_one"), ("bf16_tp2_cp2", "bf16_tp2_one"), ("mixed_cp2", "mixed_one"),
     ("delayed_cp2", "delayed_one"), ("bf16_fsdp2_cp2", "bf16_one"), ("bf16_fsdp2_cp4", "bf16_one"),
     ("bf16_fsdp2_dp2_cp2", "bf16_one"), ("bf16_fsdp2_tp2_cp2", "bf16_tp2_one"), ("mixed_fsdp2_cp2", "mixed_one"),
     ("payloads_fsdp2_cp4", "mixed_one"), ("delayed_fsdp2_cp2", "delayed_one"), ("delayed_fsdp2_cp4", "delayed_one")],
)  # fmt: skip
def test_losses_are_those_of_whole_sequences(runs, found, expected):
    """The same weights and tokens. bf16 rounds a token's activations to 2^-8; of hundreds of tokens' mean loss little of it
    is left, and a rank's columns are quantized in blocks of its own tokens."""
    a, b = numbers(runs, found)[1], numbers(runs, expected)[1]
    quantized = 1 if found.startswith("bf16") else 4
    assert a["loss"] == pytest.approx(b["loss"], rel=quantized * 2.0**-10)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=quantized * 2.0**-6)


@pytest.mark.parametrize("name", ["mixed", "dropout"])
def test_resumes_and_recomputes_bit_for_bit(runs, name):
    resumed = numbers(runs, f"{name}_resumed")
    assert sorted(resumed) == [3, 4]
    for found in (resumed, numbers(runs, f"{name}_recomputed")):
        same(found, numbers(runs, f"{name}_cp2"))


def test_fsdp2_gathers_payloads_and_resumes_bit_for_bit(runs):
    """Over the ranks that have other sequences or other parts of them."""
    payloads, resumed = numbers(runs, "payloads_fsdp2_cp2"), numbers(runs, "payloads_fsdp2_resumed")
    same(payloads, numbers(runs, "mixed_fsdp2_cp2"))
    assert sorted(resumed) == [3, 4]
    same(resumed, payloads)
    assert "bytes a rank sends" in runs[1]["payloads_fsdp2_cp2"].output[0]


@pytest.mark.parametrize("name", ["delayed_fsdp2_cp2", "delayed_fsdp2_cp4"])
def test_fsdp2_shares_delayed_scales_with_ranks_that_have_other_tokens(runs, name):
    """After a step each history has the amax of all tokens, which no rank has alone: one rank's, to the bit where a tensor
    is computed token by token, to bf16's rounding behind the attention, whose sums have other lengths."""
    found, expected = (_first_amaxes(runs[0] / folder) for folder in (name, "delayed_one"))
    assert found.keys() == expected.keys() and len(found) == 16  # both directions of eight inputs
    for key, amax in found.items():
        bound = 0 if "linear_qkv.hq.layer_1." in key else 2.0**-6
        assert abs(amax - expected[key]) <= bound * expected[key], key


def _first_amaxes(folder) -> dict[str, float]:
    """Amaxes of the first step's activations, by buffer."""
    checkpoint = Checkpoint(folder / "iter_0000001")
    names = [name for name in checkpoint.tensors() if name.endswith("_history") and ".input_" in name]
    return {name: history.max().item() for name, history in checkpoint.load(names).items()}


@pytest.mark.parametrize("name, plain", [("dropout_cp2", "mixed_cp2"), ("dropout_tp2_cp2", "bf16_tp2_cp2")])
def test_dropout_acts_and_trains(runs, name, plain):
    """A tenth of 64 activations, and of the attention's weights, left out moves a loss of about ln 128, but not far."""
    found, without = numbers(runs, name), numbers(runs, plain)
    assert 0 < abs(found[1]["loss"] - without[1]["loss"]) < 0.1 * without[1]["loss"]
    assert found[ITERATIONS]["loss"] < found[1]["loss"]
