"""Checks of the fused kernels against float64, each within a bound from counting roundings.

Run as a script (with TRITON_INTERPRET=1) they run on the CPU and print check -> error or null as JSON. U32 and
half_ulp() are what one operation and the final rounding to a dtype may cost; Triton's interpreter cuts bf16 off
instead of rounding, a whole ulp.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from types import SimpleNamespace

import interpreted
import torch

from megatron_hybrid import parse_format, permutation
from megatron_hybrid.gemm import DeviceKind, GemmPair
from megatron_hybrid.gemm.grouped import OWN
from megatron_hybrid.groups import Groups
from megatron_hybrid.ops_triton import cross_entropy, norm, permute, rotary, sums, swiglu, turn
from megatron_hybrid.stacked import GroupedColumns, StackedWeight
from megatron_hybrid.storage import cast
from megatron_hybrid.turn import turned as turned_over

U32 = 2.0**-24
BF16, FP32 = torch.bfloat16, torch.float32


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def half_ulp(dtype) -> float:
    cuts = dtype == BF16 and INTERPRETED
    return torch.finfo(dtype).eps / (1 if cuts else 2)


def stored(x: torch.Tensor, dtype) -> torch.Tensor:
    """What a kernel's store makes of x (FP32)."""
    return (x.view(torch.int32) & -(1 << 16)).view(torch.float32).to(dtype) if dtype == BF16 and INTERPRETED else x.to(dtype)


