"""The short way of the commonest linear gives the bits, kept bytes and counts of the long one (properties 12, 18, 25, 30).
"""

import copy
import pickle

import pytest
import torch
from linear_cases import STATELESS, STOCHASTIC, over_steps, randn, recipe, saved_tensors

import megatron_hybrid as mh
from megatron_hybrid import lean, linear
from megatron_hybrid.scaling import Pieces
from megatron_hybrid.tensor import HybridTensor

MIXED = dict(fprop="mxfp8_e4m3", dgrad="fp8_current_e5m2", wgrad={"grad_output": "high_precision", "input": "nvfp4"})


def layers(rcp, bias=True, dtype=torch.bfloat16, count=2):
    torch.manual_seed(0)
    first = mh.HybridLinear(48, 32, bias, recipe=rcp, name="fc", dtype=dtype)
    return [first, *(copy.deepcopy(first) for _ in range(count - 1))]


def results(layer, shape=(5, 4), main_grad=False, frozen=(), seed=0):
    """(y, gradients, saved tensors) of one step."""
    x = randn(*shape, 48, seed=seed, dtype=layer.weight.dtype).requires_grad_("x" not in frozen)
    layer.weight.requires_grad_("weight" not in frozen)
    if main_grad:
        layer.weight.main_grad = torch.ones(32, 48)
    with saved_tensors() as saved:
        y = layer(x)
    y.backward(randn(*y.shape, seed=seed + 1, dtype=y.dtype))
    grads = [x.grad, layer.weight.main_grad if main_grad else layer.weight.grad, layer.bias.grad]
    return [y.detach(), *(g for g in grads if g is not None)], saved


def assert_same(monkeypatch, short, long, **case):
    taken = []
    apply = lean.LeanLinear.apply
    monkeypatch.setattr(lean.LeanLinear, "apply", lambda *a: (taken.append(1), apply(*a))[1])
    got, kept = results(short, **case)
    assert taken
    monkeypatch.setattr(linear, "runs_lean", lambda *a: False)
    wanted, kept_long = results(long, **case)
    assert len(taken) == 1
    monkeypatch.undo()
    assert len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted))
    assert len(kept) == len(kept_long)
    for a, b in zip(kept, kept_long):
        assert a.shape == b.shape and torch.equal(a, b)
    assert short.plan.calls == long.plan.calls


@pytest.mark.parametrize("fmt", STATELESS)
def test_every_format(fmt, monkeypatch):
    assert_same(monkeypatch, *layers(recipe(fmt, fmt, fmt)))


