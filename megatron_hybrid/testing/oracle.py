"""The numerics a second time: every cast of docs/numerics.md in plain NumPy, slow and meant to be read.

Shares no code with the kernels. An element cast searches the table of all representable magnitudes; scale
arithmetic is NumPy float32, one operation a line, which is IEEE and neither contracts nor flushes. Only
rowwise casts are written out: a columnwise cast is the rowwise cast of the transpose, transposed back.

Shapes: x (M, K); codes (M, K); scales ``Format.scale_shape``; outer amaxes ``Format.amax_shape``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np

from ..formats import COLUMNWISE, ELEMENTS, ROWWISE, Format, parse_format

f32 = np.float32
FLT_MAX = np.finfo(f32).max
RHT_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], f32)
_quiet = np.errstate(all="ignore")  # a decorator: overflow, 1/0 and NaN are part of the rules


@dataclass(frozen=True)
class OracleResult:
    """One direction of a quantized tensor, in the tensor's own (M, K) orientation.

    codes: uint8 (M, K), one code an element (FP4 not packed; the values themselves for high precision).
    scale: as stored: float32 decode scales, uint8 E8M0 or uint8 E4M3 bytes. amax: float32 outer amax or None.
    scale_inv = block_scale * outer_scale: float32 decode scales, unexpanded, and the two levels apart.
    """

    codes: np.ndarray
    scale: np.ndarray
    amax: np.ndarray | None
    scale_inv: np.ndarray
    block_scale: np.ndarray
    outer_scale: np.ndarray

    @property
    def T(self) -> OracleResult:
        return OracleResult(*(None if (v := getattr(self, f.name)) is None else v.T for f in fields(self)))


# ---- bits and elements


def bf16_to_float32(bits) -> np.ndarray:
    """uint16 bit patterns -> float32: bfloat16 is the upper half of a float32."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(f32)


def float32_to_bf16(x) -> np.ndarray:
    """float32 -> uint16 bfloat16 bit patterns, nearest even; NaN stays a (quiet) NaN."""
    bits = np.asarray(x, f32).view(np.uint32).astype(np.uint64)
    lower_half, odd = bits & 0xFFFF, (bits >> 16) & 1
    up = (lower_half > 0x8000) | ((lower_half == 0x8000) & (odd == 1))
    nan = np.isnan(np.asarray(x, f32))
    return np.where(nan, (bits >> 16) | 0x40, (bits >> 16) + up).astype(np.uint16)


def as_float32(x) -> np.ndarray:
    """Any bf16 / fp16 / fp32 NumPy array or torch tensor -> float32, exactly."""
    if hasattr(x, "detach"):
        x = x.detach().float().cpu().numpy()
    return np.asarray(x).astype(f32)


@_quiet
def round_to(x: np.ndarray, dtype) -> np.ndarray:
    """float32 -> ``dtype`` ("float32", "bfloat16", "float16" or the torch dtype), nearest even."""
    name = str(dtype).removeprefix("torch.")
    if name == "bfloat16":
        return float32_to_bf16(x).view(ml_dtypes.bfloat16)
    if name not in ("float32", "float16"):
        raise ValueError(f"dtype {dtype!r}; valid: float32, bfloat16, float16")
    return np.asarray(x, f32).astype(name)


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int, largest: float) -> np.ndarray:
    """Magnitude of each non-negative code, ascending, up to ``largest``: index = code, float64."""
    code = np.arange(2 ** (exponent_bits + mantissa_bits))
    e, m = code >> mantissa_bits, (code & (2**mantissa_bits - 1)) / 2.0**mantissa_bits
    value = np.where(e == 0, np.ldexp(m, 1 - bias), np.ldexp(1 + m, e - bias))
    return value[value <= largest]  # what lies above are the Inf and NaN codes


MAGNITUDES = {
    "e4m3": _magnitudes(4, 3, 7, 448.0),
    "e5m2": _magnitudes(5, 2, 15, 57344.0),
    "e2m1": _magnitudes(2, 1, 1, 6.0),
}


