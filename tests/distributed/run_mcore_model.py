"""Checks of the Megatron modules on two ranks, all in one launch."""

from __future__ import annotations

import mcore_groups
import mcore_model_across
import mcore_model_experts
import mcore_model_sizes
import mcore_model_steps
import torch
import torch.distributed as dist
from checks import raises, run_checks, start
from mcore_model_common import (
    LAYERS, MIXED, VOCAB, B, F, H, S, bf16, build, config, drawn, linear, losses, mpu, parallel, rank, shard,
)  # fmt: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from tp_cases import on_the_wire

from megatron_hybrid import HybridQuantizer, Recipe, RecipeError, list_recipes
from megatron_hybrid.linear import LOCAL, hybrid_linear
from megatron_hybrid.mcore import driver, planning
from megatron_hybrid.mcore.attention import HybridDotProductAttention
from megatron_hybrid.mcore.errors import UserError
from megatron_hybrid.mcore.layers import HybridColumnParallelLinear, HybridRowParallelLinear
from megatron_hybrid.mcore.modules import enumerate_modules
from megatron_hybrid.mcore.norm import HybridNorm
from megatron_hybrid.mcore.spec import HybridLayerSpec
from megatron_hybrid.runtime import LinearRuntime
from megatron_hybrid.scaling import Pieces


def whole_weight(module, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(module.weight) for _ in range(2)]
    dist.all_gather(parts, module.weight.detach())
    return torch.cat(parts, dim).requires_grad_()


def on_one_rank(module, x, weight, dy):
    """(y, dx, dw) of the whole tensors under the module's recipe."""
    x = x.detach().clone().requires_grad_()
    runtime = LinearRuntime(module.hq.recipe, module.hq.role, x.device, backend=module.hq.backend)
    y = hybrid_linear(x, weight, None, runtime.call(x.device, LOCAL, training=True))
    y.backward(dy)
    return y, x.grad, weight.grad


def exact(module):
    """The module with products whose bits do not depend on how a tensor is split, as a GPU's own do."""
    module.hq.backend = "reference"
    module.hq.replan(module.hq.recipe)
    return module


def check_column(sequence_parallel: bool, recipe: str) -> None:
    """Output and weight gradient are what one rank makes of the whole tensors; dx is summed over ranks."""
    parallel(tp=2)
    module = exact(linear(HybridColumnParallelLinear, recipe, H, F, sequence_parallel=sequence_parallel))
    x, dy = bf16(S, B, H, seed=1), bf16(S, B, F, seed=2)
    mine = (shard(x, 0) if sequence_parallel else x.clone()).requires_grad_()
    y, _ = module(mine)
    y.backward(shard(dy, 2))

    expected, dx, dw = on_one_rank(module, x, whole_weight(module, 0), dy)
    assert torch.equal(y, shard(expected, 2)) and torch.equal(module.weight.grad, shard(dw, 0))
    dx = shard(dx, 0) if sequence_parallel else dx
    assert (mine.grad - dx).abs().max() <= 2.0**-6 * dx.abs().max()
    assert sum(module.plan.calls.values()) == 3


def check_column_sequence_parallel():
    check_column(True, MIXED)


def check_column_all_reduce():
    check_column(False, MIXED)


def check_row(recipe: str = MIXED):
    """The sum over ranks of what each makes of its part, split along the sequence; its gradient travels quantized."""
    for sequence_parallel in (True, False):
        parallel(tp=2)
        module = exact(linear(HybridRowParallelLinear, recipe, 128, H, sequence_parallel=sequence_parallel))
        x, dy = bf16(S, B, 128, seed=1), bf16(S, B, H, seed=5)
        mine = shard(x, 2).requires_grad_()
        y, _ = module(mine)
        y.backward(shard(dy, 0) if sequence_parallel else dy)
        expected, dx, dw = on_one_rank(module, x, whole_weight(module, 1), dy)
        expected = shard(expected, 0) if sequence_parallel else expected
        assert (y - expected).abs().max() <= 2.0**-6 * expected.abs().max()
        assert torch.equal(mine.grad, shard(dx, 2)) and torch.equal(module.weight.grad, shard(dw, 1))
        ways = {("grad_output", direction): "payload" for direction in ("rowwise", "columnwise")}
        assert {key[:2]: key[2] for key in module.plan.gathers} == (ways if sequence_parallel else {})


