"""Checks of the fused statistics against the torch code: counts and extremes exactly, sums within FP32's roundings.

Run as a script (with TRITON_INTERPRET=1) they run on the CPU and print check -> error or null as JSON.
"""

from __future__ import annotations

import itertools
from unittest import mock

import interpreted
import torch
from ops_triton_cases import U32

from megatron_hybrid.formats import parse_format
from megatron_hybrid.observe import statistics
from megatron_hybrid.observe.statistics import FIELDS, measure_by_torch, measure_fused
from megatron_hybrid.ops_triton import statistics as fused
from megatron_hybrid.scaling import DelayedState, Rng
from megatron_hybrid.storage import QuantizedStorage, cast
from megatron_hybrid.storage_layout import narrow

FORMATS = [
    "fp8_current_e4m3", "fp8_current_e5m2", "fp8_delayed_e4m3", "fp8_rowwise_e4m3", "fp8_rowwise_e5m2",
    "fp8_block_e4m3", "fp8_block_e5m2:2d", "fp8_block_e4m3:no_pow2", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp8_e4m3:2d",
    "nvfp4", "nvfp4:2d", "nvfp4:row_scaled", "nvfp4:rht", "nvfp4:row_scaled,rht",
]  # fmt: skip
DIRECTIONS = ("rowwise", "columnwise")


def data(rows, columns, device, dtype=torch.bfloat16, seed=0):
    """Rows of many sizes, a row of zeros, a column of outliers, zeros among the rest."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=g))
    x[rows // 2], x[:, columns // 3] = 0, x[:, columns // 3] * 50
    x[torch.rand(rows, columns, generator=g) < 0.05] = 0
    return x.to(device=device, dtype=dtype)


def payload(x, name, direction, transposed):
    fmt = parse_format(name)
    state = DelayedState.new(fmt, x.device) if fmt.is_stateful else None
    return cast(x, fmt, direction, transposed=transposed, state=state)


def compared(s, x) -> dict:
    """The torch code on what the kernels read: a transform's results may differ by a rounding from run to run."""
    runs = torch.cat([run for _, run in statistics._references(s, x)]).float()
    decoded = s.decode(torch.empty(s.shape, dtype=torch.float32, device=s.device), inverse_rht=False)
    reference = runs.T if s.transposed else runs
    numbers = statistics._range(s.scale_inv()) | statistics._compare(reference, decoded.clone(), s)
    exact = reference.double(), decoded.double()
    return numbers, exact, statistics.exponents(s.scale_inv())


