"""What training loops do to modules: recompute, accumulation, sharing, freezing, empty and odd inputs.

Properties 23, 26, 29, 36; cases 1, 2, 20, 35, 36, 48, 49, 50, 52, 58, 59, 80.
"""

import pytest
import torch
from linear_cases import DELAYED, STOCHASTIC, assert_same, gradients, randn, recipe
from torch.utils.checkpoint import checkpoint

import megatron_hybrid as mh
from megatron_hybrid import HybridSelfAttention

HYBRID = recipe("mxfp8_e4m3", "nvfp4", "nvfp4")
KINDS = ["linear", "norm_linear", "mlp", "grouped", "attention"]
SPLITS = [5, 0, 3]


def build(kind, rcp=HYBRID, seed=0, **kw):
    torch.manual_seed(seed)
    made = {"recipe": rcp, "name": "m", "dtype": torch.bfloat16, **kw}
    return {
        "linear": lambda: mh.HybridLinear(64, 64, **made),
        "norm_linear": lambda: mh.HybridLayerNormLinear(64, 64, **made),
        "mlp": lambda: mh.HybridMLP(64, 32, gated=True, activation="silu", norm="RMSNorm", **made),
        "grouped": lambda: mh.HybridGroupedLinear(3, 64, 64, True, **made),
        "attention": lambda: HybridSelfAttention(64, 4, **made),
    }[kind]()


def inputs(kind, seed=0):
    shape = (2, 4, 64) if kind == "attention" else (8, 64)
    return randn(*shape, seed=seed), randn(*shape, seed=seed + 50), *([SPLITS] if kind == "grouped" else [])


# ---- recompute


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", STOCHASTIC, DELAYED])
@pytest.mark.parametrize("kind", KINDS)
def test_p36_recomputed_gradients_are_the_same(kind, fmt, reentrant):
    ends = []
    for recomputed in (False, True):
        m = build(kind, recipe(fmt, fmt, fmt))
        controller = mh.prepare(m, seed=1)
        for step in (1, 2):
            controller.begin_step(step)
            x, dy, *args = inputs(kind, seed=step)
            x.requires_grad_()
            y = checkpoint(m, x, *args, use_reentrant=reentrant) if recomputed else m(x, *args)
            y.backward(dy)
            controller.end_step()
        ends.append([x.grad, *(p.grad for p in m.parameters()), *m.buffers()])
    assert_same(*ends)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", STOCHASTIC, DELAYED])
def test_c58_three_nested_checkpoints_in_odd_order_with_an_evaluation_in_between(fmt, reentrant):
    def layers():
        made = recipe(fmt, fmt, fmt)
        return torch.nn.ModuleList(build("mlp", made, seed=i, name=f"layers.{i}") for i in range(3))

    def recomputed(net, x):
        inner = lambda t: net[1](checkpoint(net[0], t, use_reentrant=reentrant))  # noqa: E731
        return checkpoint(lambda t: net[2](checkpoint(inner, t, use_reentrant=reentrant)), x, use_reentrant=reentrant)

    def plain(net, x):
        return net[2](net[1](net[0](x)))

    ends = []
    for forward, evaluate in ((plain, False), (recomputed, True)):
        net = layers()
        controller = mh.prepare(net, seed=1)
        for step in (1, 2, 3):
            controller.begin_step(step)
            x, dy, *_ = inputs("mlp", seed=step)
            y = forward(net, x.requires_grad_())
            if evaluate:  # between a forward and its backward
                net.eval()
                with torch.no_grad():
                    plain(net, 100 * x)
                net.train()
            y.backward(dy)
            controller.end_step()
        ends.append([x.grad, *(p.grad for p in net.parameters()), *net.buffers()])
    assert_same(*ends)


