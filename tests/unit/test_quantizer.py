"""HybridQuantizer: construction, plain payloads, amaxes, argument checks."""

import pytest
import torch
from tensor_cases import FORMATS, PAIRS, VARIED, assert_same_storage, keys, tensor

import megatron_hybrid as mh
from megatron_hybrid.quantizer import as_matrix
from megatron_hybrid.storage import derive_columnwise
from megatron_hybrid.testing.assertions import assert_bitwise_equal


@pytest.mark.parametrize("arguments,valid", [
    (("mxfp8",), "mxfp8_e4m3"), (("fp8_curent_e4m3",), "fp8_current_e4m3"), (("mxfp8_e4m3:rht",), "2d"), (("nvfp4:pow2",), "row_scaled"),
    (("nvfp4:2d,rht",), "one axis"), (("nvfp4:2d,row_scaled",), "spans rows"), (("fp8_block_e4m3:pow2,no_pow2",), "contradict"),
    (("fp8_current_e4m3:eps",), "value"), (("fp8_current_e4m3:eps=-1",), "0"), (("fp8_delayed_e4m3:algo=min",), "most_recent"),
    (("nvfp4", "mxfp8_e4m3", "row"), "rowwise_dequantized"), (("nvfp4", "mxfp8_e4m3", "orignal"), "original"),
    ((None, "mxfp8_e4m3", "rowwise_dequantized"), "needs a rowwise format"), ((16,), "mxfp8_e4m3"),
])  # fmt: skip
def test_p09_rejections_name_what_is_valid(arguments, valid):
    with pytest.raises(ValueError) as error:
        mh.HybridQuantizer(*arguments)
    assert valid in str(error.value)


@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_are_parsed_and_print_back(fmt):
    q = mh.HybridQuantizer(fmt, mh.parse_format(fmt))
    assert q.rowwise is q.columnwise and str(q.rowwise) == fmt
    assert q == mh.HybridQuantizer(fmt, fmt) and q != mh.HybridQuantizer(fmt, None)


@pytest.mark.parametrize("row,col", PAIRS)
def test_cast_gives_the_payloads_of_quantize_in_the_layout_asked_for(row, col):
    for source in ("original", "rowwise_dequantized"):
        q = mh.HybridQuantizer(row, col, source)
        x = tensor((34, 50))
        t = q.quantize(x, **keys(q))
        for transposed in (False, True):
            r, c = q.cast(x, transposed=transposed, **keys(q))
            assert_same_storage(r, t.rowwise)
            assert_same_storage(c, t.columnwise)
            assert c.transposed == (transposed and c.format.is_quantized) and not r.transposed


def test_cast_of_high_precision_copies_nothing():
    """Activations pass through: the payload is the tensor."""
    x = tensor((34, 50))
    row, col = mh.HybridQuantizer("high_precision", "high_precision").cast(x)
    assert row.qdata is x and col.qdata is x


@pytest.mark.parametrize("fmt", FORMATS)
def test_amaxes_given_back_give_the_same_bytes(fmt):
    q = mh.HybridQuantizer(fmt, fmt)
    x = tensor()
    amax = q.amax(x)
    f = q.rowwise
    assert all((a is None) == (f.outer_axis == "none") for a in amax)
    for a, shape in zip(amax, (f.amax_shape(34, 50, "rowwise"), f.amax_shape(34, 50, "columnwise"))):
        assert a is None or (a.dtype == torch.float32 and a.shape == shape)
    for s, t in zip(q.cast(as_matrix(x), amax=amax, **keys(q)), q.cast(as_matrix(x), **keys(q))):
        assert_same_storage(s, t, fmt)


def test_c26_one_amax_over_shards_gives_the_bytes_of_the_whole():
    """An outlier in the last shard only: with the maximum of the shards' amaxes every shard has the whole's bytes."""
    x = tensor((64, 96))
    x[-1, -1] = 1000.0
    for fmt in ("fp8_current_e4m3", "nvfp4", "fp8_current_e5m2:pow2"):
        q = mh.HybridQuantizer(fmt, None)
        whole = q.quantize(x).rowwise
        shards = x.split(32)
        amax = torch.stack([q.amax(s)[0] for s in shards]).max()
        codes = torch.cat([q.quantize(s, amax=(amax, None)).rowwise.codes() for s in shards])
        assert_bitwise_equal(codes, whole.codes(), fmt)


