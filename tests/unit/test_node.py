"""The C++ autograd node of the commonest linear gives the bits, the counts and the behaviour of Python's (properties 12, 18,
25, 30)."""

import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from linear_cases import EVERY, STOCHASTIC, over_steps, randn, recipe

import megatron_hybrid as mh
from megatron_hybrid import kernels, lean, node
from megatron_hybrid.gemm import backends, cublaslt, scaled_mm
from megatron_hybrid.plan import GemmPlan
from megatron_hybrid.tensor import HybridTensor

pytestmark = pytest.mark.skipif(node.library() is None, reason="this build has no _C_node")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
FORMATS = [name for name in EVERY if name != STOCHASTIC]
MIXED = dict(fprop="mxfp8_e4m3", dgrad="fp8_current_e5m2", wgrad={"grad_output": "high_precision", "input": "nvfp4"})
HALVES = dict(fprop={"input": "high_precision", "weight": "fp8_block_e4m3"}, dgrad={"grad_output": "mxfp8_e4m3"})
NODE = "LeanLinearBackward"


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def layers(rcp, device="cpu", bias=True, dtype=torch.bfloat16, count=2, features=(48, 32)):
    torch.manual_seed(0)
    first = mh.HybridLinear(*features, bias, recipe=rcp, name="fc", dtype=dtype)
    return [copy.deepcopy(first).to(device) for _ in range(count)]


def without_node(layer):
    """The same layer, run by Python's function."""
    layer.plan.lean.node = None
    return layer


def by_node(y) -> bool:
    return type(y.grad_fn) is node.library().LinearBackward


def results(layer, shape=(5, 4), main_grad=None, frozen=(), seed=0, turned=False, again=False):
    """y and gradients of one step."""
    device, (n, k), dtype = layer.weight.device, layer.weight.shape, layer.weight.dtype
    x = randn(*shape, k, seed=seed, dtype=dtype).to(device).requires_grad_("x" not in frozen)
    layer.weight.requires_grad_("weight" not in frozen)
    if layer.bias is not None:
        layer.bias.requires_grad_("bias" not in frozen)
    layer.zero_grad()
    if main_grad:
        layer.weight.main_grad = torch.ones(n, k, device=device, dtype=main_grad)
    y = layer(x)
    dy = randn(*y.shape, seed=seed + 1, dtype=dtype).to(device)
    if turned:
        dy = dy.transpose(0, -1).contiguous().transpose(0, -1)
    if again:
        y.backward(dy, retain_graph=True)
    y.backward(dy)
    grads = [x.grad, layer.weight.main_grad if main_grad else layer.weight.grad, layer.bias is None or layer.bias.grad]
    return y, [y.detach(), *(g for g in grads if torch.is_tensor(g))]


def assert_same(layer, plain, **case):
    y, got = results(layer, **case)
    y_plain, wanted = results(without_node(plain), **case)
    assert by_node(y) and not by_node(y_plain)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
    assert layer.plan.calls == plain.plan.calls
    return got


@pytest.mark.parametrize("fmt", EVERY)
def test_every_format(fmt, device):
    pair = layers(recipe(fmt, fmt, fmt), device)
    for layer in pair:
        mh.prepare(layer).begin_step(1)
    for cached in range(2):  # the second call finds the weight in its cache
        assert_same(*pair, seed=cached)
        assert_same(*pair, seed=cached, turned=True, again=True)
    assert all(torch.equal(a, b) for a, b in zip(pair[0].hq.buffers(), pair[1].hq.buffers(), strict=True))


ROWS_AND_BLOCKS = dict(fprop="nvfp4:row_scaled", dgrad={"grad_output": "fp8_rowwise_e5m2", "weight": "mxfp8_e4m3"},
                       wgrad={"grad_output": "fp8_current_e5m2", "input": "nvfp4"})  # fmt: skip