def test_p36_selective_recompute_of_the_activation_and_fc2():
    m, twin = build("mlp"), build("mlp")
    x, dy = inputs("mlp")
    want = gradients(twin, x, dy)

    def selective(x):
        h = m.linear_fc1(m.norm(x))
        return checkpoint(lambda h: m.linear_fc2(m.activation(h)), h, use_reentrant=False)

    x = x.clone().requires_grad_()
    y = selective(x)
    y.backward(dy)
    assert_same([y.detach(), x.grad, *(p.grad for p in m.parameters())], want)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", ["switch", "step rule"])
def test_c59_p29_another_recipe_in_the_recomputation_is_refused(reentrant, how):
    # payloads of E4M3 and E5M2 have the same shapes: nothing else would notice
    before, after = "fp8_rowwise_e4m3", "fp8_rowwise_e5m2"
    rule = {"match": {"steps": "2:"}, "use": after}
    rcp = recipe(before, before, before, rules=[rule] if how == "step rule" else [])
    m = build("linear", rcp)
    controller = mh.prepare(m)
    controller.begin_step(1)
    x, dy = inputs("linear")
    y = checkpoint(m, x.requires_grad_(), use_reentrant=reentrant)
    if how == "switch":
        controller.switch(recipe(after, after, after))
    else:
        controller.begin_step(2)
    with pytest.raises(mh.PlanError, match="module m: the recipe changed between a forward and its recomputation"):
        y.backward(dy)
    y = checkpoint(m, x, use_reentrant=reentrant)  # the next forward is right again
    y.backward(dy)


E4, E5 = (recipe(f, f, f) for f in ("fp8_rowwise_e4m3", "fp8_rowwise_e5m2"))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("first", ["old", "new"])
def test_c59_a_switch_is_caught_whichever_forward_is_recomputed(reentrant, first):
    """Two forwards, one before and one after the switch: only the old one's recomputation is wrong, in either order."""
    m = build("linear", E4)
    controller = mh.prepare(m)
    x, dy = inputs("linear")
    old = checkpoint(m, x.requires_grad_(), use_reentrant=reentrant)
    controller.switch(E5)
    new = checkpoint(m, x, use_reentrant=reentrant)
    fresh = gradients(build("linear", E5), x, dy)[1]
    for which in ("old", "new") if first == "old" else ("new", "old"):
        x.grad = None
        if which == "new":
            new.backward(dy)
            assert torch.equal(x.grad, fresh)
        else:
            with pytest.raises(mh.PlanError, match="module m: the recipe changed between a forward and its recomputation"):
                old.backward(dy)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's, where a recomputation raises
@pytest.mark.parametrize("reentrant", [True, False])
def test_c59_a_switch_is_caught_in_nested_checkpoints(reentrant):
    layers = torch.nn.ModuleList(build("linear", E4, name=str(i)) for i in range(2))
    controller = mh.prepare(layers)
    inner = lambda t: checkpoint(layers[0], t, use_reentrant=reentrant)  # noqa: E731
    run = lambda x: checkpoint(lambda t: layers[1](inner(t)), x, use_reentrant=reentrant)  # noqa: E731
    x, dy = inputs("linear")
    old = run(x.requires_grad_())
    controller.switch(E5)
    run(x).backward(dy)  # wholly after the switch: right
    with pytest.raises(mh.PlanError, match="the recipe changed between a forward and its recomputation"):
        old.backward(dy)


@pytest.mark.parametrize("reentrant", [True, False])
def test_c59_a_switch_between_steps_refuses_nothing(reentrant):
    """Also where a forward of the step before was never followed by a backward."""
    m = build("linear", E4)
    controller = mh.prepare(m)
    x, dy = inputs("linear")
    for step, rcp in ((1, E4), (2, E5), (3, E4)):
        controller.switch(rcp)
        controller.begin_step(step)
        m(x)
        checkpoint(m, x.requires_grad_(), use_reentrant=reentrant).backward(dy)
        controller.end_step()
        assert not m.hq._superseded


def test_p29_without_recomputation_a_forward_keeps_its_plan_for_its_backward():
    x, dy = inputs("linear")
    want = gradients(build("linear"), x, dy)
    m = build("linear")
    controller = mh.prepare(m)
    x = x.requires_grad_()
    y = m(x)
    controller.switch("bf16")
    y.backward(dy)
    assert_same([y.detach(), x.grad, *(p.grad for p in m.parameters())], want)


