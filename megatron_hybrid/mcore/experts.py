"""Megatron's experts over grouped linears: one (E, N, K) parameter a linear, one name an expert in checkpoints.

`HybridGroupedMLP` stands where Megatron puts `TEGroupedMLP`; checkpoints are interchangeable with its `SequentialMLP`.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import (
    CheckpointWithoutOutput,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.utils import divide, get_pg_rank, get_pg_size

from ..distributed.tp import TensorParallel, column_index_maps, column_sharding, row_index_maps, row_sharding
from ..expert_weights import HoldsExpertWeights
from ..grouped import ExpertRuntimes
from ..grouped_at_once import group_sums
from ..groups import Groups
from ..permutation import permute_probs
from ..plan import PlanError
from ..scaling import Pieces
from ..sharding import Sharding
from . import expert_checkpoint
from .modules import expert_role
from .recipe_hook import carried
from .weight_window import WeightWindow


class HybridGroupedParallelLinear(WeightWindow, HoldsExpertWeights, torch.nn.Module):
    """`y[e] = x[e] @ w[e].T` for the experts of this rank; the weight is (E, N, K), each expert a shard of the whole, or a
    parameter an expert where weights live quantized.

    Arguments are Megatron's for `TEGroupedLinear`. The bias (E, N) is added here, or with `skip_bias_add` handed back.

    hq_layer    number of the transformer layer that owns this linear, global, from 1 (set by the layer)
    hq          plans and state, there once Megatron has called `finish_init`
    """

    hq_layer: int | None = None
    hq: ExpertRuntimes
    sharded_rows: bool  # whether expert-tensor-parallel ranks split the rows (N) or the columns (K) of a weight

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config, init_method, bias: bool, skip_bias_add: bool,
        is_expert: bool = True, tp_comm_buffer_name=None, pg_collection=None, name=None,
    ):  # fmt: skip
        super().__init__()
        assert is_expert and pg_collection is not None
        self.config, self.num_gemms, self.skip_bias_add = config, num_gemms, skip_bias_add
        self.input_size, self.output_size = input_size, output_size
        self.groups, self.tp_group = pg_collection, pg_collection.expt_tp
        self.use_bias, self.delay_wgrad_compute = bias, False
        parts = get_pg_size(self.tp_group)
        shape = [num_gemms, output_size, input_size]
        axis = 1 if self.sharded_rows else 2
        shape[axis] = divide(shape[axis], parts)
        made = {"device": self._device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.empty(*shape, **made))
        self.bias = None
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(num_gemms, shape[1], **made))
        self._mark_parameters(axis)
        if config.perform_initialization:
            self._initialize(init_method, axis)

    def _device(self):
        return "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()

    def _mark_parameters(self, axis: int) -> None:
        """Attributes by which Megatron's optimizer and gradient reduction know expert parameters."""
        config = self.config
        own_groups = config.expert_model_parallel_size > 1 or (
            config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        set_tensor_model_parallel_attributes(self.weight, True, axis, 1)
        self.weight.allreduce = not own_groups
        if self.bias is not None:
            if self.sharded_rows:
                set_tensor_model_parallel_attributes(self.bias, True, 1, 1)
            self.bias.allreduce = not own_groups

    @torch.no_grad()
    def _initialize(self, init_method, axis: int) -> None:
        if not self.config.use_cpu_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for weight in self.weight:
                    init_method(weight)
            return
        ep, tp = self.groups.ep, self.tp_group
        for expert in range(get_pg_size(ep) * self.num_gemms):  # every expert of the model: no layout changes the draws
            whole = torch.empty(self.output_size, self.input_size)
            init_method(whole)
            if expert // self.num_gemms == get_pg_rank(ep):
                runs = [run.chunk(get_pg_size(tp), axis - 1)[get_pg_rank(tp)] for run in whole.chunk(self.pieces, axis - 1)]
                self.weight[expert % self.num_gemms].copy_(torch.cat(runs, axis - 1))

    @property
    def first_expert(self) -> int:
        """Global number of the first expert of this rank."""
        return get_pg_rank(self.groups.ep) * self.num_gemms

    def finish_init(self, quant_config) -> None:
        """Megatron's call after the model is built: resolve the recipe for every expert."""
        recipe = carried(quant_config, self)
        path = quant_config.match_input.module_path
        role = expert_role(path, self.hq_layer, self.config.num_layers, self.first_expert)
        self.hq = ExpertRuntimes(
            recipe, role, self.num_gemms, self.weight.device, weight_rows=self.output_size, sharding=self.sharding()
        )
        self.hq.make_weight_caches()
        maps = self.index_maps()
        for runtime in self.hq:
            runtime.index_maps = maps
            runtime.ranks = None if runtime.sharding is None else TensorParallel(self.tp_group)
        self.hold_expert_weights(preserve=True)  # masters start from it
        for weight in self.weights() if self.weight is None else ():
            weight.partition_dim -= 1  # of a matrix, no longer of all experts' stack

    @property
    def pieces(self) -> int:
        """Runs of the whole that this rank's rows are made of: a gated linear holds one of the gate, one of the rest."""
        return 2 if self.sharded_rows and self.config.gated_linear_unit else 1

    def sharding(self) -> Sharding | None:
        """How the expert-tensor-parallel ranks split an expert's operands; None where there is one rank.

        The dispatcher gives all of them the same rows, and sums what they give back.
        """
        ranks = get_pg_size(self.tp_group)
        if ranks == 1:
            return None
        if self.sharded_rows:
            return column_sharding(ranks, self.output_size, sequence_parallel=False, pieces=self.pieces)
        return row_sharding(ranks, self.input_size, sequence_parallel=False)

    def index_maps(self) -> dict[str, tuple[int, int, int] | Pieces]:
        """Where this rank's shards of an expert lie in the whole tensors, as (row offset, column offset, global K)."""
        where = get_pg_rank(self.tp_group), get_pg_size(self.tp_group), self.input_size, self.output_size
        return column_index_maps(*where, self.pieces) if self.sharded_rows else row_index_maps(*where)

    def forward(self, x: torch.Tensor, m_splits):
        """x (T, K), m_splits: rows of each expert, as `ExpertRuntimes.forward` takes them -> (y (T, N), bias (E, N) or None)."""
        if "hq" not in self._modules:
            raise PlanError(f"{type(self).__name__}: used before Megatron called finish_init")
        bias = None if self.skip_bias_add else self.bias
        y = self.multiply(x, bias, m_splits)
        return y, self.bias if self.skip_bias_add else None

    def backward_dw(self) -> None:
        """Weight gradients are never delayed (refused at build)."""

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for key in [key for key in state_dict if key.startswith(f"{prefix}{expert_checkpoint.EXTRA_STATE}")]:
            del state_dict[key]  # what Megatron's own linears keep there; ours keep nothing
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.num_gemms} x ({self.weights()[0].shape[1]}, {self.weights()[0].shape[0]}), bias={self.use_bias}"


