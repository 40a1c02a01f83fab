"""A linear's forward and backward in a CUDA graph: replayed with new data, the bits of eager, nothing waits for the device
(property 25's casts, case of graph capture)."""

import pytest
import torch

import megatron_hybrid as mh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
M, K, N = 192, 256, 384
NVFP4 = {"input": "nvfp4", "weight": "nvfp4:2d"}
RECIPES = {
    "bf16": None, "fp8_current": None, "fp8_delayed": None, "fp8_rowwise": None, "fp8_block": None, "mxfp8": None,
    "mxfp8_fprop_nvfp4_bwd": None, "nvfp4 sr": dict(fprop=NVFP4, dgrad="nvfp4:sr", wgrad="nvfp4:rht,sr"),
    "dequantized": dict(fprop="mxfp8_e4m3", wgrad="nvfp4", columnwise_source={"input": "rowwise_dequantized"}),
}  # fmt: skip


def recipe(name):
    if RECIPES[name] is None:
        return mh.Recipe.load(name)
    return mh.Recipe.from_dict({"version": 1, "name": "t", "defaults": RECIPES[name]})


def tensors(seed):
    g = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(M, n, device="cuda", generator=g).bfloat16() for n in (K, N)]


class Step:
    """One layer's forward and backward over static tensors, gradients added to FP32 `main_grad` or made anew."""

    def __init__(self, name, main_grad):
        torch.manual_seed(0)
        self.layer = mh.HybridLinear(K, N, recipe=recipe(name), name="fc", device="cuda", dtype=torch.bfloat16)
        self.ctl = mh.prepare(self.layer, seed=3)
        self.ctl.begin_step(1)
        self.x, self.dy = tensors(0)
        self.x.requires_grad_()
        self.main_grad = torch.zeros(N, K, device="cuda") if main_grad else None
        if main_grad:
            self.layer.weight.main_grad = self.main_grad

    def run(self):
        self.ctl.invalidate()
        self.x.grad = self.layer.weight.grad = self.layer.bias.grad = None
        self.y = self.layer(self.x)
        self.y.backward(self.dy)

    def fill(self, seed):
        with torch.no_grad():
            for static, new in zip((self.x, self.dy), tensors(seed)):
                static.copy_(new)

    def results(self):
        dw = self.main_grad if self.main_grad is not None else self.layer.weight.grad
        return [t.detach().clone() for t in (self.y, self.x.grad, dw, self.layer.bias.grad)]


def warmed_up(name, main_grad) -> tuple[Step, Step]:
    """Two steps alike that ran once, on a stream of their own, as a capture wants it."""
    steps = Step(name, main_grad), Step(name, main_grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps:
            step.run()
    torch.cuda.current_stream().wait_stream(side)
    return steps


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_replays_with_new_data_give_eagers_bits_and_never_wait(name, main_grad):
    eager, captured = warmed_up(name, main_grad)
    graph, ends = torch.cuda.CUDAGraph(), []
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured.run()
        for step in (eager, captured):  # forget what the first run left behind
            step.layer.hq.reset_states()
            if main_grad:
                step.main_grad.zero_()
        for seed in (1, 2, 3):
            eager.fill(seed)
            eager.run()
            captured.fill(seed)
            graph.replay()
            ends.append((captured.results(), eager.results()))
            if seed == 2:  # scales move on, keys too, in the memory that the graph reads
                for step in (eager, captured):
                    step.ctl.end_step()
                    step.ctl.begin_step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(ends) == 3
    for pair in ends:
        for got, wanted in zip(*pair, strict=True):
            assert torch.isfinite(wanted).all() and wanted.any()
            assert torch.equal(got, wanted)


def test_a_load_of_another_history_length_is_written_where_the_graph_reads():
    eager, captured = warmed_up("fp8_delayed", False)
    short = mh.Recipe.from_dict({"version": 1, "name": "t", "defaults": "fp8_delayed_e4m3:history=3"})
    loaded = mh.HybridLinear(K, N, recipe=short, name="fc", device="cuda", dtype=torch.bfloat16)
    for name, buffer in loaded.hq.named_buffers():
        buffer.fill_(0.5 if name.endswith("_scale") else 900.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    for step in (eager, captured):
        step.layer.load_state_dict(loaded.state_dict())
        step.ctl.begin_step(2)
        step.fill(1)
    for number in (3, 4):
        eager.run()
        graph.replay()
        for got, wanted in zip(captured.results(), eager.results(), strict=True):
            assert torch.isfinite(wanted).all() and torch.equal(got, wanted)
        for step in (eager, captured):
            step.ctl.end_step()
            step.ctl.begin_step(number)
    for got, wanted in zip(captured.layer.hq.buffers(), eager.layer.hq.buffers(), strict=True):
        assert torch.equal(got, wanted)
