"""Named cases of the scale rules, with the arithmetic beside the expected bytes."""

import math

import numpy as np
import pytest
import torch
from test_cpp_golden import cast

from megatron_hybrid import kernels
from megatron_hybrid.formats import COLUMNWISE, ROWWISE, parse_format

INF, NAN = math.inf, math.nan
FLT_MAX = float(np.finfo(np.float32).max)


def row(*values, length=16):
    x = torch.zeros(1, length)
    x[0, : len(values)] = torch.tensor(values, dtype=torch.float64).float()
    return x


def up(value: float) -> float:
    """The next FP32 number above."""
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def codes_of(name, x, n):
    codes, scale, amax, _ = cast(x, parse_format(name), ROWWISE, False)
    return codes[0, :n].tolist(), scale.flatten().tolist(), amax


# v = amax * fl(1/448); the code is v's exponent, plus one if its mantissa is not 0. fl(1/448) = 0x3b124925 is rounded up
# (1/448 = 0x3b124924.92), so amax = 448 gives v = 0x3f800000 exactly: 448 * fl(1/448) rounds to 1.
E8M0_E4M3 = {
    "zero": (0.0, 0),
    "448": (448.0, 127),  # v = 1: 2^0
    "448 * 2^9": (448.0 * 512, 136),
    "one ulp above 448": (up(448.0), 128),  # v = 1 + 2^-23: rounds up to 2^1
    "largest in the binade below": (447.0, 127),  # v = 0.99776..: exponent 126 and a mantissa
    "500": (500.0, 128),  # 500/448 > 1
    "e = 0, mantissa at most 0x400000": (448.0 * 2.0**-127, 0),  # v = 2^-127: subnormal, 0x400000
    "e = 0, mantissa above": (500.0 * 2.0**-127, 1),  # v > 2^-127: up to 2^-126
    "subnormal amax": (2.0**-149, 0),  # v = 0: underflows
    "largest FP32": (FLT_MAX, 247),  # v = 2^128 / 448 = 2^119 * 1.14: exponent 246, and a mantissa
    "Inf": (INF, 254),
    "NaN": (NAN, 255),
}


@pytest.mark.parametrize("case", E8M0_E4M3)
def test_e8m0_scale(case):
    amax, code = E8M0_E4M3[case]
    _, scale, _ = codes_of("mxfp8_e4m3", row(1e-3 * amax if math.isfinite(amax) else 1.0, -amax), 2)
    assert scale == [code]


def test_e8m0_top_code_for_e5m2():
    # v = FLT_MAX * fl(1/57344) = 2^112 * 1.1428..: exponent 239, one up
    assert codes_of("mxfp8_e5m2", row(FLT_MAX), 1)[1] == [240]


def test_mxfp8_block_of_nan_and_inf():
    # one NaN: scale NaN, multiplier NaN, every element NaN
    assert codes_of("mxfp8_e4m3", row(1.0, NAN, -2.0), 4) == ([0x7F] * 4, [255], None)
    # Inf: scale 254, multiplier 2^-127; Inf saturates with its sign, 1 * 2^-127 is 0, -0 keeps its sign
    assert codes_of("mxfp8_e4m3", row(-INF, 1.0, -0.0, INF), 4)[0] == [0xFE, 0, 0x80, 0x7E]


def test_mxfp8_zero_block_keeps_signs():
    # amax 0: code 0, multiplier 2^127
    assert codes_of("mxfp8_e4m3", row(0.0, -0.0), 3) == ([0, 0x80, 0], [0], None)


def test_mxfp8_ties():
    # scale 127 (amax 448), multiplier 1. E4M3 from 16 to 32 has step 2: 17 is between 16 (0x58) and 18 (0x59), the even one
    # wins; 19 between 18 and 20 (0x5a). Subnormals have step 2^-9: 2^-10 ties to 0, 3 * 2^-10 to 2 * 2^-9
    codes, _, _ = codes_of("mxfp8_e4m3", row(448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, up(2.0**-10)), 7)
    assert codes == [0x7E, 0x58, 0x5A, 0xD8, 0, 2, 1]