ALL = {operand: "rowwise_dequantized" for operand in ("input", "weight", "grad_output")}
DERIVED = {  # kept for backward: rows and rows, columns and columns, rows and columns
    "dequantized": dict(fprop="mxfp8_e4m3", dgrad="high_precision", wgrad="high_precision", columnwise_source=ALL),
    "smaller columns": dict(fprop="fp8_rowwise_e4m3", dgrad="nvfp4", wgrad="nvfp4:rht", columnwise_source=ALL),
    "smaller rows": dict(fprop="nvfp4:row_scaled,sr", dgrad="mxfp8_e4m3", wgrad="fp8_delayed_e4m3:history=3",
                         columnwise_source=ALL),
    "of some": dict(fprop="mxfp8_e4m3", dgrad="fp8_current_e5m2", wgrad={"grad_output": "nvfp4:sr", "input": "nvfp4"},
                    columnwise_source={"input": "rowwise_dequantized"}),
}  # fmt: skip
EMULATED = {"mixed": MIXED, "halves": HALVES, "rows and blocks": ROWS_AND_BLOCKS}


def recipe_of(name):
    return recipe(**EMULATED[name]) if name in EMULATED else recipe(name, name, name)


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("save_input", ["payload", "original"])
@pytest.mark.parametrize("cached", [True, False])
def test_derived_columns_over_steps(name, save_input, cached, device):
    """What Python derives, the node keeps and multiplies."""
    pair = layers(recipe(**DERIVED[name]), device)
    for layer in pair:
        layer.hq.save_input = save_input
        layer.hq.replan(layer.hq.recipe)

    def compare(seed):
        for layer in pair:
            layer.hq.weight_cache = layer.hq.weight_cache if cached else None
        for case in (dict(), dict(frozen=["x"]), dict(frozen=["weight"]), dict(main_grad=torch.float32, again=True)):
            assert_same(*pair, seed=seed, shape=(33,), **case)
        for layer in pair:
            del layer.weight.main_grad

    over_steps(pair, 2, compare)
    assert all(torch.equal(a, b) for a, b in zip(*(layer.hq.buffers() for layer in pair), strict=True))


def raises(*args):
    raise AssertionError("the node asked Python for a product")


@pytest.mark.parametrize("fmt", [*EVERY, *EMULATED])
def test_no_emulated_product_is_left_to_python(fmt, device, monkeypatch):
    pair = layers(recipe_of(fmt), device)
    for layer in pair:
        layer.hq.backend = "emulated" if fmt in FORMATS[1:] else None
        layer.hq.replan(layer.hq.recipe)
        mh.prepare(layer).begin_step(1)
    monkeypatch.setattr(node, "product", raises)
    for main_grad in (None, torch.float32, torch.bfloat16):
        assert_same(*pair, main_grad=main_grad)


@pytest.mark.parametrize("fmt", [*EVERY, "halves"])
def test_products_that_python_runs(fmt, device):
    """A backend that the node does not know gets the payloads that it would get of Python."""
    pair = layers(recipe_of(fmt), device)
    for layer in pair:
        layer.hq.backend = "reference"
        layer.hq.replan(layer.hq.recipe)
        mh.prepare(layer).begin_step(1)
    for main_grad in (None, torch.float32):
        assert_same(*pair, main_grad=main_grad)


