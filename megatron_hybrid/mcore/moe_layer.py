"""Megatron's mixture of experts, with the sizes of experts' groups left on the device where nothing needs them on the host.

Its dispatchers copy them there to split rows among ranks, or to learn how many rows there are. With all experts on one
rank and no token dropped, every token has top-k rows, and rows sorted by expert are where they belong: what waits for the
host can be left out. Bits are the same. With `--moe-permute-fusion` the experts' linears find the tokens themselves.
"""

from __future__ import annotations

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from ..groups import Groups
from ..permutation import RowMap
from .expert_parallel import AcrossRanks
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


class TokensStay(OneRank):
    """Tokens are not copied to experts' rows before the experts, nor what these give back summed after them: linears do
    that, which cast a token once for all of its experts. `Groups` tell them which rows are which tokens'."""

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        """Tokens (N, H) and their probabilities (N, E)."""
        self.hidden_shape = hidden_states.shape
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        self.groups = self._groups(tokens, routing_map)
        return tokens, probs

    def _groups(self, tokens, routing_map) -> Groups:
        """Where the rows are whose tokens these are."""
        rows = tokens.shape[0] * self.config.moe_router_topk
        where = RowMap.of(routing_map, rows)
        groups = Groups(where.sizes, self.num_local_experts, rows, tokens.device)
        return groups.between(copies=where, sums=where, weights=where)

    def dispatch_postprocess(self, tokens, probs):
        """Tokens (N, H), where their rows are, probabilities (N, E)."""
        groups, self.groups = self.groups, None
        return tokens, groups, probs

    def combine_postprocess(self, tokens):
        return tokens.view(self.hidden_shape)


class TokensStayAllToAll(TokensStay, MoEAlltoAllTokenDispatcher):
    """One expert-parallel rank, one expert-tensor-parallel rank."""

    def token_dispatch(self, tokens, probs):
        return tokens, probs

    def token_combine(self, tokens):
        return tokens


class TokensStayAllGather(TokensStay, MoEAllGatherTokenDispatcher):
    """One expert-parallel rank; expert-tensor-parallel ones have brought their tokens together."""

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        return MoEAllGatherTokenDispatcher.dispatch_preprocess(self, hidden_states, routing_map, probs)

    def dispatch_postprocess(self, tokens, probs):
        self.local_probs = probs  # whose dtype ranks' parts are summed in
        groups = self._groups(tokens, self.routing_map)
        self.routing_map = None
        return tokens, groups, probs


class HybridMoELayer(MoELayer):
    """Megatron's layer; see above."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        dispatcher = self.token_dispatcher
        takes_sizes = isinstance(self.experts, HybridGroupedMLP)
        if takes_sizes and self.config.moe_expert_capacity_factor is None:
            choose = self._on_one_rank if dispatcher.ep_size == 1 else self._across_ranks
            dispatcher.__class__ = choose(dispatcher)

    def _linears_take_maps(self) -> bool:
        """Whether nothing between tokens and experts needs a row where its expert is."""
        config = self.config
        return config.moe_permute_fusion and not (
            config.add_bias_linear or config.moe_apply_probs_on_input or config.moe_shared_expert_overlap
        )

    def _across_ranks(self, dispatcher) -> type:
        """The class to take for a dispatcher whose experts are on several ranks."""
        config = self.config
        others = config.moe_router_padding_for_quantization or config.overlap_moe_expert_parallel_comm
        found = type(dispatcher) is MoEAlltoAllTokenDispatcher and dispatcher.tp_size == 1
        return AcrossRanks if found and not others and self._linears_take_maps() else type(dispatcher)

    def _on_one_rank(self, dispatcher) -> type:
        """The class to take for a dispatcher where every expert is here."""
        stay = self._linears_take_maps()
        kinds = {MoEAllGatherTokenDispatcher: TokensStayAllGather if stay else OneRankAllGather}
        if dispatcher.tp_size == 1:
            kinds[MoEAlltoAllTokenDispatcher] = TokensStayAllToAll if stay else OneRankAllToAll
        return kinds.get(type(dispatcher), type(dispatcher))
