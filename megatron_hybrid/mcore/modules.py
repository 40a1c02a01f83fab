"""Names and roles of a GPT model's linears, all pipeline stages together, from the configuration alone.

Megatron numbers the layers of each pipeline stage from 0 again; our names carry the global index, as its
checkpoints do, and roles the global number, from 1.
"""

from __future__ import annotations

import re

from ..roles import DPA, GROUPED_LINEAR, LINEAR, ModuleRole

ATTENTION_LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj")
MLP_LINEARS = ("mlp.linear_fc1", "mlp.linear_fc2")
EXPERT_LINEARS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
SHARED_EXPERT_LINEARS = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
CORE_ATTENTION = "self_attention.core_attention"
OUTPUT_LAYER = "output_layer"
# linears whose input sequence parallelism gathers
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1", OUTPUT_LAYER)

_LOCAL_LAYER = re.compile(r"(?<=\blayers\.)\d+")
_LOCAL_EXPERT = re.compile(r"\blocal_experts\.\d+\.")


def layer_module_name(layer: int, leaf: str) -> str:
    return f"decoder.layers.{layer - 1}.{leaf}"


def enumerate_modules(config) -> list[ModuleRole]:
    """Roles of every module that a recipe may name, in the model's order.

    config: a TransformerConfig; read are ``num_layers`` and what says which layers have how many experts. An expert's
    linears are grouped linears in either of Megatron's implementations.
    """
    depth = config.num_layers
    roles = []
    for layer, has_experts in enumerate(expert_layers(config), 1):
        where = {"layer": layer, "num_layers": depth}
        linears = ATTENTION_LINEARS
        roles.append(ModuleRole(LINEAR, layer_module_name(layer, linears[0]), **where))
        roles.append(ModuleRole(DPA, layer_module_name(layer, CORE_ATTENTION), **where))
        roles.append(ModuleRole(LINEAR, layer_module_name(layer, linears[1]), **where))
        mlp = MLP_LINEARS
        if has_experts:
            mlp = SHARED_EXPERT_LINEARS if config.moe_shared_expert_intermediate_size is not None else ()
            roles += [
                ModuleRole(GROUPED_LINEAR, layer_module_name(layer, leaf), expert=expert, **where)
                for leaf in EXPERT_LINEARS
                for expert in range(config.num_moe_experts)
            ]
        roles += [ModuleRole(LINEAR, layer_module_name(layer, leaf), **where) for leaf in mlp]
    return [*roles, output_layer_role(depth)]


def expert_layers(config) -> list[bool]:
    """Which layers are mixtures of experts, all pipeline stages together. Raises ``ValueError`` for another pattern."""
    depth, pattern = config.num_layers, getattr(config, "moe_layer_freq", 1)
    if getattr(config, "num_moe_experts", None) is None:
        return [False] * depth
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(depth)]
    if len(pattern) != depth or set(pattern) - {0, 1}:
        raise ValueError(f"moe_layer_freq {pattern}: a list of {depth} zeros and ones, one a layer, is expected")
    return [bool(entry) for entry in pattern]


def output_layer_role(num_layers: int) -> ModuleRole:
    return ModuleRole(LINEAR, OUTPUT_LAYER, num_layers=num_layers, lm_head=True)


def linear_role(path: str, layer: int | None, num_layers: int, expert: int | None = None) -> ModuleRole:
    """Role of the linear at a path inside this pipeline stage, owned by the layer and the expert of these numbers."""
    if expert is not None:
        return expert_role(path, layer, num_layers, expert)
    if layer is None:
        return output_layer_role(num_layers) if path.endswith(OUTPUT_LAYER) else ModuleRole(LINEAR, path)
    return ModuleRole(LINEAR, _global_name(path, layer), layer=layer, num_layers=num_layers)


def expert_role(path: str, layer: int | None, num_layers: int, expert: int) -> ModuleRole:
    """Role of one expert's linear; `SequentialMLP`'s path of its own for every expert gives the same name."""
    path = _LOCAL_EXPERT.sub("", path)
    if layer is not None:
        path = _global_name(path, layer)
    return ModuleRole(GROUPED_LINEAR, path, layer=layer, num_layers=num_layers, expert=expert)


def _global_name(path: str, layer: int) -> str:
    return _LOCAL_LAYER.sub(str(layer - 1), path, count=1)