CASES = [
    dict(shape=(7,)), dict(shape=()), dict(shape=(0,)), dict(shape=(2, 3, 2)), dict(shape=(4, 3), turned=True),
    dict(main_grad=torch.float32), dict(main_grad=torch.bfloat16), dict(frozen=["x"]), dict(frozen=["weight"]),
    dict(frozen=["bias"]), dict(frozen=["x", "weight"]), dict(frozen=["weight", "bias"]), dict(again=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_shapes_and_gradients(case, dtype, device):
    blocks = recipe("fp8_block_e4m3", "fp8_delayed_e4m3", "fp8_rowwise_e4m3")
    for rcp in (recipe(**MIXED), recipe(**HALVES), blocks, recipe()):
        for bias in (True, False):
            if not bias and case.get("frozen") == ["x", "weight"]:
                continue
            assert_same(*layers(rcp, device, bias=bias, dtype=dtype), **case)


BLOCK, TILE = "fp8_block_e4m3", "fp8_block_e4m3:2d"
BLOCKS = dict(
    fprop={"input": BLOCK, "weight": TILE}, dgrad={"grad_output": "fp8_block_e5m2", "weight": TILE}, wgrad=BLOCK
)


@pytest.mark.parametrize("features", [(48, 32), (1024, 1024), (200, 136), (20, 12)])
@pytest.mark.parametrize("tokens", [16, 24, 5])
@pytest.mark.parametrize("fmt", ["fp8_current_e4m3", "fp8_delayed_e4m3", "fp8_rowwise_e4m3", "fp8_block_e4m3", "blocks"])
def test_sizes_that_native_gemms_pad(fmt, features, tokens, device):
    rcp = recipe(**BLOCKS) if fmt == "blocks" else recipe(fmt, fmt, fmt)
    for main_grad in (None, torch.float32):
        assert_same(*layers(rcp, device, features=features), shape=(tokens,), main_grad=main_grad)


def test_delayed_scales_and_cached_weights_over_steps(device):
    fmt = "fp8_delayed_e4m3:history=3"
    pair = layers(recipe(fmt, fmt, fmt), device)
    over_steps(pair, 3, lambda seed: assert_same(*pair, seed=seed))
    buffers = [dict(layer.hq.named_buffers()) for layer in pair]
    assert len(buffers[0]) == 12 and all(torch.equal(t, buffers[1][name]) for name, t in buffers[0].items())


SHIPPED = [name for name, _ in mh.list_recipes()]
RANDOM = dict(fprop="nvfp4:sr", dgrad="nvfp4:row_scaled,sr", wgrad="nvfp4:row_scaled,rht,sr")  # in every operand


def rounding(name, device):
    """Layers of a shipped recipe, or of one whose every operand draws random bits."""
    return layers(recipe(**RANDOM) if name == "random" else mh.Recipe.load(name), device)


@contextlib.contextmanager
def multiplied():
    """The bytes of every payload that Python multiplies, in order."""
    found, run = [], GemmPlan.run

    def spy(plan, gemm, a, b, *args, **kwargs):
        for s in (a, b):
            parts = [t.contiguous().reshape(-1).view(torch.uint8).clone() for t in s.buffers().values()]
            found.append((gemm, s.format, s.direction, s.shape, parts))
        return run(plan, gemm, a, b, *args, **kwargs)

    GemmPlan.run = spy
    try:
        yield found
    finally:
        GemmPlan.run = run


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", [*SHIPPED, "random"])
def test_shipped_recipes_over_steps(name, cached, device):
    """Outputs, gradients and scales of three steps of two microbatches, each of which draws its own random bits."""
    pair, seen = rounding(name, device), []

    def compare(seed):
        for layer in pair:
            layer.hq.weight_cache = layer.hq.weight_cache if cached else None
        seen.append(assert_same(*pair, seed=7))

    over_steps(pair, 3, compare)
    assert all(torch.equal(a, b) for a, b in zip(*(layer.hq.buffers() for layer in pair), strict=True))
    differ = any(not torch.equal(a, b) for a, b in zip(seen[0], seen[1]))
    assert differ == bool(pair[0].plan.draws)


@pytest.mark.parametrize("save_input", ["payload", "original"])
@pytest.mark.parametrize("whole", [True, False])  # whether keys know the tensor's K; others are Python's to cast with
@pytest.mark.parametrize("name", [*SHIPPED, "random"])
def test_payloads_are_python_s(name, whole, save_input, device):
    pair, found = rounding(name, device), []
    for layer in pair:
        layer.hq.backend, layer.hq.save_input = "reference", save_input
        layer.hq.replan(layer.hq.recipe)
        layer.hq.index_maps = layer.hq.index_maps if whole else {}
    without_node(pair[1])
    ctls = [mh.prepare(layer) for layer in pair]
    for layer, ctl in zip(pair, ctls):
        with multiplied() as payloads:
            for step in (1, 2):
                ctl.begin_step(step, num_microbatches=2)
                for microbatch in range(2):
                    ctl.microbatch(microbatch)
                    y, _ = results(layer, shape=(33,), seed=microbatch)
                    assert by_node(y) == (layer is pair[0])
        found.append(payloads)
    assert len(found[0]) == len(found[1]) == 4 * 6
    for (*a, parts), (*b, expected) in zip(*found):
        assert a == b and all(torch.equal(t, u) for t, u in zip(parts, expected, strict=True)), a


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["nvfp4", "random"])
def test_recomputed_forwards_draw_their_bits_again(name, reentrant, device):
    """With microbatches in between, the gradients are those without recomputation, by the node and by Python."""
    found = []
    for python, recompute in itertools.product((False, True), (False, True)):
        layer = rounding(name, device)[0]
        ctl = mh.prepare(layer)
        ctl.begin_step(3, num_microbatches=2)
        if python:
            without_node(layer)
        xs, ys = [randn(33, 48, seed=j).to(device).requires_grad_() for j in range(2)], []
        for j, x in enumerate(xs):
            ctl.microbatch(j)
            module = torch.nn.Sequential(layer, torch.nn.ReLU())
            run = functools.partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=reentrant)
            ys.append(run(x) if recompute else module(x))
            if recompute:
                ys.pop().sum().backward()
        for y in ys:  # backwards after both forwards
            y.sum().backward()
        found.append([*(x.grad for x in xs), layer.weight.grad])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_keys_that_stand_are_read_where_they_are(device, monkeypatch):
    """A captured call reads what the controller has written into the memory of its key."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    pair = rounding("random", device)
    without_node(pair[1])
    ctls = [mh.prepare(layer) for layer in pair]
    ctls[0].stand()
    rngs = []
    for step, microbatch in ((1, 0), (1, 1), (2, 0)):
        for ctl in ctls:
            ctl.begin_step(step, num_microbatches=2)
            ctl.microbatch(microbatch)
        (y, got), (_, expected) = (results(layer, shape=(33,), seed=step) for layer in pair)
        assert by_node(y) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        call = pair[0].hq.call(y.device, mh.linear.LOCAL, training=True)
        rngs.append({operand: rng.plain_words.data_ptr() for operand, rng in call.rng.items()})
    assert rngs[0] == rngs[1] == rngs[2] and len(rngs[0]) == 3


def test_gradients_go_where_the_weight_says(device):
    """`take_main_grad` is asked once a backward and comes before `main_grad`; None: autograd takes the gradient. Both may be
    set after the forward."""
    for late in (False, True):
        (layer, plain), asked = layers(recipe(**MIXED), device), []
        without_node(plain)
        for given in (torch.ones(32, 48, device=device), None):
            x, dy = randn(20, 48).to(device), randn(20, 32, seed=1).to(device)
            y = layer(x) if late else None
            layer.weight.main_grad = torch.full((32, 48), torch.nan)
            layer.weight.take_main_grad = lambda: (asked.append(1), given)[1]  # noqa: B023
            plain.weight.main_grad = None if given is None else torch.ones(32, 48, device=device)
            (y if late else layer(x)).backward(dy)
            plain(x).backward(dy)
            assert len(asked) == 1 and layer.weight.main_grad.isnan().all()
            asked.clear()
            if given is not None:
                assert torch.equal(given, plain.weight.main_grad) and layer.weight.grad_added_to_main_grad
                layer.weight.grad = plain.weight.grad = None
            del layer.weight.take_main_grad, layer.weight.main_grad
        assert torch.equal(layer.weight.grad, plain.weight.grad)


def one(fmt="mxfp8_e4m3", device="cpu", **kwargs):
    return layers(recipe(fmt, fmt, fmt), device, count=1, **kwargs)[0]


def test_a_second_derivative_is_refused(device):
    layer, x = one(device=device), randn(4, 48).to(device).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).float().pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().sum().backward()


def test_a_graph_is_gone_after_its_backward(device):
    for fmt in ("mxfp8_e4m3", "high_precision"):
        y = one(fmt, device)(randn(4, 48).to(device).requires_grad_())
        y.backward(torch.ones_like(y))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward(torch.ones_like(y))


def test_a_changed_tensor_that_was_kept_is_noticed(device):
    x = randn(4, 48).to(device).requires_grad_()
    layer = one("high_precision", device)
    y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y))
    layer = one("mxfp8_e4m3", device)  # keeps a payload instead
    y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    y.backward(torch.ones_like(y))


def test_hooks_on_tensors_parameters_and_the_node(device):
    layer, seen = one(device=device), []
    x = randn(4, 48).to(device).requires_grad_()
    y = layer(x)
    x.register_hook(lambda g: (seen.append("x"), g * 2)[1])
    y.register_hook(lambda g: (seen.append("y"), g * 2)[1])
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append("weight"))
    y.grad_fn.register_prehook(lambda grads: seen.append("before"))
    y.grad_fn.register_hook(lambda made, grads: seen.append(len(made)))
    y.sum().backward()
    assert set(seen) == {"x", "y", "weight", "before", 3}
    (plain,) = layers(recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"), device, count=1)
    z = x.detach().requires_grad_()
    without_node(plain)(z).backward(torch.full_like(y, 2))
    assert torch.equal(x.grad, z.grad * 2) and torch.equal(layer.weight.grad, plain.weight.grad)


def test_gradients_of_no_one(device):
    """No gradient comes: zeros, as torch's functions in Python get."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    layer, x = one(device=device), randn(4, 48).to(device).requires_grad_()
    Nothing.apply(layer(x)).sum().backward()
    assert x.grad is None or not x.grad.any()