def encode(v: np.ndarray, element: str) -> np.ndarray:
    """float32 -> codes: nearest, ties to the even code, saturating; -0.0 keeps its sign, NaN is 0x7F.

    The code's lowest bit is the mantissa's, so the even code is the even mantissa, also across a binade.
    """
    grid = MAGNITUDES[element]
    halfway = (grid[1:] + grid[:-1]) / 2  # exact in float64
    magnitude = np.abs(v).astype(np.float64)
    code = np.searchsorted(halfway, magnitude)  # how many midpoints lie strictly below: a tie takes the lower code
    tie = (code < halfway.size) & (halfway[np.minimum(code, halfway.size - 1)] == magnitude)
    code = code + (tie & (code % 2 == 1))
    signed = code | np.where(np.signbit(v), 1 << (ELEMENTS[element].bits - 1), 0)
    return np.where(np.isnan(v), 0x7F, signed).astype(np.uint8)


def decode(codes: np.ndarray, element: str) -> np.ndarray:
    """Codes -> float32; E4M3 0x7F and E5M2 0x7D.. are NaN, E5M2 0x7C is Inf (no cast writes it)."""
    grid, sign = MAGNITUDES[element], 1 << (ELEMENTS[element].bits - 1)
    table = np.full(sign, np.nan)
    table[: grid.size] = grid
    if element == "e5m2":
        table[0x7C] = np.inf
    magnitude = table[np.asarray(codes) & (sign - 1)]
    return np.where(np.asarray(codes) & sign, -magnitude, magnitude).astype(f32)


# ---- blocks


