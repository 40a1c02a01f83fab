"""The linear's three equations against explicit products of decoded operands (properties 18-25, 35, cases 1, 2, 20, 48, 52)."""

import itertools

import pytest
import torch
from linear_cases import counted_casts, saved_tensors

import megatron_hybrid as mh
from megatron_hybrid.formats import COLUMNWISE, ROWWISE, parse_format
from megatron_hybrid.linear import Communication, LinearCall, hybrid_linear
from megatron_hybrid.plan import INPUT, build_plan
from megatron_hybrid.sharding import ROWS, Shard, Sharding
from megatron_hybrid.storage import cast

STATELESS = [
    "high_precision", "fp8_current_e4m3", "fp8_current_e5m2", "fp8_rowwise_e4m3", "fp8_block_e4m3", "fp8_block_e4m3:2d",
    "mxfp8_e4m3", "mxfp8_e4m3:2d", "nvfp4", "nvfp4:2d", "nvfp4:row_scaled",
]  # fmt: skip


def recipe(fprop="high_precision", dgrad="high_precision", wgrad="high_precision", **more):
    return mh.Recipe.from_dict(
        {"version": 1, "name": "test", "defaults": {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad, **more}}
    )


def decoded(x, fmt, direction, dtype=torch.bfloat16):
    return cast(x.detach().to(dtype), parse_format(fmt), direction).dequantize(torch.float32).double()


def tensors(m=24, k=96, n=40, seed=0, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g).to(dtype)
    dy = torch.randn(m, n, generator=g).to(dtype)
    return x, dy


def run(rcp, x, dy, backend="reference", bias=False, seed=1):
    torch.manual_seed(seed)
    layer = mh.HybridLinear(x.shape[-1], dy.shape[-1], bias, recipe=rcp, name="fc", backend=backend, dtype=x.dtype)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return layer, y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("f1,f2", list(itertools.product(STATELESS, repeat=2)))
def test_p18_every_pair_of_formats_is_three_explicit_products(f1, f2):
    x, dy = tensors()
    layer, y, dx, dw = run(recipe(f1, f2, f2), x, dy)
    w = layer.weight
    assert torch.equal(y, (decoded(x, f1, ROWWISE) @ decoded(w, f1, ROWWISE).T).float().bfloat16())
    assert torch.equal(dx, (decoded(dy, f2, ROWWISE) @ decoded(w, f2, COLUMNWISE)).float().bfloat16())
    assert torch.equal(dw, (decoded(dy, f2, COLUMNWISE).T @ decoded(x, f2, COLUMNWISE)).float().bfloat16())


@pytest.mark.parametrize("formats", list(itertools.permutations(["fp8_current_e4m3", "mxfp8_e4m3", "nvfp4"])))
def test_p19_three_formats_in_one_linear(formats):
    x, dy = tensors(seed=3)
    _, y, dx, dw = run(recipe(*formats), x, dy)
    for got, slot in ((y, 0), (dx, 1), (dw, 2)):
        alone = run(recipe(*[formats[slot]] * 3), x, dy)[1 + slot]
        assert torch.equal(got, alone)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "nvfp4"])
def test_p20_one_quantized_gemm_leaves_the_others_high_precision(gemm, fmt):
    x, dy = tensors(seed=4)
    mixed = run(recipe(**{gemm: fmt}), x, dy)
    plain, full = run(recipe(), x, dy), run(recipe(fmt, fmt, fmt), x, dy)
    for i, g in enumerate(("fprop", "dgrad", "wgrad"), start=1):
        assert torch.equal(mixed[i], (full if g == gemm else plain)[i])


def test_p20_one_quantized_operand():
    x, dy = tensors(seed=5)
    layer, y, _, _ = run(recipe(fprop={"input": "mxfp8_e4m3", "weight": "high_precision"}), x, dy)
    assert torch.equal(y, (decoded(x, "mxfp8_e4m3", ROWWISE) @ layer.weight.double().T).float().bfloat16())


def test_p21_hadamard_on_one_operand_is_refused_and_names_the_place():
    from megatron_hybrid.gemm import DeviceKind, GemmPair, choose

    pair = GemmPair("wgrad", parse_format("nvfp4:rht"), parse_format("nvfp4"), DeviceKind("cpu"))
    with pytest.raises(ValueError, match="one operand only"):
        choose(pair)


