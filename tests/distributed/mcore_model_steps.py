"""Checks of what depends on steps, microbatches and ranks in the Megatron modules; run_mcore_model.py runs them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mcore_model_common import F, H, bf16, build, linear, losses, mpu, parallel, rank, shard
from tp_cases import on_the_wire

from megatron_hybrid import HybridQuantizer, Recipe
from megatron_hybrid.mcore import driver, state
from megatron_hybrid.mcore.layers import HybridColumnParallelLinear, HybridRowParallelLinear
from megatron_hybrid.plan import PlanError
from megatron_hybrid.random_keys import RandomKeys


def check_random_rounding_needs_a_driver():
    parallel(tp=2)
    rules = [{"match": {"layers": "first:1"}, "use": {"dgrad": {"grad_output": "nvfp4:sr", "weight": "nvfp4"}}}]
    model = build(Recipe.from_dict({"version": 1, "name": "t", "defaults": "high_precision", "rules": rules}))
    try:
        losses(model)
    except PlanError as error:
        assert "decoder.layers.0.self_attention.linear_qkv" in str(error) and "rounds stochastically" in str(error)
    else:
        raise AssertionError("no error")


def part_of(amax, dim: int):
    """This rank's part of a tensor's amax, which has one value along the dimensions that are not scaled apart."""
    return None if amax is None else shard(amax, dim) if amax.dim() and amax.shape[dim] > 1 else amax


def check_random_bits_do_not_depend_on_tensor_parallel_ranks():
    """A shard's codes are those of the whole tensor, given the whole tensor's amax."""
    parallel(tp=2)
    split = {
        HybridColumnParallelLinear: {"weight": 0, "grad_output": 1},
        HybridRowParallelLinear: {"input": 1, "weight": 1},
    }
    shapes = {"input": (32, H), "weight": (F, H), "grad_output": (32, F)}
    for cls, dims in split.items():
        module = linear(cls, "bf16", H, F)
        assert set(module.hq.index_maps) == set(shapes)
        for seed, operand in enumerate(shapes):
            whole = bf16(*shapes[operand], seed=seed)
            dim = dims.get(operand)
            part = whole if dim is None else shard(whole, dim)
            keys = RandomKeys(5, num_microbatches=2)
            keys.set(3, 1)
            rngs = [keys.rng(module.hq.role, operand, whole.device, m) for m in (None, module.hq.index_maps[operand])]
            for fmt in ("nvfp4:sr", "nvfp4:2d,sr", "nvfp4:row_scaled,sr", "nvfp4:rht,sr", "nvfp4:row_scaled,rht,sr"):
                quantizer = HybridQuantizer(rowwise=fmt, columnwise=fmt)
                amax = quantizer.amax(whole)
                expected = quantizer.quantize(whole, amax=amax, rng=rngs[0])
                mine = tuple(a if dim is None else part_of(a, dim) for a in amax)
                found = quantizer.quantize(part, amax=mine, rng=rngs[1])
                for direction in ("rowwise", "columnwise"):
                    codes = getattr(expected, direction).codes()
                    codes = codes if dim is None else shard(codes, dim)
                    assert torch.equal(getattr(found, direction).codes(), codes), (cls, operand, fmt, direction)


def check_amaxes_are_reduced_over_the_ranks_that_share_tensors():
    """Tensor- and data-parallel ranks, in one collective; not pipeline stages, whose modules differ."""
    recipe = Recipe.load("fp8_delayed").with_first_rule({"layers": "last:1"}, {"fprop": "mxfp8_e4m3"})
    for sizes, ranks in ((dict(tp=2), [0, 1]), (dict(), [0, 1]), (dict(pp=2), None)):
        parallel(**sizes)
        model = build(recipe)
        control = driver.attach([model.module], seed=1)
        states = [state for runtime in control.controller.runtimes for _, state in runtime.states()]
        control.controller.begin_step(1)
        with on_the_wire() as sent:
            control.controller.end_step(control.group)
        calls = [(call.name, call.nbytes // 4, call.op, call.ranks) for call in sent]
        assert calls == ([] if ranks is None else [("all_reduce", len(states), dist.ReduceOp.MAX, tuple(ranks))]), calls
        counts = [None, None]
        dist.all_gather_object(counts, len(states))
        assert (counts[0] == counts[1]) == (sizes != dict(pp=2)), counts  # why stages must not meet
        keys = control.controller.keys
        assert (keys.replica, keys.num_replicas) == ((rank(), 2) if not sizes else (0, 1))


def check_one_scale_for_a_tensor():
    """After a step every rank scales its weight shard by the largest element of the whole, in FP32 state."""
    parallel(tp=2)
    model = build(Recipe.load("fp8_delayed"), sequence_parallel=True)
    control = driver.attach([model.module], seed=1)
    control.controller.begin_step(1)
    weight = model.module.decoder.layers[1].mlp.linear_fc2.weight
    with torch.no_grad():
        weight[0, 0] = 3.0 + rank()
    losses(model).sum().backward()
    control.controller.end_step(control.group)
    hq = model.module.decoder.layers[1].mlp.linear_fc2.hq
    assert hq.weight_rowwise_scale.item() == hq.weight_columnwise_scale.item() == 448 / 4
    for runtime in control.controller.runtimes:
        for name, buffer in runtime.named_buffers():
            assert buffer.dtype == torch.float32, name  # the model around it is bf16
            both = [torch.empty_like(buffer) for _ in range(2)]
            dist.all_gather(both, buffer)
            assert torch.equal(*both), (runtime.role.name, name)


def check_evaluation_records_nothing():
    parallel(tp=2)
    model = build(Recipe.load("fp8_delayed"), sequence_parallel=True)
    control = driver.attach([model.module], seed=1)
    control.controller.begin_step(1)
    model.eval()
    with torch.no_grad():
        losses(model)
    for runtime in control.controller.runtimes:
        assert all(buffer.abs().sum() == 0 for name, buffer in runtime.named_buffers() if name.endswith("history"))


def check_histories_in_checkpoints():
    """A key for every layer, whichever way Megatron stores layers; the same on all ranks, so one of them writes it."""
    parallel(tp=2)
    recipe = Recipe.load("fp8_delayed").with_first_rule({"layers": "first:1"}, "high_precision")
    model = build(recipe).module
    ours = [k for k in model.state_dict() if ".hq." in k]
    assert ours and not [k for k in ours if ".layers.0." in k]
    for singleton, number in ((False, "hq.layer_2."), (True, "layers.1.")):
        metadata = {"singleton_local_shards": singleton, "dp_cp_group": mpu.get_data_parallel_group()}
        sharded = {k: v for k, v in model.sharded_state_dict(metadata=metadata).items() if ".hq." in k}
        assert sorted(sharded) == sorted(ours)
        assert len({v.key for v in sharded.values()}) == len(ours)
        for local, tensor in sharded.items():
            assert number in tensor.key and tensor.global_shape == tensor.local_shape == tensor.data.shape
            assert tensor.replica_id == (0, rank(), 0), tensor.replica_id
            runtime = model.get_submodule(local.rpartition(".")[0])
            name = local.rpartition(".")[2]
            assert tensor.key in state.possible_keys(runtime.role, name)
