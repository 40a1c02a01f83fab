"""Native FP8 GEMMs against the products of the same codes, within a bound derived from the hardware's sums.

Hopper's FP8 tensor cores add 32 products to the running sum at once: all 33 are aligned to the largest and cut off 13
bits below its leading bit, and so is the sum. Each loses less than 2^-13 of the largest, all of a group less than
34 * 2^-13 * max(|running sum|, |products|). `fast` runs on through the whole contraction; otherwise sums are promoted to
FP32 every 128, where adding and scaling round to 2^-24. The output is rounded once, to 2^-8 (bf16).
"""

import dataclasses
import functools

import pytest
import torch

import megatron_hybrid as mh
from megatron_hybrid.formats import COLUMNWISE, parse_format
from megatron_hybrid.gemm import BACKENDS, OPERANDS, DeviceKind, GemmPair, cublaslt
from megatron_hybrid.storage import cast

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BY_NAME = {b.name: b for b in BACKENDS}
PAIRS = [
    ("fp8_current_e4m3", "fp8_current_e4m3"),
    ("fp8_current_e5m2", "fp8_current_e4m3"),
    ("fp8_rowwise_e4m3", "fp8_rowwise_e4m3"),
    ("fp8_rowwise_e5m2", "fp8_rowwise_e4m3"),
    ("fp8_block_e4m3", "fp8_block_e4m3:2d"),
    ("fp8_block_e4m3:no_pow2", "fp8_block_e4m3:2d,no_pow2"),
    ("fp8_block_e5m2", "fp8_block_e4m3:2d"),
    ("fp8_block_e4m3", "fp8_block_e4m3"),
    ("fp8_block_e5m2", "fp8_block_e4m3"),
]
SHAPES = [(256, 512, 384), (1, 16, 16), (4, 16, 16), (200, 144, 272), (96, 640, 1408), (33, 129, 127)]  # M, N, K


