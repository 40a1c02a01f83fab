"""Casting a producer's output once, for the linear that reads it.

    norm.output.bind(qkv)          # the norm's output is cast as qkv's input: qkv does not cast again
    q(norm(x)); k(norm(x))         # ... and neither does any other linear with an equal input quantizer

A producer can also be told the consumer's role alone; `mh.prepare` then finds the module. By default a producer has
no consumer and gives its output as it is.
"""

from __future__ import annotations

import torch

from .formats import ROWWISE
from .linear import LOCAL, LinearCall
from .plan import INPUT, PlanError
from .roles import DPA, QuantizerRole
from .runtime import LinearRuntime
from .tensor import HybridTensor


class CastForConsumer(torch.autograd.Function):
    """y (..., K) -> `HybridTensor` of the consumer's input quantizer. The gradient passes through."""

    @staticmethod
    def forward(ctx, y, call: LinearCall, columnwise: bool):
        row, col = call.quantize(INPUT, y, rowwise=True, columnwise=columnwise)
        return HybridTensor.from_storages(row, col, y.shape, y.dtype, call.plan.quantizers[INPUT])

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None


def cast_input(y: torch.Tensor, runtime: LinearRuntime, weight: torch.Tensor, *, training: bool) -> torch.Tensor:
    """`y` cast as the input of the linear that has this runtime and weight; as it is when its plan casts nothing, or
    not without other ranks.

    The columnwise payload is made only when the weight needs a gradient that reads it.
    """
    call = runtime.call(y.device, LOCAL, training=training)
    if not any(fmt.is_quantized for fmt in call.plan.quantizers[INPUT].formats()):
        return y
    if call.plan.gathered == INPUT or INPUT in call.plan.reduced:
        return y  # its cast needs the other ranks: the linear makes it
    columnwise = torch.is_grad_enabled() and weight.requires_grad and call.plan.saved[INPUT] != ROWWISE
    return CastForConsumer.apply(y, call, columnwise)


class Output:
    """Where a producer's output goes. Calling it gives the output as it is, or cast for the consumer.

    role: the consumer's `QuantizerRole`, such as a linear's ``input`` or attention's ``qkv``, or None. A consumer is
    a module with `input_role` and `cast_input(y)`.
    """

    def __init__(self, role: QuantizerRole | None = None):
        self._role = role
        self._consumer: torch.nn.Module | None = None

    @property
    def role(self) -> QuantizerRole | None:
        """The consumer's role; None by default."""
        return self._role if self._consumer is None else self._consumer.input_role

    @property
    def is_bound(self) -> bool:
        """False while only a linear's role is known, and not yet the module. Attention casts nothing."""
        return self._consumer is not None or self._role is None or self._role.module_type == DPA

    def bind(self, consumer: torch.nn.Module | None) -> None:
        """Cast for this module from now on; None: for nobody. Raises ``ValueError`` for one that is no consumer."""
        if consumer is not None and not hasattr(consumer, "cast_input"):
            raise ValueError(f"a consumer is a quantized linear or attention, found {type(consumer).__name__}")
        self._role, self._consumer = None, consumer

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        if self._consumer is not None:
            return self._consumer.cast_input(y)
        if not self.is_bound:
            raise PlanError(f"the output is for {self._role}: call mh.prepare(model), which finds that module")
        return y


def bind_outputs(model: torch.nn.Module) -> None:
    """Find the module of every producer that knows only its consumer's role.

    Raises ``ValueError`` naming a role that no module of the model has.
    """
    waiting = [
        (path, module.output)
        for path, module in model.named_modules()
        if isinstance(getattr(module, "output", None), Output) and not module.output.is_bound
    ]
    consumers = {m.input_role: m for m in model.modules() if hasattr(m, "cast_input")} if waiting else {}
    for path, output in waiting:
        if output.role not in consumers:
            names = ", ".join(sorted(role.name for role in consumers)) or "none"
            raise ValueError(f"{path or 'the model'}: its output is for {output.role}; the model has {names}")
        output.bind(consumers[output.role])
