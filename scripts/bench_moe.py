"""A whole mixture-of-experts layer, forward and backward, against bf16 on the same stack.

    python scripts/bench_moe.py [--model configs/models/qwen3_30b_a3b.yaml ...] [--tokens 1024 4096 16384] [--json OUT]

Megatron's router, permutation and unpermutation over our experts, on one rank: with --experts N the rank holds N of the
model's experts and its tokens go to those alone, as many to each as in a run where the experts are spread over ranks.
Weights quantized before (their cache is kept), and cast in every step with --cast-weights. All recipes take turns in
every round. Permutation and SwiGLU are our kernels; --plain leaves Megatron's. --profile prints the share of casts and
GEMMs and the kernels of a step, longest first. Without a GPU it runs on the CPU, for trying the script: give small sizes.
"""

from __future__ import annotations

import argparse
import logging
import time

import torch
import yaml
from bench_common import write_result
from bench_grouped import DEVICE, ON_GPU, Subject, profile, timed

from megatron_hybrid.explain import Table
from megatron_hybrid.patches import cpu_device
from megatron_hybrid.patches.quiet import quiet_missing_te_warnings

if not ON_GPU:
    cpu_device.install()  # before Megatron is imported

with quiet_missing_te_warnings():
    import torch.nn.functional as F
    from megatron.core import mpu, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.quantization.utils import get_quant_config_or_none
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_hybrid import Recipe
    from megatron_hybrid.mcore import driver
    from megatron_hybrid.mcore.parts import choose
    from megatron_hybrid.mcore.recipe_hook import carry
    from megatron_hybrid.mcore.spec import layer_spec

MODELS = ["configs/models/qwen3_30b_a3b.yaml", "configs/models/deepseek_v3.yaml"]
RECIPES = ["bf16", "fp8_rowwise", "fp8_block", "nvfp4_rowscaled_fprop_mxfp8_bwd"]
GOAL, GOAL_TOKENS = 1.15, 16384  # FP8 recipes, weights quantized before; never slower from 1024 tokens up
DATA_SETS = 2


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=MODELS, help="files of Megatron's flags (default: %(default)s)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--experts", type=int, help="of the model's experts on this rank (default: all, at most 32)")
    parser.add_argument("--recipe", nargs="+", default=RECIPES, help="names or paths; the first is the reference")
    parser.add_argument("--cast-weights", action="store_true", help="cast the weights in every step")
    parser.add_argument("--plain", action="store_true", help="permutation and SwiGLU as Megatron has them without us")
    parser.add_argument("--dispatcher", choices=["alltoall", "allgather"], default="alltoall")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="device time of one step by kind of kernel, and by kernel")
    parser.add_argument("--json", help="write rows, card, versions and commit here")
    parser.add_argument("--commit", help="what to record as the commit where there is no git checkout")
    return parser.parse_args()


def config(path: str, args) -> TransformerConfig:
    """One layer of the model, with this rank's share of its experts."""
    with open(path) as file:
        flags = yaml.safe_load(file)
    experts = min(args.experts or 32, flags["num-experts"])
    groups = flags.get("moe-router-num-groups") if experts == flags["num-experts"] else None
    return TransformerConfig(
        num_layers=1, hidden_size=flags["hidden-size"], ffn_hidden_size=flags["ffn-hidden-size"],
        num_attention_heads=flags["num-attention-heads"], num_moe_experts=experts,
        moe_ffn_hidden_size=flags["moe-ffn-hidden-size"], moe_router_topk=min(flags["moe-router-topk"], experts),
        moe_router_num_groups=groups, moe_router_group_topk=flags.get("moe-router-group-topk") if groups else None,
        moe_router_score_function=flags.get("moe-router-score-function", "softmax"),
        moe_router_pre_softmax=flags.get("moe-router-pre-softmax", False),
        moe_shared_expert_intermediate_size=flags.get("moe-shared-expert-intermediate-size"),
        moe_router_load_balancing_type="none", moe_grouped_gemm=True, moe_token_dispatcher_type=args.dispatcher,
        bf16=True, params_dtype=torch.bfloat16, normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, bias_activation_fusion=ON_GPU, init_method_std=0.02,
    )  # fmt: skip