def test_p22_a_missing_direction_is_named():
    layer = mh.HybridLinear(32, 16, recipe="mxfp8", name="fc")
    row, _ = layer.plan.quantize("input", torch.randn(4, 32), rowwise=True)
    with pytest.raises(ValueError, match="module fc, wgrad: needs grad_output.columnwise, found nothing"):
        layer.plan.run("wgrad", None, row, torch.float32)
    with pytest.raises(ValueError, match="module fc, fprop: needs weight.rowwise, found nothing"):
        layer.plan.run("fprop", row, None, torch.float32)


@pytest.mark.parametrize("fmt", STATELESS)
def test_p24_bias_gradient_is_the_sum_of_the_unquantized_gradient(fmt):
    x, dy = tensors(seed=6)
    layer, *_ = run(recipe(fmt, fmt, fmt), x, dy, bias=True)
    assert torch.equal(layer.bias.grad, dy.sum(0))


@pytest.mark.parametrize("fmt", STATELESS)
def test_p25_what_is_saved_is_exactly_what_the_plan_lists(fmt):
    x, dy = tensors(seed=7)
    layer = mh.HybridLinear(96, 40, False, recipe=recipe(fmt, fmt, fmt), dtype=torch.bfloat16)
    with saved_tensors() as saved:
        layer(x.requires_grad_())
    plan = layer.plan
    expected = [plan.quantize(op, t.detach(), columnwise=True)[1] for op, t in (("input", x), ("weight", layer.weight))]
    assert sum(t.numel() * t.element_size() for t in saved) == sum(s.nbytes for s in expected)
    kept = "original" if fmt == "high_precision" else "columnwise"
    assert plan.saved == {"input": kept, "weight": kept}


