"""SwiGLU inside the casts of the linears around it, forward and backward, gives the bytes of SwiGLU and casts."""

import itertools

import pytest
import torch
from test_cast_pair import LAYOUTS, SHAPES, STRIP_COMPUTED, assert_same, computed_strip_cases, lay_out

import megatron_hybrid as mh
from megatron_hybrid import kernels
from megatron_hybrid.lean import OperandCast
from megatron_hybrid.scaling import DelayedState
from megatron_hybrid.tensor import HybridTensor
from megatron_hybrid.testing.assertions import assert_bitwise_equal
from megatron_hybrid.testing.generators import cast_input, make_input

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
GATED = ("fp8_delayed_e5m2", "fp8_block_e4m3", "mxfp8_e4m3", "mxfp8_e5m2:2d")


@pytest.mark.parametrize(
    ("fmt", "gated"),
    [("mxfp8_e4m3", True), ("fp8_block_e4m3", True), ("fp8_delayed_e4m3", True), ("fp8_current_e4m3", False),
     ("nvfp4", False), ("fp8_rowwise_e4m3", False), ("high_precision", False)],
)  # fmt: skip
def test_formats_whose_scales_need_the_whole_tensor_are_cast_after_it(fmt, gated):
    assert OperandCast(mh.HybridQuantizer(fmt, "mxfp8_e4m3"), True, "cpu").takes_computed == gated


def test_the_cpu_kernels_compute_nothing_and_take_no_sums():
    x, sums = torch.zeros(4, 32), torch.zeros(1, 32)
    cast = OperandCast(mh.HybridQuantizer("mxfp8_e4m3", "mxfp8_e4m3"), True, "cpu")
    with pytest.raises(ValueError, match="gate: on CUDA only"):
        cast(x, True, True, None, gate=x)
    with pytest.raises(ValueError, match="grad: on CUDA only"):
        cast(x, True, True, None, grad=x[:, :16])
    with pytest.raises(ValueError, match="sums: on CUDA only"):
        cast(x, True, True, None, sums=sums)
    assert kernels.sum_parts(x) is None and torch.equal(kernels.column_sums(x), x.sum(dim=0))


def computed(x, **inputs):
    """What casts compute from one row x (1, N), before they round it to a format: sums over that row alone."""
    parts = kernels.sum_parts(x)
    kernels.cast_directions(x, None, None, sums=parts, **inputs)
    return parts


def gates_in_fp32():
    """Every 16-bit number, and pieces of 2^22 random ones: of any bits, and where sigmoids are neither 0 nor 1."""
    patterns = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
    yield from (patterns.view(dtype).float() for dtype in (torch.bfloat16, torch.float16))
    g = torch.Generator("cuda").manual_seed(0)
    for _ in range(16):
        bits = torch.randint(-(2**31), 2**31, (2**22,), device="cuda", generator=g)
        yield bits.to(torch.int32).view(torch.float32)
        yield torch.rand(2**22, device="cuda", generator=g) * 220 - 110


def check_computed_strips(row) -> int:
    """Casts that hold 16-bit SwiGLU and its gradient in registers: what casts after kernels of their own give."""
    from megatron_hybrid.ops_triton.swiglu import gradient, swiglu

    calls = 0
    for x, _, dy, (_, col) in computed_strip_cases(row):
        x, dy = x.cuda(), dy.cuda()
        gate, up = x.chunk(2, dim=1)
        cast = OperandCast(mh.HybridQuantizer(row or col, col or row), True, "cuda")
        for read, y, computed in ((up, swiglu(x), dict(gate=gate)), (x, gradient(dy, x), dict(grad=dy))):
            states, calls = [tuple(new_state() for _ in range(2)) for _ in range(2)], calls + 1
            got = cast(read, row is not None, col is not None, states[0], **computed)
            expected = cast(y, row is not None, col is not None, states[1])
            for a, b, s, t in zip(got, expected, *states):
                if a is not None:
                    assert_same(a, b, f"{row} | {col} {tuple(y.shape)} {y.dtype} {a.direction} {list(computed)}")
                    assert_bitwise_equal(s.history, t.history, "history", any_nan=True)
    return calls