def matrix(rows, columns, seed):
    """bf16 on the CPU, magnitudes that differ from block to block."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    return (x * torch.exp2(torch.randint(-3, 4, (rows, 1), generator=g)) * torch.exp2(torch.arange(columns) % 5)).bfloat16()


def operands(gemm, formats, M, N, K):
    """(payload A, payload B) on the GPU, cast on the CPU, columns laid out as the native GEMM reads them."""
    shapes = {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}
    payloads = []
    for seed, ((operand, direction), fmt) in enumerate(zip(OPERANDS[gemm], formats)):
        s = cast(matrix(*shapes[operand], seed), parse_format(fmt), direction, transposed=direction == COLUMNWISE)
        payloads.append(s)
    return payloads, [s.with_buffers({n: t.cuda() for n, t in s.buffers().items()}) for s in payloads]


def ways(pair):
    """The native GEMM through torch's function and, where this package is built with it, through the library's own."""
    run = BY_NAME["scaled_mm"].prepare(pair)
    return [dataclasses.replace(run, direct=direct) for direct in {False, cublaslt.library() is not None}]


def bound(a, b, accumulation, dtype):
    """(exact product, how far from it a result may be) of operands (rows, contraction) on the GPU, float64."""
    exact, lost = lost_in_sums(a, b, accumulation)
    lost = lost + (a.shape[1] / 128 + 4) * 2.0**-24 * (a.abs() @ b.abs().T)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
    return exact, lost + (exact.abs() + lost) * rounding


def lost_in_sums(a, b, accumulation):
    lost = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device="cuda")
    running = torch.zeros_like(lost)
    for start in range(0, a.shape[1], 32):
        if accumulation == "full" and start % 128 == 0:
            running = torch.zeros_like(lost)
        pa, pb = a[:, start : start + 32], b[:, start : start + 32]
        largest = functools.reduce(torch.maximum, [pa[:, k, None].abs() * pb[:, k].abs() for k in range(pa.shape[1])])
        lost += 34 * 2.0**-13 * torch.maximum(largest, running.abs() + lost)
        running = running + pa @ pb.T
    return a @ b.T, lost


@pytest.mark.parametrize("accumulate", ["fast", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("formats", PAIRS)
def test_native_is_within_the_bound_of_its_accumulation(formats, shape, gemm, dtype, accumulate):
    device = DeviceKind.of("cuda")
    pair = GemmPair(gemm, *map(parse_format, formats), device, accumulate)
    native = BY_NAME["scaled_mm"]
    if (reason := native.reason(pair)) is not None:
        pytest.skip(reason)
    (cpu_a, cpu_b), (a, b) = operands(gemm, formats, *shape)
    wide_a, wide_b = (s.operand(torch.float32).double().cuda() for s in (cpu_a, cpu_b))
    exact, allowed = bound(wide_a, wide_b, native.accumulation(pair), dtype)
    for run in ways(pair):
        got = run(a, b, dtype)
        assert got.dtype == dtype and got.shape == exact.shape
        worst = ((got.double() - exact).abs() - allowed).max()
        assert worst <= 0, f"{worst:.3g} beyond the bound, {run}"
    for emulated in (BY_NAME["emulated"].run(cpu_a, cpu_b, pair, dtype).cuda(), BY_NAME["emulated"].run(a, b, pair, dtype)):
        assert ((emulated.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("formats", PAIRS)
def test_native_adds_into_an_fp32_accumulator(formats):
    pair = GemmPair("wgrad", *map(parse_format, formats), DeviceKind.of("cuda"))
    if (reason := BY_NAME["scaled_mm"].reason(pair)) is not None:
        pytest.skip(reason)
    _, (a, b) = operands("wgrad", formats, 256, 128, 384)
    for run in ways(pair):
        once = run(a, b, torch.float32)
        total = torch.ones_like(once)
        assert run(a, b, torch.float32, accumulate_into=total) is total
        # once is rounded from the FP32 sums and total from the sums plus one, or both are
        assert ((total - (once + 1)).abs() <= 2.0**-23 * (once.abs() + total.abs())).all()


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "formats",
    [("nvfp4", "nvfp4:2d"), ("nvfp4", "mxfp8_e4m3"), ("nvfp4:row_scaled", "nvfp4"), ("nvfp4:row_scaled", "nvfp4:row_scaled"),
     ("fp8_current_e5m2", "fp8_current_e5m2"), ("fp8_block_e4m3:2d", "high_precision")],
)  # fmt: skip
def test_emulated_products_are_fp32_sums_of_exact_operands(formats, shape, dtype, adds):
    pair = GemmPair("fprop", *map(parse_format, formats), DeviceKind.of("cuda"))
    (cpu_a, cpu_b), (a, b) = operands("fprop", formats, *shape)
    x, w = (s.operand(torch.float32).double().cuda() for s in (cpu_a, cpu_b))
    exact, sums = x @ w.T, x.abs() @ w.abs().T
    total = torch.full_like(exact, 3.0, dtype=torch.float32) if adds else None
    got = BY_NAME["emulated"].run(a, b, pair, dtype, total)
    assert got is total if adds else got.dtype == dtype
    # sums of K products; outer scales and decoding round a few times; a split sum may be added up in bf16 (mm_into)
    rounding = 2.0**-24 if adds or dtype == torch.float32 else 2.0**-7
    allowed = (shape[2] + 8) * 2.0**-24 * (sums + 3) + rounding * (exact.abs() + 3)
    assert ((got.double() - exact - (3 if adds else 0)).abs() <= allowed).all()


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("shape", [(0, 32, 32), (32, 0, 32), (32, 32, 0)])
def test_native_empty_sizes(formats, shape):
    pair = GemmPair("fprop", *map(parse_format, formats), DeviceKind.of("cuda"))
    if (reason := BY_NAME["scaled_mm"].reason(pair)) is not None:
        pytest.skip(reason)
    _, (a, b) = operands("fprop", formats, *shape)
    out = BY_NAME["scaled_mm"].run(a, b, pair, torch.bfloat16)
    assert out.shape == shape[:2] and not out.any()


@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise", "fp8_block"])
def test_a_linear_runs_its_three_gemms_natively(name):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper has all of them")
    layer = mh.HybridLinear(384, 512, recipe=name, device="cuda", dtype=torch.bfloat16)
    assert all(step.runs == "native" for step in layer.plan.steps().values())
    x = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn_like(y))
    assert layer.plan.counts() == {"native": 3}
    for t in (y, x.grad, layer.weight.grad):
        assert torch.isfinite(t).all() and t.abs().sum() > 0


@pytest.mark.skipif(torch.cuda.is_available() and cublaslt.library() is None, reason="built without cuBLASLt")
def test_more_shapes_than_are_remembered():
    """Past the bound the plans are made anew; products before and after are right, into an FP32 sum too."""
    a = torch.randint(-4, 5, (8 * 4200, 16), device="cuda").bfloat16()
    b = torch.randint(-4, 5, (8, 16), device="cuda").bfloat16()
    expected, types = a.float() @ b.float().T, (torch.bfloat16, torch.bfloat16)
    assert cublaslt.takes(a, b)
    for blocks in (*range(1, 4200), 1, 2):
        out = torch.zeros(8 * blocks, 8, device="cuda")
        cublaslt.multiply(a[: 8 * blocks], b, out, dtypes=types, add=True)
        if blocks < 3 or blocks > 4190:
            assert torch.equal(out, expected[: 8 * blocks]), blocks
