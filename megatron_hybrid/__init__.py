"""Per-direction ("hybrid") quantization for training transformers, a plugin for Megatron-Core.

Importing this package changes nothing anywhere else: no patches, no environment variables, no Megatron, no CUDA.
Names are resolved on first use.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "Format": "formats",
    "parse_format": "formats",
    "QuantizedStorage": "storage",
    "HybridTensor": "tensor",
    "HybridQuantizer": "quantizer",
    "DelayedState": "scaling",
    "Rng": "scaling",
    "QuantizerRole": "roles",
    "ModuleRole": "roles",
    "Recipe": "recipe",
    "RecipeError": "recipe",
    "CallableRecipe": "recipe_callable",
    "list_recipes": "recipe",
    "GemmPlan": "plan",
    "PlanError": "plan",
    "build_plan": "plan",
    "explain": "explain",
    "backends": "explain",
    "prepare": "control",
    "HybridLinear": "modules.linear",
    "HybridLayerNormLinear": "modules.norm_linear",
    "HybridMLP": "modules.mlp",
    "HybridSelfAttention": "modules.attention",
    "HybridGroupedLinear": "modules.grouped_linear",
    "FusedAdam": "optimizer",
    "OffloadedAdam": "optimizer",
    "quantized_model_init": "weights",
    "gather_quantized": "distributed.fsdp2",
    "offload_activations": "offload",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__():
    return sorted([*globals(), *_EXPORTS])
