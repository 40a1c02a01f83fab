"""What a linear hands to autograd between forward and backward: plain tensors, and how to put them together again."""

from __future__ import annotations

import torch

from .storage import QuantizedStorage

_NO_BUFFERS = dict.fromkeys(QuantizedStorage.BUFFERS)


def save_for_backward(ctx, *kept):
    """Hand payloads to autograd as plain tensors; returns the function that rebuilds them in backward.

    kept: payloads, plain tensors or None.
    """
    tensors, frames = [], []
    for item in kept:
        if isinstance(item, QuantizedStorage):
            buffers = item.buffers()
            tensors.extend(buffers.values())
            frames.append((item.with_buffers(_NO_BUFFERS), tuple(buffers)))
        else:
            tensors.append(item)
            frames.append(None)
    ctx.save_for_backward(*tensors)

    def unpack(saved):
        saved = iter(saved)
        return [
            next(saved) if frame is None else frame[0].with_buffers({name: next(saved) for name in frame[1]})
            for frame in frames
        ]

    return unpack


def main_grad(weight) -> torch.Tensor | None:
    """What a weight's gradient is added to; None: backward returns it.

    Who shards gradients and has memory for them only in backward sets `weight.take_main_grad`, a function that gives it.
    """
    take = getattr(weight, "take_main_grad", None)
    return getattr(weight, "main_grad", None) if take is None else take()


def placeholder_gradient(weight) -> torch.Tensor:
    """What backward returns once the gradient is in `main_grad`.

    Megatron's DDP hooks need a gradient to exist, and add nothing once `grad_added_to_main_grad` is set.
    """
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)


def placeholder_gradients(weights) -> list[torch.Tensor]:
    """`placeholder_gradient` of each of several weights alike: parts of one tensor, of which an allocation each would take
    most of a backward's host time."""
    if len(weights) == 1:
        return [placeholder_gradient(weights[0])]
    zeros = False
    for weight in weights:
        weight.grad_added_to_main_grad = True
        zeros = zeros or getattr(weight, "zero_out_wgrad", False)
    first, make = weights[0], torch.zeros if zeros else torch.empty
    return list(make((len(weights), *first.shape), dtype=first.dtype, device=first.device).unbind())
