"""Megatron's distributed optimizer over quantized weights: its shards of masters, our cast and our gather.

Megatron keeps the sharding of gradients and masters. It sees our parameters as "quantized storage" and gives them a
buffer of their own, whose parameter half is the gradient buffer's memory and stays unused: the bytes that travel are
a bucket group's `ShardedWeights`, laid out by payload (docs/design.md says why). `patches.quantized_params` calls
what is here.
"""

from __future__ import annotations

import copy
import functools

import torch
import torch.distributed as dist

from ..distributed.param_gather import HIGH_PRECISION, ShardedWeights, reduce_amaxes
from ..distributed.shard_map import overlap
from ..tensor import HybridTensor

GATHER = "hq_gather"  # attribute of a bucket group
GATHERS = "hq_gathers"  # attribute of an optimizer: those of its bucket groups


def holds_quantized(params) -> bool:
    return any(isinstance(p, HybridTensor) for p in params)


class BucketGather:
    """Casts and gathers the weights of one bucket group. Made once the optimizer has masters for them."""

    brings_bytes = False  # parameters hold a value at all times

    def __init__(self, bucket_group):
        self.group = bucket_group.intra_distributed_optimizer_instance_group
        self.rank, self.world = self.group.rank(), self.group.size()
        self.params, self.ranges = [], [[] for _ in range(self.world)]
        for bucket in bucket_group.buckets:
            shard = bucket.grad_data.numel() // self.world
            for param in bucket.params_list:
                start, stop = bucket.param_to_index[param]
                self.params.append(param)
                for rank, ranges in enumerate(self.ranges):
                    ranges.append(overlap(start, stop, rank * shard, (rank + 1) * shard))
        self.stepped = False  # masters have moved since the last cast
        self.outdated = False  # the last cast read scales of other formats
        self._pending = None  # (weights, gathered bytes, `step` and `record` of their cast, what to wait for)
        for param in self.params:
            param._stale.owner.check_split()
        self._plan()
        for param in self.params:
            param._stale.owner.gather = self

    def _plan(self) -> None:
        self.quantizers = [p.quantizer for p in self.params]
        mode = self.params[0]._stale.owner.recipe.param_gather
        self.weights = ShardedWeights(self.params, self.ranges, self.rank, gather=mode)

    @property
    def masters(self) -> list[torch.Tensor | None]:
        """This rank's shards, which Megatron's optimizer hangs on its parameters."""
        return [
            getattr(p, "main_param", None) if b > a else None for p, (a, b) in zip(self.params, self.ranges[self.rank])
        ]

    @torch.no_grad()
    def start(self, async_op: bool, *, record: bool = True):
        """Cast the shards and start the gather; returns what to wait for, None when nothing is left to wait for.

        record: histories of delayed scaling keep the amaxes.
        """
        if not self.weights.is_current():  # moved, or loaded by assignment: never write to what nobody reads
            self._plan()
        masters, weights = self.masters, self.weights
        (amaxes,) = reduce_amaxes([weights], [weights.amaxes(masters)], self.group)
        stepped, self.stepped = self.stepped, False
        options = dict(step=stepped, record=record)
        chunk = weights.cast(masters, amaxes, **options)
        chunks, work = chunk, None
        if self.world > 1:
            chunks = torch.empty(self.world * chunk.numel(), dtype=torch.uint8, device=chunk.device)
            work = dist.all_gather_into_tensor(chunks, chunk, group=self.group, async_op=async_op)
        self._pending = weights, chunks.view(self.world, -1), options, work
        return work

    def finish(self) -> None:
        """Write the gathered bytes into the parameters; once for every `start`, whose work was waited for."""
        if self._pending is not None:
            (weights, chunks, options, _), self._pending = self._pending, None
            weights.scatter(chunks, **options)

    def _drop(self) -> None:
        """Give up a gather under way, of formats that are no more."""
        if self._pending is not None:
            (weights, _, options, work), self._pending = self._pending, None
            if work is not None:
                work.wait()
            self.stepped = options["step"] and weights.gather == HIGH_PRECISION  # whose casts were yet to come

    def sync(self, *, record: bool = True) -> None:
        """The parameters from the masters, now: after a load, or when their formats changed. record: see `start`."""
        self.start(async_op=False, record=record)
        self.finish()

    def follow_formats(self) -> None:
        """Cast anew, from the masters, what a step rule or a switch of recipes changed. A collective."""
        if self.outdated or self.quantizers != [p.quantizer for p in self.params]:
            self.outdated = False
            self._drop()
            self._plan()
            self.sync()


def gathers(runtimes) -> list:
    """Those of the weights of some linears, each once, in the linears' order: the same on all ranks of a group."""
    return _gathers(r.weight_owner for r in runtimes if r.weight_owner is not None)


def gathers_of(params) -> list:
    """Those of some parameters, each once, in the parameters' order."""
    return _gathers(p._stale.owner for p in params if isinstance(p, HybridTensor))


def _gathers(owners) -> list:
    return list(dict.fromkeys(owner.gather for owner in owners if owner.gather is not None))


# ---- what the patches put around Megatron's functions


def around_start_param_sync(original):
    @functools.wraps(original)
    def start_param_sync(self, force_sync: bool = False):
        if not holds_quantized(self.params):
            return original(self, force_sync)
        gather = getattr(self, GATHER, None)
        if force_sync and self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            self._post_param_sync()
            return None
        assert self.param_gather_handle is None
        overlap = self.ddp_config.overlap_param_gather
        if gather is not None:  # None: no optimizer yet, every rank holds the same weights
            work = gather.start(async_op=overlap and not force_sync)
            self.param_gather_handle = work if overlap and not force_sync else None
        if overlap and self.param_gather_handle is None:
            self._post_param_sync()
        self.param_gather_dispatched = True
        return None

    return start_param_sync


