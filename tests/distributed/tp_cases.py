"""What the checks of tensor-parallel linears share: recipes, one linear on one rank and the same split, spies.

Needs torch and megatron_hybrid alone, so that the same checks run under NCCL on GPUs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_hybrid import Recipe
from megatron_hybrid.distributed.tp import (
    ColumnParallel,
    ColumnSequenceParallel,
    RowSequenceParallel,
    TensorParallel,
    column_index_maps,
    column_sharding,
    row_index_maps,
    row_sharding,
)
from megatron_hybrid.grouped import ExpertRuntimes
from megatron_hybrid.linear import LOCAL, hybrid_linear
from megatron_hybrid.plan import GRAD_OUTPUT, INPUT, WEIGHT, GemmPlan
from megatron_hybrid.random_keys import RandomKeys
from megatron_hybrid.roles import GROUPED_LINEAR, LINEAR, ModuleRole
from megatron_hybrid.runtime import LinearRuntime
from megatron_hybrid.weight_cache import WeightCache

ROLE = ModuleRole(LINEAR, "decoder.layers.0.mlp.linear_fc1", layer=1, num_layers=1)
EXPERT = ModuleRole(GROUPED_LINEAR, "decoder.layers.0.mlp.experts.linear_fc1", layer=1, num_layers=1, expert=2)
LAYOUTS = ("column", "gated column", "column SP", "gated column SP", "row", "row SP")
DERIVED = {"input": "rowwise_dequantized", "weight": "rowwise_dequantized", "grad_output": "rowwise_dequantized"}
NVFP4 = {
    "fprop": {"input": "nvfp4", "weight": "nvfp4:2d"},
    "dgrad": {"grad_output": "nvfp4:sr", "weight": "nvfp4:2d"},
    "wgrad": {"grad_output": "nvfp4:rht,sr", "input": "nvfp4:rht"},
}
GEMM_OPERANDS = {"fprop": (INPUT, WEIGHT), "dgrad": (GRAD_OUTPUT, WEIGHT), "wgrad": (GRAD_OUTPUT, INPUT)}
# name -> the recipe's defaults, and maybe `backward`
RECIPES = {
    "bf16": "high_precision",
    "fp8_current": {"fprop": "fp8_current_e4m3", "dgrad": {"grad_output": "fp8_current_e5m2", "weight": "fp8_current_e4m3"},
                    "wgrad": {"grad_output": "fp8_current_e5m2", "input": "fp8_current_e4m3"}},
    "fp8_delayed": "fp8_delayed_e4m3:history=4",
    "fp8_rowwise": "fp8_rowwise_e4m3",
    "fp8_block": {"fprop": {"input": "fp8_block_e4m3", "weight": "fp8_block_e4m3:2d"},
                  "dgrad": {"grad_output": "fp8_block_e4m3", "weight": "fp8_block_e4m3:2d"}, "wgrad": "fp8_block_e4m3"},
    "mxfp8": "mxfp8_e4m3",
    "mxfp8:2d": "mxfp8_e4m3:2d",
    "nvfp4": NVFP4,
    "nvfp4:sr everywhere": "nvfp4:sr",
    "nvfp4:row_scaled,sr": "nvfp4:row_scaled,sr",
    "nvfp4:row_scaled / mxfp8": {"fprop": "nvfp4:row_scaled", "dgrad": "mxfp8_e4m3", "wgrad": "mxfp8_e4m3",
                                 "columnwise_source": DERIVED},
    "nvfp4:row_scaled,sr / mxfp8": {"fprop": "nvfp4:row_scaled,sr", "dgrad": {"grad_output": "nvfp4:row_scaled,sr",
                                    "weight": "nvfp4:row_scaled"}, "wgrad": "mxfp8_e4m3"},
    "mxfp8 / nvfp4": {"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "nvfp4"},
    "nvfp4 / mxfp8 derived": {"fprop": "nvfp4", "dgrad": "mxfp8_e4m3", "wgrad": "mxfp8_e4m3", "columnwise_source": DERIVED},
    "mxfp8 / nvfp4 derived": {"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "nvfp4", "columnwise_source": DERIVED},
    "current / block": {"fprop": "fp8_current_e4m3", "dgrad": "fp8_block_e4m3", "wgrad": "fp8_block_e4m3"},
    "mxfp8 / bf16": {"fprop": "mxfp8_e4m3", "dgrad": "high_precision", "wgrad": "high_precision"},
    "bf16 / mxfp8": {"fprop": "high_precision", "dgrad": "mxfp8_e4m3", "wgrad": "mxfp8_e4m3"},
    "mxfp8 dequantized": ("mxfp8_e4m3", "dequantized"),
}  # fmt: skip


def recipe(name: str) -> Recipe:
    defaults = RECIPES[name]
    top = {}
    if isinstance(defaults, tuple):
        defaults, top["backward"] = defaults
    return Recipe.from_dict({"version": 1, "name": "t", "defaults": defaults, **top})


@dataclass
class Ranks:
    """The tensor-parallel group, and where tensors live."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def randn(self, *shape, seed: int, dtype=torch.bfloat16) -> torch.Tensor:
        """The same on every rank and device, with an outlier in the last row and column: the last rank's, however split."""
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        x[-1, -1] = 1e3
        return x.to(dtype).to(self.device)

    def part(self, x: torch.Tensor, dim: int | None, pieces: int = 1, rank: int | None = None) -> torch.Tensor:
        """A rank's shard of a whole tensor: its run of each of `pieces` runs along a dimension."""
        if dim is None:
            return x
        rank = self.rank if rank is None else rank
        return torch.cat([run.chunk(self.size, dim)[rank] for run in x.chunk(pieces, dim)], dim).contiguous()

    def split(self, layout: str, K: int, N: int):
        """(sharding, index maps) of the rank's share of a linear; none for layout ``one``."""
        sequence, pieces = layout.endswith("SP"), 1 + ("gated" in layout)
        if "column" in layout:
            sharding = column_sharding(self.size, N, sequence_parallel=sequence, pieces=pieces)
            return sharding, column_index_maps(self.rank, self.size, K, N, pieces)
        if "row" in layout:
            sharding = row_sharding(self.size, K, sequence_parallel=sequence)
            return sharding, row_index_maps(self.rank, self.size, K, N)
        return None, {}

    def runtime(self, layout: str, recipe: Recipe, K: int, N: int, backend="reference") -> LinearRuntime:
        """The rank's share of a linear, or, for layout ``one``, the whole linear."""
        sharding, maps = self.split(layout, K, N)
        return self._ready(LinearRuntime(recipe, ROLE, self.device, backend=backend, sharding=sharding), maps)

    def experts(self, layout: str, recipe: Recipe, K: int, N: int, num: int) -> ExpertRuntimes:
        """The rank's share of a grouped linear, or the whole."""
        sharding, maps = self.split(layout, K, N)
        runtimes = ExpertRuntimes(
            recipe, EXPERT, num, self.device, weight_rows=N, backend="reference", sharding=sharding
        )
        for runtime in runtimes:
            self._ready(runtime, maps).ranks = None if sharding is None else TensorParallel(self.group)
        return runtimes

    def _ready(self, runtime: LinearRuntime, maps: dict) -> LinearRuntime:
        """In a step, with keys, a weight cache and delayed scales."""
        runtime.index_maps, runtime.keys = maps, RandomKeys(5, num_microbatches=2)
        runtime.weight_cache = WeightCache()
        runtime.keys.set(3, 1)
        for name, buffer in runtime.named_buffers():
            if name.endswith("scale"):
                buffer.fill_(4.0)
        return runtime

    def communication(self, layout: str):
        if layout == "one":
            return LOCAL
        cls = {
            "column": ColumnParallel, "column SP": ColumnSequenceParallel, "row": TensorParallel, "row SP": RowSequenceParallel
        }[layout.removeprefix("gated ")]  # fmt: skip
        return cls(self.group)


