"""Making a HybridTensor: independence of the directions, missing ones, immutability, high precision. Lines of properties.md."""

import dataclasses

import pytest
import torch
from tensor_cases import (
    ALIGNED, FORMATS, HELD, RAGGED, VARIED, assert_same_storage, assert_same_tensor, keys, quantize, storages, tensor,
)  # fmt: skip

import megatron_hybrid as mh
from megatron_hybrid import kernels
from megatron_hybrid import storage as storage_module
from megatron_hybrid.formats import DIRECTIONS
from megatron_hybrid.testing.assertions import assert_bitwise_equal


@pytest.mark.parametrize("row", FORMATS)
def test_p01_both_directions_at_once_are_the_bytes_of_each_alone(row):
    x = tensor()
    alone = quantize(mh.HybridQuantizer(row, None), x).rowwise
    for col in FORMATS:
        both = quantize(mh.HybridQuantizer(row, col), x)
        assert_same_storage(both.rowwise, alone, f"row {row} beside {col}")
        assert_same_storage(both.columnwise, quantize(mh.HybridQuantizer(None, col), x).columnwise, f"{col} beside {row}")


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("fmt", VARIED)
def test_p02_a_missing_direction_is_none_and_costs_nothing(fmt, held, monkeypatch):
    made = []
    real, pair = storage_module.cast, storage_module.cast_pair
    monkeypatch.setattr("megatron_hybrid.quantizer.cast", lambda x, f, d, **k: made.append(d) or real(x, f, d, **k))
    monkeypatch.setattr("megatron_hybrid.quantizer.cast_pair", lambda *a, **k: made.extend(DIRECTIONS) or pair(*a, **k))
    q = mh.HybridQuantizer(fmt, fmt)
    t = quantize(q, tensor(), rowwise=held[0], columnwise=held[1])
    assert (t.rowwise is not None, t.columnwise is not None) == held
    assert made == [d for d, h in zip(("rowwise", "columnwise"), held) if h]
    assert t.shape == RAGGED and t.dtype == torch.bfloat16
    for direction, h in zip(("rowwise", "columnwise"), held):
        if not h:
            with pytest.raises(ValueError, match=direction):
                t.dequantize(direction)


def test_p02_quantizer_without_a_direction_never_makes_it():
    t = quantize(mh.HybridQuantizer(None, "mxfp8_e4m3"), tensor())
    assert t.rowwise is None and t.columnwise is not None


def test_p05_quantizers_and_formats_cannot_change():
    q = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3")
    t = quantize(q, tensor())
    for target, name, value in ((q, "rowwise", None), (q.rowwise, "family", "mxfp8"), (t.rowwise, "format", q.columnwise)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, value)
    for name in ("rowwise", "columnwise", "quantizer"):
        with pytest.raises(AttributeError):
            setattr(t, name, None)
    assert hash(q) == hash(mh.HybridQuantizer("nvfp4", "mxfp8_e4m3"))


def test_p05_tensors_share_nothing_with_their_source():
    """A high-precision payload is the tensor: writing to either must not write to the other."""
    q, x = mh.HybridQuantizer("high_precision", "nvfp4"), tensor()
    t = quantize(q, x)
    x.zero_()
    assert t.dequantize("rowwise").abs().max() > 0
    t.update(torch.ones_like(x))
    assert x.abs().max() == 0


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_p17_high_precision_in_both_directions_is_one_tensor(source):
    q = mh.HybridQuantizer("high_precision", "high_precision", source)
    t = q.quantize(tensor())
    assert t.rowwise.qdata.data_ptr() == t.columnwise.qdata.data_ptr()
    for other in (t.detach(), t[:1], t.view(34, 50), t.clone(), t.to(torch.float32), torch.empty_like(t)):
        assert other.rowwise.qdata.data_ptr() == other.columnwise.qdata.data_ptr()
        assert other.__tensor_flatten__()[0] == ["rowwise_qdata"]
    assert t.detach().rowwise.qdata.data_ptr() == t.view(34, 50).rowwise.qdata.data_ptr() == t.rowwise.qdata.data_ptr()
    assert t.clone().rowwise.qdata.data_ptr() != t.rowwise.qdata.data_ptr()


def test_p17_high_precision_update_casts_to_the_nominal_dtype_and_obeys_noop():
    t = mh.HybridQuantizer("high_precision", "high_precision").quantize(tensor())
    src = tensor(dtype=torch.float32, seed=1)
    before = t.dequantize()
    t.update(src, noop_flag=torch.ones((), dtype=torch.int32))
    assert_bitwise_equal(t.dequantize(), before, "noop=1")
    t.update(src, noop_flag=torch.zeros((), dtype=torch.int32))
    assert_bitwise_equal(t.dequantize(dtype=torch.bfloat16), src.bfloat16(), "noop=0")
    assert not t.stale


