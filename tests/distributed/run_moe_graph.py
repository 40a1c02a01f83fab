"""Checks of a mixture-of-experts layer on one rank: its forward and backward, replayed with tokens that go elsewhere.

On a GPU (``--backend nccl``) they are captured in a CUDA graph, and nothing may wait for the device; a CPU repeats them.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from checks import run_checks, start
from mcore_model_common import B, bf16, parallel
from mcore_model_experts import ROWSCALED, moe, moe_layers

from megatron_hybrid import Recipe, patches
from megatron_hybrid.mcore import driver
from megatron_hybrid.mcore.moe_layer import OneRank, OneRankAllGather, TokensStay
from megatron_hybrid.mcore.spec import HybridLayerSpec

LENGTH, SIZE = 64, 256
SHAPE = dict(
    num_layers=1, hidden_size=SIZE, ffn_hidden_size=SIZE, moe_ffn_hidden_size=SIZE, moe_aux_loss_coeff=0.0,
    moe_router_load_balancing_type="none", bias_activation_fusion=torch.cuda.is_available(),
)  # fmt: skip


def recipe(name: str, **options) -> Recipe:
    return Recipe.from_dict({**Recipe.load(name).to_dict(), **options})


class Step:
    """The forward and backward of a model's mixture of experts over static tensors; its weights are cast in each."""

    def __init__(self, chosen: Recipe, dispatcher: str, **changes):
        parallel()
        model = moe(chosen, moe_token_dispatcher_type=dispatcher, **SHAPE | changes)
        self.layer = moe_layers(model)[0]
        stays = self.layer.config.moe_permute_fusion and chosen.dispatch != "quantized"
        assert isinstance(self.layer.token_dispatcher, TokensStay if stays else (OneRank, OneRankAllGather))
        self.controller = driver.attach([model.module], seed=1).controller
        self.controller.begin_step(1)
        self.x, self.dy = (torch.zeros_like(t) for t in tokens(0))
        self.x.requires_grad_()
        self.layer.experts.register_forward_pre_hook(self._keep_sizes)

    def _keep_sizes(self, module, args):
        self.sizes = getattr(args[1], "sizes", args[1]).clone()

    def run(self) -> None:
        self.controller.invalidate()
        self.x.grad = None
        self.layer.zero_grad()
        self.y = self.layer(self.x)[0]
        self.y.backward(self.dy)

    @torch.no_grad()
    def fill(self, x, dy) -> None:
        self.x.copy_(x)
        self.dy.copy_(dy)

    def results(self) -> list[torch.Tensor]:
        found = (self.y, self.x.grad, self.sizes, *(p.grad for p in self.layer.parameters()))
        return [t.detach().clone() for t in found]


def tokens(seed: int) -> list[torch.Tensor]:
    return [bf16(LENGTH, B, SIZE, seed=2 * seed + i) for i in range(2)]


def recorded(step: Step):
    """A function that repeats `step.run`: a graph's replay on a GPU."""
    if not step.x.is_cuda:
        return step.run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph.replay


@contextmanager
def waiting_is_an_error():
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def warm_up(*steps: Step) -> None:
    """Twice, on a stream of its own where there are streams: kernels are compiled, memory is there."""
    if not steps[0].x.is_cuda:
        return [step.run() for step in steps]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in (*steps, *steps):
            step.run()
    torch.cuda.current_stream().wait_stream(side)


def replays_are_eager_s_bits(chosen: Recipe, dispatcher: str, **changes) -> None:
    eager, repeated = Step(chosen, dispatcher, **changes), Step(chosen, dispatcher, **changes)
    data, found = [tokens(seed) for seed in range(4)], []
    for step in (eager, repeated):
        step.fill(*data[0])
    warm_up(eager, repeated)
    with waiting_is_an_error():
        replay = recorded(repeated)
        for new in data[1:]:
            eager.fill(*new)
            eager.run()
            repeated.fill(*new)
            replay()
            found.append((repeated.results(), eager.results()))
    sizes = [theirs[2] for _, theirs in found]
    assert not torch.equal(sizes[0], sizes[1]) and not torch.equal(sizes[1], sizes[2]), sizes
    assert all(int(s.sum()) == 2 * LENGTH * B for s in sizes)
    for ours, theirs in found:
        for a, b in zip(ours, theirs, strict=True):
            assert torch.isfinite(b).all() and b.any()
            assert torch.equal(a, b)


def check_bf16():
    replays_are_eager_s_bits(recipe("bf16"), "alltoall")
    replays_are_eager_s_bits(recipe("bf16"), "allgather")


def check_fp8_rows():
    replays_are_eager_s_bits(recipe("fp8_rowwise"), "alltoall")


def check_fp8_blocks():
    replays_are_eager_s_bits(recipe("fp8_block"), "allgather")


def check_mxfp8():
    replays_are_eager_s_bits(recipe("mxfp8"), "alltoall")


def check_rowscaled():
    replays_are_eager_s_bits(recipe(ROWSCALED), "allgather")


def check_quantized_weights():
    for name in ("fp8_rowwise", "fp8_block", ROWSCALED):
        replays_are_eager_s_bits(recipe(name, weights="quantized"), "alltoall")


def check_quantized_dispatch():
    replays_are_eager_s_bits(recipe(ROWSCALED, dispatch="quantized"), "alltoall")
    replays_are_eager_s_bits(recipe(ROWSCALED, dispatch="quantized", weights="quantized"), "alltoall")


def check_tokens_stay_where_they_are():
    """As on a GPU by default: linears read tokens by a map."""
    patches.apply_all(["moe_permutation"])
    for name, dispatcher in (("bf16", "alltoall"), ("fp8_rowwise", "allgather"), (ROWSCALED, "alltoall")):
        replays_are_eager_s_bits(recipe(name), dispatcher, moe_permute_fusion=True)


def check_kernels_agree_with_megatron_s_operations():
    """The whole layer with its default parts against Megatron's own permutation and SwiGLU, which rounds at other places:
    a code may be the next one to theirs. Probabilities in FP32: the router's gradient is what is left of theirs, most of
    which cancels, and would show the last bits of bf16 ones."""
    patches.apply_all(["moe_permutation"])
    for name, bound in (("bf16", 2.0**-7), ("fp8_rowwise", 2.0**-5), ("fp8_block", 2.0**-5), (ROWSCALED, 2.0**-4)):
        results = []
        for fused in (False, None):
            step = Step(recipe(name), "alltoall", spec=HybridLayerSpec(recipe(name), fused=fused), moe_router_dtype="fp32")
            step.fill(*tokens(1))
            step.run()
            results.append([t.double() for t in step.results()])
        assert torch.equal(results[0][2], results[1][2])
        for theirs, ours in zip(*results, strict=True):
            assert (ours - theirs).norm() <= bound * theirs.norm(), (name, float((ours - theirs).norm() / theirs.norm()))


def main() -> None:
    start()
    run_checks(globals())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
