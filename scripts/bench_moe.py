"""A whole mixture-of-experts layer, forward and backward, against bf16 on the same stack.

    python scripts/bench_moe.py [--model configs/models/qwen3_30b_a3b.yaml ...] [--tokens 1024 4096 16384] [--json OUT]
    torchrun --nproc-per-node 2 scripts/bench_moe.py --expert-parallel 2 [--dispatch high_precision quantized] ...

Megatron's router, permutation and unpermutation over our experts, on one rank: with --experts N the rank holds N of the
model's experts and its tokens go to those alone, as many to each as in a run where the experts are spread over ranks.
With --expert-parallel they are spread: every rank has tokens of its own and its share of the model's experts (or N), and
tokens travel by all-to-all, in bf16 or (--dispatch quantized) as codes and scales. A rank waits there for the
sizes of its groups, and the device for the host behind it. Times are the slowest rank's. All-to-alls are counted in steps
of their own: bytes that leave a rank, us until the others' are there, the wait for them included.

Weights quantized before (their cache is kept), and cast in every step with --cast-weights. All recipes take turns in
every round. Permutation and SwiGLU are our kernels; --plain leaves Megatron's. --profile prints the share of casts and
GEMMs and the kernels of a step, longest first. Without a GPU it runs on the CPU, for trying the script: give small sizes; it
counts torch operations of a step there. All layers share one set of weights, and gradients go when a step ends.

--peers te: Megatron's own layer over Transformer Engine's experts runs beside ours where that can be imported, with its
permutation, on the same weights, for the recipes that both have. x peer: how many times as fast as it ours is.
"""

from __future__ import annotations

import argparse
import logging
import re
import time

import torch
import torch.distributed as dist
import yaml
from bench_common import median, write_result
from bench_grouped import DEVICE, ON_GPU, Subject, profile, run_ahead, timed
from bench_peers import TE, TE_RECIPES, of_peer, swapped, te_missing
from bench_ranks import AllToAlls, of_ranks, slowest, start_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hybrid.explain import Table
from megatron_hybrid.patches import cpu_device
from megatron_hybrid.patches.quiet import quiet_missing_te_warnings

if not ON_GPU:
    cpu_device.install()  # before Megatron is imported

with quiet_missing_te_warnings():
    import torch.nn.functional as F
    from megatron.core import mpu, tensor_parallel
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_submodules
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.quantization.utils import get_quant_config_or_none
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_te_version

    from megatron_hybrid import Recipe, patches
    from megatron_hybrid.mcore import dispatch, driver
    from megatron_hybrid.mcore.parts import choose
    from megatron_hybrid.mcore.recipe_hook import carry
    from megatron_hybrid.mcore.spec import layer_spec
    from megatron_hybrid.recipe import QUANTIZED

MODELS = ["configs/models/qwen3_30b_a3b.yaml", "configs/models/deepseek_v3.yaml"]
RECIPES = ["bf16", "fp8_rowwise", "fp8_block", "nvfp4_rowscaled_fprop_mxfp8_bwd"]
GOAL, GOAL_TOKENS = 1.15, 16384  # FP8 recipes, weights quantized before; never slower from 1024 tokens up
DATA_SETS = 2
HIGH_PRECISION = "high_precision"
MOST_AT_ONCE = 2**26  # elements of a gradient, compared in FP32


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=MODELS, help="files of Megatron's flags (default: %(default)s)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--experts", type=int, help="of the model's experts on a rank (default: all of its share, at most "
                        "32 where there is one rank)")  # fmt: skip
    parser.add_argument("--expert-parallel", type=int, default=1, metavar="RANKS", help="all that torchrun starts")
    parser.add_argument("--dispatch", nargs="+", choices=[HIGH_PRECISION, QUANTIZED], default=[HIGH_PRECISION],
                        help="how tokens travel; the reference's always in high precision (default: %(default)s)")  # fmt: skip
    parser.add_argument("--recipe", nargs="+", default=RECIPES, help="names or paths; the first is the reference")
    parser.add_argument("--peers", nargs="*", choices=[TE], default=[],
                        help="beside them: te (Transformer Engine's experts in Megatron's layer, where importable)")
    parser.add_argument("--cast-weights", action="store_true", help="cast the weights in every step")
    parser.add_argument("--plain", action="store_true", help="permutation and SwiGLU as Megatron has them without us")
    parser.add_argument("--dispatcher", choices=["alltoall", "allgather"], default="alltoall")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="device time of one step by kind of kernel, and by kernel")
    parser.add_argument("--json", help="write rows, card, versions and commit here")
    parser.add_argument("--commit", help="what to record as the commit where there is no git checkout")
    return parser.parse_args()


