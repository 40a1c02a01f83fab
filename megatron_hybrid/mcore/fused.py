"""Parts of a layer on fused kernels. The kernels: `megatron_hybrid.ops_triton`; who uses them: parts.py."""

from __future__ import annotations

import types

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP

from .. import patches
from ..gated_cast import shows_output, swiglu_for, weighted_swiglu_for
from ..ops_triton.cross_entropy import cross_entropy
from ..ops_triton.norm import MAX_SIZE as MAX_NORM_SIZE
from ..ops_triton.norm import norm
from ..ops_triton.rotary import split_rotate
from ..ops_triton.swiglu import weighted_swiglu
from .experts import HybridGroupedMLP
from .norm import HybridNorm

__all__ = [
    "MAX_NORM_SIZE",
    "FusedGroupedMLP",
    "FusedMLP",
    "FusedNorm",
    "FusedResidualNorm",
    "FusedSelfAttention",
    "fuse_loss",
    "fuse_permutation",
]


class FusedNorm(HybridNorm):
    """`HybridNorm` in one kernel each way."""

    def forward(self, x):
        return self.output(self._norm(x, residual=False))

    def _norm(self, x, *, residual: bool):
        return norm(
            x, self.weight, self.bias, eps=self.eps, centered=self.zero_centered_gamma, dtype=self.weight.dtype,
            residual=residual,
        )  # fmt: skip


class FusedResidualNorm(FusedNorm):
    """Gives (norm(x), x): Megatron's layer takes the second for its residual, and the sum of both gradients is made
    inside the norm's backward."""

    def forward(self, x):
        y, residual = self._norm(x, residual=True)
        return self.output(y), residual


class FusedMLP(MLP):
    """Megatron's gated MLP, SwiGLU in one kernel each way, which also casts for the next linear where it can."""

    def forward(self, hidden_states, per_token_scale=None, **others):
        if per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **others)
        y, bias = self.linear_fc1(hidden_states)
        fc2 = self.linear_fc2
        shown = shows_output(self.linear_fc1)
        return fc2(swiglu_for(y, bias, fc2.hq, fc2.weight, training=fc2.training, shown=shown))


class FusedGroupedMLP(HybridGroupedMLP):
    """Experts whose SwiGLU times the routing weight is one kernel each way, which casts for their linears if it can."""

    def _activate(self, hidden, probs, where=None):
        return weighted_swiglu(hidden, _weights(probs, where), where)

    def _activate_for_fc2(self, hidden, probs, where, groups):
        """Cast as it is computed, and its gradient, where the linears around it take that."""
        forth = self.linear_fc2.call_for_computed(hidden, groups.between(sums=groups.sums))
        shown = shows_output(self.linear_fc1)
        return weighted_swiglu_for(hidden, _weights(probs, where), where, forth, shown=shown)


def _weights(probs, where):
    """Of rows (T,), or with a map of these (N, E)."""
    return probs.reshape(-1) if where is None else probs


def fuse_permutation(config) -> None:
    """`--moe-permute-fusion` on, with our kernels."""
    patches.apply_all(["moe_permutation"])
    config.moe_permute_fusion = True


class FusedSelfAttention(SelfAttention):
    """Megatron's self-attention in training: projection, split and rotation in one kernel, attention, projection.

    Everything else (inference, packed sequences, no rotary embedding) is Megatron's own forward.
    """

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None, **others):
        if rotary_pos_emb is None or isinstance(rotary_pos_emb, tuple) or any(v is not None for v in others.values()):
            return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **others)
        mixed, _ = self.linear_qkv(hidden_states)
        query, key, value = split_rotate(
            mixed, rotary_pos_emb, groups=self.num_query_groups_per_partition,
            head_size=self.hidden_size_per_attention_head, scale=self._yarn_concentration_factor,
        )  # fmt: skip
        recompute = self.checkpoint_core_attention and self.training
        attend = self._checkpointed_attention_forward if recompute else self.core_attention
        return self.linear_proj(attend(query, key, value, attention_mask, attn_mask_type=self.attn_mask_type))


def _language_model_loss(self, labels, logits):
    """In place of the model's method: labels (B, S), logits (S, B, V / ranks) -> loss (B, S), FP32."""
    loss = cross_entropy(logits, labels.transpose(0, 1).contiguous(), self.tp_group)
    return loss.transpose(0, 1).contiguous()


def fuse_loss(model: list) -> list:
    """Hook before the model is wrapped: its loss from our kernel, which also keeps no second copy of the logits."""
    for chunk in model:
        if getattr(chunk, "post_process", False):
            chunk.compute_language_model_loss = types.MethodType(_language_model_loss, chunk)
    return model
