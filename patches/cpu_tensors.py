"""Tensors for the CPU stand-in: "cuda" as a device means the CPU.

Only the places where a device is *named* are replaced: torch's factories and the tensor methods that take a
device. The tensors are ordinary CPU tensors (``device`` and ``is_cuda`` tell the truth), so nothing here acts
inside backward or costs anything per operation.
"""

from __future__ import annotations

import functools

import torch
import torch._dynamo  # builds a table of torch's functions at import: must see the originals
import torch.utils._device

from .framework import Change, value

CPU = torch.device("cpu")

FACTORIES = (
    *("empty", "zeros", "ones", "full", "eye", "arange", "range", "linspace", "logspace"),
    *("rand", "randn", "randint", "randperm", "normal", "tensor", "as_tensor", "asarray", "scalar_tensor"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("empty_strided", "tril_indices", "triu_indices"),
)
TENSOR_FACTORIES = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor")


def on_cpu(device):
    """The device to use for one that was asked for: CUDA in any spelling becomes the CPU."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return CPU
    if isinstance(device, str):
        return CPU if device.partition(":")[0] == "cuda" else device
    if isinstance(device, torch.device) and device.type == "cuda":
        return CPU
    return device


def _factory(original):
    @functools.wraps(original)
    def create(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return create


def _tensor_to(original):
    @functools.wraps(original)
    def to(self, *args, **kwargs):
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _tensor_type(original):
    """Megatron's optimizers ask for the type's name and know only ``torch.cuda`` ones."""

    @functools.wraps(original)
    def type_(self, dtype=None, non_blocking=False, **kwargs):
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, non_blocking, **kwargs)

    return type_


def _stays(self, *args, **kwargs):
    """``cuda()``, ``pin_memory()``: the tensor is where it should be."""
    return self


def _does_nothing(self, *args, **kwargs):
    return None


def _load(original):
    @functools.wraps(original)
    def load(f, map_location=None, **kwargs):
        return original(f, map_location=on_cpu(map_location), **kwargs)

    return load


def _mesh_init(original):
    @functools.wraps(original)
    def __init__(self, device_type, *args, **kwargs):  # noqa: N807
        original(self, _mesh_type(device_type), *args, **kwargs)

    return __init__


def _mesh_from_group(original):
    function = original.__func__  # ``original`` is the static method object itself

    @functools.wraps(function)
    def from_group(group, device_type, *args, **kwargs):
        return function(group, _mesh_type(device_type), *args, **kwargs)

    return staticmethod(from_group)


def _init_device_mesh(original):
    @functools.wraps(original)
    def init_device_mesh(device_type, *args, **kwargs):
        return original(_mesh_type(device_type), *args, **kwargs)

    return init_device_mesh


def _mesh_type(device_type):
    return "cpu" if device_type == "cuda" else device_type


def _compile(original):
    """``torch.compile`` that compiles nothing: tracing costs minutes here and saves none."""

    @functools.wraps(original)
    def compile_(model=None, *args, **kwargs):
        return model if model is not None else lambda function: function

    return compile_


def _keeps_generator(original):
    """Start a data loader's iterator without drawing from the generator that stands for the GPU's.

    The iterator draws its workers' seed from the CPU generator. On a GPU machine that leaves dropout's
    generator alone, and so a run resumed from a checkpoint sees the same masks; here they are one.
    """

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):  # noqa: N807
        state = torch.get_rng_state()
        original(self, *args, **kwargs)
        torch.set_rng_state(state)

    return __init__


def changes() -> tuple[Change, ...]:
    """Every change to tensors, factories, meshes and the compiler."""
    # Cached by torch on first use, by function identity: must see the originals.
    torch.utils._device._device_constructors()
    return (
        *(Change(f"torch:{name}", _factory) for name in FACTORIES),
        *(Change(f"torch:Tensor.{name}", _factory) for name in TENSOR_FACTORIES),
        Change("torch:Tensor.to", _tensor_to),
        Change("torch:Tensor.type", _tensor_type),
        Change("torch:Tensor.cuda", value(_stays)),
        Change("torch:Tensor.pin_memory", value(_stays)),
        Change("torch:Tensor.record_stream", value(_does_nothing)),
        Change("torch:load", _load),
        Change("torch:compile", _compile),
        Change("torch.utils.data.dataloader:_BaseDataLoaderIter.__init__", _keeps_generator),
        Change("torch.distributed.device_mesh:DeviceMesh.__init__", _mesh_init),
        Change("torch.distributed.device_mesh:DeviceMesh.from_group", _mesh_from_group),
        Change("torch.distributed.device_mesh:init_device_mesh", _init_device_mesh),
        Change("torch.distributed:init_device_mesh", _init_device_mesh),
    )
