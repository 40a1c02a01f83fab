"""Tensor-parallel linears under sequence parallelism against Megatron's own in bf16: time, host time, kernels, bytes.

    torchrun --nproc-per-node 2 scripts/bench_tp.py [--json OUT.json] [--graphs] [--profile]

A stack of column- and row-parallel linears, forward and backward as in a step of one microbatch: every weight is cast
once. Every round times each recipe's stack in turn, so that all meet the same machine. With --graphs each step is also
captured in a CUDA graph and replayed: what is left when the host takes no time. On CPUs with gloo it only shows that it
runs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from bench_common import is_cast, is_gemm, median, write_result
from bench_ranks import start_ranks

from megatron_hybrid import Recipe
from megatron_hybrid.explain import Table

MEGATRON = "Megatron's own, bf16"
LAYERS = 80  # of the model that the linears are of
RECIPES = ["bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"]


def start() -> torch.device:
    """Process and tensor-parallel groups of all ranks; this rank's device."""
    device = start_ranks()
    from megatron.core import mpu, tensor_parallel

    mpu.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    return device


class Stack(torch.nn.Module):
    """`depth` pairs of a column-parallel linear (hidden, ffn) and a row-parallel one (ffn, hidden), one after another."""

    def __init__(self, args, hidden: int, ffn: int, recipe: str | None):
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.transformer_config import TransformerConfig

        from megatron_hybrid.mcore.layers import HybridColumnParallelLinear, HybridRowParallelLinear

        cfg = TransformerConfig(
            num_layers=LAYERS, hidden_size=hidden, ffn_hidden_size=ffn, num_attention_heads=dist.get_world_size(), bf16=True,
            params_dtype=torch.bfloat16, tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=True,
            gradient_accumulation_fusion=False,
        )  # fmt: skip
        column, row = (ColumnParallelLinear, RowParallelLinear)
        if recipe is not None:
            column, row = (HybridColumnParallelLinear, HybridRowParallelLinear)
        common = dict(config=cfg, init_method=torch.nn.init.xavier_normal_, bias=False, skip_bias_add=False)
        self.linears = torch.nn.ModuleList()
        for _ in range(args.depth):
            self.linears.append(column(hidden, ffn, gather_output=False, **common))
            self.linears.append(row(ffn, hidden, input_is_parallel=True, **common))
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
            layer = LAYERS // 2 + i // 2  # no recipe's first or last
            linear.hq_layer = layer + 1
            name = f"decoder.layers.{layer}.mlp.linear_fc{i % 2 + 1}"
            linear.finish_init(QuantizationConfig(carried, MatchContext(name, layer), "megatron_hybrid"))
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


def captured(stack: Stack, x, dy) -> torch.cuda.CUDAGraph:
    """A graph of one step; every rank captures at the same time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            stack.step(x, dy)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        stack.step(x, dy)
    return graph


def timed(step, on_gpu: bool, calls: int) -> tuple[float, float]:
    """(ms of a step, ms in which the host had started it), of this rank."""
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    wait()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        step()
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


def interleaved(steps: dict, args) -> dict[str, tuple[float, float]]:
    """Medians of `timed` over rounds in which each step's calls come in turn; a round before is a warm-up."""
    names, times = list(steps), {name: [] for name in steps}
    for r in range(args.rounds + 1):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            found = timed(steps[name], torch.cuda.is_available(), args.calls)
            times[name] += [found] if r else []
    return {name: tuple(median([t[i] for t in found]) for i in range(2)) for name, found in times.items()}


def measured(args, shape: str, device) -> list[dict]:
    """A row for each recipe; rank 0 prints its profile."""
    hidden, ffn = map(int, shape.split("x"))
    make = dict(device=device, dtype=torch.bfloat16)
    x, dy = (torch.randn(args.tokens // dist.get_world_size(), 1, hidden, **make) for _ in range(2))
    x.requires_grad_()
    stacks = {name: Stack(args, hidden, ffn, None if name == MEGATRON else name) for name in (MEGATRON, *args.recipes)}
    times = interleaved({name: partial(stack.step, x, dy) for name, stack in stacks.items()}, args)
    rows = [{"shape": shape, "recipe": name, "ms": ms, "host_ms": host} for name, (ms, host) in times.items()]
    if device.type == "cuda":
        for row in rows:
            row["kernels_ms"], text = profiled(stacks[row["recipe"]], x, dy)
            if args.profile and dist.get_rank() == 0:
                print(f"== {shape} {row['recipe']}\n{text}", flush=True)
    if args.graphs:
        graphs = {name: captured(stack, x, dy) for name, stack in stacks.items()}
        times = interleaved({name: graph.replay for name, graph in graphs.items()}, args)
        for row in rows:
            row["graph_ms"] = times[row["recipe"]][0]
    for key in {"ms", "graph_ms"} & set(rows[0]):
        for row in rows:
            row[f"{key}_speedup"] = rows[0][key] / row[key]
    return rows


def table(rows: list[dict], said: str) -> Table:
    titles = ("shape", "linears", "ms", "speedup", "host ms", "graph ms", "speedup", "kernels, ms")
    cells = []
    for r in rows:
        numbers = [r.get(key) for key in ("ms", "ms_speedup", "host_ms", "graph_ms", "graph_ms_speedup")]
        kernels = ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(r.get("kernels_ms", {}).items()))
        cells.append((r["shape"], r["recipe"], *("" if n is None else f"{n:.2f}" for n in numbers), kernels))
    return Table(titles, tuple(cells), (said,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of the whole sequence")
    parser.add_argument("--shapes", nargs="+", default=["4096x8192", "8192x28672"], metavar="HIDDENxFFN")
    parser.add_argument("--depth", type=int, default=2, help="pairs of linears")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=5, help="steps a round")
    parser.add_argument("--main-thread", action="store_true", help="backward in the thread that calls it, Megatron's too")
    parser.add_argument("--graphs", action="store_true", help="also replay each step as a CUDA graph")
    parser.add_argument("--profile", action="store_true", help="print kernels and host functions of rank 0")
    parser.add_argument("--commit", help="recorded in place of git's")
    parser.add_argument("--json", help="write rows, card, versions and commit here")
    args = parser.parse_args()
    device, rows = start(), []
    torch.autograd.set_multithreading_enabled(not args.main_thread)
    for shape in args.shapes:
        rows += measured(args, shape, device)
        if dist.get_rank() == 0:
            said = f"{dist.get_world_size()} ranks, {device.type}, {args.tokens} tokens, {2 * args.depth} linears"
            print(table(rows, said), flush=True)
            how = {key: getattr(args, key) for key in ("tokens", "depth", "rounds", "calls", "main_thread")}
            write_result(args.json, rows, ranks=dist.get_world_size(), commit=args.commit, **how)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