def experts_of(path: str, has: int, args) -> int:
    """Of the `has` experts of the model, how many the layer has: as many on every rank."""
    ranks = args.expert_parallel
    if args.experts is None:
        experts = min(has, 32) if ranks == 1 else has
    else:
        experts = min(has, args.experts * ranks)
    if experts % ranks:
        raise SystemExit(f"{path}: {experts} experts are not as many on each of {ranks} ranks; give --experts, those of a rank")
    return experts


def config(path: str, args, **changes) -> TransformerConfig:
    """One layer of the model, with the ranks' share of its experts."""
    with open(path) as file:
        flags = yaml.safe_load(file)
    experts = experts_of(path, flags["num-experts"], args)
    groups = flags.get("moe-router-num-groups") if experts == flags["num-experts"] else None
    return TransformerConfig(
        num_layers=1, hidden_size=flags["hidden-size"], ffn_hidden_size=flags["ffn-hidden-size"],
        num_attention_heads=flags["num-attention-heads"], num_moe_experts=experts,
        expert_model_parallel_size=args.expert_parallel,
        moe_ffn_hidden_size=flags["moe-ffn-hidden-size"], moe_router_topk=min(flags["moe-router-topk"], experts),
        moe_router_num_groups=groups, moe_router_group_topk=flags.get("moe-router-group-topk") if groups else None,
        moe_router_score_function=flags.get("moe-router-score-function", "softmax"),
        moe_router_pre_softmax=flags.get("moe-router-pre-softmax", False),
        moe_shared_expert_intermediate_size=flags.get("moe-shared-expert-intermediate-size"),
        moe_router_load_balancing_type="none", moe_grouped_gemm=True, moe_token_dispatcher_type=args.dispatcher,
        moe_permute_fusion=not args.plain,
        bf16=True, params_dtype=torch.bfloat16, normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, bias_activation_fusion=ON_GPU, init_method_std=0.02, **changes,
    )  # fmt: skip


def tokens_quantized(recipe: Recipe) -> Recipe:
    """The recipe with tokens that travel quantized; their columns are then made from their rows."""
    changed = recipe.to_dict()
    source = {"columnwise_source": {"input": "rowwise_dequantized"}}
    rules = [{"match": {"name": "*.experts.linear_fc1"}, "use": source}, *changed["rules"]]
    return Recipe.from_dict(changed | {"dispatch": QUANTIZED, "rules": rules})


def variants(args) -> list[tuple[str, Recipe, str]]:
    """(name, recipe, dispatch) of all that is measured, the reference first."""
    found = [(args.recipe[0], Recipe.load(args.recipe[0]), HIGH_PRECISION)]
    for name in args.recipe[1:]:
        recipe = Recipe.load(name)
        for how in args.dispatch:
            quantized = how == QUANTIZED
            found.append((f"{name}, tokens quantized", tokens_quantized(recipe), how) if quantized else (name, recipe, how))
    return found


def build(cfg: TransformerConfig, name: str, recipe: Recipe, *, cast_weights: bool, plain: bool, like: dict) -> Subject:
    """like: parameters by name, whose memory this layer's, of the same values, take; empty: it is filled with them."""
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    cfg.quant_recipe = carry(recipe)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    parts = choose(cfg, False if plain else None)
    parts.prepare(cfg)
    layer = layer_spec(cfg, experts=True, parts=parts).submodules.mlp(config=cfg, pg_collection=groups).to(DEVICE)
    layer.set_layer_number(1)
    like.update(like or layer.named_parameters())
    for name_of_mine, mine in layer.named_parameters():
        mine.data = like[name_of_mine].data
    for path, module in layer.named_modules():
        if hasattr(module, "finish_init"):
            module.hq_layer = 1
            module.finish_init(get_quant_config_or_none(f"decoder.layers.0.mlp.{path}", cfg.quant_recipe))
    if recipe.dispatch == QUANTIZED:
        dispatch.refuse_unsupported(cfg)
        dispatch.adopt([layer])
    layer.pg_collection = groups
    attached = driver.attach([layer], seed=1)
    controller = None if attached is None else attached.controller
    if controller is not None:
        controller.begin_step(1)
    parameters = list(layer.parameters())  # found once: host time is the layer's

    def run(x, dy):
        if cast_weights and controller is not None:
            controller.invalidate()
        x = x.detach().requires_grad_()
        y, _ = layer(x)
        y.backward(dy)
        found = y.detach(), x.grad, layer.experts.linear_fc1.weight.grad
        for p in parameters:
            p.grad = None
        return found

    how = layer.experts.linear_fc1.hq.how(layer.experts.linear_fc1.weight)
    return Subject(name, run, str(how))


