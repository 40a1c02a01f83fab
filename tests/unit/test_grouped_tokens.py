"""Grouped linears that take tokens and give tokens back: the bits of copying them to rows before, and summing after."""

from __future__ import annotations

import pytest
import torch
from linear_cases import counted_casts, randn
from test_grouped_at_once import AT_ONCE, EXPERTS, ONE_BY_ONE, K, N, grouped

from megatron_hybrid.grouped_at_once import GroupedPlan
from megatron_hybrid.groups import Groups
from megatron_hybrid.permutation import RowMap, permute, unpermute

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])
RECIPES = {**AT_ONCE, **{name: rcp for name, (rcp, _) in ONE_BY_ONE.items()}}
TOKENS = 45


def routed(most: int, device) -> torch.Tensor:
    """bool (TOKENS, EXPERTS); expert 2 gets nothing where it may."""
    g, chosen = torch.Generator().manual_seed(most), torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    others = torch.tensor([e for e in range(EXPERTS) if e != 2 or most == EXPERTS])
    for t in range(TOKENS):
        chosen[t, others[torch.randperm(len(others), generator=g)[:most]]] = True
    return chosen.to(device)


def both_ways(m, x, dy, groups, *, copies, sums):
    """y, dx, dw, db of a linear that is told of tokens, and of one among separate copies and sums."""
    found = []
    for inside in (True, False):
        m.zero_grad()
        leaf = x.clone().requires_grad_()
        told = groups.between(copies=copies if inside else None, sums=sums if inside else None)
        rows = permute(leaf, copies) if copies is not None and not inside else leaf
        y = m(rows, told)
        y = unpermute(y, sums) if sums is not None and not inside else y
        y.backward(dy)
        found.append([y.detach(), leaf.grad, *(p.grad for p in m.parameters())])
    return found


@DEVICES
@pytest.mark.parametrize("most", [1, 2, EXPERTS])
@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_copies_and_sums_apart(name, most, device):
    where = RowMap.of(mapping := routed(most, device), TOKENS * most)
    m = grouped(RECIPES[name], bias=False, device=device)
    sizes = mapping.sum(0)
    groups = Groups(sizes if device == "cuda" else sizes.tolist(), EXPERTS, TOKENS * most, sizes.device)
    x, x_rows = (randn(n, K, seed=0).to(device) for n in (TOKENS, TOKENS * most))
    dy, dy_rows = (randn(n, N, seed=1).to(device) for n in (TOKENS, TOKENS * most))
    cases = [(x, dy_rows, where, None), (x_rows, dy, None, where), (x, dy, where, where)]
    for given, grad, copies, sums in cases:
        for a, b in zip(*both_ways(m, given, grad, groups, copies=copies, sums=sums), strict=True):
            assert a.any() and torch.equal(a, b), (copies is None, sums is None)


@DEVICES
def test_biases_and_evaluation(device):
    where = RowMap.of(mapping := routed(2, device), 2 * TOKENS)
    m = grouped(AT_ONCE["fp8_rowwise"], bias=True, device=device)
    groups = Groups(mapping.sum(0), EXPERTS, 2 * TOKENS, mapping.device)
    x, dy = randn(TOKENS, K, seed=0).to(device), randn(TOKENS, N, seed=1).to(device)
    inside, apart = both_ways(m, x, dy, groups, copies=where, sums=where)
    for a, b in zip(inside, apart, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(m(x, groups.between(copies=where, sums=where)), inside[0])


@pytest.mark.parametrize("name", ["mxfp8", "rowscaled", "fp8_rowwise", "fp8_block"])
def test_rows_are_cast_once_a_token(name):
    """What is cast by rows has a row a token, not one a token and expert; by columns it has them all."""
    where = RowMap.of(mapping := routed(3, "cpu"), 3 * TOKENS)
    m = grouped(AT_ONCE[name], bias=False)
    assert isinstance(m.how, GroupedPlan)
    groups = Groups(mapping.sum(0).tolist(), EXPERTS, 3 * TOKENS, torch.device("cpu"))
    x, dy = randn(TOKENS, K, seed=0).requires_grad_(), randn(TOKENS, N, seed=1)
    told = groups.between(copies=where, sums=where)
    m(x, told)  # the weight's casts stay in its cache
    with counted_casts() as casts:
        m(x, told).backward(dy)
    rows = [shape for shape, direction in casts if direction == "rowwise"]
    columns = [shape[0] for shape, direction in casts if direction == "columnwise"]
    assert rows == [(TOKENS, K), (TOKENS, N)], casts
    assert all(n >= 3 * TOKENS for n in columns), casts
