"""What bench_step.py says of a step's kernels: their kinds, the longest, the bandwidth of the fused ones."""

from __future__ import annotations

import re
from collections import Counter

import torch
from bench_common import median

from megatron_hybrid.observe.profile import kind

def bytes_moved(args) -> dict[str, int]:
    """What the fused kernels of one bf16 step read and write, all calls together."""
    hidden, ffn, logits = (2 * args.seq * n for n in (args.hidden, args.ffn, args.vocab))
    qkv = 2 * args.seq * (args.heads + 2 * args.groups) * (args.hidden // args.heads)
    n = args.layers
    return {
        "_norm_forward": (2 * n + 1) * 2 * hidden, "_norm_backward": (2 * n * 4 + 3) * hidden,
        "_swiglu_forward": n * 3 * ffn, "_swiglu_backward": n * 5 * ffn, "_split_rotate": 2 * n * 2 * qkv,
        "_loss_statistics": logits, "_loss_gradient": 2 * logits,
    }  # fmt: skip


def copy_bandwidth() -> float:
    """TB/s, read and written, of copies between device buffers larger than the L2."""
    a = torch.randn(2**26, device="cuda")
    b, times = torch.empty_like(a), []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * a.nbytes / median(times) / 1e9


def profile(subject, batch, args, copy: float) -> dict:
    """Device ms of one `subject.step(batch)` by kind of kernel; the longest; the fused ones' share of `copy` TB/s."""
    subject.step(batch)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        subject.step(batch)
        torch.cuda.synchronize()
    kinds, kernels, calls = Counter(), Counter(), Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            ms = event.time_range.elapsed_us() / 1e3
            kinds[kind(event.name)] += ms
            kernels[event.name] += ms
            calls[event.name] += 1
    longest = [{"kernel": n[:160], "ms": ms, "calls": calls[n], "kind": kind(n)} for n, ms in kernels.most_common(40)]
    shares = {n: b / kernels[n] / 1e9 / copy for n, b in bytes_moved(args).items() if n in kernels}
    return {"kinds": dict(kinds), "kernels": longest, "sum": sum(kinds.values()), "copy": copy, "shares": shares}


def short(kernel: str) -> str:
    """A kernel's name without what every instance of a template repeats."""
    return re.sub(r"at::native::|void |\(anonymous namespace\)::|cudnn_generated_|<unnamed>::", "", kernel)[:70]
