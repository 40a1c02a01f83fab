"""The C++ autograd node of the grouped linear gives the bits, the launches, the counts and the behaviour of Python's
function (properties 12, 18, 25, 30, 42, 43). On the CPU by kernels that stand in for CUDA's (group_kernels.py)."""

import contextlib
import copy
import pickle

import pytest
import torch
from linear_cases import randn, recipe
from test_grouped_tokens import TOKENS, routed

import megatron_hybrid as mh
from megatron_hybrid import grouped_node, kernels, node
from megatron_hybrid.groups import Groups
from megatron_hybrid.permutation import RowMap, RowOrder
from megatron_hybrid.plan import PlanError

pytest.importorskip("triton", reason="the map of blocks is in its module")
from group_kernels import as_on_hopper  # noqa: E402

from megatron_hybrid import gated_cast  # noqa: E402

pytestmark = pytest.mark.skipif(node.library() is None, reason="this build has no _C_node")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs Hopper")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]

K, N, EXPERTS = 256, 512, 4
SPLITS = [[44, 20, 7, 1], [0, 130, 0, 33], [1, 0, 0, 0]]
E5M2 = {"grad_output": "fp8_block_e5m2", "weight": "fp8_block_e4m3:2d"}
RECIPES = {
    "fp8_block": mh.Recipe.load("fp8_block"),
    "fp8_rowwise": mh.Recipe.load("fp8_rowwise"),
    "fast": recipe("fp8_rowwise_e4m3", {"grad_output": "fp8_rowwise_e5m2:pow2", "weight": "fp8_rowwise_e4m3"},
                   "fp8_rowwise_e4m3:eps=1e-3",
                   top={"accumulate": {"fprop": "fast", "dgrad": "full", "wgrad": "full"}}),
    "rows, then blocks": recipe("fp8_rowwise_e4m3", E5M2, {"grad_output": "fp8_block_e5m2", "input": "fp8_block_e4m3"}),
    "blocks, then rows": recipe({"input": "fp8_block_e4m3", "weight": "fp8_block_e4m3:2d"}, "fp8_rowwise_e4m3",
                                "fp8_rowwise_e4m3"),
    "derived weight": recipe("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "fp8_rowwise_e4m3",
                             columnwise_source={"weight": "rowwise_dequantized"}),
    "derived": recipe("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "fp8_block_e4m3",
                      columnwise_source={"input": "rowwise_dequantized"}),
}  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def stand_in(request, monkeypatch):
    """The stand-in for the kernels; None on a GPU."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cuda":
        yield None
        return
    found = as_on_hopper(monkeypatch)
    yield found
    kernels._spec.cache_clear()
    assert not found.errors, found.errors


def grouped(name, device="cpu", *, quantized=False, cached=True, bias=False, shape=(N, K), prefix="fc1", **made):
    rcp = RECIPES[name]
    torch.manual_seed(1)
    with mh.quantized_model_init(rcp, True) if quantized else contextlib.nullcontext():
        made = dict(dtype=torch.bfloat16, recipe=rcp, name=f"experts.{prefix}", **made)
        m = mh.HybridGroupedLinear(EXPERTS, shape[1], shape[0], bias, **made).to(device)
    if cached:
        mh.prepare(m, seed=3).begin_step(1)
    else:
        for runtime in m.hq:
            runtime.weight_cache = None
    return m


def pair(*args, **kwargs):
    """The same linear twice: one by the node, one by Python."""
    first, second = grouped(*args, **kwargs), grouped(*args, **kwargs)
    assert grouped_node.why_not(first.how) is None
    return first, by_python(second)


def by_python(m):
    m.how.__dict__["node"] = None
    return m


def is_by_node(y) -> bool:
    return type(y.grad_fn) is node.library().GroupedBackward


def gradients_of(m, main_grad):
    return [p.main_grad if main_grad is not None else p.grad for p in m.parameters() if p.requires_grad]


def results(m, x, dy, splits, *, main_grad=None, frozen=(), times=1, stand_in=None):
    """(y, [y, gradients], what kernels were told) of a step. main_grad: gives a weight's, of its shape."""
    m.zero_grad()
    for p in m.parameters():
        p.requires_grad_("weight" not in frozen)
        if main_grad is not None:
            p.main_grad = main_grad(p)
    if stand_in is not None:
        stand_in.seen.clear()
    x = x.detach().requires_grad_("x" not in frozen)
    y = m(x, splits)
    for i in range(times):
        y.backward(dy, retain_graph=i + 1 < times)
    found = [y.detach(), x.grad, *gradients_of(m, main_grad)]
    return y, [t for t in found if t is not None], [] if stand_in is None else list(stand_in.seen)


