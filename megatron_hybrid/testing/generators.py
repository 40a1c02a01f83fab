"""Seeded inputs and named cases, shared by tests and benchmarks.

Every generator returns float32 (M, K); :func:`cast_input` gives the same values in another dtype.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

f32 = np.float32

# multiples of every block; ragged against each of 16, 32, 128; single rows and columns; empty
SHAPES = (
    *((32, 64), (128, 256), (33, 50), (130, 257), (16, 15), (3, 7)),
    *((1, 16), (1, 1), (47, 1), (0, 64), (64, 0), (0, 0)),
)
SMALL_SHAPES = tuple(s for s in SHAPES if s[0] * s[1] <= 2048)

# every family, element and combination of options that parse_format accepts (delayed scaling needs a scale)
_FP8_OPTIONS = {
    "fp8_current": ("", ":pow2", ":eps=0.5"),
    "fp8_rowwise": ("", ":pow2", ":eps=0.5"),
    "fp8_block": ("", ":no_pow2", ":2d", ":2d,no_pow2", ":eps=0.5"),
    "fp8_delayed": ("",),
    "mxfp8": ("", ":2d"),
}
_NVFP4 = ("nvfp4", "nvfp4:2d", "nvfp4:row_scaled", "nvfp4:rht", "nvfp4:row_scaled,rht")
FORMATS = (
    *(f"{family}_{e}{o}" for family, options in _FP8_OPTIONS.items() for e in ("e4m3", "e5m2") for o in options),
    *_NVFP4,
    *(f"{name},sr" if ":" in name else f"{name}:sr" for name in _NVFP4),
)


def _normal(rng, shape):
    return rng.standard_normal(shape)


def _outlier(rng, shape):
    """Normal with a few elements 1e4 times larger, as activations of large models have."""
    return rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 1e4, 1.0)


def _wide(rng, shape):
    """Magnitudes from 2^-120 to 2^120: scales at both ends of FP32."""
    return rng.standard_normal(shape) * np.exp2(rng.integers(-120, 121, shape))


def _tiny(rng, shape):
    """Mostly FP32 subnormals: scales cap at FLT_MAX, blocks underflow."""
    return rng.standard_normal(shape) * np.exp2(rng.integers(-148, -120, shape))


def _zeros(rng, shape):
    """All zeros, half of them negative."""
    return np.where(rng.random(shape) < 0.5, -0.0, 0.0)


def _ties(rng, shape):
    """Every row holds a power of two times the maximum 6 or 448, the rest are multiples of 1/16: halfway cases."""
    x = rng.integers(-96, 97, shape) / 16.0
    if x.size:
        x[:, 0] = rng.choice([6.0, 448.0, 1.75], shape[0])
    return x


def _special(rng, shape):
    """Normal with NaN, infinities, signed zeros, subnormals and the largest floats strewn in; some rows clean."""
    x = rng.standard_normal(shape)
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-45, 3.4028235e38, -3.3e38])
    hit = (rng.random(shape) < 0.02) & (rng.random((shape[0], 1)) < 0.7)
    return np.where(hit, rng.choice(values, shape), x)


KINDS = {
    "normal": _normal,
    "outlier": _outlier,
    "wide": _wide,
    "tiny": _tiny,
    "zeros": _zeros,
    "ties": _ties,
    "special": _special,
}


def make_input(kind: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """float32 (M, K) of a kind of :data:`KINDS`; the same bytes for the same arguments, everywhere."""
    rng = np.random.default_rng([seed, zlib.crc32(kind.encode()), *shape])
    with np.errstate(all="ignore"):
        return KINDS[kind](rng, shape).astype(f32)


def cast_input(x: np.ndarray, dtype: str):
    """float32 array -> torch CPU tensor of dtype "float32", "bfloat16" or "float16"."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype))


# ---- named cases: one row of input, the exact scale and codes, and the arithmetic


@dataclass(frozen=True)
class NamedCase:
    """x (1, K) float32, cast rowwise to ``format``, stores ``scale`` (``Format.scale_shape``) and ``codes`` (1, K)."""

    name: str
    format: str
    x: np.ndarray
    scale: np.ndarray
    codes: np.ndarray
    why: str


