"""Numbers seen through tensors: extremes of every scale rule in both directions, with the arithmetic. properties.md 63-66.

The kernels are compared with the oracle in tests/numerics; here are the values a user of HybridTensor relies on.
"""

import numpy as np
import pytest
import torch
from tensor_cases import FORMATS, assert_same_storage, keys, quantize, tensor

import megatron_hybrid as mh
from megatron_hybrid.scaling import FLT_MAX
from megatron_hybrid.storage_layout import map_buffers
from megatron_hybrid.testing import oracle
from megatron_hybrid.testing.assertions import assert_bitwise_equal

NAN, INF = float("nan"), float("inf")


def row_of(*values, size=32) -> torch.Tensor:
    x = torch.zeros(1, size)
    x[0, : len(values)] = torch.tensor(values)
    return x


# ---- MXFP8


@pytest.mark.parametrize("amax,code", [
    (0.0, 0),                                  # nothing to scale
    (448.0, 127),                              # 448 / 448 = 2^0
    (np.nextafter(np.float32(448), np.float32(INF)), 128),  # one ulp above rounds up: the maximum never saturates
    (448.0 * 2.0**100, 227), (448.0 * 2.0**-100, 27), (448.0 * 2.0**-127, 0),
    (448.0 * 2.0**-127 * 1.25, 1),             # 1.25 * 2^-127, a subnormal above 2^-127
    (1e-45, 0),                                # the smallest subnormal: amax / 448 is 0
    (3.4028235e38, 247),                       # FLT_MAX / 448 = 2^119.19: rounds up to 2^120
    (INF, 254), (NAN, 255),
])  # fmt: skip
def test_p63_c76_mxfp8_scale_codes_at_the_extremes(amax, code):
    x = row_of(float(amax))
    for q, s in ((mh.HybridQuantizer("mxfp8_e4m3", None), "rowwise"), (mh.HybridQuantizer(None, "mxfp8_e4m3"), "columnwise")):
        payload = getattr(q.quantize(x if s == "rowwise" else x.T), s)
        assert payload.scale.reshape(-1)[0] == code
        if np.isfinite(amax):
            assert int(payload.codes().max()) <= 0x7E
            top = payload.dequantize().abs().max()  # FLT_MAX is nearest to 256 * 2^120, which is not an FP32 number
            assert amax < 1e-37 or amax > 3e38 or abs(top - amax) <= amax / 16, "within half a step, not saturated"


def test_p63_mxfp8_decode_of_the_extreme_codes():
    s = mh.HybridQuantizer("mxfp8_e4m3", None).quantize(row_of(*[1.0] * 32)).rowwise
    for code, expected in ((0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127), (255, NAN)):
        changed = s.with_buffers({"scale": torch.full_like(s.scale, code), "qdata": torch.full_like(s.qdata, 0x38)})  # 0x38 is 1.0
        assert_bitwise_equal(changed.dequantize(), torch.full((1, 32), expected), f"e = {code}", any_nan=True)


@pytest.mark.parametrize("shape", [(64, 64), (33, 50), (1, 7)])
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3:2d", "fp8_block_e4m3:2d", "fp8_block_e5m2:2d,no_pow2", "nvfp4:2d"])
def test_p63_p64_a_tile_has_one_scale_in_both_directions(fmt, shape):
    q, x = mh.HybridQuantizer(fmt, fmt), tensor(shape, kind="outlier")
    t = q.quantize(x)
    assert_bitwise_equal(t.rowwise.scale, t.columnwise.scale, fmt)
    assert_bitwise_equal(t.rowwise.codes(), t.columnwise.codes(), fmt)
    assert_bitwise_equal(t.rowwise.dequantize(), t.columnwise.dequantize(), fmt)
    assert_same_storage(q.quantize(x, columnwise=False).rowwise, t.rowwise, "row only")
    assert_same_storage(q.quantize(x, rowwise=False).columnwise, t.columnwise, "column only")


# ---- NVFP4


@pytest.mark.parametrize("dims", ["rowwise", "columnwise"])
def test_p64_nvfp4_tensor_amax_of_zero_tiny_and_infinity(dims):
    q = mh.HybridQuantizer("nvfp4", "nvfp4")
    zero = getattr(q.quantize(torch.zeros(16, 32)), dims)
    assert float(zero.amax()) == 0 and float(zero.outer_scale()) == 1 and not zero.scale.any() and not zero.codes().any()
    tiny = getattr(q.quantize(torch.full((16, 32), 1e-40)), dims)  # 2688 / 1e-40 overflows: capped at FLT_MAX
    assert float(tiny.outer_scale()) == np.float32(1) / np.float32(FLT_MAX)
    assert torch.isfinite(tiny.dequantize()).all()
    x = torch.ones(16, 32)
    x[0, 0] = INF  # 2688 / Inf = 0: enc is 1; the block of the Inf saturates, the others keep their values
    inf = getattr(q.quantize(x), dims)
    assert float(inf.amax()) == INF and float(inf.outer_scale()) == 1
    assert torch.isfinite(inf.dequantize()).all()
    assert abs(float(inf.dequantize()[-1, -1]) - 1) <= 1 / 6


