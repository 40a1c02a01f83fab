"""Checks of a model on fused kernels against the same model on plain torch, on two ranks, all in one launch.

On CPUs with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from checks import arguments, run_checks, start
from mcore_model_common import MIXED, VOCAB, B, S, build, config, drawn, losses, parallel, rank, shard
from megatron.core import mpu
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP

from megatron_hybrid import Recipe
from megatron_hybrid.grouped_payloads import GroupedPayloads
from megatron_hybrid.mcore import parts
from megatron_hybrid.mcore.experts import HybridGroupedMLP
from megatron_hybrid.mcore.fused import FusedGroupedMLP
from megatron_hybrid.mcore.norm import HybridNorm
from megatron_hybrid.mcore.spec import HybridLayerSpec
from megatron_hybrid.ops_triton.cross_entropy import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from triton_interpreter import let_loops_take_scalars  # noqa: E402

FUSED = dict(bias_activation_fusion=True)
FP32 = dict(bf16=False, params_dtype=torch.float32, pipeline_dtype=torch.float32)
# roundings in a row from an input to a loss or a gradient: a few hundred FP32 operations, each 2^-24 of the result
CLOSE = 512 * 2.0**-24


def results(fused, recipe="bf16", **changes):
    """(losses, gradients by name) of a freshly built model, the same weights every time."""
    parallel(tp=2)
    spec = HybridLayerSpec(Recipe.load(recipe), fused=fused)
    model = build(None, spec, **{**FUSED, **changes})
    kinds = {type(m).__name__ for m in model.modules()}
    assert ("FusedMLP" in kinds and bool(kinds & {"FusedNorm", "FusedResidualNorm"})) == fused, kinds
    loss = losses(model)
    loss.sum().backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def check_close(**changes) -> None:
    """FP32 throughout: fused and plain differ by roundings only."""
    plain, fused = (results(f, **FP32, **changes) for f in (False, True))
    assert (fused[0] - plain[0]).abs().max() <= CLOSE * plain[0].abs().max()
    assert fused[1].keys() == plain[1].keys()
    for name, grad in plain[1].items():
        assert (fused[1][name] - grad).norm() <= CLOSE * grad.norm(), name


def check_llama_shape():
    check_close(sequence_parallel=True, num_query_groups=2)


def check_biases_and_centered_norms():
    shape = dict(add_bias_linear=True, normalization="LayerNorm", layernorm_zero_centered_gamma=True)
    check_close(sequence_parallel=True, **shape)


def check_normalized_queries_and_fewer_groups_than_ranks():
    check_close(qk_layernorm=True)
    check_close(num_query_groups=1)


def check_experts():
    """A layer of experts after a dense one: the router reads the norm, the residual goes around it."""
    shape = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48, moe_router_load_balancing_type="none")
    check_close(sequence_parallel=True, moe_layer_freq=[0, 1], moe_grouped_gemm=True, **shape)


def check_swiglu_of_experts_in_casts():
    """On GPUs it casts its result and its gradient as it computes them: the bits of a model that writes both for casts
    to read, but for the order of the sums for routing weights, whose gradients the router and all before it get."""
    shape = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=256, moe_router_load_balancing_type="none")
    shape |= dict(hidden_size=256, moe_layer_freq=[0, 1], moe_grouped_gemm=True, sequence_parallel=True)
    found, seen, inside = [], [], FusedGroupedMLP._activate_for_fc2

    def watched(self, hidden, *others):
        y = inside(self, hidden, *others)
        hidden.grad_fn.register_prehook(lambda grads: seen.append(type(grads[0])))
        seen.append(type(y))
        return y

    try:
        for activate in (watched, HybridGroupedMLP._activate_for_fc2):
            FusedGroupedMLP._activate_for_fc2 = activate
            found.append(results(True, "fp8_block", **shape))
    finally:
        FusedGroupedMLP._activate_for_fc2 = inside
    assert seen == [GroupedPayloads if arguments().backend == "nccl" else torch.Tensor] * 2, seen
    (loss, grads), (loss_apart, grads_apart) = found
    assert torch.equal(loss, loss_apart) and grads.keys() == grads_apart.keys()
    for name, grad in grads.items():
        off = (grad - grads_apart[name]).norm()
        assert off <= (0.0 if ".experts." in name else 2.0**-7) * grad.norm(), name


def check_fp32_residuals():
    check_close(fp32_residual_connection=True)


def check_recomputation_changes_nothing():
    whole = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    some = [dict(recompute_granularity="selective", recompute_modules=[m]) for m in ("core_attn", "mlp")]
    loss, grads = results(True, MIXED, num_query_groups=2)
    for changes in (whole, *some):
        again, regrads = results(True, MIXED, num_query_groups=2, **changes)
        assert torch.equal(loss, again), changes
        for name, grad in grads.items():
            assert torch.equal(regrads[name], grad), (changes, name)


def check_evaluation_gives_the_loss_of_training():
    parallel(tp=2)
    model = build(None, HybridLayerSpec(Recipe.load(MIXED), fused=True), **FUSED, sequence_parallel=True)
    trained = losses(model).detach()
    with torch.no_grad():
        assert torch.equal(losses(model.eval()), trained)


def check_choice():
    """Decided at build: by the device unless told, and by what each configuration needs."""
    parallel(tp=2)
    plain = parts.choose(config(**FUSED), fused=False)
    assert plain == parts.LayerParts() == parts.LayerParts(HybridNorm, HybridNorm, SelfAttention, MLP, HybridGroupedMLP)
    fused = parts.choose(config(**FUSED), fused=True)
    classes = (fused.norm, fused.residual_norm, fused.self_attention, fused.mlp, fused.grouped_mlp)
    names = [cls.__name__ for cls in classes]
    assert names == ["FusedNorm", "FusedResidualNorm", "FusedSelfAttention", "FusedMLP", "FusedGroupedMLP"]
    assert parts.choose(config(bias_activation_fusion=False), fused=True).mlp is MLP
    assert parts.choose(config(activation_func=torch.nn.functional.gelu), fused=True).mlp is MLP
    assert parts.choose(config(rotary_interleaved=True), fused=True).self_attention is SelfAttention
    assert parts.choose(config(hidden_size=32768), fused=True).norm is HybridNorm
    norms = dict(recompute_granularity="selective", recompute_modules=["layernorm"])
    assert parts.choose(config(**norms), fused=True).residual_norm is fused.norm
    model = build(None, HybridLayerSpec(Recipe.load("bf16")), **FUSED)
    by_device = arguments().backend == "nccl"
    assert (type(model.module.decoder.layers[0].mlp) is not MLP) == by_device
    assert ("compute_language_model_loss" in vars(model.module)) == by_device


def check_loss_over_ranks():
    """Each rank holds half of the vocabulary; loss and gradient are those of the whole."""
    parallel(tp=2)
    whole = 5 * drawn(torch.randn, S, B, VOCAB, seed=1)
    whole[0, 0, : VOCAB // 2] -= 400  # a rank whose largest logit is far below the other's
    target = drawn(torch.randint, 0, VOCAB, (S, B), seed=2)
    target[0, 0] = VOCAB - 1
    mine = shard(whole, -1).requires_grad_()
    loss = cross_entropy(mine * 1, target, mpu.get_tensor_model_parallel_group())
    wide = whole.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(wide.flatten(0, 1), target.flatten(), reduction="none").view(S, B)
    weight = drawn(torch.rand, S, B, seed=3)
    loss.backward(weight)
    exact.backward(weight.double())
    assert (loss - exact).abs().max() <= 64 * 2.0**-24 * whole.abs().max()
    assert (mine.grad - wide.grad.chunk(2, -1)[rank()]).abs().max() <= 64 * 2.0**-24 * 30


def main() -> None:
    start()
    if os.environ.get("TRITON_INTERPRET") == "1":
        let_loops_take_scalars()
    run_checks(globals(), leave_out={"check_close"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