def test_calls_that_are_left_to_python():
    layer, x = one(), randn(4, 48).requires_grad_()
    assert by_node(layer(x))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not by_node(layer(x))
    with torch.autocast("cpu"):
        assert not by_node(layer(x))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        layer(torch.autograd.forward_ad.make_dual(x, x))
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: layer(x).float().sum())(x)
    assert not by_node(layer(layer.cast_input(x)))
    with torch.no_grad():
        assert layer(x).grad_fn is None
    assert by_node(layer(x))


def test_weights_and_inputs_without_gradients():
    layer = one()
    layer.requires_grad_(False)
    assert layer(randn(4, 48)).grad_fn is None


def test_devices_without_kernels_have_no_node():
    layer = mh.HybridLinear(48, 32, recipe=recipe(), name="fc", dtype=torch.bfloat16, device="meta")
    y = layer(torch.empty(4, 48, dtype=torch.bfloat16, device="meta", requires_grad=True))
    assert not by_node(y) and layer.plan.lean.node is None
    y.sum().backward()
    assert layer.weight.grad.shape == (32, 48)


def test_parts_of_different_builds_are_not_called(monkeypatch):
    layer = one()
    monkeypatch.setattr(node, "serves", node.serves.__wrapped__)
    monkeypatch.setattr(node, "library", node.library.__wrapped__)
    assert node.serves("cpu")
    for part in (kernels.extension("cpu"), node.library()):
        with monkeypatch.context() as other:
            other.setattr(part, "INTERFACE", part.INTERFACE - 1)
            assert not node.serves("cpu") and lean.LeanCasts.of(layer.plan).node is None
            other.delattr(part, "INTERFACE")
            assert not node.serves("cpu")