def test_p64_ties_between_fp4_codes_go_to_the_even_one():
    """Tensor amax 21 gives enc = 2688 / 21 = 128; block amax 6 gives S = 128 * 6 / 6: multiplier 1, values are codes."""
    halfway = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    for sign in (1, -1):
        x = row_of(6.0, *(sign * v for v in halfway), size=32)
        x[0, 16] = 21.0
        for t in (mh.HybridQuantizer("nvfp4", None).quantize(x), mh.HybridQuantizer(None, "nvfp4").quantize(x.T)):
            values = t.dequantize().reshape(-1)
            assert values[:8].tolist() == [6.0, *(sign * v for v in halfway.values())]


@pytest.mark.parametrize("shape", [(16, 32), (33, 47), (47, 1), (15, 16), (1, 1)])
@pytest.mark.parametrize("fmt", ["nvfp4:rht", "nvfp4:row_scaled,rht"])
def test_p64_hadamard_is_the_reference_butterfly(fmt, shape):
    x = tensor(shape)
    t = mh.HybridQuantizer(fmt, fmt).quantize(x)
    for s in (t.rowwise, t.columnwise):
        expected = oracle.quantize(x, fmt, s.direction)
        assert_bitwise_equal(s.codes(), expected.codes, f"{fmt} {s.direction}")
        assert_bitwise_equal(s.scale, expected.scale, f"{fmt} {s.direction}")
        assert_bitwise_equal(s.dequantize(), oracle.dequantize(expected, fmt, s.direction), f"{fmt} {s.direction}")


# ---- stochastic rounding


@pytest.mark.parametrize("fmt", ["nvfp4:sr", "nvfp4:2d,sr"])
def test_p65_draws_are_neighbours_average_out_and_repeat(fmt):
    x = tensor((32, 48), torch.float32)
    q, plain = mh.HybridQuantizer(fmt, fmt), mh.HybridQuantizer(fmt.replace("sr", "").rstrip(",:"), None).quantize(x)
    step = plain.rowwise.scale_inv()
    block = plain.rowwise.format.block("rowwise")
    step = step.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    v = (x.abs() / step).clamp(max=6)
    lo = torch.searchsorted(grid, v, right=True).sub(1)
    near = torch.minimum(lo + (v > grid[lo] + 1e-6), torch.tensor(7))
    draws = []
    for i in range(64):
        t = q.quantize(x, rng=mh.Rng(1, 2, i, 0))
        codes = (t.rowwise.codes() & 7).long()
        assert ((codes == lo) | (codes == near) | ((codes - lo).abs() <= 1) & ((v - grid[lo]).abs() < 1e-5)).all()
        draws.append(t.rowwise.dequantize())
        assert_same_storage(q.quantize(x, rng=mh.Rng(1, 2, i, 0)).rowwise, t.rowwise, "same key, same bytes")
    mean = torch.stack(draws).mean(0)
    inside = x.abs() <= 6 * step  # what saturates is biased by construction
    assert ((mean - x)[inside]).pow(2).mean().sqrt() < 0.5 * ((plain.dequantize() - x)[inside]).pow(2).mean().sqrt()
    assert len({d.numpy().tobytes() for d in draws}) == 64


# ---- FP32 scales


@pytest.mark.parametrize("fmt,block", [("fp8_current_e4m3", None), ("fp8_rowwise_e4m3", None), ("fp8_block_e4m3:no_pow2", 128)])
def test_p66_fp32_scale_extremes(fmt, block):
    """448 / amax; amax 0, Inf or NaN gives scale 1; an infinite scale becomes FLT_MAX."""
    for amax, scale in ((7.0, 64.0), (0.0, 1.0), (INF, 1.0), (NAN, 1.0), (1e-45, FLT_MAX), (448.0, 1.0)):
        x = row_of(amax, size=128)
        for t in (mh.HybridQuantizer(fmt, None).quantize(x), mh.HybridQuantizer(None, fmt).quantize(x.T)):
            s = t.rowwise or t.columnwise
            assert float(s.scale.reshape(-1)[0]) == float(np.float32(1) / np.float32(scale)), amax
            if amax == INF:
                assert s.codes().reshape(-1)[0] == 0x7E and s.dequantize().reshape(-1)[0] == 448.0


