"""Tokens to experts and back against Megatron's own functions: copies bit for bit, sums and gradients in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid import patches
from megatron_hybrid.permutation import (
    RowMap,
    RowOrder,
    chunk_sources,
    gather_bytes,
    gather_rows,
    permute,
    permute_probs,
    sort_chunks,
    unpermute,
)

with patches.quiet_missing_te_warnings():
    from megatron.core.transformer.moe import moe_utils

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])
SHAPES = [(37, 8, 2), (37, 8, 1), (64, 32, 8), (5, 3, 3), (1, 4, 2), (0, 4, 2)]  # tokens, experts, experts a token
W = 24


@pytest.fixture(autouse=True)
def patched():
    before = patches.PATCHES["moe_permutation"].is_applied
    patches.apply_all(["moe_permutation"])
    yield
    if not before:
        patches.revert_all(["moe_permutation"])


def routed(tokens, experts, most, device, *, seed=1) -> torch.Tensor:
    """bool (tokens, experts); the last expert gets nothing where it may."""
    g, chosen = torch.Generator().manual_seed(seed), torch.zeros(tokens, experts, dtype=torch.bool)
    for t in range(tokens):
        chosen[t, torch.randperm(experts - (most < experts), generator=g)[:most]] = True
    return chosen.to(device)


def randn(*shape, device, seed, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def megatrons(tokens, probs, mapping, dy, merging, *, fused: bool):
    """There and back by Megatron's functions: rows, their probabilities, tokens, gradients of tokens and probabilities."""
    x, p, merge = (None if t is None else t.detach().clone().requires_grad_() for t in (tokens, probs, merging))
    rows, row_probs, where, *_ = moe_utils.permute(x, mapping, probs=p, num_out_tokens=int(mapping.sum()), fused=fused)
    seen = rows if p is None else rows * row_probs.to(rows.dtype).unsqueeze(-1)
    y = moe_utils.unpermute(seen, where, x.shape, probs=merge, routing_map=mapping, fused=fused)
    y.backward(dy)
    found = [rows, row_probs, y, x.grad, None if p is None else p.grad, None if merge is None else merge.grad]
    return [None if t is None else t.detach() for t in found]


@DEVICES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("merges", [False, True])
def test_gradients_are_those_of_megatrons_functions(shape, with_probs, merges, device):
    (n, e, k), mapping = shape, routed(*shape, device)
    x, dy = (randn(n, W, device=device, seed=s) for s in (1, 2))
    probs, merging = (randn(n, e, device=device, seed=s) if on else None for s, on in ((3, with_probs), (4, merges)))
    expected = megatrons(x, probs, mapping, dy, merging, fused=False)
    found = megatrons(x, probs, mapping, dy, merging, fused=True)
    for i, (f, t) in enumerate(zip(found, expected, strict=True)):
        assert (f is None) == (t is None), i
        if i < 2 and f is not None:
            assert torch.equal(f, t), i
        elif f is not None:
            assert f.shape == t.shape and f.dtype == t.dtype
            torch.testing.assert_close(f, t, rtol=1e-13 * k, atol=1e-13 * k, msg=str(i))


