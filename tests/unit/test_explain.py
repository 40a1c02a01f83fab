"""explain and backends: data that says what runs, and refusals that give every reason."""

import pytest
import torch

import megatron_hybrid as mh
from megatron_hybrid.formats import parse_format
from megatron_hybrid.gemm import BACKENDS, DeviceKind, GemmPair, choose

SM90 = DeviceKind("cuda", (9, 0))


def test_explain_has_a_row_for_every_module_and_gemm():
    model = torch.nn.Sequential(
        mh.HybridLinear(32, 32, recipe="mxfp8_fprop_nvfp4_bwd", name="a"), torch.nn.ReLU(), mh.HybridLinear(32, 16, name="b")
    )
    table = mh.explain(model)
    assert [(r["module"], r["gemm"]) for r in table.records()] == [
        (m, g) for m in "ab" for g in ("fprop", "dgrad", "wgrad")
    ]
    by = {(r["module"], r["gemm"]): r for r in table.records()}
    assert by["a", "fprop"]["operand A"] == "input.rowwise mxfp8_e4m3"
    assert by["a", "wgrad"]["operand B"] == "input.columnwise nvfp4"
    assert by["a", "dgrad"]["runs"] == "emulated" and by["b", "dgrad"]["runs"] == "high precision"
    assert "2 linears; gemms: 3 emulated, 3 high precision" in str(table)
    lines = str(table).splitlines()
    assert len({line.index("emulated") for line in lines[2:5]}) == 1  # aligned


@pytest.mark.parametrize(
    "a,b,backend",
    [
        ("high_precision", "high_precision", "high_precision"),
        ("fp8_current_e4m3", "fp8_current_e5m2", "scaled_mm"),
        ("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "scaled_mm"),
        ("fp8_current_e5m2", "fp8_current_e5m2", "emulated"),
        ("fp8_block_e4m3", "fp8_block_e4m3:2d", "scaled_mm"),
        ("fp8_block_e5m2", "fp8_block_e4m3", "scaled_mm"),
        ("fp8_block_e4m3:2d", "fp8_block_e4m3:2d", "emulated"),
        ("fp8_block_e4m3:2d", "fp8_block_e4m3", "emulated"),
        ("fp8_block_e4m3", "fp8_rowwise_e4m3", "emulated"),
        ("mxfp8_e4m3", "mxfp8_e4m3", "emulated"),
        ("nvfp4:2d", "nvfp4:row_scaled", "emulated"),
        ("mxfp8_e4m3", "fp8_current_e4m3", "emulated"),
        ("nvfp4", "high_precision", "emulated"),
    ],
)
def test_choice_on_hopper(a, b, backend):
    assert choose(GemmPair("fprop", parse_format(a), parse_format(b), SM90)).name == backend


def test_explain_is_a_function_whoever_imported_the_module_of_that_name():
    import megatron_hybrid.explain  # noqa: F401  makes the module an attribute of the package

    model = mh.HybridLinear(32, 32, name="a")
    assert mh.explain(model).rows == mh.explain(model).rows


def test_explain_shows_every_expert_and_what_is_kept():
    rules = [{"match": {"experts": "5:"}, "use": "nvfp4"}]
    recipe = mh.Recipe.from_dict({"version": 1, "name": "t", "defaults": "mxfp8_e4m3", "rules": rules})
    table = mh.explain(mh.HybridGroupedLinear(2, 32, 32, recipe=recipe, name="experts", first_expert=4)).records()
    assert [r["module"] for r in table] == 3 * ["experts, expert 4"] + 3 * ["experts, expert 5"]
    assert [r["operand B"].split()[1] for r in table] == 3 * ["mxfp8_e4m3"] + 3 * ["nvfp4"]
    assert [r["kept for backward"] for r in table[:3]] == ["-", "weight columnwise", "input columnwise"]


def test_backends_says_what_is_chosen_and_why_the_others_are_not():
    table = mh.backends().records()
    for operands in {r["operands"] for r in table}:
        rows = [r for r in table if r["operands"] == operands]
        assert [r["backend"] for r in rows] == [b.name for b in BACKENDS]
        assert [r["verdict"] for r in rows].count("chosen") == 1
        assert all((r["verdict"] == "-") == bool(r["reason"]) for r in rows)
    assert "needs a CUDA device" in str(mh.backends())
    hopper = {(r["operands"], r["backend"]): r for r in mh.backends(SM90).records()}
    assert hopper["fp8_block_e4m3 x fp8_block_e4m3:2d", "scaled_mm"]["verdict"] == "chosen"
    assert "takes FP8 operands" in hopper["fp8_block_e4m3:2d x fp8_block_e4m3:2d", "scaled_mm"]["reason"]


def test_a_backend_by_name_must_exist_and_be_able():
    pair = GemmPair("fprop", parse_format("nvfp4"), parse_format("nvfp4"), SM90)
    with pytest.raises(ValueError, match="unknown gemm backend 'emulate'; did you mean 'emulated'"):
        choose(pair, "emulate")
    with pytest.raises(ValueError, match="backend scaled_mm cannot run it: takes FP8 operands"):
        choose(pair, "scaled_mm")
    assert choose(pair, "reference").name == "reference"