def test_p66_pow2_and_eps_options():
    x = row_of(5.0)
    for fmt, scale in (
        ("fp8_current_e4m3", 448 / 5), ("fp8_current_e4m3:pow2", 64.0), ("fp8_current_e4m3:eps=7", 64.0), ("fp8_block_e4m3", 64.0),
        ("fp8_block_e4m3:no_pow2", 448 / 5), ("fp8_rowwise_e5m2:pow2", 8192.0), ("fp8_current_e4m3:eps=3", 448 / 5),
    ):  # fmt: skip
        s = mh.HybridQuantizer(fmt, None).quantize(x).rowwise
        assert float(s.scale.reshape(-1)[0]) == float(np.float32(1) / np.float32(scale)), fmt


@pytest.mark.parametrize("element, room", [("e4m3", 18), ("e5m2", 32)])
def test_the_largest_margin_leaves_the_largest_element_a_code(element, room):
    """One more and all are zero, which `parse_format` refuses."""
    fmt = f"fp8_delayed_{element}:margin={room}"
    quantizer = mh.HybridQuantizer(fmt, fmt)
    states = quantizer.new_state()
    for _ in range(2):
        t = quantizer.quantize(row_of(5.0), state=states)
        for state in states:
            state.update(quantizer.rowwise)
    for half, codes in ((1.0, {1}), (0.5, {0})):
        t = quantizer.quantize(row_of(5.0 * half), state=states)
        assert set(t.rowwise.codes().reshape(-1)[:1].tolist()) == codes
    with pytest.raises(ValueError, match=f"{element} has room for {room}"):
        mh.HybridQuantizer(f"fp8_delayed_{element}:margin={room + 1}", None)


# ---- rules of every format


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "high_precision"])
def test_c73_a_nan_is_seen_in_its_own_block_and_nowhere_else(fmt):
    x = tensor((64, 256), torch.float32)
    x[3, 5] = NAN
    t = quantize(mh.HybridQuantizer(fmt, fmt), x)
    for s in (t.rowwise, t.columnwise):
        d = s.dequantize()
        assert torch.isnan(d[3, 5]), s.direction
        far = d[40:, 130:]
        assert torch.isfinite(far).all() or s.format.bits == 4 and s.format.rht, f"{fmt} {s.direction}"


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "high_precision"])
def test_c75_zero_and_subnormal_blocks_decode_to_finite_numbers(fmt):
    x = tensor((32, 256), torch.float32)
    x[:16, :128] = 0.0
    x[16:, :128] = 1e-42
    t = quantize(mh.HybridQuantizer(fmt, fmt), x)
    for s in (t.rowwise, t.columnwise):
        d = s.dequantize()
        assert torch.isfinite(d).all() and torch.isfinite(s.scale_inv()).all()
        if "rht" not in fmt:
            assert not d[:16, :128].any()
    zeros = quantize(mh.HybridQuantizer(fmt, fmt), torch.zeros(32, 256))
    assert not zeros.dequantize().any() and torch.isfinite(zeros.rowwise.scale_inv()).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_signed_zeros_and_infinities(fmt):
    x = torch.tensor([[0.0, -0.0, 1.0, -1.0] * 8] * 32)
    t = quantize(mh.HybridQuantizer(fmt, fmt), x)
    if "rht" not in fmt:
        for s in (t.rowwise, t.columnwise):
            assert torch.equal(torch.signbit(s.dequantize()), torch.signbit(x)), f"{fmt} {s.direction}"
    x[0, 0] = -INF
    for s in [s for t in [quantize(mh.HybridQuantizer(fmt, fmt), x)] for s in (t.rowwise, t.columnwise)]:
        d = s.dequantize()
        if "rht" not in fmt and s.format.is_quantized:
            finite = torch.isfinite(d)
            finite[0, 0] |= s.format.scale == "e8m0"  # 448 * 2^127 is decoded as -Inf
            assert finite.all() and d[0, 0] < 0, "Inf saturates with its sign"


def test_scales_are_never_recomputed_from_decoded_values():
    """A byte copy keeps scales that no cast would choose."""
    q = mh.HybridQuantizer("mxfp8_e4m3", None)
    s = q.quantize(tensor((32, 64))).rowwise
    odd = s.with_buffers({"scale": s.scale + 1})
    t = mh.HybridTensor.from_storages(odd, None, (32, 64), torch.bfloat16, q)
    assert_bitwise_equal(t.clone().rowwise.scale, s.scale + 1, "clone")
    assert_bitwise_equal(t.new_zeros(32, 64).copy_(t).rowwise.scale, s.scale + 1, "copy_")
    assert_bitwise_equal(map_buffers(odd, torch.clone).dequantize(), 2 * s.dequantize(), "decode")
    assert keys(q)["rng"] is not None
