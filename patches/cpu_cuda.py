"""``torch.cuda`` for the CPU stand-in: one device, whose work is done when the call returns.

Streams and events order nothing, memory figures are the process's own, and the CUDA random generator *is* the
CPU's default generator, since every tensor draws from that one.
"""

from __future__ import annotations

import collections
import contextlib
import resource
import time
import types

import psutil
import torch

from .framework import Change, value

KIB = 1024
# Megatron wants CUDA_DEVICE_MAX_CONNECTIONS=1 under tensor parallelism for any capability below 10.
CAPABILITY = (10, 0)
NAME = "CPU standing in for a GPU"


class Stream:
    """A queue whose work is always done."""

    def __init__(self, device=None, priority=0, **kwargs):
        self.device = torch.device("cpu")
        self.device_index = 0
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    @staticmethod
    def priority_range():
        return (0, 0)

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def query(self):
        return True

    def synchronize(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class Event:
    """A moment on the host's clock."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, **kwargs):
        self.time = 0.0

    def record(self, stream=None):
        self.time = time.perf_counter()

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end_event):
        """Milliseconds from this event to ``end_event``."""
        return (end_event.time - self.time) * 1e3


DEFAULT_STREAM = Stream()


class DeviceContext:
    """``with torch.cuda.device(i)``: there is only one."""

    def __init__(self, device=None):
        self.idx = 0
        self.prev_idx = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def _stream_context(stream):
    return contextlib.nullcontext(stream)


def _nothing(*args, **kwargs):
    return None


def _current_stream(device=None):
    return DEFAULT_STREAM


def _seed(seed):
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(device="cuda"):
    return torch.default_generator.get_state()


def _set_rng_state(new_state, device="cuda"):
    torch.default_generator.set_state(new_state)


def _call_now(function, **kwargs):
    function()


def _resident(device=None):
    """Bytes of memory that the process holds now."""
    return psutil.Process().memory_info().rss


def _peak(device=None):
    """Most bytes of memory that the process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def _memory_stats(device=None):
    stats = collections.defaultdict(int)
    stats["allocated_bytes.all.current"] = stats["reserved_bytes.all.current"] = _resident()
    stats["allocated_bytes.all.peak"] = stats["reserved_bytes.all.peak"] = _peak()
    return stats


def _mem_get_info(device=None):
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _properties(device=None):
    return types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=psutil.cpu_count() or 1,
        warp_size=32,
        shared_memory_per_block_optin=0,
        uuid="cpu",
    )


_STAND_INS = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _nothing,
    "init": _nothing,
    "_lazy_init": _nothing,
    "_lazy_call": _call_now,
    "synchronize": _nothing,
    "ipc_collect": _nothing,
    "device": DeviceContext,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_properties": _properties,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    # streams
    "Stream": Stream,
    "Event": Event,
    "stream": _stream_context,
    "current_stream": _current_stream,
    "default_stream": _current_stream,
    "set_stream": _nothing,
    # random numbers
    "default_generators": (torch.default_generator,),
    "manual_seed": _seed,
    "manual_seed_all": _seed,
    "initial_seed": lambda: torch.default_generator.initial_seed(),
    "get_rng_state": _get_rng_state,
    "get_rng_state_all": lambda: [_get_rng_state()],
    "set_rng_state": _set_rng_state,
    "set_rng_state_all": lambda states: _set_rng_state(states[0]),
    # memory
    "empty_cache": _nothing,
    "reset_peak_memory_stats": _nothing,
    "reset_max_memory_allocated": _nothing,
    "memory_stats": _memory_stats,
    "memory_allocated": _resident,
    "memory_reserved": _resident,
    "max_memory_allocated": _peak,
    "max_memory_reserved": _peak,
    "device_memory_used": _resident,
    "mem_get_info": _mem_get_info,
}
_RANDOM = ("manual_seed", "manual_seed_all", "get_rng_state", "get_rng_state_all", "set_rng_state")
_MEMORY = ("empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved")
_NVTX = ("range_push", "range_pop", "mark")


def changes() -> tuple[Change, ...]:
    """Every change to ``torch.cuda``."""
    return (
        *(Change(f"torch.cuda:{name}", value(new)) for name, new in _STAND_INS.items()),
        *(Change(f"torch.cuda.random:{name}", value(_STAND_INS[name])) for name in _RANDOM),
        *(Change(f"torch.cuda.memory:{name}", value(_STAND_INS[name])) for name in _MEMORY),
        *(Change(f"torch.cuda.nvtx:{name}", value(_nothing)) for name in _NVTX),
    )
