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
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from ..recipe import Recipe
from ..recipe_callable import CallableRecipe, as_recipe
from . import attention, checkpoint, driver
from .errors import UserError
from .layers import HybridColumnParallelLinear, HybridParallelLinear, HybridRowParallelLinear
from .modules import OUTPUT_LAYER, enumerate_modules
from .parts import LayerParts, choose
from .planning import with_bf16_edges
from .recipe_hook import carry

# where Transformer Engine's fused norm + linear keeps the norm's parameters; Megatron's own specs write checkpoints
# with these names, and so checkpoints can be exchanged
_NORM_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
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


class HybridTransformerLayer(TransformerLayer):
    """Megatron's layer, which tells its linears its number: paths count from 0 in every pipeline stage."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, HybridParallelLinear):
                module.hq_layer = self.layer_number


def refuse_unsupported(config) -> None:
    """Raise `UserError` for what a TransformerConfig asks and this adapter does not do."""
    reasons = {
        "mixture of experts (--num-experts)": config.num_moe_experts is not None,
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
    attention.refuse_unsupported(config)


def layer_spec(config, *, attention_zeroed: bool = False, parts: LayerParts = LayerParts()) -> ModuleSpec:
    """One dense layer of a TransformerConfig."""
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
        mlp=parts.dense_mlp(get_mlp_module_spec_for_backend(backend)),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=dict(_NORM_NAMES),
    )
    return ModuleSpec(module=HybridTransformerLayer, submodules=submodules)


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
        return recipe

    def __call__(self, model_config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        config = model_config.transformer
        recipe = self.recipe_for(config)
        config.quant_recipe = carry(recipe)
        checkpoint.record_in_run(recipe)
        parts = choose(config, self.fused)
        hooks = model_config.pre_wrap_hooks  # in this order: the driver finds the output layer quantized
        for hook in (_quantize_output_layer if recipe.lm_head else None, driver.attach_in_run, parts.fuse_loss):
            if hook is not None and hook not in hooks:
                hooks.append(hook)
        layer = layer_spec(config, attention_zeroed=self.attention_zeroed, parts=parts)
        num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=parts.norm)


def _quantize_output_layer(model: list) -> list:
    """Hook before the model is wrapped: Megatron builds the output layer itself, whatever the spec says."""
    for chunk in model:
        output_layer = getattr(chunk, OUTPUT_LAYER, None)
        if output_layer is not None and not isinstance(output_layer, HybridColumnParallelLinear):
            HybridColumnParallelLinear.adopt(output_layer, OUTPUT_LAYER)
    return model
