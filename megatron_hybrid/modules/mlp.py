"""HybridMLP: norm (optional), fc1, activation (gated or not), fc2."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..consumer import Output
from ..formats import nearest
from .linear import HybridLinear, part_name
from .norm import Norm

ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu,
               "relu2": lambda x: F.relu(x).square()}  # fmt: skip


class Activation(torch.nn.Module):
    """`act(x)`; gated: x (..., 2F) is (gate, up) side by side and the result `act(gate) * up` (..., F).

    name: one of `ACTIVATIONS`. Raises ``ValueError`` for another, with the nearest.
    """

    def __init__(self, name: str, *, gated: bool = False):
        super().__init__()
        if name not in ACTIVATIONS:
            raise ValueError(f"unknown activation {name!r}{nearest(name, ACTIVATIONS)} Valid: {', '.join(ACTIVATIONS)}")
        self.name, self.gated = name, gated
        self.output = Output()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = ACTIVATIONS[self.name]
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            return self.output(act(gate) * up)
        return self.output(act(x))

    def extra_repr(self) -> str:
        return f"{self.name}, gated={self.gated}"


class HybridMLP(torch.nn.Module):
    """`fc2(act(fc1(norm(x))))`; see `Activation` for ``gated``.

    hidden, ffn: sizes. activation: one of `ACTIVATIONS`. norm: ``LayerNorm``, ``RMSNorm`` or None. name: prefix;
    the linears are `<name>.linear_fc1` and `<name>.linear_fc2`. output_role: the role of what reads the result.
    recipe, layer, num_layers, save_input, backend: as `HybridLinear`.
    """

    def __init__(
        self, hidden, ffn, *, gated=False, activation="gelu", norm=None, bias=True, eps=1e-5, name="",
        output_role=None, device=None, dtype=None, **linear,
    ):  # fmt: skip
        super().__init__()
        made = dict(device=device, dtype=dtype)
        self.norm = Norm(hidden, normalization=norm, eps=eps, **made) if norm else None
        self.activation = Activation(activation, gated=gated)
        fc1_out = 2 * ffn if gated else ffn
        self.linear_fc1 = HybridLinear(hidden, fc1_out, bias, name=part_name(name, "linear_fc1"), **made, **linear)
        self.linear_fc2 = HybridLinear(
            ffn, hidden, bias, name=part_name(name, "linear_fc2"), output_role=output_role, **made, **linear
        )

    @property
    def output(self) -> Output:
        """The result on its way out, cast for its consumer where one is bound."""
        return self.linear_fc2.output

    def roles(self):
        """Those of fc1, then of fc2."""
        return self.linear_fc1.roles() + self.linear_fc2.roles()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., hidden) -> (..., hidden)."""
        h = x if self.norm is None else self.norm(x)
        return self.linear_fc2(self.activation(self.linear_fc1(h)))