def test_the_profiler_sees_names(device):
    layer, x = one(device=device), randn(4, 48).to(device).requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"LeanLinear", NODE} <= names


def test_recomputed_activations(device):
    pair = layers(recipe("fp8_delayed_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"), device)
    without_node(pair[1])
    for reentrant in (True, False):
        found = []
        for layer in pair:
            x = randn(4, 48).to(device).requires_grad_()
            layer.zero_grad()
            module = torch.nn.Sequential(layer, torch.nn.ReLU())
            torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum().backward()
            found.append([x.grad, layer.weight.grad, *layer.hq.buffers()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",)])
@pytest.mark.parametrize("fmt", ["high_precision", "fp8_rowwise_e4m3", "mxfp8_e4m3", "nvfp4"])
def test_kept_bytes_are_payloads_of_the_directions_that_backward_reads(fmt, frozen, device):
    pair = layers(recipe(fmt, fmt, fmt), device, features=(256, 128))
    kept = []
    for layer in (pair[0], without_node(pair[1])):
        x = randn(64, 256).to(device).requires_grad_("x" not in frozen)
        layer.weight.requires_grad_("weight" not in frozen)
        y = layer(x)
        kept.append([t.numel() * t.element_size() for t in y.grad_fn.saved_tensors if t is not None])
        y.backward(torch.ones_like(y))
    if fmt == "high_precision":
        assert kept[0] == kept[1]
    else:
        assert len(kept[0]) == 2 - len(frozen) and sum(kept[1]) <= sum(kept[0]) <= sum(kept[1]) + 256 * len(kept[0])


def test_nothing_is_kept_longer_than_the_graph():
    layer, x = one(), randn(4, 48).requires_grad_()
    y = layer(x)
    call = weakref.ref(y.grad_fn.call.plan.lean.node)
    assert y.grad_fn.needs_input_grad == (True, True, True)
    gone = weakref.ref(x)
    y.sum().backward()
    assert not y.grad_fn.saved_tensors
    del x, y
    gc.collect()
    assert gone() is None and call() is layer.plan.lean.node


def test_plans_with_their_nodes_can_be_copied_and_pickled():
    layer = one()
    x = randn(4, 48)
    call = layer.hq.call(x.device, mh.linear.LOCAL, training=True)
    wanted = layer.plan.lean.node(x, layer.weight, None, call)
    for again in (copy.deepcopy(layer.plan), pickle.loads(pickle.dumps(layer.plan))):
        assert again.lean.node is not layer.plan.lean.node
        assert torch.equal(again.lean.node(x, layer.weight, None, call), wanted)


class CastGradient(torch.autograd.Function):
    """Gives back a gradient cast as the linear before it casts it."""

    @staticmethod
    def forward(ctx, y):
        ctx.call, ctx.needs = y.grad_fn.call, y.grad_fn.needs_input_grad
        return y * 1

    @staticmethod
    def backward(ctx, dy):
        plan, shape = ctx.call.plan, dy.shape
        row, col = plan.lean.cast_gradient(dy.reshape(-1, shape[-1]), ctx.needs[0], ctx.needs[1], ctx.call)
        return HybridTensor.from_storages(row, col, shape, dy.dtype, plan.quantizers["grad_output"])


@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",)])
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "fp8_delayed_e5m2", "fp8_block_e4m3"])
def test_a_gradient_that_was_cast_before(fmt, frozen, device):
    found = []
    for before in (True, False):
        layer = one(fmt, device, bias=False)
        mh.prepare(layer).begin_step(1)
        x = randn(5, 4, 48).to(device).requires_grad_("x" not in frozen)
        layer.weight.requires_grad_("weight" not in frozen)
        y = layer(x)
        assert by_node(y) and lean.takes_payloads(y)
        if before:
            y = CastGradient.apply(y)
        y.backward(randn(5, 4, 32, seed=1).to(device))
        found.append([x.grad, layer.weight.grad, *(b for _, b in layer.hq.named_buffers())])
    for a, b in zip(*found, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "nvfp4"])