@pytest.mark.parametrize("fmt", [f for f in FORMATS if "sr" not in f])  # the noise differs by direction
def test_columnwise_is_rowwise_of_the_transpose(fmt):
    x = tensor((33, 50))
    col = quantize(mh.HybridQuantizer(None, fmt), x).columnwise
    q = mh.HybridQuantizer(fmt, None)
    state = (keys(mh.HybridQuantizer(None, fmt))["state"][1], None)
    row = quantize(q, x.T, state=state).rowwise
    assert_bitwise_equal(col.dequantize(), row.dequantize().T, fmt)
    if row.format.is_quantized:
        assert_bitwise_equal(col.codes(), row.codes().T, fmt)
        scale = row.scale_inv()
        assert_bitwise_equal(col.scale_inv(), scale.T if scale.dim() == 2 else scale, fmt)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (2, 0, 3), (0,), (5,), (), (1, 1, 1, 7)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_scalar_and_many_dimensional(fmt, shape):
    q = mh.HybridQuantizer(fmt, fmt)
    t = quantize(q, torch.ones(shape))
    assert t.shape == shape and t.dequantize().shape == shape
    for s in storages(t):
        assert s.dequantize().shape == s.shape
        assert s.format.scale != "fp32" or s.scale.numel() == 0 or bool((s.scale > 0).all())
    amax = q.amax(torch.ones(shape))
    assert all(a is None or a.numel() == 0 or float(a.max()) == float(bool(t.numel())) for a in amax if "rht" not in fmt)
    assert_same_tensor(t.clone(), t)
    t.update(torch.ones(shape), **keys(q))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", VARIED)
def test_dtypes_and_strides(fmt, dtype):
    q, x = mh.HybridQuantizer(fmt, fmt), tensor((40, 2, 24), dtype)
    t = quantize(q, x)
    assert t.dtype == dtype
    assert_same_tensor(quantize(q, x.permute(1, 0, 2).contiguous().permute(1, 0, 2)), t, "strided leading dimensions")
    assert_same_tensor(quantize(q, x.transpose(0, 2).contiguous().transpose(0, 2)), t, "strided last dimension")


def test_amax_from_the_caller_is_used():
    q = mh.HybridQuantizer("fp8_current_e4m3", "nvfp4")
    x = tensor(ALIGNED)
    amax = q.amax(x)
    assert_same_tensor(q.quantize(x, amax=amax), q.quantize(x))
    larger = tuple(2 * a for a in amax)
    t = q.quantize(x, amax=larger)
    assert float(t.columnwise.amax()) == float(larger[1])
    assert float(t.rowwise.scale_inv()) == 2 * float(q.quantize(x).rowwise.scale_inv())


def test_dequantize_prefers_the_more_exact_direction():
    x = tensor()
    for row, col, expected in (
        ("nvfp4", "mxfp8_e4m3", "columnwise"),
        ("mxfp8_e4m3", "nvfp4", "rowwise"),
        ("mxfp8_e4m3", "high_precision", "columnwise"),
        ("fp8_current_e4m3", "mxfp8_e4m3", "columnwise"),
        ("mxfp8_e4m3", "mxfp8_e4m3", "rowwise"),
        ("fp8_block_e4m3:2d", "fp8_block_e4m3", "columnwise"),
    ):
        t = quantize(mh.HybridQuantizer(row, col), x)
        assert_bitwise_equal(t.dequantize(), t.dequantize(expected), f"{row} / {col}")
        assert_bitwise_equal(t.dequantize(dtype=torch.bfloat16), t.dequantize(expected).bfloat16(), "one rounding")


def test_dequantize_gives_a_new_tensor_and_names_a_wrong_direction():
    t = mh.HybridQuantizer("high_precision", None).quantize(tensor())
    t.dequantize(dtype=torch.bfloat16).zero_()
    assert t.dequantize().abs().max() > 0
    with pytest.raises(ValueError, match="rowwise"):
        t.dequantize("row")
    with pytest.raises(ValueError, match="holds rowwise"):
        t.dequantize("columnwise")
    t.clear()
    with pytest.raises(ValueError, match="holds nothing"):
        t.dequantize()


def test_gradient_passes_through_dequantize():
    p = torch.nn.Parameter(mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor()))
    g = torch.randn(RAGGED)
    (p.dequantize() * g).sum().backward()
    assert type(p.grad) is torch.Tensor
    assert_bitwise_equal(p.grad, g.bfloat16(), "gradient")


def test_from_storages_refuses_what_does_not_fit():
    q = mh.HybridQuantizer("mxfp8_e4m3", "nvfp4")
    x = tensor((32, 64))
    row, col = q.cast(x)
    t = mh.HybridTensor.from_storages(row, col, (2, 16, 64), torch.bfloat16, q)
    assert t.rowwise is row and t.columnwise is col and t.shape == (2, 16, 64)
    for args in (
        (col, row, (32, 64), torch.bfloat16, q),
        (row, col, (64, 32), torch.bfloat16, q),
        (row, col, (32, 64), torch.float32, q),
        (row, col, (32, 64), torch.bfloat16, mh.HybridQuantizer("mxfp8_e5m2", "nvfp4")),
        (None, None, (32, 64), torch.int32, q),
    ):
        with pytest.raises(ValueError):
            mh.HybridTensor.from_storages(*args)


def test_one_kernel_call_a_direction_and_no_operator_dispatch(monkeypatch):
    """Eager casts call the extension directly."""
    monkeypatch.setattr(kernels, "_operators", lambda: pytest.fail("operators are for traced code"))
    quantize(mh.HybridQuantizer("nvfp4", "mxfp8_e4m3", "rowwise_dequantized"), tensor())
