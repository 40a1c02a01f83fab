"""Checks of the Megatron modules on two CPU ranks, all in one launch.

torchrun ... run_mcore_model.py FOLDER: rank r writes FOLDER/r.json, a dict of check -> error or None.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_hybrid.patches import cpu_device

cpu_device.install()

from megatron.core import mpu, tensor_parallel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig  # noqa: E402

from megatron_hybrid import HybridQuantizer, Recipe, RecipeError, list_recipes  # noqa: E402
from megatron_hybrid.linear import LOCAL, hybrid_linear  # noqa: E402
from megatron_hybrid.mcore import driver, run, state  # noqa: E402
from megatron_hybrid.mcore.attention import HybridDotProductAttention  # noqa: E402
from megatron_hybrid.mcore.layers import HybridColumnParallelLinear, HybridRowParallelLinear  # noqa: E402
from megatron_hybrid.mcore.modules import enumerate_modules  # noqa: E402
from megatron_hybrid.mcore.norm import HybridNorm  # noqa: E402
from megatron_hybrid.mcore.recipe_hook import carry  # noqa: E402
from megatron_hybrid.mcore.spec import HybridLayerSpec  # noqa: E402
from megatron_hybrid.plan import PlanError  # noqa: E402
from megatron_hybrid.runtime import RandomKeys  # noqa: E402

S, B, H, F, LAYERS, VOCAB = 16, 2, 64, 96, 2, 128
MIXED = "mxfp8_fprop_nvfp4_bwd"


def parallel(tp: int = 1, pp: int = 1) -> None:
    """The process groups of a layout, and the same random numbers.

    Groups are kept while the layout stays: gloo starts threads for each, and they outlive Megatron's `destroy`.
    """
    held = mpu.model_parallel_is_initialized() and (
        mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size()
    )  # fmt: skip
    if held != (tp, pp):
        if held:
            mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)


def config(**changes) -> TransformerConfig:
    settings = dict(
        num_layers=LAYERS,
        hidden_size=H,
        ffn_hidden_size=F,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
    )
    return TransformerConfig(**{**settings, **changes})


def build(recipe, spec=None, **changes):
    model_config = GPTModelConfig(
        transformer=config(**changes),
        transformer_layer_spec=spec or HybridLayerSpec(recipe),
        vocab_size=VOCAB,
        seq_length=S,
        position_embedding_type="rope",
    )
    builder = GPTModelBuilder(model_config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return builder.build_distributed_models(groups, wrap_with_ddp=False)[0]


def linear(cls, recipe: str, size_in: int, size_out: int, **changes):
    cfg = config(**changes)
    kind = dict(gather_output=False) if cls is HybridColumnParallelLinear else dict(input_is_parallel=True)
    init = torch.nn.init.normal_
    module = cls(size_in, size_out, config=cfg, init_method=init, bias=False, skip_bias_add=False, **kind)
    quantization = carry(Recipe.load(recipe))
    module.hq_layer = 1
    module.finish_init(
        QuantizationConfig(
            quantization.configs["megatron_hybrid"], MatchContext("decoder.layers.0.mlp.linear_fc1", 0), "megatron_hybrid"
        )
    )
    return module


def rank() -> int:
    return dist.get_rank()


def bf16(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def summed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def shard(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(2, dim)[rank()].contiguous()


def check_column(sequence_parallel: bool, recipe: str) -> None:
    """Output and weight gradient are bitwise what one rank makes of the whole input; dx is summed over ranks."""
    parallel(tp=2)
    module = linear(HybridColumnParallelLinear, recipe, H, F, sequence_parallel=sequence_parallel)
    x, dy = bf16(S, B, H, seed=1), bf16(S, B, F // 2, seed=2 + rank())
    mine = (shard(x, 0) if sequence_parallel else x.clone()).requires_grad_()
    y, _ = module(mine)
    y.backward(dy)

    whole, weight = x.clone().requires_grad_(), module.weight.detach().clone().requires_grad_()
    expected = hybrid_linear(whole, weight, None, module.hq.call(weight.device, LOCAL, training=True))
    expected.backward(dy)
    dx = summed(whole.grad)
    assert torch.equal(y, expected)
    assert torch.equal(module.weight.grad, weight.grad)
    assert torch.equal(mine.grad, shard(dx, 0) if sequence_parallel else dx)
    assert sum(module.plan.calls.values()) == 6  # the reference uses the same plan


def check_column_sequence_parallel():
    check_column(True, MIXED)


def check_column_all_reduce():
    check_column(False, MIXED)


def check_row(recipe: str = MIXED):
    """The sum over ranks of what each makes of its part, split along the sequence."""
    parallel(tp=2)
    module = linear(HybridRowParallelLinear, recipe, F, H, sequence_parallel=True)
    x, dy = bf16(S, B, F // 2, seed=1 + rank()).requires_grad_(), bf16(S, B, H, seed=5)
    y, _ = module(x)
    y.backward(shard(dy, 0))
    mine, weight = x.detach().clone().requires_grad_(), module.weight.detach().clone().requires_grad_()
    part = hybrid_linear(mine, weight, None, module.hq.call(weight.device, LOCAL, training=True))
    part.backward(dy)
    assert torch.equal(y, shard(summed(part.detach()), 0))
    assert torch.equal(x.grad, mine.grad) and torch.equal(module.weight.grad, weight.grad)


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


def losses(model) -> torch.Tensor:
    tokens = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(S).expand(B, S)
    return model(tokens, positions, None, labels=tokens.roll(-1, 1))


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


def check_random_rounding_needs_a_driver():
    parallel(tp=2)
    rules = [{"match": {"layers": "first:1"}, "use": {"dgrad": {"grad_output": "nvfp4:sr", "weight": "nvfp4"}}}]
    model = build(Recipe.from_dict({"version": 1, "name": "t", "defaults": "high_precision", "rules": rules}))
    try:
        losses(model)
    except PlanError as error:
        assert "decoder.layers.0.self_attention.linear_qkv" in str(error) and "rounds stochastically" in str(error)
    else:
        raise AssertionError("no error")


def part_of(amax, dim: int):
    """This rank's part of a tensor's amax, which has one value along the dimensions that are not scaled apart."""
    return None if amax is None else shard(amax, dim) if amax.dim() and amax.shape[dim] > 1 else amax


def check_random_bits_do_not_depend_on_tensor_parallel_ranks():
    """A shard's codes are those of the whole tensor, given the whole tensor's amax."""
    parallel(tp=2)
    split = {
        HybridColumnParallelLinear: {"weight": 0, "grad_output": 1},
        HybridRowParallelLinear: {"input": 1, "weight": 1},
    }
    shapes = {"input": (32, H), "weight": (F, H), "grad_output": (32, F)}
    for cls, dims in split.items():
        module = linear(cls, "bf16", H, F)
        assert set(module.hq.index_maps) == set(shapes)
        for seed, operand in enumerate(shapes):
            whole = bf16(*shapes[operand], seed=seed)
            dim = dims.get(operand)
            part = whole if dim is None else shard(whole, dim)
            keys = RandomKeys(5, num_microbatches=2)
            keys.set(3, 1)
            rngs = [keys.rng(module.hq.role, operand, "cpu", m) for m in (None, module.hq.index_maps[operand])]
            for fmt in ("nvfp4:sr", "nvfp4:2d,sr", "nvfp4:row_scaled,sr", "nvfp4:rht,sr", "nvfp4:row_scaled,rht,sr"):
                quantizer = HybridQuantizer(rowwise=fmt, columnwise=fmt)
                amax = quantizer.amax(whole)
                expected = quantizer.quantize(whole, amax=amax, rng=rngs[0])
                mine = tuple(a if dim is None else part_of(a, dim) for a in amax)
                found = quantizer.quantize(part, amax=mine, rng=rngs[1])
                for direction in ("rowwise", "columnwise"):
                    codes = getattr(expected, direction).codes()
                    codes = codes if dim is None else shard(codes, dim)
                    assert torch.equal(getattr(found, direction).codes(), codes), (cls, operand, fmt, direction)


def check_amaxes_are_reduced_over_the_ranks_that_share_tensors():
    """Tensor- and data-parallel ranks, in one collective; not pipeline stages, whose modules differ."""
    recipe = Recipe.load("fp8_delayed").with_first_rule({"layers": "last:1"}, {"fprop": "mxfp8_e4m3"})
    for sizes, ranks in ((dict(tp=2), [0, 1]), (dict(), [0, 1]), (dict(pp=2), None)):
        parallel(**sizes)
        model = build(recipe)
        control = driver.attach([model.module], seed=1)
        states = [state for runtime in control.controller.runtimes for _, state in runtime.states()]
        calls, original = [], dist.all_reduce
        dist.all_reduce = lambda x, op, group: calls.append((x.numel(), op, dist.get_process_group_ranks(group)))
        try:
            control.controller.begin_step(1)
            control.controller.end_step(control.group)
        finally:
            dist.all_reduce = original
        assert calls == ([] if ranks is None else [(len(states), dist.ReduceOp.MAX, ranks)]), calls
        counts = [None, None]
        dist.all_gather_object(counts, len(states))
        assert (counts[0] == counts[1]) == (sizes != dict(pp=2)), counts  # why stages must not meet
        keys = control.controller.keys
        assert (keys.replica, keys.num_replicas) == ((rank(), 2) if not sizes else (0, 1))


def check_one_scale_for_a_tensor():
    """After a step every rank scales its weight shard by the largest element of the whole, in FP32 state."""
    parallel(tp=2)
    model = build(Recipe.load("fp8_delayed"), sequence_parallel=True)
    control = driver.attach([model.module], seed=1)
    control.controller.begin_step(1)
    weight = model.module.decoder.layers[1].mlp.linear_fc2.weight
    with torch.no_grad():
        weight[0, 0] = 3.0 + rank()
    losses(model).sum().backward()
    control.controller.end_step(control.group)
    hq = model.module.decoder.layers[1].mlp.linear_fc2.hq
    assert hq.weight_rowwise_scale.item() == hq.weight_columnwise_scale.item() == 448 / 4
    for runtime in control.controller.runtimes:
        for name, buffer in runtime.named_buffers():
            assert buffer.dtype == torch.float32, name  # the model around it is bf16
            both = [torch.empty_like(buffer) for _ in range(2)]
            dist.all_gather(both, buffer)
            assert torch.equal(*both), (runtime.role.name, name)


def check_evaluation_records_nothing():
    parallel(tp=2)
    model = build(Recipe.load("fp8_delayed"), sequence_parallel=True)
    control = driver.attach([model.module], seed=1)
    control.controller.begin_step(1)
    model.eval()
    with torch.no_grad():
        losses(model)
    for runtime in control.controller.runtimes:
        assert all(buffer.abs().sum() == 0 for name, buffer in runtime.named_buffers() if name.endswith("history"))


def check_histories_in_checkpoints():
    """A key for every layer, whichever way Megatron stores layers; the same on all ranks, so one of them writes it."""
    parallel(tp=2)
    recipe = Recipe.load("fp8_delayed").with_first_rule({"layers": "first:1"}, "high_precision")
    model = build(recipe).module
    ours = [k for k in model.state_dict() if ".hq." in k]
    assert ours and not [k for k in ours if ".layers.0." in k]
    for singleton, number in ((False, "hq.layer_2."), (True, "layers.1.")):
        metadata = {"singleton_local_shards": singleton, "dp_cp_group": mpu.get_data_parallel_group()}
        sharded = {k: v for k, v in model.sharded_state_dict(metadata=metadata).items() if ".hq." in k}
        assert sorted(sharded) == sorted(ours)
        assert len({v.key for v in sharded.values()}) == len(ours)
        for local, tensor in sharded.items():
            assert number in tensor.key and tensor.global_shape == tensor.local_shape == tensor.data.shape
            assert tensor.replica_id == (0, rank(), 0), tensor.replica_id
            runtime = model.get_submodule(local.rpartition(".")[0])
            name = local.rpartition(".")[2]
            assert tensor.key in state.possible_keys(runtime.role, name)


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
    assert sorted(plan for plan in run.plan_model(recipe, config(), "cpu"))[0] == "decoder.layers.0.mlp.linear_fc1"


def check_first_last_flags():
    parallel(tp=2)
    edges = dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0)
    layers = build(Recipe.load("mxfp8"), sequence_parallel=True, **edges).module.decoder.layers
    assert [layer.mlp.linear_fc2.plan.fprop.pair.is_quantized for layer in layers] == [False, True]


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
    dist.init_process_group("gloo")
    errors = {}
    for name, check in list(globals().items()):
        if not name.startswith("check_") or name == "check_column":
            continue
        errors[name.removeprefix("check_")] = None
        try:
            check()
        except Exception:
            errors[name.removeprefix("check_")] = traceback.format_exc()
        dist.barrier()
    (Path(sys.argv[1]) / f"{rank()}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
