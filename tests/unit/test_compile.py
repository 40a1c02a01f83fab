"""torch.compile(fullgraph=True) through quantize, gemm and decode: eager's bits. cases.md 89."""

import shutil

import pytest
import torch
from tensor_cases import assert_same_storage, assert_same_tensor, keys, tensor

import megatron_hybrid as mh
from megatron_hybrid import ops
from megatron_hybrid.gemm import DeviceKind, GemmPair, choose
from megatron_hybrid.tensor import payload
from megatron_hybrid.testing.assertions import assert_bitwise_equal

FORMATS = (
    "high_precision", "fp8_current_e4m3", "fp8_delayed_e4m3", "fp8_rowwise_e5m2", "fp8_block_e4m3", "mxfp8_e4m3", "mxfp8_e5m2:2d",
    "nvfp4", "nvfp4:row_scaled", "nvfp4:rht,sr",
)  # fmt: skip
SMALL = (32, 48)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(f, backend="aot_eager"):
    return torch.compile(f, fullgraph=True, backend=backend, dynamic=False)


def linear(q: mh.HybridQuantizer):
    """y = x @ w.T and dw = dy.T @ x on plain payloads, and their decodes."""
    steps = [GemmPair(g, f, f, DeviceKind.of("cpu")) for g, f in zip(("fprop", "wgrad"), q.formats())]
    backends = [choose(pair) for pair in steps]

    def run(x, w, k):
        x_row, x_col = q.cast(x, state=k["state"], rng=k["rng"])
        w_row, w_col = q.cast(w, state=k["state"], rng=k["rng"], transposed=True)
        y = backends[0].run(x_row, w_row, steps[0], x.dtype)
        dw = backends[1].run(w_col, x_col, steps[1], torch.float32)
        return y, dw, x_row.dequantize(), x_col.dequantize(x.dtype), w_col.dequantize()

    return run


@pytest.mark.parametrize("fmt", FORMATS)
def test_c89_cast_gemm_and_decode(fmt):
    run = linear(mh.HybridQuantizer(fmt, fmt))
    q = mh.HybridQuantizer(fmt, fmt)
    x, w = tensor(SMALL), tensor(SMALL, seed=1)
    ours, eager = keys(q), keys(q)
    for a, b in zip(compiled(run)(x, w, ours), run(x, w, eager)):
        assert_bitwise_equal(a, b, fmt)
    for a, b in zip(ours["state"], eager["state"]):
        assert a is None or torch.equal(a.history, b.history), "the amax is recorded once"


@pytest.mark.parametrize("row,col,source", [
    ("nvfp4", "mxfp8_e4m3", "original"), ("nvfp4:2d", "high_precision", "rowwise_dequantized"),
    ("high_precision", "high_precision", "original"), ("fp8_rowwise_e4m3", None, "original"),
])  # fmt: skip
def test_hybrid_tensors_made_inside_a_graph(row, col, source):
    q = mh.HybridQuantizer(row, col, source)

    def make(x):
        t = q.quantize(x)
        return t, t.dequantize(), t.dequantize("rowwise", torch.bfloat16), payload(t, "rowwise").dequantize(), t.detach().view(-1)

    x = tensor((2, 16, 48))
    for a, b in zip(compiled(make)(x), make(x)):
        if isinstance(b, mh.HybridTensor):
            assert isinstance(a, mh.HybridTensor) and a.quantizer == b.quantizer
            assert_same_tensor(a, b)
        else:
            assert_bitwise_equal(a, b, f"{row}/{col}")


def test_hybrid_tensors_given_to_a_graph():
    q = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3")
    pair = GemmPair("fprop", q.rowwise, q.rowwise, DeviceKind.of("cpu"))
    backend = choose(pair)

    def run(x, w):
        y = backend.run(q.cast(x)[0], w.rowwise, pair, x.dtype)
        return y, w.dequantize(), w.columnwise.dequantize(), w[:32].dequantize()

    x, w = tensor(SMALL), q.quantize(tensor((64, 48), seed=1))
    f = compiled(run)
    for values in (w, w.clone().update(tensor((64, 48), seed=2))):  # the second call reads the new bytes
        for a, b in zip(f(x, values), run(x, values)):
            assert_bitwise_equal(a, b, "given")