@DEVICES
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_are_bit_for_bit_and_sums_are_rounded_once(shape, device):
    (n, _, k), mapping = shape, routed(*shape, device)
    x, dy = (randn(n, W, device=device, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    expected, found = (megatrons(x, None, mapping, dy, None, fused=fused) for fused in (False, True))
    assert torch.equal(found[0], expected[0])
    where = RowMap.of(mapping, n * k)
    y = randn(n * k, W, device=device, seed=5, dtype=torch.bfloat16)
    exact = torch.zeros(n, W, dtype=torch.float64, device=device).index_add_(0, where.tokens, y.double())
    got = unpermute(y, where)
    size = torch.zeros(n, W, dtype=torch.float64, device=device).index_add_(0, where.tokens, y.double().abs())
    assert ((got.double() - exact).abs() <= 2.0**-8 * exact.abs() + k * 2.0**-24 * size).all()  # one rounding
    x.requires_grad_()
    permute(x, where).backward(y)
    assert torch.equal(x.grad, got)  # its backward is the same sum
    if k == 1:
        assert torch.equal(got, y[where.rows.long()])


@DEVICES
def test_results_repeat(device):
    mapping = routed(300, 16, 8, device)
    y = randn(2400, 256, device=device, seed=1, dtype=torch.bfloat16)
    first, second = (unpermute(y, RowMap.of(mapping, 2400)) for _ in range(2))
    assert torch.equal(first, second)


@DEVICES
def test_dropped_tokens_and_rows_that_nothing_chose(device):
    """A token may go nowhere, and there may be room for more rows than were chosen: those are zeros, and add nothing."""
    mapping = routed(30, 6, 2, device)
    mapping[3] = False
    mapping[7, :] = False
    chosen = int(mapping.sum())
    where = RowMap.of(mapping, chosen + 5)
    assert torch.equal(where.sizes, mapping.sum(0).int())
    assert where.num_tokens == 30 and (where.choice[chosen:] == -1).all() and (where.choice[:chosen] >= 0).all()
    x = randn(30, W, device=device, seed=1).requires_grad_()
    rows = permute(x, where)
    assert not rows[chosen:].any()
    back = unpermute(rows, where)
    assert not back[3].any() and not back[7].any() and torch.equal(back[0], 2 * x[0].detach())
    back.sum().backward()
    assert torch.equal(x.grad, mapping.sum(1, keepdim=True).double().expand_as(x))


@DEVICES
@pytest.mark.parametrize("capacity", [3, 8])
def test_tokens_dropped_and_padded_to_a_capacity(capacity, device):
    """Every expert has as many rows; a token may go to more experts than it wanted."""
    g, mapping = torch.Generator().manual_seed(1), torch.zeros(20, 4, dtype=torch.bool)
    for expert in range(4):
        mapping[torch.randperm(20, generator=g)[:capacity], expert] = True
    mapping, n = mapping.to(device), 4 * capacity
    x, probs = randn(20, W, device=device, seed=1), randn(20, 4, device=device, seed=2)
    there = [moe_utils.permute(x, mapping, probs, n, drop_and_pad=True, fused=fused) for fused in (False, True)]
    assert torch.equal(there[0][0], there[1][0]) and torch.equal(there[0][1], there[1][1])
    back = [
        moe_utils.unpermute(rows, where, x.shape, routing_map=mapping, drop_and_pad=True, fused=fused)
        for fused, (rows, _, where, *_) in enumerate(there)
    ]
    torch.testing.assert_close(back[0], back[1], rtol=1e-14, atol=1e-14)


@DEVICES
@pytest.mark.parametrize("with_probs", [False, True])
def test_chunks_in_another_order(with_probs, device):
    sizes, order = torch.tensor([3, 0, 5, 1, 0, 2], device=device), torch.tensor([2, 5, 0, 1, 4, 3], device=device)
    x, dy = (randn(11, W, device=device, seed=s) for s in (1, 2))
    probs = randn(11, device=device, seed=3) if with_probs else None
    results = []
    for fused in (False, True):
        leaf, p = x.clone().requires_grad_(), None if probs is None else probs.clone().requires_grad_()
        y, moved = moe_utils.sort_chunks_by_idxs(leaf, sizes, order, probs=p, fused=fused)
        (y * dy).sum().backward(retain_graph=True)
        if moved is not None:
            (moved * dy[:, 0]).sum().backward()
        results.append([y, leaf.grad] + ([] if moved is None else [moved, p.grad]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert sort_chunks(x[:0], sizes * 0, order).shape == (0, W)
    assert chunk_sources(sizes, order, 11).tolist() == [3, 4, 5, 6, 7, 9, 10, 0, 1, 2, 8]


@DEVICES
@pytest.mark.parametrize("counts", [[[3, 0, 5], [1, 0, 2]], [[0, 0, 0], [0, 4, 0]], [[0, 0, 0]], [[2, 1, 0]] * 5])
@pytest.mark.parametrize("first", [0, 2])
def test_rows_by_expert_that_came_by_rank(counts, first, device):
    """The order of Megatron's sort of chunks, there and back, of any rows; and the experts' sizes."""
    here = torch.tensor(counts)
    everyone = torch.nn.functional.pad(here, (first, 4), value=9).to(device)
    (ranks, num), rows = here.shape, int(here.sum())
    order = RowOrder.by_expert(everyone, first, num, rows)
    assert torch.equal(order.sizes.cpu(), here.sum(0)) and order.num_tokens == order.num_rows == rows
    x, dy = (randn(rows, W, device=device, seed=s) for s in (1, 2))
    weights = randn(rows, device=device, seed=3)
    chunks = torch.arange(ranks * num).view(ranks, num).T.reshape(-1)
    leaves, p = [x.clone().requires_grad_() for _ in range(3)], weights.clone().requires_grad_()
    expected, by_weight = moe_utils.sort_chunks_by_idxs(leaves[0], here.reshape(-1), chunks, probs=p)
    (expected * dy).sum().backward(retain_graph=True)
    permute(leaves[1], order).backward(dy)
    unpermute(permute(leaves[2], order), order).backward(dy)
    assert torch.equal(permute(x, order), expected) and torch.equal(leaves[1].grad, leaves[0].grad)
    assert torch.equal(unpermute(expected, order), x) and torch.equal(leaves[2].grad, dy)
    mine = weights.clone().requires_grad_()
    picked = permute_probs(mine, order)
    assert torch.equal(picked, by_weight)
    for grown in (picked, by_weight):
        (grown * dy[:, 0]).sum().backward()
    assert torch.equal(mine.grad, p.grad)
    codes = torch.arange(rows * 5, device=device).view(rows, 5).to(torch.uint8)
    for found in order.expand_both(codes, codes[:, 1:3]):
        assert torch.equal(order.sum(found), codes if found.shape[1] == 5 else codes[:, 1:3])
    assert torch.equal(unpermute(expected, order, weights.view(-1, 1)), x * by_weight[order.rows.long()].unsqueeze(1))


@DEVICES
@pytest.mark.parametrize("widths", [(2048, 4), (96, 8, 4), (37, 3), (5,), (64, 128)])
def test_rows_of_bytes_side_by_side_and_apart(widths, device):
    """Packed in the order of experts and taken apart in another, as codes and scales travel."""
    mapping = routed(30, 6, 2, device)
    where, g = RowMap.of(mapping, 60), torch.Generator().manual_seed(1)
    parts = [torch.randint(0, 256, (30, w), generator=g, dtype=torch.uint8).to(device) for w in widths]
    packed = torch.zeros(60, sum(widths), dtype=torch.uint8, device=device)
    gather_bytes(parts, packed.split(widths, 1), where)
    assert torch.equal(packed, torch.cat(parts, 1)[where.tokens])
    order = RowOrder.by_expert(torch.tensor([[10, 20], [25, 5]], device=device), 0, 2, 60)
    apart = [torch.zeros(60, w, dtype=torch.uint8, device=device) for w in widths]
    gather_bytes(packed.split(widths, 1), apart, order)
    assert torch.equal(torch.cat(apart, 1), packed[order.choice.long()])


@DEVICES
def test_rows_of_any_bytes_travel(device):
    choice = torch.tensor([3, -1, 0, 0], dtype=torch.int32, device=device)
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float32, torch.int64, torch.bool):
        x = torch.arange(4 * 17, device=device).view(4, 17).to(torch.float32).to(dtype)
        found = gather_rows(x, choice)
        assert found.dtype == dtype and not found[1].float().any()
        assert torch.equal(found[[0, 2, 3]].float(), x[[3, 0, 0]].float())


def test_without_the_patch_megatron_refuses_the_flag():
    patches.revert_all(["moe_permutation"])
    with pytest.raises(ValueError, match="fused_permute is not available"):
        moe_utils.permute(torch.zeros(2, 2), torch.ones(2, 1, dtype=torch.bool), num_out_tokens=2, fused=True)
