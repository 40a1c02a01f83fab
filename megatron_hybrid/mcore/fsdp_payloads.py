"""Megatron-FSDP over weights that live quantized: its shards of masters, its schedule of gathers, our bytes.

Megatron-FSDP keeps FP32 masters and gradients of a group of weights in its own buffers, and decides when the group is
gathered and let go. In the place of its weights' shards there are `PayloadBuffer`s: what travels is a rank's share of the
payloads, cast from its masters once a step (`param_gather.ShardedWeights`), laid out by payload. Where a group's memory
comes and goes, forward gathers what fprop reads and backward, which Megatron-FSDP calls the transposed weights, what dgrad
reads, and both where linears are recomputed inside of a unit. `patches.megatron_fsdp` calls what is here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import Bucket, DataParallelBuffer
from megatron.core.transformer.module import MegatronModule

from ..distributed.param_gather import HIGH_PRECISION, ShardedWeights, part_read, reduce_amaxes
from ..distributed.shard_map import overlap
from ..formats import COLUMNWISE
from ..plan import PlanError
from ..tensor import HybridTensor
from ..tensor_owner import write_keys
from .param_sync import gathers_of, holds_quantized

FORWARD, BACKWARD = False, True  # what Megatron-FSDP calls `bwd`
PARTS_WITH_LINEARS = {"mlp", "moe", "shared_experts"}  # of what Megatron's selective recomputation knows
STAND_IN = ("_rowwise_data", "_columnwise_data")  # where Megatron-FSDP looks for the bytes of Transformer Engine's tensors


class PayloadBuffer(DataParallelBuffer):
    """Stands where Megatron-FSDP has the weights of a group of quantized parameters, or their transposes.

    It holds no element: its shard is this rank's bytes of a pass, its bucket every rank's. Sizes and indices are those
    of elements, as Megatron-FSDP's accounts and its checkpoints want them.
    """

    gather = None  # the `GroupGather`, once there are masters

    def init_data(self, data) -> None:
        """None are kept."""

    def set_item(self, item_id, item_data) -> None:
        """A parameter's bytes are cast from its master."""

    def get_item(self, item_id, only_shard: bool = False) -> torch.Tensor:
        """No element: Megatron-FSDP then leaves the cast of this item to whoever it asks for casts."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def get_item_from_bucket(self, bucket, item_id) -> torch.Tensor:
        return torch.empty(self.item_index_map[item_id].size, dtype=self.dtype, device="meta")

    def fetch_bucket(self, dtype=None, set_param_data: bool = False, strict_assignments: bool = True) -> Bucket:
        """Memory for every rank's bytes; before there are masters, none."""
        if self.gather is None:
            return Bucket(data=torch.empty(0, dtype=self.dtype, device=self.device))
        return Bucket(data=self.gather.receive(self.is_transpose_buffer))

    def get_shard_from_local_buffer(self) -> torch.Tensor:
        return self.gather.passes[self.is_transpose_buffer].chunk

    def finish(self) -> None:
        """After the gather's end: its bytes into the parameters."""
        if self.gather is not None:
            self.gather.fill(self.is_transpose_buffer)

    def free_bucket_storage(self) -> None:
        if self.gather is not None and self.is_data_distributed:
            self.gather.release(self.is_transpose_buffer)


@dataclass
class Pass:
    """What one kind of gather moves. parts: of every parameter the payloads that it fills."""

    shares: ShardedWeights
    parts: list[HybridTensor]
    chunk: torch.Tensor | None = None  # this rank's bytes
    received: torch.Tensor | None = None  # every rank's, from the start of a gather to its end

    def filled(self) -> list:
        """The payloads of all parameters."""
        return [s for part in self.parts for s in part.payloads()]

    def buffers(self) -> list[torch.Tensor]:
        return [buffer for part in self.parts for buffer in part.payload_buffers()]


