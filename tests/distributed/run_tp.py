"""Tensor- and sequence-parallel linears against the same linear on one rank, all checks in one launch.

    torchrun --nproc-per-node N run_tp.py [--backend gloo|nccl] [--out FOLDER] [--only NAME ...]

Rank 0 prints a line for every check; rank r writes FOLDER/r.json, a dict of check -> error or None. The exit status
is 1 when a check failed on this rank. Tensors are on the CPU with gloo, on the GPUs with NCCL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from shared_gpus import take_device
from tp_cases import (
    GEMM_OPERANDS, LAYOUTS, RECIPES, Ranks, close_sum, compare_gemm, on_the_wire, partial_sums, recipe, run, run_experts,
)  # fmt: skip

from megatron_hybrid import node
from megatron_hybrid.distributed.amax import WeightAmaxes, start_max
from megatron_hybrid.grouped_at_once import GroupedPlan
from megatron_hybrid.linear import hybrid_linear
from megatron_hybrid.model_shape import LinearShape
from megatron_hybrid.plan import INPUT
from megatron_hybrid.sharding import block_along
from megatron_hybrid.weight_cache import WeightCache

SOME = ("fp8_current", "mxfp8", "nvfp4", "nvfp4 / mxfp8 derived", "nvfp4:row_scaled / mxfp8")
RAGGED = 46  # tokens a rank: like 4092 over 2 ranks, no multiple of 16, 32 or 128
ODD = 23  # like 4092 over 4 ranks


def sizes(ranks: Ranks, layout: str):
    """(K, N): every rank's part, and each of a gated part's two runs, is whole blocks of 128."""
    pieces = 1 + ("gated" in layout)
    return (256, 128 * pieces * ranks.size) if "column" in layout else (128 * ranks.size, 256)


def both(ranks: Ranks, layout: str, name: str, rows: int, *, bias=False, batch=2, backend="reference"):
    """The whole linear's result and this rank's, from the same tensors. rows: tokens a rank, over the batch. backend:
    of every gemm; None: what the device's plan chooses."""
    K, N = sizes(ranks, layout)
    sequence = rows * ranks.size // batch
    x, dy = ranks.randn(sequence * batch, K, seed=1), ranks.randn(sequence * batch, N, seed=2)
    w, b = ranks.randn(N, K, seed=3), ranks.randn(1, N, seed=4).view(-1) if bias else None
    shape = (sequence, batch)
    pieces = 1 + ("gated" in layout)
    chosen = recipe(name)
    one = run(ranks, "one", ranks.runtime("one", chosen, K, N, backend), x.view(*shape, K), w, dy.view(*shape, N), b)
    runtime = ranks.runtime(layout, chosen, K, N, backend)
    if "column" in layout:
        own_x = ranks.part(x, 0).view(-1, batch, K) if layout.endswith("SP") else x.view(*shape, K)
        own = own_x, ranks.part(w, 0, pieces), ranks.part(dy, 1, pieces).view(*shape, -1)
        b = None if b is None else ranks.part(b, 0, pieces)
    else:
        own_dy = ranks.part(dy, 0).view(-1, batch, N) if layout.endswith("SP") else dy.view(*shape, N)
        own, b = (ranks.part(x, 1).view(*shape, -1), ranks.part(w, 1), own_dy), None
    with on_the_wire() as sent:
        split = run(ranks, layout, runtime, *own, b)
    return one, split, runtime, sent


def compare_operands(ranks: Ranks, layout: str, one, split, what: str) -> None:
    """Codes and scales of every gemm's operands are the whole tensors', cut."""
    for gemm in GEMM_OPERANDS:
        compare_gemm(ranks, layout, gemm, one.operands[gemm], split.operands[gemm], what)


