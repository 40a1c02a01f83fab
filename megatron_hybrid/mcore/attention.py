"""Core attention through torch's scaled-dot-product attention: no s x s scores, no Transformer Engine."""

from __future__ import annotations

import contextlib
import functools
import math

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import divide
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from . import context_parallel
from .errors import UserError

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_HOPPER = (9, 0)
_CP_COMMUNICATION = (None, "p2p", "all_gather")  # p2p is Megatron's default; what is computed is the same


def refuse_unsupported(config) -> None:
    """Raise `UserError` for what this attention cannot do, with the reason."""
    reasons = {
        "sliding windows (--window-size)": config.window_size is not None,
        f"softmax type {config.softmax_type!r} (--softmax-type)": config.softmax_type != "vanilla",
    }
    for what, asked in reasons.items():
        if asked:
            raise UserError(f"{what}: torch's scaled-dot-product attention has no such thing; leave it out")
    kinds = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    if config.context_parallel_size > 1 and (others := set(kinds) - set(_CP_COMMUNICATION)):
        raise UserError(
            f"--cp-comm-type {' '.join(sorted(map(str, others)))}: this attention gathers keys and values; leave it out or "
            "give all_gather"
        )


class HybridDotProductAttention(MegatronModule):
    """softmax(scale * q k^T + mask) v for q, k, v of shape [sequence, batch, heads, head size].

    zeroed: multiply the result by 0. Only for showing that a training run without attention fails.

    The default causal mask costs nothing; an explicit one (``True`` hides) is used as given.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
        cp_comm_type=None, pg_collection=None, *, zeroed=False,
    ):  # fmt: skip
        super().__init__(config=config)
        refuse_unsupported(config)
        self.attn_mask_type, self.zeroed = attn_mask_type, zeroed
        self.cp_group = _context_parallel_group(pg_collection) if config.context_parallel_size > 1 else None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        head_size = divide(config.kv_channels * config.num_attention_heads, config.num_attention_heads)
        # --apply-query-key-layer-scaling divides here and multiplies before the softmax: no change in exact arithmetic
        self.scale = 1.0 / math.sqrt(head_size) if softmax_scale is None else softmax_scale

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):  # fmt: skip
        if packed_seq_params is not None:
            raise UserError("packed sequences need variable-length attention kernels; this attention has none")
        if attention_bias is not None:
            raise UserError("attention bias is not supported by this attention")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        with self._generator():
            if self.cp_group is None:
                mask = self._mask(mask_type, attention_mask, query.shape[0], key.shape[0], query.device)
                out = self._attend(query, key, value, mask)
            else:
                out = self._attend_over_ranks(query, key, value, mask_type, attention_mask)
        out = out.flatten(2)
        return out * 0 if self.zeroed else out

    def _attend(self, query, key, value, mask):
        """[sequence, batch, heads, head size]; mask: what `_mask` returns."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [batch, heads, sequence, head size]
        out = _sdpa(q, k, v, *mask, self.dropout if self.training else 0.0, self.scale)
        return out.permute(2, 0, 1, 3)

    def _attend_over_ranks(self, query, key, value, mask_type, given):
        """The same of a sequence that is split over context-parallel ranks."""
        if mask_type not in _CAUSAL or given is not None:
            raise UserError(
                f"attention mask type {mask_type.name}{'' if given is None else ' with a mask'} beside context parallelism: "
                "only causal attention without one is supported"
            )
        return context_parallel.attend(
            query, key, value, self.cp_group, lambda q, k, v: self._attend(q, k, v, _last_rows(len(q), len(k), q.device))
        )

    def _mask(self, mask_type, given, num_queries: int, num_keys: int, device):
        """(mask for torch, where True shows; whether torch's own causal mask is meant)."""
        causal = mask_type in _CAUSAL
        if causal and num_queries != num_keys:
            raise UserError(f"causal attention of {num_queries} queries over {num_keys} keys is not supported")
        if mask_type == AttnMaskType.no_mask or (given is None and causal):
            return None, causal
        if given is None:
            raise UserError(f"attention mask type {mask_type.name} needs a mask, found none")
        shown = ~given
        if mask_type == AttnMaskType.padding_causal:
            shown = shown & torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril()
        return shown, False

    def _generator(self):
        """Dropout differs between tensor-parallel ranks, which hold different heads."""
        if self.training and self.dropout > 0 and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()


def _context_parallel_group(pg_collection):
    if pg_collection is not None and getattr(pg_collection, "cp", None) is not None:
        return pg_collection.cp
    return parallel_state.get_context_parallel_group()


def _last_rows(num_queries: int, num_keys: int, device):
    """`_mask` of the last queries of a causal sequence."""
    if num_queries == num_keys:
        return None, True
    if device.type == "cuda":
        return causal_lower_right(num_queries, num_keys), False  # which torch's kernels know
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries), False


def _sdpa(q, k, v, mask, is_causal, dropout, scale):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip

    if q.device.type != "cuda":  # the backward of torch's CPU kernel takes seven times as long in bf16 as in FP32
        return attend(q.float(), k.float(), v.float()).to(q.dtype)
    with sdpa_kernel(_backends(q.device), set_priority=True):
        return attend(q, k, v)


@functools.lru_cache(maxsize=None)
def _backends(device) -> list[SDPBackend]:
    """cuDNN first where it is fastest, then whatever can run it."""
    rest = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if torch.cuda.get_device_capability(device) >= _HOPPER:
        return [SDPBackend.CUDNN_ATTENTION, *rest]
    return [rest[0], SDPBackend.CUDNN_ATTENTION, *rest[1:]]
