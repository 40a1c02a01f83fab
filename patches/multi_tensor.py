"""Norms, scaling and copies of many tensors at once, without Transformer Engine or Apex.

Megatron's own fallbacks take one tensor at a time and wait for the device after each; these make a few calls
for the whole list and never wait.
"""

from __future__ import annotations

import importlib

import torch

from .framework import Change, Patch, value

CHUNK = 2048 * 32  # part of the interface; torch's foreach functions choose their own


def applier(operation, noop_flag, tensor_lists, *args):
    """Call a multi-tensor operation the way Apex's ``multi_tensor_applier`` does."""
    return operation(CHUNK, noop_flag, tensor_lists, *args)


def l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor=False, *args):
    """The L2 norm of all tensors together, shape (1,), FP32; with ``per_tensor`` also each one's."""
    tensors = tensor_lists[0]
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    total = torch.linalg.vector_norm(norms).reshape(1)
    return total, norms if per_tensor else None


def scale(chunk_size, noop_flag, tensor_lists, factor):
    """Write ``source * factor`` to the destinations, in the wider type of the two; no overflow flag is set.

    ``factor`` is a number or a tensor of one element on the tensors' device. Source and destination may be
    the same tensors.
    """
    sources, destinations = tensor_lists
    if not sources:
        return
    factor = factor.reshape(()) if torch.is_tensor(factor) else factor
    if isinstance(factor, (int, float)) and factor == 1:
        torch._foreach_copy_(destinations, sources)
        return
    if all(destination.dtype == torch.float32 for destination in destinations):
        if any(a is not b for a, b in zip(sources, destinations, strict=True)):
            torch._foreach_copy_(destinations, sources)
        torch._foreach_mul_(destinations, factor)
        return
    products = [source.float() * factor for source in sources]
    torch._foreach_copy_(destinations, products)


def _not_needed() -> str | None:
    from_megatron = importlib.import_module("megatron.core.optimizer.clip_grads").l2_norm_impl
    if from_megatron.__module__ != "megatron.core.utils":
        return "Transformer Engine or Apex brings multi-tensor kernels"
    return None


PATCH = Patch(
    name="multi_tensor",
    changes=(
        Change("megatron.core.optimizer.clip_grads:multi_tensor_applier", value(applier)),
        Change("megatron.core.optimizer.clip_grads:l2_norm_impl", value(l2_norm)),
        Change("megatron.core.optimizer.clip_grads:multi_tensor_scale_impl", value(scale)),
        Change("megatron.core.optimizer.clip_grads:multi_tensor_scale_tensor_impl", value(scale)),
        Change("megatron.core.optimizer.optimizer:multi_tensor_applier", value(applier)),
        Change("megatron.core.optimizer.optimizer:multi_tensor_scale_impl", value(scale)),
        Change("megatron.training.utils.common_utils:multi_tensor_applier", value(applier)),
        Change("megatron.training.utils.common_utils:multi_tensor_l2norm", value(l2_norm)),
    ),
    versions=">=0.19.2,<0.20",
    why="Megatron's fallbacks launch a kernel a tensor and wait for the device at each gradient norm",
    remove_when="Megatron's fallbacks use torch's foreach functions",
    not_needed=_not_needed,
)
