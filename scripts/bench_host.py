"""Host time of a linear's forward and backward against `torch.nn.Linear`'s in the same run (goal P9).

    python scripts/bench_host.py [--device cuda] [--tokens 16 --features 1024] [--python] [--json OUT]

The device waits for the host at this size, so that wall time is host time; every round times each linear once, in turn,
with the backward in autograd's own thread, as torch has it for CUDA tensors, and in the calling one
(`torch.autograd.set_multithreading_enabled(False)`). "by Python": the same linear without the C++ node (`--python`).
On the CPU the kernels' time is in it too, and GEMMs are emulated: only what Python and torch's dispatch cost is alike.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch
from bench_common import median, write_result
from bench_linear import load_recipe

import megatron_hybrid as mh
from megatron_hybrid.explain import Table

RECIPES = ["bf16", "fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_block", "current+block", "mxfp8", "nvfp4_plain"]


def layers(args) -> dict:
    """torch's linear, and every recipe's: as it is, and with the weight cast once a step instead of once a call; with
    `--python` both without the C++ node too."""
    kwargs = dict(bias=False, device=args.device, dtype=torch.bfloat16)
    found = {"torch": torch.nn.Linear(args.features, args.features, **kwargs)}
    for name in args.recipes:
        for cached, python in itertools.product((False, True), (False, True) if args.python else (False,)):
            layer = mh.HybridLinear(args.features, args.features, recipe=load_recipe(name), name="fc", **kwargs)
            if cached:
                mh.prepare(layer).begin_step(1)
            if python:
                layer.plan.lean.node = None
            found[name + (", weight cached" if cached else "") + (", by Python" if python else "")] = layer
    return found


def step(layer, x, dy) -> None:
    x.grad = layer.weight.grad = None
    layer(x).backward(dy)


def host_us(found: dict, args) -> dict[tuple[str, bool], float]:
    """Microseconds of (linear, whether its backward runs in autograd's thread)."""
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(args.tokens, args.features, generator=g).to(args.device, torch.bfloat16) for _ in range(2))
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
    return {subject: median(t) for subject, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--python", action="store_true", help="compare with Python's functions")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--commit", help="recorded in place of git's")
    parser.add_argument("--json", help="write rows, machine, versions and commit here")
    args = parser.parse_args()
    us = host_us(layers(args), args)
    rows = [
        {"what": name, "autograd_thread": threads, "us": t, "over_torch": t / us["torch", threads]}
        for (name, threads), t in us.items()
    ]
    cells = tuple(
        (r["what"], "autograd's" if r["autograd_thread"] else "caller's", f"{r['us']:.0f}", f"{r['over_torch']:.2f}")
        for r in rows
    )
    print(Table(("linear", "backward's thread", "us", "x torch"), cells, (f"{args.device}, {args.tokens} x {args.features}",)))
    write_result(args.json, rows, device=args.device, tokens=args.tokens, features=args.features, commit=args.commit)


if __name__ == "__main__":
    main()
