"""Runs of Megatron-FSDP that gathers payloads, and what they are compared with.

For test_megatron_fsdp_payloads.py and run_megatron_fsdp.py.
"""

from __future__ import annotations

import json

from launch import HERE
from mcore_cases import MIXED, MOCK, MODEL, SCRIPT, TP2, Case

import megatron_hybrid as mh

WATCHED = str(HERE / "watched_pretrain.py")
SHARDED, GRADS, OPTIM = "optim_grads_params", "optim_grads", "optim"
UNCLIPPED = ["--clip-grad", "1e6"]  # norms of gradients are sums of shards, whose order differs
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
TWO_LAYERS = [*FULL[:-1], "2"]
SELECTIVE = ["--recompute-granularity", "selective", "--recompute-modules", "core_attn", "layernorm"]
TWO_MICROBATCHES = ["--global-batch-size", "16"]
EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64", "--moe-aux-loss-coeff", "1e-2"),
    *("--moe-token-dispatcher-type", "alltoall"),
]
GROUPED = [*EXPERTS, "--moe-grouped-gemm"]
SHARED = [*GROUPED, "--moe-shared-expert-intermediate-size", "64"]
EP2 = ["--expert-model-parallel-size", "2"]
LIVES = {"weights": "quantized", "param_gather": "both"}
ROWS = {"weights": "quantized", "param_gather": "rowwise"}
DERIVED = {"columnwise_source": {"weight": "rowwise_dequantized"}}
LATE = {"rules": [{"match": {"steps": "3:"}, "use": "fp8_block_e4m3"}]}
RECIPES = {
    "plain": (MIXED, {}),
    "lives": (MIXED, LIVES),
    "rounded": (MIXED, {**LIVES, "master_cast": "param_dtype"}),
    "gathers": (MIXED, {"weights": "quantized", "param_gather": "high_precision"}),
    "tiles": ("fp8_block", ROWS),
    "squares": ("nvfp4", LIVES),
    "current": ("fp8_current", ROWS),
    "delayed": ("fp8_delayed", LIVES),
    "delayed_gathers": ("fp8_delayed", {"weights": "quantized", "param_gather": "high_precision"}),
    "derived": ("mxfp8", ROWS | {"defaults": {"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "mxfp8_e4m3"} | DERIVED}),
    "steps": (MIXED, LIVES | LATE),
    "head": ("mxfp8", LIVES | {"lm_head": True}),
    "stacked": ("mxfp8", LIVES),
    "stacked-steps": ("mxfp8", LIVES | LATE),
}


def case(name: str, recipe: str, *flags: str, fsdp: str | None = SHARDED, mode: str = "count", ranks: int | None = None) -> Case:
    """fsdp: the strategy, or None for the distributed optimizer. mode: ``check`` to compare the payloads gathered."""
    sharding = [] if fsdp is None else ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]
    sharding += [] if fsdp is None else ["--data-parallel-sharding-strategy", fsdp]
    chosen = ["--hq-recipe", f"{{folder}}/{recipe}.json", "--hq-metrics-file", f"{{folder}}/{name}.metrics"]
    watched = [WATCHED, f"{{folder}}/{name}.counts", mode]
    return Case(name, [*watched, SCRIPT, *MODEL, *MOCK, *UNCLIPPED, *chosen, *sharding, *flags], ranks)


def resumed(name: str, recipe: str, *flags: str, **kw) -> list[Case]:
    there = f"{{folder}}/{name}"
    return [
        case(name, recipe, *flags, "--save", there, "--save-interval", "2", **kw),
        case(f"{name}-resumed", recipe, *flags, "--load", there, "--ckpt-step", "2", **kw),
    ]


AS_ELSEWHERE = {  # a run -> the same under the distributed optimizer, or with weights in high precision
    "lives": "lives-plain", "optim": "lives-plain", "grads": "lives-plain", "delayed": "delayed-plain", "derived": "derived-plain",
    "steps": "steps-plain", "tp2": "tp2-plain", "experts": "experts-plain", "grouped": "grouped-plain",
    "stacked": "stacked-plain", "stacked-grads": "stacked-plain", "stacked-steps": "stacked-steps-plain", "rounded": "plain",
}  # fmt: skip
AS_EACH_OTHER = {  # runs under Megatron-FSDP
    "gathers": "lives", "full": "lives", "both-layers": "lives", "parts": "lives", "pools": "lives", "two-gathers": "two",
    "delayed_gathers": "delayed", "delayed-full": "delayed", "delayed-parts": "delayed", "stacked-parts": "stacked",
    "stacked-moe": "stacked", "shared-parts": "shared",
}  # fmt: skip
RESUMED = ["lives", "grads", "delayed", "delayed_gathers", "derived", "ep2", "grouped", "grouped-ep2"]
CHECKED = ["lives", "grads", "tiles", "squares", "current", "derived", "head"]
CASES = [
    *(case(f"{name}-plain", name, fsdp=None) for name in ("lives", "delayed", "derived", "steps")),
    case("tp2-plain", "derived", *TP2, fsdp=None),
    case("experts-plain", "lives", *EXPERTS, fsdp=None),
    case("grouped-plain", "delayed", *GROUPED, fsdp=None),
    *(case(f"{name}-plain", name, *GROUPED, fsdp=None) for name in ("stacked", "stacked-steps")),
    *(case(name, name, *GROUPED, mode="check") for name in ("stacked", "stacked-steps")),
    *resumed("lives", "lives", mode="check"),
    *resumed("grads", "lives", fsdp=GRADS, mode="check"),
    *resumed("delayed", "delayed"),
    *resumed("delayed_gathers", "delayed_gathers"),
    *resumed("derived", "derived", mode="check"),
    *resumed("ep2", "lives", *EXPERTS, *EP2),
    *resumed("grouped", "delayed", *GROUPED),
    *resumed("grouped-ep2", "delayed", *GROUPED, *EP2),
    case("optim", "lives", fsdp=OPTIM),
    case("plain", "plain"),
    *(case(name, name) for name in ("rounded", "gathers", "steps")),
    *(case(name, name, mode="check") for name in ("tiles", "squares", "current", "head")),
    case("full", "lives", *FULL),
    case("both-layers", "lives", *TWO_LAYERS),
    case("parts", "lives", *SELECTIVE, "mlp"),
    case("delayed-full", "delayed", *FULL),
    case("stacked-parts", "stacked", *GROUPED, *SELECTIVE, "moe_act"),
    case("stacked-moe", "stacked", *GROUPED, *SELECTIVE[:3], "moe"),
    case("shared", "stacked", *SHARED),
    case("shared-parts", "stacked", *SHARED, *SELECTIVE[:3], "shared_experts"),
    case("delayed-parts", "delayed", *SELECTIVE[:3], "mlp"),
    case("pools", "lives", "--fsdp-double-buffer"),
    case("two", "lives", *TWO_MICROBATCHES),
    case("two-gathers", "gathers", *TWO_MICROBATCHES),
    case("tp2", "derived", *TP2),
    case("experts", "lives", *EXPERTS),
    case("stacked-grads", "stacked", *GROUPED, fsdp=GRADS),
]
FOUR = {  # on four ranks: name -> (recipe, flags)
    "derived": ("derived", TP2),  # a column from the row, with an amax over all shards
    "current": ("current", TP2),  # one scale a tensor
    "experts": ("stacked", [*GROUPED, *EP2, "--micro-batch-size", "2"]),  # experts over two ranks each, the rest over four
    "delayed-experts": ("delayed", [*GROUPED, *TP2, *EP2, "--expert-tensor-parallel-size", "1"]),
}
WIDE = [case(f"{name}-{kind}", recipe, *flags, fsdp=fsdp, ranks=4) for name, (recipe, flags) in FOUR.items()
        for kind, fsdp in (("fsdp", SHARDED), ("plain", None))]  # fmt: skip


def with_recipes(folder):
    """The folder, with a file a recipe."""
    for name, (base, fields) in RECIPES.items():
        (folder / f"{name}.json").write_text(json.dumps({**mh.Recipe.load(base).to_dict(), **fields, "name": name}))
    return folder
