"""Megatron's tensor-parallel linears with our three GEMMs inside.

Only `_forward_impl` is replaced: parameters, initialisation, checkpoints, bias handling and the communication of
outputs stay Megatron's. The recipe arrives through `finish_init`.
"""

from __future__ import annotations

import torch
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from ..distributed.tp import ColumnParallel, SequenceParallel
from ..linear import LOCAL, WeightCache, hybrid_linear
from ..plan import GRAD_OUTPUT, INPUT, WEIGHT, GemmPlan, PlanError
from ..runtime import LinearRuntime
from . import state
from .modules import linear_role
from .recipe_hook import carried
from .weight_window import WeightWindow


def compute_device() -> torch.device:
    """The device that Megatron builds and trains on: the current GPU, or the CPU that stands in for one."""
    return torch.empty(0, device=torch.cuda.current_device()).device


class HybridParallelLinear(WeightWindow):
    """What our two parallel linears add to Megatron's.

    hq_layer    number of the transformer layer that owns this linear, global, from 1 (set by the layer)
    hq_expert   global number of the expert that this linear is part of, or None (set by the layer)
    hq          plan and state, there once Megatron has called `finish_init`
    """

    hq_layer: int | None = None
    hq_expert: int | None = None
    hq: LinearRuntime

    def finish_init(self, quant_config) -> None:
        """Megatron's call after the model is built: resolve the recipe for this module."""
        recipe = carried(quant_config, self)
        role = linear_role(
            quant_config.match_input.module_path, self.hq_layer, self.config.num_layers, expert=self.hq_expert
        )
        device = compute_device() if self.weight is None else self.weight.device
        self.hq = LinearRuntime(recipe, role, device)
        self.hq.weight_cache = WeightCache()
        self.hq.index_maps = self.index_maps()

    def index_maps(self) -> dict[str, tuple[int, int, int]]:
        """Where this rank's shards lie in the whole tensors, as (row offset, column offset, global K)."""
        raise NotImplementedError

    @property
    def plan(self) -> GemmPlan | None:
        hq = self._modules.get("hq")
        return None if hq is None else hq.plan_for(compute_device() if self.weight is None else self.weight.device)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        tensors = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state.sharded(self, tensors, prefix, sharded_offsets, metadata)

    def _forward_impl(
        self, input, weight, *, bias=None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None,
        grad_output_buffer=None, wgrad_deferral_limit=None, gtp_remat_size=1, gradient_accumulation_fusion=False,
    ):  # fmt: skip
        # Gradients go into `main_grad` wherever there is one: the fusion flag only says who has Apex's kernel.
        if grad_output_buffer is not None or gtp_remat_size > 1:
            what = "--defer-embedding-wgrad-compute" if gtp_remat_size == 1 else "sharded weights (GTP)"
            raise PlanError(f"module {self.hq.role.name}: {what} is not supported by quantized linears")
        comm = LOCAL
        if sequence_parallel:
            comm = SequenceParallel(tp_group)
        elif allreduce_dgrad:
            comm = ColumnParallel(tp_group)
        call = self.hq.call(weight.device, comm, training=self.training)
        return hybrid_linear(input, weight, bias, call)

    def extra_repr(self) -> str:
        if (plan := self.plan) is None:
            return super().extra_repr()
        gemms = ", ".join(f"{name}={step.pair.a} x {step.pair.b}" for name, step in plan.steps().items())
        return f"{super().extra_repr()}, {gemms}"


class HybridColumnParallelLinear(HybridParallelLinear, ColumnParallelLinear):
    """`y = x @ w.T`, w split along its rows; see `HybridParallelLinear`."""

    @classmethod
    def adopt(cls, module: ColumnParallelLinear, path: str) -> None:
        """Make one of Megatron's own, which it builds without asking the spec (the output layer), one of ours."""
        module.__class__ = cls
        module.finish_init(get_quant_config_or_none(path, module.config.quant_recipe))

    def index_maps(self) -> dict[str, tuple[int, int, int]]:
        """A gated linear's shard holds a part of the gate and a part of the rest; it counts as if it were contiguous."""
        K, N, offset = self.input_size, self.output_size, self.tp_group.rank() * self.output_size_per_partition
        return {INPUT: (0, 0, K), WEIGHT: (offset, 0, K), GRAD_OUTPUT: (0, offset, N)}


class HybridRowParallelLinear(HybridParallelLinear, RowParallelLinear):
    """`y = x @ w.T`, w split along its columns; see `HybridParallelLinear`."""

    def index_maps(self) -> dict[str, tuple[int, int, int]]:
        K, N, offset = self.input_size, self.output_size, self.tp_group.rank() * self.input_size_per_partition
        return {INPUT: (0, offset, K), WEIGHT: (0, offset, K), GRAD_OUTPUT: (0, 0, N)}