def megatrons_permutation() -> dict:
    """What stands in Megatron's module where our patch puts our permutation: Transformer Engine's."""
    patch = patches.PATCHES["moe_permutation"]
    patch.revert()
    found = {name: getattr(moe_utils, name) for _, _, name in (target.partition(":") for target in patch.targets)}
    patch.apply()
    return found


def build_peer(cfg: TransformerConfig, recipe: str, *, cast_weights: bool, like: dict) -> Subject:
    """Megatron's layer over Transformer Engine's experts. like: as `build` left it; an expert's parameter is a part of ours."""
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    groups, permutation = ProcessGroupCollection.use_mpu_process_groups(), megatrons_permutation()
    spec = get_gpt_layer_with_transformer_engine_submodules(num_experts=cfg.num_moe_experts, moe_grouped_gemm=True)
    with swapped(moe_utils, permutation):
        layer = spec.mlp(config=cfg, pg_collection=groups).to(DEVICE)
    layer.set_layer_number(1)
    for name, mine in layer.named_parameters():
        stem, expert = re.fullmatch(r"(.*?)(\d*)", name).groups()
        mine.data = like[stem].data[int(expert)] if expert else like[stem].data
    parameters = list(layer.parameters())
    of_experts = [getattr(layer.experts.linear_fc1, f"weight{e}") for e in range(layer.num_local_experts)]

    def run(x, dy):
        if cast_weights:
            layer.set_is_first_microbatch()
        x = x.detach().requires_grad_()
        with swapped(moe_utils, permutation), get_fp8_context(cfg):
            y, _ = layer(x)
        y.backward(dy)
        found = y.detach(), x.grad, [p.grad for p in of_experts]
        for p in parameters:
            p.grad = None
        return found

    def whole(found):
        y, dx, weight_gradients = found
        return y, dx, torch.stack(weight_gradients)

    return Subject(of_peer(recipe), run, f"Transformer Engine {get_te_version()}", whole)


def peers(path: str, args, like: dict) -> list[Subject]:
    """Of the recipes that are measured, those that a peer has."""
    if TE not in args.peers or te_missing():
        return []
    how = dict(cast_weights=args.cast_weights, like=like)
    recipes = filter(TE_RECIPES.__contains__, args.recipe)
    return [build_peer(config(path, args, **TE_RECIPES[recipe]), recipe, **how) for recipe in recipes]


def all_to_alls(subject: Subject, data, rounds: int) -> dict:
    """Calls, bytes that leave a rank, and us of a step's all-to-alls: the largest of all ranks, us the median of rounds."""
    found = []
    for r in range(rounds):
        dist.barrier()
        with AllToAlls(ON_GPU).counted() as count:
            subject.run(*data[r % len(data)])
        found.append(slowest([count.calls, count.bytes, count.us]))
    calls, moved, us = zip(*found)
    return {"calls": max(calls), "bytes": max(moved), "us": median(us)}


