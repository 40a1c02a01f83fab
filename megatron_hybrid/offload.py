"""Activations in host memory between forward and backward.

    mh.offload_activations(model.layers[:8])       # any sequence of modules that run one after another
    offload = mh.offload_activations(layers)       # print it after a step: bytes moved, by module

What a module's forward saves for backward, quantized payloads as they are, is copied to pinned memory on a stream of its own
while the next modules run. Backward fetches it the same way: a module's while the one after it is in its backward. Weights
and their cached casts stay, since their memory is not given back by moving a copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from .runtime import LinearRuntime
from .tensor import HybridTensor

LEAST_BYTES = 1 << 20


@dataclass
class Moved:
    """One saved tensor: its copy on the host, and on the device again once that is on its way."""

    host: torch.Tensor
    stride: tuple[int, ...]  # on the device: kernels may round differently with another
    device: torch.device
    group: Group
    fetched: torch.Tensor | None = None


@dataclass
class Group:
    """What one forward of one module saved, in order."""

    previous: Group | None
    moved: list[Moved] = field(default_factory=list)
    is_fetched: bool = False


class ActivationOffload:
    """Made by `offload_activations`. least_bytes: smaller tensors stay where they are.

    `bytes`: moved so far, by module. Modules must run in their order, and the backward of one forward must come before
    it is freed; several microbatches may be under way.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], least_bytes: int = LEAST_BYTES):
        modules = list(modules)
        self.least_bytes, self.bytes = least_bytes, dict.fromkeys(range(len(modules)), 0)
        self._streams: dict[torch.device, dict[str, torch.cuda.Stream]] = {}
        self._last: Group | None = None
        if not modules:
            raise ValueError("offload_activations: no modules")
        for number, module in enumerate(modules):
            module.forward = functools.partial(self._forward, module.forward, module, number)

    def __str__(self) -> str:
        lines = [f"{'module':>6}  moved to the host", *(f"{n:>6}  {count:,} bytes" for n, count in self.bytes.items())]
        return "\n".join(lines)

    def _forward(self, forward, module, number: int, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        group = Group(previous=None if number == 0 else self._last)
        self._last = None if number == len(self.bytes) - 1 else group
        pack = functools.partial(self._pack, _lasting(module), number, group)
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            return forward(*args, **kwargs)

    # ---- forward

    def _pack(self, lasts, number: int, group: Group, t: torch.Tensor):
        expanded = any(step == 0 for step in t.stride())
        if expanded or t.numel() * t.itemsize < self.least_bytes or lasts(t):
            return t
        self.bytes[number] += t.numel() * t.itemsize
        moved = Moved(self._to_host(t), t.stride(), t.device, group)
        group.moved.append(moved)
        return moved

    def _to_host(self, t: torch.Tensor) -> torch.Tensor:
        host = torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)  # dense
        with self._beside(t.device, "out") as stream:
            host.copy_(t, non_blocking=True)
            if stream is not None:
                t.record_stream(stream)
        return host

    @contextlib.contextmanager
    def _beside(self, device: torch.device, way: str):
        """A stream for copies of this way, after what runs now; None on the CPU."""
        if device.type != "cuda":
            yield None
            return
        if device not in self._streams:
            self._streams[device] = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}
        stream = self._streams[device][way]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield stream

    # ---- backward

    def _unpack(self, kept):
        if not isinstance(kept, Moved):
            return kept
        self._fetch_all(kept.group)
        if kept.fetched is None:  # asked for again: a graph that was retained
            self._fetch(kept)
        if kept.device.type == "cuda":
            current = torch.cuda.current_stream(kept.device)
            current.wait_stream(self._streams[kept.device]["in"])
            kept.fetched.record_stream(current)
        tensor, kept.fetched = kept.fetched, None
        if kept.group.previous is not None:  # while this module's backward runs
            self._fetch_all(kept.group.previous)
        return tensor

    def _fetch_all(self, group: Group) -> None:
        for moved in () if group.is_fetched else group.moved:
            self._fetch(moved)
        group.is_fetched = True

    def _fetch(self, moved: Moved) -> None:
        """Start copying it back."""
        with self._beside(moved.device, "in") as stream:
            if stream is not None:
                stream.wait_stream(self._streams[moved.device]["out"])  # its copy to the host
            host = moved.host
            moved.fetched = torch.empty_strided(host.shape, moved.stride, dtype=host.dtype, device=moved.device)
            moved.fetched.copy_(host, non_blocking=True)


def _lasting(module: torch.nn.Module):
    """A function that says whether a tensor's memory is not the forward's to free: a parameter's, a cached cast's, or empty
    until a gather fills it for backward."""
    own = _memories(module)
    gathers = any(hasattr(p, "to_local") for p in module.parameters())  # FSDP2, some of them while the forward runs
    caches = [m.weight_cache for m in module.modules() if isinstance(m, LinearRuntime) and m.weight_cache is not None]

    def lasts(t: torch.Tensor) -> bool:
        if t.untyped_storage().size() == 0:
            return True
        memory = _memory(t)
        cached = (b for cache in caches for s in cache.held() for b in s.buffers().values())
        return memory in (_memories(module) if gathers else own) or any(_memory(b) == memory for b in cached)

    return lasts


def _memories(module: torch.nn.Module) -> set[int]:
    """Of the parameters as they are now."""
    return {_memory(t) for t in _plain(module.parameters())}


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _plain(parameters):
    """Tensors with memory of their own: of a quantized parameter its payloads' buffers, of experts that FSDP2 has gathered
    as payloads those of each, and of what it has not gathered the shard."""
    for p in (t for p in parameters for t in getattr(p, "experts", (p,))):
        buffers = p.payload_buffers() if isinstance(p, HybridTensor) else ()
        yield from buffers or (p.to_local() if hasattr(p, "to_local") else p,)


def offload_activations(modules: Iterable[torch.nn.Module], *, least_bytes: int = LEAST_BYTES) -> ActivationOffload:
    """Keep what these modules save for backward in host memory, from their next forward on.

    modules: in the order in which they run, such as a model's first layers; the last ones' activations are needed soon
    after and are better left. least_bytes: smaller tensors stay. Results have the same bits. Raises ``ValueError`` for no
    modules.
    """
    return ActivationOffload(modules, least_bytes)
