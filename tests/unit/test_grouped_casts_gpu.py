"""Casts and amaxes of groups on a GPU: the bytes of casts without a map, ragged groups and copies of tokens included."""

import pytest
import torch

from megatron_hybrid import parse_format, permutation
from megatron_hybrid.groups import Groups
from megatron_hybrid.grouped_columns import GroupCast, with_kernels, with_torch
from megatron_hybrid.kernels import amax_groups, groups_of
from megatron_hybrid.storage import cast

pytest.importorskip("triton", reason="ops_triton_cases needs it")
from ops_triton_cases import randn, routing  # noqa: E402

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
