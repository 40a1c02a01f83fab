"""Combinations of parallelism, sharding, recomputation, recipe and model, as data: what runs and to which result, what is
refused.

Rows are chosen so that every two values of two axes that may stand beside each other do so in one of them.
test_matrix.py runs every row through pretrain(), run_matrix.py a dozen on GPUs; scripts/compatibility.py makes
docs/compatibility.md of them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from dataclasses import astuple, dataclass, fields, replace

MIXED, EXPERTS = "mxfp8_fprop_nvfp4_bwd", "nvfp4_rowscaled_fprop_mxfp8_bwd"
NONE = "-"
MOST_RANKS = 4


@dataclass(frozen=True)
class Split:
    """A value of a layout's axis: how many ranks, Megatron's flags. distributed: with the distributed optimizer."""

    ranks: int = 1
    flags: tuple[str, ...] = ()
    distributed: bool = True


def _size(name: str, *more: str) -> tuple[str, ...]:
    return f"--{name}-parallel-size", "2", *more


FSDP2 = ("--use-torch-fsdp2", "--ckpt-format", "torch_dist")
MEGATRON_FSDP = ("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor")
TENSOR = {
    NONE: Split(),
    "TP 2": Split(2, _size("tensor-model")),
    "TP 2, SP": Split(2, _size("tensor-model", "--sequence-parallel")),
}
STAGES = {
    NONE: Split(),
    "PP 2": Split(2, _size("pipeline-model")),
    "PP 2, two stages a rank": Split(2, _size("pipeline-model", "--num-layers-per-virtual-pipeline-stage", "1")),
}
CONTEXT = {NONE: Split(), "CP 2": Split(2, _size("context"))}
DATA = {
    NONE: Split(),
    "DP 2": Split(2, (), distributed=False),
    "DP 2, distributed optimizer": Split(2),
    "FSDP2 over 2": Split(2, FSDP2, distributed=False),
    "EP 2": Split(2, _size("expert-model")),
}
LAYOUT = {"tensor": TENSOR, "stages": STAGES, "context": CONTEXT, "data": DATA}

_SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
FULL, MOE = "full", "moe"
OF_DENSE, OF_EXPERTS = "core_attn layernorm mlp", "core_attn layernorm moe_act shared_experts"
RECOMPUTE = {
    NONE: (),
    FULL: ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    **{modules: (*_SELECTIVE, *modules.split()) for modules in (OF_DENSE, OF_EXPERTS, MOE)},
}
_QUANTIZED = {"weights": "quantized", "param_gather": "both"}
LIVES, LIVES_MIXED, PAYLOADS, TRAVELS = "lives", "lives_mixed", "payloads", "travels"
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
    "late": ("mxfp8, output layer too, all forwards in bf16 from step 3", "mxfp8",
             {"lm_head": True, "rules": [{"match": {"steps": "3:"}, "use": {"fprop": "high_precision"}}]}),
    LIVES: ("mxfp8, weights live quantized", "mxfp8", {**_QUANTIZED, "master_cast": "param_dtype"}),
    LIVES_MIXED: (f"{MIXED}, weights live quantized", MIXED, _QUANTIZED),
    PAYLOADS: (f"{MIXED}, FSDP2 gathers payloads", MIXED, {"param_gather": "both"}),
    TRAVELS: (f"{EXPERTS}, tokens dispatched quantized", EXPERTS, {"dispatch": "quantized"}),
}  # fmt: skip
# what moves payloads -> what moves bf16, to the same bits
AS_WHOLE = {PAYLOADS: MIXED, TRAVELS: EXPERTS}
# model -> (what the table says, flags)
DENSE, SPARSE = "dense", "experts"
MODELS = {
    DENSE: ("GPT", ()),
    SPARSE: ("mixture of experts, one of them shared", (
        "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64", "--moe-aux-loss-coeff", "1e-2",
        "--moe-shared-expert-intermediate-size", "64", "--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall")),
}  # fmt: skip
UNTIED, TIED = "own", "tied"
OUTPUT = {UNTIED: ("--untie-embeddings-and-output-weights",), TIED: ()}
MICROBATCHES = (1, 2)

BITS, LOSSES, CLOSE = "bits", "losses", "close"


@dataclass(frozen=True)
class Row:
    """One combination: a field an axis. microbatches: of a data-parallel rank, in each step."""

    recipe: str
    model: str = DENSE
    tensor: str = NONE
    stages: str = NONE
    context: str = NONE
    data: str = NONE
    recompute: str = NONE
    output: str = UNTIED
    microbatches: int = 1

    @property
    def layout(self) -> str:
        """As ``TP 2, SP, CP 2``."""
        return ", ".join(value for value in (self.tensor, self.stages, self.context, self.data) if value != NONE) or "one rank"

    @property
    def name(self) -> str:
        """A word for tests and files."""
        recompute, tied = f"recompute {self.recompute}" * self.is_recomputed, TIED * (self.output == TIED)
        words = (self.model, tied, self.layout, self.recipe, recompute, f"{self.microbatches}mb")
        return "-".join(word for word in words if word).replace(" ", "_").replace(",", "")

    @property
    def is_recomputed(self) -> bool:
        return self.recompute != NONE

    @property
    def splits(self) -> list[Split]:
        return [values[getattr(self, axis)] for axis, values in LAYOUT.items()]

    @property
    def ranks(self) -> int:
        product = 1
        for split in self.splits:
            product *= split.ranks
        return product

    @property
    def replicas(self) -> int:
        """Ranks that see other sequences."""
        return DATA[self.data].ranks

    @property
    def distributed_optimizer(self) -> bool:
        return all(split.distributed for split in self.splits)

    @property
    def flags(self) -> tuple[str, ...]:
        """Of model, layout and recomputation."""
        layout = (flag for split in self.splits for flag in split.flags)
        return (*MODELS[self.model][1], *OUTPUT[self.output], *layout, *RECOMPUTE[self.recompute])

    @property
    def has_experts(self) -> bool:
        return self.model == SPARSE

    @property
    def lives(self) -> bool:
        return self.recipe in (LIVES, LIVES_MIXED)

    @property
    def reference(self) -> tuple[Row, str]:
        """(what it is compared with, how: `BITS` of every number, `LOSSES` bit for bit, or `CLOSE`)."""
        if self.is_recomputed:
            return replace(self, recompute=NONE), BITS
        if self.recipe in AS_WHOLE:
            return replace(self, recipe=AS_WHOLE[self.recipe]), BITS
        recipe = "mxfp8" if self.recipe == LIVES else self.recipe
        how = CLOSE if self.other_sums else LOSSES
        microbatches = 2 if how == CLOSE else self.microbatches * self.replicas
        return Row(recipe, self.model, output=self.output, microbatches=microbatches), how

    @property
    def other_sums(self) -> str:
        """Which sums have another order or another rounding than one rank's; empty: none."""
        reasons = {
            "partial outputs of ranks are rounded to bf16": self.tensor != NONE,
            "keys' and values' gradients are summed over ranks": self.context != NONE,
            "FSDP2 sums gradients in bf16": self.data.startswith("FSDP2"),
            "an expert's tokens are those of all ranks": self.data.startswith("EP"),
            "a tied weight's gradients are summed over stages": self.output == TIED and self.stages != NONE,
            "more than two gradients are summed": self.replicas > 1 and self.replicas * self.microbatches > 2,
            "first scales of 1 meet gradients of another size": self.replicas > 1 and self.recipe == "fp8_delayed",
        }
        return "; ".join(reason for reason, holds in reasons.items() if holds)


