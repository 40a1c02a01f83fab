"""The compiled kernels give the oracle's bytes: every format, direction, shape, kind of input, dtype and layout.

The same tests run on the CPU and, where there is one, on a GPU.
"""

import zlib

import numpy as np
import pytest
import torch

from megatron_hybrid import kernels
from megatron_hybrid.formats import DIRECTIONS, ROWWISE, parse_format
from megatron_hybrid.testing import oracle
from megatron_hybrid.testing.assertions import assert_bitwise_equal
from megatron_hybrid.testing.generators import FORMATS, KINDS, NAMED_CASES, SHAPES, SMALL_SHAPES, cast_input, make_input

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
every_cast = pytest.mark.parametrize("fmt,direction", [(f, d) for f in FORMATS for d in DIRECTIONS])
DTYPES = ("bfloat16", "float32", "float16")
DELAYED_SCALE = 0.7
UNWRITTEN = 0xA5


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of tiny casts: threads would only wait for each other. Threads have a test of their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def lay_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout."""
    M, K = t.shape
    if layout == "transposed":
        return t.T.contiguous().T
    if layout == "slice":  # rows and columns of a larger tensor, off its origin
        big = torch.full((M + 3, K + 5), float("nan"), dtype=t.dtype, device=t.device)
        big[2 : M + 2, 3 : K + 3] = t
        return big[2 : M + 2, 3 : K + 3]
    if layout == "step":  # every second column of every third row
        big = torch.full((3 * M, 2 * K), float("nan"), dtype=t.dtype, device=t.device)
        big[::3, ::2] = t
        return big[::3, ::2]
    return t


LAYOUTS = ("contiguous", "transposed", "slice", "step")


def unpack(qdata: np.ndarray, shape, transposed: bool, bits: int) -> np.ndarray:
    """Stored bytes -> codes (M, K); the unused nibble of an odd row must be 0."""
    if bits == 4:
        qdata = np.stack([qdata & 15, qdata >> 4], axis=-1).reshape(qdata.shape[0], 2 * qdata.shape[1])
        last = shape[0] if transposed else shape[1]
        assert not qdata[:, last:].any(), "the unused nibble is not 0"
        qdata = qdata[:, :last]
    return qdata.T if transposed else qdata


def pack(codes: np.ndarray, transposed: bool, bits: int) -> np.ndarray:
    """Codes (M, K) -> stored bytes, the even one in the low nibble."""
    q = np.ascontiguousarray(codes.T if transposed else codes)
    if bits == 8:
        return q
    q = np.pad(q, ((0, 0), (0, q.shape[1] % 2)))
    return q[:, ::2] | q[:, 1::2] << 4


def run_kernel(x, fmt, direction, *, amax, transposed=False, rng=None, row_ids=None, noop=None):
    """x (M, K) torch tensor -> (codes, scale) as NumPy arrays, from buffers full of a pattern."""
    f, (M, K) = parse_format(fmt), x.shape
    rows, last = (K, M) if transposed else (M, K)
    on = dict(device=x.device)
    qdata = torch.full((rows, last if f.bits == 8 else -(-last // 2)), UNWRITTEN, dtype=torch.uint8, **on)
    scale = torch.full(f.scale_shape(M, K, direction), UNWRITTEN, dtype=torch.uint8, **on)
    scale = scale.float() if f.scale == "fp32" else scale
    if f.is_stateful:
        amax = np.float32(DELAYED_SCALE)
    kernels.quantize(
        x, f, direction, qdata=qdata, scale=scale, transposed=transposed, fixed_scale=f.is_stateful,
        amax=None if amax is None else torch.from_numpy(np.ascontiguousarray(amax)).to(**on).reshape(np.shape(amax)),
        rng=torch.tensor(rng, dtype=torch.int64, **on) if f.sr else None, row_ids=row_ids, noop=noop,
    )  # fmt: skip
    return qdata.cpu().numpy(), scale.cpu().numpy()


def check(x: torch.Tensor, fmt: str, direction: str, what: str, transposed=False, amax=None, rng=None):
    """One cast: outer amax, codes and scale against the oracle's. Returns the oracle's result."""
    f, (M, K) = parse_format(fmt), x.shape
    rng = rng or (7, 11, 13, 0, 0, K)
    if f.outer_axis != "none":
        got = torch.full(f.amax_shape(M, K, direction), -1.0, device=x.device)
        kernels.amax(x, f, direction, got)
        assert_bitwise_equal(got, oracle.outer_amax(x, f, direction), f"{what}: amax", any_nan=True)
    scale = DELAYED_SCALE if f.is_stateful else None
    expected = oracle.quantize(x, f, direction, amax=amax, scale=scale, rng=rng if f.sr else None)
    qdata, stored = run_kernel(x, fmt, direction, amax=expected.amax, transposed=transposed, rng=rng)
    assert_bitwise_equal(stored, expected.scale, f"{what}: scale")
    assert_bitwise_equal(unpack(qdata, (M, K), transposed, f.bits), expected.codes, f"{what}: codes")
    return expected


@on_devices
@every_cast
def test_every_shape_kind_and_dtype(device, fmt, direction):
    """Small shapes take every kind and dtype; large ones every kind. Layouts and orientations alternate."""
    turn = zlib.crc32(f"{fmt}{direction}".encode())
    for shape in SHAPES:
        for kind in KINDS:
            for dtype in DTYPES if shape in SMALL_SHAPES else DTYPES[turn % 3 :][:1]:
                turn += 1
                layout, transposed = LAYOUTS[turn % 4], turn // 4 % 2 == 1
                x = lay_out(cast_input(make_input(kind, shape), dtype).to(device), layout)
                check(x, fmt, direction, f"{fmt} {direction} {shape} {kind} {dtype} {layout} {transposed=}", transposed)


@on_devices
@every_cast
def test_layouts(device, fmt, direction):
    """Every layout with both orientations of the output, and rows that all share one memory."""
    for dtype in DTYPES:
        x = cast_input(make_input("special", (37, 145)), dtype).to(device)
        for transposed in (False, True):
            for layout in LAYOUTS:
                check(lay_out(x, layout), fmt, direction, f"{fmt} {direction} {dtype} {layout}", transposed)
            check(x[:1].expand(37, 145), fmt, direction, f"{fmt} {direction} {dtype} expanded", transposed)


@on_devices
@pytest.mark.parametrize("fmt", [f for f in FORMATS if parse_format(f).outer_axis != "none" and "delayed" not in f])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_amax_reduced_over_ranks(device, fmt, direction):
    """An amax larger than x's own, as a reduction over ranks gives, is taken as it is."""
    f = parse_format(fmt)
    x = cast_input(make_input("normal", (48, 80)), "bfloat16").to(device)
    for factor in (1.5, 1e3, 1e-3, 1e-30, 1e30, np.inf, 0.0):
        with np.errstate(invalid="ignore"):
            amax = np.asarray(oracle.outer_amax(x, f, direction) * np.float32(factor), np.float32)
        check(x, fmt, direction, f"{fmt} {direction} amax x {factor}", amax=amax)


