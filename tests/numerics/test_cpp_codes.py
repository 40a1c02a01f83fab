"""Every code and FP32 value: the compiled element casts against ml_dtypes, with the saturation rules of docs/numerics.md."""

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_hybrid import kernels
from megatron_hybrid.formats import ROWWISE, parse_format

TYPES = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
}
FP8 = ("e4m3", "e5m2")


def fp8_encode(x: np.ndarray, element: str) -> np.ndarray:
    """Codes of FP32 values under scale 1, through the per-tensor format with a fixed scale."""
    x = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).view(1, -1)
    codes, scale_inv = torch.empty(x.shape, dtype=torch.uint8), torch.empty(())
    kernels.quantize(x, parse_format(f"fp8_delayed_{element}"), ROWWISE, qdata=codes, scale=scale_inv,
                     amax=torch.tensor(1.0), fixed_scale=True)  # fmt: skip
    assert scale_inv == 1.0
    return codes.numpy().ravel()


def fp8_decode(codes: np.ndarray, element: str) -> np.ndarray:
    codes = torch.from_numpy(np.ascontiguousarray(codes, dtype=np.uint8)).view(1, -1)
    out = torch.empty(codes.shape)
    kernels.dequantize(codes, torch.tensor(1.0), None, parse_format(f"fp8_current_{element}"), ROWWISE, 1,
                       codes.shape[1], transposed=False, out=out)  # fmt: skip
    return out.numpy().ravel()


def fp4_encode(x: np.ndarray) -> np.ndarray:
    """Codes under multiplier 1. amax 2688 gives enc = 1; a block whose amax is 6 gets S = e4m3(6 * fl(1/6)) = 1."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    padded = np.zeros((-(-len(x) // 15), 16), np.float32)
    padded[:, 0] = 6.0
    padded[:, 1:].flat[: len(x)] = x
    rows = torch.from_numpy(padded)
    qdata, scale = torch.empty(len(padded), 8, dtype=torch.uint8), torch.empty(len(padded), 1, dtype=torch.uint8)
    kernels.quantize(rows, parse_format("nvfp4"), ROWWISE, qdata=qdata, scale=scale, amax=torch.tensor(2688.0))
    assert (scale == 0x38).all()  # 1.0 in E4M3
    codes = torch.stack((qdata & 15, qdata >> 4), dim=-1).view(-1, 16)
    return codes[:, 1:].reshape(-1)[: len(x)].numpy()


def reference(x: np.ndarray, element: str) -> np.ndarray:
    """Saturate, then ml_dtypes' nearest-even cast; NaN becomes 0x7f without its sign."""
    dtype, largest = TYPES[element]
    with np.errstate(invalid="ignore"):
        codes = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def midpoints(element: str) -> np.ndarray:
    """Each finite value, each midpoint of neighbours, and the FP32 numbers right beside them, with both signs."""
    dtype, largest = TYPES[element]
    values = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.unique(np.abs(values[np.isfinite(values)]))
    centres = np.concatenate([values, (values[1:] + values[:-1]) / 2, [np.float32(largest * 1.5)]]).astype(np.float32)
    near = np.concatenate([centres, np.nextafter(centres, np.float32(-np.inf)), np.nextafter(centres, np.float32(np.inf))])
    return np.concatenate([near, -near]).astype(np.float32)


def random_patterns(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize("element", FP8)
def test_decode_all_fp8_codes(element):
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(TYPES[element][0]).astype(np.float32)
    np.testing.assert_array_equal(fp8_decode(codes, element), expected)
    signs = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(fp8_decode(codes, element))[signs], np.signbit(expected)[signs])


def test_decode_all_fp4_codes():
    pairs = torch.arange(256, dtype=torch.uint8).view(-1, 8)  # every pair of codes; a row is one block
    out = torch.empty(32, 16)
    one = torch.full((32, 1), 0x38, dtype=torch.uint8)
    kernels.dequantize(pairs, one, torch.tensor(2688.0), parse_format("nvfp4"), ROWWISE, 32, 16, transposed=False, out=out)
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    byte = np.arange(256)
    expected = np.stack([values[byte & 15], values[byte >> 4]], axis=-1).reshape(32, 16)
    np.testing.assert_array_equal(out.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("element", FP8)
def test_fp8_codes_round_trip(element):
    """encode(decode(c)) == c, but for NaNs (0x7f) and E5M2's Inf (saturates to 0x7b with its sign)."""
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.copy()
    values = fp8_decode(codes, element)
    expected[np.isnan(values)] = 0x7F
    expected[np.isinf(values)] -= 1
    np.testing.assert_array_equal(fp8_encode(values, element), expected)


def test_fp4_codes_round_trip():
    codes = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(fp4_encode(codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)), codes)