def _row(start, dtype, K: int, fill=0) -> np.ndarray:
    row = np.full((1, K), fill, dtype)
    row[0, : len(start)] = start
    return row


def _case(name, format, x, scale, codes, why, K=32, fill=0) -> NamedCase:
    """``x`` and ``codes`` are the first elements of the row; the other elements are 0 and get the code ``fill``."""
    scale = np.asarray(scale, f32 if format.startswith("fp8") else np.uint8)
    if not format.startswith("fp8_current"):
        scale = scale.reshape(1, -1)
    with np.errstate(all="ignore"):
        return NamedCase(name, format, _row(x, f32, K), scale, _row(codes, np.uint8, K, fill), why)


_INF, _NAN, _MAX = np.inf, np.nan, 3.4028234663852886e38
_ULP = 1 + 2.0**-23  # one float32 ulp above a number whose mantissa is small


def _mxfp8_cases():
    # fl32(1/448) exceeds 1/448 by less than half an ulp of the product, so 448 * 2^k times it is exactly 2^k;
    # 57344 = 448 * 2^7 likewise. E4M3: 448 = 1.75 * 2^8 = 0x7E, 224 = 0x76, 1 = 0x38. Code 127 is the scale 1.
    e4, e5 = "mxfp8_e4m3", "mxfp8_e5m2"
    return (
        _case("zero", e4, [0.0, -0.0], [0], [0x00, 0x80], "v = 0 -> code 0, multiplier 2^127, signs kept"),
        _case("max_exact", e4, [448, -448], [127], [0x7E, 0xFE], "v = 1 exactly: no rounding up"),
        _case("max_exact_2^10", e4, [448 * 2.0**10], [137], [0x7E], "v = 2^10"),
        _case("max_exact_2^-100", e4, [448 * 2.0**-100], [27], [0x7E], "v = 2^-100"),
        _case("max_exact_e5m2", e5, [57344], [127], [0x7B], "57344 = 1.75 * 2^15 = 0x7B"),
        _case("one_ulp_above", e4, [448 * _ULP], [128], [0x76], "v = 1 + 2^-23: up, 448 / 2 = 224, not saturated"),
        _case("one_ulp_above_e5m2", e5, [57344 * _ULP], [128], [0x77], "57344 / 2 = 1.75 * 2^14"),
        _case("one_ulp_below", e4, [448 * (1 - 2.0**-23)], [127], [0x7E], "v just under 1: e = 126, up to 127"),
        _case("subnormal_v_at_2^-127", e4, [448 * 2.0**-127], [0], [0x7E], "m = 0x400000 stays 0; times 2^127 = 448"),
        _case("subnormal_v_above", e4, [449 * 2.0**-127], [1], [0x76], "m > 0x400000: code 1; 449 / 2 -> 224"),
        _case("subnormal_amax", e4, [2.0**-149], [0], [0x00], "v = 0; 2^-149 * 2^127 = 2^-22 -> 0"),
        _case("largest_float", e4, [_MAX, 1.0], [247], [0x78, 0], "v = 2^128 / 448 = 2^119.2: 246 + 1; 2^(128 - 120)"),
        _case("inf", e4, [_INF, -_INF, 1.0, -1.0], [254], [0x7E, 0xFE, 0, 0x80], "254: Inf saturates, 2^-127 -> 0"),
        _case("nan", e4, [1.0, _NAN, _INF], [255], [0x7F] * 3, "255: multiplier NaN, every code NaN", fill=0x7F),
        _case("ties", e4, [448, 1.0625, 1.1875, -1.0625], [127], [0x7E, 0x38, 0x3A, 0xB8], "to the even code"),
        _case("subnormal_ties", e4, [448, 2.0**-10, 3 * 2.0**-10], [127], [0x7E, 0, 2], "half of 2^-9, 1.5 times it"),
        _case("two_blocks", e4, [448] + [0] * 31 + [1.0], [127, 119], [0x7E] + [0] * 31 + [0x78],
              "v = 1/448 = 2^-8.8: e = 118, up; 1 * 2^8 = 256 = 0x78", K=40),
    )  # fmt: skip


