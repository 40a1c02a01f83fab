"""What must hold for the oracle whatever its code: tables, named cases, symmetry, special values, histories."""

import ml_dtypes
import numpy as np
import pytest

from megatron_hybrid.formats import COLUMNWISE, DIRECTIONS, ELEMENTS, ROWWISE, parse_format
from megatron_hybrid.testing import oracle
from megatron_hybrid.testing.assertions import assert_bitwise_equal
from megatron_hybrid.testing.generators import FORMATS, KINDS, NAMED_CASES, SHAPES, make_input
from megatron_hybrid.testing.oracle import decode, dequantize, encode, quantize

DETERMINISTIC = [f for f in FORMATS if not parse_format(f).sr]
ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}


def cast(x, fmt, direction, **kwargs):
    """quantize with a fixed scale for delayed scaling and a fixed key for stochastic rounding."""
    f = parse_format(fmt)
    kwargs.setdefault("scale", np.float32(3.0) if f.is_stateful else None)
    kwargs.setdefault("rng", (1, 2, 3, 0, 0, x.shape[1]) if f.sr else None)
    return quantize(x, fmt, direction, **kwargs)


# ---- element casts


@pytest.mark.parametrize("element", ELEMENTS)
def test_decode_and_round_trip_of_every_code(element):
    codes = np.arange(1 << ELEMENTS[element].bits, dtype=np.uint8)
    values = decode(codes, element)
    assert_bitwise_equal(values, codes.view(ML_DTYPES[element]).astype(np.float32), element, any_nan=True)
    finite = np.isfinite(values)
    assert_bitwise_equal(encode(values[finite], element), codes[finite], f"{element} round trip")
    assert values[finite].max() == ELEMENTS[element].max


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_matches_ml_dtypes_in_range(element):
    """All bf16 patterns and 2^18 random float32 patterns, clipped to the range where no rule of ours differs."""
    rng = np.random.default_rng(0)
    all_bf16 = oracle.bf16_to_float32(np.arange(65536, dtype=np.uint16))
    random = rng.integers(0, 2**32, 1 << 18, dtype=np.uint32).view(np.float32)
    midpoints = (oracle.MAGNITUDES[element][1:] + oracle.MAGNITUDES[element][:-1]) / 2
    near = np.concatenate([np.nextafter(midpoints.astype(np.float32), np.float32(d)) for d in (0, 1e9)])
    x = np.concatenate([all_bf16, random, midpoints.astype(np.float32), near])
    x = x[~np.isnan(x)].clip(-ELEMENTS[element].max, ELEMENTS[element].max)
    assert_bitwise_equal(encode(x, element), x.astype(ML_DTYPES[element]).view(np.uint8), element)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_encode_saturates_and_drops_the_sign_of_nan(element):
    top = {"e4m3": 0x7E, "e5m2": 0x7B}[element]
    x = np.array([np.inf, -np.inf, 3e38, -3e38, np.nan, -np.nan, -0.0], np.float32)
    expected = np.array([top, top | 0x80, top, top | 0x80, 0x7F, 0x7F, 0x80], np.uint8)
    assert_bitwise_equal(encode(x, element), expected, element)


def test_bf16_rounding():
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 18, dtype=np.uint32)
    bits[::3] = (bits[::3] & 0xFFFF0000) | 0x8000  # ties
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    assert_bitwise_equal(oracle.round_to(x, "bfloat16"), expected, "float32 -> bf16", any_nan=True)
    every = np.arange(65536, dtype=np.uint16)
    back = oracle.float32_to_bf16(oracle.bf16_to_float32(every))
    assert_bitwise_equal(back | 0x40, every | 0x40, "bf16 -> float32 -> bf16, but for the quiet bit")


def test_e8m0_decode_extremes():
    """Code 0 is the subnormal 2^-127, 254 is 2^127, 255 is NaN."""
    decoded = oracle.e8m0_decode([0, 1, 127, 254, 255])
    assert decoded.tolist()[:4] == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert np.isnan(decoded[4]) and decoded.dtype == np.float32


# ---- named cases and symmetry


@pytest.mark.parametrize("case", NAMED_CASES, ids=lambda c: f"{c.format}-{c.name}")
def test_named_case(case):
    row, col = quantize(case.x, case.format, ROWWISE), quantize(case.x.T, case.format, COLUMNWISE)
    for got in (row, col.T):
        assert_bitwise_equal(got.scale, case.scale, f"scale ({case.why})")
        assert_bitwise_equal(got.codes, case.codes, f"codes ({case.why})")


