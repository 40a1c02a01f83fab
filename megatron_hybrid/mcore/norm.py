"""LayerNorm and RMSNorm that work with sequence parallelism and need no fused kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class HybridNorm(torch.nn.Module):
    """The normalization that the configuration names, over the last dimension.

    config: a TransformerConfig. ``persist_layer_norm`` selects a kernel elsewhere and means nothing here. The
    result has the parameters' dtype, also where residuals are FP32. Raises ``ValueError`` for a normalization it
    does not have.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_kernel_choices):
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization {config.normalization!r}; valid: LayerNorm, RMSNorm")
        if config.memory_efficient_layer_norm:
            raise ValueError("memory_efficient_layer_norm needs a kernel of Apex; leave it out")
        self.shape, self.eps = (hidden_size,), eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.is_rms = config.normalization == "RMSNorm"
        self.weight = self._parameter(config, 0.0 if self.zero_centered else 1.0)
        self.bias = None if self.is_rms else self._parameter(config, 0.0)

    def _parameter(self, config, value: float) -> torch.nn.Parameter:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.full(self.shape, value, dtype=config.params_dtype, device=device))
        # each rank sees a part of the sequence: Megatron then sums the gradients over the tensor-parallel ranks
        parameter.sequence_parallel = config.sequence_parallel
        return parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, dtype = self.weight, self.bias, self.weight.dtype
        if x.dtype != dtype:
            x, weight = x.float(), weight.float()
            bias = None if bias is None else bias.float()
        if self.zero_centered:
            weight = weight + 1
        if self.is_rms:
            return F.rms_norm(x, self.shape, weight, self.eps).to(dtype)
        return F.layer_norm(x, self.shape, weight, bias, self.eps).to(dtype)

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, eps={self.eps}, {'RMSNorm' if self.is_rms else 'LayerNorm'}"
