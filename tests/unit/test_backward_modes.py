"""Backward modes (properties 33, 34, 35): forward's bits stay, gradients are high-precision products of what is kept."""

import pytest
import torch
from linear_cases import DELAYED, EVERY, STOCHASTIC, assert_same, gradients, nbytes, randn, recipe, saved_tensors

import megatron_hybrid as mh
from megatron_hybrid.linear import LOCAL

MODES = ["high_precision", "dequantized"]
SPLITS = [11, 0, 5]
CPU = torch.device("cpu")


def build(kind, rcp, seed=1, **kw):
    torch.manual_seed(seed)
    made = dict(recipe=rcp, name="m", dtype=torch.bfloat16, **kw)
    module = {
        "linear": lambda: mh.HybridLinear(64, 48, **made),
        "norm_linear": lambda: mh.HybridLayerNormLinear(64, 48, **made),
        "mlp": lambda: mh.HybridMLP(64, 32, gated=True, activation="silu", norm="RMSNorm", **made),
        "grouped": lambda: mh.HybridGroupedLinear(3, 64, 48, True, **made),
    }[kind]()
    controller = mh.prepare(module, seed=5)
    controller.begin_step(1)
    return module, controller


def inputs(kind, seed=0):
    width = 64 if kind == "mlp" else 48
    return randn(16, 64, seed=seed), randn(16, width, seed=seed + 1), *([SPLITS] if kind == "grouped" else [])


def with_mode(fmt, mode):
    backward = "nvfp4:rht" if "rht" in fmt else "mxfp8_e4m3"  # what the shorthand replaces
    return recipe(fmt, backward, backward, top={"backward": mode})


class Reference(torch.autograd.Function):
    """The forward of a plan, and the backward that the mode promises, as two lines of torch."""

    @staticmethod
    def forward(ctx, x, w, bias, runtime, mode):
        call = runtime.call(CPU, LOCAL, training=False)
        x_row, w_row = (call.quantize(op, t, rowwise=True)[0] for op, t in (("input", x), ("weight", w)))
        kept = (x, w) if mode == "high_precision" else (x_row.dequantize(x.dtype), w_row.dequantize(x.dtype))
        ctx.save_for_backward(*kept)
        return call.plan.run("fprop", x_row, w_row, x.dtype) + bias

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return torch.mm(dy, w), torch.mm(dy.T, x), dy.sum(0), None, None


def reference(kind, m, mode):
    """The module as a function of x, its linears replaced by `Reference`."""

    def linear(layer, x):
        return Reference.apply(x, layer.weight, layer.bias, layer.hq, mode)

    def grouped(x, splits):
        parts = zip(x.split(splits), m.weight, m.bias, m.hq)
        return torch.cat([Reference.apply(x_e, w_e, b_e, hq, mode) for x_e, w_e, b_e, hq in parts])

    return {
        "linear": lambda x: linear(m, x),
        "norm_linear": lambda x: linear(m.linear, m.norm(x)),
        "mlp": lambda x: linear(m.linear_fc2, m.activation(linear(m.linear_fc1, m.norm(x)))),
        "grouped": grouped,
    }[kind]


def reference_gradients(kind, m, mode, x, dy, *args):
    m.zero_grad()
    x = x.clone().requires_grad_()
    y = reference(kind, m, mode)(x, *args)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in m.parameters())]


def kept_by_linears(kind, m, x):
    """(operand, tensor, runtime) of everything that the linears see."""
    with torch.no_grad():
        if kind == "grouped":
            parts = zip(x.split(SPLITS), m.weight, m.hq)
            return [pair for x_e, w_e, hq in parts for pair in (("input", x_e, hq), ("weight", w_e, hq))]
        seen = {"linear": lambda: [(m, x)], "norm_linear": lambda: [(m.linear, m.norm(x))],
                "mlp": lambda: [(m.linear_fc1, m.norm(x)), (m.linear_fc2, m.activation(m.linear_fc1(m.norm(x))))]}[kind]()  # fmt: skip
        return [pair for layer, t in seen for pair in (("input", t, layer.hq), ("weight", layer.weight, layer.hq))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", [f for f in EVERY if f != STOCHASTIC])
@pytest.mark.parametrize("kind", ["linear", "norm_linear", "mlp", "grouped"])
def test_p33_p34_gradients_are_high_precision_products_of_the_saved_operand(kind, fmt, mode):
    m, controller = build(kind, with_mode(fmt, mode))
    default, default_controller = build(kind, with_mode(fmt, "default"))
    for step in range(1, 4 if fmt == DELAYED else 2):  # delayed: the scale moves from step to step
        for c in (controller, default_controller):
            c.begin_step(step)
        case = inputs(kind, seed=10 * step)
        want = reference_gradients(kind, m, mode, *case)
        got = gradients(m, *case)
        assert_same(got, want)
        assert torch.equal(got[0], gradients(default, *case)[0])  # the forward's bits do not change
        for c in (controller, default_controller):
            c.end_step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["linear", "norm_linear", "mlp"])