def test_p34_a_dequantized_column_keeps_the_row_payload():
    rcp = recipe("nvfp4", "high_precision", "high_precision",
                 columnwise_source={"input": "rowwise_dequantized", "weight": "rowwise_dequantized"})  # fmt: skip
    x, dy = tensors(seed=8)
    layer, y, dx, dw = run(rcp, x, dy)
    assert layer.plan.saved == {"input": "rowwise", "weight": "rowwise"}
    w_hat = decoded(layer.weight, "nvfp4", ROWWISE).bfloat16().double()
    x_hat = decoded(x, "nvfp4", ROWWISE).bfloat16().double()
    assert torch.equal(dx, (dy.double() @ w_hat).float().bfloat16())
    assert torch.equal(dw, (dy.double().T @ x_hat).float().bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_p35_all_high_precision_is_torch_linear_bitwise(dtype):
    x, dy = tensors(seed=9, dtype=dtype)
    layer, y, dx, dw = run("bf16", x, dy, backend=None)
    ref_x, ref_w = x.clone().requires_grad_(), layer.weight.detach().clone().requires_grad_()
    ref = torch.nn.functional.linear(ref_x, ref_w)
    ref.backward(dy)
    for got, want in ((y, ref), (dx, ref_x.grad), (dw, ref_w.grad)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [0, 1, 7, 15, 33])
@pytest.mark.parametrize("k,n", [(16, 17), (31, 8), (129, 33)])
@pytest.mark.parametrize("fmt", STATELESS)
def test_c02_c20_c22_any_size_is_right(rows, k, n, fmt):
    x, dy = tensors(rows, k, n, seed=rows)
    layer, y, dx, dw = run(recipe(fmt, fmt, fmt), x, dy)
    assert torch.equal(y, (decoded(x, fmt, ROWWISE) @ decoded(layer.weight, fmt, ROWWISE).T).float().bfloat16())
    assert torch.equal(dw, (decoded(dy, fmt, COLUMNWISE).T @ decoded(x, fmt, COLUMNWISE)).float().bfloat16())
    assert dx.shape == x.shape


@pytest.mark.parametrize("fmt", STATELESS)
def test_p66_emulated_is_within_fp32_summation_of_the_reference(fmt):
    # both multiply the same decoded FP32 operands; FP32 sums of K terms differ from exact by at most
    # K * 2^-24 * sum|a b| (any order), and bf16 output rounding adds 2^-8 relative once on either side
    x, dy = tensors(seed=10)
    layer, y, _, _ = run(recipe(fmt, fmt, fmt), x, dy, backend=None)
    a, b = decoded(x, fmt, ROWWISE), decoded(layer.weight, fmt, ROWWISE)
    bound = 96 * 2.0**-24 * (a.abs() @ b.abs().T) + (a @ b.T).abs() * 2.0**-8
    assert ((y.double() - a @ b.T).abs() <= bound).all()


def test_c48_d12_257_ones_make_257():
    layer = mh.HybridLinear(16, 16, False, recipe=recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"), dtype=torch.bfloat16)
    layer.weight.main_grad = torch.zeros(16, 16)
    for _ in range(257):
        layer.weight.grad_added_to_main_grad = False
        layer(torch.ones(1, 16, dtype=torch.bfloat16)).backward(torch.ones(1, 16, dtype=torch.bfloat16))
        assert layer.weight.grad_added_to_main_grad
    assert torch.equal(layer.weight.main_grad, torch.full((16, 16), 257.0))


def test_c52_a_weight_used_twice_gets_the_sum():
    x, dy = tensors(seed=11)
    layer = mh.HybridLinear(96, 40, False, recipe="mxfp8", dtype=torch.float32)
    grads = []
    for times in (1, 2):
        layer.weight.grad = None
        sum(layer(x.float()) for _ in range(times)).backward(dy.float())
        grads.append(layer.weight.grad.clone())
    assert torch.equal(grads[1], 2 * grads[0])


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_c55_frozen_operands_do_no_needless_work(frozen):
    x, dy = tensors(seed=12)
    layer = mh.HybridLinear(96, 40, False, recipe="mxfp8", dtype=torch.bfloat16)
    layer.weight.requires_grad_(frozen != "weight")
    saved = []
    x = x.clone().requires_grad_(frozen != "input")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        y = layer(x)
    y.backward(dy)
    gemm, operand = ("dgrad", layer.weight) if frozen == "weight" else ("wgrad", x)
    assert {g for g, _ in layer.plan.calls} == {"fprop", gemm}
    assert max(saved) == operand.numel()


def test_c55_no_grad_keeps_and_quantizes_nothing_columnwise():
    layer = mh.HybridLinear(96, 40, False, recipe="mxfp8", dtype=torch.bfloat16)
    with torch.no_grad(), counted_casts() as casts:
        assert not layer(tensors()[0]).requires_grad
    assert [direction for _, direction in casts] == ["rowwise", "rowwise"]


def test_activation_checkpointing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    x, dy = tensors(seed=13)
    _, _, dx, dw = run("mxfp8_fprop_nvfp4_bwd", x, dy, backend=None)
    for reentrant in (True, False):
        torch.manual_seed(1)
        layer = mh.HybridLinear(96, 40, False, recipe="mxfp8_fprop_nvfp4_bwd", dtype=torch.bfloat16)
        xr = x.clone().requires_grad_()
        checkpoint(layer, xr, use_reentrant=reentrant).backward(dy)
        assert torch.equal(xr.grad, dx) and torch.equal(layer.weight.grad, dw)


class _Twice(Communication):
    """Two ranks with the same rows, played by one: gathers by doubling, reduces by adding the halves."""

    size = 2

    def start_gather(self, *tensors):
        return lambda: [torch.cat((x, x)) for x in tensors]

    def reduce_dgrad(self, dx):
        return lambda: dx[: dx.shape[0] // 2] + dx[dx.shape[0] // 2 :]


@pytest.mark.parametrize("rows,column", [(8, "high precision"), (32, "payload")])
def test_communication_sees_local_input_and_full_gradient(rows, column):
    x, _ = tensors(rows, 96, 40, seed=14)
    layer = mh.HybridLinear(96, 40, False, recipe="mxfp8", dtype=torch.bfloat16)
    sharding = Sharding(2, {INPUT: Shard(ROWS)}, gathered=INPUT)
    plan = build_plan(layer.hq.recipe.resolve(layer.hq.role), "t", "cpu", sharding=sharding)
    xr = x.clone().requires_grad_()
    y = hybrid_linear(xr, layer.weight, None, LinearCall(plan, _Twice()))
    assert y.shape == (2 * rows, 40)
    dy = torch.randn(2 * rows, 40).bfloat16()
    y.backward(dy)
    assert xr.grad.shape == x.shape
    assert plan.gathers == {(INPUT, "rowwise", "payload"): 1, (INPUT, "columnwise", column): 1}
    full = torch.cat((x, x)).requires_grad_()
    dw, layer.weight.grad = layer.weight.grad, None
    assert torch.equal(layer(full), y)
    layer(full).backward(dy)
    assert torch.equal(dw, layer.weight.grad)
