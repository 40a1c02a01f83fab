"""The CUDA casts' own source, compiled for the CPU, gives the CPU casts' bytes: every pair of formats, without a GPU.

The GPU runs of `tests/numerics/test_cast_pair.py` say more; this says it where there is none. `-m slow`: it compiles first.
"""

import importlib.util
import itertools
import shutil
import sys
from pathlib import Path

import pytest
import torch

from megatron_hybrid import kernels
from megatron_hybrid.formats import COLUMNWISE, DIRECTIONS, ROWWISE, parse_format
from megatron_hybrid.storage import _side, cast, derive_columnwise
from megatron_hybrid.testing.assertions import assert_bitwise_equal
from megatron_hybrid.testing.generators import cast_input, make_input

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "numerics")]
from build import build_module  # noqa: E402
from test_cast_pair import FORMATS, LAYOUTS, SHAPES, assert_same, empty, lay_out, new_rng, new_states, panel_sums  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    found = importlib.util.spec_from_file_location("_C_cuda", build_module(tmp_path_factory.mktemp("emulated")))
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def cast_emulated(module, outs, x, states, rng, derived=False, sums=None, gate=None):
    """`storage.cast_pair` through the emulated extension; an output that is None is left out."""
    sides, copies, keep = [], [], []
    for out, state in zip(outs, states):
        if out is None:
            sides.append(None)
            continue
        side = _side(out, None, state, None, copies)
        plain = kernels.spec(side.format, out.direction, x.device)
        fields = ("element", "scale_rule", "axis", "block_m", "block_k", "pow2", "eps", "outer_rows", "rht", "sr")
        spec = module.FormatSpec(**{f: getattr(plain, f) for f in fields})
        looks = side.measured is not None and side.format.outer_axis == "row" and out.direction == ROWWISE
        scratch = torch.empty(-(-x.shape[0] // module.PANEL_ROWS), dtype=torch.int32) if looks else None
        keep.append((side, scratch))
        sides.append((spec, *side.arguments(out.direction, x.device, scratch)[1:]))
    words = rng.words(x.shape[1])
    address = [kernels._ptr(t) for t in (sums, gate, words, rng.row_ids)]
    module.quantize_pair(*sides, *kernels._matrix(x), derived, *address, 0, 0, 0)


@pytest.mark.parametrize("row", FORMATS)
def test_every_pair(emulated, row):
    turn = FORMATS.index(row)
    for col, shape in itertools.product(FORMATS, SHAPES):
        turn += 1
        kind, dtype = ("normal", "special", "tiny")[turn % 3], ("bfloat16", "float16", "bfloat16", "float32")[turn % 4]
        x = lay_out(cast_input(make_input(kind, shape), dtype), LAYOUTS[turn // 2 % 4])
        transposed, states = (turn % 5 == 0, turn % 3 != 0), new_states((row, col), "cpu")
        outs = [empty(n, d, x, t) for n, d, t in zip((row, col), DIRECTIONS, transposed)]
        cast_emulated(emulated, outs, x, states, new_rng("cpu", *x.shape))
        for out, name, turned in zip(outs, (row, col), transposed):
            (own,) = new_states([name], "cpu")
            rng = new_rng("cpu", *x.shape)
            expected = cast(x, parse_format(name), out.direction, state=own, rng=rng, transposed=turned)
            assert_same(out, expected, f"{row} | {col} {shape} {kind} {dtype} {out.direction}")


@pytest.mark.parametrize("row", [f for f in FORMATS if "sr" not in f])
def test_derived_columns(emulated, row):
    for col, shape in itertools.product(("mxfp8_e4m3", "fp8_block_e4m3:2d"), SHAPES[1:3]):
        x = cast_input(make_input("special", shape), "bfloat16")
        outs = [empty(row, ROWWISE, x, False), empty(col, COLUMNWISE, x, True)]
        cast_emulated(emulated, outs, x, new_states((row, col), "cpu"), new_rng("cpu", *shape), derived=True)
        (own,) = new_states([row], "cpu")
        kept = cast(x, parse_format(row), ROWWISE, state=own)
        assert_same(outs[0], kept, f"{row} -> {col} {shape} row")
        assert_same(outs[1], derive_columnwise(kept, parse_format(col), transposed=True), f"{row} -> {col} {shape} column")


@pytest.mark.parametrize("row", [None, *FORMATS])
def test_sums_of_columns(emulated, row):
    """Sums taken on the way are those of the fixed order, whatever is cast; the bytes of the casts stay."""
    shapes = (*SHAPES, (0, 32), (1, 300), (300, 1))
    for turn, (col, shape) in enumerate(itertools.product((None, "mxfp8_e4m3", "nvfp4:rht,sr"), shapes)):
        x = lay_out(cast_input(make_input("normal", shape), ("bfloat16", "float32", "float16")[turn % 3]), LAYOUTS[turn % 4])
        outs = [None if n is None else empty(n, d, x, d == COLUMNWISE) for n, d in zip((row, col), DIRECTIONS)]
        sums = torch.full((-(-shape[0] // emulated.PANEL_ROWS), shape[1]), float("nan"))
        cast_emulated(emulated, outs, x, new_states([n or "nvfp4" for n in (row, col)], "cpu"), new_rng("cpu", *shape), sums=sums)
        assert torch.equal(sums, panel_sums(x)), (row, col, shape)
        for out, name in zip(outs, (row, col)):
            if out is not None:
                (own,) = new_states([name], "cpu")
                keys = dict(state=own, rng=new_rng("cpu", *shape), transposed=out.direction == COLUMNWISE)
                assert_same(out, cast(x, parse_format(name), out.direction, **keys), f"{row} | {col} {shape} {out.direction}")


GATED = ("fp8_delayed_e5m2", "fp8_block_e4m3", "mxfp8_e4m3", "mxfp8_e5m2:2d")


@pytest.mark.parametrize("row", GATED)
def test_swiglu_on_the_way(emulated, row):
    """The payloads and sums are those of the rounded silu(gate) * up, never in memory; NaN and Inf too."""
    for turn, (col, shape) in enumerate(itertools.product(GATED, SHAPES)):
        M, K = shape
        x = lay_out(cast_input(make_input("special" if turn % 2 else "normal", (M, 2 * K)), ("bfloat16", "float16", "float32")[turn % 3]),
                    LAYOUTS[turn % 4])  # fmt: skip
        gate, up = x.chunk(2, dim=1)
        outs = [empty(n, d, up, d == COLUMNWISE) for n, d in zip((row, col), DIRECTIONS)]
        sums = torch.full((-(-M // emulated.PANEL_ROWS), K), float("nan"))
        states = new_states((row, col), "cpu")
        cast_emulated(emulated, outs, up, states, new_rng("cpu", M, K), sums=sums, gate=gate)
        power = torch.exp2((-gate.float() * 1.44269504088896340736).double()).float()
        y = (gate.float() / (1.0 + power) * up.float()).to(x.dtype)
        assert torch.equal(sums.nan_to_num(7.0), panel_sums(y).nan_to_num(7.0)), (col, shape)
        for out, name, state in zip(outs, (row, col), states):
            (own,) = new_states([name], "cpu")
            expected = cast(y, parse_format(name), out.direction, state=own, transposed=out.direction == COLUMNWISE)
            assert_same(out, expected, f"{row} | {col} {shape} {out.direction}")
            if own is not None:
                assert_bitwise_equal(state.history, own.history, "history", any_nan=True)