class GroupGather:
    """Casts and gathers the weights of one of Megatron-FSDP's parameter groups.

    group: its `ParameterGroup`, whose buffers are there and hold the masters. Where it has a buffer of transposes, forward
    and backward gather apart. recomputes: forwards run again in backward, over what that has gathered. Raises `PlanError`
    for weights without FP32 masters.
    """

    brings_bytes = True  # a parameter is empty until a gather

    def __init__(self, group, recomputes: bool):
        self.params, self.group, self.recomputes = group.params, group, recomputes
        weights, self._masters = group.model_weight_buffer, group.main_weight_buffer
        if self._masters is None or self._masters.dtype != torch.float32:
            raise PlanError(
                f"{self.params[0]._stale.owner.label}: its weight lives quantized, and Megatron-FSDP keeps no FP32 master of "
                "it; give the recipe `weights: high_precision` where weights are frozen"
            )
        self.process_group = weights.data_parallel_group
        self.rank, self.world = weights.dp_rank, weights.dp_world_size
        self.ranges = _ranges(self._masters, self.world)
        self.stepped = False  # masters have moved since the last cast
        self.outdated = False  # the last cast read scales of other formats
        for param in self.params:
            param._stale.owner.check_split()
        self.plan()
        for buffer in filter(None, (weights, group.transpose_weight_buffer)):
            buffer.gather = self

    def plan(self) -> None:
        """Shares of the parameters as they are now. Gathers under way are of the old ones, and forgotten."""
        _allot([buffer for p in self.params for buffer in p.payload_buffers()])
        owners = [param._stale.owner for param in self.params]
        for owner in owners:
            owner.gather = None
        for owner in owners:
            owner.settle()  # payloads of experts may be put together, which moves them: not once it is this group's
        for owner in owners:
            owner.gather = self
        self._live: set[bool] = set()  # passes whose bytes are there
        self.apart = self.group.transpose_weight_buffer is not None
        self.passes = {which: self._pass(which) for which in ((FORWARD, BACKWARD) if self.apart else (FORWARD,))}
        for one in self.passes.values() if self.group.model_weight_buffer.is_data_distributed else ():
            _free(one.buffers())
        self._mark()

    def _pass(self, which: bool) -> Pass:
        reads = dict(forward=which == FORWARD or self.recomputes, backward=which == BACKWARD or not self.apart)
        parts = [part_read(param, **reads) for param in self.params]
        mode = self.params[0]._stale.owner.recipe.param_gather
        return Pass(ShardedWeights(parts, self.ranges, self.rank, gather=mode), parts)

    # ---- casts

    def is_current(self) -> bool:
        """Whether the parameters still hold the payloads that this was planned for."""
        planned = {s for one in self.passes.values() for s in one.filled()}
        return all(s in planned for p in self.params for s in p.payloads())

    @property
    def masters(self) -> list[torch.Tensor]:
        """This rank's shards, flat."""
        return [self._masters.get_item(i, only_shard=True) for i in range(len(self.params))]

    def cast(self, amaxes: dict[bool, torch.Tensor]) -> None:
        """This rank's bytes of every pass. Delayed scales move on once, before the first."""
        stepped, self.stepped = self.stepped, False
        for which, one in self.passes.items():
            one.chunk = one.shares.cast(self.masters, amaxes[which], step=stepped and which == FORWARD)
        if stepped and self.passes[FORWARD].shares.gather == HIGH_PRECISION:  # which casts what it has gathered
            for param in self.params:
                write_keys(param, step=True)

    def sync(self) -> None:
        """Cast anew, from the masters. A collective."""
        cast_groups([self])

    def follow_formats(self) -> None:
        """Cast anew, from the masters, what a step rule or a switch of recipes changed. A collective."""
        if self.outdated or not self.is_current():
            self.outdated = False
            if (model := getattr(self.params[0], "_megatron_fsdp_model", None)) is not None:  # a forward has been
                model.all_gather_pipeline.reset()  # what was gathered is of the old formats
            self.sync()

    # ---- gathers

    def receive(self, which: bool) -> torch.Tensor:
        """uint8 memory for every rank's bytes of a pass."""
        one = self.passes[which]
        one.received = torch.empty(self.world * one.chunk.numel(), dtype=torch.uint8, device=one.chunk.device)
        return one.received

    @torch.no_grad()
    def fill(self, which: bool) -> None:
        """The bytes that were received into the payloads; once for every `receive`. Autograd may hold these buffers for
        backward: no version moves."""
        one = self.passes[which]
        if one.received is None:
            return
        received, one.received = one.received.view(self.world, -1), None
        buffers = one.buffers()
        _allot(buffers)
        with torch.autograd._unsafe_preserve_version_counter((*one.parts, *buffers)):
            one.shares.scatter(received)
        self._live.add(which)
        self._mark()

    def release(self, which: bool) -> None:
        """Free what no other pass needs."""
        self._live.discard(which)
        _free(self.passes[which].buffers(), [b for other in self._live for b in self.passes[other].buffers()])
        self._mark()

    def _mark(self) -> None:
        """Say which directions of a parameter are there; backward will have its column."""
        fresh = {s for which in self._live for s in self.passes[which].filled()}
        for t in self.params:
            t._stale.filled(t.payloads(), fresh, {COLUMNWISE} if self.apart else ())


