"""Views and pieces: what shares buffers, what must lie on block bounds, what is refused."""

import pytest
import torch
from tensor_cases import (
    ALIGNED, FORMATS, PAIRS, VARIED, assert_same_storage, assert_same_tensor, assert_unchanged, quantize, snapshot, storages,
    tensor,
)  # fmt: skip

import megatron_hybrid as mh
from megatron_hybrid import storage_layout as layout
from megatron_hybrid.testing.assertions import assert_bitwise_equal


def shares_memory(a, b) -> bool:
    ranges = [
        {(t.untyped_storage().data_ptr()) for s in storages(x) for t in s.buffers().values()} for x in (a, b)
    ]
    return ranges[0] == ranges[1]


def both(fmt):
    return mh.HybridQuantizer(fmt, fmt)


# ---- views


@pytest.mark.parametrize("held", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("fmt", VARIED)
def test_p13_views_share_every_byte(fmt, held):
    x = tensor((4, 8, 48))
    t = quantize(both(fmt), x, rowwise=held[0], columnwise=held[1])
    before = snapshot(t)
    for v in (
        t.view(32, 48), t.reshape(2, 16, 48), t.view(-1), t.view(-1).view(4, 8, 48), t.flatten(0, 1), t.unsqueeze(0),
        t.unsqueeze(0).squeeze(0), t.view(4, 1, 8, 48).squeeze(1), t.detach(), t[:], t[...], t[:, :, :], t[0:4], t[:, -8:],
        t.as_strided((4, 8, 48), (384, 48, 1)), t.as_strided((4, 8, 48), (384, 48, 1), 0), t.contiguous(),
        torch.ops.aten.alias(t), t.narrow(1, 0, 8), t.permute(0, 1, 2),
    ):  # fmt: skip
        assert_unchanged(v, before, f"{fmt} {tuple(v.shape)}")
        assert_bitwise_equal(v.dequantize().reshape(x.shape), t.dequantize(), f"{fmt} {tuple(v.shape)}")
        assert v.dtype == t.dtype and v.quantizer is t.quantizer


def test_p13_a_view_that_would_re_cut_the_blocks_raises():
    t = both("mxfp8_e4m3").quantize(tensor((4, 8, 64)))
    for shape in ((4, 8, 8, 8), (64, 32), (8, 4, 2, 32), (32, 64, 1), (2, 2, 512)):
        with pytest.raises(ValueError, match="keeps its size 64"):
            t.view(shape)
    with pytest.raises(ValueError, match="keeps its size 64"):
        t.view(-1).view(64, 32)
    with pytest.raises(RuntimeError):
        t.view(3, 5)


@pytest.mark.parametrize("size,stride,offset", [
    ((64, 64), (1, 64), 0), ((32, 64), (128, 1), 0), ((64, 32), (64, 1), 0), ((63, 64), (64, 1), 64), ((64, 64), (64, 1), 1),
    ((4096,), (1,), 0), ((64, 64), (64, 1), 2048),
])  # fmt: skip
def test_p13_as_strided_that_changes_anything_raises(size, stride, offset):
    t = both("mxfp8_e4m3").quantize(tensor((64, 64)))
    with pytest.raises(ValueError, match="as_strided"):
        t.as_strided(size, stride, offset)


def test_p13_a_step_or_an_offset_is_never_mistaken_for_no_change():
    t = both("fp8_rowwise_e4m3").quantize(tensor((64, 64)))
    for index in ((slice(None, None, 2),), (slice(0, 64, 2),), (slice(None), slice(None, None, 2)), (slice(0, 64, 64),)):
        with pytest.raises(ValueError, match="step"):
            t[index]
    piece = t[32:]
    assert piece.storage_offset() == 32 * 64
    assert_bitwise_equal(piece.as_strided(piece.shape, piece.stride()).dequantize(), t.dequantize()[32:], "its own geometry")
    with pytest.raises(ValueError, match="offset"):
        piece.as_strided(piece.shape, piece.stride(), 0)
    assert t[:1][::2].shape == (1, 64)


# ---- pieces


def matrix_pieces(t):
    """(piece, the same piece of a plain tensor) for aligned ranges in both dimensions."""
    x = t.dequantize("rowwise" if t.rowwise is not None else "columnwise")
    for index in (
        slice(0, 128), slice(128, 256), slice(128, None), slice(-128, None), slice(0, 0), slice(256, 999), slice(128, 128),
        (slice(None), slice(0, 128)), (slice(None), slice(128, 384)), (slice(128, 256), slice(256, 384)), (slice(None), slice(5, 5)),
    ):  # fmt: skip
        yield t[index], x[index], index


@pytest.mark.parametrize("fmt,held", [
    *((f, (True, True)) for f in FORMATS), *((f, (True, False)) for f in VARIED), *((f, (False, True)) for f in VARIED),
])  # fmt: skip
def test_p14_pieces_decode_to_pieces_of_the_decode(fmt, held):
    t = quantize(both(fmt), tensor(ALIGNED), rowwise=held[0], columnwise=held[1])
    for piece, expected, index in matrix_pieces(t):
        assert piece.shape == expected.shape and piece.stride() == expected.stride()
        assert shares_memory(piece, t)
        for s in storages(piece):
            assert_bitwise_equal(s.dequantize(), getattr(t, s.direction).dequantize()[index], f"{fmt} {s.direction} {index}")
            if s.format.is_quantized:
                assert_bitwise_equal(s.codes(), getattr(t, s.direction).codes()[index], f"{fmt} {index}")
            own = layout.map_buffers(s, torch.Tensor.contiguous)
            assert_bitwise_equal(own.dequantize(), s.dequantize(), "a contiguous piece is the same")
        clone = piece.clone()
        assert_same_tensor(clone, piece, f"{fmt} {index}")
        assert not shares_memory(clone, t) or clone.numel() == 0


@pytest.mark.parametrize("fmt", VARIED)
def test_p14_split_gives_equal_slices(fmt):
    t = quantize(both(fmt), tensor((2, 128, 256)))
    x, matrix = t.dequantize("rowwise"), t.view(256, 256)
    for pieces, expected in (
        (t.split(1), x.split(1)), (t.chunk(2), x.chunk(2)), (t.unbind(0), x.unbind(0)), ([t[1], t[-1]], [x[1], x[-1]]),
        (matrix.split(128), x.view(256, 256).split(128)), (matrix.split([128, 128], dim=1), x.view(256, 256).split(128, dim=1)),
        (list(t), list(x)), (matrix.tensor_split(2), x.view(256, 256).tensor_split(2)),
    ):  # fmt: skip
        assert len(pieces) == len(expected)
        for a, b in zip(pieces, expected):
            assert a.shape == b.shape
            assert_bitwise_equal(a.dequantize("rowwise"), b, fmt)


def test_p14_misaligned_pieces_name_block_and_offset():
    cases = (
        ("mxfp8_e4m3", 0, "columnwise", "offset 16 is not a multiple of 32"),
        ("mxfp8_e4m3", 1, "rowwise", "offset 16 is not a multiple of 32"),
        ("mxfp8_e4m3:2d", 0, "rowwise", "block 32 x 32"),
        ("fp8_block_e4m3", 1, "rowwise", "offset 16 is not a multiple of 128"),
        ("fp8_block_e4m3:2d", 0, "rowwise", "block 128 x 128"),
        ("nvfp4", 1, "rowwise", "offset 40 is not a multiple of 16"),
        ("nvfp4:2d", 0, "rowwise", "offset 40 is not a multiple of 16"),
    )
    for fmt, dim, direction, message in cases:
        t = both(fmt).quantize(tensor(ALIGNED))
        start = 40 if "nvfp4" in fmt else 16
        for call in (lambda: t.narrow(dim, start, 128), lambda: t.split([start, ALIGNED[dim] - start], dim)):
            with pytest.raises(ValueError, match=message) as error:
                call()
            assert direction in str(error.value) and fmt.split(":")[0] in str(error.value)


def test_p14_only_directions_held_and_packed_bytes_restrict_a_piece():
    x = tensor((64, 64))
    rows = mh.HybridQuantizer("mxfp8_e4m3", None).quantize(x)
    assert_bitwise_equal(rows[3:5].dequantize(), rows.dequantize()[3:5], "rows are whole blocks")
    packed = mh.HybridQuantizer(None, "nvfp4").quantize(x)  # blocks along M, two columns a byte
    assert_bitwise_equal(packed[:, 2:8].dequantize(), packed.dequantize()[:, 2:8], "two columns a byte")
    with pytest.raises(ValueError, match="offset 3 is not a multiple of 2"):
        packed[:, 3:8]
    current = both("fp8_current_e4m3").quantize(x)
    assert_bitwise_equal(current[3:5, 7:11].dequantize(), current.dequantize()[3:5, 7:11], "one scale for everything")


def test_ragged_ends_are_block_bounds():
    for fmt in VARIED:
        t = quantize(both(fmt), tensor((200, 150)))
        for index in ((slice(128, 200),), (slice(None), slice(128, 150)), (slice(128, None), slice(128, None))):
            for s in storages(t[index]):
                assert_bitwise_equal(s.dequantize(), getattr(t, s.direction).dequantize()[index], f"{fmt} {index}")


def test_pieces_of_pieces():
    for fmt in VARIED:
        t = quantize(both(fmt), tensor((512, 384)))
        inner = t[128:, 128:][128:256, :128]
        for s in storages(inner):
            assert_bitwise_equal(s.dequantize(), getattr(t, s.direction).dequantize()[256:384, 128:256], fmt)


def test_pieces_along_dimensions_that_are_not_rows():
    t = both("fp8_current_e4m3").quantize(tensor((4, 6, 8)))
    assert_bitwise_equal(t[..., 2:4].dequantize(), t.dequantize()[..., 2:4], "last dimension")
    assert_bitwise_equal(t[1].dequantize(), t.dequantize()[1], "outermost")
    assert_bitwise_equal(t.view(-1)[16:48].dequantize(), t.dequantize().view(-1)[16:48], "whole rows of a flat view")
    for call in (lambda: t[:, 2:4], lambda: t[:, 0], lambda: t[..., 0], lambda: t.view(-1)[3:11]):
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize("fmt,shared", [
    ("fp8_current_e4m3", (True, True)), ("nvfp4", (True, True)), ("fp8_rowwise_e4m3", (False, True)), ("mxfp8_e4m3", (False, False)),
    ("nvfp4:row_scaled", (False, True)), ("fp8_block_e4m3", (False, False)), ("high_precision", (False, False)),
])  # fmt: skip
def test_a_piece_whose_scales_cover_more_than_it_cannot_be_cast_anew(fmt, shared):
    t = mh.HybridQuantizer(fmt, None).quantize(tensor(ALIGNED))
    for piece, refused in zip((t[:128], t[:, :128]), shared):
        before, src = snapshot(t), tensor(tuple(piece.shape), seed=1)
        if not refused:
            piece.update(src)
            continue
        for write in (piece.update, piece.copy_):
            with pytest.raises(ValueError, match="scales also cover elements outside"):
                write(src)
        assert_unchanged(t, before)
        piece.clone().update(src)  # a clone has its own scale
        assert_unchanged(t, before)


# ---- transposes


@pytest.mark.parametrize("row,col", PAIRS)
def test_transposing_swaps_the_directions(row, col):
    t = quantize(mh.HybridQuantizer(row, col), tensor((48, 80)))
    for u in (t.t(), t.T, t.transpose(0, 1), t.permute(1, 0)):
        assert u.shape == (80, 48) and u.stride() == (1, 80)
        assert (str(u.rowwise.format), str(u.columnwise.format)) == (col, row)
        assert shares_memory(u, t)
        assert_bitwise_equal(u.rowwise.dequantize(), t.columnwise.dequantize().T.contiguous(), f"{col} of the transpose")
        assert_bitwise_equal(u.columnwise.dequantize(), t.rowwise.dequantize().T.contiguous(), f"{row} of the transpose")
        assert_same_tensor(u.t(), t, "there and back")
        assert_same_tensor(u.clone(), u, "a clone of the transpose")
    if "sr" not in row + col and "delayed" not in row + col:
        other = mh.HybridQuantizer(col, row).quantize(tensor((48, 80)).T)
        assert_same_storage(t.T.rowwise, other.rowwise, f"{row}/{col}: x.T quantized")
        assert_same_storage(t.T.columnwise, other.columnwise, f"{row}/{col}: x.T quantized")


def test_transposes_without_a_meaning_raise():
    derived = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3", "rowwise_dequantized").quantize(tensor((32, 32)))
    with pytest.raises(NotImplementedError, match="derived"):
        derived.t()
    with pytest.raises(NotImplementedError, match="3 dimensions"):
        both("mxfp8_e4m3").quantize(tensor((2, 32, 32))).transpose(1, 2)
    row = mh.HybridQuantizer("nvfp4", None).quantize(tensor((32, 48)))
    assert row.T.rowwise is None and row.T.columnwise.shape == (48, 32)


# ---- operations without a rule


@pytest.mark.parametrize("call", [
    lambda t: t + 1, lambda t: t.mul_(2), lambda t: t @ t.t(), lambda t: t.zero_(), lambda t: t.sum(), lambda t: t[t > 0],
    lambda t: torch.cat([t, t]), lambda t: t.fill_(1.0), lambda t: torch.nn.functional.linear(torch.ones(2, 64), t),
])  # fmt: skip
def test_an_operation_without_a_rule_names_itself_the_formats_and_the_way_out(call):
    t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor((64, 64)))
    before = snapshot(t)
    with pytest.raises(NotImplementedError, match=r"aten\.\w+.*rowwise=.*columnwise=.*dequantize\(\)"):
        call(t)
    assert_unchanged(t, before)