def check_c27_collectives_of_a_layer_stay_among_its_tensor_parallel_ranks():
    """Every amax and every gather of a model's linears, under TP 2 and, with nothing to share, under DP 2."""
    for sizes in (dict(tp=2), dict()):
        parallel(**sizes)
        model = build(Recipe.load("fp8_current"), sequence_parallel=bool(sizes))
        mcore_groups.run_by_python(model)
        members = dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group())
        with on_the_wire() as sent:
            losses(model).sum().backward()
        assert {s.ranks for s in sent} <= {tuple(members)}
        for dtype in (torch.int32, torch.uint8):  # amaxes, payloads
            assert bool([s for s in sent if s.dtype == dtype]) == bool(sizes), (sizes, dtype)


def check_amaxes_of_all_weights_in_one_collective_a_step():
    parallel(tp=2)
    model = build(Recipe.load("fp8_current"), sequence_parallel=True)
    with torch.no_grad(), on_the_wire() as alone:
        losses(model)
    control = driver.attach([model.module], seed=1)
    control.controller.begin_step(1)
    counts = []
    for first in (True, False, True):
        if first:
            model.set_is_first_microbatch()
        with torch.no_grad(), on_the_wire() as sent:
            losses(model)
        counts.append(len([s for s in sent if s.dtype == torch.int32]))
    weights, activations = 4 * LAYERS, 4 * LAYERS  # each linear's input is one
    assert len([s for s in alone if s.dtype == torch.int32]) == weights + activations
    assert counts == [1 + activations, activations, 1 + activations], counts


def check_gated_linear_counts_rows_as_checkpoints_do():
    """linear_fc1 holds a run of the gate and one of the rest: random bits and scales follow their places in the whole."""
    parallel(tp=2)
    model = build(Recipe.load("nvfp4"), sequence_parallel=True, num_layers=1).module
    fc1, qkv = model.decoder.layers[0].mlp.linear_fc1, model.decoder.layers[0].self_attention.linear_qkv
    assert (fc1.pieces, qkv.pieces) == (2, 1) and fc1.hq.sharding.shards["weight"].pieces == 2
    metadata = {"dp_cp_group": mpu.get_data_parallel_group()}
    found = model.decoder.layers[0].mlp.sharded_state_dict(metadata=metadata)["linear_fc1.weight"]
    runs = found.build()
    assert [run.global_offset for run in runs] == [(row, 0) for row, _, _ in fc1.hq.index_maps["weight"].maps]
    assert runs[0].global_shape == (2 * F, H) and isinstance(fc1.hq.index_maps["grad_output"], Pieces)
    assert [m[1:] for m in fc1.hq.index_maps["grad_output"].maps] == [(run.global_offset[0], 2 * F) for run in runs]


def check_high_precision_is_torch_matmul():
    parallel(tp=2)
    module = linear(HybridColumnParallelLinear, "bf16", H, F, sequence_parallel=True)
    x = bf16(S, B, H, seed=1)
    assert torch.equal(module(shard(x, 0))[0], x @ module.weight.T)


def check_frozen_weight():
    """Only the input gradient is computed, nothing of the input is kept, no weight gradient appears."""
    parallel(tp=2)
    module = linear(HybridColumnParallelLinear, MIXED, H, F, sequence_parallel=True)
    module.weight.requires_grad_(False)
    x = shard(bf16(S, B, H, seed=1), 0).requires_grad_()
    y, _ = module(x)
    y.sum().backward()
    assert module.weight.grad is None and x.grad is not None and x.grad.abs().sum() > 0
    assert [gemm for gemm, _ in module.plan.calls] == ["fprop", "dgrad"]


