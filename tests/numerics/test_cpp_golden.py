"""The compiled casts against the golden bytes: every entry, both payload layouts, decoded again."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_hybrid import kernels
from megatron_hybrid.formats import COLUMNWISE, ROWWISE, parse_format

GOLDEN = Path(__file__).parent / "golden"
FILES = ("quantize_golden.npz", "quantize_golden_blocks.npz")
DIRECTIONS = {"row": ROWWISE, "col": COLUMNWISE}
# the files' names for formats whose own names have options
FORMAT_NAMES = {"nvfp4_2d": "nvfp4:2d", "nvfp4_row_scaled": "nvfp4:row_scaled"}


@functools.cache
def golden(file: str) -> dict:
    with np.load(GOLDEN / file) as archive:
        return dict(archive)


def entries():
    """(file, input, format as the file names it, direction) of every payload; one without a direction has both."""
    for file in FILES:
        for key in golden(file):
            head, _, leaf = key.rpartition("/")
            if leaf == "codes":
                case, name, *direction = head.split("/")
                for d in direction or DIRECTIONS:
                    yield file, case, name, d


def cast(x, fmt, direction, transposed, rng=None):
    """Codes (one a byte, (M, K) orientation), stored scales, amax and payload of one cast."""
    M, K = x.shape
    amax_shape = fmt.amax_shape(M, K, direction)
    amax = None if amax_shape is None else kernels.amax(x, fmt, direction, torch.full(amax_shape, -1.0))
    outer, inner = (K, M) if transposed else (M, K)
    qdata = torch.full((outer, -(-inner * fmt.bits // 8)), 0xAA, dtype=torch.uint8)
    dtype = torch.float32 if fmt.scale == "fp32" else torch.uint8
    scale = torch.full(fmt.scale_shape(M, K, direction), 77, dtype=dtype)
    kernels.quantize(x, fmt, direction, qdata=qdata, scale=scale, amax=amax, transposed=transposed, rng=rng)
    codes = qdata
    if fmt.bits == 4:
        codes = torch.stack((qdata & 15, qdata >> 4), dim=-1).flatten(1)
        assert not codes[:, inner:].any(), "the nibble past an odd end must be 0"
        codes = codes[:, :inner]
    return (codes.T if transposed else codes), scale, amax, qdata


def e4m3_value(byte: torch.Tensor) -> torch.Tensor:
    return byte.view(torch.float8_e4m3fn).float()


def assert_bytes(actual: torch.Tensor, expected: np.ndarray, what: str):
    actual = actual.contiguous().numpy()
    np.testing.assert_array_equal(actual.view(np.uint8), expected.astype(actual.dtype).view(np.uint8), err_msg=what)


@pytest.mark.parametrize("transposed", [False, True], ids=["row_major", "transposed"])
@pytest.mark.parametrize("file, case, name, direction", list(entries()))
def test_golden(file, case, name, direction, transposed):
    data = golden(file)
    x = torch.from_numpy(data[f"{case}/x_bf16bits"].view(np.int16).copy()).view(torch.bfloat16)
    fmt = parse_format(FORMAT_NAMES.get(name, name))
    prefix = f"{case}/{name}/{direction}" if f"{case}/{name}/{direction}/codes" in data else f"{case}/{name}"
    codes, scale, amax, _ = cast(x, fmt, DIRECTIONS[direction], transposed)
    assert_bytes(codes, data[f"{prefix}/codes"], "codes")
    if f"{prefix}/amax" in data:
        assert_bytes(amax.flatten(), data[f"{prefix}/amax"], "amax")
    if f"{prefix}/scale_e8m0" in data:
        assert_bytes(scale, data[f"{prefix}/scale_e8m0"], "scale")
    elif f"{prefix}/scale_inv" in data:
        assert_bytes(scale.flatten(), data[f"{prefix}/scale_inv"].flatten(), "scale_inv")
    else:
        expected = data[f"{prefix}/scale_e4m3_as_f32"]
        if fmt.tile:  # the file repeats a tile's scale for each of its 16 rows
            expected = expected[::16]
        assert_bytes(e4m3_value(scale), expected, "S")


def test_every_entry_is_covered():
    covered = {f"{f}:{c}/{n}" for f, c, n, _ in entries()}
    stored = {f"{f}:{'/'.join(k.split('/')[:2])}" for f in FILES for k in golden(f) if not k.endswith("x_bf16bits")}
    assert covered == stored and len(stored) > 150
