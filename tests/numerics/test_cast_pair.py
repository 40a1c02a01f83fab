"""One call for both directions gives the bytes of the CPU's one call a direction, whatever the pair of formats.

`kernels.quantize_pair` also takes amaxes, collects histories and casts columns from the row's decode on the way.
"""

import itertools

import numpy as np
import pytest
import torch

import megatron_hybrid as mh
from megatron_hybrid import kernels
from megatron_hybrid.formats import COLUMNWISE, DIRECTIONS, ROWWISE, parse_format
from megatron_hybrid.lean import OperandCast
from megatron_hybrid.scaling import DelayedState
from megatron_hybrid.storage import QuantizedStorage, cast, cast_pair, derive_columnwise
from megatron_hybrid.testing.assertions import assert_bitwise_equal
from megatron_hybrid.testing.generators import cast_input, make_input
from megatron_hybrid.testing.strips import any_strips

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
on_gpu = [pytest.mark.gpu, no_gpu]
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])

# every kernel body, scale rule and source of an amax; elements and options that change only constants once each
FORMATS = ("fp8_current_e4m3", "fp8_delayed_e5m2", "fp8_rowwise_e4m3", "fp8_block_e4m3", "fp8_block_e5m2:2d", "mxfp8_e4m3",
           "mxfp8_e5m2:2d", "nvfp4", "nvfp4:2d", "nvfp4:row_scaled", "nvfp4:row_scaled,rht", "nvfp4:sr",
           "nvfp4:rht,sr")  # fmt: skip
PAIRS = tuple(itertools.product(FORMATS, FORMATS))
# whole tiles; ragged against every block, K a multiple of 16 and of 8 bytes; odd everywhere
SHAPES = ((256, 128), (145, 272), (130, 136), (67, 35))
LAYOUTS = ("contiguous", "transposed", "slice", "step")
# formats of casts that hold 16-bit tensors in registers: every kind of FP8 scales; tiles cut by M, by K, by both, rows
# that are not whole 16 bytes, M that is no multiple of 16, and nothing at all
STRIP_FORMATS = (None, "fp8_block_e4m3", "mxfp8_e4m3", "fp8_rowwise_e5m2", "fp8_delayed_e4m3", "fp8_block_e5m2",
                 "mxfp8_e5m2", "fp8_current_e5m2", "fp8_block_e4m3:2d", "fp8_rowwise_e4m3")  # fmt: skip
STRIP_SHAPES = ((256, 128), (144, 272), (400, 132), (16, 8), (130, 136), (0, 64), (64, 0))


