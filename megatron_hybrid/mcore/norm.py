"""LayerNorm and RMSNorm for Megatron's layers: sequence parallel, without fused kernels."""

from __future__ import annotations

import torch

from ..modules.norm import Norm


class HybridNorm(Norm):
    """The normalization that a TransformerConfig names, over the last dimension.

    ``persist_layer_norm`` selects a kernel elsewhere and means nothing here. The result has the parameters' dtype,
    also where residuals are FP32. Raises ``ValueError`` for a normalization that there is not.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_kernel_choices):
        if config.memory_efficient_layer_norm:
            raise ValueError("memory_efficient_layer_norm needs a kernel of Apex; leave it out")
        super().__init__(
            hidden_size,
            normalization=config.normalization,
            eps=eps,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            # each rank sees a part of the sequence: Megatron then sums the gradients over the tensor-parallel ranks
            sequence_parallel=config.sequence_parallel,
            device="cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
            dtype=config.params_dtype,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(self.weight.dtype)
