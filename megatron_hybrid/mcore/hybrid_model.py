"""Megatron's HybridModel over our layers: attention, MLP and mixture-of-experts layers of a ``--hybrid-layer-pattern``.

    config = hybrid_config_from_args(args)
    configure(config, HybridLayerSpec(recipe))

A GPT layer is the pair ``*-`` (or ``*E``); Megatron itself loads GPT checkpoints into such models. Layers count as the
pattern's symbols do: a rule for ``first:1`` means its first symbol.
"""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayerSubmodules

from .spec import NumberedLayer, HybridLayerSpec, HybridTransformerLayer, layer_spec


class NumberedMLPLayer(NumberedLayer, MLPLayer):
    """Megatron's layer of an MLP alone."""


class NumberedMoELayer(NumberedLayer, MoETransformerLayer):
    """Megatron's layer of a mixture of experts alone."""


class HybridQuantizedStack(HybridStack):
    """Megatron's stack, whose final norm needs no Transformer Engine. final_norm: its class."""

    def __init__(self, config, submodules, *args, post_layer_norm: bool = True, final_norm: type, **kwargs):
        super().__init__(config, submodules, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = final_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def configure(model_config, spec: HybridLayerSpec) -> None:
    """Give a HybridModelConfig the layers of a recipe, and the hooks that it needs.

    Raises `UserError` for layers of the pattern that there are none for (Mamba, other attentions), and what
    `HybridLayerSpec.recipe_for` raises.
    """
    config = model_config.transformer
    config.hybrid_layer_pattern = model_config.hybrid_layer_pattern
    parts = spec.install(model_config)
    model_config.hybrid_stack_spec = stack_spec(config, spec, parts)


def stack_spec(config, spec: HybridLayerSpec, parts) -> ModuleSpec:
    """The stack of every kind of layer that the pattern may name."""
    made = {"attention_zeroed": spec.attention_zeroed, "parts": parts}
    dense = layer_spec(config, **made).submodules
    layers = {
        "attention_layer": ModuleSpec(
            module=HybridTransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=dense.input_layernorm, self_attention=dense.self_attention,
                self_attn_bda=get_bias_dropout_add, sharded_state_dict_keys_map=_keys(dense, "self_attention"),
            ),
        ),
        "mlp_layer": ModuleSpec(
            module=NumberedMLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=dense.pre_mlp_layernorm, mlp=dense.mlp, mlp_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map=_keys(dense, "mlp"),
            ),
        ),
    }  # fmt: skip
    if config.num_moe_experts is not None:
        experts = layer_spec(config, experts=True, **made).submodules
        layers["moe_layer"] = ModuleSpec(
            module=NumberedMoELayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=experts.pre_mlp_layernorm, mlp=experts.mlp, mlp_bda=get_bias_dropout_add
            ),
        )
    return ModuleSpec(
        module=HybridQuantizedStack, submodules=HybridStackSubmodules(**layers), params={"final_norm": parts.norm}
    )


def _keys(submodules, part: str) -> dict:
    """The names in checkpoints that concern one part of a layer."""
    return {ours: theirs for ours, theirs in submodules.sharded_state_dict_keys_map.items() if theirs.startswith(part)}