def split_dims(layout: str) -> dict:
    """operand -> dimension of this rank's part of it as its gemms see it."""
    return {WEIGHT: 0, GRAD_OUTPUT: 1} if "column" in layout else {INPUT: 1, WEIGHT: 1}


def compare_gemm(ranks: Ranks, layout: str, gemm: str, one, split, what: str) -> None:
    """Codes and scales of one gemm's operands, of one rank and of this one: pairs of payloads."""
    dims, pieces = split_dims(layout), 1 + ("gated" in layout)
    for operand, whole, mine in zip(GEMM_OPERANDS[gemm], one, split):
        where = f"{what}, {gemm} {operand}.{mine.direction} {mine.format}"
        dim, runs = dims.get(operand), pieces if operand != INPUT else 1
        assert torch.equal(ranks.part(whole.dequantize(), dim, runs), mine.dequantize()), where
        if whole.format.is_quantized:
            assert torch.equal(ranks.part(whole.codes(), dim, runs), mine.codes()), where
            for scale, own in ((whole.block_scale(), mine.block_scale()), (whole.outer_scale(), mine.outer_scale())):
                is_cut = dim is not None and scale.dim() == 2 and scale.shape[dim] > 1
                assert torch.equal(ranks.part(scale, dim, runs) if is_cut else scale, own), f"{where}: scales"


def partial_sums(ranks: Ranks, layout: str, operands):
    """(sum, sum of magnitudes) in float64 of what each rank contributes to the result of a gemm of one rank's operands."""
    a, b = (s.operand(torch.float32).double() for s in operands)
    pieces = 1 + ("gated" in layout)
    parts = [ranks.part(a, 1, pieces, r) @ ranks.part(b, 1, pieces, r).T for r in range(ranks.size)]
    return sum(parts), sum(p.abs() for p in parts)


