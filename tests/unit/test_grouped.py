"""Grouped linears: mixes among experts, padding, what is cast and planned (properties 40, 41, 43; case 10)."""

import pytest
import torch
from linear_cases import DELAYED, EVERY, STOCHASTIC, assert_same, counted_casts, gradients, randn, recipe

import megatron_hybrid as mh
import megatron_hybrid.runtime as runtime

K, N = 64, 48
DERIVED = {"columnwise_source": {"input": "rowwise_dequantized", "weight": "rowwise_dequantized"}}


def grouped(rcp, experts=3, **kw):
    torch.manual_seed(1)
    return mh.HybridGroupedLinear(experts, K, N, recipe=rcp, name="experts.fc1", dtype=torch.bfloat16, **kw)


def loop(m, recipes, x, dy, splits):
    """Every expert as a dense linear with a recipe of its own: y, dx, dw."""
    out = []
    for weight, rcp, x_e, dy_e in zip(m.weight.detach(), recipes, x.split(splits), dy.split(splits), strict=True):
        dense = mh.HybridLinear(K, N, False, recipe=rcp, dtype=torch.bfloat16)
        dense.weight.data.copy_(weight)
        out.append(gradients(dense, x_e, dy_e))
    y, dx, dw = zip(*out)
    return [torch.cat(y), torch.cat(dx), torch.stack(dw)]


def data(rows, seed=0):
    return randn(rows, K, seed=seed), randn(rows, N, seed=seed + 1)


MIXES = {  # what experts 1 and 2 do, beside expert 0 in mxfp8
    "high precision": ["high_precision", "mxfp8_e4m3"],
    "one format and two": ["nvfp4", {"fprop": "fp8_current_e4m3", "dgrad": "nvfp4", "wgrad": "fp8_block_e4m3"}],
    "high precision in one direction": [{"fprop": "high_precision", "dgrad": "nvfp4", "wgrad": "nvfp4"}, "fp8_rowwise_e4m3"],
    "another option of the format": ["mxfp8_e4m3:2d", "fp8_rowwise_e4m3:pow2"],
    "another source": [{**{g: "nvfp4:2d" for g in ("fprop", "dgrad", "wgrad")}, **DERIVED}, "nvfp4:2d"],
}


@pytest.mark.parametrize("name", MIXES)
def test_p40_experts_may_mix_anything_and_each_is_its_own_linear(name):
    slots = [use if isinstance(use, dict) else {g: use for g in ("fprop", "dgrad", "wgrad")} for use in MIXES[name]]
    rules = [{"match": {"experts": str(1 + i)}, "use": use} for i, use in enumerate(slots)]
    m = grouped(recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3", rules=rules))
    alone = [recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"), *(recipe(**use) for use in slots)]
    splits = [40, 7, 20]
    x, dy = data(67)
    assert_same(gradients(m, x, dy, splits), loop(m, alone, x, dy, splits))


def test_p40_a_mix_that_cannot_run_names_the_expert():
    transformed = recipe("mxfp8_e4m3", rules=[{"match": {"experts": 2}, "use": {"wgrad": {"input": "nvfp4:rht"}}}])
    with pytest.raises(ValueError, match="'experts.fc1', expert 2: wgrad: rht must be on both operands"):
        grouped(transformed)
    m = grouped("bf16")
    controller = mh.prepare(m)
    with pytest.raises(ValueError, match="'experts.fc1', expert 2: wgrad"):
        controller.switch(transformed)
    assert all(not step.pair.is_quantized for plan in m.plans() for step in plan.steps().values())


def test_p41_rows_only_where_nothing_needs_columns_and_derived_columns_come_from_the_row():
    m = grouped(recipe("nvfp4:row_scaled", "mxfp8_e4m3", "mxfp8_e4m3", **DERIVED))
    x, dy = data(24)
    with torch.no_grad(), counted_casts() as casts:
        m(x, [8, 16, 0])
    assert {direction for _, direction in casts} == {"rowwise"}
    # the gradient of the weight is that of the decoded rows
    decoded = torch.cat([mh.HybridQuantizer("nvfp4:row_scaled", None).quantize(part).dequantize() for part in x.split([8, 16])])
    dw = gradients(m, x, dy, [8, 16, 0])[2]
    original = grouped(recipe("nvfp4:row_scaled", "mxfp8_e4m3", "mxfp8_e4m3"))
    assert torch.equal(dw, gradients(original, decoded.bfloat16(), dy, [8, 16, 0])[2])
    assert not torch.equal(dw, gradients(original, x, dy, [8, 16, 0])[2])


def test_p41_plans_are_built_once_an_expert(monkeypatch):
    built, original = [], runtime.build_plan
    monkeypatch.setattr(runtime, "build_plan", lambda *a, **k: (built.append(a[1]), original(*a, **k))[1])
    m = grouped("mxfp8_fprop_nvfp4_bwd", experts=5)
    assert len(built) == 5
    x, dy = data(10)
    for splits in ([10, 0, 0, 0, 0], [2, 2, 2, 2, 2]):
        m(x.requires_grad_(), splits).backward(dy)
    assert len(built) == 5


@pytest.mark.parametrize("options", ["row_scaled", "row_scaled,rht"])
def test_p43_row_scaled_nvfp4_is_the_loop(options):
    fmt = f"nvfp4:{options}"
    m, splits = grouped(recipe(fmt, fmt, fmt)), [33, 0, 17]
    x, dy = data(50)
    assert_same(gradients(m, x, dy, splits), loop(m, [recipe(fmt, fmt, fmt)] * 3, x, dy, splits))


@pytest.mark.parametrize("fmt", [f for f in EVERY if f not in (STOCHASTIC, DELAYED)])
def test_c10_rows_of_padding_change_no_real_row_and_no_weight_gradient(fmt):
    """Groups padded with zeros to a multiple of 32, as other kernels ask: outputs and gradients of the real rows are
    those without padding, and so are the weight's, whose sums get exact zeros added. (A Hadamard transform mixes the
    rows of a whole block of 16, and leaves a shorter last one alone: there groups must end on a block.)"""
    m, splits, padded = grouped(recipe(fmt, fmt, fmt), backend="reference"), [44, 7, 20], [64, 32, 32]
    if "rht" in fmt:
        splits = [48, 16, 32]
    x, dy = data(sum(splits))

    def pad(t):
        return torch.cat([torch.cat((p, p.new_zeros(n - len(p), p.shape[1]))) for p, n in zip(t.split(splits), padded)])

    y, dx, dw = gradients(m, x, dy, splits)
    y_pad, dx_pad, dw_pad = gradients(m, pad(x), pad(dy), padded)
    assert_same([torch.cat([p[:n] for p, n in zip(t.split(padded), splits)]) for t in (y_pad, dx_pad)], [y, dx])
    assert torch.equal(dw_pad, dw)
    assert all(not p[n:].any() for t in (y_pad, dx_pad) for p, n in zip(t.split(padded), splits))