def test_a_gradient_that_is_a_piece_of_one_that_was_cast(fmt, device):
    """Its payloads are strided views."""
    found = []
    for python in (False, True):
        layer = one(fmt, device, bias=False)
        if python:
            without_node(layer)
        x = randn(32, 48).to(device).requires_grad_()
        y = layer(x)
        wide = torch.cat([randn(32, 32, seed=1), randn(32, 32, seed=2)], dim=1).to(device)
        row, col = layer.plan.quantizers["grad_output"].cast(wide, transposed=True)
        dy = HybridTensor.from_storages(row, col, wide.shape, wide.dtype, layer.plan.quantizers["grad_output"])[:, 32:]
        assert not dy.rowwise.qdata.is_contiguous()
        y.backward(dy)
        found.append([x.grad, layer.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found))


# ---- what the node hands to cuBLASLt, without a GPU: a library that multiplies what it is pointed to


class MatmulArgs(ctypes.Structure):
    """`mh::MatmulArgs` of csrc/entry.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "out")),
        *((name, ctypes.c_int64) for name in ("rows_a", "rows_b", "k")),
        *((name, ctypes.c_int) for name in ("type_a", "type_b", "type_out", "mode_a", "mode_b")),
        *((name, ctypes.c_void_p) for name in ("scale_a", "scale_b")), ("fast", ctypes.c_bool), ("add", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("factor", "constants", "workspace")), ("workspace_bytes", ctypes.c_int64),
        ("stream", ctypes.c_size_t), ("device", ctypes.c_int),
    ]  # fmt: skip


class Library:
    """Stands in for gemm/cublaslt.py and for `_C_lt`. `seen`: of every product, all but its pointers."""

    TYPES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.bfloat16: 2, torch.float32: 3}
    MODES = {"none": -1, "tensor": 0, "row": 1, "1x128": 2, "128x128": 3}
    WORKSPACE = cublaslt.WORKSPACE
    CONSTANTS = torch.arange(2.0)
    fits = takes = staticmethod(cublaslt.fits)

    def __init__(self):
        self.seen = []
        self._called = ctypes.CFUNCTYPE(None, ctypes.POINTER(MatmulArgs))(lambda args: self.matmul(args.contents))
        self._table = (ctypes.c_void_p * 1)(ctypes.cast(self._called, ctypes.c_void_p).value)
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.MATMUL = capsule(ctypes.addressof(self._table), b"megatron_hybrid.matmul", None)

    def library(self):
        return self

    def codes(self):
        return self.TYPES, self.MODES

    def constants(self, device):
        return self.CONSTANTS

    def multiply(self, a, b, out, *, dtypes, kinds=("none", "none"), scales=(None, None), fast=False, add=False, factor=None):
        types = [self.TYPES[dtype] for dtype in (*dtypes, out.dtype)]
        modes = [self.MODES[kind] for kind in kinds]
        pointers = [t.data_ptr() for t in (a, b, out)]
        factors = (None, None) if factor is None else (factor.data_ptr(), self.CONSTANTS.data_ptr())
        self.matmul(MatmulArgs(*pointers, *a.shape[:1], *b.shape, *types, *modes, *scales, fast, add, *factors))
        return out

    def matmul(self, args):
        names = ("rows_a", "rows_b", "k", "type_a", "type_b", "type_out", "mode_a", "mode_b", "fast", "add")
        factor = self._at(args.factor, 1, torch.float32).item() if args.factor else None
        assert factor is None or args.constants == self.CONSTANTS.data_ptr()
        self.seen.append({"factor": factor, **{name: getattr(args, name) for name in names}})
        a = self._read(args.a, args.type_a, args.rows_a, args.k, args.mode_a, args.scale_a)
        b = self._read(args.b, args.type_b, args.rows_b, args.k, args.mode_b, args.scale_b)
        out = self._at(args.out, args.rows_a * args.rows_b, {2: torch.bfloat16, 3: torch.float32}[args.type_out])
        out = out.view(args.rows_a, args.rows_b)
        made = (a @ b.T).mul_(1 if factor is None else factor)
        out.copy_(made + out.double() if args.add else made)

    @staticmethod
    def _at(address, count, dtype):
        size = count * dtype.itemsize
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)

    def _read(self, address, kind, rows, k, mode, scale):
        codes = self._at(address, rows * k, tuple(self.TYPES)[kind]).view(rows, k).double()
        if mode == -1:
            return codes
        blocks, tiles = -(-k // 128), -(-rows // 128)
        if mode == 2:
            scales = self._at(scale, blocks * rows, torch.float32).view(blocks, rows).T.repeat_interleave(128, 1)[:, :k]
        elif mode == 3:
            padded = -(-blocks // 4) * 4
            scales = self._at(scale, tiles * padded, torch.float32).view(tiles, padded)
            scales = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]
        else:
            scales = self._at(scale, rows if mode else 1, torch.float32).view(-1, 1)
        return codes * scales


@pytest.mark.parametrize("features", [(48, 32), (256, 384), (200, 136), (20, 12)])
@pytest.mark.parametrize("tokens", [16, 5, 130, 0])
@pytest.mark.parametrize("fmt", ["fp8_current_e4m3", "fp8_delayed_e4m3", "fp8_rowwise_e4m3", "fp8_block_e4m3", "blocks"])
def test_the_library_is_told_what_python_tells_it(fmt, tokens, features, monkeypatch):
    rcp = recipe(**BLOCKS) if fmt == "blocks" else recipe(fmt, fmt, fmt)
    library = Library()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    for module in (node, scaled_mm):
        monkeypatch.setattr(module, "cublaslt", library)
    for total in (None, torch.float32, torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            pair = layers(rcp, features=features, dtype=dtype)
            for layer in pair:
                for step in layer.plan.steps().values():
                    run = scaled_mm.ScaledMmBackend().prepare(step.pair)
                    object.__setattr__(step, "multiply", dataclasses.replace(run, direct=True))
            library.seen.clear()
            assert_same(*pair, shape=(tokens,), main_grad=total)
            products = len(library.seen) // 2
            assert products == (3 if tokens else 0)
            assert library.seen[:products] == library.seen[products:]


@pytest.fixture
def in_bf16(monkeypatch):
    """Has the CPU decode to bf16 what a GPU decodes to it."""
    monkeypatch.setattr(backends.EmulatedBackend, "bf16_devices", ("cpu", "cuda"))
    monkeypatch.setattr(cublaslt, "library", lambda: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(24,), (1,), (5, 3), (0,)])
@pytest.mark.parametrize("fmt", [*FORMATS[1:], *EMULATED])
def test_operands_decoded_to_bf16_as_on_gpus(fmt, shape, dtype, in_bf16):
    for main_grad in (None, torch.float32, torch.bfloat16):
        for features in ((48, 32), (1, 20)):
            assert_same(*layers(recipe_of(fmt), dtype=dtype, features=features), shape=shape, main_grad=main_grad)


@pytest.mark.parametrize("features", [(48, 32), (200, 136), (20, 12), (44, 32)])
@pytest.mark.parametrize("tokens", [16, 5, 1, 0])
@pytest.mark.parametrize("fmt", [*FORMATS[1:], *EMULATED])
def test_the_library_is_told_the_factors_that_python_tells_it(fmt, tokens, features, in_bf16, monkeypatch):
    library = Library()
    for module in (node, backends):
        monkeypatch.setattr(module, "cublaslt", library)
    for total in (None, torch.float32, torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            library.seen.clear()
            assert_same(*layers(recipe_of(fmt), features=features, dtype=dtype), shape=(tokens,), main_grad=total)
            products = len(library.seen) // 2
            assert library.seen[:products] == library.seen[products:]
            if fmt == "nvfp4" and features == (48, 32) and tokens == 16:
                assert products == (2 if total is torch.bfloat16 else 3)