@pytest.mark.parametrize("fmt", DETERMINISTIC)
def test_columnwise_is_rowwise_of_the_transpose(fmt):
    for shape in SHAPES:
        for kind in KINDS:
            x = make_input(kind, shape)
            row, col = cast(x.T, fmt, ROWWISE), cast(x, fmt, COLUMNWISE)
            for name in ("codes", "scale", "amax", "scale_inv"):
                if getattr(row, name) is not None:
                    assert_bitwise_equal(getattr(col, name), getattr(row, name).T, f"{fmt} {shape} {kind} {name}")
            if parse_format(fmt).tile:
                assert_bitwise_equal(cast(x, fmt, ROWWISE).codes, col.codes, f"{fmt} {shape} {kind} tile")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_shapes_and_dtypes(fmt, direction):
    f = parse_format(fmt)
    for M, K in SHAPES:
        r = cast(make_input("normal", (M, K)), fmt, direction)
        assert r.codes.shape == (M, K) and r.codes.dtype == np.uint8
        assert r.scale.shape == r.block_scale.shape == f.scale_shape(M, K, direction)
        assert r.scale.dtype == (np.float32 if f.scale == "fp32" else np.uint8)
        assert r.scale_inv.shape == r.scale.shape and r.scale_inv.dtype == np.float32
        assert (r.amax is None) == (f.outer_axis == "none")
        if r.amax is not None:
            assert r.amax.shape == f.amax_shape(M, K, direction) and r.amax.dtype == np.float32
        if (M == 0 or K == 0) and r.amax is not None:
            assert not r.amax.any() and (r.outer_scale == 1).all()
        for dtype in ("float32", "bfloat16", "float16"):
            assert dequantize(r, fmt, direction, dtype).shape == (M, K)


def test_empty_tensors_have_scale_one():
    for fmt in ("fp8_current_e4m3", "fp8_current_e5m2:pow2"):
        assert quantize(np.zeros((0, 8)), fmt, ROWWISE).scale == 1
    assert quantize(np.zeros((3, 0)), "fp8_rowwise_e4m3", ROWWISE).scale.tolist() == [[1], [1], [1]]
    r = quantize(np.zeros((0, 8)), "nvfp4", COLUMNWISE)
    assert r.amax == 0 and r.outer_scale == 1


# ---- special values


@pytest.mark.parametrize("fmt", DETERMINISTIC)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nan_is_never_lost(fmt, direction):
    """A NaN element decodes to NaN, and in formats with blocks leaves the other blocks alone."""
    x = make_input("normal", (48, 272))
    clean = dequantize(cast(x, fmt, direction), fmt, direction)
    x[17, 33] = np.nan
    out = dequantize(cast(x, fmt, direction, amax=oracle.outer_amax(x, fmt, direction)), fmt, direction)
    assert np.isnan(out[17, 33])
    if parse_format(fmt).scale == "e8m0":
        assert_bitwise_equal(out[:, 64:], clean[:, 64:], fmt)
        assert np.isnan(out).sum() == (1024 if parse_format(fmt).tile else 32)


@pytest.mark.parametrize("fmt", DETERMINISTIC)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_zero_and_subnormal_blocks_stay_finite(fmt, direction):
    x = make_input("normal", (33, 272))
    x[:, 16:48] = 0.0
    x[:, 48:80] = 1e-41
    for block in (x, np.zeros_like(x), np.full_like(x, 1e-41), np.full_like(x, -1e-45)):
        r = cast(block, fmt, direction)
        assert np.isfinite(r.scale_inv).all()
        assert np.isfinite(dequantize(r, fmt, direction)).all()


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp8_e5m2"])
def test_e8m0_rounds_up_so_the_maximum_is_not_clipped(fmt):
    """Decoded maxima lie within half a code of the true maximum: floor rounding would cut up to 12.5 % more."""
    for exponent in (-100, 0, 100):
        amax = np.ldexp(np.linspace(1, 2, 4097, dtype=np.float32), exponent)
        x = np.zeros((4097, 32), np.float32)
        x[:, 5] = amax
        out = dequantize(quantize(x, fmt, ROWWISE), fmt, ROWWISE)[:, 5]
        significant = ELEMENTS[parse_format(fmt).element].significant_bits
        assert (np.abs(out - amax) <= amax * 2.0**-significant).all()


def test_inputs_of_every_dtype_are_read_exactly():
    x = make_input("outlier", (16, 32))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        with np.errstate(over="ignore"):
            low = x.astype(dtype)
        for fmt in ("nvfp4", "mxfp8_e4m3", "fp8_current_e4m3"):
            a, b = quantize(low, fmt, ROWWISE), quantize(low.astype(np.float32), fmt, ROWWISE)
            assert_bitwise_equal(a.codes, b.codes, f"{fmt} {dtype}")


# ---- Hadamard