def data(rows, device="cpu", rows_out=None, shape=(N, K)):
    return randn(rows, shape[1], seed=0).to(device), randn(rows_out or rows, shape[0], seed=1).to(device)


def assert_same(pair, x, dy, splits, stand_in=None, **case):
    y, got, told = results(pair[0], x, dy, splits, stand_in=stand_in, **case)
    y_plain, wanted, told_plain = results(pair[1], x, dy, splits, stand_in=stand_in, **case)
    assert is_by_node(y) and not is_by_node(y_plain)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
    assert told == told_plain
    assert pair[0].plans()[0].calls == pair[1].plans()[0].calls
    return got


def on_device(splits, rows, device):
    """Groups whose sizes only the device knows."""
    sizes = torch.tensor(splits, dtype=torch.int32, device=device)
    groups = Groups(splits, EXPERTS, rows, sizes.device)  # with the index that tensors have
    groups._device, groups._host = sizes, None
    return groups


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("known", [True, False])
def test_bits_and_launches_are_python_s(name, splits, known, device, stand_in):
    x, dy = data(sum(splits), device)
    both = pair(name, device)
    for _ in range(2):  # the second finds the weight in its cache
        got = assert_same(both, x, dy, splits if known else on_device(splits, sum(splits), device), stand_in)
    assert all(t.any() for t in got)


def test_results_are_near_those_of_experts_one_by_one():
    """What the stand-in multiplies is what it says."""
    for name in RECIPES:
        m, alone = grouped(name), grouped(name, backend="reference")
        alone.hq.one_by_one = True
        x, dy = data(72)
        for a, b in zip(results(m, x, dy, SPLITS[0])[1], results(alone, x, dy, SPLITS[0])[1], strict=True):
            assert (a.double() - b.double()).norm() < 2.0**-7 * b.double().norm(), name