class Operations(TorchDispatchMode):
    """Counts torch operations of this thread, views included."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def operations(subject: Subject, data) -> int | None:
    """Of a step; None on a GPU, whose backward runs in another thread."""
    if ON_GPU:
        return None
    with Operations() as found:
        subject.run(*data[0])
    return found.count


def relative(found, expected) -> float:
    """The largest relative error of a tensor, in FP32."""

    def norm(parts) -> float:
        return float(torch.stack([part.norm() for part in parts]).norm())

    errors = []
    for pair in zip(found, expected):
        ours, theirs = (t.flatten().split(MOST_AT_ONCE) for t in pair)
        error = norm(f.float() - e.float() for f, e in zip(ours, theirs))
        errors.append(error / norm(e.float() for e in theirs))
    return max(errors)


def bench(path: str, tokens: int, args) -> list[dict]:
    cfg, ranks = config(path, args), args.expert_parallel
    g = torch.Generator(DEVICE).manual_seed(2 + dist.get_rank())
    shape = (tokens, 1, cfg.hidden_size)
    data = [tuple(torch.randn(shape, generator=g, device=DEVICE).bfloat16() for _ in range(2)) for _ in range(DATA_SETS)]
    what = variants(args)
    how, held = dict(cast_weights=args.cast_weights, plain=args.plain), {}
    subjects = [build(cfg, *named, **how, like=held) for *named, _ in what]
    beside = peers(path, args, held)
    what = [(recipe.name, how) for _, recipe, how in what] + [(subject.name, HIGH_PRECISION) for subject in beside]
    subjects += beside
    reference = subjects[0].run(*data[0])
    off = [of_ranks(relative(s.whole(s.run(*data[0])), reference)) for s in subjects]
    ready = run_ahead if ranks == 1 else dist.barrier
    timed(subjects, data, 2, ready)
    times, rows = timed(subjects, data, args.repeat, ready).values(), []
    for subject, (recipe, how), errors, (device, host) in zip(subjects, what, off, times):
        row = {"model": path, "tokens": tokens, "experts": cfg.num_moe_experts // ranks, "what": subject.name,
               "how": subject.how, "us": median(slowest(device)), "host_us": median(slowest(host)), "off": max(errors)}  # fmt: skip
        row["speedup"] = (rows[0] if rows else row)["us"] / row["us"]
        aimed_at = ON_GPU and subject.name.startswith("fp8")
        row["goal"] = None if not aimed_at else GOAL if tokens >= GOAL_TOKENS else 1.0
        if ranks > 1:
            row |= {"recipe": recipe, "dispatch": how, "experts_of_layer": cfg.num_moe_experts, "off_by_rank": errors,
                    "all_to_all": all_to_alls(subject, data, args.repeat)}  # fmt: skip
        row["operations"] = operations(subject, data)
        if args.profile and ON_GPU:
            row["profile"] = profile(subject, data)
        rows.append(row)
    of_name = {row["what"]: row for row in rows}
    for row, (recipe, _) in zip(rows, what):
        if peer := of_name.get(of_peer(recipe)):
            row["over_peer"] = peer["us"] / row["us"]
    return rows


COLUMNS = {
    "model": lambda r: r["model"].rpartition("/")[2].removesuffix(".yaml"),
    "experts": lambda r: str(r["experts"]),
    "tokens": lambda r: str(r["tokens"]),
    "recipe": lambda r: r["what"],
    "us": lambda r: f"{r['us']:.0f}",
    "against bf16": lambda r: f"{r['speedup']:.2f}x",
    "goal": lambda r: "" if r["goal"] is None else "met" if r["speedup"] >= r["goal"] else f"missed ({r['goal']}x)",
    "host us": lambda r: f"{r['host_us']:.0f}",
    "off": lambda r: f"{r['off']:.3f}",
}
OF_PEERS = {"x peer": lambda r: f"{r['over_peer']:.2f}" if "over_peer" in r else ""}
ON_CPU = {"operations": lambda r: str(r["operations"])}
OF_RANKS = {  # where there are several
    "all-to-all MB": lambda r: f"{r['all_to_all']['bytes'] / 1e6:.3f}",
    "all-to-all us": lambda r: f"{r['all_to_all']['us']:.0f}",
    "of the step": lambda r: f"{r['all_to_all']['us'] / r['us']:.0%}",
    "off by rank": lambda r: ", ".join(f"{error:.3f}" for error in r["off_by_rank"]),
}


def show(rows: list[dict], ranks: int) -> None:
    columns, said = COLUMNS if ON_GPU else COLUMNS | ON_CPU, f"{torch.cuda.get_device_name() if ON_GPU else 'CPU'}, torch {torch.__version__}"
    if any("over_peer" in row for row in rows):
        columns = columns | OF_PEERS
    if ranks > 1:
        columns, held = columns | OF_RANKS, rows[0]["experts"]
        each = ", ".join(f"{rank * held} to {(rank + 1) * held - 1}" for rank in range(ranks))
        said += f", {ranks} ranks ({dist.get_backend()}), of {rows[0]['experts_of_layer']} experts {held} on each: {each}"
    print(Table(tuple(columns), tuple(tuple(cell(r) for cell in columns.values()) for r in rows), (said,)))
    for row in rows:
        if "profile" in row:
            total = sum(row["profile"]["kinds"].values())
            shares = ", ".join(f"{k} {v / total:.0%}" for k, v in row["profile"]["kinds"].items())
            print(f"{row['model']}, {row['tokens']} tokens, {row['what']}: {shares} of {total:.0f} us")
            for name, us in row["profile"]["longest"]:
                print(f"{us:10.0f}  {name}")


def start(args) -> None:
    """Process and expert-parallel groups of all ranks."""
    start_ranks()
    ranks, found = args.expert_parallel, dist.get_world_size()
    if ranks != found:
        raise SystemExit(f"--expert-parallel {ranks}: start as many ranks (torchrun --nproc-per-node {ranks}), found {found}")
    mpu.initialize_model_parallel(expert_model_parallel_size=ranks)


def main() -> int:
    args = parse_args()
    logging.disable(logging.WARNING)
    start(args)
    rows, first = [], dist.get_rank() == 0
    if first and TE in args.peers and (reason := te_missing()):
        print(f"Transformer Engine: {reason}", flush=True)
    for path in args.model:
        for tokens in args.tokens:
            began = time.perf_counter()
            rows += (part := bench(path, tokens, args))
            if first:
                show(part, args.expert_parallel)
                print(f"in {time.perf_counter() - began:.0f} s", flush=True)
            if ON_GPU:
                torch.cuda.empty_cache()
    if first:
        write_result(args.json, rows, ranks=args.expert_parallel, commit=args.commit)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
