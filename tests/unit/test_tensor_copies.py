"""Copies, conversions and comparisons: whose buffers, which formats, which dtype and device."""

import copy

import pytest
import torch
from tensor_cases import (
    ALIGNED, FORMATS, HELD, PAIRS, VARIED, assert_same_storage, assert_same_tensor, assert_unchanged, keys, quantize, snapshot,
    storages, tensor,
)  # fmt: skip

import megatron_hybrid as mh
from megatron_hybrid import storage_layout as layout
from megatron_hybrid.testing.assertions import assert_bitwise_equal


def addresses(t) -> set:
    return {b.data_ptr() for s in storages(t) for b in s.buffers().values()}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("fmt", VARIED)
def test_p11_detach_is_a_new_tensor_over_the_same_buffers(fmt, held):
    q = mh.HybridQuantizer(fmt, fmt)
    t = quantize(q, tensor(), rowwise=held[0], columnwise=held[1]).requires_grad_()
    before = snapshot(t)
    d = t.detach()
    assert d is not t and not d.requires_grad
    assert_unchanged(d, before, "shared buffers")
    d.clear()
    assert d.rowwise is None and d.columnwise is None and not storages(d)
    assert_unchanged(t, before, "the source keeps its payloads")
    other = t.detach()
    other.clear(columnwise=False)
    assert other.rowwise is None and (other.columnwise is not None) == held[1]
    t.detach().update(tensor(seed=1), **keys(q))
    assert addresses(t) == {a for _, a in before.values()}
    if any(held):
        assert any(not torch.equal(b, before[s.direction, n][0]) for s in storages(t) for n, b in s.buffers().items())


def test_payload_is_not_in_the_instance_dict():
    """A dict of attributes that frameworks copy from parameter to parameter must not hold the payload alive."""
    t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor())
    assert vars(t) == {}
    p = torch.nn.Parameter(t)
    assert not any(isinstance(v, (torch.Tensor, mh.QuantizedStorage)) for v in vars(p).values())


@pytest.mark.parametrize("held", HELD[:3])
@pytest.mark.parametrize("fmt", FORMATS)
def test_p15_clone_contiguous_and_to_keep_bytes_dtype_and_device_in_their_own_buffers(fmt, held):
    q = mh.HybridQuantizer(fmt, fmt)
    t = quantize(q, tensor(), rowwise=held[0], columnwise=held[1])
    before = snapshot(t)
    for new in (t.clone(), t.to(torch.bfloat16, copy=True), t.to("cpu", copy=True), copy.deepcopy(t), torch.clone(t)):
        assert_same_tensor(new, t, fmt)
        assert new.device == t.device and new.quantizer == q and torch.equal(new, t)
        assert not addresses(new) & addresses(t)
        new.update(tensor(seed=1), **keys(q))
        assert_unchanged(t, before, f"{fmt}: writing to the copy")
    assert t.contiguous() is t and t.to(torch.bfloat16) is t and t.cpu() is t
    piece = quantize(q, tensor(ALIGNED))[:, 128:256]
    assert not piece.is_contiguous() and piece.contiguous().is_contiguous()
    for s, own in zip(storages(piece), storages(piece.contiguous())):
        assert layout.is_contiguous(own)
        assert_same_storage(own, s, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_p15_new_tensors_have_the_formats_and_zeros_decode_to_zero(fmt):
    q = mh.HybridQuantizer(fmt, fmt)
    t = quantize(q, tensor())
    row_only = quantize(q, tensor(), columnwise=False)
    for new, shape in (
        (t.new_zeros(64, 50), (64, 50)), (t.new_zeros((3, 4, 16)), (3, 4, 16)), (torch.zeros_like(t), t.shape),
        (t.new_zeros(0, 50), (0, 50)), (torch.empty_like(t), t.shape), (t.new_empty(5, 7), (5, 7)),
        (torch.zeros_like(row_only), t.shape), (t.new_zeros((34, 50), dtype=torch.bfloat16, device="cpu"), (34, 50)),
    ):  # fmt: skip
        assert isinstance(new, mh.HybridTensor) and new.shape == shape and new.dtype == t.dtype and new.quantizer == q
        assert not addresses(new) & addresses(t)
    for z in (t.new_zeros(64, 50), torch.zeros_like(t)):
        for s in storages(z):
            assert not s.dequantize().any(), f"{fmt} {s.direction}"
    assert torch.zeros_like(row_only).columnwise is None
    before = snapshot(t)
    t.new_zeros(2, 17, 50).update(tensor(seed=1), **keys(q))
    assert_unchanged(t, before)
    assert_same_tensor(t.new_zeros(2, 17, 50).update(tensor(seed=1), **keys(q)), quantize(q, tensor(seed=1)), fmt)


def test_another_dtype_asks_for_a_plain_tensor():
    """`zeros_like(w, dtype=float32)` is an optimizer state, not a quantized tensor."""
    t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor())
    for make in (torch.zeros_like, torch.empty_like):
        z = make(t, dtype=torch.float32)
        assert type(z) is torch.Tensor and z.dtype == torch.float32 and z.shape == t.shape
    assert type(t.new_zeros(3, dtype=torch.int32)) is torch.Tensor