OBVIOUS = NO_EXPERTS, NO_MLP, NO_GATHERS = "needs experts", "has no dense MLP", "needs FSDP2"


def reasons_not(row: Row) -> list[str]:
    """Why a row's values cannot all stand beside each other; empty: they can."""
    fsdp = row.data.startswith("FSDP2")
    experts_alone = row.data.startswith("EP") or row.recipe in (EXPERTS, TRAVELS) or row.recompute in (OF_EXPERTS, MOE)
    reasons = {
        "nothing is divided": row.ranks == 1,
        f"more than {MOST_RANKS} ranks": row.ranks > MOST_RANKS,
        NO_EXPERTS: experts_alone and not row.has_experts,
        NO_MLP: row.recompute == OF_DENSE and row.has_experts,
        NO_GATHERS: row.recipe == PAYLOADS and not fsdp,
        "refused: experts that ranks split, whose tokens come quantized": row.recipe == TRAVELS and row.tensor != NONE,
        "refused: quantized weights need the distributed optimizer": row.lives and not row.distributed_optimizer,
        "Megatron: experts under tensor parallelism need sequence parallelism": row.has_experts and row.tensor == "TP 2",
        "Megatron: interleaved stages need as many microbatches": "two stages" in row.stages and row.microbatches < 2,
        "Megatron: FSDP2 beside pipeline parallelism, tied embeddings": fsdp and (row.stages != NONE or row.output == TIED),
        "not tried": row.has_experts and row.recipe == "late",
    }
    return [reason for reason, holds in reasons.items() if holds]


