"""Tensor-parallel linears under sequence parallelism against Megatron's own in bf16: time, host time, kernels, bytes.

    torchrun --nproc-per-node 2 scripts/bench_tp.py [--json OUT.json] [--profile]

A stack of column- and row-parallel linears, forward and backward as in a step of one microbatch: every weight is cast
once. Every round times each recipe's stack in turn, so that all meet the same machine. On CPUs with gloo it only shows
that it runs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch
import torch.distributed as dist
from bench_common import is_cast, is_gemm, median, write_result

from megatron_hybrid import Recipe, patches
from megatron_hybrid.explain import Table
from megatron_hybrid.patches import cpu_device

MEGATRON = "Megatron's own, bf16"
RECIPES = ["bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"]


def start() -> torch.device:
    """Process and tensor-parallel groups of all ranks; this rank's device."""
    gpu = torch.cuda.is_available()
    if not gpu:
        cpu_device.install()
    patches.apply_all()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    from megatron.core import mpu, tensor_parallel

    mpu.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    return device


class Stack(torch.nn.Module):
    """`depth` pairs of a column-parallel linear (hidden, ffn) and a row-parallel one (ffn, hidden), one after another."""

    def __init__(self, args, recipe: str | None):
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.transformer_config import TransformerConfig

        from megatron_hybrid.mcore.layers import HybridColumnParallelLinear, HybridRowParallelLinear

        cfg = TransformerConfig(
            num_layers=args.depth, hidden_size=args.hidden, ffn_hidden_size=args.ffn, num_attention_heads=dist.get_world_size(), bf16=True,
            params_dtype=torch.bfloat16, tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=True,
            gradient_accumulation_fusion=False,
        )  # fmt: skip
        column, row = (ColumnParallelLinear, RowParallelLinear)
        if recipe is not None:
            column, row = (HybridColumnParallelLinear, HybridRowParallelLinear)
        common = dict(config=cfg, init_method=torch.nn.init.xavier_normal_, bias=False, skip_bias_add=False)
        self.linears = torch.nn.ModuleList()
        for _ in range(args.depth):
            self.linears.append(column(args.hidden, args.ffn, gather_output=False, **common))
            self.linears.append(row(args.ffn, args.hidden, input_is_parallel=True, **common))
        self.ours = recipe is not None
        if self.ours:
            self.quantize(Recipe.load(recipe))

    def quantize(self, recipe: Recipe) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig

        from megatron_hybrid.mcore import driver
        from megatron_hybrid.mcore.recipe_hook import carry

        carried = carry(recipe).configs["megatron_hybrid"]
        for i, linear in enumerate(self.linears):
            linear.hq_layer = i // 2 + 1
            name = f"decoder.layers.{i // 2}.mlp.linear_fc{i % 2 + 1}"
            linear.finish_init(QuantizationConfig(carried, MatchContext(name, i // 2), "megatron_hybrid"))
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        driver.attach([self], seed=1).controller.begin_step(1)

    def forward(self, x):
        for linear in self.linears:
            x = linear(x)[0]
        return x

    def step(self, x, dy) -> None:
        """A forward and a backward whose weights changed since the last."""
        x.grad = None
        for linear in self.linears:
            linear.weight.grad = None
            if self.ours:
                linear.is_first_microbatch = True
                linear.hq.invalidate()
        self(x).backward(dy)


def timed(stack: Stack, x, dy, calls: int) -> tuple[float, float]:
    """(ms of a step, ms in which the host had started it), of this rank."""
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    wait()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        stack.step(x, dy)
    host = time.perf_counter() - began
    wait()
    return (time.perf_counter() - began) / calls * 1e3, host / calls * 1e3


def profiled(stack: Stack, x, dy, calls: int = 3):
    """(ms a step of each kind of kernel, torch's table of what the host did) of this rank; GPUs only."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            stack.step(x, dy)
        torch.cuda.synchronize()
    shares, kernels = Counter(), Counter()
    for e in profile.events():
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation:
            name, ms = e.name, e.time_range.elapsed_us() / calls / 1e3
            kind = "nccl" if "nccl" in name else "gemms" if is_gemm(name) else "casts" if is_cast(name) else "other"
            shares[kind] += ms
            kernels[f"{kind}: {name[:100]}"] += ms
    lines = [f"{ms:8.3f} ms {name}" for name, ms in kernels.most_common(12)]
    host = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=50)
    return dict(shares), "\n".join([*lines, host])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of the whole sequence")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=2, help="pairs of linears")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=5, help="steps a round")
    parser.add_argument("--profile", action="store_true", help="print kernels and host functions of rank 0")
    parser.add_argument("--commit", help="recorded in place of git's")
    parser.add_argument("--json", help="write rows, card, versions and commit here")
    args = parser.parse_args()
    device, size = start(), dist.get_world_size()
    make = dict(device=device, dtype=torch.bfloat16)
    x, dy = (torch.randn(args.tokens // size, 1, args.hidden, **make) for _ in range(2))
    x.requires_grad_()
    stacks = {name: Stack(args, None if name == MEGATRON else name) for name in (MEGATRON, *args.recipes)}
    names, times = list(stacks), {name: [] for name in stacks}
    for r in range(args.rounds + 1):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            found = timed(stacks[name], x, dy, args.calls)
            times[name] += [found] if r else []  # the first is a warm-up
    rows = []
    for name, found in times.items():
        row = {"recipe": name, "ms": median([t for t, _ in found]), "host_ms": median([h for _, h in found])}
        row["speedup"] = median([t for t, _ in times[MEGATRON]]) / row["ms"]
        if device.type == "cuda":
            row["kernels_ms"], text = profiled(stacks[name], x, dy)
            if args.profile and dist.get_rank() == 0:
                print(f"== {name}\n{text}", flush=True)
        rows.append(row)
    if dist.get_rank() == 0:
        cells = tuple(
            (r["recipe"], f"{r['ms']:.3f}", f"{r['host_ms']:.3f}", f"{r['speedup']:.2f}",
             ", ".join(f"{kind} {ms:.2f}" for kind, ms in r.get("kernels_ms", {}).items())) for r in rows
        )  # fmt: skip
        said = f"{size} ranks, {device.type}, {args.tokens} tokens, {2 * args.depth} linears of {args.hidden} x {args.ffn}"
        print(Table(("linears", "ms", "host ms", "speedup", "kernels, ms"), cells, (said,)), flush=True)
        shape = {key: getattr(args, key) for key in ("tokens", "hidden", "ffn", "depth", "rounds", "calls")}
        write_result(args.json, rows, ranks=size, commit=args.commit, **shape)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
