"""In-place writes: one direction, noop, derived columns, staleness, and failures that change nothing."""

import pytest
import torch
from tensor_cases import (
    ALIGNED, FORMATS, PAIRS, VARIED, assert_same_storage, assert_same_tensor, assert_unchanged, keys, quantize, snapshot,
    tensor,
)  # fmt: skip

import megatron_hybrid as mh
from megatron_hybrid.storage import derive_columnwise
from megatron_hybrid.testing.assertions import assert_bitwise_equal

QUANTIZED_PAIRS = [p for p in PAIRS if p != ("high_precision", "high_precision")]  # that one is a single tensor
STATEFUL_OR_RANDOM = ("fp8_delayed_e4m3", "nvfp4:sr")


def flag(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


def test_p03_update_writes_only_the_direction_asked_for():
    x, new = tensor(), tensor(seed=1)
    for row, col in QUANTIZED_PAIRS:
        q = mh.HybridQuantizer(row, col)
        fresh = quantize(q, new)
        for direction, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
            t = quantize(q, x)
            before = snapshot(t)
            t.update(new, **{other: False}, **keys(q))
            assert_unchanged(t, before, f"{row}/{col}", directions=(other,))
            assert_same_storage(getattr(t, direction), getattr(fresh, direction), f"{row}/{col} {direction}")
            assert t.stale == {other}


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_p04_noop_flag_set_changes_nothing_and_clear_equals_a_fresh_cast(source):
    x, new = tensor(), tensor(seed=1)
    for row, col in PAIRS:
        q = mh.HybridQuantizer(row, col, source)
        fresh = quantize(q, new)
        t = quantize(q, x)
        before, k = snapshot(t), keys(q)
        t.update(new, noop_flag=flag(1), **k)
        assert_unchanged(t, before, f"noop=1 {row}/{col}")
        for s in k["state"]:
            assert s is None or float(s.history.max()) == 0, "a skipped cast records nothing"
        for name in ("rowwise", "columnwise"):  # also when the row is cast for the column only
            t.update(new, noop_flag=torch.ones(1, dtype=torch.int32), **{name: False}, **k)
            assert_unchanged(t, before, f"noop=1 without {name}, {row}/{col}")
            assert all(s is None or float(s.history.max()) == 0 for s in k["state"])
        t.update(new, noop_flag=flag(0), **k)
        assert_same_tensor(t, fresh, f"noop=0 {row}/{col}")
        assert_unchanged(t, before, f"addresses {row}/{col}", directions=())


@pytest.mark.parametrize("row", [f for f in FORMATS if f != "high_precision"])
def test_p06_derived_columns_are_casts_of_the_rows_decode(row):
    x = tensor()
    identity = quantize(mh.HybridQuantizer(row, "high_precision", "rowwise_dequantized"), x)
    decoded = identity.rowwise.dequantize(torch.bfloat16)
    assert_bitwise_equal(identity.columnwise.qdata, decoded, f"{row}: high-precision column")
    assert (identity.columnwise.qdata != x.reshape(decoded.shape)).any()
    for col in VARIED:
        t = quantize(mh.HybridQuantizer(row, col, "rowwise_dequantized"), x)
        q = mh.HybridQuantizer(None, col)
        assert_same_storage(t.columnwise, quantize(q, decoded).columnwise, f"{row} -> {col}")
    mx = quantize(mh.HybridQuantizer(row, "mxfp8_e4m3", "rowwise_dequantized"), x)
    assert_bitwise_equal(
        mx.columnwise.dequantize(), mh.HybridQuantizer(None, "mxfp8_e4m3").quantize(decoded).dequantize(), row
    )


@pytest.mark.parametrize("row", VARIED)
def test_p07_a_column_without_its_row_uses_a_transient_one(row):
    x, new = tensor(), tensor(seed=1)
    for col in VARIED:
        q = mh.HybridQuantizer(row, col, "rowwise_dequantized")
        t = quantize(q, x, rowwise=False)
        assert t.rowwise is None
        assert_same_storage(t.columnwise, quantize(q, x).columnwise, f"{row} -> {col}")
        t.update(new.float(), **keys(q))
        assert t.rowwise is None and not t.stale
        both = quantize(q, x).update(new.float(), **keys(q))
        assert_same_storage(t.columnwise, both.columnwise, f"update {row} -> {col}: the nominal dtype rounds the row")


@pytest.mark.parametrize("row,col", PAIRS)
def test_p08_update_derives_the_column_from_the_updated_row(row, col):
    q = mh.HybridQuantizer(row, col, "rowwise_dequantized")
    new = tensor(seed=1)
    t = quantize(q, tensor()).update(new, **keys(q))
    assert_same_tensor(t, quantize(q, new), f"{row} -> {col}")
    state, rng = keys(q)["state"][1], keys(q)["rng"]
    assert_same_storage(t.columnwise, derive_columnwise(t.rowwise, q.columnwise, state=state, rng=rng), "derive")


def test_a_derived_column_can_be_left_and_re_derived_by_request():
    q = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3", "rowwise_dequantized")
    x, new = tensor(), tensor(seed=1)
    t = q.quantize(x)
    old_column = t.columnwise.dequantize()
    t.update(new, columnwise=False)
    assert t.stale == {"columnwise"} and "stale" in repr(t)
    assert_bitwise_equal(t.columnwise.dequantize(), old_column, "the column keeps its bytes")
    assert_bitwise_equal(t.dequantize(), t.dequantize("rowwise"), "the stale column is not chosen though more exact")
    t.rederive()
    assert not t.stale
    assert_same_tensor(t, q.quantize(new), "rederive")
    with pytest.raises(ValueError, match="derived column"):
        mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(x).rederive()


def test_rederive_obeys_noop():
    q = mh.HybridQuantizer("nvfp4", "nvfp4", "rowwise_dequantized")
    t = q.quantize(tensor()).update(tensor(seed=1), columnwise=False)
    before = snapshot(t)
    t.rederive(noop_flag=flag(1))
    assert_unchanged(t, before)


def test_staleness_is_seen_through_every_tensor_over_the_same_buffers():
    t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor(ALIGNED))
    detached, piece, copy = t.detach(), t[:32], t.clone()
    t.update(tensor(ALIGNED, seed=1), columnwise=False)
    assert detached.stale == piece.stale == {"columnwise"} and not copy.stale
    assert t.clone().stale == {"columnwise"}
    detached.update(tensor(ALIGNED, seed=2))
    assert not t.stale