@pytest.mark.parametrize("fmt", VARIED)
def test_pieces_can_be_copied_into_zeros_as_fsdp_pads_its_shards(fmt):
    q = mh.HybridQuantizer(fmt, fmt)
    t = quantize(q, tensor(ALIGNED))
    shard = t[128:]
    padded = shard.new_zeros(256, 384)
    padded.narrow(0, 0, 128).copy_(shard)
    for s in storages(padded):
        assert_bitwise_equal(s.dequantize()[:128], getattr(shard, s.direction).dequantize(), fmt)
        assert not s.dequantize()[128:].any()


@pytest.mark.parametrize("row,col", PAIRS)
def test_to_another_nominal_dtype_keeps_quantized_bytes(row, col):
    t = quantize(mh.HybridQuantizer(row, col), tensor())
    for new in (t.to(torch.float32), t.float(), t.half()):
        assert isinstance(new, mh.HybridTensor) and new.dtype != t.dtype
        for s, old in zip(storages(new), storages(t)):
            assert s.dtype == new.dtype
            if s.format.is_quantized:
                assert_bitwise_equal(s.codes(), old.codes(), str(s.format))
            assert_bitwise_equal(s.dequantize(), old.dequantize(torch.bfloat16 if not s.format.is_quantized else torch.float32)
                                 .to(new.dtype if not s.format.is_quantized else torch.float32).float(), str(s.format))  # fmt: skip
    for dtype in (torch.int32, torch.float64):
        with pytest.raises(NotImplementedError, match="dequantize"):
            t.to(dtype)


def test_to_the_meta_device_keeps_the_description():
    t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor())
    m = t.to("meta")
    assert m.device.type == "meta" and m.rowwise.qdata.device.type == "meta" and m.quantizer == t.quantizer


# ---- copy_


@pytest.mark.parametrize("row,col", PAIRS)
def test_copy_between_equal_formats_copies_bytes(row, col):
    q = mh.HybridQuantizer(row, col)
    src, dst = quantize(q, tensor()), quantize(q, tensor(seed=1))
    before = snapshot(dst)
    assert dst.copy_(src) is dst
    assert_same_tensor(dst, src)
    assert_unchanged(dst, before, "addresses", directions=())
    one = quantize(q, tensor(seed=1), columnwise=False)
    one.copy_(src)  # a source may hold more
    assert_same_storage(one.rowwise, src.rowwise)


@pytest.mark.parametrize("fmt", FORMATS)
def test_copy_between_layouts_copies_codes(fmt):
    """A column stored for a GEMM (K, M) and one stored (M, K) hold the same codes."""
    q = mh.HybridQuantizer(None, fmt)
    x = tensor((33, 50))
    col = q.cast(x, transposed=True, **keys(q))[1]
    t = mh.HybridTensor.from_storages(None, col, (33, 50), x.dtype, q)
    u = quantize(q, x)
    assert torch.equal(t, u)
    z = torch.zeros_like(t).copy_(u)
    assert z.columnwise.transposed == t.columnwise.transposed
    assert_same_tensor(z, t)
    assert_same_tensor(torch.zeros_like(u).copy_(t), u)


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("held", HELD[:3])
def test_copy_from_high_precision_casts_every_direction_held_from_the_source(held, source):
    for row, col in (("nvfp4", "mxfp8_e4m3"), ("mxfp8_e5m2:2d", "fp8_block_e4m3"), ("fp8_rowwise_e4m3", "high_precision")):
        q = mh.HybridQuantizer(row, col, source)
        t = q.quantize(tensor(), rowwise=held[0], columnwise=held[1])
        new = tensor(seed=1)
        t.copy_(new)
        assert_same_tensor(t, q.quantize(new, rowwise=held[0], columnwise=held[1]), f"{row}/{col} {source}")
        t.copy_(tensor((50,), seed=2))  # broadcast
        assert_same_tensor(t, q.quantize(tensor((50,), seed=2).expand(2, 17, 50), rowwise=held[0], columnwise=held[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64])
def test_copy_into_a_plain_tensor_decodes(dtype):
    t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor())
    out = torch.zeros(4, 17, 50, dtype=dtype)[::2]
    out.copy_(t)
    expected = t.dequantize(dtype=dtype) if dtype != torch.float64 else t.dequantize().double()
    assert_bitwise_equal(out, expected, "decode")
    master = torch.empty(t.shape, dtype=torch.float32)
    master.copy_(t)
    assert type(master) is torch.Tensor


