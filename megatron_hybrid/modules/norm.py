"""LayerNorm and RMSNorm as the quantized modules use them: torch's own functions, FP32 inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..consumer import Output
from ..formats import nearest

NORMS = ("LayerNorm", "RMSNorm")


class Norm(torch.nn.Module):
    """`LayerNorm` or `RMSNorm` over the last dimension.

    normalization: one of `NORMS`. zero_centered_gamma: the stored weight is gamma - 1. sequence_parallel: marks
    the parameters so that Megatron sums their gradients over the tensor-parallel ranks. output_role: the role of
    what reads the result, see consumer.py. Raises ``ValueError`` for an unknown normalization.
    """

    def __init__(
        self, hidden_size, *, normalization="LayerNorm", eps=1e-5, zero_centered_gamma=False,
        sequence_parallel=False, output_role=None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        if normalization not in NORMS:
            raise ValueError(
                f"unknown normalization {normalization!r}{nearest(str(normalization), NORMS)} Valid: {', '.join(NORMS)}"
            )
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, zero_centered_gamma
        self.hidden_size = hidden_size
        self.output = Output(output_role)
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = None
        if normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        for p in self.parameters():
            p.sequence_parallel = sequence_parallel
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gamma = self.weight + 1 if self.zero_centered_gamma else self.weight
        shape, gamma = (self.hidden_size,), gamma.to(x.dtype)
        if self.bias is None:
            return self.output(F.rms_norm(x, shape, gamma, self.eps))
        return self.output(F.layer_norm(x, shape, gamma, self.bias.to(x.dtype), self.eps))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.normalization}, eps={self.eps}"