def test_a_piece_marks_the_whole_stale_but_does_not_make_it_fresh():
    q = mh.HybridQuantizer("mxfp8_e5m2", "mxfp8_e4m3")
    t = q.quantize(tensor(ALIGNED))
    t[:64].update(tensor((64, 384), seed=1), columnwise=False)
    assert t.stale == {"columnwise"}
    t[:64].update(tensor((64, 384), seed=1))
    assert t.stale == {"columnwise"}
    t.update(tensor(ALIGNED, seed=1))
    assert not t.stale


def test_update_bumps_torchs_version_counters():
    t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor())
    before = t._version, t.rowwise.qdata._version, t.columnwise.scale._version
    t.update(tensor(seed=1))
    assert all(now > then for now, then in zip((t._version, t.rowwise.qdata._version, t.columnwise.scale._version), before))


def test_update_casts_fp32_masters_directly():
    """FP32 source, bf16 tensor: no rounding to bf16 in between."""
    for fmt in VARIED[1:]:
        q = mh.HybridQuantizer(fmt, fmt)
        master = tensor(dtype=torch.float32, seed=3)
        t = quantize(q, tensor()).update(master, **keys(q))
        ours, direct = t.dequantize("rowwise"), quantize(q, master).dequantize("rowwise")
        assert_bitwise_equal(ours, direct, fmt)


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "fp8_block_e4m3", "fp8_rowwise_e4m3", "nvfp4:row_scaled", "high_precision"])
def test_updating_a_piece_writes_its_bytes_in_the_whole(fmt):
    """Rows of a row-only tensor have their own scales: writing them is writing part of the whole."""
    q = mh.HybridQuantizer(fmt, None)
    x, new = tensor(ALIGNED), tensor(ALIGNED, seed=1)
    t = q.quantize(x)
    t[64:128].update(new[64:128])
    assert_same_tensor(t, q.quantize(torch.cat([x[:64], new[64:128], x[128:]])), fmt)


def test_updating_a_strided_piece_writes_its_bytes_in_the_whole():
    q = mh.HybridQuantizer("mxfp8_e4m3", "mxfp8_e5m2")
    x, new = tensor(ALIGNED), tensor(ALIGNED, seed=1)
    t = q.quantize(x)
    t[:, 128:256].update(new[:, 128:256])
    assert_same_tensor(t, q.quantize(torch.cat([x[:, :128], new[:, 128:256], x[:, 256:]], dim=1)))
    before = snapshot(t)
    t[:, 128:256].update(x[:, 128:256], noop_flag=flag(1))
    assert_unchanged(t, before, "noop on a strided piece")


