"""Tokens that travel to their experts quantized: payload and scales in the all-to-all, cast before it.

For input formats whose scales do not span rows, a row's bytes are the same before and after the dispatch. Columns are
made from the rows where the experts are, so the recipe must derive them (``columnwise_source: rowwise_dequantized``).
Gradients travel back in high precision. Random bits are drawn for the row's source, its token and which of the token's
experts it goes to, so they depend neither on where experts are nor on how other tokens are routed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from ..grouped_at_once import why_not
from ..linear import LOCAL, LinearCall
from ..permutation import RowMap, RowOrder, chunk_sources, gather_bytes, gather_rows, inverse, permute_probs
from ..plan import INPUT, GemmPlan, PlanError
from ..recipe import QUANTIZED
from ..storage import QuantizedStorage
from ..tensor import HybridTensor, payload
from .errors import UserError
from .expert_parallel import AcrossRanks, exchange
from .experts import HybridGroupedMLP
from .moe_layer import OneRank


def refuse_unsupported(config) -> None:
    """Raise `UserError` for what a quantized dispatch cannot do."""
    reasons = {
        "the recipe says `dispatch: quantized`, but there are no experts": config.num_moe_experts is None,
        "`dispatch: quantized` needs --moe-grouped-gemm": not config.moe_grouped_gemm,
        "`dispatch: quantized` needs --moe-token-dispatcher-type alltoall": config.moe_token_dispatcher_type != "alltoall",
        "`dispatch: quantized` beside --moe-shared-expert-overlap is not supported": config.moe_shared_expert_overlap,
        "`dispatch: quantized` beside --moe-apply-probs-on-input is not supported": config.moe_apply_probs_on_input,
        "`dispatch: quantized` needs --expert-tensor-parallel-size 1": (config.expert_tensor_parallel_size or 1) > 1,
    }
    for why, asked in reasons.items():
        if asked:
            raise UserError(f"{why}; change it, or the recipe")


def adopt(model: list) -> list:
    """Hook before the model is wrapped: the dispatchers of its mixtures of experts become ours.

    Raises `PlanError` naming the module whose input cannot be quantized before it is dispatched.
    """
    for chunk in model:
        for layer in chunk.modules():
            if isinstance(layer, MoELayer) and isinstance(layer.experts, HybridGroupedMLP):
                _class_for(layer.token_dispatcher).adopt(
                    layer.token_dispatcher, layer.experts.linear_fc1, layer.attn_tp_group
                )
    return model


def _class_for(dispatcher) -> type[QuantizedDispatcher]:
    ours = {OneRank: QuantizedOnOneRank, AcrossRanks: QuantizedAcrossRanks}
    return next((cls for kind, cls in ours.items() if isinstance(dispatcher, kind)), QuantizedDispatcher)


def check(plans: list[GemmPlan], shape: tuple[int, int]) -> None:
    """Raise `PlanError` unless one cast before the dispatch gives what every expert's own would."""
    first = plans[0]
    quantizer, why = first.quantizers[INPUT], why_not(plans, shape)
    if why is None and not quantizer.rowwise.is_quantized:
        why = f"its input is {quantizer.rowwise} in fprop"
    elif why is None and not quantizer.derives_columnwise:
        why = "its input's columns are cast from the original; give `columnwise_source: {input: rowwise_dequantized}`"
    if why is not None:
        raise PlanError(f"{first.label}: the recipe says `dispatch: quantized`, but {why}")


