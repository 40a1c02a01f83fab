"""Names and roles of a GPT model's linears, all pipeline stages together, from the configuration alone.

Megatron numbers the layers of each pipeline stage from 0 again; our names carry the global index, as its
checkpoints do, and roles the global number, from 1.
"""

from __future__ import annotations

import json
import re

from ..roles import DPA, GROUPED_LINEAR, LINEAR, ModuleRole
from .errors import UserError

ATTENTION_LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj")
MLP_LINEARS = ("mlp.linear_fc1", "mlp.linear_fc2")
EXPERT_LINEARS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
SHARED_EXPERT_LINEARS = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
CORE_ATTENTION = "self_attention.core_attention"
OUTPUT_LAYER = "output_layer"

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
    for layer, parts in enumerate(layer_parts(config), 1):
        where = {"layer": layer, "num_layers": depth}
        for part in parts:
            roles += [
                ModuleRole(kind, layer_module_name(layer, leaf), expert=expert, **where)
                for kind, leaf, expert in _PARTS[part](config)
            ]
    return [*roles, output_layer_role(depth)]


ATTENTION, MLP, EXPERTS = "*", "-", "E"  # Megatron's symbols of a hybrid model's layers


def layer_parts(config) -> list[str]:
    """What each layer consists of, as Megatron's symbols: a GPT layer of attention and MLP or experts, a layer of a
    hybrid pattern of one of them. Raises `UserError` for a pattern's layers that a recipe cannot reach."""
    pattern = getattr(config, "hybrid_layer_pattern", None)
    if pattern is None:
        return [ATTENTION + (EXPERTS if has_experts else MLP) for has_experts in expert_layers(config)]
    symbols = pattern.replace("|", "")
    if unknown := sorted(set(symbols) - set(_PARTS)):
        raise UserError(
            f"--hybrid-layer-pattern {pattern}: layers {', '.join(unknown)} are not supported with a recipe; "
            f"attention ({ATTENTION}), MLP ({MLP}) and experts ({EXPERTS}) are"
        )
    if EXPERTS in symbols and config.num_moe_experts is None:
        raise UserError(f"--hybrid-layer-pattern {pattern}: layers of experts ({EXPERTS}) without --num-experts")
    return list(symbols)


def _attention_leaves(config):
    qkv, proj = ATTENTION_LINEARS
    return [(LINEAR, qkv, None), (DPA, CORE_ATTENTION, None), (LINEAR, proj, None)]


def _expert_leaves(config):
    experts = [(GROUPED_LINEAR, leaf, e) for leaf in EXPERT_LINEARS for e in range(config.num_moe_experts)]
    shared = SHARED_EXPERT_LINEARS if config.moe_shared_expert_intermediate_size is not None else ()
    return [*experts, *((LINEAR, leaf, None) for leaf in shared)]


_PARTS = {
    ATTENTION: _attention_leaves,
    MLP: lambda config: [(LINEAR, leaf, None) for leaf in MLP_LINEARS],
    EXPERTS: _expert_leaves,
}


def expert_layers(config) -> list[bool]:
    """Which layers are mixtures of experts, all pipeline stages together. Raises ``ValueError`` for another pattern."""
    if getattr(config, "num_moe_experts", None) is None:
        return [False] * config.num_layers
    return layer_pattern(config.num_layers, getattr(config, "moe_layer_freq", 1))


def layer_pattern(depth: int, pattern) -> list[bool]:
    """Megatron's ``--moe-layer-freq``: every Nth layer from the first on, or a list with a zero or one a layer."""
    if isinstance(pattern, str):  # as in a file of flags
        try:
            pattern = json.loads(pattern)
        except ValueError:
            raise UserError(f"--moe-layer-freq {pattern!r}: a number or a list such as [0,1,1] is expected") from None
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
