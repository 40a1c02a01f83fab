"""``--moe-permute-fusion`` without Transformer Engine: tokens to experts and back in our kernels, or in torch operations.

Megatron takes the five functions from Transformer Engine and refuses the flag where they are missing. What they are
given and give back follows how Megatron calls them; a map of rows stands where Transformer Engine has a tensor. The
others that it takes from there (router, padding) stay out.
"""

from __future__ import annotations

from megatron_hybrid.permutation import RowMap, permute, permute_probs, sort_chunks, unpermute

from .framework import Change, Patch, value


def fused_permute(tokens, routing_map, num_out_tokens):
    """(rows (T, H), map); tokens (N, H), routing_map (N, E), num_out_tokens: T."""
    where = RowMap.of(routing_map, int(num_out_tokens))
    return permute(tokens, where), where


def fused_permute_with_probs(tokens, probs, routing_map, num_out_tokens):
    """(rows (T, H), their probabilities (T,), map); probs (N, E)."""
    rows, where = fused_permute(tokens, routing_map, num_out_tokens)
    return rows, permute_probs(probs, where), where


def fused_unpermute(rows, where, merging_probs=None, restore_shape=None, pad_offsets=None):
    """Tokens (N, H) of rows (T, H), each times its probability in merging_probs (N, E) where there are any."""
    assert pad_offsets is None  # of a permutation that pads, which is not here
    return unpermute(rows, where, merging_probs)


def fused_sort_chunks_by_index(x, split_sizes, sorted_index):
    """Chunks of rows of x of these sizes, in another order."""
    return sort_chunks(x, split_sizes, sorted_index)


def fused_sort_chunks_by_index_with_probs(x, probs, split_sizes, sorted_index):
    """Chunks of x and of probs in another order."""
    return sort_chunks(x, split_sizes, sorted_index), sort_chunks(probs, split_sizes, sorted_index)


_UTILS = "megatron.core.transformer.moe.moe_utils"
PATCH = Patch(
    name="moe_permutation",
    changes=(
        Change(f"{_UTILS}:HAVE_TE", value(True)),  # the functions that stay None are still refused by name
        Change(f"{_UTILS}:fused_permute", value(fused_permute)),
        Change(f"{_UTILS}:fused_permute_with_probs", value(fused_permute_with_probs)),
        Change(f"{_UTILS}:fused_unpermute", value(fused_unpermute)),
        Change(f"{_UTILS}:fused_sort_chunks_by_index", value(fused_sort_chunks_by_index)),
        Change(f"{_UTILS}:fused_sort_chunks_by_index_with_probs", value(fused_sort_chunks_by_index_with_probs)),
    ),
    versions=">=0.19.2,<0.20",
    why="--moe-permute-fusion is refused without Transformer Engine, and Megatron's own permutation takes as long as experts' GEMMs",
    remove_when="Megatron has a fused permutation of its own",
)
