"""Quantized parameters of experts in common memory: one buffer for all of them, of every tensor of a direction's payload.

Each expert's payload is a view of it, so whoever writes a parameter (an optimizer, a gather, a load) writes the stack, and
a call of all experts at once reads it without a copy.
"""

from __future__ import annotations

import torch

from .stacked import part_of_stack
from .storage import QuantizedStorage
from .tensor import HybridTensor

_ALIGN = 16  # bytes: where each expert's part of a buffer begins, as kernels and GEMMs read them


class ExpertStack:
    """Made empty; `follow` takes in the weights.

    rowwise, columnwise: payloads of all experts' rows, (E * N, K), or None. Their tensors are the experts', one after
    another along dimension 0, whatever blocks span.
    """

    rowwise: QuantizedStorage | None
    columnwise: QuantizedStorage | None
    _held: list[tuple]  # the payloads that are views of these

    def __init__(self):
        self.forget()

    def __reduce__(self):
        return ExpertStack, ()  # a copied module's parameters have memory of their own

    def forget(self) -> None:
        """Let go of memory that the weights have left."""
        self.rowwise = self.columnwise = None
        self._held = []

    def forget_left(self, weights: list[torch.Tensor]) -> None:
        """Let go of the memory if any of these weights has left it."""
        if _payloads(weights) != self._held:
            self.forget()

    @torch.no_grad()
    def follow(self, weights: list[torch.Tensor]) -> str | None:
        """Move the payloads of these weights (N, K) into common buffers unless they are there. None, or why it cannot be.

        Parameters get new payloads when they move to a device, are loaded by assignment or change their formats.
        """
        if any(type(weight) is not HybridTensor for weight in weights):
            self.forget()
            return "some experts' weights live in high precision"
        payloads = _payloads(weights)
        if payloads != self._held:  # storages are equal only to themselves
            if (why := _unlike(weights)) is not None:
                self.forget()
                return why
            self.rowwise, self.columnwise = (_join(list(one)) for one in zip(*payloads))
            for expert, weight in enumerate(weights):
                weight.take_buffers(*(_part(s, expert, len(weights)) for s in (self.rowwise, self.columnwise)))
            self._held = _payloads(weights)
        return "an expert's direction is stale" if any(w._stale - w._stale.promised for w in weights) else None


def _payloads(weights: list[torch.Tensor]) -> list[tuple]:
    """(rowwise, columnwise) of each; none of one in high precision."""
    return [(weight.rowwise, weight.columnwise) if type(weight) is HybridTensor else () for weight in weights]


def _unlike(weights: list[HybridTensor]) -> str | None:
    """Why the payloads of these weights do not fit into one buffer."""
    first = weights[0].spec
    if any(weight.comes_and_goes() for weight in weights):
        return "a gather knows where the payloads are"
    if any(weight.spec._replace(stale=first.stale) != first or weight.shape != weights[0].shape for weight in weights):
        return "experts' weights are quantized differently"
    for s in (weights[0].rowwise, weights[0].columnwise):
        for name, t in {} if s is None else s.buffers().items():
            if t.dim() != 2 or t.nbytes % _ALIGN:
                return f"weight.{s.direction} {s.format}: an expert's {name} of {t.nbytes} bytes is not whole {_ALIGN} bytes"
    return None


def _join(payloads: list[QuantizedStorage | None]) -> QuantizedStorage | None:
    first = payloads[0]
    if first is None:
        return None
    (N, K), num = first.shape, len(payloads)
    return first.changed(
        shape=(num * N, K), **{name: torch.cat([getattr(s, name) for s in payloads]) for name in first.buffers()}
    )


def _part(s: QuantizedStorage | None, expert: int, num: int) -> dict[str, torch.Tensor]:
    return {} if s is None else part_of_stack(s, expert, num).buffers()
