"""Combinations of parallelism, sharding, recomputation and recipe, as data: what runs and to which result, what is refused.

test_matrix.py runs every row through pretrain(); scripts/compatibility.py makes docs/compatibility.md of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

MIXED, EXPERTS = "mxfp8_fprop_nvfp4_bwd", "nvfp4_rowscaled_fprop_mxfp8_bwd"
NONE = "none"


@dataclass(frozen=True)
class Layout:
    """How the ranks divide the work. optimizer: whether Megatron's distributed optimizer shards its state."""

    ranks: int
    what: str
    flags: tuple[str, ...] = ()
    optimizer: bool = True


def _sizes(tp=1, pp=1, cp=1, ep=1, *more: str) -> tuple[str, ...]:
    sizes = {"tensor-model": tp, "pipeline-model": pp, "context": cp, "expert-model": ep}
    flags = [word for name, size in sizes.items() if size > 1 for word in (f"--{name}-parallel-size", str(size))]
    return (*flags, *more)


SP = "--sequence-parallel"
LAYOUTS = {
    "one": Layout(1, "one rank"),
    "tp2": Layout(2, "TP 2", _sizes(tp=2)),
    "tp2_sp": Layout(2, "TP 2, SP", _sizes(2, 1, 1, 1, SP)),
    "pp2": Layout(2, "PP 2 (1F1B)", _sizes(pp=2)),
    "vpp2": Layout(2, "PP 2, two stages a rank", _sizes(1, 2, 1, 1, "--num-layers-per-virtual-pipeline-stage", "1")),
    "cp2": Layout(2, "CP 2", _sizes(cp=2)),
    "dp2": Layout(2, "DP 2, distributed optimizer"),
    "ddp2": Layout(2, "DP 2", optimizer=False),
    "tp2_dp2": Layout(4, "TP 2, SP, DP 2", _sizes(2, 1, 1, 1, SP)),
    "tp2_pp2": Layout(4, "TP 2, SP, PP 2", _sizes(2, 2, 1, 1, SP)),
    "tp2_cp2": Layout(4, "TP 2, SP, CP 2", _sizes(2, 1, 2, 1, SP)),
    "pp2_dp2": Layout(4, "PP 2, DP 2", _sizes(pp=2)),
    "cp2_dp2": Layout(4, "CP 2, DP 2", _sizes(cp=2)),
    "pp2_cp2": Layout(4, "PP 2, CP 2", _sizes(pp=2, cp=2)),
    "ep2": Layout(2, "EP 2", _sizes(ep=2)),
    "ep4": Layout(4, "EP 4", _sizes(1, 1, 1, 4, "--micro-batch-size", "2")),
    "tp2_ep2": Layout(4, "TP 2, SP, EP 2", _sizes(2, 1, 1, 2, SP)),
}
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
RECOMPUTE = {
    NONE: (),
    "full": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    "core_attn": (*SELECTIVE, "core_attn"),
    "layernorm": (*SELECTIVE, "layernorm"),
    "mlp": (*SELECTIVE, "mlp"),
    "moe": (*SELECTIVE, "moe"),
    "moe_act": (*SELECTIVE, "moe_act"),
}
QUANTIZED = {"weights": "quantized", "param_gather": "both"}
# recipe -> (what the table says, shipped recipe it is made of, fields that change)
RECIPES = {
    "bf16": ("bf16", "bf16", {}),
    "fp8_delayed": ("fp8_delayed", "fp8_delayed", {}),
    "fp8_current": ("fp8_current", "fp8_current", {}),
    "fp8_block": ("fp8_block", "fp8_block", {}),
    "mxfp8": ("mxfp8", "mxfp8", {}),
    "nvfp4": ("nvfp4 (Hadamard, stochastic rounding)", "nvfp4", {}),
    MIXED: (MIXED, MIXED, {}),
    EXPERTS: (EXPERTS, EXPERTS, {}),
    "late": ("mxfp8, its forward in bf16 from step 3", "mxfp8",
             {"rules": [{"match": {"steps": "3:"}, "use": {"fprop": "high_precision"}}]}),
    "lm_head": ("mxfp8, output layer too", "mxfp8", {"lm_head": True}),
    "lives": ("mxfp8, weights live quantized", "mxfp8", {**QUANTIZED, "master_cast": "param_dtype"}),
    "lives_mixed": (f"{MIXED}, weights live quantized", MIXED, QUANTIZED),
}  # fmt: skip
# model -> (what the table says, flags)
MODELS = {
    "dense": ("GPT", ("--untie-embeddings-and-output-weights",)),
    "tied": ("GPT, tied embeddings", ()),
    "experts": ("mixture of experts", (
        "--untie-embeddings-and-output-weights", "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64",
        "--moe-aux-loss-coeff", "1e-2", "--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall")),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One combination. With recomputation it repeats the row without, bit for bit; else it is close to one rank."""

    layout: str
    recipe: str
    recompute: str = NONE
    model: str = "dense"

    @property
    def name(self) -> str:
        return "-".join((self.model, self.layout, self.recipe, self.recompute))

    @property
    def reference(self) -> Row:
        return Row(self.layout, self.recipe, NONE, self.model) if self.is_exact else Row("one", self.recipe, NONE, self.model)

    @property
    def is_exact(self) -> bool:
        return self.recompute != NONE

    @property
    def result(self) -> str:
        what = "the run without recomputation" if self.is_exact else "one rank"
        return f"the bits of {what}" if self.is_exact else f"close to {what}"


def _dense() -> list[Row]:
    """Every layout with two recipes in turn, so that every recipe meets several layouts, and with one all of them have."""
    layouts = [name for name in LAYOUTS if "ep" not in name and name != "one"]
    recipes = ["bf16", MIXED, "fp8_delayed", "nvfp4", "fp8_block", "mxfp8", "fp8_current", "late", "lm_head"]
    turns = itertools.cycle(recipes)
    rows = [Row(layout, next(turns)) for layout in layouts for _ in range(2)]
    return [*rows, *(Row(layout, MIXED) for layout in layouts)]


_RECOMPUTED = [
    ("full", ("tp2_sp", "vpp2", "cp2", "dp2", "tp2_pp2")), ("core_attn", ("tp2_sp", "pp2", "cp2")),
    ("layernorm", ("tp2_sp", "pp2", "tp2_dp2")), ("mlp", ("tp2_sp", "dp2", "tp2_cp2")),
]  # fmt: skip
ROWS = list(dict.fromkeys([
    *_dense(),
    *(Row(layout, MIXED, mode) for mode, layouts in _RECOMPUTED for layout in layouts),
    Row("tp2_sp", "nvfp4"), Row("tp2_sp", "nvfp4", "full"), Row("pp2", "nvfp4"), Row("pp2", "nvfp4", "core_attn"),
    Row("dp2", "fp8_delayed"), Row("dp2", "fp8_delayed", "full"),
    *(Row(layout, recipe) for recipe in ("lives", "lives_mixed") for layout in ("dp2", "tp2_dp2", "pp2_dp2", "cp2_dp2")),
    Row("dp2", "lives", "full"), Row("tp2_dp2", "lives_mixed", "layernorm"),
    *(Row(layout, recipe, NONE, "tied") for layout in ("tp2_sp", "pp2", "cp2", "tp2_pp2") for recipe in (MIXED, "lm_head")),
    *(Row(layout, recipe, NONE, "experts") for layout in ("ep2", "ep4", "tp2_ep2", "dp2") for recipe in ("bf16", EXPERTS)),
    Row("ep2", EXPERTS, "full", "experts"), Row("ep2", EXPERTS, "moe", "experts"), Row("ep2", EXPERTS, "moe_act", "experts"),
]))  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """Flags that are refused at start on one rank, and part of the message."""

    flags: tuple[str, ...]
    message: str
    ranks: int = 1


REFUSED = [
    Refusal(("--cuda-graph-impl", "local"), "a captured step would go on with the formats"),
    Refusal(("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"), "--use-megatron-fsdp with a recipe is not supported yet"),
    Refusal(("--hq-offload-layers", "1", *RECOMPUTE["full"]), "what is recomputed is not saved"),
    Refusal(("--window-size", "8,0"), "sliding windows"),
    Refusal(("--use-torch-fsdp2", "--ckpt-format", "torch_dist", "--context-parallel-size", "2"),
            "--use-torch-fsdp2 beside --context-parallel-size 2", 2),
    Refusal(("--fp8-format", "e4m3"), "--fp8-format beside --hq-recipe"),
    Refusal(("--tp-comm-overlap",), "--tp-comm-overlap beside --hq-recipe"),
]  # fmt: skip


def pairs_met() -> dict[str, Counter]:
    """(layout, recipe), (layout, recomputation), (recipe, recomputation) -> rows."""
    return {
        "layout x recipe": Counter((row.layout, row.recipe) for row in ROWS),
        "layout x recomputation": Counter((row.layout, row.recompute) for row in ROWS),
        "recipe x recomputation": Counter((row.recipe, row.recompute) for row in ROWS),
    }


def references() -> list[Row]:
    """What rows are compared with and is no row itself, in the order of need."""
    return [row for row in dict.fromkeys(row.reference for row in ROWS) if row not in ROWS]
