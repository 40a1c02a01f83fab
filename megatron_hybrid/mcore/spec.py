"""The layer spec of a GPT model whose linears follow a recipe.

    model_config.transformer_layer_spec = HybridLayerSpec(Recipe.load("mxfp8"))

or, from a script that knows nothing of this package, ``--spec megatron_hybrid.mcore.recipes mxfp8``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from ..recipe import QUANTIZED, Recipe
from ..recipe_callable import CallableRecipe, as_recipe
from . import attention, checkpoint, dispatch, driver, graphs
from .errors import UserError
from .experts import HybridGroupedParallelLinear
from .graphs import GraphedLayer
from .layers import HybridColumnParallelLinear, HybridParallelLinear, HybridRowParallelLinear
from .modules import OUTPUT_LAYER, enumerate_modules, expert_layers
from .moe_layer import HybridMoELayer
from .parts import LayerParts, choose
from .planning import with_bf16_edges
from .recipe_hook import carry

# where Transformer Engine's fused norm + linear keeps the norm's parameters; Megatron's own specs write checkpoints
# with these names, and so checkpoints can be exchanged
_NORM_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",  # dense layers only: experts share the norm
}


class HybridSpecProvider(LocalSpecProvider):
    """Our modules for Megatron's spec builders."""

    def __init__(self, *, attention_zeroed: bool = False, parts: LayerParts = LayerParts()):
        self.attention_zeroed, self.parts = attention_zeroed, parts

    def column_parallel_linear(self) -> type:
        return HybridColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return HybridRowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False):
        return self.parts.residual_norm if has_residual else self.parts.norm

    def core_attention(self):
        cls = attention.HybridDotProductAttention
        return functools.partial(cls, zeroed=True) if self.attention_zeroed else cls

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool):
        if moe_use_grouped_gemm:
            return self.parts.grouped_mlp
        linears = MLPSubmodules(linear_fc1=self.column_parallel_linear(), linear_fc2=self.row_parallel_linear())
        return functools.partial(SequentialMLP, submodules=linears)


class NumberedLayer(GraphedLayer):
    """What our layers add to Megatron's: they tell their linears their number, as paths count from 0 in every pipeline
    stage. Experts built one by one are told which they are."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, (HybridParallelLinear, HybridGroupedParallelLinear)):
                module.hq_layer = self.layer_number
        if isinstance(self.mlp, MoELayer):
            for number, expert in zip(self.mlp.local_expert_indices, getattr(self.mlp.experts, "local_experts", ())):
                expert.linear_fc1.hq_expert = expert.linear_fc2.hq_expert = number


class HybridTransformerLayer(NumberedLayer, TransformerLayer):
    """Megatron's layer."""


class HybridMoETransformerLayer(NumberedLayer, MoETransformerLayer):
    """Megatron's layer of experts, whose losses a capture leaves alone."""


def refuse_unsupported(config) -> None:
    """Raise `UserError` for what a TransformerConfig asks and this adapter does not do."""
    reasons = {
        "multi-latent attention (--multi-latent-attention)": config.multi_latent_attention,
        "multi-token prediction (--mtp-num-layers)": bool(config.mtp_num_layers),
        "an experimental attention variant": config.experimental_attention_variant is not None,
        "heterogeneous layers": bool(config.heterogeneous_block_specs),
    }
    for what, asked in reasons.items():
        if asked:
            raise UserError(f"{what} is not supported with a recipe yet")
    # Megatron's own quantization does not reach our modules, and without Transformer Engine it does nothing at all
    for what, asked in {"--fp8-format": config.fp8, "--fp4-format": config.fp4}.items():
        if asked:
            raise UserError(f"{what} {asked} beside a recipe: the recipe decides the formats; leave {what} out")
    graphs.refuse_unsupported(config)
    attention.refuse_unsupported(config)
    if config.num_moe_experts is not None:
        _refuse_unsupported_experts(config)


def _refuse_unsupported_experts(config) -> None:
    """What Megatron's mixture of experts does only with Transformer Engine or other packages, and what we lack."""
    reasons = {
        "--moe-token-dispatcher-type flex": config.moe_token_dispatcher_type == "flex",
        "--moe-router-fusion": config.moe_router_fusion,
        "--moe-latent-size": bool(config.moe_latent_size),
        "--moe-router-padding-for-quantization": bool(config.moe_router_padding_for_quantization),
        "--use-transformer-engine-op-fuser": bool(config.use_transformer_engine_op_fuser),
        "--delay-wgrad-compute": config.delay_wgrad_compute,
        "--overlap-moe-expert-parallel-comm": config.overlap_moe_expert_parallel_comm,
        "interleaved gated units (--moe-mlp-glu-interleave-size)": config.moe_mlp_glu_interleave_size is not None,
    }
    for what, asked in reasons.items():
        if asked:
            raise UserError(
                f"{what} needs Transformer Engine or another package and is not supported with a recipe; leave it out "
                "(padding to a format's blocks happens inside the grouped linears)"
            )