AXES = {
    "recipe": tuple(RECIPES), "model": tuple(MODELS), **{axis: tuple(values) for axis, values in LAYOUT.items()},
    "recompute": tuple(RECOMPUTE), "output": tuple(OUTPUT), "microbatches": MICROBATCHES,
}  # fmt: skip
assert tuple(AXES) == tuple(field.name for field in fields(Row))


def everything():
    """Every combination of values."""
    return itertools.starmap(Row, itertools.product(*AXES.values()))


@functools.cache
def allowed() -> tuple[Row, ...]:
    """Every row that there may be."""
    return tuple(row for row in everything() if not reasons_not(row))


def pairs(row: Row) -> set[tuple]:
    """((axis, value), (axis, value)) of every two of its values."""
    return set(itertools.combinations(zip(AXES, astuple(row)), 2))


def never_beside() -> dict[tuple, str]:
    """Every two values that no row may have -> why not: what is said of the row with them that has least against it."""
    met, found = set().union(*map(pairs, allowed())), {}
    for row in everything():
        for pair in pairs(row) - met:
            found[pair] = min(found.get(pair, reasons_not(row)), reasons_not(row), key=len)
    places = {pair: [(list(AXES).index(axis), AXES[axis].index(value)) for axis, value in pair] for pair in found}
    return {pair: "; ".join(found[pair]) for pair in sorted(found, key=places.get)}


def _cost(row: Row) -> float:
    """About how long a row takes, starts included; one without recomputation runs beside it."""
    return (1 + row.ranks) * (2 if row.is_recomputed else 1)


def cover(given: list[Row]) -> list[Row]:
    """`given`, and for its cost the most useful row after another until all pairs have occurred; each with what it repeats."""
    met, chosen = set(), []

    def choose(row: Row) -> None:
        for each in (row.reference[0], row) if row.is_recomputed else (row,):
            met.update(pairs(each))
            chosen.append(each)

    for row in given:
        choose(row)
    queue = [(-len(pairs(row) - met) / _cost(row), number, row) for number, row in enumerate(allowed())]
    heapq.heapify(queue)
    while queue:
        _, number, row = heapq.heappop(queue)
        gain = len(pairs(row) - met) / _cost(row)  # which only falls
        if gain and queue and gain < -queue[0][0]:
            heapq.heappush(queue, (-gain, number, row))
        elif gain:
            choose(row)
    return list(dict.fromkeys(chosen))