def close_sum(found, total, magnitude, ranks: int, what: str) -> None:
    """A bf16 sum of parts that are rounded to bf16: `ranks` roundings, of a part or of a running sum, each of 2^-8."""
    error = (found.double().view_as(total) - total).abs()
    bound = ranks * 2.0**-8 * magnitude + 1e-30
    assert (error <= 1.01 * bound).all(), f"{what}: {(error / bound).max().item():.2f} of the bound"


@dataclass
class Result:
    """Outputs and gradients of one forward and backward, and the operands of each gemm."""

    y: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor
    db: torch.Tensor | None
    operands: dict
    kept: list[torch.Tensor]


def run(ranks: Ranks, layout: str, runtime: LinearRuntime, x, w, dy, bias=None) -> Result:
    """Forward and backward of this rank's tensors; y before the reduction outside a row-parallel linear."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    bias = None if bias is None else bias.detach().clone().requires_grad_()
    comm = ranks.communication(layout)
    rows = x.shape[:-1].numel() // (comm.size if runtime.plan_for(ranks.device).gathered == "grad_output" else 1)
    call = runtime.call(ranks.device, comm, training=True, rows=rows)
    with recorded_operands() as operands, kept_tensors() as kept:
        y = hybrid_linear(x, w, bias, call)
        y.backward(dy)
    operands = {gemm: pair for (_, gemm), pair in operands.items()}
    return Result(y.detach(), x.grad, w.grad, None if bias is None else bias.grad, operands, kept)


def run_experts(runtimes: ExpertRuntimes, x, w, dy, splits: list[int]) -> Result:
    """The same of a grouped linear: operands of a gemm are a list, one pair an expert; y before the sum over ranks."""
    x, w = x.detach().clone().requires_grad_(), torch.nn.Parameter(w.detach().clone())
    with recorded_operands() as operands:
        y = runtimes(x, w, None, splits, training=True)
        y.backward(dy)
    of_experts = {gemm: [pair for (_, ran), pair in operands.items() if ran == gemm] for gemm in GEMM_OPERANDS}
    return Result(y.detach(), x.grad, w.grad, None, of_experts, [])


@contextlib.contextmanager
def recorded_operands():
    """(plan's name, gemm) -> its two payloads, of the gemms run inside the block."""
    seen, original = {}, GemmPlan.run

    def spy(plan, gemm, a, b, *args, **kwargs):
        seen[plan.name, gemm] = (a, b)
        return original(plan, gemm, a, b, *args, **kwargs)

    GemmPlan.run = spy
    try:
        yield seen
    finally:
        GemmPlan.run = original


@contextlib.contextmanager
def kept_tensors():
    """The tensors that autograd keeps inside the block."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        yield kept


@dataclass(frozen=True)
class Sent:
    """One tensor of a collective: bytes this rank puts in, element type, global ranks of the group, whether it was
    asynchronous, and the collective's number: tensors that travel together share it."""

    name: str
    nbytes: int
    dtype: torch.dtype
    ranks: tuple[int, ...]
    asynchronous: bool
    op: object = None  # of a reduction
    number: int = -1


@contextlib.contextmanager
def on_the_wire():
    """Every collective of torch.distributed inside the block, in order."""
    sent, wrapped = [], {}
    source = {
        "all_gather_into_tensor": (1, "input_tensor"), "reduce_scatter_tensor": (1, "input"), "all_reduce": (0, "tensor")
    }  # fmt: skip

    def wrap(name, original):
        def collective(*args, group=None, async_op=False, **kwargs):
            place, keyword = source[name]
            x = args[place] if len(args) > place else kwargs[keyword]
            members = tuple(dist.get_process_group_ranks(group))
            if name != "all_gather_into_tensor" or not waits_for_others(group):
                sent.append(Sent(name, x.nbytes, x.dtype, members, async_op, kwargs.get("op"), len(sent)))
            return original(*args, group=group, async_op=async_op, **kwargs)

        return collective

    def waits_for_others(group):
        """Whether the call only notes what `together` is called with later (NCCL, Megatron's buckets)."""
        return (group or dist.group.WORLD) in dist.distributed_c10d._world.pg_coalesce_state

    def together(group, whole, tensors):
        assert "nccl" in dist.get_backend(group), "gloo's threads write a coalesced operation's name at once: the heap breaks"
        members, number = tuple(dist.get_process_group_ranks(group)), len(sent)
        sent.extend(Sent("all_gather_into_tensor", x.nbytes, x.dtype, members, True, None, number) for x in tensors)
        return coalesced(group, whole, tensors)

    for name in source:
        wrapped[name] = getattr(dist, name)
        setattr(dist, name, wrap(name, wrapped[name]))
    coalesced = dist.ProcessGroup.allgather_into_tensor_coalesced
    dist.ProcessGroup.allgather_into_tensor_coalesced = together
    try:
        yield sent
    finally:
        dist.ProcessGroup.allgather_into_tensor_coalesced = coalesced
        for name, original in wrapped.items():
            setattr(dist, name, original)
