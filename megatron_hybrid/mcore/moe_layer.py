"""Megatron's mixture of experts, with the sizes of experts' groups left on the device where nothing needs them on the host.

Its dispatchers copy them there to split rows among ranks, or to learn how many rows there are. With all experts on one
rank and no token dropped, every token has top-k rows, and rows sorted by expert are where they belong: what waits for the
host can be left out. Bits are the same.
"""

from __future__ import annotations

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from .experts import HybridGroupedMLP


class OneRank:
    """What an all-to-all dispatcher need not do on one rank: copy sizes to the host, sort the rows of each rank by expert."""

    def _maybe_dtoh_and_synchronize(self, point, tokens_per_expert=None):
        return tokens_per_expert

    def dispatch_postprocess(self, global_input_tokens, global_probs):
        """Rows sorted by expert, rows of each expert (E,) on the device, probabilities."""
        sizes, self.tokens_per_expert = self.tokens_per_expert, None
        return global_input_tokens, sizes, global_probs

    def combine_preprocess(self, hidden_states):
        return hidden_states


class OneRankAllToAll(OneRank, MoEAlltoAllTokenDispatcher):
    """One expert-parallel rank, one expert-tensor-parallel rank."""


class OneRankAllGather(MoEAllGatherTokenDispatcher):
    """One expert-parallel rank; expert-tensor-parallel ones bring their tokens together, of which each has top-k rows."""

    def dispatch_postprocess(self, hidden_states, probs):
        """Rows sorted by expert, rows of each expert (E,) on the device, probabilities."""
        self.hidden_shape_before_permute = hidden_states.shape
        self.local_map, self.routing_map = self.routing_map, None
        rows, self.local_probs, self.reversed_local_input_permutation_mapping, *_ = permute(
            hidden_states, self.local_map, probs=probs, num_out_tokens=hidden_states.shape[0] * self.router_topk,
            fused=self.config.moe_permute_fusion,
        )  # fmt: skip
        return rows, self.local_map.sum(dim=0), self.local_probs


class HybridMoELayer(MoELayer):
    """Megatron's layer; see above."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        dispatcher, config = self.token_dispatcher, self.config
        takes_sizes = isinstance(self.experts, HybridGroupedMLP)
        if takes_sizes and dispatcher.ep_size == 1 and config.moe_expert_capacity_factor is None:
            kinds = {MoEAllGatherTokenDispatcher: OneRankAllGather}
            if dispatcher.tp_size == 1:
                kinds[MoEAlltoAllTokenDispatcher] = OneRankAllToAll
            dispatcher.__class__ = kinds.get(type(dispatcher), type(dispatcher))