TP2_SP, DP2 = dict(tensor="TP 2, SP"), dict(data="DP 2, distributed optimizer")
PP2, VPP2, CP2 = dict(stages="PP 2", microbatches=2), dict(stages="PP 2, two stages a rank", microbatches=2), dict(context="CP 2")
# for two GPUs: every layout of two ranks, every kind of cast, weights that live quantized, recomputation
ON_GPUS = [
    Row("fp8_current", **TP2_SP), Row(MIXED, **TP2_SP, recompute=FULL), Row("mxfp8", **PP2), Row("fp8_block", **VPP2),
    Row("fp8_delayed", **CP2), Row(MIXED, **CP2, recompute=OF_DENSE), Row("fp8_current", **DP2), Row(LIVES, **DP2, microbatches=2),
    Row("nvfp4", data="DP 2", recompute=OF_DENSE), Row("fp8_block", data="FSDP2 over 2"),
    Row(PAYLOADS, data="FSDP2 over 2"), Row(PAYLOADS, data="FSDP2 over 2", recompute=FULL), Row(EXPERTS, SPARSE, data="EP 2"),
    Row("mxfp8", SPARSE, data="EP 2", recompute=OF_EXPERTS),
]  # fmt: skip
# beside them, what a user is likely to combine, whatever pairs it brings
GIVEN = [
    *ON_GPUS, Row(LIVES, **TP2_SP, **DP2), Row("fp8_delayed", **TP2_SP, **DP2), Row("nvfp4", **TP2_SP, recompute=FULL),
    Row(EXPERTS, SPARSE, tensor="TP 2, SP", data="EP 2"),
]  # fmt: skip
ROWS = cover(GIVEN)


def references(rows: list[Row]) -> list[Row]:
    """What rows are compared with, one after another, and is none of them."""
    found = []
    for row in rows:
        while row.reference[0] not in (row, *found):
            row = row.reference[0]
            found.append(row)
    return [row for row in found if row not in rows]


@dataclass(frozen=True)
class Refusal:
    """Flags that are refused at start on one rank, and part of the message."""

    flags: tuple[str, ...]
    message: str
    ranks: int = 1


REFUSED = [
    Refusal(("--cuda-graph-impl", "transformer_engine"), "it needs Transformer Engine"),
    Refusal((*MEGATRON_FSDP, "--data-parallel-sharding-strategy", "no_shard"),
            "--use-megatron-fsdp beside --data-parallel-sharding-strategy no_shard"),
    Refusal((*MEGATRON_FSDP, "--pipeline-model-parallel-size", "2"), "its mesh of ranks has no pipeline stages", 2),
    Refusal(("--hq-offload-layers", "1", *RECOMPUTE[FULL]), "what is recomputed is not saved"),
    Refusal(("--window-size", "8,0"), "sliding windows"),
    Refusal((*FSDP2, "--calculate-per-token-loss"), "Megatron does not divide FSDP2's gradients by the number of tokens", 2),
    Refusal((*FSDP2, "--ckpt-format", "torch_dcp", "--save", "checkpoints"),
            "Megatron writes such checkpoints and fails to load", 2),
    Refusal((*FSDP2, "--num-experts", "4", "--save", "checkpoints"), "--use-torch-fsdp2 with experts one by one beside --save", 2),
    Refusal(("--fp8-format", "e4m3"), "--fp8-format beside --hq-recipe"),
    Refusal(("--tp-comm-overlap",), "--tp-comm-overlap beside --hq-recipe"),
    Refusal((*_SELECTIVE, "mla_up_proj"), "mla_up_proj in recompute_modules is only supported with multi_latent_attention"),
    Refusal(("--multi-latent-attention", *_SELECTIVE, "mla_up_proj"), "multi-latent attention (--multi-latent-attention) is not"),
    Refusal((*_SELECTIVE, "gdn_norm_out"), "gdn_norm_out in recompute_modules is only supported with"),
    Refusal(("--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "1", *_SELECTIVE, "gdn_norm_out"),
            "an experimental attention variant is not supported"),
]  # fmt: skip
