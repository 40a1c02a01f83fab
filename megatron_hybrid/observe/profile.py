"""What the time of one training step goes to: casts, gemms, attention, collectives, the rest; as a small JSON file.

    ctl = mh.prepare(model, "mxfp8")
    ctl.profile_step(20, path="runs/mine/hq_profile.json")     # then train as ever

On a GPU it is the time of kernels, told apart by their names. Collectives count where nothing else runs beside them, and
"waiting for the host" is where nothing runs at all. On the CPU it is the time in casts and gemms of the linears, and the
rest. The profiled step is slower than others; the shares are what to read.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from ..plan import GemmPlan
from ..whole_file import write_whole
from .recorder import ranked_path
from .watched_plan import WatchedPlan

CASTS, GEMMS, PERMUTATION, COLLECTIVES = "casts", "gemms", "permutation", "collectives"
WAITING, OTHER = "waiting for the host", "other"
KINDS = (  # of kernels, by name; the first that fits
    (COLLECTIVES, r"nccl"),
    ("attention", r"sdpa|fmha|flash|cudnn::fusion"),
    (GEMMS, r"gemm|nvjet|cutlass|xmma|splitk|cublas|grouped|^_rows|^_contract"),
    (CASTS, r"mh::"),
    (PERMUTATION, r"^_(gather|copy|clear|sum|index|dot|scatter|chunks)\b"),
    ("fused", r"^_(norm|swiglu|weighted|split_rotate|loss|column|scale)"),
    ("copies", r"memcpy|memset|copy_kernel|CatArray|^_turn"),
    ("torch elementwise", r"elementwise|reduce_kernel|triton_"),
)


def kind(kernel: str) -> str:
    """The kind of a kernel."""
    return next((name for name, pattern in KINDS if re.search(pattern, kernel, re.I)), OTHER)


def split_of_kernels(kernels: Iterable[tuple[str, float, float]], whole: float) -> dict[str, float]:
    """Kind -> ms, largest first. kernels: (name, start, end) in ms. whole: ms of the step."""
    kernels = sorted(kernels, key=lambda kernel: kernel[1])
    compute = [k for k in kernels if kind(k[0]) != COLLECTIVES]
    found = Counter()
    for name, start, end in compute:
        found[kind(name)] += end - start
    busy = _covered(kernels)
    found[COLLECTIVES] += busy - _covered(compute)
    found[WAITING] += max(whole - busy, 0.0)
    return {name: ms for name, ms in found.most_common() if ms > 0}


def _covered(kernels: list[tuple[str, float, float]]) -> float:
    """Length of the union of intervals, which come in the order of their starts."""
    total, last = 0.0, float("-inf")
    for _, start, end in kernels:
        total += max(end - max(start, last), 0.0)
        last = max(last, end)
    return total


class TimedPlan(WatchedPlan):
    """A plan that adds the host's ms in its casts and gemms to `spent`, by kind."""

    def __init__(self, plan: GemmPlan, spent: Counter):
        super().__init__(plan)
        self._spent = spent

    def _timed(self, kind: str, call, *args, **options):
        began = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            self._spent[kind] += 1e3 * (time.perf_counter() - began)

    def quantize(self, *args, **options):
        return self._timed(CASTS, self._plan.quantize, *args, **options)

    def derive(self, *args, **options):
        return self._timed(CASTS, self._plan.derive, *args, **options)

    def run(self, *args, **options):
        return self._timed(GEMMS, self._plan.run, *args, **options)


class StepProfile:
    """Profiles one step; the `Controller` calls `begin_step` and `end_step`.

    step: which. path: the file, one JSON object; rank: added to its name, unless it is None. say: gets the line that says
    where it is.
    """

    def __init__(self, step: int, path, *, rank: int | None = None, say=print):
        if step < 1:
            raise ValueError(f"profile of step {step}: steps count from 1")
        self.step, self.rank, self.say = step, rank, say
        self.path = ranked_path(Path(path), rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._runtimes, self._began = [], 0.0
        self._profiler, self._spent = None, None  # one of them in the step: on a GPU, on the CPU

    def watch(self, plan: GemmPlan) -> TimedPlan:
        """The same plan, for one module."""
        return TimedPlan(plan, self._spent)

    def begin_step(self, step: int, runtimes) -> None:
        """Start the profiler, if it is the step."""
        self._stop()  # of a step that did not come to its end
        if step != self.step:
            return
        self._runtimes = list(runtimes)
        if any(plan.device.type == "cuda" for runtime in self._runtimes for plan in runtime.plans()):
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
            self._profiler.start()
            torch.cuda.synchronize()
        else:
            self._spent = Counter()
            for runtime in self._runtimes:
                runtime.profile = self
        self._began = time.perf_counter()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        for runtime in self._runtimes:
            runtime.profile = None
        self._profiler, self._spent, self._runtimes = None, None, []

    def end_step(self, step: int) -> None:
        """Write the file after the step; does nothing after others. Waits for the device."""
        if self._profiler is None and self._spent is None:
            return
        if on_gpu := self._profiler is not None:
            torch.cuda.synchronize()
        whole, profiler, spent = 1e3 * (time.perf_counter() - self._began), self._profiler, self._spent
        self._stop()
        split = split_of_kernels(_kernels(profiler), whole) if on_gpu else _with_rest(spent, whole)
        place = {} if self.rank is None else {"rank": self.rank}
        device = torch.cuda.get_device_name() if on_gpu else "cpu"
        record = {"step": step, **place, "device": device, "ms": whole, "split": split}
        write_whole(self.path, json.dumps(record) + "\n")
        if self.say is not None:
            parts = ", ".join(f"{name} {ms / whole:.0%}" for name, ms in split.items())
            self.say(f"> step {step} took {whole:.1f} ms: {parts} ({self.path})")


def _kernels(profiler):
    """(name, start, end) in ms of everything that ran on the device."""
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            yield event.name, event.time_range.start / 1e3, event.time_range.end / 1e3


def _with_rest(spent: Counter, whole: float) -> dict[str, float]:
    return dict((spent + Counter({OTHER: whole - sum(spent.values())})).most_common())