def test_hadamard_against_its_matrix_and_inverse():
    """Small integers keep every sum exact, so matrix, transform and inverse agree bit for bit."""
    H = np.array([[1.0]])
    for _ in range(4):
        H = np.block([[H, H], [H, -H]])
    x = np.random.default_rng(0).integers(-50, 51, (7, 40)).astype(np.float32)
    y = oracle._hadamard(x)
    expected = x.copy()
    for start in (0, 16):
        expected[:, start : start + 16] = (x[:, start : start + 16] * oracle.RHT_SIGNS) @ H / 4
    assert_bitwise_equal(y + 0, expected + 0, "transform; the last 8 columns are left as they are")
    assert_bitwise_equal(oracle._hadamard(y, inverse=True) + 0, x + 0, "inverse")


def test_rht_spreads_an_outlier_and_dequantize_undoes_it():
    x = make_input("normal", (32, 64))
    x[3, 5] = 500.0
    for fmt, direction in (("nvfp4:rht", ROWWISE), ("nvfp4:rht", COLUMNWISE), ("nvfp4:row_scaled,rht", ROWWISE)):
        r = quantize(x, fmt, direction)
        assert r.amax.max() < 200  # 500 / 4 plus noise
        error = np.abs(dequantize(r, fmt, direction) - x)
        assert error.max() < 0.25 * 500 and np.median(error) < 2
        domain = dequantize(r, fmt, direction, inverse_rht=False)
        assert_bitwise_equal(domain, decode(r.codes, "e2m1") * oracle._expand(
            r.block_scale, parse_format(fmt).block(direction), x.shape) * r.outer_scale, fmt)  # fmt: skip


# ---- delayed scaling, rowwise_dequantized, products


def test_delayed_update():
    f32 = np.float32
    h, s = oracle.delayed_update([2, 7, 3], f32(1), "fp8_delayed_e4m3:history=3")
    assert h.tolist() == [0, 2, 7] and s == f32(448) / f32(7)  # the oldest drops after it was used
    h, s = oracle.delayed_update([2, 7, 3], f32(1), "fp8_delayed_e5m2:algo=most_recent,history=3,margin=2")
    assert s == f32(57344 / 4) / f32(2)
    for bad in (0.0, np.inf, np.nan):
        h, s = oracle.delayed_update([bad, 0, 0], f32(5), "fp8_delayed_e4m3:history=3")
        assert s == 5 and h[0] == 0
    assert oracle.delayed_update([1e-40], f32(1), "fp8_delayed_e4m3:history=1")[1] == np.finfo(f32).max


def test_delayed_needs_a_scale_and_uses_it():
    x = np.array([[1.0, -300.0]], np.float32)
    with pytest.raises(ValueError, match="scale"):
        quantize(x, "fp8_delayed_e4m3", ROWWISE)
    r = quantize(x, "fp8_delayed_e4m3", ROWWISE, scale=2.0)  # 2 = 0x40; -600 saturates
    assert r.codes.tolist() == [[0x40, 0xFE]] and r.scale == 0.5 and r.amax == 300


def test_rowwise_dequantized():
    x = make_input("normal", (32, 64))
    row, col = oracle.rowwise_dequantized(x, "mxfp8_e4m3", "nvfp4", "bfloat16")
    source = dequantize(row, "mxfp8_e4m3", ROWWISE, "bfloat16")
    assert_bitwise_equal(col.codes, quantize(source, "nvfp4", COLUMNWISE).codes, "column of the row's decode")
    assert (col.codes != quantize(x, "nvfp4", COLUMNWISE).codes).any()
    _, same = oracle.rowwise_dequantized(x, "high_precision", "nvfp4", "float32")
    assert_bitwise_equal(same.codes, quantize(x, "nvfp4", COLUMNWISE).codes, "a high-precision row loses nothing")
    _, identity = oracle.rowwise_dequantized(x, "mxfp8_e4m3", "high_precision", "bfloat16")
    assert_bitwise_equal(identity.codes, source, "a high-precision column is the row's decode")


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_gemm_bound_holds_for_any_order_and_catches_a_lost_term(out_dtype):
    a, b = make_input("normal", (9, 300)), make_input("normal", (300, 5))
    exact, bound = oracle.gemm(a, b), oracle.gemm_bound(a, b, out_dtype)
    order = np.random.default_rng(0).permutation(300)
    for ks in (np.arange(300), order, np.argsort(-np.abs(a[0]))):
        total = np.zeros(exact.shape, np.float32)
        for k in ks:
            total += a[:, k : k + 1] * b[k]
        error = np.abs(oracle.round_to(total, out_dtype).astype(np.float64) - exact)
        assert (error <= bound).all()
    if out_dtype == "float32":
        lost = np.abs(oracle.gemm(a[:, :-1], b[:-1]) - exact)
        assert (lost > bound).mean() > 0.9