def _fp8_cases():
    t, b = "fp8_current_e4m3", "fp8_block_e4m3"
    return (
        _case("zero", t, [0.0, -0.0], 1, [0x00, 0x80], "amax 0 -> scale 1"),
        _case("max", t, [448, 1.0], 1, [0x7E, 0x38], "scale 448/448"),
        _case("inf", t, [_INF, -_INF, 1.0], 1, [0x7E, 0xFE, 0x38], "amax Inf -> scale 1; Inf saturates"),
        _case("nan", t, [_NAN, 1.0], 1, [0x7F, 0x38], "amax NaN -> scale 1; only the NaN is lost"),
        _case("tiny", t, [2.0**-149], 2.0**-128, [0], "448/2^-149 -> FLT_MAX; 1/FLT_MAX = 2^-128; 2^-21 -> 0"),
        _case("tiny_pow2", t + ":pow2", [2.0**-149], 2.0**-127, [0], "FLT_MAX floors to 2^127"),
        _case("pow2", t + ":pow2", [3.0], 2.0**-7, [0x7C], "448/3 = 149.3 -> 128; 384 = 1.5 * 2^8"),
        _case("eps", t + ":eps=0.5", [0.25], f32(1) / f32(896), [0x76], "448/0.5 = 896; 0.25 * 896 = 224"),
        _case("eps_zero", t + ":eps=0.5", [0.0], f32(1) / f32(896), [0], "amax 0 becomes 0.5"),
        _case("e5m2_max", "fp8_current_e5m2", [57344, -57344], 1, [0x7B, 0xFB], "1.75 * 2^15"),
        _case("row_zero", "fp8_rowwise_e4m3", [0.0], [1], [0], "a zero row has scale 1"),
        _case("block_pow2", b, [1.0], [2.0**-8], [0x78], "448 -> 256"),
        _case("block_no_pow2", b + ":no_pow2", [1.0], [f32(1) / f32(448)], [0x7E], "scale 448"),
        _case("block_inf_alone", b, [_INF] + [0] * 127 + [448.0], [1, 1], [0x7E] + [0] * 127 + [0x7E],
              "an Inf touches its own block only", K=200),
    )  # fmt: skip


def _nvfp4_cases():
    # E2M1 codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6. A first element of 2688 = 448 * 6 makes enc exactly 1, and a
    # block amax of 6 then gives S = e4m3(6 * fl32(1/6)) = 1 (0x38): the second block is cast unscaled.
    first = [2688] + [0] * 15
    unscaled = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0]
    even = [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 8]
    codes = [7] + [0] * 15
    return (
        _case("zero", "nvfp4", [0.0, -0.0], [0, 0], [0, 8], "g = 0 -> enc 1, S 0, multiplier FLT_MAX"),
        _case("ties", "nvfp4", first + unscaled, [0x7E, 0x38], codes + even, "halfway goes to the even code"),
        _case("tiny_tensor", "nvfp4", [2.0**-149], [0, 0], [0], "enc = FLT_MAX; S = 2^-21/6 -> 0; 2^-21 -> 0"),
        _case("underflowing_block", "nvfp4", first + [2.0**-12], [0x7E, 0], codes + [7],
              "S = 2^-12/6 < 2^-10 -> 0: multiplier FLT_MAX, clamp 6, decodes to 0"),
        _case("inf", "nvfp4", [_INF, -_INF, 1.0] + [0] * 13 + unscaled, [0x7E, 0x38], [7, 15] + [0] * 14 + even,
              "2688/Inf = 0 -> enc 1; S saturates to 448; 1/448 -> 0; the other block is untouched"),
        _case("nan_block", "nvfp4", [_NAN, 5.0, -1.0] + [0] * 13 + first, [0x7F, 0x7E], [0] * 16 + codes,
              "scale NaN and codes 0; g ignores the NaN"),
        _case("all_nan", "nvfp4", [_NAN] * 16, [0x7F], [0] * 16, "g = 0", K=16),
        _case("row_scaled_inf", "nvfp4:row_scaled", [-_INF], [0x7E, 0], [15], "the row's g is Inf -> enc 1"),
    )  # fmt: skip


NAMED_CASES = (*_mxfp8_cases(), *_fp8_cases(), *_nvfp4_cases())
