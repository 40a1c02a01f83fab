"""Casts and amaxes of groups on a GPU: the bytes of casts without a map, ragged groups and copies of tokens included."""

import pytest
import torch

import megatron_hybrid as mh
from megatron_hybrid import kernels, parse_format, permutation
from megatron_hybrid.formats import DIRECTIONS
from megatron_hybrid.grouped_columns import GroupCast, with_kernels, with_torch
from megatron_hybrid.grouped_payloads import GroupedPayloads
from megatron_hybrid.groups import Groups
from megatron_hybrid.kernels import amax_groups, groups_of
from megatron_hybrid.stacked import StackedWeight
from megatron_hybrid.storage import cast

pytest.importorskip("triton", reason="ops_triton_cases needs it")
from ops_triton_cases import randn, routing  # noqa: E402

from megatron_hybrid import gated_cast  # noqa: E402
from megatron_hybrid.ops_triton import swiglu  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = "cuda"
COLUMNS = (
    "fp8_rowwise_e4m3", "fp8_rowwise_e5m2:pow2", "fp8_block_e4m3", "fp8_block_e5m2:no_pow2", "fp8_block_e4m3:eps=0.5",
)  # fmt: skip


def layout_of(sizes, total):
    """Groups of these sizes, known on the device only, in blocks of 128 rows."""
    return Groups(torch.as_tensor(sizes, device=CUDA), len(sizes), total, torch.device(CUDA)).layout(128)


def amaxes(x, where, num_rows, *, rows=False, copies=None):
    """(of columns (E, K), of rows (T,) or None)."""
    found, *_ = amax_groups(x, groups_of(where, num_rows, copies), rows=rows)
    of_columns = where.ends.shape[0] * x.shape[1]
    return found[:of_columns].view(-1, x.shape[1]), found[of_columns:] if rows else None


