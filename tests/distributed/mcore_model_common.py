"""What the checks of the Megatron modules share. Importing it installs the CPU stand-in where the worker runs on CPUs,
then imports Megatron."""

from __future__ import annotations

import torch
import torch.distributed as dist
from checks import arguments

from megatron_hybrid.patches import cpu_device

if arguments().backend == "gloo":
    cpu_device.install()

from megatron.core import mpu, tensor_parallel  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig  # noqa: E402

from megatron_hybrid import Recipe  # noqa: E402
from megatron_hybrid.mcore.layers import HybridColumnParallelLinear  # noqa: E402
from megatron_hybrid.mcore.recipe_hook import carry  # noqa: E402
from megatron_hybrid.mcore.spec import HybridLayerSpec  # noqa: E402

S, B, H, F, LAYERS, VOCAB = 16, 2, 64, 96, 2, 128
MIXED = "mxfp8_fprop_nvfp4_bwd"


def parallel(tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1, etp: int | None = None) -> None:
    """The process groups of a layout, and the same random numbers. etp: of experts, `tp` where it is not said.

    Groups are kept while the layout stays: gloo starts threads for each, and they outlive Megatron's `destroy`.
    """
    held = mpu.model_parallel_is_initialized() and (
        mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_expert_model_parallel_world_size(), mpu.get_context_parallel_world_size(),
        mpu.get_expert_tensor_parallel_world_size(),
    )  # fmt: skip
    if held != (tp, pp, ep, cp, etp or tp):
        if held:
            mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep,
            context_parallel_size=cp, expert_tensor_parallel_size=etp,
        )  # fmt: skip
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
        context_parallel_size=mpu.get_context_parallel_world_size(),
        expert_model_parallel_size=mpu.get_expert_model_parallel_world_size(),
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


def drawn(draw, *args, seed=0) -> torch.Tensor:
    """``draw(*args)`` with this seed, of the same values on every device."""
    return draw(*args, generator=torch.Generator().manual_seed(seed), device="cpu").to(torch.get_default_device())


def bf16(*shape, seed=0) -> torch.Tensor:
    return drawn(torch.randn, *shape, seed=seed).bfloat16()


def summed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def shard(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(2, dim)[rank()].contiguous()


def losses(model) -> torch.Tensor:
    tokens = drawn(torch.randint, 0, VOCAB, (B, S), seed=3)
    positions = torch.arange(S).expand(B, S)
    return model(tokens, positions, None, labels=tokens.roll(-1, 1))