def compare_results(ranks: Ranks, layout: str, one, split, what: str) -> None:
    """What is not summed over ranks is bitwise one rank's; sums are within their roundings."""
    pieces, sequence = 1 + ("gated" in layout), layout.endswith("SP")
    if "column" in layout:
        assert torch.equal(ranks.part(one.y, 2, pieces), split.y), f"{what}: y"
        assert torch.equal(ranks.part(one.dw, 0, pieces), split.dw), f"{what}: dw"
        total, magnitude = partial_sums(ranks, layout, one.operands["dgrad"])
        dim = 0 if sequence else None
        close_sum(split.dx.flatten(0, 1), ranks.part(total, dim), ranks.part(magnitude, dim), ranks.size, f"{what}: dx")
        if one.db is not None:  # torch's own sum over rows, whose order follows the width on a GPU
            bound = 0.0 if ranks.device.type == "cpu" else 2.0**-7
            assert torch.allclose(ranks.part(one.db, 0, pieces), split.db, rtol=bound, atol=bound), f"{what}: db"
        return
    assert torch.equal(ranks.part(one.dx, 2), split.dx), f"{what}: dx"
    assert torch.equal(ranks.part(one.dw, 1), split.dw), f"{what}: dw"
    y = split.y
    if not sequence:  # the reduction is outside
        dist.all_reduce(y, group=ranks.group)
    total, magnitude = partial_sums(ranks, layout, one.operands["fprop"])
    dim = 0 if sequence else None
    close_sum(y.flatten(0, 1), ranks.part(total, dim), ranks.part(magnitude, dim), ranks.size, f"{what}: y")