def test_copy_does_not_convert_between_quantized_formats():
    """That would round twice without a word; from the decode it is asked for."""
    src = mh.HybridQuantizer("mxfp8_e4m3", "mxfp8_e4m3").quantize(tensor())
    for q in (("nvfp4", "nvfp4"), ("mxfp8_e4m3", "nvfp4"), ("mxfp8_e4m3:2d", "mxfp8_e4m3")):
        dst = mh.HybridQuantizer(*q).quantize(tensor(seed=1))
        before = snapshot(dst)
        with pytest.raises(ValueError, match="quantize anew, copy from .dequantize()"):
            dst.copy_(src)
        assert_unchanged(dst, before)
        dst.copy_(src.dequantize())
    row_only = src.detach()
    row_only.clear(rowwise=False)
    with pytest.raises(ValueError, match="columnwise=None"):
        src.clone().copy_(row_only)


# ---- comparison, deepcopy, memory


def test_equal_compares_bytes():
    q = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3")
    x = tensor()
    t = q.quantize(x)
    assert torch.equal(t, q.quantize(x)) and t.equal(t.clone())
    x2 = x.clone()
    x2[0, 0, 0] = 100.0
    assert not torch.equal(t, q.quantize(x2))
    assert not torch.equal(t, q.quantize(x, columnwise=False))
    assert not torch.equal(t, mh.HybridQuantizer("nvfp4", "mxfp8_e5m2").quantize(x))
    assert not torch.equal(t, t.view(34, 50)) and not torch.equal(t, t.float())
    nan = torch.full((2, 32), float("nan"))
    h = mh.HybridQuantizer("high_precision", "mxfp8_e4m3")
    assert torch.equal(h.quantize(nan), h.quantize(nan))
    with pytest.raises(NotImplementedError, match="plain"):
        torch.equal(t, x)


def test_deepcopy_of_a_parameter_keeps_class_attributes_gradient_and_sharing():
    q = mh.HybridQuantizer("high_precision", "high_precision")
    p = torch.nn.Parameter(q.quantize(tensor()))
    p.partition_dim, p.extra = 0, {"a": [1, 2]}
    p.grad = torch.ones(p.shape, dtype=p.dtype)
    c, d = copy.deepcopy([p, p])
    assert c is d and c is not p
    assert isinstance(c, torch.nn.Parameter) and c.requires_grad and c.partition_dim == 0
    assert c.extra == p.extra and c.extra is not p.extra
    assert c.grad is not p.grad and torch.equal(c.grad, p.grad)
    assert c.rowwise.qdata.data_ptr() == c.columnwise.qdata.data_ptr() != p.rowwise.qdata.data_ptr()
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(p.view(34, 50))


def test_setting_data_adopts_payloads_and_refuses_plain_tensors():
    q = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3")
    p, new = torch.nn.Parameter(q.quantize(tensor())), q.quantize(tensor(seed=1))
    p.data = new
    assert isinstance(p, torch.nn.Parameter) and p.requires_grad
    assert addresses(p) == addresses(new) == addresses(p.data)
    with pytest.raises(ValueError, match="update"):
        p.data = tensor()


def test_memory_operations_reach_every_buffer(monkeypatch):
    t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor())
    assert t.is_pinned() is False
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda b, *a: pinned.append(b) or b.clone())
    new = torch.ops.aten._pin_memory(t)
    assert len(pinned) == 5 and torch.equal(new, t)
    assert torch.equal(t.to(torch.bfloat16, copy=True), t)
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda b, s: recorded.append(b))
    from megatron_hybrid.tensor_ops import RULES

    RULES[torch.ops.aten.record_stream.default](None, t, None)
    assert len(recorded) == 5


def test_a_rule_cannot_be_registered_twice():
    from megatron_hybrid.tensor_ops import implements

    with pytest.raises(ValueError, match="already has a rule"):
        implements(torch.ops.aten.clone.default)(lambda *a: None)
