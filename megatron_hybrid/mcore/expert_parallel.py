"""Megatron's all-to-all among expert-parallel ranks, where rows stay as they come: experts' linears read them by a map.

Megatron's dispatcher sorts what has come by expert, and what leaves by rank, and both back in backward: four copies. Here
the first linear finds its rows where they came, and the second one's result leaves in their order. Sizes of experts'
groups stay on the device; the host gets all ranks' counts in one copy, and waits for it when the rows to be sent are on
their way to their places. Bits are the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from ..groups import Groups
from ..permutation import RowMap, RowOrder, permute, permute_probs, unpermute


class AcrossRanks(MoEAlltoAllTokenDispatcher):
    """Several expert-parallel ranks, one expert-tensor-parallel rank, no token dropped.

    where: of the rows that this rank sends, by expert. splits: rows that come from each rank, and that go to each.
    """

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        """Rows (t, H) by expert, their probabilities (t,)."""
        tokens = self.find_rows(hidden_states, routing_map)
        return permute(tokens, self.where), permute_probs(probs, self.where)

    def find_rows(self, hidden_states, routing_map) -> torch.Tensor:
        """Start to tell all ranks how many rows go where; tokens (N, H)."""
        self.hidden_shape, self.routing_map = hidden_states.shape, routing_map
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        self.where = RowMap.of(routing_map, tokens.shape[0] * self.config.moe_router_topk)
        own = self.where.sizes
        counts = own.new_empty(self.ep_size * self.num_experts)
        dist.all_gather_into_tensor(counts, own, group=self.ep_group)
        self.counts = counts.view(self.ep_size, self.num_experts)  # rows that each rank sends to each expert
        self.counts_of_host = self.counts.to("cpu", non_blocking=True)
        self.counted = torch.cuda.current_stream().record_event()
        return tokens

    def wait_for_counts(self) -> None:
        """What the host must know: `splits`, rows of each expert here."""
        self.counted.synchronize()
        counts, first = self.counts_of_host.numpy(), self.local_expert_indices[0]
        sent = counts.reshape(self.ep_size, self.ep_size, self.num_local_experts).sum(axis=2)
        self.splits = sent[:, self.ep_rank].tolist(), sent[self.ep_rank].tolist()
        self.sizes = counts[:, first : first + self.num_local_experts].sum(axis=0).tolist()

    def token_dispatch(self, rows, probs):
        """Rows (t, H) and probabilities (t,) of this rank -> (T, H) and (T,) for this rank's experts, as they come."""
        self.wait_for_counts()
        return Exchange.apply(self.ep_group, self.splits, rows, probs)

    def dispatch_postprocess(self, rows, probs):
        """Rows (T, H), where experts find theirs, probabilities (T,)."""
        order, groups = self.groups_here(rows.device)
        return rows, groups.between(copies=order, sums=order, weights=order), probs

    def groups_here(self, device) -> tuple[RowOrder | None, Groups]:
        """The order by expert of the rows that have come, None where all have one expert; the experts' groups."""
        num, (received, _) = self.num_local_experts, self.splits
        total, counts, self.counts = sum(received), self.counts, None
        order = RowOrder.by_expert(counts, self.local_expert_indices[0], num, total)
        groups = Groups(order.sizes, num, total, device, host=self.sizes)
        return (None if num == 1 else order), groups

    def combine_preprocess(self, rows):
        return rows

    def token_combine(self, rows):
        """Rows (T, H) of this rank's experts -> (t, H), back where they came from."""
        received, sent = self.splits
        return Exchange.apply(self.ep_group, (sent, received), rows)[0]

    def combine_postprocess(self, rows):
        """Of every token the sum of its rows (t, H)."""
        return unpermute(rows, self.where).view(self.hidden_shape)


class Exchange(torch.autograd.Function):
    """All-to-alls of rows of tensors, one after another, in backward of their gradients. splits: see `exchange`."""

    @staticmethod
    def forward(ctx, group, splits, *tensors):
        ctx.group, ctx.splits = group, splits
        return tuple(exchange(t, group, *splits) for t in tensors)

    @staticmethod
    def backward(ctx, *grads):
        received, sent = ctx.splits
        return None, None, *(exchange(grad, ctx.group, sent, received) for grad in grads)


def exchange(x: torch.Tensor, group, received, sent) -> torch.Tensor:
    """All-to-all of rows of x (t, ...) -> (T, ...); `received`, `sent`: how many from and to each rank, None for the
    same everywhere."""
    if group.size() == 1:
        return x
    rows = x.shape[0] if received is None else sum(received)
    out = x.new_empty(rows, *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), output_split_sizes=received, input_split_sizes=sent, group=group)
    return out
