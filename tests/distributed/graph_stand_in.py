"""CUDA graphs for the CPU that stands in for a GPU: what a capture does is recorded as operations on memory, and replayed.

A replay repeats torch's operations, collectives and this package's kernels with the very tensors and addresses of the
capture, and writes results where they were then; no Python of a model runs. What a CUDA graph would read where it was, a
replay reads there too: a test of what is refreshed in place is one of graphs. A read of values by the host is an error.

Unlike CUDA's, this capture also computes, so what a backward's capture leaves behind is undone.
"""

from __future__ import annotations

import contextlib
import functools
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatron_hybrid import kernels

_HOST_READS = ("_local_scalar_dense", "equal", "is_nonzero")
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_active: list[Recorder] = []


class Recorder(TorchDispatchMode):
    """Keeps what runs inside of it, and everything it touches alive."""

    def __init__(self, steps: list):
        super().__init__()
        self.steps = steps

    def __enter__(self):
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        _active.remove(self)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _HOST_READS:
            raise RuntimeError(f"{name}: the host reads a value in a capture")
        func = _OTHERWISE.get(func, func)
        out = func(*args, **(kwargs or {}))
        self.steps.append(functools.partial(_repeat, func, args, kwargs or {}, out, name in _UNWRITTEN))
        return out


def _reduce_scatter(output, whole, group, op, *options):
    """As gloo does it, but for the copy of the result, which gloo makes when it is waited for, out of memory of its own."""
    whole, own = whole.clone(), torch._C._distributed_c10d.ProcessGroup.unbox(group)
    _, work = torch.ops.c10d.allreduce_([whole], group, op, None, *options)
    work.wait()
    output.copy_(whole.chunk(own.size())[own.rank()])
    return output, work


_OTHERWISE = {torch.ops.c10d._reduce_scatter_base_.default: _reduce_scatter}


def _repeat(func, args, kwargs, out, unwritten: bool) -> None:
    if unwritten:
        return
    again = func(*args, **kwargs)
    for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
        if hasattr(new, "wait") and not isinstance(new, torch.Tensor):  # a collective's
            new.wait()
        elif type(new) is torch.Tensor and new.numel() and new.data_ptr() != old.data_ptr():
            old.copy_(new)


class CUDAGraph:
    def __init__(self):
        self.steps = []

    def register_generator_state(self, generator) -> None:
        pass

    @torch.no_grad()
    def replay(self) -> None:
        for step in self.steps:
            step()


@contextlib.contextmanager
def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
    with Recorder(cuda_graph.steps):
        yield


def recorded_kernels(extension):
    """`kernels.extension` whose functions are recorded with the addresses they are called with."""

    @functools.lru_cache(maxsize=None)
    def recorded(device_type: str):
        module = extension(device_type)
        functions = {n: f for n, f in vars(module).items() if callable(f) and not isinstance(f, type)}
        return types.SimpleNamespace(**vars(module) | {name: _recorded(f) for name, f in functions.items()})

    return recorded


def _recorded(function):
    def call(*args, **kwargs):
        for recorder in _active:
            recorder.steps.append(functools.partial(function, *args, **kwargs))
        return function(*args, **kwargs)

    return call


class GeneratorState(torch.Generator):
    """A generator of the CPU's that is handed around as a graph-safe state."""

    @classmethod
    def of(cls, value: torch.Tensor) -> GeneratorState:
        state = cls()
        state.set_state(value)
        return state

    def __reduce__(self):
        return GeneratorState.of, (self.get_state(),)

    def graphsafe_get_state(self):
        return self

    def graphsafe_set_state(self, state) -> None:
        self.set_state(state.get_state())


class Generator:
    """torch's default generator with the functions of a CUDA generator."""

    def clone_state(self) -> GeneratorState:
        return GeneratorState.of(torch.default_generator.get_state())

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state) -> None:
        torch.default_generator.set_state(state.get_state())

    def __getattr__(self, name: str):
        return getattr(torch.default_generator, name)


def undo_backward(create_bwd_graph):
    """A capture of backward that leaves gradients and buffers as they were, as CUDA's does."""

    @functools.wraps(create_bwd_graph)
    def create(runner):
        module = runner.base_module
        kept = [*module.buffers(), *(p.main_grad for p in module.parameters())]
        before = [tensor.clone() for tensor in kept]
        create_bwd_graph(runner)
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)

    return create


def install() -> None:
    """After the CPU stand-in, before a model is built."""
    from megatron.core.transformer import cuda_graphs

    from megatron_hybrid.mcore import graphs

    torch.cuda.CUDAGraph, torch.cuda.graph = CUDAGraph, graph
    torch.cuda.default_generators = (Generator(),)
    torch.cuda.is_current_stream_capturing = lambda: bool(_active)
    torch.cuda.graph_pool_handle = lambda: (0, 0)
    torch._C._cuda_beginAllocateCurrentThreadToPool = torch._C._cuda_endAllocateToPool = lambda *where: None
    kernels.extension = recorded_kernels(kernels.extension)
    runner = cuda_graphs._CudaGraphRunner
    runner.create_bwd_graph = undo_backward(runner.create_bwd_graph)
    graphs.compute_device = lambda: torch.device("cuda")
