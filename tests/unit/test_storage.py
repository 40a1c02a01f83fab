"""QuantizedStorage: accessors, layouts, casts in place; storage_layout's moves."""

import dataclasses

import pytest
import torch
from tensor_cases import FORMATS, RAGGED, assert_same_storage, keys, tensor

import megatron_hybrid as mh
from megatron_hybrid import storage_layout as layout
from megatron_hybrid.formats import COLUMNWISE, DIRECTIONS, ROWWISE
from megatron_hybrid.storage import QuantizedStorage, cast, cast_into, derive_columnwise
from megatron_hybrid.testing.assertions import assert_bitwise_equal

M, K = 34, 50


def payload(fmt, direction, *, transposed=False, shape=(M, K), seed=0):
    q = mh.HybridQuantizer(*((fmt, None) if direction == ROWWISE else (None, fmt)))
    k = keys(q)
    state = k["state"][0 if direction == ROWWISE else 1]
    return cast(tensor(shape, seed=seed), mh.parse_format(fmt), direction, state=state, rng=k["rng"], transposed=transposed)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_shapes_and_dtypes_of_the_accessors(fmt, direction):
    s = payload(fmt, direction)
    f = s.format
    assert s.shape == (M, K) and s.dtype == torch.bfloat16
    assert s.dequantize().shape == (M, K) and s.dequantize().dtype == torch.float32
    assert_bitwise_equal(s.dequantize(torch.float16), s.dequantize().half(), "one rounding from FP32")
    assert s.nbytes == sum(t.numel() * t.element_size() for t in s.buffers().values())
    assert s.operand_shape == ((M, K) if direction == ROWWISE else (K, M))
    if not f.is_quantized:
        assert list(s.buffers()) == ["qdata"]
        for accessor in (s.codes, s.scale_inv, s.block_scale, s.outer_scale):
            with pytest.raises(ValueError, match="high_precision"):
                accessor()
        return
    assert s.codes().shape == (M, K) and s.codes().dtype == torch.uint8
    assert int(s.codes().max()) < 2**f.bits
    b = f.block(direction)
    expected = () if b == (None, None) else tuple(1 if n is None else -(-size // n) for n, size in zip(b, (M, K)))
    assert s.scale.shape == expected and s.block_scale().dtype == torch.float32
    assert s.scale_inv().shape == torch.broadcast_shapes(expected, s.outer_scale().shape)
    assert (s.amax() is None) == (f.family != "nvfp4")
    assert_bitwise_equal(s.scale_inv(), s.block_scale() * s.outer_scale(), "two levels")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("fmt", [f for f in FORMATS if "rht" not in f])
def test_decode_is_codes_times_scales(fmt, direction):
    s = payload(fmt, direction)
    if not s.format.is_quantized:
        return assert_bitwise_equal(s.dequantize(torch.bfloat16), tensor().reshape(M, K), fmt)
    table = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    if s.format.element in table:
        values = s.codes().view(table[s.format.element]).float()
    else:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = torch.cat([grid, -grid])[s.codes().long()]
    block = [n or 10**6 for n in s.format.block(direction)]
    scale = s.block_scale()
    if scale.dim():
        scale = scale.repeat_interleave(min(block[0], M), 0)[:M].repeat_interleave(min(block[1], K), 1)[:, :K]
    assert_bitwise_equal(s.dequantize(), (values * scale) * s.outer_scale(), fmt)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_layout_changes_no_code_and_relayout_goes_there_and_back(fmt, direction):
    for shape in ((34, 50), (33, 47), (1, 5), (0, 16)):
        plain, transposed = (payload(fmt, direction, transposed=t, shape=shape) for t in (False, True))
        assert_same_storage(transposed, plain, fmt)
        assert layout.equal(plain, transposed)
        assert_bitwise_equal(transposed.dequantize(), plain.dequantize(), fmt)
        assert_bitwise_equal(transposed.operand(torch.float32), plain.operand(torch.float32), fmt)
        there = layout.relayout(plain, True)
        assert there.transposed == transposed.transposed
        assert_bitwise_equal(there.qdata, transposed.qdata, f"{fmt}: packed bytes")
        assert_bitwise_equal(layout.relayout(there, False).qdata, plain.qdata, fmt)
        assert layout.relayout(plain, False) is plain


@pytest.mark.parametrize("fmt", FORMATS)
def test_transpose_is_its_own_inverse_and_decodes_to_the_transpose(fmt):
    for direction in DIRECTIONS:
        for transposed in (False, True):
            s = payload(fmt, direction, transposed=transposed)
            t = layout.transpose(s)
            assert t.shape == (K, M) and t.direction != direction
            assert_bitwise_equal(t.dequantize(), s.dequantize().T.contiguous(), fmt)
            if s.format.is_quantized:
                assert_bitwise_equal(t.codes(), s.codes().T.contiguous(), fmt)
                assert t.scale.shape == s.format.scale_shape(K, M, t.direction)
            assert_same_storage(layout.transpose(t), s)


def test_granularity_is_the_block_and_whole_bytes():
    for fmt, direction, transposed, expected in (
        ("mxfp8_e4m3", ROWWISE, False, (1, 32)), ("mxfp8_e4m3", COLUMNWISE, False, (32, 1)), ("mxfp8_e4m3:2d", ROWWISE, False, (32, 32)),
        ("nvfp4", ROWWISE, False, (1, 16)), ("nvfp4", COLUMNWISE, False, (16, 2)), ("nvfp4", COLUMNWISE, True, (16, 1)),
        ("nvfp4", ROWWISE, True, (2, 16)), ("fp8_block_e4m3:2d", COLUMNWISE, False, (128, 128)), ("fp8_current_e4m3", ROWWISE, False, (1, 1)),
        ("fp8_rowwise_e4m3", COLUMNWISE, False, (1, 1)), ("high_precision", ROWWISE, False, (1, 1)),
    ):  # fmt: skip
        s = payload(fmt, direction, transposed=transposed)
        assert tuple(layout.granularity(s, d) for d in (0, 1)) == expected, fmt


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_narrow_of_both_layouts(fmt, direction):
    for transposed in (False, True):
        s = payload(fmt, direction, transposed=transposed, shape=(256, 200))
        for dim, start, length in ((0, 128, 128), (1, 128, 72), (0, 0, 0), (1, 0, 128)):
            piece, shared = layout.narrow(s, dim, start, length)
            index = (slice(None),) * dim + (slice(start, start + length),)
            assert_bitwise_equal(piece.dequantize(), s.dequantize()[index].contiguous(), f"{fmt} {dim}")
            for n in shared:
                assert getattr(piece, n).data_ptr() == getattr(s, n).data_ptr()
            assert set(piece.buffers()) == set(s.buffers())
        assert layout.narrow(s, 0, 0, 256) == (s, ())


@pytest.mark.parametrize("fmt", FORMATS)
def test_cast_into_strided_buffers_writes_them_in_place(fmt):
    for direction in DIRECTIONS:
        s = payload(fmt, direction)
        wide = layout.map_buffers(s, lambda t: torch.stack([t, t], dim=-1)[..., 0] if t.dim() else t.clone())
        fresh = payload(fmt, direction, seed=1)
        q = mh.HybridQuantizer(*((fmt, None) if direction == ROWWISE else (None, fmt)))
        k = keys(q)
        arguments = dict(state=next((x for x in k["state"] if x), None), rng=k["rng"])
        addresses = [t.data_ptr() for t in wide.buffers().values()]
        cast_into(wide, tensor((M, K), seed=1), **arguments)
        assert_same_storage(wide, fresh, f"{fmt} {direction}")
        assert [t.data_ptr() for t in wide.buffers().values()] == addresses
        cast_into(wide, tensor((M, K), seed=2), noop=torch.ones((), dtype=torch.int32), **arguments)
        assert_same_storage(wide, fresh, f"{fmt} {direction}: noop")


def test_storages_are_frozen_and_share_through_with_buffers():
    s = payload("nvfp4", ROWWISE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.qdata = None
    other = s.with_buffers({"scale": torch.zeros_like(s.scale)})
    assert other.qdata is s.qdata and other.scale is not s.scale and other.format is s.format
    assert list(s.buffers()) == ["qdata", "scale", "outer_amax"]


def test_missing_keys_of_a_cast_are_named():
    x = tensor((16, 16))
    for fmt, match in (("nvfp4:sr", "rng"), ("fp8_delayed_e4m3", "state")):
        for direction in DIRECTIONS:
            with pytest.raises(ValueError, match=f"{direction} {fmt}.*{match}"):
                cast(x, mh.parse_format(fmt), direction)


def test_derive_needs_a_row():
    with pytest.raises(ValueError, match="columnwise"):
        derive_columnwise(payload("nvfp4", COLUMNWISE), mh.parse_format("nvfp4"))


def test_empty_payloads_have_every_buffer():
    for fmt in FORMATS:
        for shape in ((0, 64), (64, 0), (0, 0)):
            for direction in DIRECTIONS:
                s = QuantizedStorage.empty(mh.parse_format(fmt), direction, shape, torch.bfloat16, "cpu")
                assert set(s.buffers()) == set(payload(fmt, direction, shape=shape).buffers())


def test_unsupported_sources_are_named():
    with pytest.raises(ValueError, match="float64"):
        cast(tensor(RAGGED).double().reshape(M, K), mh.parse_format("nvfp4"), ROWWISE)