@pytest.mark.parametrize("with_flag", [False, True])
@pytest.mark.parametrize("row,col,source", [
    ("nvfp4", "mxfp8_e4m3", "original"), ("nvfp4:2d", "fp8_block_e4m3", "rowwise_dequantized"), ("mxfp8_e4m3", None, "original"),
    ("high_precision", "fp8_rowwise_e4m3", "original"),
])  # fmt: skip
def test_c89_p04_update_inside_a_graph(row, col, source, with_flag):
    """Into the buffers of a tensor given to the graph, which then decodes it; a set flag leaves every byte."""
    q = mh.HybridQuantizer(row, col, source)

    def write(t, x, flag):
        t.update(x, noop_flag=flag)
        return t.dequantize(), t.dequantize("rowwise", torch.bfloat16)

    f, ours, eager = compiled(write), q.quantize(tensor(SMALL)), q.quantize(tensor(SMALL))
    buffer = ours.rowwise.qdata
    for step, skipped in ((1, 0), (2, 1), (3, 0)):
        flag = torch.tensor(skipped, dtype=torch.int32) if with_flag else None
        x = tensor(SMALL, seed=step)
        for a, b in zip(f(ours, x, flag), write(eager, x, flag)):
            assert_bitwise_equal(a, b, f"step {step}")
        assert_same_tensor(ours, eager)
        assert ours.rowwise.qdata is buffer and not ours.stale
    fresh = q.quantize(x)
    assert_same_tensor(ours, fresh)


def test_gradients_pass_through_a_compiled_decode():
    p = torch.nn.Parameter(mh.HybridQuantizer("nvfp4", None).quantize(tensor(SMALL)))
    g = torch.randn(SMALL)
    (compiled(lambda p: p.dequantize() * g)(p)).sum().backward()
    assert_bitwise_equal(p.grad, g.bfloat16(), "gradient")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's CPU code needs a C++ compiler")
def test_c89_inductor():
    q = mh.HybridQuantizer("mxfp8_e4m3", "nvfp4")
    run = linear(q)
    x, w = tensor(SMALL), tensor(SMALL, seed=1)
    for a, b in zip(compiled(run, "inductor")(x, w, keys(q)), run(x, w, keys(q))):
        assert_bitwise_equal(a, b, "inductor")


def test_operators_pass_torchs_own_checks():
    """Schemas (what is written), fake implementations, dispatch."""
    x = tensor(SMALL)
    s = mh.HybridQuantizer("nvfp4", None).quantize(x).rowwise
    amax, out = s.outer_amax, torch.empty(SMALL)
    checks = ("test_schema", "test_faketensor")
    for op, arguments in (
        (ops.amax_, (x, "nvfp4", "rowwise", torch.empty(()))),
        (ops.quantize_, (x, "nvfp4", "rowwise", s.qdata.clone(), s.scale.clone(), amax, False, False, None, None, None)),
        (ops.dequantize_, (s.qdata, s.scale, amax, "nvfp4", "rowwise", False, out, True, True)),
        (ops.outer_scale_, (amax, "nvfp4", torch.empty(()))),
    ):
        torch.library.opcheck(op, arguments, test_utils=checks)


def test_fake_tensors_take_the_operators_outside_compile_too():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = mode.from_tensor(tensor(SMALL))
        t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(x)
        assert t.dequantize().shape == SMALL and t.rowwise.scale.shape == (32, 3)


def test_meta_tensors_describe_a_cast_without_kernels():
    t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(torch.empty(SMALL, device="meta"))
    real = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor(SMALL).float())
    for a, b in ((t.rowwise, real.rowwise), (t.columnwise, real.columnwise)):
        assert a.device.type == "meta" and {n: x.shape for n, x in a.buffers().items()} == {n: x.shape for n, x in b.buffers().items()}
    assert_same_storage(real.rowwise, real.clone().rowwise)