class QuantizedDispatcher(MoEAlltoAllTokenDispatcher):
    """linear: the experts' first linear, whose input the tokens are. attention_tp: the tensor-parallel ranks around the
    layer, which split a replica's tokens. sent: bytes handed to the all-to-all so far, and what they would have been in
    high precision."""

    @classmethod
    def adopt(cls, dispatcher: MoEAlltoAllTokenDispatcher, linear, attention_tp) -> None:
        shape = tuple(linear.weight_of(0).shape)
        for step in (None, *linear.hq[0].recipe.change_steps()):
            check([r.build(r.recipe, linear.weight_device, step) for r in linear.hq], shape)
        dispatcher.__class__ = cls
        dispatcher.__dict__["linear"] = linear
        dispatcher.attention_tp = attention_tp
        dispatcher.sent = Counter()

    def token_dispatch(self, permutated_local_input_tokens, permuted_probs):
        """Tokens (t, H) and probabilities (t,) of this rank -> `HybridTensor` (T, H) and (T,) for this rank's experts."""
        tokens = permutated_local_input_tokens
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_ep_alltoall", self.tokens_per_expert)
        splits = self.output_splits, self.input_splits
        call = self._call(tokens)
        travelled = _Dispatch.apply(tokens, call, self.ep_group, splits, self.sent)
        return travelled, all_to_all(self.ep_group, permuted_probs, *splits)

    def _call(self, tokens: torch.Tensor) -> LinearCall:
        """The call whose input is cast here; stochastic rounding draws for the rows' sources."""
        hq, device = self.linear.hq[0], self.linear.weight_device
        call = hq.call(device, LOCAL, training=self.linear.training)
        if not call.plan.quantizers[INPUT].rowwise.sr:
            return call
        rng = hq.keys.rng_of_rows(hq.role, INPUT, device, self.source_rows(self._num_sent(tokens)))
        return replace(call, rng=call.rng | {INPUT: rng})

    def source_rows(self, rows: int) -> torch.Tensor:
        """int64 (rows,): where each row that this rank sends comes from, as token * top-k + slot.

        Tokens are those of a microbatch of all replicas, one after another. A slot counts the experts of lower number
        that its token goes to.
        """
        chosen, (token, expert) = self.routing_map, self._sent(rows)
        slot = (chosen.cumsum(dim=1) - chosen.long())[token, expert]
        num_tokens, keys = chosen.shape[0], self.linear.hq[0].keys
        part, parts = (self.attention_tp.rank(), self.attention_tp.size()) if self.config.sequence_parallel else (0, 1)
        first = (keys.replica * parts + part) * num_tokens
        return (first + token) * self.config.moe_router_topk + slot

    def _num_sent(self, tokens: torch.Tensor) -> int:
        """Rows that this rank sends, of what `token_dispatch` is given."""
        return tokens.shape[0]

    def _sent(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 (rows,) each: token and expert of every row that this rank sends."""
        token = self.reversed_local_input_permutation_mapping
        if self.config.moe_permute_fusion:
            token = token.tokens
        row = torch.arange(rows, device=token.device)
        if self.drop_and_pad:
            return token, row // self.capacity
        return token, torch.searchsorted(self.routing_map.sum(dim=0).cumsum(dim=0), row, right=True)

    def dispatch_postprocess(self, global_input_tokens, global_probs):
        """Sorted by expert: tokens, rows of each expert, probabilities."""
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        tokens, probs = global_input_tokens, global_probs
        if self.num_local_experts > 1:
            order = self._order(tokens.shape[0], probs.device)
            tokens, probs = _Sort.apply(tokens, order), probs[order]
        sizes = self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert = None
        return tokens, sizes, probs

    def _order(self, rows: int, device) -> torch.Tensor:
        """int32 (T,): which received row stands where, sorted by expert and then by the rank it came from."""
        sizes = self.num_global_tokens_per_local_expert.ravel().to(device)
        return chunk_sources(sizes, self.sort_input_by_local_experts, rows)


class QuantizedOnOneRank(OneRank, QuantizedDispatcher):
    """Nothing travels, but casts and random bits are those of other numbers of ranks."""


class QuantizedAcrossRanks(AcrossRanks, QuantizedDispatcher):
    """A token is cast once for all of its experts, unless its copies draw random bits of their own; what came is taken
    apart and sorted by expert in one."""

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        """Tokens (N, H), probabilities (t,) of their rows."""
        tokens = self.find_rows(hidden_states, routing_map)
        return tokens, permute_probs(probs, self.where)

    def token_dispatch(self, tokens, probs):
        """Tokens (N, H) and probabilities (t,) -> `HybridTensor` (T, H) by expert, probabilities (T,) as they come."""
        return _DispatchTokens.apply(tokens, probs, self._call(tokens), self)

    def dispatch_postprocess(self, rows, probs):
        """Rows (T, H) by expert, where their probabilities are and where they leave, probabilities (T,)."""
        order, groups, self.order, self.groups = self.order, self.groups, None, None
        return rows, groups.between(sums=order, weights=order), probs

    def _sent(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        choice, experts = self.where.choice.long(), self.where.num_experts
        return choice // experts, choice % experts

    def _num_sent(self, tokens: torch.Tensor) -> int:
        return self.where.num_rows

    def rows_to_send(self, tokens: torch.Tensor, call: LinearCall) -> tuple[torch.Tensor, QuantizedStorage]:
        """`pack`ed rows (t, bytes), and a payload like theirs."""
        if call.plan.quantizers[INPUT].rowwise.sr:
            row, _ = call.quantize(INPUT, self.where.expand(tokens), rowwise=True)
            return pack(row), row
        row, _ = call.quantize(INPUT, tokens, rowwise=True)
        return pack(row, self.where), row

    def received(self, packed: torch.Tensor, like: QuantizedStorage) -> tuple[QuantizedStorage, RowOrder | None]:
        """The payload (T, H) by expert of `pack`ed rows as they came, and their order."""
        self.order, self.groups = self.groups_here(packed.device)
        return unpack(packed, like, self.order), self.order


def pack(s: QuantizedStorage, where: RowMap | None = None) -> torch.Tensor:
    """A rowwise payload's rows, codes and scales side by side: uint8 (M, bytes a row). where: of their copies instead."""
    parts = [t.contiguous().view(torch.uint8) for t in s.buffers().values()]
    if where is None:
        return torch.cat(parts, dim=1)
    widths = [part.shape[1] for part in parts]
    packed = parts[0].new_empty(where.num_rows, sum(widths))
    gather_bytes(parts, packed.split(widths, dim=1), where)
    return packed


def unpack(packed: torch.Tensor, like: QuantizedStorage, order: RowOrder | None = None) -> QuantizedStorage:
    """The payload of packed rows, in this order; `like` gives format, columns and layout."""
    buffers = like.buffers()
    widths = [t.shape[1] * t.element_size() for t in buffers.values()]
    parts = packed.split(widths, dim=1)
    if order is None:
        found = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    else:
        found = [packed.new_empty(packed.shape[0], width) for width in widths]
        gather_bytes(parts, found, order)
    made = {name: bytes_.view(t.dtype) for (name, t), bytes_ in zip(buffers.items(), found)}
    return like.changed(shape=(packed.shape[0], like.shape[1]), **made)


class _Dispatch(torch.autograd.Function):
    """Cast, then all-to-all of the rows' bytes; the gradient travels back as it is."""

    @staticmethod
    def forward(ctx, x, call: LinearCall, group, splits, sent: Counter):
        ctx.group, ctx.splits = group, splits
        row, _ = call.quantize(INPUT, x, rowwise=True)
        packed = pack(row)
        sent[QUANTIZED] += packed.nbytes
        sent["high_precision"] += x.nbytes
        received = exchange(packed, group, *splits)
        row = row if received is packed else unpack(received, row)
        return HybridTensor.from_storages(row, None, row.shape, x.dtype, call.plan.quantizers[INPUT])

    @staticmethod
    def backward(ctx, dy):
        received, sent = ctx.splits
        return exchange(dy.contiguous(), ctx.group, sent, received), None, None, None, None


class _DispatchTokens(torch.autograd.Function):
    """Cast tokens, and all-to-all of their rows' bytes and probabilities; gradients travel back as they are."""

    @staticmethod
    def forward(ctx, tokens, probs, call: LinearCall, to: QuantizedAcrossRanks):
        packed, row = to.rows_to_send(tokens, call)
        to.sent[QUANTIZED] += packed.nbytes
        to.sent["high_precision"] += packed.shape[0] * tokens.shape[1] * tokens.element_size()
        to.wait_for_counts()
        came, probs = (exchange(t, to.ep_group, *to.splits) for t in (packed, probs))
        row, order = to.received(came, row)
        ctx.where, ctx.order, ctx.group, ctx.splits = to.where, order, to.ep_group, to.splits
        return HybridTensor.from_storages(row, None, row.shape, tokens.dtype, call.plan.quantizers[INPUT]), probs

    @staticmethod
    def backward(ctx, dx, dprobs):
        received, sent = ctx.splits
        dx = dx if ctx.order is None else ctx.order.sum(dx)
        dx, dprobs = (exchange(t, ctx.group, sent, received) for t in (dx, dprobs))
        return ctx.where.sum(dx), dprobs, None, None


class _Sort(torch.autograd.Function):
    """Rows of a quantized tensor in another order."""

    @staticmethod
    def forward(ctx, x: HybridTensor, order):
        ctx.save_for_backward(order)
        row = payload(x, "rowwise")
        row = replace(row, **{name: gather_rows(t, order) for name, t in row.buffers().items()})
        return HybridTensor.from_storages(row, None, x.shape, x.dtype, x.quantizer)

    @staticmethod
    def backward(ctx, dy):
        (order,) = ctx.saved_tensors
        return gather_rows(dy, inverse(order)), None
