"""Linears that run by the C++ node, where tensors have no memory or somebody looks at operators: they give what they give
without it (properties 18 and 30), in forward, in backward alone, and never touch memory that is not there."""

import pytest
import torch
from linear_cases import randn, recipe
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import megatron_hybrid as mh
from megatron_hybrid import node
from megatron_hybrid.gemm import backends, cublaslt
from megatron_hybrid.tensor import HybridTensor

pytestmark = pytest.mark.skipif(node.library() is None, reason="this build has no _C_node")
FORMATS = [
    "high_precision", "mxfp8_e4m3", "nvfp4:row_scaled", "nvfp4:sr", "fp8_rowwise_e5m2", "fp8_delayed_e4m3:history=3",
    "halves", "derived",
]  # fmt: skip
BY_NAME = {
    "halves": dict(fprop={"input": "high_precision", "weight": "fp8_block_e4m3"}, dgrad={"grad_output": "mxfp8_e4m3"}),
    "derived": dict(fprop="mxfp8_e4m3", dgrad="mxfp8_e4m3", wgrad={"grad_output": "mxfp8_e4m3"},
                    columnwise_source={"input": "rowwise_dequantized", "weight": "rowwise_dequantized"}),
}  # fmt: skip


@pytest.fixture(params=FORMATS)
def fmt(request):
    return request.param


def linear(fmt, **kwargs):
    torch.manual_seed(0)
    rcp = recipe(**BY_NAME[fmt]) if fmt in BY_NAME else recipe(fmt, fmt, fmt)
    layer = mh.HybridLinear(48, 32, recipe=rcp, name="fc", dtype=torch.bfloat16, **kwargs)
    if layer.plan.draws:
        mh.prepare(layer, seed=1).begin_step(1)
        layer.hq.weight_cache = None
    return layer


def inputs(seed=0):
    return randn(5, 4, 48, seed=seed).requires_grad_()


def by_node(y) -> bool:
    return type(y.grad_fn) is node.library().LinearBackward


def assert_fake(layer, x, *also):
    for t in (x.grad, layer.weight.grad, layer.bias.grad, *also):
        assert type(t) is FakeTensor and t.device.type == "cpu"
    assert x.grad.shape == x.shape and layer.weight.grad.shape == (32, 48) and layer.bias.grad.shape == (32,)
    assert {t.dtype for t in (x.grad, layer.weight.grad, layer.bias.grad)} == {torch.bfloat16}


def faked(layer, mode):
    """The layer with fake parameters and buffers."""
    for module in layer.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(mode.from_tensor(p.detach())))
        for name, b in module.named_buffers(recurse=False):
            setattr(module, name, mode.from_tensor(b))
    return layer


def test_a_layer_made_of_fake_tensors(fmt):
    with FakeTensorMode():
        layer, x = linear(fmt), torch.empty(5, 4, 48, dtype=torch.bfloat16).requires_grad_()
        y = layer(x)
        y.sum().backward()
    assert_fake(layer, x, y)


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_in_their_mode_and_out_of_it(fmt, inside):
    mode = FakeTensorMode(allow_non_fake_inputs=fmt == "nvfp4:sr")  # whose keys are real
    layer, x = faked(linear(fmt), mode), mode.from_tensor(inputs())
    if inside:
        with mode:
            y = layer(x)
            y.sum().backward()
    else:
        y = layer(x)
        y.sum().backward()
    assert_fake(layer, x, y)


