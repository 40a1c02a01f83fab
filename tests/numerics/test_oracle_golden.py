"""The oracle against bytes made elsewhere: every payload of the golden files, both directions."""

import functools
from pathlib import Path

import numpy as np
import pytest

from megatron_hybrid.formats import COLUMNWISE, ROWWISE, parse_format
from megatron_hybrid.testing.assertions import assert_bitwise_equal
from megatron_hybrid.testing.oracle import bf16_to_float32, decode, quantize

FILES = {p.name: p for p in sorted((Path(__file__).parent / "golden").glob("*.npz"))}
DIRECTIONS = {"row": (ROWWISE,), "col": (COLUMNWISE,), "": (ROWWISE, COLUMNWISE)}  # "": one payload for both


@functools.lru_cache(maxsize=None)
def load(file: str) -> dict:
    with np.load(FILES[file]) as z:
        return {k: z[k] for k in z.files}


def payloads():
    """(file, key prefix of one payload) for every ``codes`` entry."""
    for file in FILES:
        with np.load(FILES[file]) as z:
            yield from ((file, k.removesuffix("/codes")) for k in z.files if k.endswith("/codes"))


def parse_key(prefix: str):
    """'32x64_normal/nvfp4_2d/row' -> (input name, Format, directions)."""
    source, name, *side = prefix.split("/")
    for option in ("2d", "row_scaled"):
        name = name.replace(f"nvfp4_{option}", f"nvfp4:{option}")
    return source, parse_format(name), DIRECTIONS["".join(side)]


def expected_scale(data: dict, prefix: str, fmt, got: np.ndarray):
    """The file's scale next to ours, brought to the same layout: (ours, theirs)."""
    if f"{prefix}/scale_e8m0" in data:
        return got, data[f"{prefix}/scale_e8m0"]
    if f"{prefix}/scale_inv" in data:
        return got, data[f"{prefix}/scale_inv"].reshape(got.shape)
    S = decode(got, "e4m3")
    theirs = data[f"{prefix}/scale_e4m3_as_f32"]
    return (np.repeat(S, 16, axis=0)[: theirs.shape[0]] if fmt.tile else S), theirs


@pytest.mark.parametrize("file,prefix", list(payloads()))
def test_golden(file, prefix):
    data = load(file)
    source, fmt, directions = parse_key(prefix)
    x = bf16_to_float32(data[f"{source}/x_bf16bits"])
    for direction in directions:
        result = quantize(x, fmt, direction)
        assert_bitwise_equal(result.codes, data[f"{prefix}/codes"], f"{prefix} codes")
        assert_bitwise_equal(*expected_scale(data, prefix, fmt, result.scale), f"{prefix} scale")
        if f"{prefix}/amax" in data:
            amax = data[f"{prefix}/amax"]
            assert_bitwise_equal(result.amax.reshape(amax.shape), amax, f"{prefix} amax")


def test_every_entry_is_used():
    seen = set()
    for file, prefix in payloads():
        data = load(file)
        seen.update((file, k) for k in data if k.startswith(prefix + "/") or k == f"{prefix.split('/')[0]}/x_bf16bits")
    assert seen == {(file, k) for file in FILES for k in load(file)}