def randn(*shape, seed, device, dtype=BF16, scale=1.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.to(device=device, dtype=dtype)


def within(got, exact, rounded_once, error):
    """|got - exact| <= the last rounding of the exact value + error (a tensor)."""
    assert got.shape == exact.shape, (got.shape, exact.shape)
    flushed = 2.0**-120  # a device may take subnormal numbers for 0
    allowed = rounded_once * exact.abs() + error * (1 + rounded_once) + flushed
    worst = ((got.double() - exact).abs() - allowed).max()
    assert torch.isfinite(got).all() and worst <= 0, f"{worst:.3g} beyond the bound"


def norm_reference(x, gamma, beta, centered, dy):
    """Exact y, dx, dgamma, dbeta, and the sums of absolute values that errors are relative to."""
    x, g = x.double(), gamma.double() + centered
    v = x if beta is None else x - x.mean(-1, keepdim=True)
    rstd = (v.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    xhat, d = v * rstd, dy.double()
    dg = d * g
    y = xhat * g + (0 if beta is None else beta.double())
    dx = rstd * (dg - xhat * (dg * xhat).mean(-1, keepdim=True) - (0 if beta is None else dg.mean(-1, keepdim=True)))
    rows = tuple(range(x.dim() - 1))
    size_xhat = rstd * (x.abs() + (0 if beta is None else x.abs().mean(-1, keepdim=True)))
    size_dx = rstd * (dg.abs() + size_xhat * (dg * xhat).abs().mean(-1, keepdim=True) + dg.abs().mean(-1, keepdim=True))
    sizes = size_xhat, size_dx, (d.abs() * size_xhat).sum(rows), d.abs().sum(rows)
    return (y, dx, (d * xhat).sum(rows), d.sum(rows)), sizes


def check_norms(device):
    shapes = [(37, 2, 96), (5, 1, 1000), (3, 2, 4, 16), (2, 4096)]
    for shape, mean, (centered, dtype) in itertools.product(shapes, (False, True), ((False, BF16), (True, FP32))):
        N, M = shape[-1], torch.Size(shape[:-1]).numel()
        x = randn(*shape, seed=1, device=device, dtype=dtype, scale=3.0).requires_grad_()
        gamma = randn(N, seed=2, device=device).requires_grad_()
        beta = randn(N, seed=3, device=device).requires_grad_() if mean else None
        dy = randn(*shape, seed=4, device=device)
        y = norm.norm(x, gamma, beta, eps=1e-5, centered=centered, dtype=BF16)
        assert y.dtype == BF16
        y.backward(dy)
        exact, size = norm_reference(x.detach(), gamma.detach(), None if beta is None else beta.detach(), centered, dy)
        steps = (2 * N + 20) * U32  # sums of N in any order, the root, the quotient, the products
        g = gamma.detach().double().abs() + 1
        within(y.detach(), exact[0], half_ulp(BF16), steps * (size[0] * g + exact[0].abs()))
        within(x.grad, exact[1], half_ulp(dtype), 2 * steps * size[1])
        within(gamma.grad, exact[2], half_ulp(BF16), (steps + (M + 4) * U32) * size[2])
        if mean:
            within(beta.grad, exact[3], half_ulp(BF16), (M + 4) * U32 * size[3])


def check_norm_carries_the_residual(device):
    """The residual is x itself; its gradient is added as autograd adds those of two nodes, bit for bit."""
    for dtype in (BF16, FP32):
        x = randn(40, 96, seed=1, device=device, dtype=dtype).requires_grad_()
        gamma = randn(96, seed=2, device=device).requires_grad_()
        dy, dr = randn(40, 96, seed=3, device=device), randn(40, 96, seed=4, device=device, dtype=dtype)
        y, r = norm.norm(x, gamma, eps=1e-5, centered=False, dtype=BF16, residual=True)
        assert torch.equal(r, x) and r.data_ptr() == x.data_ptr()
        torch.autograd.backward((y, r), (dy, dr))
        apart = x.detach().clone().requires_grad_()
        norm.norm(apart, gamma, eps=1e-5, centered=False, dtype=BF16).backward(dy)
        assert torch.equal(x.grad, stored(apart.grad.float() + dr.float(), dtype))
        (_, exact, *_), (_, size, *_) = norm_reference(x.detach(), gamma.detach(), None, False, dy)
        steps = 2 * (2 * 96 + 20) * U32
        # either gradient alone
        for outputs, given in (((0,), (dy,)), ((1,), (dr,))):
            z = x.detach().clone().requires_grad_()
            out = norm.norm(z, gamma, eps=1e-5, centered=False, dtype=BF16, residual=True)
            torch.autograd.backward([out[i] for i in outputs], given)
            within(z.grad, exact if outputs == (0,) else dr.double(), half_ulp(dtype), steps * size)


def check_norm_of_strided_rows(device):
    wide = randn(20, 3, 64, seed=1, device=device)
    gamma = randn(32, seed=2, device=device)
    part = wide[:, 1, 16:48]
    y = norm.norm(part, gamma, eps=1e-5, centered=False, dtype=BF16)
    assert torch.equal(y, norm.norm(part.contiguous(), gamma, eps=1e-5, centered=False, dtype=BF16))


def check_swiglu(device):
    for shape, biased, dtype in itertools.product([(7, 2, 300), (3, 2, 2 * 2304), (0, 2, 300)], (False, True), (BF16, FP32)):
        x = randn(*shape, seed=1, device=device, dtype=dtype, scale=4.0)
        x[:1, 0, :2] = torch.tensor([100.0, -100.0], device=device)
        x.requires_grad_()
        bias = randn(shape[-1], seed=2, device=device, dtype=dtype).requires_grad_() if biased else None
        y = swiglu.swiglu(x, bias)
        dy = randn(*y.shape, seed=3, device=device, dtype=dtype)
        y.backward(dy)
        if not shape[0]:
            assert y.shape == (0, 2, 150) and x.grad.shape == shape and (not biased or not bias.grad.any())
            continue
        gate, up = (x.detach().double() + (bias.detach().double() if biased else 0)).chunk(2, -1)
        s, d = gate.sigmoid(), dy.double()
        shift = U32 * gate.abs() if biased else 0  # the rounding of x + bias reaches everything below
        steps = (4 * gate.abs() + 24) * U32 * (1 + gate.abs())  # exp's argument is rounded: relative to its size
        exact = torch.cat((d * up * s * (1 + gate * (1 - s)), d * gate * s), -1)
        size = torch.cat((d.abs() * (up.abs() + 1) * s, d.abs() * (gate.abs() + 1) * s), -1)
        size_y = gate.abs() * s * (up.abs() + 1)
        within(y.detach(), gate * s * up, half_ulp(dtype), steps * size_y + shift * (up.abs() + 1))
        within(x.grad, exact, half_ulp(dtype), torch.cat((steps, steps), -1) * size + 4 * U32 * size)
        if biased:
            rows = shape[0] * shape[1]
            summed, total = x.grad.double().sum((0, 1)), x.grad.double().abs().sum((0, 1))
            within(bias.grad, summed, half_ulp(dtype), (rows + 2) * U32 * total)


def check_weighted_swiglu(device):
    cases = [(7, 150, BF16, FP32), (5, 1300, BF16, BF16), (3, 32, FP32, FP32), (0, 16, BF16, FP32)]
    for rows, F, dtype, weight_dtype in cases:
        x = randn(rows, 2 * F, seed=1, device=device, dtype=dtype, scale=4.0).requires_grad_()
        weights = randn(rows, seed=2, device=device, dtype=weight_dtype).requires_grad_()
        y = swiglu.weighted_swiglu(x, weights)
        dy = randn(rows, F, seed=3, device=device, dtype=dtype)
        y.backward(dy)
        gate, up = x.detach().double().chunk(2, -1)
        w, s = weights.detach().double().unsqueeze(1), gate.sigmoid()
        d = dy.double() * w
        steps = (4 * gate.abs() + 28) * U32 * (1 + gate.abs())
        exact = torch.cat((d * up * s * (1 + gate * (1 - s)), d * gate * s), -1)
        size = torch.cat((d.abs() * (up.abs() + 1) * s, d.abs() * (gate.abs() + 1) * s), -1)
        size_y = gate.abs() * s * (up.abs() + 1)
        if not rows:
            assert y.shape == (0, F) and x.grad.shape == x.shape and weights.grad.shape == (0,)
            continue
        within(y.detach(), gate * s * up * w, half_ulp(dtype), steps * size_y * w.abs())
        within(x.grad, exact, half_ulp(dtype), torch.cat((steps, steps), -1) * size)
        terms = dy.double() * gate * s * up
        lost = (steps * size_y * dy.double().abs()).sum(1) + F * U32 * terms.abs().sum(1)
        within(weights.grad, terms.sum(1), half_ulp(weight_dtype), lost)
        spread = torch.stack((weights.detach(), weights.detach() + 1), 1)[:, 0].requires_grad_()  # a column of a matrix
        y_spread = swiglu.weighted_swiglu(x.detach(), spread)
        y_spread.backward(dy)
        assert torch.equal(y_spread, y) and torch.equal(spread.grad, weights.grad)


def check_weighted_swiglu_of_tokens(device):
    """Weights of tokens and experts, of which rows choose theirs or none: bits as with each row's own weight."""
    routed = routing(6, 4, 2, seed=1, device=device, exact=False)
    where = permutation.RowMap.of(routed, 12)  # the last rows chose nothing
    for dtype in (FP32, BF16):
        x = randn(12, 2 * 40, seed=2, device=device).requires_grad_()
        dy, weights = randn(12, 40, seed=3, device=device), randn(6, 4, seed=4, device=device, dtype=dtype).requires_grad_()
        results = []
        for by_rows in (False, True):
            x.grad = weights.grad = None
            given = (permutation.permute_probs(weights, where),) if by_rows else (weights, where)
            y = swiglu.weighted_swiglu(x, *given)
            y.backward(dy)
            results.append((y.detach(), x.grad, weights.grad))
        assert (where.choice < 0).any() and all(map(torch.equal, *results))


def routing(tokens, experts, most, *, seed, device, exact=True):
    """bool (tokens, experts): `most` experts a token, or up to as many; the last expert gets none where it may."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    for t in range(tokens):
        few = most if exact else int(torch.randint(0, most + 1, (), generator=g))
        chosen[t, torch.randperm(experts - (most < experts), generator=g)[:few]] = True
    return chosen.to(device)


ROUTINGS = [(20, 8, 2, True), (11, 8, 1, True), (24, 32, 8, True), (7, 5, 5, True), (12, 130, 9, False), (1, 1, 1, True)]
LONG = [(2300, 128, 1, True), (0, 8, 2, True)]  # several tiles a program; nothing


def check_row_maps(device):
    for tokens, experts, most, exact in ROUTINGS + LONG:
        routed = routing(tokens, experts, most, seed=1, device=device, exact=exact)
        for num_rows in {int(routed.sum()), int(routed.sum()) + 3}:
            found = permute.index(routed, num_rows)
            for a, b in zip(found, permutation._index(routed, num_rows), strict=True):
                assert a.dtype == torch.int32 and torch.equal(a, b), (tokens, experts, most, num_rows)


def check_rows_by_expert_that_came_by_rank(device):
    """Counts of other experts around; experts and ranks without rows, a chunk of more rows than a program takes at once."""
    for ranks, num, first, most in [(2, 3, 2, 7), (1, 4, 0, 3), (5, 1, 1, 4), (3, 7, 4, 2), (2, 2, 0, 700), (2, 3, 0, 1)]:
        g = torch.Generator().manual_seed(most)
        counts = torch.randint(0, most, (ranks, first + num + 2), generator=g).to(device)
        for dtype in (torch.int64, torch.int32):
            total = int(counts[:, first : first + num].sum())
            order, rows, sizes = permute.chunks_by_expert(counts.to(dtype), first, num, total)
            expected = permutation.RowOrder.by_expert(counts.cpu().to(dtype), first, num, total)
            assert sizes.dtype == expected.sizes.dtype == dtype and torch.equal(sizes.cpu(), expected.sizes)
            assert order.dtype == rows.dtype == torch.int32
            assert torch.equal(order.cpu(), expected.choice) and torch.equal(rows.cpu(), expected.rows)


def check_copies_and_sums_of_rows(device):
    for (tokens, experts, most, exact), dtype in itertools.product(ROUTINGS, (BF16, FP32)):
        routed = routing(tokens, experts, most, seed=1, device=device, exact=exact)
        num_rows = int(routed.sum()) + 2
        choice, starts, rows, _ = permute.index(routed, num_rows)
        x = randn(tokens, 3 * 40, seed=2, device=device, dtype=dtype)[:, 40:80]
        token = choice.long().div(experts, rounding_mode="floor")
        copies = torch.where((choice >= 0)[:, None], x[token], 0)
        assert torch.equal(permute.gather(x, choice, experts), copies)
        wide = randn(tokens, 700, seed=5, device=device, dtype=dtype)[:, 100:]
        copied = torch.where((choice >= 0)[:, None], wide[token], 0)
        for rows_of_any_size in (wide, wide.contiguous().view(torch.uint8)):
            found = permute.copies(rows_of_any_size, choice, starts, rows, experts)
            assert torch.equal(found.view(dtype), copied)
            for beside in (x, x[:, :1], wide, torch.arange(tokens * 3, device=device).view(tokens, 3).to(torch.uint8)):
                found, short = permute.copies(rows_of_any_size, choice, starts, rows, experts, beside)
                assert torch.equal(found.view(dtype), copied)
                assert torch.equal(short, torch.where((choice >= 0)[:, None], beside[token], 0))
        y, w = randn(num_rows, 40, seed=3, device=device, dtype=dtype), randn(num_rows, seed=4, device=device, dtype=FP32)
        of = torch.zeros(tokens, num_rows, dtype=torch.float64, device=device)
        of[token[choice >= 0], torch.arange(num_rows, device=device)[choice >= 0]] = 1
        for weights, factors in ((None, of), (w, of * w.double())):
            exact_sum, size = factors @ y.double(), factors.abs() @ y.double().abs()
            within(permute.sums(y, starts, rows, weights), exact_sum, half_ulp(dtype), (most + 1) * U32 * size)
            if weights is not None:
                weighted = copies.double() * w.double()[:, None]
                within(permute.gather(x, choice, experts, weights), weighted, half_ulp(dtype), U32 * weighted.abs())
        values = randn(num_rows, seed=6, device=device, dtype=dtype)
        placed = torch.zeros(tokens * experts, device=device, dtype=dtype)
        placed[choice[choice >= 0].long()] = values[choice >= 0]
        assert torch.equal(permute.scatter(values, choice, tokens * experts), placed)
        products = copies.double() * y.double()
        within(permute.dots(x, y, choice, experts), products.sum(1), half_ulp(FP32), 42 * U32 * products.abs().sum(1))


def one_copy(choice):
    """What `permute.copies` takes of a choice among four rows."""
    rows = [(choice == row).nonzero()[:, 0] for row in range(4)]
    ends = torch.tensor([0, *(len(r) for r in rows)], device=choice.device).cumsum(0)
    found = torch.full_like(choice, -1)
    found[: int(ends[-1])] = torch.cat(rows).to(found)
    return choice, ends.to(torch.int32), found


def check_copies_of_any_rows(device):
    """Codes and scales as they are: bytes, FP8, integers, wide rows, one column, nothing."""
    choice = torch.tensor([3, -1, 0, 0, 2, 1, 3], dtype=torch.int32, device=device)
    for width, dtype in [(2100, torch.uint8), (48, torch.float8_e4m3fn), (17, torch.int64), (1, FP32), (3, torch.float64)]:
        x = torch.randint(0, 100, (4, width), generator=torch.Generator().manual_seed(1)).to(device).to(dtype)
        expected = torch.where((choice >= 0)[:, None], x.double()[choice.long()], 0)
        assert torch.equal(permute.gather(x, choice).double(), expected)
        assert torch.equal(permute.copies(x, *one_copy(choice), 1).double(), expected)
    packed = torch.randint(0, 256, (4, 2052), generator=torch.Generator().manual_seed(2)).to(device).to(torch.uint8)
    # of rows with scales beside codes
    for part in (packed[:, :2048], packed[:, 2048:], packed[:, 4:9], packed[1:, 8:1000]):
        at = choice.clamp(max=len(part) - 1)
        expected = torch.where((at >= 0)[:, None], part[at.long()], 0)
        assert torch.equal(permute.gather(part, at), expected)
        assert torch.equal(permute.copies(part, *one_copy(at), 1), expected)
    for width, short, num in [(2048, 4, 1), (2050, 2, 3), (48, 48, 1), (5, 0, 2)]:  # beside each other, and apart
        parts = packed[:, :width].repeat(1, 2)[:, :width].contiguous(), packed[:, 100 : 100 + short].contiguous()
        at = choice.clamp(min=0) * num
        both = torch.full((7, width + short), 99, dtype=torch.uint8, device=device)
        permute.gather_two(*parts, *both.split([width, short], 1), at, num)
        expected = torch.cat(parts, 1)[choice.clamp(min=0).long()]
        assert torch.equal(both, expected)
        apart = [torch.full_like(part, 99) for part in expected.split([width, short], 1)]
        permute.gather_two(*both.split([width, short], 1), *apart, torch.arange(6, -1, -1, device=device).int())
        assert torch.equal(torch.cat(apart, 1), expected.flip(0))
    assert permute.gather(x[:, :0], choice).shape == (7, 0) and permute.gather(x, choice[:0]).shape == (0, 3)


def check_scaled_rows(device):
    y = randn(9, 70, seed=1, device=device)
    by_row, by_col = (randn(*shape, seed=2, device=device, dtype=FP32) for shape in ((9,), (3, 70)))
    group = torch.tensor([0, 0, 0, 0, 2, 2, 2, 2, 2], device=device)
    exact = y.float() * by_row[:, None] * by_col[group]  # in this order, in FP32
    found = permute.scale_rows(y.clone(), by_row, by_col, group)
    within(found, exact.double(), half_ulp(BF16), 0)


def check_matrices_turned_over(device):
    """Every byte: whole words and not, tiles that are full and not, stacks, strided rows and stacks, elements with a sign."""
    shapes = [(1, 128, 256), (2, 140, 200), (2, 30, 17), (3, 7, 129), (4, 1, 5), (2, 129, 1), (0, 4, 4), (2, 4, 0)]
    integers = {torch.uint8: torch.uint8, torch.float8_e4m3fn: torch.uint8, BF16: torch.int16, FP32: torch.int32}
    for (B, R, C), (dtype, ints) in itertools.product(shapes, integers.items()):
        size, g = ints.itemsize, torch.Generator().manual_seed(R + C)
        bits = torch.randint(0, 256, (B + 1, R + 1, (C + 16) * size), generator=g, dtype=torch.uint8).to(device)
        strided = bits.view(dtype)[1:, 1:, 16:]
        for x in (strided, strided.contiguous()):
            turned = turn.turn(x)
            assert turned.is_contiguous() and turned.dtype == dtype and turned.shape == (B, C, R)
            assert torch.equal(turned.view(ints), x.view(ints).transpose(1, 2)), (x.shape, x.stride(), dtype)  # NaNs too
    large = torch.arange(2 * 1100 * 2048, device=device).to(torch.uint8).view(2, 1100, 2048)  # by the kernel, where it runs
    assert torch.equal(turned_over(large), large.transpose(1, 2)) and torch.equal(turned_over(large[1]), large[1].T)


def check_column_sum(device):
    for M, N, dtype in [(1, 5, BF16), (1000, 300, BF16), (70000 if device == "cuda" else 2100, 33, FP32)]:
        x = randn(M, N, seed=1, device=device, dtype=dtype)
        once = sums.column_sum(x)
        within(once, x.double().sum(0), half_ulp(dtype), (M + 2) * U32 * x.double().abs().sum(0))
        assert torch.equal(once, sums.column_sum(x))


def rotate_reference(mixed, freqs, groups, head_size, scale):
    S, B, width = mixed.shape
    heads = width // head_size
    per_group = heads // groups
    x = mixed.reshape(S, B, groups, per_group, head_size)
    q, k, v = x[:, :, :, :-2], x[:, :, :, -2:-1], x[:, :, :, -1:]
    n = freqs.shape[-1] // 2
    cos, sin = (f(freqs.double()).unsqueeze(3) * scale for f in (torch.cos, torch.sin))

    def rotate(t):
        a, b, rest = t[..., :n], t[..., n : 2 * n], t[..., 2 * n :]
        return torch.cat((a * cos[..., :n] - b * sin[..., :n], b * cos[..., n:] + a * sin[..., n:], rest), -1)

    return tuple(t.reshape(S, B, -1, head_size) for t in (rotate(q), rotate(k), v))


def check_split_rotate(device):
    cases = [(5, 2, 2, 4, 128, 128, 1.0), (3, 1, 1, 1, 64, 32, 1.0), (4, 2, 3, 2, 48, 24, 1.25)]
    for (S, B, groups, R, D, rotated, scale), dtype in itertools.product(cases, (BF16, FP32)):
        mixed = randn(S, B, groups * (R + 2) * D, seed=1, device=device, dtype=dtype).requires_grad_()
        steps = 10.0 ** torch.linspace(0, -4, rotated // 2)
        angles = torch.arange(S)[:, None] * 2000.0 * steps  # up to the positions of a long sequence
        freqs = torch.cat((angles, angles), -1)[:, None, None, :].to(device)
        out = rotary.split_rotate(mixed, freqs, groups=groups, head_size=D, scale=scale)
        wide = mixed.detach().double().requires_grad_()
        exact = rotate_reference(wide, freqs, groups, D, scale)
        size = 2 * scale * wide.detach().abs().max()
        grads = [randn(*o.shape, seed=5 + i, device=device, dtype=dtype) for i, o in enumerate(out)]
        for got, want in zip(out, exact):
            assert got.is_contiguous()
            within(got.detach(), want.detach(), half_ulp(dtype), 8 * U32 * size)
        torch.autograd.backward(out, grads)
        torch.autograd.backward(exact, [g.double() for g in grads])
        within(mixed.grad, wide.grad, half_ulp(dtype), 8 * U32 * 2 * scale * max(g.abs().max() for g in grads))
        turned = freqs.transpose(0, 3).contiguous().transpose(0, 3)  # the same angles, position by position in memory
        others = rotary.split_rotate(mixed.detach(), turned, groups=groups, head_size=D, scale=scale)
        assert all(map(torch.equal, others, out))
        values = mixed.detach().view(S, B, groups, R + 2, D)[..., -1, :]
        assert torch.equal(out[2].detach(), values)
    try:
        rotary.split_rotate(mixed, freqs[:1], groups=groups, head_size=D)
    except ValueError as error:
        assert "positions" in str(error)
    else:
        raise AssertionError("too few positions were accepted")


def check_cross_entropy(device):
    for (rows, V), dtype in itertools.product([((6, 2), 1000), ((3,), 9001)], (BF16, FP32)):
        logits = randn(*rows, V, seed=1, device=device, dtype=dtype, scale=6.0)
        logits.view(-1, V)[0, :50] = float("-inf")
        logits.view(-1, V)[1] += 300
        target = torch.randint(60, V, rows, generator=torch.Generator().manual_seed(2)).to(device)
        wide = logits.double().requires_grad_()
        exact = torch.nn.functional.cross_entropy(wide.view(-1, V), target.view(-1), reduction="none").view(rows)
        held = logits.clone().requires_grad_()
        source = held * 1  # an output of something, as in a model
        loss = cross_entropy.cross_entropy(source, target)
        assert loss.dtype == FP32 and loss.shape == rows
        largest = logits.double().masked_fill(logits.isinf(), 0).abs().amax(-1)
        steps = (V + 40) * U32
        within(loss.detach(), exact.detach(), U32, steps + 8 * U32 * largest)
        dloss = torch.rand(rows, generator=torch.Generator().manual_seed(3)).to(device)
        loss.backward(dloss, retain_graph=True)
        exact.backward(dloss.double())
        p = wide.detach().softmax(-1)
        error = p * (steps + 8 * U32 * largest + 16 * U32)[..., None] * (1 + (p + 2.0**-60).log().abs())
        within(held.grad, wide.grad, half_ulp(dtype), error * dloss.double()[..., None])
        try:
            loss.backward(dloss)
        except RuntimeError as err:
            assert "modified by an inplace operation" in str(err), err
        else:
            raise AssertionError("a second backward over overwritten logits was not refused")


GROUPED = {
    "rows": ("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "fp8_rowwise_e4m3"),
    "rows, e5m2 gradients": ("fp8_rowwise_e4m3", "fp8_rowwise_e5m2", "fp8_rowwise_e4m3"),
    "blocks and tiles": ("fp8_block_e4m3", "fp8_block_e4m3", "fp8_block_e4m3:2d"),
    "blocks": ("fp8_block_e4m3:no_pow2", "fp8_block_e5m2:no_pow2", "fp8_block_e4m3:no_pow2"),
}  # fmt: skip


def check_grouped_gemms(device):
    """fprop, dgrad, wgrad of every kind of scales, in bf16, in FP32, added; ragged and empty groups, sizes with rests."""
    shapes = [(384, 256), (256, 384)] if device == "cuda" else [(128, 256)]
    for (N, K), (name, formats), fast in itertools.product(shapes, GROUPED.items(), (False, True)):
        if not fast or name in ("rows", "blocks and tiles"):
            grouped_gemms_are_right(device, N, K, formats, fast)
    grouped_gemms_are_right(device, 144, 272, GROUPED["rows"], False)
    grouped_gemms_are_right(device, 144, 272, GROUPED["blocks"], False)


def grouped_gemms_are_right(device, N, K, formats, fast):
    splits = [131, 0, 7, 60]
    T, E, (x_fmt, dy_fmt, w_fmt) = sum(splits), len(splits), map(parse_format, formats)
    x, dy = (randn(T, size, seed=seed, device=device) for seed, size in ((1, K), (2, N)))
    w = randn(E, N, K, seed=3, device=device)
    plan = SimpleNamespace(calls=Counter())
    accumulate, fast = "fast" if fast else "full", fast and x_fmt.outer_axis == "row"  # blocks are promoted all the same
    for gemm, pair in (("fprop", (x_fmt, w_fmt)), ("dgrad", (dy_fmt, w_fmt)), ("wgrad", (dy_fmt, x_fmt))):
        pair = GemmPair(gemm, *pair, DeviceKind("cuda", (9, 0)), accumulate)
        setattr(plan, gemm, SimpleNamespace(pair=pair, backend=OWN))
    groups = Groups(splits if device == "cpu" else torch.tensor(splits, device=device), E, T, torch.device(device))
    for gemm, a, direction in (("fprop", x, "rowwise"), ("dgrad", dy, "columnwise")):
        pair = getattr(plan, gemm).pair
        left, right = cast(a, pair.a, "rowwise"), StackedWeight.make(w, pair.b, direction)
        wide = right.payload.dequantize().view(E, *right.shape)
        operands = list(zip(left.dequantize().split(splits), wide))
        for dtype in (BF16, FP32):
            got = OWN.rows(gemm, [plan] * E, left, right, groups, dtype)
            near_products(got.split(splits), operands, dtype, fast, 0.0)
    columns = [GroupedColumns.make(t, f, groups.layout(128), transposed=True) for t, f in ((dy, dy_fmt), (x, x_fmt))]
    pieces = [[c.piece(e).operand(FP32) for e in range(E)] for c in columns]
    operands = list(zip(*pieces))
    for total in (None, torch.full((E, N, K), 3.0, device=device)):
        got = OWN.contract([plan] * E, *columns, BF16, total)
        assert got is total or (total is None and (got[1] == 0).all())
        near_products(got, operands, got.dtype, fast, 0.0 if total is None else 3.0)
    assert plan.calls["wgrad", OWN.name] == 2 * E


def near_products(found, operands, dtype, fast, added):
    """Sums of 128 exact products in FP8 tensor cores (test_gemm_gpu.py), or FP32 (the interpreter), promoted to FP32."""
    for got, (a, b) in zip(found, operands, strict=True):
        if not got.numel():
            continue
        a, b = a.double(), b.double()
        exact, size, K = a @ b.T, a.abs() @ b.abs().T, a.shape[1]
        steps = -(-K // 32) if fast else 4
        lost = steps * 34 * 2.0**-13 if got.is_cuda else 128 * U32
        within(got, exact + added, half_ulp(dtype), (lost + (K / 128 + 8) * U32) * size + 4 * U32 * (size + added))


def check_views_that_negate_what_is_in_memory(device):
    gamma, angles = torch.ones(96, device=device), torch.zeros(1, 1, 1, 16, device=device)
    target = torch.arange(5, device=device) * 7
    functions = {
        "norm": lambda x: norm.norm(x, gamma, eps=1e-5, centered=False, dtype=FP32),
        "swiglu": swiglu.swiglu,
        "weighted": lambda x: swiglu.weighted_swiglu(x, gamma[:5]),
        "rotary": lambda x: torch.cat(split_rotated(x.expand(1, *x.shape), angles)),
        "loss": lambda x: cross_entropy.cross_entropy(x, target),
        "sums": lambda x: sums.column_sum(x.detach()),
    }
    made = randn(5, 96, seed=1, device=device, dtype=FP32)
    for name, f in functions.items():
        ends = []
        for view in (torch.clone, lambda t: torch._neg_view(-t)):
            x = made.clone().requires_grad_()
            y = f(view(x))
            if y.requires_grad:
                y.backward(view(torch.ones_like(y) / 3))
            ends.append((y.detach(), x.grad))
        for plain, seen in zip(*ends):
            assert plain is seen or torch.equal(plain, seen), name


def split_rotated(mixed, angles):
    return [t.flatten(2) for t in rotary.split_rotate(mixed, angles, groups=1, head_size=32)]


def check_results_repeat(device):
    """The same bits every time, sums over rows included."""

    def run():
        x = randn(600, 256, seed=1, device=device).requires_grad_()
        gamma, beta = (randn(256, seed=s, device=device).requires_grad_() for s in (2, 3))
        bias = randn(256, seed=4, device=device).requires_grad_()
        y = swiglu.swiglu(norm.norm(x, gamma, beta, eps=1e-5, centered=False, dtype=BF16), bias)
        y.backward(randn(*y.shape, seed=5, device=device))
        return y.detach(), x.grad, gamma.grad, beta.grad, bias.grad

    def gathered():
        num = 3000 if device == "cuda" else 40
        choice, starts, rows, _ = permute.index(routing(num, 16, 8, seed=1, device=device), 8 * num)
        return choice, rows, permute.sums(randn(8 * num, 256, seed=2, device=device), starts, rows)

    for a, b in zip((*run(), *gathered()), (*run(), *gathered()), strict=True):
        assert torch.equal(a, b)


CHECKS = interpreted.checks(dict(globals()))

if __name__ == "__main__":
    interpreted.main(CHECKS)