def check_main_grad_keeps_257_ones():
    """bf16 stops counting at 256; the FP32 accumulator does not, and the placeholder is not added to it."""
    parallel(tp=2)
    module = linear(HybridRowParallelLinear, "bf16", F, H)
    weight = module.weight
    weight.main_grad = torch.zeros(weight.shape)
    weight.grad_added_to_main_grad = False
    for _ in range(257):
        module._forward_impl(torch.ones(1, F // 2, dtype=torch.bfloat16), weight).backward(
            torch.ones(1, H, dtype=torch.bfloat16)
        )
        weight.grad = None  # as Megatron's hook does
    assert weight.grad_added_to_main_grad
    assert torch.equal(weight.main_grad, torch.full(weight.shape, 257.0))
    weight.zero_out_wgrad = True  # Megatron then adds the placeholder
    module._forward_impl(torch.ones(1, F // 2, dtype=torch.bfloat16), weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight)) and weight.grad.dtype == weight.dtype
    assert torch.equal(weight.main_grad, torch.full(weight.shape, 258.0))


def check_weight_is_cast_once_a_step():
    """Between two first microbatches the cast weight is kept; Megatron's own call ends the window."""
    parallel(tp=2)
    model = build(Recipe.load(MIXED), sequence_parallel=True)
    module = model.module.decoder.layers[0].mlp.linear_fc1
    x = shard(bf16(S, B, H, seed=1), 0)
    first = module(x)[0]
    with torch.no_grad():
        module.weight.data.mul_(2)
    assert torch.equal(module(x)[0], first)
    model.set_is_first_microbatch()
    assert not torch.equal(module(x)[0], first)
    second = module(x)[0]
    module.weight.data.mul_(2)
    model.eval()
    assert not torch.equal(module(x)[0], second)


def check_norm():
    parallel(tp=2)
    x = bf16(S, B, H, seed=1)
    for name in ("LayerNorm", "RMSNorm"):
        for centered in (False, True):
            cfg = config(normalization=name, layernorm_zero_centered_gamma=centered, sequence_parallel=True)
            norm = HybridNorm(config=cfg, hidden_size=H, eps=1e-5)
            assert torch.equal(norm.weight, torch.full((H,), 0.0 if centered else 1.0, dtype=torch.bfloat16))
            assert all(p.sequence_parallel and p.dtype == torch.bfloat16 for p in norm.parameters())
            f = x.double()
            if name == "LayerNorm":
                f = f - f.mean(-1, keepdim=True)
            expected = f / (f.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            assert (norm(x).double() - expected).abs().max() <= expected.abs().max() * 2.0**-8
            assert norm(x.float()).dtype == torch.bfloat16  # FP32 residuals


def attend(cls, cfg, mask, q, k, v, kind=AttnMaskType.causal):
    module = cls(config=cfg, layer_number=1, attn_mask_type=kind, attention_type="self")
    out = module(q, k, v, mask, attn_mask_type=kind)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    return [out, *grads]


def check_attention():
    """As Megatron's own attention in FP32: causal, grouped queries, an explicit mask, another scale."""
    parallel(tp=2)
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)
    windowed = (causal | torch.ones(S, S, dtype=torch.bool).tril(-5)).expand(B, 1, S, S)
    for groups in (4, 2):
        cfg = config(num_query_groups=groups, bf16=False, params_dtype=torch.float32, attention_softmax_in_fp32=True)
        tensors = [torch.randn(S, B, n // 2, H // 4, requires_grad=True) for n in (4, groups, groups)]
        for mask, given in ((None, causal.expand(B, 1, S, S)), (windowed, windowed)):
            ours = attend(HybridDotProductAttention, cfg, mask, *tensors)
            theirs = attend(DotProductAttention, cfg, given, *tensors)
            for a, b in zip(ours, theirs):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    scaled = HybridDotProductAttention(cfg, 1, AttnMaskType.causal, "self", softmax_scale=0.3)
    assert scaled.scale == 0.3
    zeroed = HybridDotProductAttention(cfg, 1, AttnMaskType.causal, "self", zeroed=True)
    out = zeroed(*tensors, None)
    assert out.abs().max() == 0 and out.requires_grad


def check_attention_over_context_parallel_ranks():
    """Each rank's chunks of the sequence: output and gradients are those rows of the whole sequence's, in FP32.

    A sum of gradients over ranks, and over fewer keys at once: a few dozen roundings of 2^-24.
    """
    parallel(cp=2)
    chunks = [rank(), 3 - rank()]
    own = lambda t: torch.cat([t.chunk(4)[c] for c in chunks])  # noqa: E731
    for groups in (4, 2):
        more = dict(num_query_groups=groups, bf16=False, params_dtype=torch.float32)
        whole = [drawn(torch.randn, S, B, n, H // 4, seed=n + i).requires_grad_() for i, n in enumerate((4, groups, groups))]
        expected = attend(HybridDotProductAttention, config(context_parallel_size=1, **more), None, *whole)
        mine = [own(t.detach()).requires_grad_() for t in whole]
        found = attend(HybridDotProductAttention, config(**more), None, *mine)
        for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected):
            assert (a - own(b)).abs().max() <= 64 * 2.0**-24 * b.abs().max(), (name, groups)
    with raises(UserError, "only causal attention"):
        attend(HybridDotProductAttention, config(**more), None, *mine, kind=AttnMaskType.no_mask)
    with raises(UserError, "--cp-comm-type a2a"):
        HybridDotProductAttention(config(cp_comm_type="a2a", **more), 1, AttnMaskType.causal, "self")
    seen = set()
    for recipe in ("nvfp4", "fp8_delayed"):
        hooks = driver.attach([build(recipe).module], seed=1)
        seen.add((hooks.controller.keys.replica, hooks.controller.keys.num_replicas, hooks.group.size()))
    assert seen == {(rank(), 2, 2)}  # other random bits, shared amaxes


def check_delayed_scales_are_those_of_all_context_parallel_ranks():
    """Each rank feeds other rows; after the step both have the scale of the larger amax, which differs from one rank's own."""
    parallel(cp=2)
    model = build("fp8_delayed")
    hooks = driver.attach([model.module], seed=1)
    hooks.controller.begin_step(1)
    tokens = drawn(torch.randint, 0, VOCAB, (B, S), seed=3 + rank())[:, : S // 2]
    model(tokens, torch.arange(S // 2).expand(B, -1), None, labels=tokens.roll(-1, 1)).sum().backward()
    found = {n: b for n, b in model.named_buffers() if n.endswith(("input_rowwise_history", "grad_output_rowwise_history"))}
    own = torch.stack([history[0] for history in found.values()])
    hooks.controller.end_step(hooks.group, hooks.expert_groups)
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    assert len(found) >= 2 * 4 * LAYERS and not torch.equal(*both)
    shared = torch.stack([history[1] for history in found.values()])  # rolled on
    assert torch.equal(shared, torch.maximum(*both))


def check_every_shipped_recipe():
    """Each recipe for dense models runs its three gemms in every linear, to a finite loss."""
    ran = []
    for name, _ in list_recipes():
        parallel(tp=2)
        recipe = Recipe.load(name)
        cfg = config(sequence_parallel=True)
        try:
            recipe.check_matches(enumerate_modules(cfg))
        except RecipeError as refusal:  # for experts
            assert "grouped_linear" in str(refusal), refusal
            continue
        model = build(recipe, sequence_parallel=True)
        driver.attach([model.module], seed=1).controller.begin_step(1)
        loss = losses(model)
        loss.sum().backward()
        assert torch.isfinite(loss).all() and loss.mean() < 8, name
        for module in model.modules():
            if isinstance(module, (HybridColumnParallelLinear, HybridRowParallelLinear)):
                assert sorted(gemm for gemm, _ in module.plan.calls.elements()) == ["dgrad", "fprop", "wgrad"], name
                assert torch.isfinite(module.weight.grad).all() and module.weight.grad.abs().sum() > 0
        ran.append(name)
    assert len(ran) == len(list_recipes()) - 1, ran


def check_other_shapes():
    """LayerNorm, biases, grouped queries, normalized queries and keys, full recomputation."""
    parallel(tp=2)
    model = build(
        Recipe.load(MIXED),
        sequence_parallel=True,
        normalization="LayerNorm",
        add_bias_linear=True,
        gated_linear_unit=False,
        activation_func=torch.nn.functional.gelu,
        num_query_groups=2,
        qk_layernorm=True,
    )
    plain = losses(model)
    plain.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    assert all(torch.isfinite(g).all() for g in grads)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.recompute_granularity, module.config.recompute_method = "full", "uniform"
            module.config.recompute_num_layers = 1
    model.zero_grad()
    again = losses(model)
    again.sum().backward()
    assert torch.equal(plain, again)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads))


def check_pipeline_names():
    """On the second stage Megatron counts layers from 0 again; a rule for the first layer must not reach it."""
    parallel(pp=2)
    recipe = Recipe.load("mxfp8").with_first_rule({"layers": "first:1"}, "high_precision")
    model = build(recipe)
    layer = model.module.decoder.layers[0]
    fc1 = layer.mlp.linear_fc1
    assert layer.layer_number == rank() + 1 == fc1.hq.role.layer
    assert fc1.hq.role.name == f"decoder.layers.{rank()}.mlp.linear_fc1"
    assert fc1.plan.fprop.pair.is_quantized == (rank() == 1)
    assert sorted(plan for plan in planning.plan_model(recipe, config(), "cpu"))[0] == "decoder.layers.0.mlp.linear_fc1"


def check_first_last_flags():
    parallel(tp=2)
    edges = dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0)
    layers = build(Recipe.load("mxfp8"), sequence_parallel=True, **edges).module.decoder.layers
    assert [layer.mlp.linear_fc2.plan.fprop.pair.is_quantized for layer in layers] == [False, True]


def check_function_as_recipe():
    """A Python function reaches every module through Megatron's hook, with the bits of the same recipe file."""
    parallel(tp=2)

    def by_tensor(role):
        assert role.name.startswith("decoder.layers.") and role.layer in (1, 2)
        if role.module_type == "dpa":
            return None
        return HybridQuantizer("mxfp8_e4m3", "nvfp4") if role.tensor_type != "grad_output" else HybridQuantizer("nvfp4", "nvfp4")

    same = Recipe.from_dict({"version": 1, "defaults": {"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "nvfp4"}})
    edges = dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0)
    for changes in ({}, edges):
        seen = []
        for recipe in (by_tensor, same):
            parallel(tp=2)
            model = build(recipe, **changes)
            loss = losses(model)
            loss.sum().backward()
            seen.append([loss, *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
        layers = model.module.decoder.layers
        assert [layer.mlp.linear_fc2.plan.fprop.pair.is_quantized for layer in layers] == [not changes, True]


def check_output_layer():
    """Left alone, unless the recipe says otherwise; also where it shares the embedding's weight."""
    for shared in (False, True):
        parallel(tp=2)
        for lm_head in (False, True):
            recipe = Recipe.from_dict({**Recipe.load("mxfp8").to_dict(), "lm_head": lm_head})
            model_config = GPTModelConfig(
                transformer=config(sequence_parallel=True),
                transformer_layer_spec=HybridLayerSpec(recipe),
                vocab_size=VOCAB,
                seq_length=S,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=shared,
            )
            groups = ProcessGroupCollection.use_mpu_process_groups()
            model = GPTModelBuilder(model_config).build_distributed_models(groups, wrap_with_ddp=False)[0]
            losses(model).sum().backward()
            output_layer = model.module.output_layer
            assert isinstance(output_layer, HybridColumnParallelLinear) == lm_head
            if lm_head:
                assert output_layer.plan.name == "output_layer" and sum(output_layer.plan.calls.values()) == 3


def check_checkpoint_keys():
    """The same names and shards as Megatron's own layers, so that checkpoints can be exchanged."""
    parallel(tp=2)
    ours = build(Recipe.load("mxfp8"), normalization="LayerNorm")
    theirs = build(None, spec=get_gpt_layer_local_spec(normalization="LayerNorm"), normalization="LayerNorm",
                   persist_layer_norm=False)  # fmt: skip
    tensors = [
        {k: (v.global_shape, v.global_offset) for k, v in m.module.sharded_state_dict().items() if hasattr(v, "global_shape")}
        for m in (ours, theirs)
    ]
    keys = [sorted(v.key for v in m.module.sharded_state_dict().values()) for m in (ours, theirs)]
    assert keys[0] == keys[1] and sorted(tensors[0].values()) == sorted(tensors[1].values())
    assert set(ours.state_dict()) == set(theirs.state_dict())


def main() -> None:
    start()
    parts = mcore_model_steps, mcore_model_experts, mcore_model_sizes, mcore_model_across
    namespaces = globals(), *map(vars, parts)
    run_checks(*namespaces, leave_out={"check_column"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
