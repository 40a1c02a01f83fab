"""Stochastic rounding and the Hadamard transform of the compiled casts."""

import math

import numpy as np
import pytest
import torch
from test_cpp_golden import cast

from megatron_hybrid import kernels
from megatron_hybrid.formats import COLUMNWISE, DIRECTIONS, ROWWISE, parse_format

SR = parse_format("nvfp4:sr")
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def philox(counter, key):
    """Philox 4x32-10 in Python integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def test_philox_known_answers():
    """The generator's published test vectors hold for the Python above, which the kernels are compared with below."""
    ones = 0xFFFFFFFF
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def draw(index, seed, tensor_id, counter, direction):
    group, lane = divmod(index, 8)
    word = philox([group & 0xFFFFFFFF, group >> 32, counter, direction], [seed, tensor_id])[lane // 2]
    return word >> 16 if lane % 2 else word & 0xFFFF


def rng(seed=1, tensor_id=2, counter=3, row=0, col=0, global_cols=64):
    return torch.tensor([seed, tensor_id, counter, row, col, global_cols])


def quantize(x, key, direction=ROWWISE, row_ids=None, fmt=SR, amax=2688.0):
    """Codes (M, K) under a given tensor amax; with 2688, blocks whose amax is 6 have multiplier 1."""
    M, K = x.shape
    qdata = torch.empty(M, -(-K // 2), dtype=torch.uint8)
    scale = torch.empty(fmt.scale_shape(M, K, direction), dtype=torch.uint8)
    kernels.quantize(x, fmt, direction, qdata=qdata, scale=scale, amax=torch.tensor(amax), rng=key, row_ids=row_ids)
    return torch.stack((qdata & 15, qdata >> 4), dim=-1).flatten(1)[:, :K]


def unit_blocks(rows, cols, seed=0, along=1):
    """Values below 6 with a 6 in every block of 16 along an axis: each block's multiplier is 1."""
    x = torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)) * 12 - 6
    if along == 1:
        x[:, ::16] = 6.0
    else:
        x[::16] = 6.0
    return x


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_against_the_definition(direction):
    """Every code of a tensor whose position in the global one is odd, against the formula in exact arithmetic."""
    x = unit_blocks(32, 37, along=1 if direction == ROWWISE else 0)
    x[2, 3:6] = torch.tensor([0.0, -0.0, 2.0**-30])
    key = dict(seed=0xDEADBEEF, tensor_id=0xFFFFFFFF, counter=17)
    row, col, wide = 2**33 + 5, 11, 1003
    codes = quantize(x, rng(**key, row=row, col=col, global_cols=wide), direction)
    for m in range(32):
        for k in range(37):
            v = abs(float(x[m, k]))
            low = max(i for i in range(8) if MAGNITUDES[i] <= v)
            expected = low
            if low < 7:
                f = math.floor(65536 * (v - MAGNITUDES[low]) / (MAGNITUDES[low + 1] - MAGNITUDES[low]))
                u = draw((m + row) * wide + k + col, **key, direction=0 if direction == ROWWISE else 1)
                expected += u < f
            sign = 8 if math.copysign(1.0, float(x[m, k])) < 0 else 0
            assert codes[m, k] == expected + sign, (m, k)


def test_neighbours_only_and_exact_values_kept():
    x = unit_blocks(64, 64)
    values = torch.from_numpy(MAGNITUDES)[(quantize(x, rng()) & 7).int()]
    up = torch.from_numpy(np.searchsorted(MAGNITUDES, x.abs().numpy(), side="left")).clamp(max=7)
    high = torch.from_numpy(MAGNITUDES)[up]
    low = torch.where(high == x.abs(), high, torch.from_numpy(MAGNITUDES)[(up - 1).clamp(min=0)])
    assert ((values == low) | (values == high)).all()
    exact = torch.from_numpy(np.tile(np.concatenate([MAGNITUDES[::-1], -MAGNITUDES]), (4, 4)))
    assert torch.equal(quantize(exact, rng()), quantize(exact, rng(seed=9)))


def test_mean_is_the_value():
    """Over n draws the mean's standard deviation is at most step / (2 sqrt n)."""
    x, n = unit_blocks(1, 64), 4096
    total = torch.zeros(64, dtype=torch.float64)
    signed = torch.from_numpy(np.concatenate([MAGNITUDES, -MAGNITUDES])).double()
    for counter in range(n):
        total += signed[quantize(x, rng(counter=counter))[0].int()]
    step = torch.where(x[0].abs() < 2, 0.5, torch.where(x[0].abs() < 4, 1.0, 2.0))
    assert ((total / n - x[0]).abs() <= 5 * step / (2 * math.sqrt(n)) + 2.0**-16 * step).all()


def test_keys_matter():
    x = unit_blocks(64, 64)
    base = quantize(x, rng())
    assert torch.equal(base, quantize(x, rng()))
    for other in (dict(seed=8), dict(tensor_id=8), dict(counter=8), dict(row=8), dict(col=8), dict(global_cols=128)):
        assert not torch.equal(base, quantize(x, rng(**other))), other
    x[::16] = 6.0  # so that columnwise blocks have multiplier 1 too: only the direction in the key differs
    assert not torch.equal(quantize(x, rng()), quantize(x, rng(), COLUMNWISE))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_shards_round_like_the_whole(direction):
    x = unit_blocks(64, 96)
    x[::16] = 6.0
    whole = quantize(x, rng(global_cols=96), direction)
    assert torch.equal(quantize(x[16:48].contiguous(), rng(row=16, global_cols=96), direction), whole[16:48])
    assert torch.equal(quantize(x[:, 32:64], rng(col=32, global_cols=96), direction), whole[:, 32:64])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    if direction == ROWWISE:  # tokens permuted: the row's identity travels with it
        assert torch.equal(quantize(x[order], rng(row=999, global_cols=96), row_ids=order), whole[order])


def test_sr_needs_its_key():
    with pytest.raises(ValueError, match="rng"):
        quantize(unit_blocks(1, 16), None)


def test_nan_block_stays_zero():
    x = unit_blocks(2, 16)
    x[0, 5] = float("nan")
    assert quantize(x, rng())[0].tolist() == [0] * 16


SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


def hadamard(x: np.ndarray) -> np.ndarray:
    """FP32 butterflies over the last axis of 16, strides 1, 2, 4, 8."""
    y = (x * SIGNS).astype(np.float32)
    for step in (1, 2, 4, 8):
        y = y.reshape(*x.shape[:-1], -1, 2, step)
        y = np.stack((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), axis=-2).reshape(x.shape)
    return y * np.float32(0.25)


@pytest.mark.parametrize("shape", [(3, 16), (40, 50), (20, 300)])
@pytest.mark.parametrize("options", ["rht", "row_scaled,rht"])
def test_rht_is_the_plain_cast_of_the_transform(shape, options):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = shape[1] // 16 * 16
    y = x.clone()
    y[:, :whole] = torch.from_numpy(hadamard(x[:, :whole].numpy().reshape(shape[0], -1, 16)).reshape(shape[0], whole))
    plain = "nvfp4:row_scaled" if "row" in options else "nvfp4"
    got, expected = (cast(t, parse_format(n), ROWWISE, False) for t, n in ((x, f"nvfp4:{options}"), (y, plain)))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rht_is_inverted(direction):
    """The inverse of the decode in the transformed domain; both in FP32, so equal up to rounding of 16-term sums."""
    fmt, x = parse_format("nvfp4:rht"), torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    _, scale, amax, qdata = cast(x, fmt, direction, False)
    inner, plain = torch.empty(50, 70), torch.empty(50, 70)
    args = (qdata, scale, amax, fmt, direction, 50, 70)
    kernels.dequantize(*args, transposed=False, out=inner, inverse_rht=False)
    kernels.dequantize(*args, transposed=False, out=plain)
    inner = inner if direction == ROWWISE else inner.T
    again = plain if direction == ROWWISE else plain.T
    whole = inner.shape[1] // 16 * 16
    again = torch.from_numpy(hadamard(again[:, :whole].contiguous().numpy().reshape(-1, 16))).view(inner.shape[0], whole)
    torch.testing.assert_close(again, inner[:, :whole], rtol=1e-5, atol=1e-5)
    assert (plain - x).abs().max() < 0.5 * x.abs().max()


def test_outer_scale_left_out():
    fmt, x = parse_format("nvfp4:row_scaled"), torch.randn(20, 32)
    _, scale, amax, qdata = cast(x, fmt, ROWWISE, False)
    full, inner = torch.empty(20, 32), torch.empty(20, 32)
    kernels.dequantize(qdata, scale, amax, fmt, ROWWISE, 20, 32, transposed=False, out=full)
    kernels.dequantize(qdata, scale, amax, fmt, ROWWISE, 20, 32, transposed=False, out=inner, outer=False)
    assert torch.equal(full, inner * kernels.outer_scale(amax, fmt, torch.empty(20, 1)))
