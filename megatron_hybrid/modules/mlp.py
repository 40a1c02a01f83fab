"""HybridMLP: norm (optional), fc1, activation (gated or not), fc2."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..formats import nearest
from .linear import HybridLinear
from .norm import Norm

ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu,
               "relu2": lambda x: F.relu(x).square()}  # fmt: skip


class HybridMLP(torch.nn.Module):
    """`fc2(act(fc1(norm(x))))`; gated: fc1 gives (gate, up) side by side and the activation is `act(gate) * up`.

    hidden, ffn: sizes. activation: one of `ACTIVATIONS`. norm: ``LayerNorm``, ``RMSNorm`` or None. name: prefix;
    the linears are `<name>.linear_fc1` and `<name>.linear_fc2`. recipe, layer, num_layers, backend: as `HybridLinear`.
    """

    def __init__(
        self, hidden, ffn, *, gated=False, activation="gelu", norm=None, bias=True, eps=1e-5, name="",
        device=None, dtype=None, **linear,
    ):  # fmt: skip
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"unknown activation {activation!r}{nearest(activation, ACTIVATIONS)} Valid: {', '.join(ACTIVATIONS)}"
            )
        self.gated, self.activation = gated, activation
        made = dict(device=device, dtype=dtype)
        self.norm = Norm(hidden, normalization=norm, eps=eps, **made) if norm else None
        prefix = f"{name}." if name else ""
        fc1_out = 2 * ffn if gated else ffn
        self.linear_fc1 = HybridLinear(hidden, fc1_out, bias, name=prefix + "linear_fc1", **made, **linear)
        self.linear_fc2 = HybridLinear(ffn, hidden, bias, name=prefix + "linear_fc2", **made, **linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear_fc1(x if self.norm is None else self.norm(x))
        act = ACTIVATIONS[self.activation]
        if self.gated:
            gate, up = h.chunk(2, dim=-1)
            return self.linear_fc2(act(gate) * up)
        return self.linear_fc2(act(h))