@pytest.mark.parametrize(
    "case",
    [
        dict(shape=(7,)), dict(shape=()), dict(shape=(0,)), dict(shape=(2, 3, 2)), dict(main_grad=True), dict(frozen=["x"]),
        dict(frozen=["weight"]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shapes_and_gradients(case, dtype, monkeypatch):
    assert_same(monkeypatch, *layers(recipe(**MIXED), dtype=dtype), **case)


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])  # the short way, the long one
def test_gradients_go_where_the_weight_says(source):
    """`take_main_grad` is asked once a backward and comes before `main_grad`; None: autograd takes the gradient."""
    (layer, plain), asked = layers(recipe(**MIXED, columnwise_source={"weight": source})), []
    assert layer.plan.lean.alone == (source == "original")
    if source != "original":
        layer.plan.lean.node = plain.plan.lean.node = None
    for given in (torch.ones(32, 48), None):
        layer.weight.main_grad = torch.full((32, 48), torch.nan)
        layer.weight.take_main_grad = lambda: (asked.append(1), given)[1]  # noqa: B023
        plain.weight.main_grad = None if given is None else torch.ones(32, 48)
        for module in (layer, plain):
            module(randn(20, 48)).backward(randn(20, 32, seed=1))
        assert len(asked) == 1 and layer.weight.main_grad.isnan().all()
        asked.clear()
        if given is not None:
            assert torch.equal(given, plain.weight.main_grad) and layer.weight.grad_added_to_main_grad
            layer.weight.grad = plain.weight.grad = None
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_delayed_scales_and_cached_weights_over_steps(monkeypatch):
    fmt = "fp8_delayed_e4m3:history=3"
    short, long = layers(recipe(fmt, fmt, fmt))
    over_steps((short, long), 4, lambda seed: assert_same(monkeypatch, short, long, seed=seed))
    buffers = [dict(layer.hq.named_buffers()) for layer in (short, long)]
    assert len(buffers[0]) == 12 and all(torch.equal(t, buffers[1][name]) for name, t in buffers[0].items())


@pytest.mark.parametrize("fmt", [STOCHASTIC, "nvfp4:row_scaled,rht,sr"])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("save_input", ["payload", "original"])
def test_random_bits_over_steps(fmt, cached, save_input, monkeypatch):
    """Every operand draws, also where backward casts what was kept."""
    pair = [mh.HybridLinear(48, 32, recipe=recipe(fmt, fmt, fmt), name="fc", save_input=save_input) for _ in range(2)]
    pair[1].load_state_dict(pair[0].state_dict())

    def compare(seed):
        for layer in pair:
            layer.hq.weight_cache = layer.hq.weight_cache if cached else None
        assert_same(monkeypatch, *pair, seed=seed)

    over_steps(pair, 2, compare)


@pytest.mark.parametrize("fmt", [STOCHASTIC, "nvfp4:row_scaled,rht,sr", "nvfp4:2d,sr"])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_that_draw_with_keys_of_their_own(dim, transposed, fmt):
    """The bytes of the general cast, in a call of the kernels a part and not one a part and direction."""
    x, taken = randn(64, 96), 0
    maps = [(0, 64, 256), (0, 192, 256)] if dim else [(64, 0, 96), (192, 0, 96)]
    rng = mh.Rng(5, 7, 3, 1, Pieces(dim, tuple(maps)))
    quantizer = mh.HybridQuantizer(fmt, fmt)
    cast = lean.OperandCast(quantizer, transposed, "cpu")
    for wanted in ((True, True), (True, False), (False, True)):
        for amaxes in (quantizer.amax(x), (None, None)):
            if not cast.takes_parts(x, wanted, amaxes, rng):
                assert amaxes == (None, None)
                continue
            pair = cast.in_parts(x, *wanted, amaxes, rng)
            keys = dict(amax=amaxes, rng=rng, transposed=transposed)
            for a, b in zip(pair, quantizer.cast(x, rowwise=wanted[0], columnwise=wanted[1], **keys), strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert a.shape == b.shape and a.transposed == b.transposed
                    assert all(torch.equal(t, b.buffers()[name]) for name, t in a.buffers().items())
                    taken += 1
    assert taken >= 4
    assert not cast.takes_parts(randn(56, 88), (True, True), quantizer.amax(randn(56, 88)), rng), "cuts blocks"


def test_a_second_derivative_is_refused():
    layer, x = layers(recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"), count=1)[0], randn(4, 48).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).float().pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().sum().backward()


def test_plans_that_need_more_take_the_long_way():
    rcp = recipe("mxfp8_e4m3", "mxfp8_e4m3", "nvfp4", columnwise_source={"input": "rowwise_dequantized"})
    assert not mh.HybridLinear(32, 32, recipe=rcp).plan.lean.alone


def test_tensors_of_other_kinds_take_the_long_way():
    layer = layers(recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"), count=1)[0]
    call = layer.hq.call(layer.weight.device, linear.LOCAL, training=True)
    assert lean.runs_lean(randn(2, 48), layer.weight, call)
    assert not lean.runs_lean(layer.cast_input(randn(2, 48)), layer.weight, call)
    assert not lean.runs_lean(randn(2, 48).double(), layer.weight, call)
    with torch.no_grad():
        assert not lean.runs_lean(randn(2, 48), layer.weight, call)


def test_plans_with_their_casts_can_be_copied_and_pickled():
    plan = layers(recipe(**MIXED), count=1)[0].plan
    x = randn(4, 48)
    wanted = plan.lean.input(x, True, True, None)
    for again in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        for a, b in zip(again.lean.input(x, True, True, None), wanted):
            assert all(torch.equal(t, b.buffers()[name]) for name, t in a.buffers().items())


class CastGradient(torch.autograd.Function):
    """Gives back a gradient cast as the linear before it casts it, or with other formats."""

    @staticmethod
    def forward(ctx, y, call, quantizer):
        ctx.call, ctx.quantizer, ctx.needs = call, quantizer, y.grad_fn.needs_input_grad
        return y * 1

    @staticmethod
    def backward(ctx, dy):
        plan, shape = ctx.call.plan, dy.shape
        states = (ctx.call.state or {}).get("grad_output")
        row, col = ctx.quantizer.cast(
            dy.reshape(-1, shape[-1]), rowwise=ctx.needs[0], columnwise=ctx.needs[1], state=states,
            transposed=plan.transposed("grad_output"),
        )  # fmt: skip
        return HybridTensor.from_storages(row, col, shape, dy.dtype, ctx.quantizer), None, None


@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",)])
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "fp8_delayed_e5m2", "fp8_block_e4m3"])
def test_a_gradient_that_was_cast_before(fmt, frozen):
    """A linear takes its gradient as payloads, with the bits of its own cast."""
    found = []
    for before in (True, False):
        (layer,) = layers(recipe(fmt, fmt, fmt), bias=False, count=1)
        ctl = mh.prepare(layer)
        ctl.begin_step(1)
        x = randn(5, 4, 48).requires_grad_("x" not in frozen)
        layer.weight.requires_grad_("weight" not in frozen)
        y = layer(x)
        assert lean.takes_payloads(y)
        if before:
            y = CastGradient.apply(y, y.grad_fn.call, layer.plan.quantizers["grad_output"])
        y.backward(randn(5, 4, 32, seed=1))
        found.append([x.grad, layer.weight.grad, *(b for _, b in layer.hq.named_buffers())])
    for a, b in zip(*found, strict=True):
        assert a is b is None or torch.equal(a, b)


def test_a_gradient_in_other_formats_is_refused():
    (layer,) = layers(recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"), bias=False, count=1)
    y = layer(randn(5, 48).requires_grad_())
    y = CastGradient.apply(y, y.grad_fn.call, mh.HybridQuantizer("mxfp8_e5m2", "mxfp8_e5m2"))
    with pytest.raises(mh.PlanError, match="grad_output was quantized before, to .*e5m2.*needs grad_output.rowwise mxfp8_e4m3"):
        y.sum().backward()


def test_a_gradient_cast_before_has_one_part():
    """Another reader of the output would have to add to payloads."""
    (layer,) = layers(recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"), bias=False, count=1)
    y = layer(randn(5, 48).requires_grad_())
    z = CastGradient.apply(y, y.grad_fn.call, layer.plan.quantizers["grad_output"])
    with pytest.raises(NotImplementedError, match="second reader.*forward hook of linear_fc1"):
        (z.sum() + y.square().sum()).backward()


def test_what_hooks_are_shown_keeps_a_plain_gradient():
    """A forward hook may make a loss of fc1's output, whose gradient is then a sum."""
    gated_cast = pytest.importorskip("megatron_hybrid.gated_cast", reason="needs triton")
    made = dict(recipe="mxfp8", bias=False, dtype=torch.bfloat16)
    fc1, fc2 = mh.HybridLinear(64, 320, name="fc1", **made), mh.HybridLinear(160, 32, name="fc2", **made)
    for hooked in (False, True):
        handle = fc1.register_forward_hook(lambda module, args, y: None) if hooked else None
        assert gated_cast.shows_output(fc1) == hooked
        casts = gated_cast.swiglu_casts(fc1(randn(70, 64).requires_grad_()), fc2.hq, fc2.weight, training=True, shown=hooked)
        assert (casts[0] is not None, casts[1] is not None) == (True, not hooked)
    handle.remove()
    assert not gated_cast.shows_output(fc1)


def test_whose_gradient_can_be_cast_before():
    rcp = recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3")
    (biased,), (layer,) = layers(rcp, count=1), layers(rcp, bias=False, count=1)
    x = randn(5, 48).requires_grad_()
    hooked = layer(x)
    hooked.register_hook(lambda grad: None)
    shown = layer(x)
    shown.retain_grad()
    nothing = torch.no_grad()(layer)(x)
    derived = recipe(MIXED["fprop"], "nvfp4", "nvfp4", columnwise_source={"grad_output": "rowwise_dequantized"})
    general = mh.HybridLinear(48, 32, bias=False, recipe=derived, name="fc")
    general.plan.lean.node = None
    assert lean.takes_payloads(layer(x))
    assert not any(map(lean.takes_payloads, (biased(x), hooked, shown, nothing, layer(x)[1:], x * 2, general(x.float()))))
