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
        ("mxfp8_e4m3", "mxfp8_e4m3", "emulated"),
        ("nvfp4:2d", "nvfp4:row_scaled", "emulated"),
        ("mxfp8_e4m3", "fp8_current_e4m3", "emulated"),
        ("nvfp4", "high_precision", "emulated"),
    ],
)
def test_choice_on_hopper(a, b, backend):
    assert choose(GemmPair("fprop", parse_format(a), parse_format(b), SM90)).name == backend


def test_every_backend_gives_a_reason_or_none():
    for a in ("high_precision", "mxfp8_e4m3", "fp8_current_e4m3"):
        pair = GemmPair("fprop", parse_format(a), parse_format(a), DeviceKind("cpu"))
        assert sum(b.reason(pair) is None for b in BACKENDS) == 1
    assert "needs a CUDA device" in str(mh.backends())


def test_unknown_backend_is_named():
    pair = GemmPair("fprop", parse_format("nvfp4"), parse_format("nvfp4"), SM90)
    with pytest.raises(ValueError, match="unknown gemm backend 'magic'; there are"):
        choose(pair, "magic")
