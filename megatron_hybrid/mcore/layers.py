"""Megatron's tensor-parallel linears with our three GEMMs inside.

`_forward_impl` is replaced: parameters, initialisation, checkpoints, bias handling and the communication of outputs
stay Megatron's, but for a row-parallel linear under sequence parallelism, whose gradient is gathered quantized. The
recipe arrives through `finish_init`.
"""

from __future__ import annotations

import torch
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from ..distributed.tp import (
    ColumnParallel,
    ColumnSequenceParallel,
    RowSequenceParallel,
    TensorParallel,
    column_index_maps,
    column_sharding,
    row_index_maps,
    row_sharding,
)
from ..linear import LOCAL, Communication, hybrid_linear
from ..plan import GRAD_OUTPUT, WEIGHT, GemmPlan, PlanError
from ..quantizer import as_matrix
from ..random_keys import shifted
from ..runtime import LinearRuntime
from ..scaling import Pieces
from ..sharding import Sharding
from ..weight_cache import WeightCache
from ..weights import HoldsWeight
from . import state
from .modules import linear_role
from .recipe_hook import carried
from .weight_window import WeightWindow

MOST_ROWS_OF_AN_EXPERT = 1 << 20  # of tokens, in a microbatch: how far apart experts draw


def compute_device() -> torch.device:
    """The device that Megatron builds and trains on: the current GPU, or the CPU that stands in for one."""
    return torch.empty(0, device=torch.cuda.current_device()).device


class HybridParallelLinear(WeightWindow, HoldsWeight):
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
        sharding = self.sharding() if self.tp_group.size() > 1 else None
        self.hq = LinearRuntime(recipe, role, device, sharding=sharding)
        self.hq.weight_cache = WeightCache()
        self.hq.index_maps = self.index_maps() if self.hq_expert is None else self._index_maps_of_expert()
        if sharding is not None:
            self.hq.ranks = TensorParallel(self.tp_group)
        self.hold_weight(preserve=True)  # masters start from it

    @property
    def gathers_sequence(self) -> bool:
        """Whether the sequence is split over the ranks around this linear; never around an expert, whose dispatcher
        gives every rank the same tokens."""
        return self.sequence_parallel and not self.explicit_expert_comm

    def sharding(self) -> Sharding:
        """How the tensor-parallel ranks split the operands."""
        raise NotImplementedError

    def index_maps(self) -> dict[str, tuple[int, int, int] | Pieces]:
        """Where this rank's shards lie in the whole tensors, as (row offset, column offset, global K)."""
        raise NotImplementedError

    def _index_maps_of_expert(self) -> dict[str, tuple[int, int, int] | Pieces]:
        """Experts share the name that random bits are drawn for: each has rows of its own, its weight's as grouped ones'."""
        rows = {WEIGHT: self.hq_expert * self.output_size}
        return {
            operand: shifted(index_map, rows.get(operand, self.hq_expert * MOST_ROWS_OF_AN_EXPERT))
            for operand, index_map in self.index_maps().items()
        }

    def communication(self, sequence_parallel: bool, allreduce_dgrad: bool) -> Communication:
        """How this call's tensors move; not asked for on a single rank."""
        raise NotImplementedError

    def _over_ranks(self, kind: type[TensorParallel]) -> TensorParallel:
        """The communication of a kind over this module's group, made once."""
        made = self.__dict__.setdefault("_made_communications", {})
        if kind not in made or made[kind].group is not self.tp_group:
            made[kind] = kind(self.tp_group)
        return made[kind]

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
        if self.hq.sharding is not None:
            comm = self.communication(sequence_parallel, allreduce_dgrad)
        return self._hybrid_linear(input, weight, bias, comm)

    def _hybrid_linear(self, x, weight, bias, comm):
        rows, sharding = as_matrix(x).shape[0], self.hq.sharding
        if sharding is not None and sharding.gathered == GRAD_OUTPUT:
            rows //= comm.size
        call = self.hq.call(weight.device, comm, training=self.training, rows=rows)
        return hybrid_linear(x, weight, bias, call)

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

    @property
    def pieces(self) -> int:
        """Runs of the whole that this rank's rows are made of: a gated linear holds one of the gate, one of the rest."""
        return getattr(self.weight, "partition_stride", 1)

    def sharding(self) -> Sharding:
        return column_sharding(
            self.tp_group.size(), self.output_size, sequence_parallel=self.gathers_sequence, pieces=self.pieces
        )

    def index_maps(self) -> dict[str, tuple[int, int, int] | Pieces]:
        group = self.tp_group
        return column_index_maps(group.rank(), group.size(), self.input_size, self.output_size, self.pieces)

    def communication(self, sequence_parallel: bool, allreduce_dgrad: bool) -> Communication:
        if sequence_parallel:
            return self._over_ranks(ColumnSequenceParallel)
        return self._over_ranks(ColumnParallel if allreduce_dgrad else TensorParallel)


class HybridRowParallelLinear(HybridParallelLinear, RowParallelLinear):
    """`y = x @ w.T`, w split along its columns; see `HybridParallelLinear`."""

    def sharding(self) -> Sharding:
        return row_sharding(self.tp_group.size(), self.input_size, sequence_parallel=self.gathers_sequence)

    def index_maps(self) -> dict[str, tuple[int, int, int]]:
        return row_index_maps(self.tp_group.rank(), self.tp_group.size(), self.input_size, self.output_size)

    def communication(self, sequence_parallel: bool, allreduce_dgrad: bool) -> Communication:
        return self._over_ranks(TensorParallel)

    def forward(self, input_: torch.Tensor):
        """(y, bias not yet added or None). Under sequence parallelism the output is scattered, and its gradient
        gathered, inside our Function: Megatron's own gather is in high precision."""
        if self.hq.sharding is None or not self.gathers_sequence:
            return super().forward(input_)
        y = self._hybrid_linear(input_, self.weight, None, self._over_ranks(RowSequenceParallel))
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias, None
