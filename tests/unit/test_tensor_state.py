"""Files and modules: pickles, torch.save with weights_only, state dicts, module conversion."""

import io
import pickle
import pickletools

import pytest
import torch
from tensor_cases import FORMATS, HELD, PAIRS, VARIED, assert_same_tensor, keys, quantize, tensor

import megatron_hybrid as mh
from megatron_hybrid.testing.assertions import assert_bitwise_equal


def saved(obj) -> io.BytesIO:
    f = io.BytesIO()
    torch.save(obj, f)
    f.seek(0)
    return f


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("fmt", FORMATS)
def test_p16_files_and_pickles_round_trip_bitwise(fmt, held):
    for source in ("original", "rowwise_dequantized"):
        q = mh.HybridQuantizer(fmt, fmt, source)
        t = quantize(q, tensor(), rowwise=held[0], columnwise=held[1])
        for new in (torch.load(saved(t), weights_only=True), pickle.loads(pickle.dumps(t))):
            assert type(new) is mh.HybridTensor and new.quantizer == q and new.device == t.device
            assert_same_tensor(new, t, fmt)


@pytest.mark.parametrize("row,col", PAIRS)
def test_p16_parameters_in_a_state_dict(row, col):
    p = torch.nn.Parameter(quantize(mh.HybridQuantizer(row, col), tensor()))
    p.partition_dim = 1
    loaded = torch.load(saved({"w": p, "frozen": torch.nn.Parameter(p.data, requires_grad=False)}), weights_only=True)
    assert isinstance(loaded["w"], torch.nn.Parameter) and loaded["w"].requires_grad and loaded["w"].partition_dim == 1
    assert not loaded["frozen"].requires_grad
    assert_same_tensor(loaded["w"], p)


def test_p16_pieces_views_stale_directions_and_shared_buffers():
    q = mh.HybridQuantizer("high_precision", "high_precision")
    t = q.quantize(tensor())
    both = torch.load(saved(t), weights_only=True)
    assert both.rowwise.qdata.data_ptr() == both.columnwise.qdata.data_ptr()
    t = mh.HybridQuantizer("fp8_current_e4m3", "mxfp8_e4m3").quantize(tensor((64, 96)))
    t.update(tensor((64, 96), seed=1), columnwise=False)
    for v in (t[32:], t[:, 32:64], t.view(-1), t.t(), t):
        new = torch.load(saved(v), weights_only=True)
        assert_same_tensor(new, v)
        assert new.stride() == v.stride() and new.stale == v.stale
    piece = torch.load(saved(t[32:]), weights_only=True)
    with pytest.raises(ValueError, match="scales also cover"):
        piece.update(tensor((32, 96)))


def test_d10_a_file_holds_plain_tensors_and_one_function_of_ours():
    t = mh.HybridQuantizer("fp8_delayed_e4m3", "nvfp4:rht,sr")
    data = pickle.dumps(quantize(t, tensor()))
    names, strings = set(), []
    for op, arg, _ in pickletools.genops(data):
        if op.name == "STACK_GLOBAL":
            names.add(".".join(strings[-2:]))
        elif "UNICODE" in op.name:
            strings.append(arg)
    ours = {n for n in names if n.startswith("megatron_hybrid")}
    assert ours == {"megatron_hybrid.tensor_state.rebuild_hybrid_tensor"}
    assert not any("pickle" in n or "builtins" in n for n in names)


def test_a_newer_file_is_refused():
    from megatron_hybrid import tensor_state

    record = tensor_state.record(mh.HybridQuantizer("nvfp4", None).quantize(tensor()))
    with pytest.raises(ValueError, match="version 2"):
        tensor_state.rebuild_hybrid_tensor({**record, "version": 2})


# ---- modules


class Module(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = torch.nn.Parameter(w)


@pytest.mark.parametrize("fmt", VARIED)
def test_state_dicts_copy_bytes_between_equal_formats(fmt):
    q = mh.HybridQuantizer(fmt, fmt)
    a, b = Module(quantize(q, tensor())), Module(quantize(q, tensor(seed=1)))
    pointer = b.w.rowwise.qdata.data_ptr()
    b.load_state_dict(torch.load(saved(a.state_dict()), weights_only=True))
    assert_same_tensor(b.w, a.w)
    assert b.w.rowwise.qdata.data_ptr() == pointer and isinstance(b.w, torch.nn.Parameter)


def test_p38_a_bf16_state_dict_loads_into_a_quantized_module_and_back():
    q = mh.HybridQuantizer("nvfp4:2d", "mxfp8_e4m3")
    m, plain = Module(q.quantize(tensor())), Module(tensor(seed=1))
    m.load_state_dict(plain.state_dict())
    assert_same_tensor(m.w, q.quantize(plain.w.detach()))
    plain.load_state_dict(m.state_dict())
    assert_bitwise_equal(plain.w, m.w.dequantize(dtype=torch.bfloat16), "decode")


def test_module_conversion_keeps_quantized_parameters():
    q = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3")
    m = Module(q.quantize(tensor()))
    before = m.w.rowwise.codes()
    m.to(torch.float32)
    assert isinstance(m.w, mh.HybridTensor) and isinstance(m.w, torch.nn.Parameter) and m.w.dtype == torch.float32
    assert_bitwise_equal(m.w.rowwise.codes(), before, "the bytes stay")
    m.to("meta")
    assert m.w.device.type == "meta" and m.w.rowwise.qdata.device.type == "meta"


def test_loading_needs_no_more_than_the_tensors_dtype_and_device():
    t = quantize(mh.HybridQuantizer("nvfp4", "fp8_delayed_e4m3"), tensor())
    m = torch.load(saved(t), weights_only=True, map_location="meta")
    assert m.device.type == "meta" and m.shape == t.shape and m.dtype == t.dtype
    assert keys(t.quantizer)["state"][1] is not None