@pytest.mark.parametrize("name", ["fp8_block", "fp8_rowwise"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(name, dtype, device, stand_in):
    first, second = (grouped(name, device).to(dtype) for _ in range(2))
    x, dy = (t.to(dtype) for t in data(72, device))
    assert_same((first, by_python(second)), x, dy, SPLITS[0], stand_in)


@pytest.mark.parametrize("frozen", [["x"], ["weight"]])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_rowwise"])
def test_one_gradient_alone(name, frozen, device, stand_in):
    x, dy = data(72, device)
    assert_same(pair(name, device), x, dy, SPLITS[0], stand_in, frozen=frozen)


@pytest.mark.parametrize("strides", ["one element", "wide", "turned"])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_rowwise"])
def test_gradients_and_inputs_of_any_strides(name, strides, device, stand_in):
    def strided(t):
        wide = torch.zeros(t.shape[0], t.shape[1] + 24, dtype=t.dtype, device=t.device)
        wide[:, 8 : 8 + t.shape[1]] = t
        found = {
            "one element": t[:1, :1].expand(t.shape),
            "wide": wide[:, 8 : 8 + t.shape[1]],
            "turned": t.t().contiguous().t(),
        }
        return found[strides]

    x, dy = (strided(t) for t in data(72, device))
    assert_same(pair(name, device), x, dy, SPLITS[0], stand_in)


MAIN_GRADS = {
    "FP32": lambda p: torch.ones(p.shape, device=p.device),
    "bf16": lambda p: torch.ones(p.shape, device=p.device, dtype=torch.bfloat16),
    "strided": lambda p: torch.ones(*p.shape[:-1], p.shape[-1] + 8, device=p.device)[..., : p.shape[-1]],
    "anywhere": lambda p: torch.ones(p.numel() + 1, device=p.device)[1:].view(p.shape),
}


@pytest.mark.parametrize("where", MAIN_GRADS)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_rowwise"])
def test_gradients_go_to_main_grad(name, quantized, where, device, stand_in):
    both, (x, dy) = pair(name, device, quantized=quantized), data(72, device)
    assert_same(both, x, dy, [44, 20, 0, 8], stand_in, main_grad=MAIN_GRADS[where], times=2)
    for m in both:
        for p in m.parameters():
            assert p.grad_added_to_main_grad and p.grad.shape == p.shape and p.grad.dtype == p.dtype


@pytest.mark.parametrize("gives", [True, False])
def test_gradients_go_where_the_weight_says(gives, device, stand_in):
    both, (x, dy), given = pair("fp8_block", device), data(72, device), []
    for m in both:
        def take(m=m):
            given.append(torch.ones(m.weight.shape, device=device) if gives else None)
            return given[-1]

        m.weight.take_main_grad = take
    found = [results(m, x, dy, SPLITS[0])[1][: 2 if gives else 3] for m in both]
    assert all(map(torch.equal, *found)) and len(given) == 2 and (not gives or torch.equal(*given))
    assert both[0].plans()[0].calls == both[1].plans()[0].calls


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("quantized", [True, False])
def test_weights_that_live_quantized_and_that_are_cast_in_every_call(name, cached, quantized, device, stand_in):
    x, dy = data(72, device)
    both = pair(name, device, quantized=quantized, cached=cached)
    for _ in range(2):
        assert_same(both, x, dy, [44, 20, 0, 8], stand_in)


def test_a_weight_written_between_forward_and_backward_is_noticed(device):
    for m in pair("fp8_block", device, quantized=True):
        x, dy = data(72, device)
        y = m(x.requires_grad_(), SPLITS[0])
        m.hq.stack.columnwise.qdata.fill_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)


def mapped(most: int, device):
    """(a map of copies, or of rows in another order for one a token; the sizes of the groups)."""
    chosen = routed(most, device)
    if most > 1:
        return RowMap.of(chosen, TOKENS * most), chosen.sum(0)
    counts = torch.tensor([[3, 10, 0, 7], [5, 9, 0, 11]], dtype=torch.int32, device=device)
    order = RowOrder.by_expert(counts, 0, EXPERTS, TOKENS)
    return order, order.sizes


@pytest.mark.parametrize("told", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("most", [1, 2, EXPERTS])
@pytest.mark.parametrize("name", RECIPES)
def test_tokens_through_a_map(name, most, told, device, stand_in):
    where, sizes = mapped(most, device)
    copies, sums = (where if t else None for t in told)
    T = TOKENS * most
    groups = Groups(sizes if device == "cuda" else sizes.tolist(), EXPERTS, T, sizes.device)
    x, dy = data(TOKENS if copies else T, device, TOKENS if sums else T)
    both = pair(name, device)
    splits = groups.between(copies=copies, sums=sums)
    assert_same(both, x, dy, splits, stand_in)
    for frozen in (["x"], ["weight"]):
        assert_same(both, x, dy, splits, stand_in, frozen=frozen)


def layer(name, device, F, node_):
    """Experts' linears with SwiGLU between them."""
    fc1 = grouped(name, device, cached=False, shape=(2 * F, K))
    fc2 = grouped(name, device, cached=False, shape=(K, F), prefix="fc2")
    mh.prepare(torch.nn.ModuleList((fc1, fc2))).begin_step(1)
    if not node_:
        by_python(fc1), by_python(fc2)
    return fc1, fc2


@pytest.mark.parametrize("name", ["fp8_block", "fp8_rowwise", "rows, then blocks"])
@pytest.mark.parametrize("most", [None, 1, 2])
@pytest.mark.parametrize("main_grad", [False, True])
def test_payloads_that_swiglu_makes(name, most, main_grad, device, stand_in):
    """fc2's input and fc1's gradient are cast as they are computed, and stay so where the nodes are the linears."""
    F, splits, found = 256, [44, 0, 7, 39], []
    T = sum(splits) if most is None else TOKENS * most
    where = None
    if most is not None:
        where, sizes = mapped(most, device)
        splits = sizes.tolist()
    for node_ in (True, False):
        fc1, fc2 = layer(name, device, F, node_)
        groups = on_device(splits, T, device)
        x = randn(T if where is None else TOKENS, K, seed=1).to(device).requires_grad_()
        weights, seen = torch.linspace(0.1, 1, T, device=device).requires_grad_(), []
        for m in (fc1, fc2) if main_grad else ():
            m.weight.main_grad = torch.ones(m.weight.shape, device=device)
        h = fc1(x, groups.between(copies=where))
        assert is_by_node(h) == node_
        forth, back = fc2.call_for_computed(h, groups.between(sums=where)), gated_cast.call_for_gradient(h)
        assert forth is not None and back is h.grad_fn.call
        y = gated_cast.WeightedSwigluCast.apply(h, weights, None, forth, back)
        h.grad_fn.register_prehook(lambda grads: seen.append(type(grads[0])))
        out = fc2(y, groups.between(sums=where))
        assert is_by_node(out) == node_
        out.backward(randn(*out.shape, seed=2).to(device))
        assert seen == [type(y)]
        grads = [m.weight.main_grad if main_grad else m.weight.grad for m in (fc1, fc2)]
        found.append([out.detach(), x.grad, weights.grad, *grads])
        if stand_in is not None:
            found[-1].append(list(stand_in.seen))
            stand_in.seen.clear()
    for a, b in zip(*found, strict=True):
        assert a == b if isinstance(a, list) else a.any() and torch.equal(a, b)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
def test_no_host_wait_and_graphs_with_new_splits(name, quantized, main_grad, device):
    """Captured once with the node, replayed with other groups of the same total: Python's eager bits."""
    m, plain = (grouped(name, device, quantized=quantized) for _ in range(2))
    by_python(plain)
    x, dy = data(97, device)
    sizes = torch.tensor([44, 20, 32, 1], dtype=torch.int32, device=device)

    def step(m):
        m.zero_grad()
        for p in m.parameters() if main_grad else ():
            p.main_grad.zero_()
        leaf = x.detach().requires_grad_()
        y = m(leaf, sizes)
        assert is_by_node(y) == (m is not plain)
        y.backward(dy)
        return y.detach(), leaf.grad, *gradients_of(m, main_grad or None)

    for p in (*m.parameters(), *plain.parameters()) if main_grad else ():
        p.main_grad = torch.zeros(p.shape, device=device)
    step(m)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(m)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(m)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(m)
    for splits in ([44, 20, 32, 1], [0, 97, 0, 0], [1, 7, 44, 45]):
        sizes.copy_(torch.tensor(splits, dtype=torch.int32))
        graph.replay()
        replayed = [t.clone() for t in captured]
        for f, e in zip(replayed, step(plain), strict=True):
            assert torch.equal(f, e), splits


@pytest.mark.parametrize("most", [None, 1, 2])
def test_tokens_that_were_quantized_before(most, device, stand_in):
    """As they come from other ranks: their columns derive from rows."""
    where, sizes = (None, torch.tensor(SPLITS[0])) if most is None else mapped(most, device)
    T = int(sizes.sum())
    x, dy = data(TOKENS if where else T, device, T)
    groups = Groups(sizes if device == "cuda" else sizes.tolist(), EXPERTS, T, x.device)
    found = []
    for m in pair("derived", device):
        held = m.plans()[0].quantizers["input"].quantize(x, columnwise=False).requires_grad_()
        y = m(held, groups.between(copies=where))
        assert is_by_node(y) == (not found)
        y.backward(dy)
        told = [] if stand_in is None else list(stand_in.seen)
        found.append([y.detach(), held.grad, m.weight.grad, told, m.plans()[0].calls])
        if stand_in is not None:
            stand_in.seen.clear()
    for a, b in zip(*found, strict=True):
        assert a.any() and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_parts_of_payloads_that_begin_anywhere_are_python_s(device):
    """Its products read them by other kernels where those of CUDA cannot."""
    x, dy = data(73, device)
    found = []
    for m in pair("derived", device):
        held = m.plans()[0].quantizers["input"].quantize(x, columnwise=False)[1:].requires_grad_()
        assert held.rowwise.scale.data_ptr() % 16
        y = m(held, SPLITS[0])
        assert not is_by_node(y)
        y.backward(dy[1:])
        found.append([y.detach(), held.grad, m.weight.grad])
    assert all(map(torch.equal, *found)) and all(t.any() for t in found[0])


# ---- autograd


def test_backward_twice(device, stand_in):
    x, dy = data(72, device)
    both = pair("fp8_rowwise", device)
    assert_same(both, x, dy, SPLITS[0], stand_in, times=2)
    for m in both:
        y, *_ = results(m, x, dy, SPLITS[0])
        with pytest.raises(RuntimeError, match="second time"):
            y.backward(dy)


def test_what_is_kept_is_released(device):
    m, (x, dy) = grouped("fp8_block", device), data(72, device)
    y = m(x.requires_grad_(), SPLITS[0])
    assert len(y.grad_fn.saved_tensors) == 3
    y.backward(dy)
    assert y.grad_fn.saved_tensors == []


def test_no_more_is_kept_than_by_python(device):
    sizes = []
    for m in pair("fp8_block", device):
        y = m(data(72, device)[0].requires_grad_(), SPLITS[0])
        sizes.append(sum(t.numel() * t.element_size() for t in y.grad_fn.saved_tensors))
    assert sizes[1] <= sizes[0] < sizes[1] + 256  # scales begin at a multiple of 256 bytes


def test_second_derivatives_are_refused(device):
    for m in pair("fp8_block", device):
        x, dy = data(72, device)
        y = m(x.requires_grad_(), SPLITS[0])
        (dx,) = torch.autograd.grad(y, x, dy.requires_grad_(), create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


def test_recomputation_and_saved_tensor_hooks(device):
    """Recomputed forwards have hooks: they run by Python, with the same bits."""
    from torch.utils.checkpoint import checkpoint

    m, (x, dy) = grouped("fp8_block", device), data(72, device)
    wanted = results(m, x, dy, SPLITS[0])[1]
    for reentrant in (True, False):
        m.zero_grad()
        leaf = x.clone().requires_grad_()
        y = checkpoint(m, leaf, SPLITS[0], use_reentrant=reentrant)
        y.backward(dy)
        assert all(map(torch.equal, (y.detach(), leaf.grad, m.weight.grad), wanted))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = m(x.requires_grad_(), SPLITS[0])
    assert not is_by_node(y)


def test_hooks_of_the_node(device):
    m, (x, dy), seen = grouped("fp8_block", device), data(72, device), []
    y = m(x.requires_grad_(), SPLITS[0])
    y.grad_fn.register_prehook(lambda grads: seen.append(("before", len(grads))))
    y.grad_fn.register_hook(lambda made, grads: seen.append(("after", len(made))))
    y.backward(dy)
    assert seen == [("before", 1), ("after", 2)] and y.grad_fn.name() == "GroupedLinearBackward"


def test_calls_that_are_python_s(device):
    """Biases, evaluation, rows that are none, inputs quantized before."""
    m, (x, dy) = grouped("fp8_block", device, bias=True), data(72, device)
    y = m(x.requires_grad_(), SPLITS[0])
    assert type(y.grad_fn).__name__ == "GroupedAtOnceFunctionBackward"
    m = grouped("fp8_block", device)
    with torch.no_grad():
        evaluated = m(x, SPLITS[0])
    assert torch.equal(evaluated, m(x, SPLITS[0]))
    empty = m(x[:0], [0] * EXPERTS)
    empty.sum().backward()
    m.weight.requires_grad_(False)
    assert not m(x.detach(), SPLITS[0]).requires_grad
    held = m.plans()[0].quantizers["input"].quantize(x.detach()).requires_grad_()
    assert not is_by_node(m(held, SPLITS[0]))


def test_a_backward_without_memory_is_refused_by_name(device):
    """Kernels of all groups are no operators, and an address of nothing ends the process."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for m in pair("fp8_block", device):
        x, dy = data(72, device)
        y = m(x.requires_grad_(), SPLITS[0])
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            with pytest.raises(PlanError, match="experts.fc1.*kernels of all groups are no operators"):
                torch.autograd.grad(y, x, mode.from_tensor(dy))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_run_by_the_node_too(again, device):
    m, (x, dy) = grouped("fp8_block", device, cached=False), data(72, device)
    wanted = results(m, x, dy, SPLITS[0])[1]
    y, found, _ = results(again(m), x, dy, SPLITS[0])
    assert is_by_node(y) and all(map(torch.equal, found, wanted))


WHY_NOT = {
    "high precision": (recipe("high_precision", "high_precision", "high_precision"), "fprop runs by grouped_mm"),
    "mxfp8": (recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"), "fprop runs by grouped_decoding"),
    "derived": (recipe("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "fp8_rowwise_e4m3",
                       columnwise_source={"grad_output": "rowwise_dequantized"}),
                "grad_output is not cast by rows and columns in one read"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHY_NOT)
def test_plans_that_are_python_s_say_why(name, monkeypatch):
    rcp, why = WHY_NOT[name]
    monkeypatch.setitem(RECIPES, name, rcp)
    m = grouped(name)
    assert grouped_node.why_not(m.how) == why and m.how.node is None


def test_weights_whose_memory_comes_and_goes_are_python_s():
    m = grouped("fp8_block")
    for runtime in m.hq:
        runtime.keep_no_weight()
    assert grouped_node.why_not(m.how) == "weight is kept as its original"


def test_parts_of_another_build_are_left_alone(monkeypatch, stand_in):
    monkeypatch.setattr(stand_in, "INTERFACE", 0, raising=False)
    assert grouped_node.why_not(grouped("fp8_block").how) == "FP8 GEMMs of all groups are not built in CUDA"
