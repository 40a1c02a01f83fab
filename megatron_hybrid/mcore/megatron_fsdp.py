"""Megatron-FSDP (``--use-megatron-fsdp``): its buffers hold weights and gradients, and gather weights in high precision."""

from __future__ import annotations

import functools

import torch

from ..model_shape import SHARDED_WEIGHTS


def prepare(chunks: list, args, controller) -> list:
    """Ready the linears of a stage's chunks, not wrapped yet; returns what is left to call with the controller later."""
    if args.data_parallel_sharding_strategy == SHARDED_WEIGHTS:
        for runtime in controller.runtimes:
            if runtime.weight_owner is None:  # else payloads themselves are what comes and goes
                runtime.keep_no_weight()
    return [functools.partial(_take_gradients, chunk) for chunk in chunks]


def _take_gradients(chunk, controller) -> None:
    """Have the linears of a chunk, wrapped, add weight gradients to Megatron-FSDP's buffers, in these buffers' dtype."""
    for module in chunk.modules():
        for name, weight in module._parameters.items() if "hq" in module._modules else ():
            if name.startswith("weight") and weight is not None:  # of experts one by one: weight0, weight1, ...
                weight = getattr(weight, "orig_param", weight)  # between steps modules hold the shards
                weight.take_main_grad = functools.partial(_main_grad, weight)


def _main_grad(weight) -> torch.Tensor | None:
    """Memory for a weight's gradient. None for a weight that the embedding shares: of such, Megatron-FSDP takes the whole
    gradient either from there or from autograd."""
    if getattr(weight, "zero_out_wgrad", False):
        return None
    grad = weight.get_main_grad()
    # a sharded gradient's memory is this backward's alone, whatever it held; else it has earlier microbatches' sum
    return grad.zero_() if weight._gbuf.is_data_distributed else grad