def test_real_tensors_in_a_fake_mode(fmt):
    layer, x = linear(fmt), inputs()
    before = {name: t.clone() for name, t in layer.state_dict().items() if torch.is_tensor(t)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = layer(x)
        assert type(y) is FakeTensor and not by_node(y)
        y.sum().backward()
    assert_fake(layer, x, y)
    assert all(torch.equal(t, layer.state_dict()[name]) for name, t in before.items())


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("how", ["mode", "gradient"])
def test_a_backward_without_memory(fmt, how, python):
    layer, x = linear(fmt), inputs()
    if python:
        layer.plan.lean.node = None
    y, mode = layer(x), FakeTensorMode(allow_non_fake_inputs=True)
    assert by_node(y) != python
    calls = dict(layer.plan.calls)
    dy = torch.ones_like(y)
    if how == "mode":
        with mode:
            y.backward(dy)
    else:
        y.backward(mode.from_tensor(dy))
    assert_fake(layer, x)
    assert {gemm for gemm, _ in layer.plan.calls - type(layer.plan.calls)(calls)} == {"dgrad", "wgrad"}


def test_payloads_without_memory():
    """A gradient that comes as payloads of fake tensors."""
    layer, x = linear("mxfp8_e4m3", bias=False), inputs()
    y, mode = layer(x), FakeTensorMode(allow_non_fake_inputs=True)
    quantizer = layer.plan.quantizers["grad_output"]
    with mode:
        row, col = quantizer.cast(torch.empty(20, 32, dtype=torch.bfloat16), transposed=True)
    dy = HybridTensor.from_storages(row, col, y.shape, y.dtype, quantizer)
    assert not node.has_memory(dy)
    dx, dw, _ = y.grad_fn(dy)
    assert dx.shape == x.shape and dw.shape == layer.weight.shape


def test_meta(fmt):
    with torch.device("meta"):
        made = linear(fmt)
    moved = linear(fmt)
    moved(inputs()).sum().backward()
    moved.zero_grad()
    for layer in (made, moved.to("meta")):
        x = torch.empty(5, 4, 48, dtype=torch.bfloat16, device="meta").requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert y.is_meta and x.grad.is_meta and layer.weight.grad.is_meta and layer.bias.grad.is_meta


def test_real_tensors_where_new_ones_are_meta(fmt):
    found = []
    for default in ("cpu", "meta"):
        layer, x = linear(fmt), inputs()
        with torch.device(default):
            y = layer(x)
            y.backward(torch.ones_like(y))
        assert by_node(y)
        found.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("wrong", ["input", "gradient"])
def test_one_meta_tensor_is_an_error(wrong):
    layer, x = linear("mxfp8_e4m3"), inputs()
    with pytest.raises(RuntimeError, match="meta"):
        if wrong == "input":
            layer(x.detach().to("meta").requires_grad_())
        else:
            y = layer(x)
            y.backward(torch.ones_like(y, device="meta"))


def step(layer, x):
    x = x.detach().requires_grad_()
    y = layer(x)
    return y, *torch.autograd.grad(y.float().square().sum(), [x, layer.weight, layer.bias])


@pytest.mark.parametrize("kind", ["real", "fake"])
def test_a_graph_of_operators_computes_what_the_layer_does(fmt, kind):
    layer = linear(fmt)
    buffers = [b.clone() for b in layer.buffers()]

    def anew(x):
        for b, old in zip(layer.buffers(), buffers):
            b.copy_(old)
        return step(layer, x)

    traced = make_fx(anew, tracing_mode=kind, _allow_non_fake_inputs=True)(inputs())
    for a, b in zip(traced(inputs(seed=5)), anew(inputs(seed=5)), strict=True):
        assert torch.equal(a, b)


class Seen(TorchDispatchMode):
    """Operators that compute a product, with the dtypes of what they read, in order."""

    NAMES = "mm", "addmm", "_to_copy", "mul", "mul_", "add_", "addcmul_"

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.NAMES:
            self.calls.append((str(func), *(a.dtype for a in args if torch.is_tensor(a))))
        return func(*args, **(kwargs or {}))


GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])


@pytest.mark.parametrize("main_grad", [None, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "cpu, as a GPU does", GPU])
def test_modes_that_look_at_a_backward_see_what_they_see_of_python_s(fmt, device, main_grad, monkeypatch):
    if device == "cpu, as a GPU does":
        monkeypatch.setattr(backends.EmulatedBackend, "bf16_devices", ("cpu", "cuda"))
        monkeypatch.setattr(cublaslt, "library", lambda: None)
    device, found = device[:4].rstrip(","), []
    for python in (False, True):
        layer = linear(fmt).to(device)
        if python:
            layer.plan.lean.node = None
        if main_grad:
            layer.weight.main_grad = torch.ones(32, 48, dtype=main_grad, device=device)
        x = inputs().detach().to(device).requires_grad_()
        y = layer(x)
        assert by_node(y) != python
        with torch.autograd.set_multithreading_enabled(False), Seen() as seen:
            y.backward(torch.ones_like(y))
        found.append((seen.calls, [x.grad, layer.weight.grad if main_grad is None else layer.weight.main_grad]))
    (calls, grads), (wanted, theirs) = found
    assert calls == wanted
    assert device != "cpu" or sum("mm" in name for name, *_ in calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(grads, theirs))


def test_flops_are_counted(fmt):
    layer, x = linear(fmt), inputs()
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert not by_node(y) and backward.get_total_flops() == 2 * forward.get_total_flops() == 2 * 2 * 20 * 32 * 48
    y = layer(x)
    with torch.autograd.set_multithreading_enabled(False), FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert by_node(y) and backward.get_total_flops() == 2 * 2 * 20 * 32 * 48


def test_layers_that_are_compiled_and_layers_that_are_not_take_turns(fmt):
    """The same module by the node, compiled, and by the node again."""
    torch._dynamo.reset()  # it would take what differs between formats for sizes that change, here and in later tests
    layer = linear(fmt)
    buffers = [b.clone() for b in layer.buffers()]
    compiled, found = torch.compile(layer, backend="aot_eager"), []
    for run in (layer, compiled, layer):
        for b, old in zip(layer.buffers(), buffers):
            b.copy_(old)
        x = inputs()
        y = run(x)
        assert by_node(y) == (run is layer)
        layer.zero_grad()
        y.backward(torch.ones_like(y))
        found.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    torch._dynamo.reset()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