class HybridGroupedColumnLinear(HybridGroupedParallelLinear):
    sharded_rows = True


class HybridGroupedRowLinear(HybridGroupedParallelLinear):
    sharded_rows = False


class BiasOfRows(torch.autograd.Function):
    """bias (E, N) -> (T, N), of every row its expert's. Gradients are summed in FP32 and in one order, where an index's are
    added on GPUs by atomics of the bias's dtype, in any order."""

    @staticmethod
    def forward(ctx, bias, groups: Groups):
        ctx.groups = groups
        return bias.index_select(0, groups.of_row)

    @staticmethod
    def backward(ctx, dy):
        return group_sums(dy, ctx.groups), None


class HybridGroupedMLP(TEGroupedMLP):
    """Megatron's grouped MLP over our linears. The splits go to them as the dispatcher gives them: no host list."""

    def __init__(self, num_local_experts: int, config, pg_collection=None, name: str | None = None):
        linears = GroupedMLPSubmodules(linear_fc1=HybridGroupedColumnLinear, linear_fc2=HybridGroupedRowLinear)
        super().__init__(num_local_experts, config, linears, pg_collection=pg_collection, name=name)

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        """x (T, H) sorted by expert, rows of each expert (E,), routing weights (T,) -> (y (T, H), None). With `Groups` in the
        second's place: x, y and the routing weights as these say, of tokens or rows."""
        x, where = permuted_local_hidden_states, getattr(tokens_per_expert, "weights", None)
        probs = permuted_probs.unsqueeze(-1) if where is None else permuted_probs
        if self.config.moe_apply_probs_on_input:  # Megatron allows it for one expert a token
            x, probs = (probs * x).to(x.dtype), torch.ones_like(probs)
        groups = Groups.of(tokens_per_expert, self.num_local_experts, x.shape[0], x.device)
        hidden, _ = self.linear_fc1(x, groups.between(copies=groups.copies))
        if self.activation_recompute:
            checkpoint = CheckpointWithoutOutput(fp8=None)  # False would mean that Transformer Engine is there
            hidden = checkpoint.checkpoint(functools.partial(self._activate, where=where), hidden, probs)
        else:
            hidden = self._activate_for_fc2(hidden, probs, where, groups)
        y, bias = self.linear_fc2(hidden, groups.between(sums=groups.sums))
        if self.activation_recompute:
            checkpoint.discard_output_and_register_recompute(y)
        if bias is not None:
            y = (y + BiasOfRows.apply(bias, groups) * probs).to(y.dtype)
        return y, None

    def _activate(self, hidden, probs, where=None):
        """The activation times the routing weight, rounded once more to the hidden dtype, as Megatron does. probs: (T, 1), or
        with a `RowMap` of the rows (N, E)."""
        config = self.config
        probs = probs if where is None else permute_probs(probs, where).unsqueeze(-1)
        if config.bias_activation_fusion and config.gated_linear_unit and config.activation_func is F.silu:
            return weighted_bias_swiglu_impl(hidden, None, probs, config.activation_func_fp8_input_store)
        if not config.gated_linear_unit:
            return (config.activation_func(hidden) * probs).to(hidden.dtype)
        gate, up = hidden.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (config.activation_func(gate) * (up + config.glu_linear_offset) * probs).to(hidden.dtype)

    def _activate_for_fc2(self, hidden, probs, where, groups: Groups):
        """`_activate`, of what is not computed again in backward: what fc2 takes for the rows of these groups."""
        return self._activate(hidden, probs, where)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Keys as `SequentialMLP`'s."""
        tensors = {}
        for name in ("linear_fc1", "linear_fc2"):
            tensors |= expert_checkpoint.sharded(getattr(self, name), name, prefix, sharded_offsets, metadata)
        return tensors
