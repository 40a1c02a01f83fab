"""Inputs and comparisons shared by the tests of tensors and payloads."""

from __future__ import annotations

import itertools

import torch

import megatron_hybrid as mh
from megatron_hybrid.testing.assertions import assert_bitwise_equal
from megatron_hybrid.testing.generators import FORMATS as QUANTIZED
from megatron_hybrid.testing.generators import make_input

FORMATS = ("high_precision", *QUANTIZED)
# one of every scale rule, block shape and packing: for tests over pairs that need not see every option
VARIED = (
    "high_precision", "fp8_current_e4m3", "fp8_delayed_e5m2", "fp8_rowwise_e4m3", "fp8_block_e4m3", "mxfp8_e4m3",
    "mxfp8_e5m2:2d", "nvfp4", "nvfp4:2d", "nvfp4:row_scaled,rht,sr",
)  # fmt: skip
PAIRS = tuple(itertools.product(VARIED, VARIED))
HELD = ((True, True), (True, False), (False, True), (False, False))
RAGGED, ALIGNED = (2, 17, 50), (256, 384)


def tensor(shape=RAGGED, dtype=torch.bfloat16, seed=0, kind="normal") -> torch.Tensor:
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return torch.from_numpy(make_input(kind, (rows, shape[-1]), seed)).to(dtype).reshape(shape)


def keys(q: mh.HybridQuantizer, seed: int = 7) -> dict:
    """Fresh arguments of a cast: delayed-scaling states of scale 8 and 4, and one key."""
    state = q.new_state()
    for s, scale in zip(state, (8.0, 4.0)):
        if s is not None:
            s.scale.fill_(scale)
    return dict(state=state, rng=mh.Rng(seed, 11, 3, 1, num_microbatches=4))


def quantize(q, x, **kwargs) -> mh.HybridTensor:
    return q.quantize(x, **{**keys(q), **kwargs})


def storages(t):
    return [s for s in (t.rowwise, t.columnwise) if s is not None]


def snapshot(t) -> dict:
    """Copies of every byte a tensor holds, with the addresses."""
    return {
        (s.direction, n): (b.clone(), b.data_ptr()) for s in storages(t) for n, b in s.buffers().items()
    }


def assert_unchanged(t, before: dict, what="", directions=("rowwise", "columnwise")) -> None:
    """Same bytes (of these directions) at the same addresses (of all)."""
    now = snapshot(t)
    assert now.keys() == before.keys(), what
    for key, (data, address) in before.items():
        assert now[key][1] == address, f"{what} {key}: moved"
        if key[0] in directions:
            assert_bitwise_equal(now[key][0], data, f"{what} {key}")


def assert_same_storage(a, b, what="") -> None:
    """Same format, direction, shape and bytes; layouts may differ."""
    assert (a is None) == (b is None), what
    if a is None:
        return
    assert (a.format, a.direction, tuple(a.shape), a.dtype) == (b.format, b.direction, tuple(b.shape), b.dtype), what
    if not a.format.is_quantized:
        assert_bitwise_equal(a.qdata, b.qdata, f"{what} qdata")
        return
    assert_bitwise_equal(a.codes(), b.codes(), f"{what} codes")
    for name in ("scale", "outer_amax"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert (ours is None) == (theirs is None), what
        if ours is not None:
            assert_bitwise_equal(ours, theirs, f"{what} {name}")


def assert_same_tensor(a, b, what="") -> None:
    assert a.shape == b.shape and a.dtype == b.dtype, what
    for ours, theirs in ((a.rowwise, b.rowwise), (a.columnwise, b.columnwise)):
        assert_same_storage(ours, theirs, what)