@on_devices
@pytest.mark.parametrize("case", NAMED_CASES, ids=lambda c: f"{c.format}-{c.name}")
def test_named_case(device, case):
    f, x = parse_format(case.format), torch.from_numpy(case.x).to(device)
    amax = oracle.outer_amax(x, f, ROWWISE)
    qdata, scale = run_kernel(x, case.format, ROWWISE, amax=amax)
    assert_bitwise_equal(scale, case.scale, f"{case.name}: scale ({case.why})")
    assert_bitwise_equal(unpack(qdata, x.shape, False, f.bits), case.codes, f"{case.name}: codes ({case.why})")


@on_devices
@pytest.mark.parametrize("fmt", ["fp8_delayed_e4m3", "fp8_delayed_e5m2"])
def test_fp8_element_casts(device, fmt):
    """All bf16 and fp16 patterns, 2^20 random float32 patterns, and every halfway point with its neighbours."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).reshape(256, 256)
    random = np.random.default_rng(0).integers(0, 2**32, (1024, 1024), dtype=np.uint32).view(np.float32)
    grid = oracle.MAGNITUDES[parse_format(fmt).element]
    half = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32) / np.float32(DELAYED_SCALE)
    near = np.concatenate([np.nextafter(half, np.float32(d)) for d in (-1e9, 1e9)] + [half])
    near = np.concatenate([near, -near])[None]
    for x in (every.view(torch.bfloat16), every.view(torch.float16), torch.from_numpy(random), torch.from_numpy(near)):
        check(x.to(device), fmt, ROWWISE, f"{fmt} {x.dtype} {tuple(x.shape)}")


@on_devices
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4:sr"])
def test_e2m1_element_casts(device, fmt):
    """Amax 2688 makes enc 1; a 6 in every block makes S and the multiplier 1: the element cast alone."""
    half = np.concatenate([np.arange(0, 6.25, 0.25), np.random.default_rng(0).uniform(0, 6, 455)]).astype(np.float32)
    x = np.concatenate([half, np.nextafter(half, np.float32(0)), np.nextafter(half, np.float32(7)).clip(0, 6)])
    x = np.concatenate([x, -x]).reshape(-1, 15)
    x = torch.from_numpy(np.concatenate([x, np.full((len(x), 1), 6, np.float32)], axis=1)).to(device)
    expected = check(x, fmt, ROWWISE, fmt, amax=np.float32(2688))
    assert (expected.scale == 0x38).all()


@on_devices
@pytest.mark.parametrize("fmt", [f for f in FORMATS if parse_format(f).sr])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_stochastic_keys(device, fmt, direction):
    """Offsets, indices past 2^32, 32-bit key parts and row ids."""
    x = cast_input(make_input("normal", (33, 80)), "bfloat16").to(device)
    keys = ((0, 0, 0, 0, 0, 80), (2**32 - 1, 2**31, 2**32 - 1, 64, 160, 4096), (1, 2, 3, 2**33 + 5, 16, 8192),
            (1, 2, 3, 3, 5, 83))  # fmt: skip
    for rng in keys:
        check(x, fmt, direction, f"{fmt} {direction} {rng}", rng=rng)
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:33] + 2**32
    rng = (1, 2, 3, 17, 32, 4096)
    expected = oracle.quantize(x, fmt, direction, rng=rng, row_ids=ids.numpy())
    got, _ = run_kernel(x, fmt, direction, amax=expected.amax, rng=rng, row_ids=ids.to(device))
    assert_bitwise_equal(unpack(got, x.shape, False, 4), expected.codes, f"{fmt} {direction} row ids")


def near_halfway(fmt: str, seed: int) -> np.ndarray:
    """(64, 256) float32 whose elements, once scaled, lie within two ulps of a halfway point, and whose NVFP4 block
    maxima lie so near a halfway point of S: any other order of the scale arithmetic shows."""
    f, rng = parse_format(fmt), np.random.default_rng(seed)
    x = make_input("normal", (64, 256), seed) * np.float32(2.0 ** rng.integers(-20, 20))
    width = f.block(ROWWISE)[1] or 256
    top = np.arange(256) % width == 0  # the first element of each block is its maximum and fixes the scale
    x[:, top] = np.abs(x).max() * rng.uniform(1.0, 2.0, (64, top.sum())).astype(np.float32)
    if f.bits == 4:
        x[:, 0] = x.max() * 4
        enc = oracle.nvfp4_encode_scale(oracle.outer_amax(x, f, ROWWISE))
        half = (oracle.MAGNITUDES["e4m3"][60:110] + oracle.MAGNITUDES["e4m3"][61:111]) / 2
        tops = rng.choice(half, (64, top.sum())).astype(np.float32) * 6 / enc
        x[:, top] = np.where(np.arange(top.sum()) == 0, x[:, top], tops)
    scale = DELAYED_SCALE if f.is_stateful else None
    base = oracle.quantize(x, f, ROWWISE, scale=scale, rng=(0, 0, 0, 0, 0, 256) if f.sr else None)
    decode_scale = oracle._expand(base.scale_inv, f.block(ROWWISE), x.shape)
    grid = oracle.MAGNITUDES[f.element]
    near = rng.choice((grid[1:-1] + grid[:-2]) / 2, x.shape).astype(np.float32) * decode_scale
    for _ in range(2):  # each step moves at most one ulp
        step = rng.integers(-1, 2, x.shape)
        near = np.nextafter(near, np.where(step == 0, near, np.copysign(np.float32(np.inf), step)))
    return np.where(top, x, near * rng.choice(np.float32([-1, 1]), x.shape)).astype(np.float32)


@on_devices
@pytest.mark.parametrize("fmt", [f for f in FORMATS if not parse_format(f).rht])
def test_values_that_show_the_order_of_arithmetic(device, fmt):
    for seed in range(6):
        x = torch.from_numpy(near_halfway(fmt, seed))
        check(x.to(device), fmt, ROWWISE, f"{fmt} seed {seed}")


@on_devices
@every_cast
def test_noop(device, fmt, direction):
    """A set flag leaves every byte alone; a cleared one changes nothing about the cast."""
    x = cast_input(make_input("normal", (20, 40)), "float32").to(device)
    f, rng = parse_format(fmt), (1, 2, 3, 0, 0, 40)
    amax = oracle.outer_amax(x, f, direction)
    flags = [torch.tensor([v], dtype=torch.int32, device=device) for v in (0, 1)]
    plain, cleared, held = (run_kernel(x, fmt, direction, amax=amax, rng=rng, noop=n) for n in (None, *flags))
    for i in range(2):
        assert_bitwise_equal(cleared[i], plain[i], f"{fmt} noop 0")
        assert (held[i] == UNWRITTEN).all(), f"{fmt} noop 1 wrote"


@on_devices
@every_cast
def test_dequantize(device, fmt, direction):
    """Decoding, to every dtype and layout, with and without the outer scale and the inverse transform."""
    f = parse_format(fmt)
    inputs = {"special": (37, 145), "wide": (32, 64), "normal": (130, 257), "tiny": (3, 7), "zeros": (0, 8)}
    for kind, shape in inputs.items():
        x, turn = make_input(kind, shape), len(kind)
        scale = DELAYED_SCALE if f.is_stateful else None
        r = oracle.quantize(x, f, direction, scale=scale, rng=(1, 2, 3, 0, 0, shape[1]) if f.sr else None)
        for dtype in DTYPES:
            for outer, inverse in ((True, True), (False, True), (True, False)) if f.bits == 4 else ((True, True),):
                turn += 1
                transposed = turn % 2 == 0
                out = lay_out(torch.full(shape, -3.0, dtype=getattr(torch, dtype), device=device), LAYOUTS[turn % 4])
                buffers = [pack(r.codes, transposed, f.bits), np.ascontiguousarray(r.scale), r.amax]
                q, s, a = (None if b is None else torch.from_numpy(b.copy()).to(device) for b in buffers)
                options = dict(outer=outer, inverse_rht=inverse)
                kernels.dequantize(q, s, a, f, direction, *shape, transposed=transposed, out=out, **options)
                expected = oracle.dequantize(r, f, direction, dtype, **options)
                assert_bitwise_equal(out, expected, f"{fmt} {direction} {shape} {dtype} {options}", any_nan=True)


@on_devices
def test_dequantize_every_code(device):
    """Also the codes and scales that no cast writes."""
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    for fmt, scales in (("mxfp8_e4m3", range(256)), ("mxfp8_e5m2", range(256)), ("nvfp4", range(128))):
        f = parse_format(fmt)
        x = np.tile(codes if f.bits == 8 else codes & 15, (len(scales), 1))
        per_row = 32 // f.block(ROWWISE)[1]
        scale = np.repeat(np.asarray(scales, np.uint8), 8 * per_row).reshape(-1, per_row)
        S = oracle.e8m0_decode(scale) if f.bits == 8 else oracle.decode(scale, "e4m3")
        amax = None if f.bits == 8 else np.asarray(3.0, np.float32)
        outer = np.float32(1) if amax is None else np.float32(1) / oracle.nvfp4_encode_scale(amax)
        expected = oracle.dequantize(oracle.OracleResult(x, scale, amax, S * outer, S, np.asarray(outer)), f, ROWWISE)
        q, s = (torch.from_numpy(b.copy()).to(device) for b in (pack(x, False, f.bits), scale))
        out = torch.empty(x.shape, device=device)
        a = None if amax is None else torch.from_numpy(amax).to(device)
        kernels.dequantize(q, s, a, f, ROWWISE, *x.shape, transposed=False, out=out)
        assert_bitwise_equal(out, expected, f"{fmt} every code under every scale", any_nan=True)


@on_devices
def test_outer_scale(device):
    g = [0.0, 2.0**-149, 1e-40, 1e-36, 1.0, 3.0, 2688.0, 3e38, float(oracle.FLT_MAX), np.inf]
    amax = torch.tensor(g, dtype=torch.float32, device=device)
    got = kernels.outer_scale(amax, parse_format("nvfp4"), torch.empty_like(amax))
    expected = np.float32(1) / oracle.nvfp4_encode_scale(np.array(g, np.float32))
    assert_bitwise_equal(got, expected, "1/enc")


@every_cast
def test_thread_count_changes_nothing(fmt, direction):
    x = cast_input(make_input("outlier", (130, 257)), "bfloat16")
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        check(x, fmt, direction, f"{fmt} {direction} {n} threads")
