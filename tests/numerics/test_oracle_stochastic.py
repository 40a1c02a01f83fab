"""Stochastic rounding: the generator, the rounding rule, unbiasedness, independence of the layout."""

import numpy as np
import pytest

from megatron_hybrid.formats import COLUMNWISE, DIRECTIONS, ROWWISE, parse_format
from megatron_hybrid.testing import oracle
from megatron_hybrid.testing.assertions import assert_bitwise_equal
from megatron_hybrid.testing.generators import FORMATS, make_input
from megatron_hybrid.testing.oracle import decode, philox4x32, quantize, random16

SR = [f for f in FORMATS if parse_format(f).sr]

# known answers of Random123 for philox4x32-10: counter, key, output
KNOWN = (
    ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip


@pytest.mark.parametrize("counter,key,answer", KNOWN)
def test_philox_known_answers(counter, key, answer):
    assert " ".join(f"{w:08x}" for w in philox4x32(counter, key)) == answer


def test_bits_follow_the_layout_of_the_contract():
    """Element 8c + j of the global tensor takes half (j % 2) of word j // 2 of call c."""
    bits = random16((2, 24), COLUMNWISE, (7, 9, 5, 0, 0, 24))
    for index in (0, 1, 6, 7, 8, 29, 47):
        word = int(philox4x32([index // 8, 0, 5, 1], (7, 9))[index % 8 // 2])
        assert bits.reshape(-1)[index] == (word >> 16 if index % 2 else word & 0xFFFF)
    far = random16((1, 8), ROWWISE, (7, 9, 5, 1 << 33, 0, 24))  # the high counter word
    start = (1 << 33) * 24 // 8
    assert far[0, 0] == int(philox4x32([start & 0xFFFFFFFF, start >> 32, 5, 0], (7, 9))[0]) & 0xFFFF


def neighbours(fmt, direction):
    """One input and its cast by the same format without `sr`."""
    base = parse_format(fmt.replace(",sr", "").replace(":sr", ""))
    x = make_input("normal", (16, 32))
    return x, quantize(x, base, direction)


@pytest.mark.parametrize("fmt", SR)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_draw_is_a_neighbour_and_the_mean_is_x(fmt, direction):
    """4096 draws: the overall mean within 4 sigma of x, each of the 512 elements within 5 (one of the 5120 of this
    test exceeds 4 by chance with probability 0.3), and the mean closer to x than nearest rounding."""
    x, nearest = neighbours(fmt, direction)
    f, draws = parse_format(fmt), 4096
    v = oracle._hadamard(x) if f.rht and direction == ROWWISE else oracle._hadamard(x.T).T if f.rht else x
    scale = oracle._expand(nearest.block_scale, f.block(direction), x.shape)
    multiplier = np.minimum(np.float32(1) / (scale * nearest.outer_scale), oracle.FLT_MAX)
    target = np.clip(v * multiplier, -6, 6)
    grid = oracle.MAGNITUDES["e2m1"]
    lo = grid[np.searchsorted(grid, np.abs(target), side="right") - 1]
    hi = grid[np.searchsorted(grid, np.abs(target), side="left")]  # lo itself for exact values
    u = np.stack([random16(x.shape, direction, (11, 3, i, 0, 0, 32)) for i in range(draws)])
    values = decode(oracle.encode_e2m1_stochastic(np.broadcast_to(target, u.shape), u), "e2m1")
    assert ((np.abs(values) == lo) | (np.abs(values) == hi)).all()
    assert (np.signbit(values) == np.signbit(target)).all()
    p = np.divide(np.abs(target) - lo, hi - lo, out=np.zeros(x.shape), where=hi > lo)
    sigma = (hi - lo) * np.sqrt(p * (1 - p) / draws)
    mean = values.mean(axis=0, dtype=np.float64)
    off, floored = mean - target, 2.0**-15  # f is floored: a bias of up to 2^-16 of a gap of at most 2
    assert (np.abs(off) <= 5 * sigma + floored).all()
    assert np.abs(off.sum()) <= 4 * np.sqrt((sigma**2).sum()) + off.size * floored
    rounded = decode(nearest.codes, "e2m1")
    assert np.sqrt(np.mean((mean - target) ** 2)) < 0.2 * np.sqrt(np.mean((rounded - target) ** 2))
    first = quantize(x, fmt, direction, rng=(11, 3, 0, 0, 0, 32))
    assert_bitwise_equal(decode(first.codes, "e2m1"), values[0], f"{fmt} {direction}: quantize makes the same draw")
    assert_bitwise_equal(first.scale, nearest.scale, f"{fmt} {direction}: scales know nothing of sr")


def test_exact_values_never_move():
    x = np.zeros((1, 16), np.float32)
    x[0, :8] = oracle.MAGNITUDES["e2m1"]
    x[0, 8:] = -x[0, :8]
    for step in range(64):  # amax 6 given 2688: S = 1, multiplier 1
        r = quantize(x, "nvfp4:sr", ROWWISE, amax=2688, rng=(1, 1, step, 0, 0, 16))
        assert r.codes[0].tolist() == list(range(16))


@pytest.mark.parametrize("fmt", SR)
def test_key_direction_and_counter_matter(fmt):
    x = make_input("normal", (16, 32))
    base = (1, 2, 3, 0, 0, 32)
    first = quantize(x, fmt, ROWWISE, rng=base).codes
    assert_bitwise_equal(first, quantize(x, fmt, ROWWISE, rng=base).codes, "same key, same bytes")
    for place in range(3):
        other = list(base)
        other[place] += 1
        assert (quantize(x, fmt, ROWWISE, rng=other).codes != first).any()
    assert (random16((16, 32), COLUMNWISE, base) != random16((16, 32), ROWWISE, base)).any()
    with pytest.raises(ValueError, match="rng"):
        quantize(x, fmt, ROWWISE)


def cast(x, fmt, direction, amax, **kwargs):
    return quantize(x, fmt, direction, amax=amax, scale=2.0 if "delayed" in fmt else None, **kwargs)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sharded_equals_unsharded(fmt, direction):
    """Shards on block boundaries, with the global amax and their global offsets, give slices of the whole's bytes."""
    M, K = 256, 272
    x, f = make_input("outlier", (M, K)), parse_format(fmt)
    amax = oracle.outer_amax(x, fmt, direction)
    whole = cast(x, fmt, direction, amax, rng=(1, 2, 3, 0, 0, K))
    for rows, cols in (((0, 128), (0, K)), ((128, 256), (0, K)), ((0, M), (0, 128)), ((0, M), (128, K))):
        part = x[slice(*rows), slice(*cols)]
        mine = amax
        if f.outer_axis == "row":
            mine = amax[slice(*rows)] if direction == ROWWISE else amax[:, slice(*cols)]
        got = cast(part, fmt, direction, mine, rng=(1, 2, 3, rows[0], cols[0], K))
        assert_bitwise_equal(got.codes, whole.codes[slice(*rows), slice(*cols)], f"{fmt} {direction} {rows} {cols}")


def test_row_ids_follow_permuted_rows():
    """Rows moved by a dispatcher keep their noise when their source rows come along."""
    x = make_input("normal", (32, 64))
    order = np.random.default_rng(0).permutation(32)
    whole = quantize(x, "nvfp4:sr", ROWWISE, rng=(1, 2, 3, 0, 0, 64))
    moved = quantize(x[order], "nvfp4:sr", ROWWISE, rng=(1, 2, 3, 99, 0, 64), row_ids=order)
    assert_bitwise_equal(moved.codes, whole.codes[order], "permuted rows")
    keys = ("seed", "tensor_id", "counter", "row_offset", "col_offset", "global_K")
    named = quantize(x, "nvfp4:sr", ROWWISE, rng=dict(zip(keys, (1, 2, 3, 0, 0, 64))))
    assert_bitwise_equal(named.codes, whole.codes, "rng as a dict")
