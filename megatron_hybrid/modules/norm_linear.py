"""HybridLayerNormLinear: norm, then a quantized linear."""

from __future__ import annotations

import torch

from ..consumer import Output
from .linear import HybridLinear
from .norm import Norm


class HybridLayerNormLinear(torch.nn.Module):
    """`y = linear(norm(x))`. Arguments of both parts: see `Norm` and `HybridLinear`.

    return_norm_output: `forward` returns (y, norm(x)), for residual streams that start after the norm.
    """

    def __init__(
        self, in_features, out_features, bias=True, *, normalization="LayerNorm", eps=1e-5, zero_centered_gamma=False,
        return_norm_output=False, device=None, dtype=None, **linear,
    ):  # fmt: skip
        super().__init__()
        self.return_norm_output = return_norm_output
        self.norm = Norm(
            in_features, normalization=normalization, eps=eps, zero_centered_gamma=zero_centered_gamma,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.linear = HybridLinear(in_features, out_features, bias, device=device, dtype=dtype, **linear)

    @property
    def output(self) -> Output:
        """The result on its way out, cast for its consumer where one is bound."""
        return self.linear.output

    def roles(self):
        """Those of its linear."""
        return self.linear.roles()

    def forward(self, x: torch.Tensor):
        """x (..., K) -> y (..., N), and the norm's output where `return_norm_output`."""
        normed = self.norm(x)
        y = self.linear(normed)
        return (y, normed) if self.return_norm_output else y