def new_state():
    return DelayedState(torch.full((), 0.7, device="cuda"), torch.full((4,), 0.125, device="cuda"))


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("row", GATED)
    def test_payloads(self, row, dtype):
        """Of SwiGLU and of its gradient."""
        from megatron_hybrid.ops_triton.swiglu import gradient, swiglu

        for turn, (col, (M, F), kind) in enumerate(itertools.product(GATED, SHAPES, ("normal", "special"))):
            values = [cast_input(make_input(kind, (M, n)), dtype).cuda() for n in (2 * F, F + 8 * (turn % 3))]
            x, dy = lay_out(values[0], LAYOUTS[turn % 4]), values[1][:, turn % 3 :][:, :F]
            gate, up = x.chunk(2, dim=1)
            cast = OperandCast(mh.HybridQuantizer(row, col), True, "cuda")
            rows = x if x.stride(1) == 1 else x.contiguous()
            for read, y, computed in ((up, swiglu(x), dict(gate=gate)), (x, gradient(dy, rows), dict(grad=dy))):
                states = [tuple(new_state() for _ in range(2)) for _ in range(2)]
                got, expected = cast(read, True, True, states[0], **computed), cast(y, True, True, states[1])
                for a, b, s, t in zip(got, expected, *states):
                    assert_same(a, b, f"{row} | {col} {(M, F)} {kind} {dtype} {a.direction} {list(computed)}")
                    assert_bitwise_equal(s.history, t.history, "history", any_nan=True)

    @pytest.mark.parametrize("row", STRIP_COMPUTED)
    def test_payloads_in_registers(self, row):
        assert check_computed_strips(row)

    def test_sigmoids_are_those_of_triton(self):
        """Bit for bit in FP32, in SwiGLU and in the gradients of gate and of up, though found by fewer instructions."""
        from megatron_hybrid.ops_triton.swiglu import gradient, product

        for gates in gates_in_fp32():
            ones = torch.ones_like(gates).unsqueeze(0)
            x = torch.cat((gates.unsqueeze(0), ones), dim=1)
            gate, up = x.chunk(2, dim=1)
            for found, expected in ((computed(up, gate=gate), product(x)), (computed(x, grad=ones), gradient(ones, x))):
                off = (found != expected) & ~(found.isnan() & expected.isnan())
                assert not off.any(), (off.nonzero()[:4], found[off][:4], expected[off][:4])

    @pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "fp8_delayed", "fp8_current", "bf16"])
    @pytest.mark.parametrize("main_grad", [False, True])
    def test_the_linears_around_it(self, recipe, main_grad):
        """Output, gradients, histories and what is kept, with SwiGLU in their casts and between them."""
        from megatron_hybrid.gated_cast import swiglu_for
        from megatron_hybrid.ops_triton.swiglu import swiglu

        found, takes = [], recipe in ("mxfp8", "fp8_block", "fp8_delayed")
        for inside in (True, False):
            torch.manual_seed(0)
            made = dict(recipe=recipe, device="cuda", dtype=torch.bfloat16)
            fc1 = mh.HybridLinear(128, 512, bias=False, name="fc1", **made)
            fc2 = mh.HybridLinear(256, 128, name="fc2", **made)
            ctl = mh.prepare(torch.nn.ModuleList((fc1, fc2)))
            for step in (1, 2):
                ctl.begin_step(step)
                if main_grad:
                    fc1.weight.main_grad = torch.zeros(fc1.weight.shape, device="cuda")
                x = torch.randn(3, 64, 128).bfloat16().cuda().requires_grad_()
                h, seen = fc1(x), []
                y = swiglu_for(h, None, fc2.hq, fc2.weight, training=True) if inside else swiglu(h)
                assert isinstance(y, HybridTensor) == (inside and takes)
                h.grad_fn.register_prehook(lambda grads, seen=seen: seen.append(type(grads[0])))
                out = fc2(y)
                out.backward(torch.randn(3, 64, 128).bfloat16().cuda())
                assert seen == [HybridTensor if inside and takes else torch.Tensor]
                ctl.end_step()
                grads = fc1.weight.main_grad if main_grad else fc1.weight.grad, fc2.weight.grad, fc2.bias.grad
                buffers = [b.clone() for layer in (fc1, fc2) for _, b in layer.hq.named_buffers()]
                found.append([out.detach(), x.grad, *grads, *buffers])
        for a, b in zip(found[:2], found[2:], strict=True):
            assert all(map(torch.equal, a, b))

    def test_anomaly_detection_sees_plain_gradients(self):
        from megatron_hybrid.gated_cast import swiglu_for

        made = dict(recipe="mxfp8", device="cuda", dtype=torch.bfloat16)
        fc1, fc2 = mh.HybridLinear(64, 256, bias=False, **made), mh.HybridLinear(128, 64, **made)
        with torch.autograd.detect_anomaly():
            h = fc1(torch.randn(32, 64).bfloat16().cuda().requires_grad_())
            h.grad_fn.register_prehook(lambda grads: seen.append(type(grads[0])))
            seen = []
            fc2(swiglu_for(h, None, fc2.hq, fc2.weight, training=True)).sum().backward()
        assert seen == [torch.Tensor]