def test_p33_stochastic_rounding_keeps_its_draws(kind, mode):
    m, _ = build(kind, with_mode(STOCHASTIC, mode))
    default, _ = build(kind, with_mode(STOCHASTIC, "default"))
    case = inputs(kind)
    assert_same(gradients(m, *case), reference_gradients(kind, m, mode, *case))
    assert torch.equal(m(case[0]), default(case[0]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", EVERY)
@pytest.mark.parametrize("kind", ["linear", "norm_linear", "mlp", "grouped"])
def test_p33_saved_bytes_are_the_original_or_the_row(kind, fmt, mode):
    m, _ = build(kind, with_mode(fmt, mode))
    x, _, *args = inputs(kind)
    x = x.requires_grad_()
    with saved_tensors() as kept:
        m(x, *args)
    others = 0  # what norm and activation keep
    with saved_tensors() as by_others:
        if kind in ("norm_linear", "mlp"):
            m.norm(x)
        if kind == "mlp":
            m.activation(torch.zeros(16, 64, dtype=x.dtype, requires_grad=True))
        others = nbytes(by_others)
    expected = 0
    for operand, t, hq in kept_by_linears(kind, m, x):
        plan = hq.plan_for(CPU)
        row_is_kept = mode == "dequantized" and fmt != "high_precision"
        assert plan.saved[operand] == ("rowwise" if row_is_kept else "original")
        call = hq.call(CPU, LOCAL, training=False)
        expected += call.quantize(operand, t, rowwise=True)[0].nbytes if row_is_kept else nbytes([t])
    assert nbytes(kept) - others == expected
    assert all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in kept)  # property 12


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "nvfp4", DELAYED])
def test_p34_the_saving_choice_does_not_reach_a_dequantized_backward(fmt):
    for save_input in ("payload", "original"):
        m, _ = build("linear", with_mode(fmt, "dequantized"), save_input=save_input)
        assert m.plan.saved == {"input": "rowwise", "weight": "rowwise"}
        m, _ = build("linear", with_mode(fmt, "high_precision"), save_input=save_input)
        assert m.plan.saved == {"input": "original", "weight": "original"}


@pytest.mark.parametrize("fmt", [f for f in EVERY if f != "high_precision"])
@pytest.mark.parametrize("mode", MODES)
def test_p35_high_precision_slots_reproduce_the_shorthand(fmt, mode):
    columns = {"columnwise_source": {"input": "rowwise_dequantized", "weight": "rowwise_dequantized"}}
    spelled = recipe(fmt, "high_precision", "high_precision", **(columns if mode == "dequantized" else {}))
    a, _ = build("linear", with_mode(fmt, mode))
    b, _ = build("linear", spelled)
    assert a.plan == b.plan
    case = inputs("linear")
    assert_same(gradients(a, *case), gradients(b, *case))


@pytest.mark.parametrize("kind", ["linear", "norm_linear", "mlp", "grouped"])
def test_p35_all_high_precision_modes_agree_over_steps_of_sgd(kind):
    results = []
    for mode in ("default", *MODES):
        m, controller = build(kind, recipe(top={"backward": mode}))
        sgd = torch.optim.SGD(m.parameters(), lr=0.1)
        for step in range(1, 4):
            controller.begin_step(step)
            gradients(m, *inputs(kind, seed=step))
            sgd.step()
            controller.end_step()
        results.append([p.detach().clone() for p in m.parameters()])
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_c55_a_frozen_operand_keeps_nothing_for_its_own_gradient(mode, frozen):
    m, _ = build("linear", with_mode("mxfp8_e4m3", mode))
    m.weight.requires_grad_(frozen != "weight")
    m.bias.requires_grad_(False)
    x = randn(16, 64).requires_grad_(frozen != "input")
    with saved_tensors() as kept:
        y = m(x)
    t = x if frozen == "input" else m.weight  # the operand that the other gradient reads
    row = m.plan.quantize("input", t.detach(), rowwise=True)[0]
    assert nbytes(kept) == (row.nbytes if mode == "dequantized" else nbytes([t]))
    y.backward(randn(16, 48, seed=1))
    assert (m.weight.grad is None) == (frozen == "weight") and (x.grad is None) == (frozen == "input")


def test_p33_a_rule_switches_one_layer_only():
    rcp = recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3", rules=[
        {"match": {"name": "*fc2"}, "use": {"backward": "dequantized"}}])  # fmt: skip
    m, _ = build("mlp", rcp)
    assert m.linear_fc1.plan.saved["input"] == "columnwise" and m.linear_fc2.plan.saved["input"] == "rowwise"
    assert not m.linear_fc2.plan.dgrad.pair.is_quantized and m.linear_fc1.plan.dgrad.pair.is_quantized
