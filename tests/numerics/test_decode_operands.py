"""Both operands of a product decoded by one call: the bytes of two calls, and the product of their outer scales."""

import itertools

import pytest
import torch
from test_agreement import on_devices

from megatron_hybrid import kernels
from megatron_hybrid.formats import COLUMNWISE, DIRECTIONS, ROWWISE, parse_format
from megatron_hybrid.gemm import backends
from megatron_hybrid.storage import cast, decode_operands
from megatron_hybrid.testing.assertions import assert_bitwise_equal
from megatron_hybrid.testing.generators import cast_input, make_input

PAIRS = [
    ("nvfp4", "nvfp4:2d"), ("nvfp4:rht", "nvfp4:rht"), ("mxfp8_e4m3", "mxfp8_e4m3:2d"), ("mxfp8_e5m2", "mxfp8_e4m3"),
    ("nvfp4", "mxfp8_e4m3"), ("fp8_block_e4m3", "nvfp4"), ("high_precision", "nvfp4"), ("mxfp8_e4m3", "high_precision"),
]  # fmt: skip
SHAPES = [((70, 1040), (33, 1040)), ((16, 32), (600, 32)), ((5, 7), (3, 7)), ((0, 32), (64, 32))]
AMAXES = [0.0, 2.0**-149, 1e-40, 1e-36, 1.0, 3.0, 2688.0, 3e38, 3.402823466e38, float("inf"), float("nan")]
FP4 = parse_format("nvfp4")


def payload(name, shape, direction, transposed, dtype=torch.bfloat16):
    """Of a matrix whose GEMM view has this shape."""
    shape = shape if direction == ROWWISE else shape[::-1]
    x = cast_input(make_input("special", shape), "bfloat16")
    return cast(x, parse_format(name), direction, transposed=transposed and name != "high_precision", dtype=dtype)


def product_of_scales(*amaxes):
    """What separate calls give."""
    scales = [kernels.outer_scale(a.cpu(), FP4, torch.empty_like(a.cpu())) for a in amaxes]
    return torch.stack(scales).prod(0) if len(scales) == 1 else scales[0] * scales[1]


def check_pair(names, shapes, direction, across, dtype, outer, move=lambda s: s, decode=decode_operands):
    """across: which payloads are stored across the contraction. move: a payload to where `decode` runs."""
    kept = [payload(n, s, direction, (direction == COLUMNWISE) != a) for n, s, a in zip(names, shapes, across)]
    moved = [move(s) for s in kept]
    outs = [s.unwritten_operand(dtype) for s in moved]
    amaxes = [s.outer_amax for s in kept if s.outer_amax is not None]
    factor = torch.full((), -1.0, device=outs[0].device) if amaxes else None
    decode(moved, outs, outer=outer, factor=factor)
    what = f"{names} {shapes} {direction} {across} {dtype} {outer}"
    for s, out in zip(kept, outs):
        assert_bitwise_equal(out, s.operand(dtype, outer=outer), what, any_nan=True)
    if amaxes:
        assert_bitwise_equal(factor, product_of_scales(*amaxes), f"{what}: the factor")


def check_every_pair(**where):
    turn = 0
    for names, shapes, direction in itertools.product(PAIRS, SHAPES, DIRECTIONS):
        for across in ((False, False), (True, False), (True, True)):
            dtype, turn = (torch.bfloat16, torch.float32)[turn % 2], turn + 1
            check_pair(names, shapes, direction, across, dtype, turn % 3 == 0, **where)


def check_factors(device, decode=kernels.decode_operands):
    """Every pair of amaxes, of payloads with memory to decode and without: the kernels that write a factor."""
    for rows, across in ((4, False), (4, True), (0, False)):
        s = payload("nvfp4", (rows, 32), ROWWISE, across)
        buffers = [t.to(device) for t in (s.qdata, s.scale)]
        for a, b in itertools.product(AMAXES, (None, *AMAXES)):
            amaxes = [torch.tensor(v, device=device) for v in (a, b) if v is not None]
            operands, factor = [None, None], torch.full((), -1.0, device=device)
            for i, amax in enumerate(amaxes):
                out = torch.empty((rows, 32), dtype=torch.bfloat16, device=device)
                operands[i] = (*buffers, amax, FP4, ROWWISE, across, out, False, False)
            for turned in (operands, operands[::-1]):
                decode(*turned, factor.fill_(-1.0))
                what = f"{rows} rows, {across}, amaxes {a} and {b}"
                assert_bitwise_equal(factor, product_of_scales(*amaxes), what)


@on_devices
def test_every_pair(device):
    check_every_pair(move=lambda s: s.with_buffers({n: t.to(device) for n, t in s.buffers().items()}))


@on_devices
def test_factors(device):
    check_factors(device)


def test_one_operand_alone():
    s = payload("nvfp4", (16, 32), ROWWISE, False)
    high = payload("high_precision", (16, 32), ROWWISE, False)
    out, factor = s.unwritten_operand(torch.bfloat16), torch.empty(())
    decode_operands((high, s), (high.qdata, out), outer=False, factor=factor)
    assert_bitwise_equal(out, s.operand(torch.bfloat16, outer=False), "the other one is there")
    assert_bitwise_equal(factor, s.outer_scale(), "the factor of one")


def test_factors_are_of_one_amax_an_operand():
    rows = payload("nvfp4:row_scaled", (16, 32), ROWWISE, False)
    one = payload("nvfp4", (16, 32), ROWWISE, False)
    outs = [s.unwritten_operand(torch.bfloat16) for s in (rows, one)]
    decode_operands((rows, one), outs, outer=False)
    with pytest.raises(ValueError, match="one amax"):
        decode_operands((rows, one), outs, outer=False, factor=torch.empty(()))


class Subclass(torch.Tensor):
    """Of tensors whose kernels are traced."""


def test_no_factor_is_left_unwritten(monkeypatch):
    """Where one operand alone is traced, too."""
    a, b = payload("nvfp4", (16, 32), ROWWISE, False), payload("high_precision", (16, 32), ROWWISE, False)
    x, w = a.unwritten_operand(torch.bfloat16), b.qdata.as_subclass(Subclass)
    monkeypatch.setattr(backends.cublaslt, "takes", lambda x, w: True)
    assert backends._direct(x, b.qdata, None) and not backends._direct(x, w, None) and not backends._direct(w, x, None)
    traced = b.with_buffers({"qdata": w})
    with pytest.raises(RuntimeError, match="unwritten"):
        decode_operands((a, traced), (x, w), outer=False, factor=torch.empty(()))