def test_a_derived_columns_amax_is_not_known_before_the_row():
    q = mh.HybridQuantizer("nvfp4", "fp8_current_e4m3", "rowwise_dequantized")
    row, col = q.amax(tensor())
    assert row is not None and col is None


@pytest.mark.parametrize("row", VARIED)
def test_derive_is_the_one_way_to_a_derived_column(row):
    for col in VARIED:
        q = mh.HybridQuantizer(row, col, "rowwise_dequantized")
        x = tensor((34, 50))
        r, c = q.cast(x, **keys(q))
        state = keys(q)["state"][1]
        assert_same_storage(derive_columnwise(r, q.columnwise, state=state, rng=keys(q)["rng"]), c, f"{row} -> {col}")


@pytest.mark.parametrize("fmt", ["nvfp4:sr", "nvfp4:rht,sr"])
def test_a_key_without_an_index_map_is_that_of_the_whole_tensor(fmt):
    q, x = mh.HybridQuantizer(fmt, fmt), tensor((64, 96))
    t, u = (q.quantize(x, rng=mh.Rng(5, 6, 7, 0, index_map)) for index_map in (None, (0, 0, 96)))
    assert_same_storage(t.rowwise, u.rowwise)
    assert_same_storage(t.columnwise, u.columnwise)
    v = q.quantize(x, rng=mh.Rng.view(mh.Rng(5, 6, 7, 0).values))
    assert_same_storage(v.rowwise, u.rowwise)
    same_rows = torch.linspace(0, 1, 96).expand(64, 96)
    codes = q.quantize(same_rows, rng=mh.Rng(5, 6, 7, 0)).rowwise.codes()
    assert len({bytes(row.numpy()) for row in codes}) == 64, "every row draws its own noise"


def test_sharded_stochastic_rounding_is_unsharded_stochastic_rounding():
    """The noise follows the global position: shards along either dimension, permuted rows."""
    x = tensor((64, 96))
    for fmt in ("nvfp4:sr", "nvfp4:rht,sr", "nvfp4:2d,sr", "nvfp4:row_scaled,sr"):
        q = mh.HybridQuantizer(fmt, fmt)
        whole = q.quantize(x, rng=mh.Rng(5, 6, 7, 0))
        amax = q.amax(x)
        for m, k in ((0, 0), (32, 0), (0, 48), (32, 48)):
            part = x[m : m + 32, k : k + 48]
            row_amax, col_amax = amax
            if q.rowwise.row_scaled:
                row_amax, col_amax = row_amax[m : m + 32], col_amax[:, k : k + 48]
            t = q.quantize(part, rng=mh.Rng(5, 6, 7, 0, (m, k, 96)), amax=(row_amax, col_amax))
            for s, w in zip((t.rowwise, t.columnwise), (whole.rowwise, whole.columnwise)):
                assert_bitwise_equal(s.codes(), w.codes()[m : m + 32, k : k + 48], f"{fmt} at {m}, {k}")
        order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
        permuted = mh.HybridQuantizer(fmt, None) if "2d" not in fmt else None
        if permuted is not None:
            t = permuted.quantize(x[order], rng=mh.Rng(5, 6, 7, 0, order), amax=(amax[0][order] if amax[0].dim() else amax[0], None))
            assert_bitwise_equal(t.rowwise.codes(), whole.rowwise.codes()[order], f"{fmt}: permuted tokens")


def test_as_matrix_flattens_leading_dimensions_also_of_empty_tensors():
    for shape, matrix in (((2, 3, 4), (6, 4)), ((5,), (1, 5)), ((), (1, 1)), ((4, 0), (4, 0)), ((0, 4), (0, 4)), ((2, 0, 3), (0, 3))):
        assert as_matrix(torch.zeros(shape)).shape == matrix
