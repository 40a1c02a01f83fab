"""What benchmarks on several ranks share: their start, and what their ranks found put together."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_hybrid import patches
from megatron_hybrid.patches import cpu_device


def start_ranks() -> torch.device:
    """The process group of the ranks that torchrun started, or of this process alone, over NCCL or, where there is no GPU,
    gloo with the CPU in place of the GPU; Megatron's faults mended. Returns this rank's device."""
    gpu = torch.cuda.is_available() and not cpu_device.is_installed()
    if not gpu:
        cpu_device.install()
    patches.apply_all()
    alone = {} if dist.is_torchelastic_launched() else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("nccl" if gpu else "gloo", **alone)
    device = torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    return device


def of_ranks(found) -> list:
    """Every rank's, in their order."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def slowest(values: list[float]) -> list[float]:
    """Of each value the largest that a rank has."""
    return [max(of_one) for of_one in zip(*of_ranks(values), strict=True)]


@dataclass
class AllToAlls:
    """What the all-to-alls of a step move and how long they take. bytes: to other ranks, from this one. us: until what others
    send is there, the wait for them included."""

    on_gpu: bool
    calls: int = 0
    bytes: int = 0
    _times: list = field(default_factory=list)

    @contextmanager
    def counted(self):
        """Inside, calls of `torch.distributed.all_to_all_single` are counted."""
        call = dist.all_to_all_single

        def counting(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
            began = self._now()
            work = call(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)
            self._times.append((began, self._now()))
            self.calls += 1
            self.bytes += sent_to_others(input, input_split_sizes, group)
            return work

        dist.all_to_all_single = counting
        try:
            yield self
        finally:
            dist.all_to_all_single = call

    def _now(self):
        if not self.on_gpu:
            return time.perf_counter() * 1e6
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def us(self) -> float:
        """Waits for the device."""
        if not self.on_gpu:
            return sum(end - began for began, end in self._times)
        torch.cuda.synchronize()
        return 1e3 * sum(began.elapsed_time(end) for began, end in self._times)


def sent_to_others(sent: torch.Tensor, rows: list[int] | None, group=None) -> int:
    """Bytes of `sent` that do not stay on this rank. rows: how many go to each, None for the same everywhere."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    stay = sent.shape[0] // ranks if rows is None else int(rows[rank])
    return sent.nbytes - stay * (sent.nbytes // max(sent.shape[0], 1))
