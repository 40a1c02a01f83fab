"""Statistics' kernels against the torch code: in Triton's interpreter on the CPU, one process for all; compiled on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import interpreted
import pytest
import torch

from megatron_hybrid.formats import parse_format
from megatron_hybrid.observe import statistics
from megatron_hybrid.observe.statistics import FIELDS, LOWEST_EXPONENT, exponents, measure
from megatron_hybrid.scaling import Rng
from megatron_hybrid.storage import cast

CASES = Path(__file__).with_name("fused_statistics_cases.py")
CHECKS = interpreted.names(CASES)

if sys.platform != "linux":
    pytest.skip("the lock has Triton for Linux only", allow_module_level=True)


@pytest.fixture(scope="module")
def errors() -> dict:
    return interpreted.errors_of(CASES, seconds=550)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check, errors):
    assert errors[check] is None, errors[check]


def test_scales_of_zero_count_as_the_lowest_exponent():
    counts = exponents(torch.tensor([0.0, 1.0, 0.5, 2.0**-149, float("nan"), float("inf")])).tolist()
    assert {i + LOWEST_EXPONENT: n for i, n in enumerate(counts) if n} == {-150: 1, 0: 1, -1: 1, -149: 1, 128: 2}


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@needs_gpu
@pytest.mark.parametrize("check", CHECKS)
def test_compiled(check):
    import fused_statistics_cases

    fused_statistics_cases.CHECKS[check]("cuda")


def on_gpu(name, direction, shape=(2048, 4096)):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    s = cast(x, parse_format(name), direction, transposed=direction == "columnwise", rng=Rng(1, 2, 0, 0, device="cuda"))
    measure(s, x)  # compiled and cached parts
    torch.cuda.synchronize()
    return s, x


each_kind = pytest.mark.parametrize("name", ["fp8_current_e4m3", "mxfp8_e4m3", "nvfp4:2d", "nvfp4:rht,sr"])
both_directions = pytest.mark.parametrize("direction", ["rowwise", "columnwise"])


@gpu
@needs_gpu
@each_kind
@both_directions
def test_a_cast_is_measured_by_few_kernels(name, direction):
    s, x = on_gpu(name, direction)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        measure(s, x)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    transform = 3 if s.format.rht else 0  # to FP32, in the matrix product's layout, the product
    outer = 2 if s.outer_amax is not None else 0  # scales of scales, and their product
    assert 5 <= len(kernels) <= 15 + transform + outer, kernels


@gpu
@needs_gpu
@each_kind
@both_directions
def test_measuring_a_cast_takes_little_memory(name, direction, monkeypatch):
    monkeypatch.setattr(statistics, "_RUN", 2**21)  # four runs of a transform
    s, x = on_gpu(name, direction)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    measure(s, x)
    # FP32 copies of scales of 16 elements, twice; counts of exponents; of a run of a transform two FP32 tensors, and one
    # of the run before
    allowed = x.numel() + (3 * 4 * 2**21 if s.format.rht else 0)
    assert torch.cuda.max_memory_allocated() - before <= allowed


@gpu
@needs_gpu
def test_more_elements_than_32_bits_count():
    x = torch.zeros(2**16 + 8, 2**15, dtype=torch.bfloat16, device="cuda")
    x[-1, -3:] = torch.tensor([3.0, -448.0, 1e-30], dtype=torch.bfloat16, device="cuda")
    numbers, _ = measure(cast(x, parse_format("fp8_current_e4m3"), "rowwise"), x)
    values = dict(zip(FIELDS, numbers.tolist(), strict=True))
    assert values["amax"] == 448 and values["noise"] == pytest.approx(1e-60, abs=1e-40) and values["gain"] == 0
    assert values["signal"] == 3.0**2 + 448.0**2
    assert values["underflow"] == 1 / x.numel() and values["zeros"] == (x.numel() - 2) / x.numel()
