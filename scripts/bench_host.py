"""Host time of a linear's forward and backward against `torch.nn.Linear`'s in the same run (goal P9).

    python scripts/bench_host.py [--device cuda] [--tokens 16 --features 1024] [--python] [--tensor-parallel] [--json OUT]
    python scripts/bench_host.py --grouped 128 [--tokens 128 --features 256] [--python] [--no-kernels] [--json OUT]

The device waits for the host at this size, so that wall time is host time; every round times each linear once, in turn,
with the backward in autograd's own thread, as torch has it for CUDA tensors, and in the calling one
(`torch.autograd.set_multithreading_enabled(False)`). "by Python": the same linear without the C++ node (`--python`).
On the CPU the kernels' time is in it too, and GEMMs are emulated: only what Python and torch's dispatch cost is alike.
--tensor-parallel: Megatron's tensor-parallel linears against its own in bf16, with a stand-in for the other rank
(bench_host_tp.py), the weight cast before or, as in a step's first microbatch, in every call. With NCCL between GPUs:
bench_tp.py.

--grouped E: a grouped linear of E experts, tokens spread over them evenly, sizes of groups on the device, beside
`torch._grouped_mm` in bf16; on the CPU beside a loop of `torch.nn.functional.linear`. "autograd": an empty function of
autograd in Python, whose two calls no Python linear can do without. --no-kernels: on the CPU, what the host does for a Hopper
GPU, with kernels and GEMMs that do nothing; FP8 recipes only, and against the empty function.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time

import bench_host_grouped
import bench_host_tp
import torch
from bench_common import median, write_result
from bench_linear import load_recipe

import megatron_hybrid as mh
from megatron_hybrid.explain import Table

RECIPES = [
    "bf16", "fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_block", "current+block", "mxfp8", "nvfp4_plain", "nvfp4"
]  # fmt: skip
GROUPED_RECIPES = ["bf16", "fp8_rowwise", "fp8_block", "mxfp8"]  # those whose experts run at once
FP8_RECIPES = ["fp8_rowwise", "fp8_block"]  # those whose every kernel is ours


def layers(args) -> dict:
    """torch's linear, and every recipe's: as it is, and with the weight cast once a step instead of once a call; with
    `--python` both without the C++ node too."""
    kwargs = dict(bias=False, device=args.device, dtype=torch.bfloat16)
    found = {"torch": torch.nn.Linear(args.features, args.features, **kwargs)}
    for name in args.recipes:
        for cached, python in itertools.product((False, True), (False, True) if args.python else (False,)):
            layer = mh.HybridLinear(args.features, args.features, recipe=load_recipe(name), name="fc", **kwargs)
            if cached or layer.plan.uses_rng:
                mh.prepare(layer, seed=1).begin_step(1)
            if not cached:
                layer.hq.weight_cache = None
            if python:
                layer.plan.lean.node = None
            found[name + (", weight cached" if cached else "") + (", by Python" if python else "")] = layer
    return found


def step(layer, x, dy) -> None:
    x.grad = layer.weight.grad = None
    layer(x).backward(dy)


def host_us(found: dict, shapes: tuple, args, of_rounds=median) -> dict[tuple[str, bool], float]:
    """Microseconds of (linear, whether its backward runs in autograd's thread). shapes: of x and of y."""
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(*shape, generator=g).to(args.device, torch.bfloat16) for shape in shapes)
    x.requires_grad_()
    times = {(name, threads): [] for threads in (True, False) for name in found}
    for r in range(args.rounds + 3):
        for (name, threads), seen in times.items():
            wait()
            with torch.autograd.set_multithreading_enabled(threads):
                start = time.perf_counter()
                for _ in range(args.calls):
                    step(found[name], x, dy)
                wait()
            if r >= 3:
                seen.append((time.perf_counter() - start) / args.calls * 1e6)
    return {subject: of_rounds(t) for subject, t in times.items()}


def rows_of(found: dict, shapes: tuple, args, baseline: str, of_rounds=median, **what) -> list[dict]:
    """A result a linear and thread, with its time over that of `baseline`."""
    us = host_us(found, shapes, args, of_rounds)
    return [
        {**what, "what": name, "autograd_thread": threads, "us": t, "over_torch": t / us[baseline, threads]}
        for (name, threads), t in us.items()
    ]


def tensor_parallel_rows(args) -> list[dict]:
    """The least of the rounds: what else the machine does only adds."""
    rows = []
    with bench_host_tp.stand_in(args.device):
        for kind in bench_host_tp.KINDS:
            found = bench_host_tp.linears(kind, args)
            shapes = bench_host_tp.shapes(kind, args)
            rows += rows_of(found, shapes, args, bench_host_tp.MEGATRON, min, kind=kind)
    return rows


def one_rank_rows(args) -> list[dict]:
    """Of linears and of grouped ones."""
    of_rounds = min if args.least else median
    shapes = ((args.tokens, args.features),) * 2
    with bench_host_grouped.no_kernels() if args.no_kernels else contextlib.nullcontext():
        found = (bench_host_grouped.layers if args.grouped else layers)(args)
        return rows_of(found, shapes, args, bench_host_grouped.EMPTY if args.no_kernels else "torch", of_rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="(default: 16; one an expert)")
    parser.add_argument("--features", type=int, help="(default: 1024; of experts 256)")
    parser.add_argument("--grouped", type=int, metavar="E", help="grouped linears of E experts")
    parser.add_argument("--recipes", nargs="+", help="names or paths")
    parser.add_argument("--python", action="store_true", help="compare with Python's functions")
    parser.add_argument("--no-kernels", action="store_true", help="grouped ones on the CPU, with kernels that do nothing")
    parser.add_argument("--tensor-parallel", action="store_true", help="of two ranks, one of which is a stand-in")
    parser.add_argument("--least", action="store_true", help="the least of all rounds, not the median: for busy machines")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--commit", help="recorded in place of git's")
    parser.add_argument("--json", help="write rows, machine, versions and commit here")
    args = parser.parse_args()
    args.tokens = args.tokens or args.grouped or 16
    args.features = args.features or (256 if args.grouped else 1024)
    args.recipes = args.recipes or (FP8_RECIPES if args.no_kernels else GROUPED_RECIPES if args.grouped else RECIPES)
    if args.no_kernels and (args.device != "cpu" or not args.grouped):
        parser.error("--no-kernels: of --grouped on the CPU")
    rows = tensor_parallel_rows(args) if args.tensor_parallel else one_rank_rows(args)
    cells = tuple(
        (f"{r.get('kind', '')} {r['what']}".strip(), "autograd's" if r["autograd_thread"] else "caller's", f"{r['us']:.0f}",
         f"{r['over_torch']:.2f}")
        for r in rows
    )  # fmt: skip
    against = "x Megatron's" if args.tensor_parallel else "x an empty function" if args.no_kernels else "x torch"
    said = f"{args.device}, {args.tokens} x {args.features}" + (f", {args.grouped} experts" if args.grouped else "")
    print(Table(("linear", "backward's thread", "us", against), cells, (said,)))
    sizes = dict(tokens=args.tokens, features=args.features, experts=args.grouped)
    write_result(args.json, rows, device=args.device, **sizes, commit=args.commit)


if __name__ == "__main__":
    main()