def around_post_param_sync(original):
    @functools.wraps(original)
    def _post_param_sync(self):
        if not holds_quantized(self.params):
            return original(self)
        if (gather := getattr(self, GATHER, None)) is not None:
            gather.finish()
        return None

    return _post_param_sync


def around_partition_buckets(original):
    @functools.wraps(original)
    def partition_buckets(buffers, *args, **kwargs):
        """Quantized weights get bucket groups of their own: Megatron would put other buckets beside the last."""
        ours = [buffer for buffer in buffers if holds_quantized(buffer.params)]
        if not ours:
            return original(buffers, *args, **kwargs)
        others = [buffer for buffer in buffers if not holds_quantized(buffer.params)]
        return original(ours, *args, **kwargs) + original(others, *args, **kwargs)

    return partition_buckets


def around_build_groups(original):
    """`original` is a classmethod's function."""

    @functools.wraps(original)
    def _build_model_and_main_param_groups(cls, gbuf_ranges, param_gbuf_map, opt_group_ranges, config):
        quantized = [p for group in opt_group_ranges for p in group["params"] if isinstance(p, HybridTensor)]
        if quantized:
            config = copy.copy(config)
            config.fp8_recipe = "blockwise"  # any but "delayed", for which shards would be views of the parameter
        for param in quantized:
            if param.get_high_precision_init_val() is None:
                param._stale.init_value = param.detach().dequantize().cpu()
        return original(cls, gbuf_ranges, param_gbuf_map, opt_group_ranges, config)

    return _build_model_and_main_param_groups


def _bucket_groups(optimizer):
    """The optimizer's bucket groups of quantized weights."""
    groups = [g for chunk in optimizer.model_chunks for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    ours = {id(bucket) for buffer in optimizer.buffers for bucket in buffer.buckets}
    return [g for g in groups if holds_quantized(g.params) and all(id(bucket) in ours for bucket in g.buckets)]


def around_init(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        setattr(self, GATHERS, [])
        if self.is_stub_optimizer:
            return
        if self.ddp_config.use_megatron_fsdp:  # whose groups have theirs; an optimizer's parameters are shards
            shards = [p for group in self.optimizer.param_groups for p in group["params"]]
            setattr(self, GATHERS, gathers_of(getattr(p, "orig_param", p) for p in shards))
            return
        for group in _bucket_groups(self):
            gather = BucketGather(group)
            setattr(group, GATHER, gather)
            getattr(self, GATHERS).append(gather)
            _release(gather.params)
            for param in gather.params:
                param._stale.preserve = True  # what a checkpoint brings, until the masters have it

    return __init__


def around_copy_to_model(original):
    @functools.wraps(original)
    def _copy_main_params_to_model_params(self):
        for gather in getattr(self, GATHERS, ()):
            gather.stepped = True
        original(self)

    return _copy_main_params_to_model_params


def _release(params) -> None:
    for param in params:
        param._stale.init_value = None


def around_load(original):
    """Loaded weights are what the loaded masters are cast to: a checkpoint's copies went through their decode.

    A state dict without masters, of `--ckpt-format torch`, leaves those of now, whose amaxes must not enter loaded
    histories.
    """

    @functools.wraps(original)
    def load_state_dict(self, state_dict):
        result = original(self, state_dict)
        brings_masters = self.ddp_config.use_megatron_fsdp or "param_state" in state_dict
        for gather in getattr(self, GATHERS, ()):
            if brings_masters:
                gather.sync()
            else:
                gather.sync(record=False)
            _release(gather.params)
        return result

    return load_state_dict


def around_load_from_file(original):
    """The masters of `--ckpt-format torch` come last, from a file of their own."""

    @functools.wraps(original)
    def load_parameter_state_from_dp_zero(self, state_dict, **options):
        original(self, state_dict, **options)
        for gather in getattr(self, GATHERS, ()):
            gather.sync()

    return load_parameter_state_from_dp_zero


def around_copy_to_main(original):
    """Masters from loaded weights: from what was loaded, not from the decode of its cast."""

    @functools.wraps(original)
    def _copy_model_params_to_main_params(self, state_dict=None):
        original(self, state_dict)
        for gather in getattr(self, GATHERS, ()):
            for param, master, (a, b) in zip(gather.params, gather.masters, gather.ranges[gather.rank]):
                value = param.get_high_precision_init_val()
                if state_dict is None and master is not None and value is not None:
                    master.data.copy_(value.reshape(-1)[a:b])
            gather.sync()
            _release(gather.params)

    return _copy_model_params_to_main_params


def around_preprocess(original):
    """Saves and loads of distributed checkpoints see plain tensors in the place of quantized weights."""

    @functools.wraps(original)
    def preprocess(sharded_state_dict, *args, **kwargs):
        from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

        force_all_tensors_to_non_fp8(sharded_state_dict)
        return original(sharded_state_dict, *args, **kwargs)

    return preprocess


def around_generate_state_dict(original):
    """The same for files of `--ckpt-format torch`, which no preprocessing goes over."""

    @functools.wraps(original)
    def generate_state_dict(args, *rest, **options):
        found = original(args, *rest, **options)
        is_plain = args.ckpt_format == "torch"
        for tensors in [tensors for key, tensors in found.items() if is_plain and key.startswith("model")]:
            for name, tensor in tensors.items():
                if isinstance(tensor, HybridTensor):
                    tensors[name] = tensor.detach().dequantize(dtype=tensor.dtype)
        return found

    return generate_state_dict
