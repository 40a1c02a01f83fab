"""Run an unmodified Megatron on a machine without a GPU: the CPU stands in for CUDA, gloo for NCCL.

    from megatron_hybrid.patches import cpu_device
    cpu_device.install()        # before megatron is imported

For tests, demos and debugging. Tensors stay ordinary CPU tensors: code that looks at ``tensor.device`` sees
the truth, code that asks ``torch.cuda.is_available()`` is told there is a GPU (Megatron insists on one); use
:func:`is_installed` to tell the two apart. CUDA graphs, Triton kernels and memory pools are not imitated.
"""

from __future__ import annotations

import logging
import sys
import warnings

import torch

from . import cpu_collectives, cpu_cuda, cpu_tensors
from .framework import Patch, Status

_RNG_LOGGER = "megatron.core.tensor_parallel.random"
# Advice about a GPU's queues, given at the first backward.
_GPU_ADVICE = "When using .* it is recommended to set the environment variable CUDA_DEVICE_MAX"
_patch: Patch | None = None


def patch() -> Patch:
    """The whole stand-in as one patch of torch (so it goes in, and comes out, as one)."""
    global _patch
    if _patch is None:
        _patch = Patch(
            name="cpu_device",
            changes=(*cpu_cuda.changes(), *cpu_tensors.changes(), *cpu_collectives.changes()),
            package="torch",
            versions=">=2.11,<2.13",
            why="Megatron requires CUDA and NCCL at every turn; tests and the demo must run without a GPU",
            remove_when="Megatron trains on CPU with gloo by itself",
        )
    return _patch


def install(force: bool = False) -> Status:
    """Put the stand-in in place. Call it before megatron is imported, and before any process group exists.

    Raises ``RuntimeError`` when megatron is imported already (it keeps references to what is replaced) or
    when the machine has a GPU; ``force`` skips both checks. A second call changes nothing.
    """
    if is_installed():
        return patch().status()
    if not force:
        if "megatron.core" in sys.modules:
            raise RuntimeError("cpu_device.install() must run before megatron is imported; megatron.core is")
        if torch.cuda.is_available():
            raise RuntimeError(
                f"cpu_device.install(): this machine has {torch.cuda.device_count()} GPU(s) "
                f"({torch.cuda.get_device_name()}); train on them, or pass force=True"
            )
    status = patch().apply()
    logging.getLogger(_RNG_LOGGER).addFilter(_not_the_shared_generator)
    warnings.filterwarnings("ignore", message=_GPU_ADVICE)
    return status


def uninstall() -> Status:
    """Give torch back as it was. A Megatron imported meanwhile keeps what it bound by value."""
    logging.getLogger(_RNG_LOGGER).removeFilter(_not_the_shared_generator)
    return patch().revert()


def is_installed() -> bool:
    """Whether ``torch.cuda`` is the stand-in now."""
    return _patch is not None and _patch.is_applied


def _not_the_shared_generator(record: logging.LogRecord) -> bool:
    """Drop Megatron's warning that drawing on the GPU moved the CPU generator: here they are one."""
    return "CPU RNG state changed" not in record.getMessage()