@pytest.mark.parametrize("element", FP8)
@pytest.mark.parametrize("isa", kernels.extension("cpu").isas())
def test_fp8_encode_samples(element, isa):
    extension = kernels.extension("cpu")
    before = extension.isa()
    extension.set_isa(isa)
    try:
        x = np.concatenate([midpoints(element), random_patterns(1 << 20, 1)])
        np.testing.assert_array_equal(fp8_encode(x, element), reference(x, element))
    finally:
        extension.set_isa(before)


def test_fp4_encode_samples():
    x = np.concatenate([midpoints("e2m1"), np.random.default_rng(2).uniform(-6, 6, 1 << 18)]).astype(np.float32)
    x = x[np.abs(x) <= 6.3]  # more would move the block's scale
    np.testing.assert_array_equal(fp4_encode(x), reference(x, "e2m1"))


def test_e4m3_scale_bytes_of_nvfp4():
    """S = e4m3(amax / 6): the block scale goes through the same E4M3 cast, saturating at 448."""
    amax = np.concatenate([np.geomspace(1e-4, 3000, 4001), [448 * 6, 464 * 6, 1e30]]).astype(np.float32)
    x = torch.zeros(len(amax), 16)
    x[:, 3] = torch.from_numpy(amax)
    qdata, scale = torch.empty(len(amax), 8, dtype=torch.uint8), torch.empty(len(amax), 1, dtype=torch.uint8)
    kernels.quantize(x, parse_format("nvfp4"), ROWWISE, qdata=qdata, scale=scale, amax=torch.tensor(2688.0))
    expected = reference(amax * np.float32(np.float32(1.0) / np.float32(6.0)), "e4m3")
    np.testing.assert_array_equal(scale.numpy().ravel(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_to_16_bit_rounds_to_nearest_even(dtype):
    """Dequantize rounds FP32 to the output type as torch does, subnormals, overflow and NaN included."""
    scales = torch.from_numpy(np.concatenate([np.geomspace(1e-12, 1e6, 997), [3.4e38, np.nan]]).astype(np.float32)).view(-1, 1)
    codes = torch.arange(256, dtype=torch.uint8).expand(len(scales), 256).contiguous()
    args = dict(fmt=parse_format("fp8_rowwise_e5m2"), direction=ROWWISE, M=len(scales), K=256, transposed=False)
    wide, narrow = torch.empty(len(scales), 256), torch.empty(len(scales), 256, dtype=dtype)
    kernels.dequantize(codes, scales, None, out=wide, **args)
    kernels.dequantize(codes, scales, None, out=narrow, **args)
    torch.testing.assert_close(narrow, wide.to(dtype), rtol=0, atol=0, equal_nan=True)
    finite = ~wide.isnan()
    assert torch.equal(torch.signbit(narrow)[finite], torch.signbit(wide)[finite])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("element", FP8)
def test_fp8_encode_exhaustive(element):
    """All 2^32 FP32 bit patterns."""
    step = 1 << 24
    for start in range(0, 1 << 32, step):
        x = np.arange(start, start + step, dtype=np.uint64).astype(np.uint32).view(np.float32)
        np.testing.assert_array_equal(fp8_encode(x, element), reference(x, element), err_msg=f"from {start:#x}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fp4_encode_exhaustive():
    """All FP32 bit patterns from 0 to 6.3, both signs."""
    step = 1 << 22
    last = int(np.float32(6.3).view(np.uint32))
    for start in range(0, last, step):
        bits = np.arange(start, min(start + step, last + 1), dtype=np.uint32)
        for sign in (0, 1 << 31):
            x = (bits | np.uint32(sign)).view(np.float32)
            np.testing.assert_array_equal(fp4_encode(x), reference(x, "e2m1"), err_msg=f"from {start:#x}")
