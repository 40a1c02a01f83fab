"""``torch.distributed`` for the CPU stand-in: what Megatron asks of NCCL, done by gloo.

Replaced are only the calls that gloo cannot do, or does wrongly:

* process groups named "nccl" become gloo groups, without device binding or NCCL options;
* gloo knows few element types: the others travel as bytes;
* sums of multiples (Megatron-FSDP's means of gradients) are multiplied here;
* coalescing flattens mixed types into one buffer and corrupts them silently: operations run one by one;
* gathers of unequal sizes, lists of all-to-all, receives into non-contiguous memory and split sizes given as
  tensors are put together from what there is.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .framework import Change, value

# The types that gloo can carry itself.
GLOO_DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
}


def as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of its bytes (in a dimension of their own) where gloo does not know its type."""
    return tensor if tensor.dtype in GLOO_DTYPES else tensor.unsqueeze(-1).view(torch.uint8)


def _finished(result=None):
    """A work handle for an operation that has been done already."""
    future = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class _Coalesced:
    """What the coalescing manager hands out: the works of the operations begun inside it."""

    def __init__(self):
        self.works = []

    def append(self, work):
        if work is not None:
            self.works.append(work)

    def wait(self):
        for work in self.works:
            work.wait()
        self.works = []


_coalescing: list[_Coalesced] = []


@contextlib.contextmanager
def _one_by_one(group=None, device=None, async_ops=False):
    """``torch.distributed._coalescing_manager`` that begins each operation at once, and waits at the end."""
    manager = _Coalesced()
    _coalescing.append(manager)
    try:
        yield manager
    finally:
        _coalescing.pop()
    if not async_ops:
        manager.wait()


def _in_manager(collective):
    """Inside a coalescing manager, begin the operation and let the manager wait for it."""

    @functools.wraps(collective)
    def begin(*args, **kwargs):
        if not _coalescing:
            return collective(*args, **kwargs)
        kwargs["async_op"] = True
        _coalescing[-1].append(collective(*args, **kwargs))
        return None

    return begin


def _factor(op) -> float | None:
    """What NCCL multiplies with before it sums; None where it does not."""
    return op.__getstate__()[1] if op == dist.ReduceOp.PREMUL_SUM else None


def _all_reduce(original):
    @_in_manager
    @functools.wraps(original)
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if (factor := _factor(op)) is not None:
            tensor.mul_(factor)
            op = dist.ReduceOp.SUM
        return original(tensor, op, group, async_op)

    return all_reduce


def _reduce_scatter_tensor(original):
    @_in_manager
    @functools.wraps(original)
    def reduce_scatter_tensor(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if (factor := _factor(op)) is not None:
            input, op = input * factor, dist.ReduceOp.SUM
        return original(output, input, op, group, async_op)

    return reduce_scatter_tensor


def _gather_into_tensor(original):
    @_in_manager
    @functools.wraps(original)
    def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
        return original(as_carried(output_tensor), as_carried(input_tensor), group, async_op)

    return all_gather_into_tensor


def _all_gather(original):
    @functools.wraps(original)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        outputs, source = [as_carried(output) for output in tensor_list], as_carried(tensor)
        if all(output.shape == source.shape for output in outputs):
            return original(outputs, source, group, async_op)
        for rank, output in enumerate(outputs):
            whole = source.contiguous() if rank == dist.get_rank(group) else torch.empty_like(output)
            dist.broadcast(whole, group=group, group_src=rank)
            output.copy_(whole)
        return _finished(tensor_list) if async_op else None

    return all_gather


def _all_to_all(original):
    @functools.wraps(original)
    def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
        rank = dist.get_rank(group)
        works = []
        for peer, (output, source) in enumerate(zip(output_tensor_list, input_tensor_list, strict=True)):
            if peer == rank:
                output.copy_(source)
                continue
            works.append(c10d.isend(source.contiguous(), group=group, group_dst=peer))
            works.append(c10d.irecv(output, group=group, group_src=peer))
        for work in works:
            work.wait()
        return _finished(output_tensor_list) if async_op else None

    return all_to_all


def _all_to_all_single(original):
    @functools.wraps(original)
    def all_to_all_single(
        output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        return original(
            as_carried(output),
            as_carried(input.contiguous()),
            _as_sizes(output_split_sizes),
            _as_sizes(input_split_sizes),
            group,
            async_op,
        )

    return all_to_all_single


def _as_sizes(splits):
    """Split sizes as integers: on the CPU Megatron leaves them as tensors."""
    return None if splits is None else [int(size) for size in splits]


def _carried_first(original):
    """For operations whose first argument is the only tensor: broadcast and sends."""

    @functools.wraps(original)
    def move(tensor, *args, **kwargs):
        return original(as_carried(tensor), *args, **kwargs)

    return move


def _receive(original):
    """Receive into a tensor of any layout; the copy out of the buffer happens at ``wait``."""

    @functools.wraps(original)
    def receive(tensor, *args, **kwargs):
        if tensor.is_contiguous():
            return original(as_carried(tensor), *args, **kwargs)
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
        result = original(as_carried(buffer), *args, **kwargs)
        if isinstance(result, int):  # ``recv`` returns the sender's rank
            tensor.copy_(buffer)
            return result
        return _CopyAtWait(result, tensor, buffer)

    return receive


class _CopyAtWait:
    """A work handle that fills the caller's tensor once its buffer has arrived."""

    def __init__(self, work, tensor, buffer):
        self.work, self.tensor, self.buffer = work, tensor, buffer

    def is_completed(self):
        return self.work.is_completed()

    def wait(self, *args):
        done = self.work.wait(*args)
        if self.buffer is not None:
            self.tensor.copy_(self.buffer)
            self.buffer = None
        return done


def _gloo_name(backend):
    """Gloo for anything that names NCCL or CUDA, alone or in a list such as "cpu:gloo,cuda:nccl"."""
    if backend is None or "nccl" in str(backend).lower() or "cuda:" in str(backend).lower():
        return "gloo"
    return backend


def _init_process_group(original):
    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original(_gloo_name(backend), *args, **kwargs)

    return init_process_group


def _new_group(original):
    @functools.wraps(original)
    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return original(ranks, timeout, _gloo_name(backend), None, *args, **kwargs)

    return new_group


def _barrier(original):
    @functools.wraps(original)
    def barrier(group=None, async_op=False, device_ids=None):
        return original(group, async_op)

    return barrier


_COLLECTIVES = {
    "init_process_group": _init_process_group,
    "new_group": _new_group,
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_gather_into_tensor": _gather_into_tensor,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _carried_first,
    "send": _carried_first,
    "isend": _carried_first,
    "recv": _receive,
    "irecv": _receive,
    "_coalescing_manager": value(_one_by_one),
}


def changes() -> tuple[Change, ...]:
    """Every change to ``torch.distributed``: the same new function under both of a symbol's names."""
    made = {name: make(getattr(c10d, name)) for name, make in _COLLECTIVES.items()}
    return tuple(
        Change(f"{module}:{name}", value(new))
        for name, new in made.items()
        for module in ("torch.distributed.distributed_c10d", "torch.distributed")
        if hasattr(dist, name)
    )
