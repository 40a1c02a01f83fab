"""SwiGLU inside the cast of the linear that reads it gives the bytes of SwiGLU and a cast, and the same gradients."""

import itertools

import pytest
import torch
from test_cast_pair import LAYOUTS, SHAPES, assert_same, lay_out

import megatron_hybrid as mh
from megatron_hybrid import kernels
from megatron_hybrid.lean import OperandCast
from megatron_hybrid.linear import LOCAL
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
    assert OperandCast(mh.HybridQuantizer(fmt, "mxfp8_e4m3"), True, "cpu").takes_gate == gated


def test_the_cpu_kernels_take_no_gate_and_no_sums():
    x, sums = torch.zeros(4, 32), torch.zeros(1, 32)
    cast = OperandCast(mh.HybridQuantizer("mxfp8_e4m3", "mxfp8_e4m3"), True, "cpu")
    with pytest.raises(ValueError, match="gate: on CUDA only"):
        cast(x, True, True, None, gate=x)
    with pytest.raises(ValueError, match="sums: on CUDA only"):
        cast(x, True, True, None, sums=sums)
    assert kernels.sum_parts(x) is None and torch.equal(kernels.column_sums(x), x.sum(dim=0))


def new_state():
    return DelayedState(torch.full((), 0.7, device="cuda"), torch.full((4,), 0.125, device="cuda"))


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("row", GATED)
    def test_payloads(self, row, dtype):
        from megatron_hybrid.ops_triton.swiglu import swiglu

        for turn, (col, shape, kind) in enumerate(itertools.product(GATED, SHAPES, ("normal", "special"))):
            x = lay_out(cast_input(make_input(kind, (shape[0], 2 * shape[1])), dtype).cuda(), LAYOUTS[turn % 4])
            cast, y = OperandCast(mh.HybridQuantizer(row, col), True, "cuda"), swiglu(x)
            states = [tuple(new_state() for _ in range(2)) for _ in range(2)]
            gate, up = x.chunk(2, dim=1)
            got, expected = cast(up, True, True, states[0], gate=gate), cast(y, True, True, states[1])
            for a, b, s, t in zip(got, expected, *states):
                assert_same(a, b, f"{row} | {col} {shape} {kind} {dtype} {a.direction}")
                assert_bitwise_equal(s.history, t.history, "history", any_nan=True)

    @pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "fp8_delayed", "fp8_current", "bf16"])
    def test_a_linear_after_it(self, recipe):
        """Output, gradients, histories and what is kept, with the cast inside and after."""
        from megatron_hybrid.gated_cast import casts_swiglu, swiglu_for
        from megatron_hybrid.ops_triton.swiglu import swiglu

        found = []
        for inside in (True, False):
            torch.manual_seed(0)
            fc2 = mh.HybridLinear(256, 128, recipe=recipe, name="fc2", device="cuda", dtype=torch.bfloat16)
            ctl = mh.prepare(fc2)
            ctl.begin_step(1)
            x = torch.randn(3, 64, 512).bfloat16().cuda().requires_grad_()
            y = swiglu_for(x, None, fc2.hq, fc2.weight, training=True) if inside else swiglu(x)
            takes = casts_swiglu(fc2.hq.call(x.device, LOCAL, training=True))
            assert takes == (recipe in ("mxfp8", "fp8_block", "fp8_delayed"))
            assert isinstance(y, HybridTensor) == (inside and takes)
            out = fc2(y)
            out.backward(torch.randn(3, 64, 128).bfloat16().cuda())
            ctl.end_step()
            found.append([out.detach(), x.grad, fc2.weight.grad, fc2.bias.grad, *(b for _, b in fc2.hq.named_buffers())])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)
