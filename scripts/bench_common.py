"""What the GPU benchmarks share: interleaved timing, kernels by kind, and the file a result goes to."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path

from megatron_hybrid.loading import say_loading

say_loading("torch")
import torch  # noqa: E402

from megatron_hybrid.observe.profile import CASTS, COLLECTIVES, GEMMS, OTHER, PERMUTATION, kind

_SHOWN = (GEMMS, CASTS, PERMUTATION, COLLECTIVES)

_SPIN = 20_000_000  # clock cycles, about 11 ms: the host runs ahead of the device behind it


def interleaved_us(cases: dict, rounds: int) -> dict[str, float]:
    """Median device time in us of each case's `run(i)`: all in turn in every round, each round in another order.

    i counts a case's calls, for it to rotate its inputs.
    """
    names = list(cases)
    for name in names:
        for i in range(3):
            cases[name](i)
    times = {name: [] for name in names}
    for r in range(rounds):
        torch.cuda._sleep(_SPIN)
        for name in names[r % len(names) :] + names[: r % len(names)]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            cases[name](r)
            end.record()
            times[name].append((start, end))
        torch.cuda.synchronize()
    return {name: median([s.elapsed_time(e) * 1e3 for s, e in pairs]) for name, pairs in times.items()}


def median(values) -> float:
    return sorted(values)[len(values) // 2]


def device_kernels(run, calls: int = 3) -> list[tuple[str, float]]:
    """(name, us) of every kernel and copy of one call of `run(i)`, in order; times averaged over `calls`."""
    run(0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(calls):
            run(i)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    per_call = len(events) // calls
    assert per_call * calls == len(events), f"{len(events)} kernels in {calls} calls: not the same in each"
    return [
        (events[k].name, sum(events[c * per_call + k].time_range.elapsed_us() for c in range(calls)) / calls)
        for k in range(per_call)
    ]


def is_gemm(kernel: str) -> bool:
    return kind(kernel) == GEMMS


def is_cast(kernel: str) -> bool:
    return kind(kernel) == CASTS


def kernel_shares(kernels: list[tuple[str, float]]) -> dict[str, float]:
    """us of GEMMs, of casts, of permutations of tokens, of collectives, and of everything else."""
    total = Counter()
    for name, us in kernels:
        total[found if (found := kind(name)) in _SHOWN else OTHER] += us
    return dict(total)


def provenance(commit: str | None = None) -> dict:
    """Card, versions, date, commit (git's unless it is given) and command of a measurement."""
    root = Path(__file__).resolve().parent.parent
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=root).stdout.strip()
    gpu = torch.cuda.is_available()
    return {
        "card": torch.cuda.get_device_name() if gpu else None, "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "date": datetime.date.today().isoformat(), "commit": commit or git, "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip


def write_result(path: str | None, rows, /, **more) -> None:
    """Write rows with their `provenance`. path None: do nothing."""
    if path is None:
        return
    meta = provenance(more.pop("commit", None))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({**meta, **more, "results": rows}, indent=1) + "\n")