def build(cfg: TransformerConfig, recipe: str, *, cast_weights: bool, plain: bool) -> Subject:
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    cfg.quant_recipe = carry(Recipe.load(recipe))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    parts = choose(cfg, False if plain else None)
    parts.prepare(cfg)
    layer = layer_spec(cfg, experts=True, parts=parts).submodules.mlp(config=cfg, pg_collection=groups).to(DEVICE)
    layer.set_layer_number(1)
    for name, module in layer.named_modules():
        if hasattr(module, "finish_init"):
            module.hq_layer = 1
            module.finish_init(get_quant_config_or_none(f"decoder.layers.0.mlp.{name}", cfg.quant_recipe))
    layer.pg_collection = groups
    attached = driver.attach([layer], seed=1)
    controller = None if attached is None else attached.controller
    if controller is not None:
        controller.begin_step(1)

    def run(x, dy):
        for p in layer.parameters():
            p.grad = None
        if cast_weights and controller is not None:
            controller.invalidate()
        x = x.detach().requires_grad_()
        y, _ = layer(x)
        y.backward(dy)
        return y.detach(), x.grad, layer.experts.linear_fc1.weight.grad

    how = layer.experts.linear_fc1.hq.how(layer.experts.linear_fc1.weight)
    return Subject(recipe, run, str(how))


def relative(found, expected) -> float:
    return max(float((f.float() - e.float()).norm() / e.float().norm()) for f, e in zip(found, expected))


def bench(path: str, tokens: int, args) -> list[dict]:
    cfg = config(path, args)
    g = torch.Generator(DEVICE).manual_seed(2)
    shape = (tokens, 1, cfg.hidden_size)
    data = [tuple(torch.randn(shape, generator=g, device=DEVICE).bfloat16() for _ in range(2)) for _ in range(DATA_SETS)]
    subjects = [build(cfg, recipe, cast_weights=args.cast_weights, plain=args.plain) for recipe in args.recipe]
    reference = subjects[0].run(*data[0])
    off = [relative(s.run(*data[0]), reference) for s in subjects]
    timed(subjects, data, 2)
    rows = []
    for subject, error, (device, host) in zip(subjects, off, timed(subjects, data, args.repeat).values()):
        row = {"model": path, "tokens": tokens, "experts": cfg.num_moe_experts, "what": subject.name, "how": subject.how,
               "us": sorted(device)[len(device) // 2], "host_us": sorted(host)[len(host) // 2], "off": error}  # fmt: skip
        row["speedup"] = (rows[0] if rows else row)["us"] / row["us"]
        row["goal"] = None if not subject.name.startswith("fp8") else GOAL if tokens >= GOAL_TOKENS else 1.0
        if args.profile and ON_GPU:
            row["profile"] = profile(subject, data)
        rows.append(row)
    return rows


def show(rows: list[dict]) -> None:
    cells = [
        (r["model"].rpartition("/")[2].removesuffix(".yaml"), str(r["experts"]), str(r["tokens"]), r["what"], f"{r['us']:.0f}",
         f"{r['speedup']:.2f}x", "" if r["goal"] is None else "met" if r["speedup"] >= r["goal"] else f"missed ({r['goal']}x)",
         f"{r['host_us']:.0f}", f"{r['off']:.3f}") for r in rows
    ]  # fmt: skip
    header = ("model", "experts", "tokens", "recipe", "us", "against bf16", "goal", "host us", "off")
    print(Table(header, tuple(cells), (f"{torch.cuda.get_device_name() if ON_GPU else 'CPU'}, torch {torch.__version__}",)))
    for row in rows:
        if "profile" in row:
            total = sum(row["profile"]["kinds"].values())
            shares = ", ".join(f"{k} {v / total:.0%}" for k, v in row["profile"]["kinds"].items())
            print(f"{row['model']}, {row['tokens']} tokens, {row['what']}: {shares} of {total:.0f} us")
            for name, us in row["profile"]["longest"]:
                print(f"{us:10.0f}  {name}")


def main() -> int:
    args = parse_args()
    logging.disable(logging.WARNING)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl" if ON_GPU else "gloo", store=store, rank=0, world_size=1)
    mpu.initialize_model_parallel()
    rows = []
    for path in args.model:
        for tokens in args.tokens:
            began = time.perf_counter()
            rows += (part := bench(path, tokens, args))
            show(part)
            print(f"in {time.perf_counter() - began:.0f} s", flush=True)
            if ON_GPU:
                torch.cuda.empty_cache()
    write_result(args.json, rows, commit=args.commit)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