def _block_amax(v: np.ndarray, block) -> np.ndarray:
    """(M, K) -> amax of each (bm, bk) block, NaN propagating; a ragged block uses the elements it has."""
    bm, bk = (max(n, 1) if b is None else b for b, n in zip(block, v.shape))
    nm, nk = (1 if b is None else -(-n // b) for b, n in zip(block, v.shape))
    padded = np.zeros((nm * bm, nk * bk), f32)
    padded[: v.shape[0], : v.shape[1]] = np.abs(v)
    return padded.reshape(nm, bm, nk, bk).max(axis=(1, 3), initial=0)


def _expand(scale: np.ndarray, block, shape) -> np.ndarray:
    """Block values -> one an element, (M, K). Scalars, (M, 1) and (1, K) are left to broadcasting."""
    if scale.ndim == 2:
        for axis in (0, 1):
            if block[axis] is not None:
                scale = np.repeat(scale, block[axis], axis=axis)
        scale = scale[: shape[0], : shape[1]]
    return np.broadcast_to(scale, shape)


def _hadamard(v: np.ndarray, inverse: bool = False) -> np.ndarray:
    """Size-16 transform along the last axis of (M, K): butterfly(x * s) / 4, inverse butterfly(y) / 4 * s."""
    out = v.copy()
    for start in range(0, v.shape[1] - 15, 16):  # a last block under 16 stays as it is
        y = v[:, start : start + 16] * (f32(1) if inverse else RHT_SIGNS)
        for stride in (1, 2, 4, 8):
            pairs = y.reshape(-1, 16 // (2 * stride), 2, stride)
            a, b = pairs[:, :, 0], pairs[:, :, 1]
            y = np.stack([a + b, a - b], axis=2).reshape(-1, 16)
        y = y / f32(4)
        out[:, start : start + 16] = y * RHT_SIGNS if inverse else y
    return out


# ---- scale rules


@_quiet
def fp32_scale(amax: np.ndarray, element: str, pow2: bool = False, eps: float = 0.0) -> np.ndarray:
    """Encode scale max / amax: 1 for an amax of 0, Inf or NaN; Inf -> FLT_MAX; pow2 clears the mantissa."""
    amax = np.maximum(np.asarray(amax, f32), f32(eps))
    scale = f32(ELEMENTS[element].max) / amax
    scale = np.asarray(np.where(np.isinf(scale), FLT_MAX, scale), f32)
    if pow2:
        scale = (scale.view(np.uint32) & np.uint32(0x7F800000)).view(f32)
    return np.asarray(np.where(np.isfinite(amax) & (amax > 0), scale, 1), f32)


@_quiet
def e8m0_scale(amax: np.ndarray, element: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(code, multiplier 2^(127 - code), decode scale 2^(code - 127)) of a block amax: rounded up."""
    v = amax * (f32(1) / f32(ELEMENTS[element].max))
    bits = v.view(np.uint32).astype(np.int64)
    e, m = bits >> 23, bits & 0x7FFFFF
    code = np.where(e == 0, m > 0x400000, np.minimum(e + (m > 0), 254))  # 2^-127 itself is code 0
    code = np.where(np.isnan(v), 255, np.where(np.isinf(v), 254, code))
    nan = code == 255
    multiplier = np.where(nan, np.nan, np.ldexp(1.0, 127 - code)).astype(f32)
    return code.astype(np.uint8), multiplier, e8m0_decode(code)


def e8m0_decode(code) -> np.ndarray:
    """2^(code - 127) in float32 (code 0 is subnormal), NaN for 255."""
    code = np.asarray(code, np.int64)
    return np.where(code == 255, np.nan, np.ldexp(1.0, code - 127)).astype(f32)


@_quiet
def nvfp4_encode_scale(g) -> np.ndarray:
    """enc = 2688 / g: capped at FLT_MAX, 1 when g is 0 or the quotient would be."""
    enc = np.minimum(f32(2688) / np.asarray(g, f32), FLT_MAX)
    return np.asarray(np.where((np.asarray(g) == 0) | (enc == 0), f32(1), enc), f32)


@_quiet
def delayed_update(history, scale, fmt) -> tuple[np.ndarray, np.ndarray]:
    """One step of delayed scaling: (history, scale) -> the next ones. history: (H,), entry 0 is this step's."""
    fmt, history, scale = parse_format(fmt), np.asarray(history, f32), np.asarray(scale, f32)
    amax = history.max() if fmt.option("algo") == "max" else history[0]  # NaN propagates
    following = np.concatenate([np.zeros(1, f32), history[:-1]])
    if not np.isfinite(amax) or amax == 0:
        return following, scale
    new = f32(ELEMENTS[fmt.element].max * 2.0 ** -fmt.option("margin")) / amax
    return following, np.asarray(np.minimum(new, FLT_MAX), f32)


# ---- stochastic rounding


def philox4x32(counter, key) -> np.ndarray:
    """Philox 4x32-10: uint32 counters (..., 4) and a key (2,) -> uint32 (..., 4)."""
    c = [np.asarray(counter, np.uint64)[..., i] for i in range(4)]
    k0, k1 = int(key[0]), int(key[1])
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> 32) ^ c[1] ^ np.uint64(k0), p1 & low, (p0 >> 32) ^ c[3] ^ np.uint64(k1), p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=-1).astype(np.uint32)


def random16(shape, direction: str, rng, row_ids=None) -> np.ndarray:
    """The 16 random bits of each element of a local (M, K): a function of its position in the global tensor.

    rng: (seed, tensor_id, counter, row_offset, col_offset, global_K), or a dict with these keys.
    row_ids: (M,) global row of each local row, instead of row_offset.
    """
    if isinstance(rng, dict):
        rng = [rng[k] for k in ("seed", "tensor_id", "counter", "row_offset", "col_offset", "global_K")]
    seed, tensor_id, step, row_offset, col_offset, global_K = (int(v) for v in rng)
    rows = row_offset + np.arange(shape[0]) if row_ids is None else np.asarray(row_ids)
    index = rows.astype(np.uint64)[:, None] * np.uint64(global_K) + np.uint64(col_offset)
    index = index + np.arange(shape[1], dtype=np.uint64)
    call, lane = index >> 3, (index & np.uint64(7)).astype(np.int64)
    words = np.zeros((*shape, 4), np.uint64)
    words[..., 0], words[..., 1] = call & np.uint64(0xFFFFFFFF), call >> 32
    words[..., 2], words[..., 3] = step & 0xFFFFFFFF, 0 if direction == ROWWISE else 1
    out = philox4x32(words, (seed & 0xFFFFFFFF, tensor_id & 0xFFFFFFFF))
    word = np.take_along_axis(out, lane[..., None] // 2, axis=-1)[..., 0]
    return np.where(lane % 2 == 0, word & 0xFFFF, word >> 16).astype(np.uint32)


def encode_e2m1_stochastic(v: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The upper neighbour when u < floor(65536 * (|v| - lo) / (hi - lo)), else the lower; |v| <= 6, no NaN."""
    grid = MAGNITUDES["e2m1"].astype(f32)
    magnitude = np.abs(v)
    lo = np.searchsorted(grid, magnitude, side="right") - 1  # largest code not above |v|
    hi = np.minimum(lo + 1, grid.size - 1)
    gap = np.where(hi > lo, grid[hi] - grid[lo], f32(1))
    f = np.floor(f32(65536) * ((magnitude - grid[lo]) / gap))  # exact: gap is a power of two
    code = np.where(u < f, hi, lo)
    return (code | np.where(np.signbit(v), 8, 0)).astype(np.uint8)


# ---- quantize and dequantize


@_quiet
def outer_amax(x, fmt, direction: str) -> np.ndarray | None:
    """The FP32 amax a cast needs before it starts: ``Format.amax_shape``, or None. NVFP4 ignores NaN."""
    fmt = parse_format(fmt)
    if direction == COLUMNWISE:
        amax = outer_amax(as_float32(x).T, fmt, ROWWISE)
        return None if amax is None else amax.T
    if fmt.outer_axis == "none":
        return None
    v = as_float32(x)
    v = _hadamard(v) if fmt.rht else v
    if fmt.scale == "e4m3_amax":
        v = np.where(np.isnan(v), f32(0), v)
    if fmt.outer_axis == "row":
        return _block_amax(v, (1, None))
    return np.asarray(np.abs(v).max(initial=0), f32)


def quantize(x, fmt, direction: str, amax=None, scale=None, rng=None, row_ids=None) -> OracleResult:
    """Cast x (M, K), bf16 / fp16 / fp32, in one direction.

    amax: outer amax (``Format.amax_shape``) already reduced over ranks; None takes it from x.
    scale: the encode scale, for delayed scaling. rng, row_ids: see :func:`random16`, for `sr`.
    """
    fmt = parse_format(fmt)
    if not fmt.is_quantized:
        one = np.ones((), f32)
        return OracleResult(np.asarray(x), one, None, one, one, one)
    v = as_float32(x)
    if fmt.sr and rng is None:
        raise ValueError(f"{fmt} rounds stochastically and needs rng")
    u = random16(v.shape, direction, rng, row_ids) if fmt.sr else None
    amax = outer_amax(x, fmt, direction) if amax is None else np.asarray(amax, f32)
    if direction == COLUMNWISE:
        v, u = v.T, None if u is None else u.T
        return _quantize_rows(v, fmt, None if amax is None else amax.T, scale, u).T
    return _quantize_rows(v, fmt, amax, scale, u)


@_quiet
def _quantize_rows(v: np.ndarray, fmt: Format, amax, scale, u) -> OracleResult:
    if fmt.scale == "e4m3_amax":
        return _quantize_nvfp4(v, fmt, amax, u)
    one, block = np.ones((), f32), fmt.block(ROWWISE)
    if fmt.scale == "e8m0":
        stored, multiplier, scale_inv = e8m0_scale(_block_amax(v, block), fmt.element)
    else:
        if fmt.is_stateful and scale is None:
            raise ValueError(f"{fmt} needs the scale of its history")
        if scale is None:
            scale = fp32_scale(_block_amax(v, block) if amax is None else amax, fmt.element, fmt.pow2, fmt.eps)
        multiplier = np.asarray(scale, f32)
        stored = scale_inv = np.asarray(f32(1) / multiplier, f32)
    codes = encode(v * _expand(multiplier, block, v.shape), fmt.element)
    return OracleResult(codes, stored, amax, scale_inv, scale_inv, one)


def _quantize_nvfp4(v: np.ndarray, fmt: Format, g: np.ndarray, u) -> OracleResult:
    v = _hadamard(v) if fmt.rht else v
    block = fmt.block(ROWWISE)
    enc = nvfp4_encode_scale(g)
    outer = np.asarray(f32(1) / enc, f32)
    wanted = _block_amax(v, block) * (enc * (f32(1) / f32(6)))
    stored = encode(np.minimum(wanted, FLT_MAX), "e4m3")  # np.minimum keeps NaN: code 0x7F
    S = decode(stored, "e4m3")
    multiplier = np.minimum(f32(1) / (S * outer), FLT_MAX)
    nan_block = _expand(np.isnan(S), block, v.shape)
    scaled = np.where(nan_block, f32(0), np.clip(v * _expand(multiplier, block, v.shape), f32(-6), f32(6)))
    codes = encode(scaled, "e2m1") if u is None else encode_e2m1_stochastic(scaled, u)
    return OracleResult(codes, stored, np.asarray(g, f32), S * outer, S, outer)


@_quiet
def dequantize(result: OracleResult, fmt, direction: str, dtype="float32", outer=True, inverse_rht=True) -> np.ndarray:
    """Decode to (M, K): in FP32, then rounded to ``dtype``. outer=False leaves NVFP4's 1/enc out."""
    fmt = parse_format(fmt)
    if not fmt.is_quantized:
        return round_to(as_float32(result.codes), dtype)
    if direction == COLUMNWISE:
        return dequantize(result.T, fmt, ROWWISE, dtype, outer, inverse_rht).T
    v = decode(result.codes, fmt.element) * _expand(result.block_scale, fmt.block(ROWWISE), result.codes.shape)
    if outer:
        v = v * result.outer_scale
    v = _hadamard(v, inverse=True) if fmt.rht and inverse_rht else v
    return round_to(v, dtype)


def rowwise_dequantized(x, row_fmt, col_fmt, dtype, row=None, col=None) -> tuple[OracleResult, OracleResult]:
    """Both directions when the column is cast from the row payload's decode, rounded to the nominal ``dtype``.

    row, col: keyword arguments of :func:`quantize` for each direction.
    """
    rowwise = quantize(x, row_fmt, ROWWISE, **(row or {}))
    source = dequantize(rowwise, row_fmt, ROWWISE, dtype)
    return rowwise, quantize(source, col_fmt, COLUMNWISE, **(col or {}))


# ---- matrix products


def gemm(a, b) -> np.ndarray:
    """(M, K) @ (K, N) of decoded operands in float64: the reference every gemm is compared to."""
    return as_float32(a).astype(np.float64) @ as_float32(b).astype(np.float64)


def gemm_bound(a, b, out_dtype="float32", extra_roundings: int = 4) -> np.ndarray:
    """Largest |result - gemm(a, b)| that FP32 accumulation in any order can produce, (M, N) float64.

    Each product passes at most K - 1 additions, its own rounding and ``extra_roundings`` more (scales applied
    between partial sums or in the epilogue): n roundings of u = 2^-24 change it by at most n*u / (1 - n*u),
    and by no more than the smallest subnormal each where they underflow. Then one rounding to ``out_dtype``.
    Native FP8 sums on Hopper keep fewer bits: they do not stay within this bound.
    """
    a, b = (np.abs(as_float32(t)).astype(np.float64) for t in (a, b))
    n, u = a.shape[1] + extra_roundings, 2.0**-24
    error = n * u / (1 - n * u) * (a @ b) + n * 2.0**-149
    significant, smallest = {"float32": (24, 2.0**-149), "bfloat16": (8, 2.0**-133), "float16": (11, 2.0**-24)}[
        str(out_dtype).removeprefix("torch.")
    ]
    return error + 2.0**-significant * (a @ b + error) + smallest / 2
