"""Time and gathered bytes of tensor-parallel linears under sequence parallelism, for run_tp.py --bench on GPUs."""

from __future__ import annotations

import torch
from tp_cases import Ranks, on_the_wire, recipe

from megatron_hybrid.linear import hybrid_linear


def bench(ranks: Ranks, tokens=8192, hidden=4096, ffn=8192, repeats=20) -> None:
    """Milliseconds and gathered megabytes of a forward and backward, printed by rank 0: GPUs only."""
    for layout, (K, N) in {"column SP": (hidden, ffn), "row SP": (ffn, hidden)}.items():
        column = layout == "column SP"
        rows = tokens // ranks.size
        x_rows, dy_rows = (rows, tokens) if column else (tokens, rows)
        k, n = (K, N // ranks.size) if column else (K // ranks.size, N)
        make = dict(device=ranks.device, dtype=torch.bfloat16)
        x, w, dy = torch.randn(x_rows, 1, k, **make), torch.randn(n, k, **make) / 64, torch.randn(dy_rows, 1, n, **make)
        x.requires_grad_(), w.requires_grad_()
        for name in ("bf16", "fp8_current", "fp8_delayed", "mxfp8", "nvfp4"):
            runtime = ranks.runtime(layout, recipe(name), K, N, None)
            call = runtime.call(ranks.device, ranks.communication(layout), training=True, rows=rows)
            times = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for step in range(repeats + 5):
                if step == 5:
                    times[0].record()
                x.grad = w.grad = None
                with on_the_wire() as sent:
                    hybrid_linear(x, w, None, call).backward(dy)
            times[1].record()
            torch.cuda.synchronize()
            moved = sum(s.nbytes for s in sent if s.name == "all_gather_into_tensor") * (ranks.size - 1) / 1e6
            if ranks.rank == 0:
                ms = times[0].elapsed_time(times[1]) / repeats
                print(f"bench  {layout:9} {name:12} {ms:7.3f} ms, {moved:6.1f} MB gathered", flush=True)
