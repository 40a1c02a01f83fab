"""What a layer consists of besides its linears and its core attention, chosen when the spec is made.

Plain torch, Megatron's own modules: on the CPU, and wherever the fused kernels cannot run. Fused: see fused.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP

from .. import ops_triton
from .experts import HybridGroupedMLP
from .layers import compute_device
from .norm import HybridNorm


@dataclass(frozen=True)
class LayerParts:
    """Classes to build a layer from. fuse_loss: a hook on the model's chunks, or None. prepare: what the configuration
    needs before layers are built from it."""

    norm: type = HybridNorm
    residual_norm: type = HybridNorm  # where the residual stream branches off
    self_attention: type = SelfAttention
    mlp: type = MLP
    grouped_mlp: type = HybridGroupedMLP
    fuse_loss: Callable[[list], list] | None = None
    prepare: Callable[[object], None] = lambda config: None

    def dense_mlp(self, builder: functools.partial) -> functools.partial:
        """Megatron's builder of a dense MLP, building ours from the same linears."""
        return functools.partial(self.mlp.as_mlp_submodule, **builder.keywords)


def choose(config, fused: bool | None = None) -> LayerParts:
    """The parts for a TransformerConfig. fused: False for plain torch, True for fused kernels wherever the
    configuration allows, None for those where the device does too."""
    if fused is None:
        fused = ops_triton.reason(compute_device()) is None
    if not fused:
        return LayerParts()
    from . import fused as kernels  # imports Triton

    norms = config.hidden_size <= kernels.MAX_NORM_SIZE
    return LayerParts(
        norm=kernels.FusedNorm if norms else HybridNorm,
        residual_norm=_residual_norm(config, kernels) if norms else HybridNorm,
        self_attention=SelfAttention if _keeps_attention(config) else kernels.FusedSelfAttention,
        mlp=kernels.FusedMLP if _is_swiglu(config) else MLP,
        grouped_mlp=kernels.FusedGroupedMLP if _is_swiglu(config) else HybridGroupedMLP,
        fuse_loss=kernels.fuse_loss,
        prepare=kernels.fuse_permutation,
    )


def _residual_norm(config, kernels) -> type:
    """The norm that hands the residual on, unless something takes a norm's output for its only one."""
    splits = "layernorm" in (config.recompute_modules or ()) or config.overlap_moe_expert_parallel_comm
    return kernels.FusedNorm if splits else kernels.FusedResidualNorm


def _keeps_attention(config) -> bool:
    """Whether Megatron's self-attention does something between projection and attention that ours does not."""
    return bool(
        config.rotary_interleaved
        or config.qk_layernorm
        or config.qk_l2_norm
        or config.attention_output_gate
        or config.no_rope_freq
        or config.test_mode
        or config.flash_decode
        or config.fine_grained_activation_offloading
        or config.num_query_groups < config.tensor_model_parallel_size
    )


def _is_swiglu(config) -> bool:
    """`--swiglu` with Megatron's own fusion on (`--no-bias-swiglu-fusion` turns ours off too)."""
    return bool(
        config.bias_activation_fusion
        and config.gated_linear_unit
        and config.activation_func is torch.nn.functional.silu
        and config.activation_func_clamp_value is None
        and not config.glu_linear_offset
        and not config.activation_func_fp8_input_store
        and not config.use_te_activation_func
    )