def lay_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout."""
    M, K = t.shape
    if layout == "transposed":
        return t.T.contiguous().T
    if layout == "slice":
        big = torch.full((M + 3, K + 5), float("nan"), dtype=t.dtype, device=t.device)
        big[2 : M + 2, 3 : K + 3] = t
        return big[2 : M + 2, 3 : K + 3]
    if layout == "step":
        big = torch.full((3 * M, 2 * K), float("nan"), dtype=t.dtype, device=t.device)
        big[::3, ::2] = t
        return big[::3, ::2]
    return t


def strip_cases(row):
    """(x, (row, col), amaxes, transposed): `row` beside every column; an amax is None where it is to be measured."""
    turn = STRIP_FORMATS.index(row)
    for col, shape in itertools.product(STRIP_FORMATS, STRIP_SHAPES):
        turn += 1
        kind, dtype = ("normal", "special", "tiny", "special")[turn % 4], ("bfloat16", "float16")[turn // 2 % 2]
        x = cast_input(make_input(kind, shape), dtype)
        layout = ("contiguous", "apart", "transposed", "apart")[turn // 3 % 4]
        if layout == "apart":  # rows of a wider tensor, whole 16 bytes from each other
            wide = torch.full((shape[0], (shape[1] + 23) // 8 * 8), float("nan"), dtype=x.dtype)
            wide[:, : shape[1]] = x
            x = wide[:, : shape[1]]
        elif layout == "transposed":
            x = lay_out(x, layout)
        amaxes = [None, None]
        for d, name in enumerate((row, col)):
            size = parse_format(name).amax_shape(*shape, DIRECTIONS[d]) if name else None
            if size is not None and "delayed" not in name and turn // (3 + d) % 3 == 0:
                amaxes[d] = torch.rand(size, generator=torch.Generator().manual_seed(turn)) + 0.5
        if row or col:
            yield x, (row, col), amaxes, (turn % 7 == 0, turn % 5 != 0)


# NVFP4 by strips, beside itself and beside FP8; tiles cut by M, by K and by both, a last nibble, and what strips do not
# fit
FP4_STRIPS = ("nvfp4", "nvfp4:2d", "nvfp4:row_scaled", "nvfp4:rht", "nvfp4:rht,sr", "nvfp4:row_scaled,rht,sr")
FP4_BESIDE = (*FP4_STRIPS, None, "fp8_block_e4m3", "mxfp8_e4m3", "fp8_rowwise_e5m2", "fp8_delayed_e4m3",
              "fp8_block_e4m3:2d")  # fmt: skip
FP4_SHAPES = ((256, 128), (160, 272), (416, 144), (32, 16), (31, 48), (130, 136))


def fp4_strip_cases(name):
    """(x, (row, col), amaxes, rng): `name` as rows and as columns beside every other; amaxes None or of all sizes."""
    pairs = [(name, other) for other in FP4_BESIDE]
    pairs += [(other, name) for other in FP4_BESIDE if other not in FP4_STRIPS]
    for turn, (names, shape) in enumerate(itertools.product(pairs, FP4_SHAPES), 5 * FP4_STRIPS.index(name)):
        kind = ("normal", "special", "tiny", "huge")[turn % 4]
        dtype = ("bfloat16", "bfloat16", "float16")[turn // 4 % 3]
        made = make_input("normal" if kind == "huge" else kind, shape)
        x = cast_input(made * 2.0**124 if kind == "huge" and dtype == "bfloat16" else made, dtype)
        if turn // 3 % 3 == 1:  # rows of a wider tensor
            wide = torch.full((shape[0], (shape[1] + 23) // 8 * 8), float("nan"), dtype=x.dtype)
            wide[:, : shape[1]] = x
            x = wide[:, : shape[1]]
        amaxes = [None, None]
        for d, one in enumerate(names):
            size = parse_format(one).amax_shape(*shape, DIRECTIONS[d]) if one else None
            if size is not None and "delayed" not in one and turn // (2 + d) % 3:
                uniform = torch.rand(size, generator=torch.Generator().manual_seed(turn)) + 0.5
                amaxes[d] = uniform * (1.0, 2e38, 2.0**-140, 0.0)[turn % 7 if turn % 7 < 4 else 0]
        global_cols = shape[1] + (16 if turn % 3 else 5)  # whether eight draws of a call are neighbours
        yield x, names, amaxes, lambda device, K=global_cols: mh.Rng(7, 11, 13, 0, (64, 8, K), device=device)


def by_any_strips(outs, x, states, amaxes, rng):
    with any_strips():
        cast_pair(*outs, x, amax=amaxes, state=states, rng=rng)


def check_fp4_strips(name, device, run) -> int:
    """`run(outs, x, states, amaxes, rng)` casts a case on `device`; the number of cases."""
    cases = list(fp4_strip_cases(name))
    for x, names, amaxes, rng in cases:
        there, states, transposed = lay_out_again(x, device), new_states(names, device), (False, True)
        outs = [n and empty(n, d, there, t) for n, d, t in zip(names, DIRECTIONS, transposed)]
        run(outs, there, states, [None if a is None else a.to(device) for a in amaxes], rng(device))
        check_strips(x, names, amaxes, transposed, outs, states, rng)
    return len(cases)


def lay_out_again(x, device):
    """`x` on `device` with the strides that it has. Its memory ends at whole 16 bytes: the copies of csrc/cuda's tiles are
    16 bytes, of which they read as many as there are (`cp.async`'s last operand), but memcheck counts all of them."""
    elements = sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1 if x.numel() else 0
    there = torch.empty((elements + 7) // 8 * 8, dtype=x.dtype, device=device).as_strided(x.shape, x.stride())
    return there.copy_(x)


def check_strips(x, names, amaxes, transposed, outs, states, rng=lambda device: None):
    """`outs` and histories of one call against the CPU's of a direction at a time."""
    what = f"{names} {tuple(x.shape)} {x.stride()} {x.dtype} {transposed}"
    for out, name, direction, amax, turned, state in zip(outs, names, DIRECTIONS, amaxes, transposed, states):
        if name:
            (own,) = new_states([name], "cpu")
            expected = cast(x, parse_format(name), direction, amax=amax, state=own, transposed=turned, rng=rng("cpu"))
            assert_same(out, expected, f"{what} {direction}")
            if own is not None:
                assert_bitwise_equal(state.history, own.history, f"{what} {direction}: history", any_nan=True)


def check_strip_cases(row, device) -> int:
    """Every case by one call on `device`; their number."""
    cases = list(strip_cases(row))
    for x, names, amaxes, transposed in cases:
        there, states = lay_out_again(x, device), new_states(names, device)
        outs = [n and empty(n, d, there, t) for n, d, t in zip(names, DIRECTIONS, transposed)]
        cast_pair(*outs, there, amax=[None if a is None else a.to(device) for a in amaxes], state=states)
        check_strips(x, names, amaxes, transposed, outs, states)
    return len(cases)


STRIP_COMPUTED = (None, "fp8_block_e4m3", "mxfp8_e4m3", "fp8_delayed_e5m2", "fp8_block_e4m3:2d")  # beside SwiGLU


def computed_strip_cases(row):
    """(x, (gate, up), dy, (row, col)): x (M, 2F) of gate and up side by side, dy (M, F) with rows apart."""
    turn = STRIP_COMPUTED.index(row)
    for col, (M, F) in itertools.product(STRIP_COMPUTED, ((256, 128), (144, 384), (48, 136), (130, 256))):
        turn += 1
        kind, dtype = ("normal", "special", "tiny")[turn % 3], ("bfloat16", "float16")[turn // 2 % 2]
        x, dy = (cast_input(make_input(kind, (M, n)), dtype) for n in (2 * F, F + 8 * (turn % 3)))
        if row or col:
            yield x, x.chunk(2, dim=1), dy[:, :F], (row, col)


# of rows that a thread block holds whole: one to sixteen pieces of a row a thread, cut and full, and one more than that
WHOLE_ROWS = ((9, 8), (11, 2048), (5, 2056), (3, 8192), (2, 8200), (2, 16384), (2, 16392), (2, 32768), (2, 32776))


def check_whole_rows(device, run):
    """`run(out, x)` casts rows alone, or columns of what lies transposed, and finds their amaxes."""
    for turn, (shape, name) in enumerate(itertools.product(WHOLE_ROWS, ("fp8_rowwise_e4m3", "fp8_rowwise_e5m2"))):
        kind, dtype = ("normal", "special", "tiny")[turn % 3], ("bfloat16", "float16")[turn // 2 % 2]
        x, direction = cast_input(make_input(kind, shape), dtype), DIRECTIONS[turn // 4 % 2]
        x = x.T if direction == COLUMNWISE else x
        there = lay_out_again(x, device)
        out = empty(name, direction, there, direction == COLUMNWISE)
        run(out, there)
        expected = cast(x, parse_format(name), direction, transposed=out.transposed)
        assert_same(out, expected, f"{name} {shape} {kind} {dtype} {direction}")


NOOP_PAIRS = (("fp8_rowwise_e4m3", None), ("mxfp8_e4m3", "fp8_delayed_e4m3"), ("fp8_rowwise_e4m3", "fp8_rowwise_e4m3"),
              ("fp8_block_e4m3:2d", "fp8_current_e4m3"))  # fmt: skip


def check_noop(names, device, run):
    """`run(outs, x, states, noop)` writes nothing, amaxes and histories neither, where the flag is set; else it casts."""
    x = cast_input(make_input("normal", (144, 272)), "bfloat16").to(device)
    for flag in (0, 1):
        outs = [n and empty(n, d, x, d == COLUMNWISE) for n, d in zip(names, DIRECTIONS)]
        states, written = new_states(names, device), [b for o in outs if o for b in o.buffers().values()]
        before = [b.clone() for b in written]
        run(outs, x, states, torch.tensor(flag, dtype=torch.int32, device=device))
        if not flag:
            check_strips(x.cpu(), names, (None, None), (False, True), outs, states)
            continue
        for kept, now in zip(before, written, strict=True):
            assert torch.equal(kept.view(-1).view(torch.uint8), now.view(-1).view(torch.uint8))
        assert all(s is None or (s.history == 0.125).all() for s in states)


def new_states(formats, device):
    """A scale away from 1 and a history that is below the inputs' amax."""
    states = []
    for name in formats:
        state = None
        if name and parse_format(name).is_stateful:
            state = DelayedState(torch.full((), 0.7, device=device), torch.full((4,), 0.125, device=device))
        states.append(state)
    return states


def new_rng(device, M, K):
    return mh.Rng(7, 11, 13, 0, (64, 8, K + 16), device=device)


def empty(name, direction, x, transposed):
    out = QuantizedStorage.empty(parse_format(name), direction, tuple(x.shape), x.dtype, x.device, transposed=transposed)
    for buffer in out.buffers().values():
        buffer.view(torch.uint8).fill_(0xA5) if buffer.dim() else buffer.fill_(-3.0)
    return out


def assert_same(got: QuantizedStorage, expected: QuantizedStorage, what: str):
    for name, buffer in expected.buffers().items():
        assert_bitwise_equal(got.buffers()[name], buffer, f"{what}: {name}")


def panel_sums(x: torch.Tensor) -> torch.Tensor:
    """What a cast sums of `x` (M, K): FP32, 32 rows after each other, four of these, a row a panel of 128."""
    M, K = x.shape
    padded = torch.zeros(-(-M // 128) * 128, K, device=x.device)
    padded[:M] = x
    strips = padded.view(-1, 4, 32, K)
    total = torch.zeros_like(strips[:, :, 0])
    for r in range(32):
        total = total + strips[:, :, r]
    panels = torch.zeros_like(total[:, 0])
    for s in range(4):
        panels = panels + total[:, s]
    return panels


def check_pair(x, names, device, what, transposed=(False, False)):
    """Both directions at once on `device` against one at a time on the CPU; histories too."""
    rng, states = new_rng(device, *x.shape), new_states(names, device)
    there = x.to(device) if device != "cpu" else x
    outs = [empty(n, d, there, t) for n, d, t in zip(names, DIRECTIONS, transposed)]
    cast_pair(*outs, there, state=states, rng=rng)
    for out, state, name, direction, turned in zip(outs, states, names, DIRECTIONS, transposed):
        (own,) = new_states([name], "cpu")
        expected = cast(x, parse_format(name), direction, state=own, rng=new_rng("cpu", *x.shape), transposed=turned)
        assert_same(out, expected, f"{what} {direction}")
        if own is not None:
            assert_bitwise_equal(state.history, own.history, f"{what} {direction}: history", any_nan=True)


@on_devices
@pytest.mark.parametrize("row", FORMATS)
def test_every_pair(device, row):
    turn = FORMATS.index(row)
    for col in FORMATS:
        for shape in SHAPES:
            turn += 1
            kind, dtype = ("normal", "special", "tiny")[turn % 3], ("bfloat16", "float16", "bfloat16", "float32")[turn % 4]
            x = lay_out(cast_input(make_input(kind, shape), dtype), LAYOUTS[turn // 2 % 4])
            transposed = (turn % 5 == 0, turn % 3 != 0)
            check_pair(x, (row, col), device, f"{row} | {col} {shape} {kind} {dtype} {turn // 2 % 4} {transposed}", transposed)


@on_devices
@pytest.mark.parametrize("row", STRIP_FORMATS)
def test_rows_and_columns_in_registers(device, row):
    """Amaxes known, not known and collected, rows apart, cut tiles, empty tensors; either direction alone too."""
    check_strip_cases(row, device)


@on_devices
@pytest.mark.parametrize("name", FP4_STRIPS)
def test_nvfp4_in_registers(device, name):
    """By strips, though other kernels are chosen: amaxes known and not, huge numbers, cut tiles, draws."""

    check_fp4_strips(name, device, by_any_strips)


@on_devices
def test_rows_held_whole(device):
    check_whole_rows(device, lambda out, x: cast_pair(*((out, None) if out.direction == ROWWISE else (None, out)), x))


@on_devices
@pytest.mark.parametrize("names", NOOP_PAIRS)
def test_noop_in_registers(device, names):
    check_noop(names, device, lambda outs, x, states, noop: cast_pair(*outs, x, state=states, noop=noop))


@on_devices
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_orientation(device, layout):
    for dtype, names, transposed in itertools.product(
        ("bfloat16", "float32"),
        (("mxfp8_e4m3", "nvfp4"), ("nvfp4:rht,sr", "fp8_block_e4m3"), ("fp8_rowwise_e4m3", "nvfp4:row_scaled,rht")),
        itertools.product((False, True), repeat=2),
    ):
        x = lay_out(cast_input(make_input("special", (150, 144)), dtype), layout)
        check_pair(x, names, device, f"{names} {dtype} {layout} {transposed}", transposed)


@on_devices
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (1, 1), (1, 300), (300, 1)])
def test_empty_and_thin(device, shape):
    for names in (("fp8_current_e4m3", "fp8_rowwise_e5m2"), ("nvfp4", "mxfp8_e4m3"), ("fp8_delayed_e4m3", "nvfp4:row_scaled")):
        check_pair(cast_input(make_input("normal", shape), "bfloat16"), names, device, f"{names} {shape}", (False, True))


@on_devices
def test_amaxes_that_share_a_pass_differ_in_nan(device):
    """FP8's tensor amax becomes NaN, NVFP4's leaves the NaN out; the transformed one is another still."""
    x = cast_input(make_input("normal", (200, 320)), "bfloat16")
    x[77, 130], x[5, 3] = float("nan"), 1000.0
    for names in (("fp8_current_e4m3", "nvfp4"), ("nvfp4", "fp8_current_e4m3"), ("fp8_current_e4m3", "nvfp4:rht"),
                  ("nvfp4:rht", "nvfp4"), ("nvfp4:rht", "nvfp4:rht"), ("nvfp4:row_scaled", "nvfp4:row_scaled"),
                  ("fp8_delayed_e4m3", "fp8_delayed_e4m3")):  # fmt: skip
        check_pair(x, names, device, f"{names} NaN", (False, True))


@on_devices
def test_given_amaxes_and_noop(device):
    x = cast_input(make_input("normal", (96, 160)), "bfloat16").to(device)
    names = ("nvfp4", "fp8_delayed_e4m3")
    amax = [torch.tensor(v, device=device) for v in (9.0, 11.0)]
    flags = [torch.tensor(v, dtype=torch.int32, device=device) for v in (0, 1)]
    results = []
    for noop in flags:
        outs, states = [empty(n, d, x, False) for n, d in zip(names, DIRECTIONS)], new_states(names, device)
        cast_pair(*outs, x, amax=amax, state=states, noop=noop)
        results.append((outs, states))
        measured = [empty("fp8_current_e4m3", ROWWISE, x, False), empty("nvfp4", COLUMNWISE, x, True)]
        before = [b.clone() for o in measured for b in o.buffers().values()]
        cast_pair(*measured, x, noop=noop)
        same = [torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
                for a, b in zip(before, (b for o in measured for b in o.buffers().values()))]  # fmt: skip
        assert all(same) if noop else not any(same)
    (done, states), (held, held_states) = results
    assert done[0].outer_amax == 9.0 and states[1].history[0] == 11.0
    assert held[0].outer_amax == -3.0 and held_states[1].history[0] == 0.125
    assert (held[0].qdata == 0xA5).all() and (held[1].qdata == 0xA5).all()
    frozen = [None, states[1].frozen()]
    cast_pair(*[empty(n, d, x, False) for n, d in zip(names, DIRECTIONS)], x, state=frozen)
    assert states[1].history[0] == 11.0


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("row", [f for f in FORMATS if "sr" not in f])
def test_derived_columns(row):
    """`rowwise_dequantized` in one call: the bytes of decoding the row and casting that."""
    for col, shape, dtype in itertools.product(
        ("mxfp8_e4m3", "fp8_block_e4m3", "fp8_block_e4m3:2d", "fp8_delayed_e4m3"), SHAPES, ("bfloat16", "float32", "float16")
    ):
        x = cast_input(make_input("special" if shape == SHAPES[1] else "normal", shape), dtype)
        states = new_states((row, col), "cuda")
        outs = [empty(row, ROWWISE, x.cuda(), False), empty(col, COLUMNWISE, x.cuda(), True)]
        cast_pair(*outs, x.cuda(), state=states, derived=True)
        own = new_states((row, col), "cpu")
        kept = cast(x, parse_format(row), ROWWISE, state=own[0])
        expected = derive_columnwise(kept, parse_format(col), state=own[1], transposed=True)
        assert_same(outs[0], kept, f"{row} -> {col} {shape} {dtype} row")
        assert_same(outs[1], expected, f"{row} -> {col} {shape} {dtype} column")
        if own[1] is not None:
            assert_bitwise_equal(states[1].history, own[1].history, f"{row} -> {col} history", any_nan=True)


@pytest.mark.gpu
@no_gpu
def test_same_bytes_every_time():
    """Atomics, tile order and streams leave no trace."""
    x = cast_input(make_input("outlier", (1000, 1040)), "bfloat16").cuda()
    for names in (("nvfp4:sr", "nvfp4:rht,sr"), ("fp8_current_e4m3", "fp8_block_e4m3"), ("fp8_delayed_e4m3", "nvfp4:2d")):
        runs = []
        for _ in range(5):
            outs = [empty(n, d, x, d == COLUMNWISE) for n, d in zip(names, DIRECTIONS)]
            with torch.cuda.stream(torch.cuda.Stream()):
                cast_pair(*outs, x, state=new_states(names, "cuda"), rng=new_rng("cuda", *x.shape))
            torch.cuda.synchronize()
            runs.append(outs)
        for outs in runs[1:]:
            for first, again in zip(runs[0], outs):
                assert_same(again, first, f"{names} again")


def test_a_wrong_direction_is_refused():
    x, fmt = torch.zeros(32, 32), parse_format("mxfp8_e4m3")
    row = empty("mxfp8_e4m3", ROWWISE, x, False)
    side = kernels.Side(fmt, row.qdata, row.scale)
    with pytest.raises(ValueError, match="neither direction"):
        kernels.quantize_pair(x, None, None)
    with pytest.raises(ValueError, match="derived: on CUDA only"):
        kernels.quantize_pair(x, side, side, derived=True)
    with pytest.raises(ValueError, match="measured: this format has no outer amax"):
        kernels.quantize_pair(x, kernels.Side(fmt, row.qdata, row.scale, measured=torch.zeros(())), None)


@pytest.mark.gpu
@pytest.mark.slow
@no_gpu
@pytest.mark.parametrize("names", [("mxfp8_e4m3", "fp8_block_e4m3"), ("nvfp4:sr", "nvfp4:rht")])
def test_more_than_two_to_the_31_elements(names):
    """Pieces of a huge cast are the casts of the pieces."""
    M, K = 2**15 + 128, 2**16 + 128
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.empty(M, K, dtype=torch.bfloat16, device="cuda")
    for piece in x.split(2048):
        piece.copy_(torch.randn(piece.shape, device="cuda", generator=g))
    amax = [torch.full(s, 6.5, device="cuda") if (s := parse_format(n).amax_shape(M, K, d)) is not None else None
            for n, d in zip(names, DIRECTIONS)]  # fmt: skip
    outs = [empty(n, d, x, d == COLUMNWISE) for n, d in zip(names, DIRECTIONS)]
    cast_pair(*outs, x, amax=amax, rng=mh.Rng(1, 2, 3, 0, (0, 0, K), device="cuda"))
    for m, k in ((0, 0), (M - 128, K - 128), (M - 128, 0), (2**14, 2**15)):
        part = x[m : m + 128, k : k + 128].cpu()
        for out, name, direction, a in zip(outs, names, DIRECTIONS, amax):
            rng = mh.Rng(1, 2, 3, 0, (m, k, K))
            expected = cast(part, parse_format(name), direction, amax=None if a is None else a.cpu(), rng=rng)
            codes = out.qdata
            per_byte = 8 // out.format.bits
            if out.transposed:
                codes = codes[k : k + 128, m // per_byte : (m + 128) // per_byte].cpu()
                codes = QuantizedStorage(out.format, direction, (128, 128), x.dtype, True, codes).codes()
            else:
                codes = codes[m : m + 128, k // per_byte : (k + 128) // per_byte].cpu()
                codes = QuantizedStorage(out.format, direction, (128, 128), x.dtype, False, codes).codes()
            assert_bitwise_equal(codes, expected.codes(), f"{names} {direction} at {m}, {k}")


def float_patterns(first: int, n: int) -> torch.Tensor:
    return torch.arange(first, first + n, dtype=torch.int64, device="cuda").to(torch.int32).view(torch.float32)


@pytest.mark.gpu
@pytest.mark.slow
@no_gpu
@pytest.mark.parametrize("name", ["fp8_delayed_e4m3", "fp8_delayed_e5m2"])
def test_exhaustive_fp8(name):
    """All 2^32 floats through the GPU's own conversion against the CPU's arithmetic."""
    n, fmt = 2**26, parse_format(name)
    for first in range(-(2**31), 2**31, n):
        x = float_patterns(first, n).view(-1, 4096)
        states = [DelayedState(torch.ones((), device=d), None) for d in ("cuda", "cpu")]
        got = cast(x, fmt, ROWWISE, state=states[0])
        expected = cast(x.cpu(), fmt, ROWWISE, state=states[1])
        assert torch.equal(got.qdata.cpu(), expected.qdata), f"{name} from {first:#x}"


@pytest.mark.gpu
@pytest.mark.slow
@no_gpu
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4:sr"])
def test_exhaustive_e2m1(name):
    """All floats up to 6 and their negatives, in blocks whose first element is 6 under an amax of 2688: scales are 1."""
    n, fmt, six = 15 * 2**22, parse_format(name), int(np.float32(6).view(np.int32))
    for sign in (0, -(2**31)):
        for first in range(0, six + 1, n):
            x = torch.full((n // 15, 16), 6.0, device="cuda")
            patterns = torch.arange(first, first + n, dtype=torch.int64, device="cuda").clamp(max=six) + sign
            x[:, 1:] = patterns.to(torch.int32).view(torch.float32).view(-1, 15)
            x = x.view(-1, 4096)
            outs = []
            for device in ("cuda", "cpu"):
                rng = mh.Rng(5, 6, 7, 0, (0, 0, 4096), device=device)
                outs.append(cast(x.to(device), fmt, ROWWISE, amax=torch.tensor(2688.0, device=device), rng=rng))
            assert (outs[1].scale == 0x38).all()
            assert torch.equal(outs[0].qdata.cpu(), outs[1].qdata), f"{name} from {first:#x}"


def block_patterns(dtype, amax: float, steps: int, below: int) -> torch.Tensor:
    """(steps, 16 B): every number from `amax` down as the amax of blocks, which have beside it the `below` or more numbers
    under it, of both signs."""
    first = torch.tensor(amax, dtype=dtype).view(torch.int16).to(torch.int32)
    blocks = -(-below // 15)
    bits = first - torch.arange(steps, dtype=torch.int32).view(-1, 1, 1)
    bits = bits - torch.arange(blocks * 15, dtype=torch.int32).view(1, blocks, 15)
    most = (first - torch.arange(steps, dtype=torch.int32)).view(-1, 1, 1).expand(-1, blocks, 1)
    x = torch.cat([most, bits], dim=2).clamp(min=0).to(torch.int16).view(dtype)
    x[:, :, 2::3] *= -1
    return x.reshape(steps, blocks * 16)


@pytest.mark.gpu
@pytest.mark.slow
@no_gpu
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4:sr"])
@pytest.mark.parametrize("dtype, mantissas, parts", [(torch.bfloat16, 128, 128), (torch.float16, 1024, 4)])
def test_exhaustive_e2m1_of_16_bits(name, dtype, mantissas, parts):
    """Every BF16 mantissa of a tensor's amax (of FP16 four), every amax of a block in the 16 powers of two below it, and every
    number down to 2^-6 of that, along rows and along columns: all that a code is made of by the GPU's own instructions."""
    fmt, steps, below = parse_format(name), 16 * mantissas, 6 * mantissas
    for part in range(parts):
        amax = 2.0 * (1.0 + part * (mantissas // parts) / mantissas)
        x = block_patterns(dtype, amax, steps, below)
        for direction, y in ((ROWWISE, x), (COLUMNWISE, x.t().contiguous())):
            outs = []
            for device in ("cuda", "cpu"):
                rng = mh.Rng(5, 6, 7, 0, (0, 0, y.shape[1]), device=device)
                on = y.to(device)
                outs.append(empty(name, direction, on, direction == COLUMNWISE))
                pair = (outs[-1], None) if direction == ROWWISE else (None, outs[-1])
                known = torch.tensor(amax, device=device)
                cast_pair(*pair, on, amax=(known, None) if direction == ROWWISE else (None, known), rng=rng if fmt.sr else None)
            assert_same(outs[0], outs[1], f"{name} {direction} {dtype} under {amax}")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
@pytest.mark.parametrize("fmt", ["fp8_current_e4m3", "nvfp4"])
def test_amax_of_columns_that_do_not_move(fmt, device):
    """A column expanded to K columns: rows lie K elements apart, as in a contiguous matrix, but all K read the first."""
    y = torch.ones(64, 512, dtype=torch.bfloat16, device=device)
    y[63, 0] = 100.0
    q = mh.HybridQuantizer(fmt, fmt)
    for found, expected in zip(q.amax(y[:, :1].expand(64, 512)), q.amax(y[:, :1].expand(64, 512).contiguous())):
        assert torch.equal(found, expected) and found.max() == 100.0


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_of_columns_on_the_way(dtype):
    """p24, p18: a linear's bias gradient is the sum in a fixed order, with and without its casts, in any layout."""
    for shape, layout in itertools.product((*SHAPES, (0, 32), (1, 300), (300, 1)), LAYOUTS):
        x = lay_out(cast_input(make_input("normal", shape), dtype).cuda(), layout)
        expected = panel_sums(x).sum(dim=0).to(x.dtype)
        assert_bitwise_equal(kernels.column_sums(x), expected, f"{shape} {layout}")
        for fmt in ("fp8_current_e4m3", "mxfp8_e4m3", "nvfp4:row_scaled"):
            lean = OperandCast(mh.HybridQuantizer(fmt, fmt), True, "cuda")
            parts = kernels.sum_parts(x)
            got = lean(x, True, True, None, sums=parts)
            assert_bitwise_equal(parts.sum(dim=0).to(x.dtype), expected, f"{fmt} {shape} {layout}")
            for a, b in zip(got, lean(x, True, True, None)):
                assert_same(a, b, f"{fmt} {shape} {layout} {a.direction}")


@pytest.mark.gpu
@no_gpu
def test_bias_gradients_of_both_ways_are_the_same(monkeypatch):
    """p18: the short way of a linear sums in the cast, the long way by itself."""
    torch.manual_seed(0)
    layer = mh.HybridLinear(256, 272, recipe="mxfp8", device="cuda", dtype=torch.bfloat16)
    x, dy = torch.randn(145, 256).bfloat16().cuda(), torch.randn(145, 272).bfloat16().cuda()
    found = []
    for short in (True, False):
        if not short:
            monkeypatch.setattr("megatron_hybrid.linear.runs_lean", lambda *a: False)
        layer.bias.grad = None
        layer(x).backward(dy)
        found.append(layer.bias.grad)
    assert torch.equal(*found)
    exact = dy.double().sum(dim=0)
    assert ((found[0].double() - exact).abs() <= exact.abs() * 2**-8 + dy.double().abs().sum(dim=0) * 145 * 2**-24).all()