def added_in_fp32(run) -> int:
    """Numbers of each place of a tile, one after another."""
    tiles = fused.Tiles.of(run)
    return -(-tiles.count // tiles.programs)


def equal(s, x):
    got = measure_fused(s, x)
    assert got.numbers.dtype == torch.float64 and got.exponents.dtype == torch.int64
    numbers = dict(zip(FIELDS, got.numbers.tolist(), strict=True))
    expected, (v, q), exponents = compared(s, x)
    assert torch.equal(got.exponents, exponents)
    for name in FIELDS[:7]:
        a, b = torch.tensor(numbers[name], dtype=torch.float64), expected[name].double().cpu()
        assert torch.equal(a, b) or (a.isnan() and b.isnan()), (name, a, b)
    error, added = v - q, max(added_in_fp32(run) for _, run in statistics._references(s, x))
    for name, terms in {"signal": v * v, "noise": error * error, "gain": error * (v + q)}.items():
        exact, allowed = terms.sum().item(), (added + 4) * U32 * terms.abs().sum().item()
        allowed += x.numel() * 2.0**-149  # products that are subnormal
        if not terms.isfinite().all():  # a NaN or an Inf: what the torch code says
            exact, allowed = expected[name].item(), 0
        same = exact == numbers[name] or (exact != exact and numbers[name] != numbers[name])
        assert same or abs(exact - numbers[name]) <= allowed, (name, numbers[name], exact, allowed)


def every_format(device, direction, transposed):
    for name in FORMATS:
        x = data(37, 43, device)
        equal(payload(x, name, direction, transposed), x)


def check_rows(device):
    every_format(device, "rowwise", False)


def check_columns(device):
    every_format(device, "columnwise", False)


def check_transposed_rows(device):
    every_format(device, "rowwise", True)


def check_transposed_columns(device):
    every_format(device, "columnwise", True)


def check_dtypes_and_strides(device):
    for name, dtype in itertools.product(("mxfp8_e4m3", "nvfp4", "nvfp4:rht"), (torch.float16, torch.float32)):
        x = data(48, 64, device, dtype)
        for direction in DIRECTIONS:
            equal(payload(x, name, direction, direction == "columnwise"), x)
    wide = data(48, 80, device)
    for name, x in itertools.product(("fp8_current_e4m3", "nvfp4"), (wide.T, wide[:, ::2], wide[1:, 8:60])):
        for direction in DIRECTIONS:
            equal(payload(x, name, direction, direction == "columnwise"), x)


def check_many_tiles_and_programs(device):
    """Ragged tiles in both orders, several a program, and runs of a transform."""
    with mock.patch.object(fused, "_MOST_PROGRAMS", 3), mock.patch.object(statistics, "_RUN", 2000):
        for name, direction in itertools.product(("fp8_block_e4m3", "fp8_block_e5m2:2d", "nvfp4:rht"), DIRECTIONS):
            x = data(135, 270, device)
            equal(payload(x, name, direction, direction == "columnwise"), x)
        x = data(200, 130, device)
        s = payload(x, "nvfp4:row_scaled,rht", "columnwise", False)
        assert len(list(statistics._references(s, x))) > 3
        equal(s, x)
        scale = torch.exp2(torch.randn(3500, generator=torch.Generator().manual_seed(1)) * 40).to(device)
        assert torch.equal(fused.scales(scale, 0.0, -150, 128).exponents, statistics.exponents(scale))


def check_runs_are_the_whole_transform(device):
    for direction, transposed in itertools.product(DIRECTIONS, (False, True)):
        x = data(75, 90, device)
        s = payload(x, "nvfp4:rht", direction, transposed)
        whole = statistics.hadamard(x, direction)
        with mock.patch.object(statistics, "_RUN", 2000):
            runs = torch.cat([run for _, run in statistics._references(s, x)])
        allowed = 16 * U32 * x.abs().max().item()  # each is a sum of 16 quarters
        torch.testing.assert_close(runs.T if transposed else runs, whole, rtol=0, atol=4 * allowed)


def check_what_is_no_number_and_zeros(device):
    for name, direction in itertools.product(FORMATS, DIRECTIONS):
        x = data(30, 40, device)
        x[3, 7], x[20, 30], x[21, 31] = float("nan"), float("inf"), -float("inf")
        equal(payload(x, name, direction, direction == "columnwise"), x)
        for value in (0.0, -0.0, 1.0, float("nan")) if name in ("fp8_current_e4m3", "mxfp8_e4m3", "nvfp4") else ():
            x = torch.full((16, 33), value, device=device)
            equal(payload(x, name, direction, direction == "columnwise"), x)


def check_clipping_underflow_and_rounding_noise(device):
    x = torch.tensor([[1.0, 1e-9, 0.0, 1000.0, -465.0, 463.0, 2.0, 3.0]], device=device)
    s = payload(x, "fp8_delayed_e4m3:history=4", "rowwise", False)
    equal(s, x)
    numbers = dict(zip(FIELDS, measure_fused(s, x).numbers.tolist(), strict=True))
    assert numbers["saturation"] == 2 / 8 and numbers["underflow"] == 1 / 8 and numbers["zeros"] == 2 / 8
    assert numbers["amax"] == 1000
    x = data(64, 64, device)
    for name in ("nvfp4:sr", "nvfp4:rht,sr"):
        s = cast(x, parse_format(name), "rowwise", rng=Rng(1, 2, 0, 0, device=device))
        equal(s, x)


def coded(name, codes, scale, device):
    """A payload (1, n) of these codes, one of which is a byte, with this scale."""
    fmt = parse_format(name)
    s = QuantizedStorage.empty(fmt, "rowwise", (1, len(codes)), torch.float32, device)
    s.qdata.copy_(torch.tensor([codes], dtype=torch.uint8))
    s.scale.fill_(scale)
    return s


def check_every_code(device):
    """Subnormal numbers too, of codes and of what they become with a scale."""
    for element, finite in (("e4m3", 0x7F), ("e5m2", 0x7C)):
        codes = [sign | size for sign in (0, 0x80) for size in range(finite)]
        for scale in (1.0, 2.0**-130, 3e-41, 2.0**40):
            s = coded(f"fp8_current_{element}", codes, scale, device)
            x = s.dequantize()
            assert measure_fused(s, x).numbers[FIELDS.index("noise")] == 0
            equal(s, x)
            equal(s, x * 2)
        for size in range(finite, 0x80):
            equal(coded(f"fp8_current_{element}", [size], 1.0, device), torch.ones(1, 1, device=device))
    x = torch.tensor([[0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]], device=device)
    s = payload(x, "nvfp4", "rowwise", False)
    assert measure_fused(s, s.dequantize()).numbers[FIELDS.index("noise")] == 0


def check_pieces(device):
    """Strided views of a payload, as shards have them."""
    x = data(96, 128, device)
    for name, direction in itertools.product(("mxfp8_e4m3", "nvfp4", "fp8_rowwise_e4m3"), DIRECTIONS):
        whole = payload(x, name, direction, direction == "columnwise")
        for dim, start in ((0, 32), (1, 64)):
            piece, _ = narrow(whole, dim, start, 32)
            equal(piece, x.narrow(dim, start, 32))


def check_it_repeats_bit_for_bit(device):
    x = data(70, 300, device)
    s = payload(x, "mxfp8_e4m3", "columnwise", True)
    a, b = measure_fused(s, x), measure_fused(s, x)
    assert torch.equal(a.numbers, b.numbers) and torch.equal(a.exponents, b.exponents)


def check_empty_tensors(device):
    for shape in ((0, 32), (32, 0)):
        x = torch.ones(shape, device=device)
        for name in ("mxfp8_e4m3", "nvfp4:rht", "fp8_current_e4m3"):
            s = payload(x, name, "rowwise", False)
            got, expected = statistics.measure(s, x), measure_by_torch(s, x)
            assert got.numbers.equal(expected.numbers) or got.numbers.isnan().equal(expected.numbers.isnan())
            assert torch.equal(got.exponents, expected.exponents)


CHECKS = interpreted.checks(dict(globals()))

if __name__ == "__main__":
    interpreted.main(CHECKS)