# ---- failures


def failing_updates(t, q):
    x = tensor(tuple(t.shape), seed=1)
    good = keys(q)
    yield "shape", lambda: t.update(x[:1], **good)
    yield "dtype", lambda: t.update(x.double(), **good)
    yield "integers", lambda: t.update(x.int(), **good)
    yield "device", lambda: t.update(x.to("meta"), **good)
    yield "no tensor", lambda: t.update(1.0, **good)
    yield "quantized source", lambda: t.update(t.detach(), **good)
    yield "amax", lambda: t.update(x, amax=(torch.ones(3), None), **good)
    yield "noop dtype", lambda: t.update(x, noop_flag=torch.ones(()), **good)
    yield "noop size", lambda: t.update(x, noop_flag=torch.ones(2, dtype=torch.int32), **good)
    yield "copy_ shape", lambda: t.copy_(x.reshape(-1))
    yield "copy_ dtype", lambda: t.copy_(x.int())
    yield "copy_ formats", lambda: t.copy_(mh.HybridQuantizer("fp8_current_e5m2:pow2", None).quantize(x))
    yield "copy_ missing direction", lambda: t.copy_(quantize(q, x, columnwise=False))


@pytest.mark.parametrize("row,col", [(v, w) for v, w in PAIRS if v != w and "fp8_current_e4m3" not in (v, w)])
def test_p10_a_failed_update_or_copy_changes_nothing(row, col):
    q = mh.HybridQuantizer(row, col)
    t = quantize(q, tensor())
    before = snapshot(t)
    for what, call in failing_updates(t, q):
        with pytest.raises((ValueError, RuntimeError)):
            call()
            pytest.fail(f"{row}/{col}: {what} was accepted")
        assert_unchanged(t, before, f"{row}/{col} after {what}")
        assert not t.stale


@pytest.mark.parametrize("fmt", STATEFUL_OR_RANDOM)
@pytest.mark.parametrize("column_fails", [True, False])
def test_p10_a_missing_state_or_rng_of_one_direction_leaves_both(fmt, column_fails):
    """Including the amax history of the other direction, which would be recorded first."""
    formats = ("fp8_delayed_e5m2", fmt) if column_fails else (fmt, "fp8_delayed_e5m2")
    q = mh.HybridQuantizer(*formats)
    t, k = quantize(q, tensor()), keys(q)
    before = snapshot(t)
    state = list(k["state"])
    if fmt == "nvfp4:sr":
        k["rng"] = None
    else:
        state[1 if column_fails else 0] = None
    k["state"] = tuple(state)
    for call in (t.update, q.quantize):
        with pytest.raises(ValueError, match="rng|state"):
            call(tensor(seed=1), **k)
        assert_unchanged(t, before)
        assert all(s is None or float(s.history.max()) == 0 for s in state)
    with pytest.raises(ValueError):
        t.copy_(tensor(seed=1))
    assert_unchanged(t, before)


def test_p10_an_amax_or_state_of_the_wrong_kind_is_refused_first():
    x = tensor()
    q = mh.HybridQuantizer("fp8_delayed_e4m3", "nvfp4:sr")
    t, good = quantize(q, x), keys(q)
    before = snapshot(t)
    bad_state = (mh.DelayedState(torch.ones(2), torch.zeros(4)), None)
    bad_rng = mh.Rng.view(torch.zeros(5, dtype=torch.int64))
    bad_rows = mh.Rng(1, 2, 3, 0, torch.zeros(3, dtype=torch.int64))
    for change, match in (
        (dict(state=bad_state), "state.scale"),
        (dict(rng=bad_rng), "rng.values"),
        (dict(rng=bad_rows), "row_ids"),
        (dict(amax=(None, torch.ones(1, 1))), "columnwise nvfp4:sr: amax"),
    ):
        with pytest.raises(ValueError, match=match):
            t.update(x, **{**good, **change})
        assert_unchanged(t, before)
    with pytest.raises(ValueError, match="has none"):
        mh.HybridQuantizer("mxfp8_e4m3", None).quantize(x, amax=(torch.ones(()), None))
