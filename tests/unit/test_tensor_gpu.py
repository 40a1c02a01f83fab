"""HybridTensor on a CUDA device: moves between devices, pinned memory, streams, no host waits, graph capture."""

import io

import pytest
import torch
from tensor_cases import VARIED, assert_same_tensor, assert_unchanged, keys, snapshot, storages, tensor

import megatron_hybrid as mh
from megatron_hybrid.testing.assertions import assert_bitwise_equal

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = "cuda:0"


def device_keys(q) -> dict:
    """`keys`, on the device."""
    k = keys(q)
    state = tuple(s and mh.DelayedState(s.scale.to(CUDA), s.history.to(CUDA)) for s in k["state"])
    return dict(state=state, rng=mh.Rng.view(k["rng"].values.to(CUDA)))


@pytest.mark.parametrize("fmt", VARIED)
def test_moving_between_devices_keeps_every_byte(fmt):
    q = mh.HybridQuantizer(fmt, fmt)
    t = q.quantize(tensor(), **keys(q))
    g = t.to(CUDA)
    assert g.device == torch.device(CUDA) and all(s.device == g.device for s in storages(g))
    assert_same_tensor(g.cpu(), t, fmt)
    for s, u in zip(storages(g), storages(t)):
        assert_bitwise_equal(s.dequantize(), u.dequantize(), f"{fmt}: decoded there and here")
    assert torch.equal(torch.zeros_like(g).copy_(t), g) and torch.equal(torch.zeros_like(t).copy_(g), t)
    made_there = q.quantize(tensor().to(CUDA), **device_keys(q))
    assert_same_tensor(made_there.cpu(), t, f"{fmt}: cast there and here")
    f = io.BytesIO()
    torch.save(g, f)
    f.seek(0)
    assert_same_tensor(torch.load(f, weights_only=True, map_location="cpu"), t)


def test_pinned_memory_and_streams():
    t = mh.HybridQuantizer("nvfp4", "mxfp8_e4m3").quantize(tensor())
    p = t.pin_memory()
    assert p.is_pinned() and not t.is_pinned() and torch.equal(p, t)
    assert torch.empty_like(t.to(CUDA), device="cpu", pin_memory=True).is_pinned()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        g = p.to(CUDA, non_blocking=True)
    g.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(g.cpu(), t)


@pytest.mark.parametrize("fmt", VARIED)
def test_p04_a_device_flag_decides_without_a_host_wait(fmt):
    q = mh.HybridQuantizer(fmt, fmt)
    x, new = tensor().to(CUDA), tensor(seed=1).to(CUDA)
    t, k = q.quantize(x, **device_keys(q)), device_keys(q)
    flag = torch.ones((), dtype=torch.int32, device=CUDA)
    before = snapshot(t)
    torch.cuda.set_sync_debug_mode("error")
    try:
        t.update(new, noop_flag=flag, **k)
        t.update(new, columnwise=False, noop_flag=flag, **k)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_unchanged(t, before, fmt)
    t.update(new, noop_flag=flag.zero_(), **k)
    assert_same_tensor(t, q.quantize(new, **device_keys(q)), fmt)
    with pytest.raises(ValueError, match="noop_flag"):
        t.update(new, noop_flag=flag.cpu(), **k)


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_update_in_a_cuda_graph_obeys_the_flag_at_replay(source):
    q = mh.HybridQuantizer("nvfp4:sr", "mxfp8_e4m3", source)
    static, k = tensor().to(CUDA), device_keys(q)
    flag = torch.zeros((), dtype=torch.int32, device=CUDA)
    t = q.quantize(static, **k)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        t.update(static, noop_flag=flag, **k)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        t.update(static, noop_flag=flag, **k)
    new = tensor(seed=1).to(CUDA)
    before = snapshot(t)
    flag.fill_(1)
    static.copy_(new)
    graph.replay()
    assert_unchanged(t, before, "flag set")
    flag.fill_(0)
    graph.replay()
    assert_same_tensor(t, q.quantize(new, **k), "flag clear")


@pytest.mark.parametrize("fmt", ["nvfp4:rht,sr", "mxfp8_e4m3", "fp8_current_e4m3"])
def test_c89_compiled_on_the_device(fmt):
    q = mh.HybridQuantizer(fmt, fmt)
    x, k = tensor((64, 96)).to(CUDA), device_keys(q)

    def f(x):
        t = q.quantize(x, **k)
        return t.dequantize(), t.dequantize("columnwise", torch.bfloat16)

    for a, b in zip(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x)):
        assert_bitwise_equal(a, b, fmt)
