"""What the emulated backend decodes to bf16 is exact there: numerics.md, "Emulation multiplies exact operands"."""

import pytest
import torch

from megatron_hybrid.formats import COLUMNWISE, ROWWISE, parse_format
from megatron_hybrid.gemm.backends import exact_in_bf16, _scale_into
from megatron_hybrid.storage import cast


def every_bf16():
    """All finite bf16 numbers, sorted by magnitude: neighbours share blocks, so that scales reach both ends."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[torch.isfinite(x)]
    return x[x.float().abs().argsort(stable=True)].reshape(-1, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp8_e4m3:2d", "fp8_block_e4m3", "fp8_block_e5m2", "nvfp4"])
def test_what_was_cast_from_16_bits_decodes_exactly_to_bf16(name, dtype):
    x = every_bf16().to(dtype)
    x = torch.where(torch.isfinite(x), x, 0)
    for direction in (ROWWISE, COLUMNWISE):
        s = cast(x, parse_format(name), direction)
        assert exact_in_bf16(s.format, s.dtype)
        wide, narrow = s.operand(torch.float32, outer=False), s.operand(torch.bfloat16, outer=False)
        assert torch.equal(wide, narrow.float())


def test_tiny_fp32_values_need_fp32_and_get_it():
    x = torch.full((1, 32), 2.0**-136)
    x[0, 0] = 2.0**-119
    s = cast(x, parse_format("mxfp8_e4m3"), ROWWISE)
    assert s.scale.item() <= 2 and not torch.equal(s.operand(torch.float32), s.operand(torch.bfloat16).float())
    assert not exact_in_bf16(s.format, s.dtype)
    assert not exact_in_bf16(parse_format("fp8_block_e4m3:no_pow2"), torch.bfloat16)


@pytest.mark.parametrize("rows,columns", [((), ()), ((6, 1), ()), ((), (1, 5)), ((6, 1), (1, 5)), (None, (1, 5)), ((6, 1), None)])
def test_outer_scales_are_applied_once_to_rows_and_columns(rows, columns):
    g = torch.Generator().manual_seed(0)
    out = torch.randn(6, 5, generator=g)
    scales = [None if shape is None else torch.exp2(torch.randint(-3, 4, shape, generator=g).float()) for shape in (rows, columns)]
    exact = out.clone()
    for s in scales:
        exact = exact if s is None else exact * s
    assert torch.equal(_scale_into(out.clone(), *scales, torch.bfloat16, None), exact.bfloat16())
    total = torch.ones(6, 5)
    assert _scale_into(out.clone(), *scales, torch.bfloat16, total) is total
    assert torch.allclose(total, exact + 1, rtol=2.0**-22)