def test_p29_switching_back_to_an_equal_plan_is_fine():
    m = build("linear")
    controller = mh.prepare(m)
    x, dy = inputs("linear")
    y = checkpoint(m, x.requires_grad_(), use_reentrant=False)
    controller.switch("bf16")
    controller.switch(HYBRID)
    y.backward(dy)


# ---- accumulation, sharing, freezing


@pytest.mark.parametrize("main_grad", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_c48_c49_c50_four_microbatches_are_the_sum_of_four_single_runs(kind, main_grad):
    dtype = torch.float32 if main_grad is None else torch.bfloat16

    def run(batches, kept, cache=False):
        m = build(kind, dtype=dtype)
        if cache:
            mh.prepare(m, num_microbatches=4).begin_step(1)
        if kept is not None:
            m.weight.main_grad = torch.zeros(m.weight.shape, dtype=kept)
        for seed in batches:
            m.weight.grad_added_to_main_grad = False
            x, dy, *args = inputs(kind, seed=seed)
            m(x.to(dtype), *args).backward(dy.to(dtype))
            assert m.weight.grad is not None and m.weight.grad_added_to_main_grad == (kept is not None)
        return m.weight.grad if kept is None else m.weight.main_grad

    total = torch.zeros((), dtype=main_grad or torch.float32)
    for seed in range(4):  # each added once, in FP32, and rounded once
        total = (total.float() + run([seed], main_grad and torch.float32)).to(total.dtype)
    assert torch.equal(run(range(4), main_grad, cache=True), total)


def build_linear_fp32(**kw):
    torch.manual_seed(0)
    return mh.HybridLinear(64, 64, False, recipe=HYBRID, dtype=torch.float32, **kw)


def test_c52_a_weight_tied_to_an_embedding_gets_the_sum():
    embedding = torch.nn.Embedding(64, 64)
    head = build_linear_fp32()
    head.weight = embedding.weight
    tokens, dy = torch.tensor([1, 5, 5, 63]), randn(4, 64, dtype=torch.float32)
    x = embedding(tokens)
    head(x).backward(dy)
    tied = embedding.weight.grad
    apart, other = torch.nn.Embedding.from_pretrained(embedding.weight.detach(), freeze=False), build_linear_fp32()
    other.weight.data.copy_(embedding.weight.data)
    other(apart(tokens)).backward(dy)
    assert torch.equal(tied, apart.weight.grad + other.weight.grad)


def test_c52_two_modules_with_one_weight_both_follow_its_update():
    a, b = build_linear_fp32(name="a"), build_linear_fp32(name="b")
    b.weight = a.weight
    net = torch.nn.ModuleList([a, b])
    controller, sgd = mh.prepare(net, num_microbatches=2), torch.optim.SGD([a.weight], lr=0.1)
    x, dy = randn(8, 64, dtype=torch.float32), randn(8, 64, seed=1, dtype=torch.float32)
    for step in (1, 2):
        controller.begin_step(step)
        fresh = build_linear_fp32()
        fresh.weight.data.copy_(a.weight.data)
        want = gradients(fresh, x, dy)
        (a(x) + b(x)).backward(dy)
        assert torch.equal(a.weight.grad, want[2] + want[2])
        assert torch.equal(b(x), want[0])
        sgd.step()
        sgd.zero_grad()
        controller.end_step()


@pytest.mark.parametrize("frozen", ["weight", "input", "bias", "all weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parts_get_no_gradient_and_change_no_other(kind, frozen):
    x, dy, *args = inputs(kind)
    want = dict(zip(["y", "x", *(n for n, _ in build(kind).named_parameters())], gradients(build(kind), x, dy, *args)))
    m = build(kind)
    for name, p in m.named_parameters():
        p.requires_grad_(not (frozen == "all weights" or name.endswith(frozen)))
    x = x.requires_grad_(frozen != "input")
    y = m(x, *args)
    y.backward(dy)
    assert torch.equal(y, want["y"])
    for name, t in (("x", x), *m.named_parameters()):
        assert (t.grad is None) == (not t.requires_grad)
        assert t.grad is None or torch.equal(t.grad, want[name]), name


def test_second_derivatives_are_refused():
    m, x = build("linear"), randn(4, 64).requires_grad_()
    (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(g.sum(), x)


# ---- inputs


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "nvfp4", "fp8_block_e4m3", "fp8_rowwise_e4m3", STOCHASTIC, DELAYED])
@pytest.mark.parametrize("kind", KINDS)
def test_c01_c02_empty_batches_give_zero_gradients_and_leave_the_state_alone(kind, fmt):
    m = build(kind, recipe(fmt, fmt, fmt))
    controller = mh.prepare(m)
    controller.begin_step(1)
    shape = (2, 0, 64) if kind == "attention" else (0, 64)
    x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    y = m(x, [0, 0, 0]) if kind == "grouped" else m(x)
    y.backward(torch.zeros(shape, dtype=torch.bfloat16))
    assert y.shape == x.grad.shape == shape
    assert all(p.grad is not None and not p.grad.any() for p in m.parameters())
    controller.end_step()
    for name, b in m.named_buffers():  # only weights had an amax to record
        assert torch.isfinite(b).all() and ("weight" in name or "history" in name or b == 1)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (2, 0, 64), (2, 1, 3, 64)])