def _ranges(masters: DataParallelBuffer, world: int) -> list[list[tuple[int, int]]]:
    """ranges[rank][i]: the flat range of parameter i whose master a rank holds."""
    first, shard = masters.bucket_index.global_data_index, masters.bucket_index.size // world
    items = [masters.item_index_map[i] for i in range(len(masters.params))]
    places = [(item.global_data_index - first, item.global_data_index - first + item.size) for item in items]
    return [[overlap(*place, rank * shard, (rank + 1) * shard) for place in places] for rank in range(world)]


def _storages(buffers: list[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The memory that these buffers are in; those of experts that run at once share theirs."""
    return {(storage := buffer.untyped_storage())._cdata: storage for buffer in buffers}


def _allot(buffers: list[torch.Tensor]) -> None:
    """Have the buffers' memory. All that share some come together."""
    sizes: dict[int, int] = {}
    for buffer in buffers:
        end = (buffer.storage_offset() + buffer.numel()) * buffer.itemsize
        key = buffer.untyped_storage()._cdata
        sizes[key] = max(sizes.get(key, 0), end)
    for key, storage in _storages(buffers).items():
        if storage.nbytes() < sizes[key]:  # another group may have more of it
            storage.resize_(sizes[key])


def _free(buffers: list[torch.Tensor], but=()) -> None:
    """Give the buffers' memory back, but what others of these are in."""
    kept = _storages(but)
    for key, storage in _storages(buffers).items():
        if key not in kept:
            storage.resize_(0)


@torch.no_grad()
def cast_groups(gathers: list[GroupGather]) -> None:
    """New bytes from the masters, amaxes of all of them in one collective a process group. A collective."""
    for gather in gathers:
        if not gather.is_current():
            gather.plan()
    by_group: dict = {}
    for gather in gathers:
        by_group.setdefault(gather.process_group, []).append(gather)
    for process_group, together in by_group.items():
        shares = [(one.shares, gather.masters) for gather in together for one in gather.passes.values()]
        own = [weights.amaxes(masters) for weights, masters in shares]
        found = iter(reduce_amaxes([weights for weights, _ in shares], own, process_group))
        for gather in together:
            gather.cast({which: next(found) for which in gather.passes})


def _recomputes_linears(model) -> bool:
    """Whether backward runs forwards of linears again without a gather for them: Megatron-FSDP has one for a unit's."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, MegatronModule)}.values()
    selective = [set(c.recompute_modules) for c in configs if c.recompute_granularity == "selective"]
    return any(modules & PARTS_WITH_LINEARS for modules in selective)


# ---- what the patch puts around Megatron-FSDP's functions


def buffer_for(original):
    """`original` is the class `DataParallelBuffer`."""

    def make(ddp_config, params, *args, dtype=None, **kwargs):
        weights = dtype == torch.uint8 and holds_quantized(params)  # masters and gradients have other dtypes
        return (PayloadBuffer if weights else original)(ddp_config, params, *args, dtype=dtype, **kwargs)

    return make


def around_init_buffers(original):
    @functools.wraps(original)
    def _init_each_parameter_group_buffers(self, *args, **kwargs):
        groups = [group for group in self.parameter_groups if holds_quantized(group.params)]
        params = [param for group in groups for param in group.params]
        for param in params:
            if param.get_high_precision_init_val() is None:
                param._stale.init_value = param.detach().dequantize().cpu()
            for name in STAND_IN:
                setattr(param, name, torch.empty(param.shape, dtype=torch.uint8, device="meta"))
        original(self, *args, **kwargs)
        for param in params:
            for name in STAND_IN:
                delattr(param, name)
        for group in groups:
            if group.fsdp_unit_id is None:  # gathered once for both passes
                group.transpose_weight_buffer = None
        recomputes = _recomputes_linears(self.module)
        cast_groups([GroupGather(group, recomputes) for group in groups])

    return _init_each_parameter_group_buffers


def around_wait_bucket_ready(original):
    @functools.wraps(original)
    def wait_bucket_ready(self, bucket_id, bwd, empty_ok=False):
        original(self, bucket_id, bwd, empty_ok=empty_ok)
        buffer = self.get_fsdp_buffer(bucket_id, bwd)
        if isinstance(buffer, PayloadBuffer):
            buffer.finish()

    return wait_bucket_ready


def cast_masters(params) -> None:
    """After an optimizer's step: of those whose masters moved; after a load: of all of these parameters."""
    gathers = gathers_of(params)
    cast_groups([gather for gather in gathers if gather.stepped] or gathers)