CURRENT = {  # amax of [1, amax]: encode scale, as the rule gives it
    "zero": (0.0, 1.0),
    "Inf": (INF, 1.0),
    "NaN": (NAN, 1.0),
    "plain": (3.0, float(np.float32(448.0) / np.float32(3.0))),
    "448": (448.0, 1.0),
    "overflow": (1e-38, FLT_MAX),  # 448e38 > FLT_MAX
    "subnormal": (2.0**-149, FLT_MAX),
}


@pytest.mark.parametrize("case", CURRENT)
def test_current_scale(case):
    amax, scale = CURRENT[case]
    _, (scale_inv,), _ = codes_of("fp8_current_e4m3", row(amax), 1)
    assert np.float32(scale_inv) == np.float32(1.0) / np.float32(scale)


def test_current_pow2_and_eps():
    # 448/3 = 149.3: floored to 128
    assert codes_of("fp8_current_e4m3:pow2", row(3.0, 1.0), 2)[:2] == ([0x7C, 0x70], [1 / 128])  # 384 = 0x7c, 128 = 0x70
    # FLT_MAX floors to 2^127, whose inverse is the subnormal 2^-127
    assert codes_of("fp8_current_e4m3:pow2", row(1e-38), 1)[1] == [2.0**-127]
    # amax 0 with eps 4: 448/4 = 112
    assert np.float32(codes_of("fp8_current_e4m3:eps=4", row(0.0), 1)[1][0]) == np.float32(1) / np.float32(112)
    # eps below the amax changes nothing; a NaN amax stays one
    assert codes_of("fp8_current_e4m3:eps=4", row(448.0), 1)[1] == [1.0]
    assert codes_of("fp8_current_e4m3:eps=4", row(NAN), 1)[1] == [1.0]


def test_current_elements():
    # NaN drops its sign, Inf saturates with it; the others are cast under scale 1
    x = row(NAN, -INF, INF, 500.0, -1.0, -0.0)
    x[0, 6] = torch.tensor([0xFFC00001 - (1 << 32)], dtype=torch.int32).view(torch.float32)[0]  # a negative NaN
    assert codes_of("fp8_current_e4m3", x, 7)[0] == [0x7F, 0xFE, 0x7E, 0x7E, 0xB8, 0x80, 0x7F]
    assert codes_of("fp8_current_e5m2", x, 7)[0] == [0x7F, 0xFB, 0x7B, 0x60, 0xBC, 0x80, 0x7F]


def test_fixed_scale_is_used_as_it_is():
    x, fmt = row(1.0, 3.0), parse_format("fp8_delayed_e4m3")
    codes, scale = torch.empty(1, 16, dtype=torch.uint8), torch.empty(())
    kernels.quantize(x, fmt, ROWWISE, qdata=codes, scale=scale, amax=torch.tensor(3.0), fixed_scale=True)
    assert codes[0, :2].tolist() == [0x44, 0x51] and scale == np.float32(1) / np.float32(3)  # 3 and 9


def test_amax_keeps_or_ignores_nan():
    x = row(1.0, NAN, -5.0).to(torch.bfloat16)
    assert kernels.amax(x, parse_format("fp8_current_e4m3"), ROWWISE, torch.empty(())).isnan()
    assert kernels.amax(x, parse_format("nvfp4"), ROWWISE, torch.empty(())) == 5.0
    rows = torch.cat([x, row(2.0, 7.0).to(x)])
    amax = kernels.amax(rows, parse_format("fp8_rowwise_e4m3"), ROWWISE, torch.empty(2, 1))
    assert amax[0].isnan() and amax[1] == 7.0
    columns = kernels.amax(rows, parse_format("fp8_rowwise_e4m3"), COLUMNWISE, torch.empty(1, 16))
    assert columns[0, :3].nan_to_num(-1).tolist() == [2.0, -1.0, 5.0]
    assert kernels.amax(rows, parse_format("nvfp4:row_scaled"), ROWWISE, torch.empty(2, 1)).tolist() == [[5.0], [7.0]]