def layer_spec(
    config, *, attention_zeroed: bool = False, parts: LayerParts = LayerParts(), experts: bool = False
) -> ModuleSpec:
    """One layer of a TransformerConfig, dense or a mixture of experts."""
    backend = HybridSpecProvider(attention_zeroed=attention_zeroed, parts=parts)
    norm, residual_norm = backend.layer_norm(), backend.layer_norm(has_residual=True)
    qk_norm = L2Norm if config.qk_l2_norm else norm if config.qk_layernorm else IdentityOp
    self_attention = ModuleSpec(
        module=parts.self_attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=residual_norm,
        self_attention=self_attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=residual_norm,
        mlp=_mlp_spec(config, backend, parts, experts),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={k: v for k, v in _NORM_NAMES.items() if not experts or "mlp" not in k},
    )
    layer = HybridMoETransformerLayer if experts else HybridTransformerLayer
    return ModuleSpec(module=layer, submodules=submodules)


@dataclass(frozen=True)
class HybridLayerSpec:
    """A recipe as a GPTModelConfig's ``transformer_layer_spec``: called for each pipeline stage.

    recipe: a `Recipe`, a name or path, or a function `role -> HybridQuantizer`, which is asked in every process.
    attention_zeroed: see `HybridDotProductAttention`. fused: see `parts.choose`. Raises `UserError` for a
    configuration that is not supported, and what `Recipe.check_matches` raises for rules that do not fit the whole
    model.
    """

    recipe: Recipe | CallableRecipe
    attention_zeroed: bool = False
    fused: bool | None = None

    def __post_init__(self):
        object.__setattr__(self, "recipe", as_recipe(self.recipe))

    def recipe_for(self, config) -> Recipe:
        """The recipe that this configuration trains with, checked against all of its modules."""
        refuse_unsupported(config)
        recipe = with_bf16_edges(self.recipe, config)
        recipe.check_matches(enumerate_modules(config))
        if recipe.dispatch == QUANTIZED:
            dispatch.refuse_unsupported(config)
        return recipe

    def install(self, model_config) -> LayerParts:
        """What a model's configuration needs besides layers: the recipe on its way to every module, and the hooks."""
        config = model_config.transformer
        recipe = self.recipe_for(config)
        graphs.configure(config)
        config.quant_recipe = carry(recipe)
        checkpoint.record_in_run(recipe, config)
        parts = choose(config, self.fused)
        parts.prepare(config)
        hooks = model_config.pre_wrap_hooks  # in this order: the driver finds the output layer quantized
        wanted = (
            _quantize_output_layer if recipe.lm_head else None,
            dispatch.adopt if recipe.dispatch == QUANTIZED else None,
            driver.attach_in_run,
            parts.fuse_loss,
        )
        for hook in wanted:
            if hook is not None and hook not in hooks:
                hooks.append(hook)
        return parts

    def __call__(self, model_config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        parts = self.install(model_config)
        build = functools.partial(layer_spec, attention_zeroed=self.attention_zeroed, parts=parts)
        layers = _layers(model_config.transformer, vp_stage, build)
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=parts.norm)


def _mlp_spec(config, backend: HybridSpecProvider, parts: LayerParts, experts: bool):
    if not experts:
        return parts.dense_mlp(get_mlp_module_spec_for_backend(backend))
    builder = get_mlp_module_spec_for_backend(
        backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    return functools.partial(HybridMoELayer, **builder.keywords)


def _layers(config, vp_stage: int | None, build) -> list[ModuleSpec]:
    """The specs of the layers that this pipeline stage builds; `build(config, experts=)` makes one."""
    has_experts = expert_layers(config)
    specs = {kind: build(config, experts=kind) for kind in set(has_experts)}
    if (layout := config.pipeline_model_parallel_layout) is not None:
        numbers = layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return [specs[has_experts[number]] for number in numbers]


def _quantize_output_layer(model: list) -> list:
    """Hook before the model is wrapped: Megatron builds the output layer itself, whatever the spec says."""
    for chunk in model:
        output_layer = getattr(chunk, OUTPUT_LAYER, None)
        if output_layer is not None and not isinstance(output_layer, HybridColumnParallelLinear):
            HybridColumnParallelLinear.adopt(output_layer, OUTPUT_LAYER)
    return model
