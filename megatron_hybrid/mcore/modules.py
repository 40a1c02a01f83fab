"""Names and roles of a GPT model's linears, all pipeline stages together, from the configuration alone.

Megatron numbers the layers of each pipeline stage from 0 again; our names carry the global index, as its
checkpoints do, and roles the global number, from 1.
"""

from __future__ import annotations

import re

from ..roles import DPA, LINEAR, ModuleRole

LAYER_LINEARS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
CORE_ATTENTION = "self_attention.core_attention"
OUTPUT_LAYER = "output_layer"
# linears whose input sequence parallelism gathers
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1", OUTPUT_LAYER)

_LOCAL_LAYER = re.compile(r"(?<=\blayers\.)\d+")


def layer_module_name(layer: int, leaf: str) -> str:
    return f"decoder.layers.{layer - 1}.{leaf}"


def enumerate_modules(config) -> list[ModuleRole]:
    """Roles of every module that a recipe may name, in the model's order.

    config: a TransformerConfig (only ``num_layers`` is read).
    """
    depth = config.num_layers
    roles = []
    for layer in range(1, depth + 1):
        where = {"layer": layer, "num_layers": depth}
        roles += [ModuleRole(LINEAR, layer_module_name(layer, leaf), **where) for leaf in LAYER_LINEARS[:1]]
        roles.append(ModuleRole(DPA, layer_module_name(layer, CORE_ATTENTION), **where))
        roles += [ModuleRole(LINEAR, layer_module_name(layer, leaf), **where) for leaf in LAYER_LINEARS[1:]]
    return [*roles, output_layer_role(depth)]


def output_layer_role(num_layers: int) -> ModuleRole:
    return ModuleRole(LINEAR, OUTPUT_LAYER, num_layers=num_layers, lm_head=True)


def linear_role(path: str, layer: int | None, num_layers: int) -> ModuleRole:
    """Role of the linear at a path inside this pipeline stage, owned by the layer of that global number."""
    if layer is None:
        return output_layer_role(num_layers) if path.endswith(OUTPUT_LAYER) else ModuleRole(LINEAR, path)
    return ModuleRole(LINEAR, _LOCAL_LAYER.sub(str(layer - 1), path, count=1), layer=layer, num_layers=num_layers)
