"""Steps of a captured linear whose keys, scales and cached weight stay where they are: eager's bits (case 40, 42)."""

from contextlib import contextmanager

import pytest
import torch
from test_graph_gpu import RECIPES, K, N, recipe, tensors

import megatron_hybrid as mh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS, MICROBATCHES = 3, 2


class Training:
    """A linear whose weight changes after every step of two microbatches; gradients are added to FP32 `main_grad`."""

    def __init__(self, name: str, stands: bool):
        torch.manual_seed(0)
        self.layer = mh.HybridLinear(K, N, recipe=recipe(name), name="fc", device="cuda", dtype=torch.bfloat16)
        self.layer.weight.main_grad = torch.zeros(N, K, device="cuda")
        self.ctl = mh.prepare(self.layer, seed=3, num_microbatches=MICROBATCHES)
        if stands:
            self.ctl.stand()
        self.x, self.dy = tensors(0)
        self.x.requires_grad_()
        self.once = self.pass_through

    def pass_through(self) -> None:
        self.x.grad = self.layer.bias.grad = None
        self.y = self.layer(self.x)
        self.y.backward(self.dy)

    def capture(self) -> None:
        """The passes of later steps are a graph's; what the capture's warm-up left behind is forgotten."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.pass_through()
        self.once = graph.replay

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        for static, new in zip((self.x, self.dy), tensors(seed)):
            static.copy_(new)

    def step(self, number: int) -> list[torch.Tensor]:
        found = []
        self.ctl.begin_step(number)
        self.layer.weight.main_grad.zero_()
        for j in range(MICROBATCHES):
            self.ctl.microbatch(j)
            self.fill(10 * number + j)
            self.layer.hq.refresh()
            self.once()
            found += [t.detach().clone() for t in (self.y, self.x.grad, self.layer.bias.grad)]
        found.append(self.layer.weight.main_grad.clone())
        with torch.no_grad():
            self.layer.weight.data.sub_(1e-3 * self.layer.weight.main_grad.to(torch.bfloat16))
        self.ctl.end_step()
        return [*found, *(b.clone() for b in self.layer.hq.buffers())]


@contextmanager
def on_a_side_stream():
    """For what runs before a capture: autograd adds a gradient on the stream of its parameter's first use, and the legacy stream
    must not take part in a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("name", RECIPES)
def test_c40_captured_steps_are_eagers(name):
    eager, captured = Training(name, stands=False), Training(name, stands=True)
    with on_a_side_stream():
        ends = [(captured.step(1), eager.step(1))]
    captured.ctl.begin_step(2)
    captured.layer.hq.refresh()
    captured.capture()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ends += [(captured.step(number), eager.step(number)) for number in range(2, STEPS + 1)]
        captured.once = captured.pass_through
        ends.append((captured.step(STEPS + 1), eager.step(STEPS + 1)))  # eager again: nothing stale is left
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(ends) == STEPS + 1
    for pair in ends:
        for got, wanted in zip(*pair, strict=True):
            assert torch.isfinite(wanted).all()
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_c42_only_a_steps_first_microbatch_writes_the_cast_weight(name):
    training = Training(name, stands=True)
    with on_a_side_stream():
        training.step(1)
        training.ctl.begin_step(2)
        training.pass_through()
    training.capture()
    held = [b for s in training.layer.hq.weight_cache.held() for b in s.buffers().values()]
    kept = [b.clone() for b in held]
    with torch.no_grad():
        training.layer.weight.data.mul_(2)
    for microbatch, writes in ((1, False), (0, True)):
        training.ctl.microbatch(microbatch)
        training.once()
        assert all(torch.equal(a, b) for a, b in zip(held, kept, strict=True)) != writes