def test_nvfp4_block_of_nan():
    # S = 0x7f, all codes 0, signs dropped too; the neighbour block is untouched
    x = torch.cat([row(NAN, -3.0, 2.0), row(6.0, -3.0)], dim=1)
    codes, scale, amax, _ = cast(x, parse_format("nvfp4"), ROWWISE, False)
    # amax 6: enc = 448; S = e4m3(6 * (448 * fl(1/6))) = 448 (0x7e); multiplier = 1/(448 * (1/448)) = 1
    assert scale.tolist() == [[0x7F, 0x7E]] and amax == 6.0
    assert codes[0, :16].tolist() == [0] * 16 and codes[0, 16:18].tolist() == [7, 0xD]


def test_nvfp4_inf():
    # amax Inf: 2688/Inf = 0, so enc = 1; S = min(Inf, FLT_MAX) saturates to 448; multiplier 1/448: 448 becomes 1 (code 2)
    assert codes_of("nvfp4", row(INF, -INF, 448.0, 1.0), 4)[:2] == ([7, 0xF, 2, 0], [0x7E])


def test_nvfp4_zero_and_tiny():
    assert codes_of("nvfp4", row(0.0, -0.0), 2)[:2] == ([0, 8], [0])  # enc = 1, S = 0, multiplier FLT_MAX
    # a block far below its tensor: amax 2688 * 2^-20 against 2688: S = 448 * 2^-20 is under half of 2^-9, so 0;
    # the multiplier is FLT_MAX and every element saturates, to be decoded as 6 * 0
    x = torch.cat([row(2688.0), row(2688.0 * 2**-20, -1e-30)], dim=1)
    codes, scale, amax, qdata = cast(x, parse_format("nvfp4"), ROWWISE, False)
    assert scale.tolist() == [[0x7E, 0]] and codes[0, 16:18].tolist() == [7, 0xF]
    out = torch.empty(1, 32)
    kernels.dequantize(qdata, scale, amax, parse_format("nvfp4"), ROWWISE, 1, 32, transposed=False, out=out)
    assert out[0, 0] == 2688.0 and not out[0, 16:].any()


def test_nvfp4_ties_and_decode():
    # amax 2688 = 448 * 6: enc = 1, S = 448, multiplier 1/448. In units of 448 the midpoints go to the even code:
    # 0.25 -> 0, 0.75 -> 1 (2), 1.25 -> 1 (2), 1.75 -> 2 (4), 2.5 -> 2 (4), 3.5 -> 4 (6), 5 -> 4 (6)
    values = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0]
    codes, scale, _ = codes_of("nvfp4", row(*[448 * v for v in values]), 9)
    assert codes == [7, 0, 2, 2, 4, 4, 6, 6, 0xE] and scale == [0x7E]


def test_outer_scale():
    fmt = parse_format("nvfp4")
    amax = torch.tensor([2688.0, 6.0, 0.0, INF, 1e-38])
    # 2688/amax: 1, 448, 1 (amax 0), 1 (enc would be 0), FLT_MAX
    expected = np.float32(1) / np.array([1, 448, 1, 1, FLT_MAX], np.float32)
    np.testing.assert_array_equal(kernels.outer_scale(amax, fmt, torch.empty(5)).numpy(), expected)


@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE])
@pytest.mark.parametrize("name", ["fp8_current_e4m3", "fp8_rowwise_e4m3", "fp8_block_e4m3", "fp8_block_e4m3:2d", "mxfp8_e4m3",
                                  "nvfp4", "nvfp4:2d", "nvfp4:row_scaled", "nvfp4:rht"])  # fmt: skip
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(name, direction, shape):
    """Empty payload, amax 0, scale 1 for every scale there is."""
    fmt = parse_format(name)
    for transposed in (False, True):
        codes, scale, amax, qdata = cast(torch.zeros(shape), fmt, direction, transposed)
        assert codes.numel() == 0
        assert amax is None or not amax.any()
        assert (scale == 1).all() and scale.shape == fmt.scale_shape(*shape, direction)
        kernels.dequantize(qdata, scale, amax, fmt, direction, *shape, transposed=transposed, out=torch.zeros(shape))