def check_p60_c26_operands_and_results_are_one_ranks(ranks: Ranks):
    """Every recipe, every layout, an outlier on the last rank only; of more than two ranks only some recipes."""
    names = RECIPES if ranks.size == 2 else SOME
    for layout, name in itertools.product(LAYOUTS, names):
        one, split, runtime, _ = both(ranks, layout, name, rows=256 // ranks.size, bias="column" in layout)
        what = f"{layout}, {name}"
        compare_operands(ranks, layout, one, split, what)
        compare_results(ranks, layout, one, split, what)
        plan = runtime.plan_for(ranks.device)
        assert not plan.cut_shards(), what
        assert not [way for *_, way in plan.gathers if way == "high precision"], (what, plan.gathers)


def check_p60_experts_split_over_ranks(ranks: Ranks):
    """A grouped linear's experts, at once where they can and one by one, one of them without a token: operands are one
    rank's, cut, and so are results, but for sums over ranks. One collective an operand and gemm, not one an expert."""
    splits, at_once = [96, 0, 40], set()
    names = RECIPES if ranks.size == 2 else SOME
    for layout, name in itertools.product(("column", "gated column", "row"), names):
        (K, N), pieces = sizes(ranks, layout), 1 + ("gated" in layout)
        x, dy = ranks.randn(sum(splits), K, seed=1), ranks.randn(sum(splits), N, seed=2)
        w = torch.stack([ranks.randn(N, K, seed=3 + e) * 3.0**e for e in range(3)])
        if "column" in layout:
            own = x, ranks.part(w, 1, pieces), ranks.part(dy, 1, pieces)
        else:
            own = ranks.part(x, 1), ranks.part(w, 2), dy
        for one_by_one in (False, True):
            whole, mine = (ranks.experts(kind, recipe(name), K, N, 3) for kind in ("one", layout))
            whole.one_by_one = mine.one_by_one = one_by_one
            if isinstance(mine.how(own[1]), GroupedPlan):
                at_once.add(name)
            elif not one_by_one:
                continue
            one = run_experts(whole, x, w, dy, splits)
            WeightAmaxes(ranks.group, {hq: partial(own[1].__getitem__, e) for e, hq in enumerate(mine)})
            with on_the_wire() as sent:
                split = run_experts(mine, *own, splits)
            what = f"{layout}, {name}, {'one by one' if one_by_one else 'at once'}"
            assert "derived" in name or len(sent) <= 4, (what, sent)  # a derived column's amax comes with its expert's cast
            assert all(s.name == "all_reduce" and s.dtype == torch.int32 for s in sent), (what, sent)
            compare_experts(ranks, layout, one, split, what)
            assert whole[0].plan_for(ranks.device).reduced == {} and not mine[0].plan_for(ranks.device).cut_shards()
    assert at_once >= {"bf16", "mxfp8", "fp8_rowwise", "fp8_block", "nvfp4:row_scaled / mxfp8"}.intersection(names)


def compare_experts(ranks: Ranks, layout: str, one, split, what: str) -> None:
    """`compare_operands` and `compare_results` of a grouped linear."""
    for gemm in GEMM_OPERANDS:
        for e, pairs in enumerate(zip(one.operands[gemm], split.operands[gemm], strict=True)):
            compare_gemm(ranks, layout, gemm, *pairs, f"{what}, expert {e}")
    pieces, gemm = 1 + ("gated" in layout), "dgrad" if "column" in layout else "fprop"
    total, magnitude = (torch.cat(parts) for parts in zip(*(partial_sums(ranks, layout, p) for p in one.operands[gemm])))
    if "column" in layout:
        summed, exact = split.dx, ((one.y, 1, pieces, split.y), (one.dw, 1, pieces, split.dw))
    else:
        summed, exact = split.y, ((one.dx, 1, 1, split.dx), (one.dw, 2, 1, split.dw))
    for whole, dim, runs, mine in exact:
        assert torch.equal(ranks.part(whole, dim, runs), mine), what
    dist.all_reduce(summed, group=ranks.group)
    close_sum(summed, total, magnitude, ranks.size, what)


def check_columns_as_the_devices_gemms_read_them(ranks: Ranks):
    """The same with the backends that the device chooses: columns are gathered contraction-contiguous, FP4 packed."""
    for layout, name in itertools.product(LAYOUTS, ("fp8_current", "mxfp8", "nvfp4", "mxfp8 / nvfp4 derived")):
        one, split, runtime, _ = both(ranks, layout, name, rows=128, backend=None)
        assert any(s.transposed for operands in split.operands.values() for s in operands), (layout, name)
        compare_operands(ranks, layout, one, split, f"{layout}, {name}, chosen backends")
        assert all(torch.isfinite(t).all() for t in (split.y, split.dx, split.dw))


def check_c23_c24_ragged_sequences(ranks: Ranks):
    """Blocks that end inside another rank's rows: the tensor travels in high precision, counted; the bytes stay right."""
    names, rows, batch = (RECIPES, RAGGED, 2) if ranks.size == 2 else (SOME, ODD, 1)
    for layout, name in itertools.product([l for l in LAYOUTS if l.endswith("SP")], names):
        one, split, runtime, _ = both(ranks, layout, name, rows=rows, batch=batch)
        plan, what = runtime.plan_for(ranks.device), f"{layout}, {name}, ragged"
        compare_operands(ranks, layout, one, split, what)
        compare_results(ranks, layout, one, split, what)
        quantizer = plan.quantizers[plan.gathered]
        formats = zip(("rowwise", "columnwise"), quantizer.formats())
        cut = [direction for direction, fmt in formats if rows % block_along(fmt, direction, 0)]
        ways = {direction: way for _, direction, way in plan.gathers}
        for direction in ("rowwise", "columnwise"):
            derived = direction == "columnwise" and quantizer.derives_columnwise and "rowwise" not in cut
            expected = direction in cut and not derived
            assert (ways[direction] == "high precision") == expected, (what, ways, cut)


def check_weights_whose_blocks_are_cut_at_shard_bounds(ranks: Ranks):
    """The plan names them; codes are the shard's own, and results are finite."""
    K, N = 64, 46 * ranks.size
    for layout, name in itertools.product(("column", "row"), ("mxfp8", "nvfp4", "fp8_block")):
        k, n = (K, N) if layout == "column" else (N, K)
        runtime = ranks.runtime(layout, recipe(name), k, n)
        cut = runtime.plan_for(ranks.device).cut_shards()
        assert any(line.startswith("weight.") for line in cut), (layout, name, cut)
        shape = (N // ranks.size, K) if layout == "column" else (K, N // ranks.size)
        x, dy = ranks.randn(32, shape[1], seed=1), ranks.randn(32, shape[0], seed=2)
        result = run(ranks, layout, runtime, x, ranks.randn(*shape, seed=3), dy)
        assert all(torch.isfinite(t).all() for t in (result.y, result.dx, result.dw))


def check_p62_bytes_on_the_wire(ranks: Ranks):
    """Payload and scales of the one direction that a gemm reads, each asynchronously; no operand in bf16."""
    M, size = 128, ranks.size
    members = tuple(dist.get_process_group_ranks(ranks.group))
    # bytes of (M, K) or (M, N) rows of one rank: codes and scales, of each direction
    payloads = {
        "mxfp8": lambda m, k: ([m * k, m * k // 32], [m * k, m * k // 32]),
        "fp8_block": lambda m, k: ([m * k, 4 * m * k // 128], [m * k, 4 * m * k // 128]),
        "fp8_rowwise": lambda m, k: ([m * k, 4 * m], [m * k]),
        "fp8_current": lambda m, k: ([m * k], [m * k]),
        "mxfp8 / nvfp4": lambda m, k: ([m * k, m * k // 32], [m * k // 2, m * k // 16]),
        "nvfp4:row_scaled,sr": lambda m, k: ([m * k // 2, m * k // 16, 4 * m], [m * k // 2, m * k // 16]),
    }
    for layout, (name, bytes_of) in itertools.product(("column SP", "row SP"), payloads.items()):
        _, _, runtime, sent = both(ranks, layout, name, rows=M)
        K, N = sizes(ranks, layout)
        row, column = bytes_of(M, K if layout == "column SP" else N)
        if layout == "row SP" and name == "mxfp8 / nvfp4":
            row = column  # a gradient's directions are both of backward
        if layout == "row SP" and name == "fp8_current":
            column = []  # the same codes as the row's: made from them
        gathers = [s.nbytes for s in sent if s.name == "all_gather_into_tensor"]
        expected = row + column if ranks.device.type == "cuda" else [sum(part) for part in (row, column) if part]
        assert gathers == expected, (layout, name, gathers, row, column)
        assert all(s.dtype != torch.bfloat16 for s in sent if s.name == "all_gather_into_tensor")
        transfers = len({s.number for s in sent if s.name == "all_gather_into_tensor"})
        assert transfers == bool(row) + bool(column), (layout, name, "codes and scales go together", transfers)
        plan, dims = runtime.plan_for(ranks.device), (N // size, K) if layout == "column SP" else (N, K // size)
        shape = LinearShape(M * size, *dims, gathers=size, gathered=plan.gathered)
        said = sum(shape.gathered_bytes(plan, direction) for direction in ("rowwise", "columnwise"))
        assert said == sum(gathers) * (size - 1), (layout, name, "what explain says", said)
        assert all(s.ranks == members and s.asynchronous for s in sent), (layout, name)
        reductions = [s for s in sent if s.name == "all_reduce"]
        assert all(s.dtype == torch.int32 for s in reductions), (layout, name)
        shared = {"mxfp8": 0, "fp8_block": 0}.get(name)
        assert shared is None or len(reductions) == shared, (layout, name, reductions)
        scattered = [s.nbytes for s in sent if s.name == "reduce_scatter_tensor"]
        assert scattered == [2 * M * size * (K if layout == "column SP" else N)]


def plainly(
    ranks: Ranks, layout: str, name: str, rows: int, *, by_node: bool, frozen=(), main_grad=False, bias=False, times=1
):  # fmt: skip
    """Two microbatches of a linear with nobody looking: (results, counts, collectives in their order, type of node).

    times: a factor of all tensors.
    """
    (K, N), size = sizes(ranks, layout), ranks.size
    if "column" in layout:
        N //= size
    else:
        K //= size
    of_x = rows // size if layout == "column SP" or layout == "gated column SP" else rows
    runtime = ranks.runtime(layout, recipe(name), *sizes(ranks, layout), None)
    plan, comm = runtime.plan_for(ranks.device), ranks.communication(layout)
    if not by_node and plan.lean is not None:
        plan.lean.node = None
    w = ranks.randn(N, K, seed=3 + ranks.rank).mul_(times + ranks.rank).requires_grad_("w" not in frozen)
    b = ranks.randn(1, N, seed=4).view(-1).requires_grad_() if bias else None
    if main_grad:
        w.main_grad = torch.ones(N, K, device=ranks.device)
    results, made = [], set()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for batch in range(2):
            x = ranks.randn(of_x, 1, K, seed=10 * ranks.rank + batch).mul_(times * (3 - ranks.rank))
            x.requires_grad_("x" not in frozen)
            own = rows // size if runtime.plan_for(ranks.device).gathered == "grad_output" else of_x
            y = hybrid_linear(x, w, b, runtime.call(ranks.device, comm, training=True, rows=own))
            made.add(type(y.grad_fn))
            y.backward(ranks.randn(*y.shape, seed=5 + ranks.rank).mul_(times * (2 + ranks.rank)))
            results += [y.detach(), x.grad, w.main_grad.clone() if main_grad else w.grad, None if b is None else b.grad]
            w.grad = None
    results += [t.clone() for _, t in runtime.named_buffers()]
    seen = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    # of lists of tensors torch records neither sizes nor types
    sent = [
        (e.name(), [math.prod(shape) for shape in e.shapes() if shape], e.dtypes()[:2])
        for e in seen if e.name().startswith("c10d::")
    ]  # fmt: skip
    (made,) = made
    return results, (plan.calls, plan.gathers), sent, made


def check_the_node_does_what_python_does(ranks: Ranks):
    """Bits, counts and what travels, in which order, of linears that run by the C++ node; which those are."""
    if node.library() is None:
        return
    cases = [(layout, name, {}) for layout, name in itertools.product(LAYOUTS, RECIPES)]
    some = ("fp8_delayed", "fp8_current", "bf16", "nvfp4", "mxfp8 / nvfp4 derived", "mxfp8 dequantized")
    for layout, name in itertools.product(("column", "column SP", "row", "row SP"), some):
        cases += [(layout, name, kwargs) for kwargs in (dict(frozen="x"), dict(frozen="w"), dict(main_grad=True))]
        cases += [(layout, name, dict(bias=True))] if "column" in layout else []
    cases += [("column SP", name, dict(rows=RAGGED * ranks.size)) for name in ("mxfp8", "fp8_block")]
    for layout, name, kwargs in cases:
        how = {"rows": 128 * ranks.size, **kwargs}
        (found, counts, sent, made), (expected, counted, other, python) = (
            plainly(ranks, layout, name, how["rows"], by_node=by_node, **{k: v for k, v in how.items() if k != "rows"})
            for by_node in (True, False)
        )
        what = f"{layout}, {name}, {kwargs}"
        for a, b in zip(found, expected, strict=True):
            assert a is b is None or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), what
        assert counts == counted, (what, counts, counted)
        assert sent == other, (what, sent, other)
        assert python is not node.library().LinearBackward
        left = "rows" in kwargs or (layout == "row SP" and kwargs.get("frozen") == "x")
        assert (made is node.library().LinearBackward) == (not left), (what, made)


def check_kept_for_backward_is_the_ranks_own_payload(ranks: Ranks):
    """A sequence-parallel rank keeps its own rows, quantized where the plan keeps a payload."""
    _, split, runtime, _ = both(ranks, "column SP", "mxfp8 / nvfp4", rows=128)
    K, _ = sizes(ranks, "column SP")
    plan = runtime.plan_for(ranks.device)
    assert plan.saved[INPUT] == "columnwise"
    own = 128 * K // 2 + 128 * K // 16 + 4
    assert LinearShape(128 * ranks.size, 1, K, gathers=ranks.size).saved_bytes(plan, INPUT) == own
    weight = sum(t.numel() * t.element_size() for t in split.operands["dgrad"][1].buffers().values())
    assert sum(t.numel() * t.element_size() for t in split.kept) == own + weight


def check_amaxes_of_weights_in_one_collective(ranks: Ranks):
    """Ten linears, one reduction; none on a second microbatch; again after an invalidation; the same scales."""
    class Part(torch.nn.Module):
        def __init__(self, layout, name, seed):
            super().__init__()
            self.layout, (K, N) = layout, sizes(ranks, layout)
            whole = ranks.randn(N, K, seed=seed)
            self.weight = torch.nn.Parameter(ranks.part(whole, 0 if "column" in layout else 1))
            self.hq = ranks.runtime(layout, recipe(name), K, N)
            self.x = ranks.randn(32, self.weight.shape[1], seed=seed + 50)

        def forward(self):
            call = self.hq.call(ranks.device, ranks.communication(self.layout), training=True, rows=32)
            return hybrid_linear(self.x, self.weight, None, call)

    names = ["fp8_current", "nvfp4", "mxfp8", "fp8_rowwise", "mxfp8 / nvfp4"]
    layouts = itertools.product(("column", "row"), names)
    parts = [Part(layout, name, seed) for seed, (layout, name) in enumerate(layouts)]
    with torch.no_grad(), on_the_wire() as alone:
        expected = [part() for part in parts]
    pool = WeightAmaxes(ranks.group, {part.hq: partial(getattr, part, "weight") for part in parts})
    with torch.no_grad(), on_the_wire() as sent:
        found = [part() for part in parts]
        inputs = [s for s in sent]
        again = [part() for part in parts]
        second = sent[len(inputs):]
        parts[3].weight.mul_(2)
        parts[3].hq.invalidate()
        parts[3]()
        third = len(sent)
        parts[0].weight.mul_(3)  # writes that torch sees and nobody announces
        parts[3].weight.mul_(3)
        written = [part() for part in parts]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, found, again))
    activations = len(second)  # row-parallel inputs only
    assert len(inputs) == activations + 1 < len(alone), (len(inputs), activations, len(alone))
    assert pool._found is not None and third == len(inputs) + activations + 1
    assert len(sent) - third == activations + 1, (len(sent), third, activations)
    for part in parts:
        part.hq.weight_cache = WeightCache()
    with torch.no_grad():
        assert all(torch.equal(part(), y) for part, y in zip(parts, written))


def check_maximum_keeps_nan_and_inf(ranks: Ranks):
    last = ranks.size - 1
    mine = [float("nan"), float("inf"), 2.0] if ranks.rank == last else [1.0, 3.0, 5.0]
    if ranks.rank == 0:
        mine[2] = 7.0
    amaxes = [torch.tensor(mine[0], device=ranks.device), torch.tensor([mine[1:]], device=ranks.device)]
    first, rest = start_max(amaxes, ranks.group)()
    assert torch.isnan(first) and first.shape == () and rest.shape == (1, 2)
    assert rest[0, 0] == float("inf") and rest[0, 1] == 7.0
    for name in ("fp8_current", "nvfp4"):  # one element of the last rank's rows or columns
        for layout in LAYOUTS:
            K, N = sizes(ranks, layout)
            x = ranks.randn(128 * ranks.size, K, seed=1)
            x[-1, -1] = float("nan")
            one = ranks.runtime("one", recipe(name), K, N)
            split = ranks.runtime(layout, recipe(name), K, N)
            dim = None if layout in ("column", "gated column") else 0 if "column" in layout else 1
            rows = (split.plan_for(ranks.device).gathered == INPUT) and 128
            call = split.call(ranks.device, ranks.communication(layout), training=True, rows=rows)
            whole = one.plan_for(ranks.device).quantize(INPUT, x, rowwise=True)[0]
            mine = call.cast(INPUT, ranks.part(x, dim), rowwise=True)[0]
            assert torch.equal(ranks.part(whole.codes(), dim), mine.codes()), (name, layout)


def check_c27_collectives_stay_in_the_group(ranks: Ranks):
    """Pairs of ranks as tensor-parallel groups of a larger world: nothing leaves the pair."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks.size - 1, 2)]
    pair = pairs[dist.get_rank() // 2]
    inner = Ranks(pair, ranks.device)
    for layout, name in itertools.product(LAYOUTS, ("fp8_current", "nvfp4", "mxfp8 / nvfp4")):
        one, split, _, sent = both(inner, layout, name, rows=128)
        compare_operands(inner, layout, one, split, f"pair, {layout}, {name}")
        assert {s.ranks for s in sent} <= {tuple(dist.get_process_group_ranks(pair))}
    if node.library() is None:
        return
    for layout, name in itertools.product(LAYOUTS, ("bf16", "fp8_current", "fp8_rowwise")):  # the next pair's: larger
        how = dict(rows=256, times=3 ** (dist.get_rank() // 2))
        found, _, _, made = plainly(inner, layout, name, by_node=True, **how)
        expected, *_ = plainly(inner, layout, name, by_node=False, **how)
        assert made is node.library().LinearBackward
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (layout, name)


def check_c30_rowwise_for_100_steps(ranks: Ranks):
    """A column- and a row-parallel linear under sequence parallelism against one rank: finite, as good, repeatable."""
    M, H, F = 32, 32, 32 * ranks.size
    x, target = ranks.randn(M, H, seed=1, dtype=torch.float32).clamp(max=1), torch.zeros(M, H, device=ranks.device)
    target[:, 0] = x[:, 1].sign()

    def train(layouts, steps):
        cut = "one" not in layouts
        weights = [0.1 * ranks.randn(*shape, seed=7, dtype=torch.float32).clamp(-3, 3) for shape in ((F, H), (H, F))]
        weights = [(ranks.part(w, dim) if cut else w).requires_grad_() for dim, w in enumerate(weights)]
        own_x, own_target = (ranks.part(t, 0) if cut else t for t in (x, target))
        sizes = zip(layouts, (H, F), (F, H))
        runtimes = [ranks.runtime(layout, recipe("fp8_rowwise"), k, n, "emulated") for layout, k, n in sizes]
        comms, rows = [ranks.communication(layout) for layout in layouts], M // ranks.size
        losses = []
        for _ in range(steps):
            calls = [r.call(ranks.device, comm, training=True, rows=rows) for r, comm in zip(runtimes, comms)]
            hidden = torch.relu(hybrid_linear(own_x, weights[0], None, calls[0]))
            loss = (hybrid_linear(hidden, weights[1], None, calls[1]) - own_target).square().sum() / M
            grads = torch.autograd.grad(loss, weights)
            assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)
            with torch.no_grad():
                for w, g, runtime in zip(weights, grads, runtimes):
                    w -= 0.05 * g
                    runtime.invalidate()
            losses.append(loss.detach())
        losses = torch.stack(losses)
        if cut:  # summed in one order, however many there are
            losses = ranks.communication("row").start_gather(losses.unsqueeze(0))()[0].sum(0)
        return losses.tolist()

    one, split = train(("one", "one"), 100), train(("column SP", "row SP"), 100)
    assert one[-1] < 0.7 * one[0], (one[0], one[-1])
    assert abs(split[0] - one[0]) <= 1e-5 * one[0] and abs(split[-1] - one[-1]) <= 0.02 * one[0], (split[-1], one[-1])
    assert train(("column SP", "row SP"), 10) == split[:10], "equal runs differ"


def start(backend: str) -> Ranks:
    """The process group of all ranks, and this rank's device."""
    device = take_device(backend)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(backend, **({} if device.type == "cpu" else {"device_id": device}))
    return Ranks(dist.group.WORLD, device)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of checks' names")
    args = parser.parse_args()
    ranks = start(args.backend)
    errors = {}
    for name, check in globals().items():
        if not name.startswith(tuple(f"check_{start}" for start in args.only)):
            continue
        began, name, error = time.monotonic(), name.removeprefix("check_"), None
        try:
            check(ranks)
        except Exception:
            error = traceback.format_exc()
        errors[name] = error
        outcomes = [None] * ranks.size
        dist.all_gather_object(outcomes, None if error is None else error.strip().splitlines()[-1][:300])
        if ranks.rank == 0:
            failed = [f"rank {r}: {text}" for r, text in enumerate(outcomes) if text]
            outcome, took = "FAILED" if failed else "ok", time.monotonic() - began
            print(f"{outcome:6} {took:6.1f} s  {name}", *failed, sep="\n    ", flush=True)
    if args.out:
        (args.out / f"{ranks.rank}.json").write_text(json.dumps(errors))
    dist.barrier()  # torchrun ends the other ranks when one leaves with a failure
    dist.destroy_process_group()
    return int(any(errors.values()))


if __name__ == "__main__":
    sys.exit(main())