@pytest.mark.parametrize("K, dtype", [(600, torch.bfloat16), (96, torch.float32)])
def test_amaxes_of_groups(K, dtype):
    """Of columns of every group and of rows, bit for bit, NaN on top; of tokens through a map those of their copies."""
    splits = [5, 0, 131, 3]
    T = sum(splits)
    x = randn(T, K, seed=1, device=CUDA, dtype=dtype)
    x[10, 7], x[:, 9], x[60] = float("-inf"), 0, 0
    where = layout_of(splits, T).blocks
    for rows in (False, True):
        of_columns, of_rows = amaxes(x, where, T, rows=rows)
        columns = [part.float().abs().amax(0) if len(part) else torch.zeros(K, device=CUDA) for part in x.split(splits)]
        assert torch.equal(of_columns, torch.stack(columns))
        assert torch.equal(of_rows.flatten(), x.float().abs().amax(1)) if rows else of_rows is None
    x[3, 5] = -float("nan")
    of_columns, of_rows = amaxes(x, where, T, rows=True)
    assert of_rows.flatten().isnan().nonzero().tolist() == [[3]]
    assert of_columns.isnan().nonzero().tolist() == [[0, 5]]
    routed = routing(60, 4, 2, seed=1, device=CUDA)
    copies, tokens = permutation.RowMap.of(routed, 120), x[:60]
    where = layout_of(routed.sum(0), 120).blocks
    of_copies = amaxes(tokens, where, 120, rows=True, copies=copies)
    for found, expected in zip(of_copies, amaxes(copies.expand(tokens), where, 120, rows=True), strict=True):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def values():
    """(x (219, 96), the sizes of its groups): wide ranges, NaN, Inf, zeros, numbers below the normal ones."""
    splits = [133, 0, 16, 70]
    x = randn(sum(splits), 96, seed=5, device=CUDA)
    x *= torch.logspace(-6, 6, 96, device=CUDA).to(x.dtype)
    x[140, 3], x[141, 4], x[2, 5], x[3, 6], x[:, 7] = float("nan"), float("inf"), float("-inf"), -float("nan"), 0
    x[:, 8] *= 1e-38
    return x, splits


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_groups(name):
    """The bytes of the torch operations and of the casts: columns alone, and with the rows beside them."""
    x, splits = values()
    fmt, layout = parse_format(name), layout_of(splits, len(x))
    ends = layout.ends[-1]
    if fmt.family == "fp8_rowwise":
        expected, scales = with_torch(x, fmt, layout), slice(None)
    else:
        expected, scales = cast(layout.spread(x), fmt, "columnwise", transposed=True), slice(0, ends // 128)
    both = [(f, *GroupCast(f, fmt)(x, layout)) for f in map(parse_format, ("fp8_rowwise_e4m3", "fp8_block_e5m2"))]
    for found in (with_kernels(x, fmt, layout), *(col for _, _, col in both)):
        assert torch.equal(found.scale[scales], expected.scale[scales])
        assert torch.equal(found.qdata[:, :ends], expected.qdata[:, :ends]), (found.qdata != expected.qdata).sum()
    for by_rows, row, _ in both:
        alone = cast(x, by_rows, "rowwise")
        assert torch.equal(row.qdata, alone.qdata) and torch.equal(row.scale, alone.scale)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_copies(name):
    """Tokens read by a map give the bytes of their copies, columns alone and with the rows beside them."""
    x, fmt = values()[0][:160], parse_format(name)
    routed = routing(len(x), 5, 2, seed=3, device=CUDA)  # none to the last
    copies = permutation.RowMap.of(routed, 2 * len(x))
    layout = layout_of(routed.sum(0), 2 * len(x))
    ends = layout.ends[-1]
    rows = copies.expand(x)
    expected = with_kernels(rows, fmt, layout)
    scales = slice(None) if fmt.family == "fp8_rowwise" else slice(0, ends // 128)
    both = [(f, *GroupCast(f, fmt)(x, layout, copies)) for f in map(parse_format, ("fp8_rowwise_e4m3", "fp8_block_e5m2"))]
    for found in (with_kernels(x, fmt, layout, copies), *(col for _, _, col in both)):
        assert torch.equal(found.scale[scales], expected.scale[scales])
        assert torch.equal(found.qdata[:, :ends], expected.qdata[:, :ends])
    for by_rows, row, _ in both:
        alone = cast(rows, by_rows, "rowwise")
        assert torch.equal(row.qdata, alone.qdata) and torch.equal(row.scale, alone.scale)


def gated(T, F, dtype):
    """(x (T, 2F), dy (T, F)): gates of all sizes, where sigmoids end too, NaN, Inf, zeros, and below normal numbers."""
    x, dy = (randn(T, n, seed=n, device=CUDA, dtype=dtype, scale=4.0) for n in (2 * F, F))
    x[:, 1], x[:, 2] = torch.linspace(-100, 100, T, device=CUDA), torch.linspace(-90, -85, T, device=CUDA)
    x[5, 0], x[6, 0], x[7, F], x[8, 0] = float("nan"), float("inf"), float("-inf"), float("-inf")
    dy[9, 3] = float("nan")
    x[:, 4] *= 1e-38 if dtype == torch.bfloat16 else 1e-7
    x[10], dy[11] = 0, 0
    return x, dy


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype, F", [(torch.bfloat16, 256), (torch.float16, 128), (torch.bfloat16, 136)])
@pytest.mark.parametrize("name", COLUMNS)
def test_swiglu_cast_as_it_is_computed(name, dtype, F, mapped):
    """The bytes of weighted SwiGLU, or its gradient, and a cast; weights' gradients but for the order of their sums."""
    splits, fmt = [133, 0, 16, 70], parse_format(name)
    T = sum(splits)
    layout, (x, dy) = layout_of(splits, T), gated(T, F, dtype)
    weights, where, places = randn(T, seed=3, device=CUDA, dtype=torch.float32), None, None
    if mapped:
        routed = torch.zeros(100, 4, dtype=torch.bool, device=CUDA)
        for e, size in enumerate([100, 0, 16, 70]):
            routed[:size, e] = True
        where = permutation.RowMap.of(routed, T)  # fewer rows than T are chosen
        weights, places = randn(100, 4, seed=3, device=CUDA), where.choice
    gate, up = x.chunk(2, dim=1)
    by_row = parse_format("fp8_rowwise_e4m3" if fmt.family == "fp8_rowwise" else "fp8_block_e4m3")
    casts, ends = GroupCast(by_row, fmt), layout.ends[-1]
    cases = [(up, swiglu.weighted_product(x, weights, where), dict(gate=gate), None)]
    if F % 128 == 0:
        dx, dweights = swiglu.weighted_gradient(dy, x, weights, where)
        dots = torch.full((T, F // 128), float("nan"), device=CUDA)
        cases.append((x, dx, dict(grad=dy), dots))
    for of, expected, computed, dots in cases:
        given = kernels.weights_of(weights, places, dots)
        for found, wanted in zip(casts(of, layout, weights=given, **computed), casts(expected, layout), strict=True):
            columns = found.direction == "columnwise"
            used = slice(0, ends if columns else None)
            assert torch.equal(found.qdata[:, used], wanted.qdata[:, used]), found.direction
            kept = slice(0, ends // 128) if columns and fmt.family != "fp8_rowwise" else slice(None)
            assert torch.equal(found.scale[kept], wanted.scale[kept]), found.direction
    if F % 128 == 0:
        found, wanted = dots.sum(1), dweights.float().flatten()
        if mapped:
            found, wanted = found[places >= 0], wanted[places[places >= 0].long()]
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gate(dtype):
    """SwiGLU and its gradient are Triton's bit for bit: amaxes of groups of a row each are what they are taken of."""
    F = 128
    gate = torch.arange(-(2**15), 2**15, device=CUDA).to(torch.int16).view(dtype).view(-1, F)
    T, places = len(gate), torch.arange(len(gate), dtype=torch.int32, device=CUDA)
    where = layout_of([1] * T, T).blocks  # whose memory `groups` only has the addresses of
    groups = groups_of(where, T)
    for seed in range(32):
        up, dy = (randn(T, F, seed=2 * seed + n, device=CUDA, dtype=dtype) for n in (0, 1))
        weights = randn(T, seed=seed, device=CUDA, dtype=torch.float32)
        x, given = torch.cat((gate, up), dim=1), kernels.weights_of(weights, places)
        cases = (x[:, F:], dict(gate=x[:, :F]), swiglu.weighted_product(x, weights)),
        cases += (x, dict(grad=dy), swiglu.weighted_gradient(dy, x, weights)[0]),
        for of, computed, expected in cases:
            found = amax_groups(of, groups, weights=given, **computed)[0].view(expected.shape)
            off = (found != expected.float().abs()) & ~(found.isnan() & expected.isnan())
            assert not off.any(), (list(computed), off.nonzero()[:4], found[off][:4], expected[off][:4])


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_rowwise"])
def test_experts_around_swiglu(recipe):
    """Results and gradients with SwiGLU in the casts of the grouped linears around it, and apart."""
    sizes, K, F, found = [130, 3, 0, 260], 256, 256, []
    T, E = sum(sizes), len(sizes)
    for inside in (True, False):
        made = dict(recipe=recipe, dtype=torch.bfloat16, device=CUDA)
        torch.manual_seed(0)
        fc1 = mh.HybridGroupedLinear(E, K, 2 * F, name="fc1", **made)
        fc2 = mh.HybridGroupedLinear(E, F, K, name="fc2", **made)
        mh.prepare(torch.nn.ModuleList((fc1, fc2))).begin_step(1)
        x = randn(T, K, seed=1, device=CUDA).requires_grad_()
        weights = torch.rand(T, device=CUDA).requires_grad_()
        groups, seen = Groups(torch.tensor(sizes, device=CUDA), E, T, x.device), []
        h = fc1(x, groups)
        forth = fc2.call_for_computed(h, groups) if inside else None
        y = gated_cast.weighted_swiglu_for(h, weights, None, forth, shown=not inside)
        h.grad_fn.register_prehook(lambda grads: seen.append(type(grads[0])))
        seen.append(type(y))
        out = fc2(y, groups)
        out.backward(randn(T, K, seed=2, device=CUDA))
        assert seen == [GroupedPayloads if inside else torch.Tensor] * 2
        found.append([weights.grad, out.detach(), x.grad, fc1.weight.grad, fc2.weight.grad])
    (dw, *inside), (dw_apart, *apart) = found
    torch.testing.assert_close(dw, dw_apart, rtol=1e-4, atol=1e-4)
    assert all(t.any() for t in inside) and all(map(torch.equal, inside, apart))


@pytest.mark.parametrize("row", ["fp8_rowwise_e4m3", "fp8_block_e4m3"])
@pytest.mark.parametrize("col, dtype", [("fp8_rowwise_e4m3", torch.bfloat16), ("fp8_rowwise_e5m2:pow2", torch.float32)])
def test_both_directions_of_experts_weights(row, col, dtype):
    """As groups of rows: the bytes of casts of a direction at a time, NaN, Inf and zeros included."""
    row, col = parse_format(row), parse_format(col)
    weight = randn(3, 256, 272, seed=1, device=CUDA, dtype=dtype)
    weight[0, 3, 5], weight[1, 200, 7], weight[2, :, 9], weight[1, 130] = float("nan"), float("-inf"), 0, 0
    for got, direction, fmt in zip(StackedWeight.make_both(weight, row, col), DIRECTIONS, (row, col)):
        expected = StackedWeight.make(weight, fmt, direction)
        assert (got.direction, got.format, got.num, got.shape) == (direction, fmt, 3, expected.shape)
        for name in ("format", "direction", "shape", "dtype", "transposed", "outer_amax"):
            assert getattr(got.payload, name) == getattr(expected.payload, name), name
        assert got.payload.qdata.stride() == expected.payload.qdata.stride()
        assert torch.equal(got.payload.qdata, expected.payload.qdata)
        assert torch.equal(got.payload.scale.view(torch.int32), expected.payload.scale.view(torch.int32))


def test_weights_of_other_sizes_are_cast_a_direction_at_a_time():
    fmt = parse_format("fp8_rowwise_e4m3")
    assert StackedWeight.make_both(randn(2, 200, 64, seed=1, device=CUDA, dtype=torch.bfloat16), fmt, fmt) is None
