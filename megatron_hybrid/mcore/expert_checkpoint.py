"""Grouped experts in Megatron's checkpoints: one tensor an expert, under the keys of its `SequentialMLP`.

The parameter is one (E, N, K) tensor; a factory takes it apart for saving and puts it together after loading. Weights that
live quantized are an expert's own, under the same keys. The optimizer applies the same factory to its own state. Any
number of expert-parallel and expert-tensor-parallel ranks may load what any other number saved.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensorFactory
from megatron.core.utils import get_pg_rank, get_pg_size
from torch.distributed.tensor import DTensor

from .state import PREFIX

EXTRA_STATE = "_extra_state"
_EXPERT = "<expert>"  # in the keys of tensors that Megatron wants stored one a key


def sharded(module, name: str, prefix: str, offsets: tuple, metadata: dict | None) -> dict:
    """The sharded state dict of the grouped linear `name` of a grouped MLP at `prefix`."""
    singleton = (metadata or {}).get("singleton_local_shards", False)
    stem = f"{prefix}experts.{_EXPERT}.{name}." if singleton else f"{prefix}experts.{name}."
    rows = 0 if module.sharded_rows else 1  # the sharded axis of one expert's matrix
    key = f"{stem}weight"
    if module.weight is not None:
        tensors = {f"{prefix}{name}.weight": _factory(module, key, module.weight, rows, offsets, singleton)}
    else:
        tensors = {
            f"{prefix}{name}.weight{e}": _factory(module, key, weight, rows, offsets, singleton, expert=e)
            for e, weight in enumerate(module.weights())
        }
    if module.bias is not None:
        axis = 0 if module.sharded_rows else None
        tensors[f"{prefix}{name}.bias"] = _factory(module, f"{stem}bias", module.bias, axis, offsets, singleton)
    return tensors | _extra_states(module, name, prefix, stem, offsets, singleton) | _histories(module, name, prefix, offsets)


def _factory(module, key: str, data, axis, offsets: tuple, singleton: bool, expert=None) -> ShardedTensorFactory:
    """axis: that of an expert's tensor that ranks split, or None. expert: local number of the one whose tensor `data` is,
    None for the stack of all, of which FSDP2 leaves this rank some experts, that no other has."""
    rank, copy, first = get_pg_rank(module.tp_group), get_pg_rank(module.groups.expt_dp), expert or 0
    if isinstance(data, DTensor):
        each = -(-data.shape[0] // data.device_mesh.size())
        data, first, copy = data._local_tensor, data.device_mesh.get_local_rank() * each, 0
    replica = (0, 0 if axis is not None else rank, copy)
    gated = module.config.gated_linear_unit and module.sharded_rows
    build = partial(_build, module, axis, gated, offsets, singleton, first, expert is None)
    return ShardedTensorFactory(key, data, build, partial(_merge, gated, expert is None), replica)


@torch.no_grad()
def _build(module, axis, gated, offsets, singleton, first, stacked, key, data, replica_id, flattened_range):
    """The experts' tensors; a gated one as two, gate and rest, which ranks split apart. first: local number of the first."""
    assert flattened_range is None, "flattened expert tensors are not supported"
    experts = data.unbind() if stacked else [data]
    return [
        _expert(module, number, tensor, axis, gated, offsets, singleton, key, replica_id)
        for number, tensor in enumerate(experts, module.first_expert + first)
    ]


def _expert(module, expert, tensor, axis, gated, offsets, singleton, key, replica_id):
    total = module.num_gemms * get_pg_size(module.groups.ep)
    where = offsets if singleton else (*offsets, (len(offsets), expert, total))
    key, make = key.replace(_EXPERT, str(expert)), partial(_tensor, where, replica_id)
    ranks, rank = get_pg_size(module.tp_group), get_pg_rank(module.tp_group)
    if axis is None:
        return make(key, tensor)
    if not gated:
        return make(key, tensor, (axis, rank, ranks))
    gate, rest = tensor.chunk(2, axis)
    if singleton:
        return [make(f"{key}_w", gate, (axis, rank, ranks)), make(f"{key}_v", rest, (axis, rank, ranks))]
    return [make(key, gate, (axis, rank, 2 * ranks)), make(key, rest, (axis, rank + ranks, 2 * ranks))]


def _tensor(where, replica_id, key, data, *split):
    split = [(axis + len(where), rank, ranks) for axis, rank, ranks in split]
    return ShardedTensor.from_rank_offsets(
        key, data, *where, *split, replica_id=replica_id, prepend_axis_num=len(where)
    )


@torch.no_grad()
def _merge(gated: bool, stacked: bool, experts: list) -> torch.Tensor:
    experts = [torch.cat(parts) for parts in experts] if gated else experts
    if not experts:  # a shard without any
        return torch.empty(0)
    return torch.stack(experts) if stacked else experts[0]


def _extra_states(module, name: str, prefix: str, stem: str, offsets: tuple, singleton: bool) -> dict:
    """Nothing, an expert: Megatron's own linears look for it in every checkpoint that they load."""
    total = module.num_gemms * get_pg_size(module.groups.ep)
    replica = (0, get_pg_rank(module.tp_group), get_pg_rank(module.groups.expt_dp))
    tensors = {}
    for e in range(module.num_gemms):
        expert = module.first_expert + e
        where = offsets if singleton else (*offsets, (len(offsets), expert, total))
        shape, offset = tuple(size for *_, size in where) or (1,), tuple(at for _, at, _ in where) or (0,)
        key = f"{stem}{EXTRA_STATE}".replace(_EXPERT, str(expert))
        tensors[f"{prefix}{name}.{EXTRA_STATE}{e}"] = ShardedObject(key, None, shape, offset, replica)
    return tensors


def _histories(module, name: str, prefix: str, offsets: tuple) -> dict:
    """Delayed-scaling state of every expert, each under a key of its own, the same on all ranks that hold the expert."""
    replica = (0, get_pg_rank(module.tp_group), get_pg_rank(module.groups.expt_dp))
    layer = f"layer_{module.hq_layer}." if offsets else ""
    tensors = {}
    for e, runtime in enumerate(module.hq if "hq" in module._modules else ()):
        for buffer, data in runtime._buffers.items():
            key = f"{prefix}experts.{name}.{PREFIX}{layer}expert_{runtime.role.expert}.{buffer}"
            tensor = ShardedTensor.from_rank_offsets(key, data, replica_id=replica)
            if buffer in runtime.missing_state:
                tensor = LocalNonpersistentObject(tensor.data)
            tensors[f"{prefix}{name}.{PREFIX}{e}.{buffer}"] = tensor
    return tensors