def test_any_leading_dimensions(shape):
    m = build("linear")
    x, dy = randn(*shape), randn(*shape, seed=1)
    got = gradients(m, x, dy)
    flat = gradients(m, x.reshape(-1, 64), dy.reshape(-1, 64))
    assert got[0].shape == shape and got[1].shape == shape
    assert_same([g.reshape(-1, 64) for g in got[:2]] + got[2:], flat)


def test_strided_inputs_and_gradients():
    m = build("linear")
    wide, wide_dy = randn(64, 16), randn(16, 128, seed=1)
    x, dy = wide.T, wide_dy[:, ::2]
    assert not x.is_contiguous() and not dy.is_contiguous()
    assert_same(gradients(m, x, dy), gradients(m, x.contiguous(), dy.contiguous()))


def negated(x):
    """A view with x's values whose memory holds their negatives."""
    view = torch.complex(torch.zeros_like(x, dtype=torch.float32), -x.float()).conj().imag
    return view if x.dtype == torch.float32 else torch._neg_view(-x)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["high_precision", "mxfp8_e4m3", "nvfp4", STOCHASTIC, DELAYED])
@pytest.mark.parametrize("kind", KINDS)
def test_views_that_negate_what_is_in_memory(kind, fmt, dtype, grad):
    ends = []
    for view in (torch.clone, negated):
        m = build(kind, recipe(fmt, fmt, fmt), dtype=dtype)
        mh.prepare(m, seed=1).begin_step(1)
        x, dy, *args = (t.to(dtype) if torch.is_tensor(t) else t for t in inputs(kind))
        x.requires_grad_(grad)
        assert view(x).is_neg() == (view is negated)
        with torch.set_grad_enabled(grad):
            y = m(view(x), *args)
            if grad:
                y.backward(view(dy))
        ends.append([y, *m.buffers(), *((x.grad, *(p.grad for p in m.parameters())) if grad else ())])
    assert_same(*ends)


@pytest.mark.parametrize("how", ["quantize", "update", "derived"])
def test_casts_of_views_that_negate_what_is_in_memory(how):
    x, ends = randn(40, 64), []
    for view in (torch.clone, negated):
        q = mh.HybridQuantizer("mxfp8_e4m3", "nvfp4", columnwise_source="rowwise_dequantized" if how == "derived" else "original")
        t = q.quantize(torch.zeros_like(x) if how == "update" else view(x))
        ends.append([*(t.update(view(x)) if how == "update" else t).payload_buffers()])
    assert_same(*ends)


@pytest.mark.parametrize("fmt", ["fp8_current_e4m3", "fp8_rowwise_e4m3", "fp8_block_e4m3", "mxfp8_e4m3", "nvfp4", STOCHASTIC, DELAYED])
@pytest.mark.parametrize("kind", KINDS)
def test_c80_outliers_and_bias_stay_finite(kind, fmt):
    m = build(kind, recipe(fmt, fmt, fmt))
    mh.prepare(m).begin_step(1)
    x, dy, *args = inputs(kind)
    x = x.clone()
    x.view(-1)[::97] = 1e4
    assert all(torch.isfinite(t).all() for t in gradients(m, x, 1e4 * dy, *args))


def test_p42_stochastic_groups_draw_by_their_own_rows():
    # the bits of a token depend on its row among all tokens, not on how rows are split into groups
    torch.manual_seed(0)
    quantized = recipe({"input": STOCHASTIC, "weight": "high_precision"})
    m = mh.HybridGroupedLinear(2, 64, 64, recipe=quantized, name="m", dtype=torch.bfloat16)
    m.weight.data[:] = torch.eye(64)  # results are the operand; sums of other numbers may depend on how many rows there are
    mh.prepare(m, seed=4).begin_step(1)
    x = randn(8, 64)
    x[:, 0] = 8.0  # one tensor amax for every split
    assert torch.equal(m(x, [8, 0]), m(x, [3, 5]))
    twice = torch.cat((x[:4], x[:4]))
    first, second = m(twice, [4, 4]).split(4)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("rcp", ["bf16", "mxfp8", "nvfp4_fprop_mxfp8_bwd"])
@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)])
def test_an_output_may_be_changed_in_place(rcp, shape):
    """As `torch.nn.Linear`'s: it is no view that autograd protects."""
    m = mh.HybridLinear(64, 32, recipe=rcp)
    x = torch.randn(shape)
    y = torch.nn.functional.relu(m(x))
    assert torch.equal(torch.nn.functional.relu_(m(x)), y)
    torch.nn.functional.relu_(m(x)).sum().backward()


@pytest.mark.parametrize("rcp", ["fp8_current", "mxfp8", "nvfp4_fprop_mxfp8_bwd"])
def test_autocast_does_not_reach_quantized_gemms(rcp):
    m = mh.HybridLinear(64, 32, recipe=rcp)
    x = torch.randn(8, 64)
    y = m(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(m(x), y)


def test_a_state_dict_after_a_change_of_recipe_is_that_of_a_module_built_with_it():
    """Buffers of delayed scaling are those that the recipe uses at some step."""
    later = mh.Recipe.from_dict({"version": 1, "name": "later", "defaults": "mxfp8_e4m3",
                                 "rules": [{"match": {"steps": "6:"}, "use": "fp8_delayed_e4m3:history=2"}]})  # fmt: skip
    for first, then in (("bf16", later), (later, "mxfp8"), ("fp8_delayed", later)):
        m = mh.HybridLinear(64, 32, recipe=first)
        mh.prepare(m, then).begin_step(7 if then is later else 1)
        fresh = mh.HybridLinear(64, 32, recipe=then)
        mh.prepare(fresh, then)
        fresh.load_state_dict(m.state_dict())


def test_quantized_modules_move_into_shared_memory():
    with mh.quantized_model_init("mxfp8"):
        m = mh.HybridLinear(64, 32)
    assert m.share_memory().weight.is_shared()


def test_grouped_inputs_of_the_wrong_kind_are_named():
    m = mh.HybridGroupedLinear(2, 64, 32)
    with pytest.raises(ValueError, match="rows"):
        m(torch.randn(2, 3, 64), [1, 1])
    with pytest.raises(ValueError, match="int32"):
        m(torch.randn(4, 64), torch.tensor([2.0, 2.0]))
    for splits in ([2.0, 2], None, 4, "22"):
        with pytest.raises(ValueError, match="m_splits .*: expected a list of ints or an int32"):
            m(torch.randn(4, 64), splits)
