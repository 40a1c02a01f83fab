"""Checks of quantized weights whose masters are split among 2, 3 or 4 ranks: real collectives, and Megatron's optimizer."""

from __future__ import annotations

import dataclasses
import os

import mcore_groups
import torch
import torch.distributed as dist
from checks import run_checks, start
from mcore_model_common import VOCAB, B, S, build, drawn, mpu, parallel, rank
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tp_cases import on_the_wire

import megatron_hybrid as mh
from megatron_hybrid import patches
from megatron_hybrid.distributed.amax import start_max
from megatron_hybrid.distributed.param_gather import ShardedWeights
from megatron_hybrid.formats import shares_codes
from megatron_hybrid.mcore import driver
from megatron_hybrid.mcore.param_sync import GATHER
from megatron_hybrid.storage_layout import equal

STEPS = 100
OF_EVEN_RANKS = (
    "100_steps_have_the_losses_of_bf16_parameters", "scales_over_tensor_parallel_ranks_are_of_the_whole_weight",
)  # fmt: skip
WORLD = int(os.environ["WORLD_SIZE"])
# every kind of scale, both directions from the original, a derived column, E4M3 with E5M2
PAIRS = [
    ("mxfp8_e4m3", "nvfp4", "original"), ("fp8_current_e4m3", "fp8_current_e5m2", "original"),
    ("fp8_rowwise_e4m3", "fp8_block_e4m3", "original"), ("nvfp4:row_scaled", "mxfp8_e4m3", "rowwise_dequantized"),
    ("nvfp4:2d", "nvfp4:2d", "original"),
]  # fmt: skip


BUCKETS = dict(overlap_grad_reduce=True, bucket_size=8000)  # three or four of quantized weights
LIVES = dict(weights="quantized", param_gather="both", master_cast="param_dtype")
TILES = {"version": 1, "name": "tiles", "defaults": {gemm: "nvfp4:2d" for gemm in ("fprop", "dgrad")}}


def recipe(chosen, **fields):
    """A shipped recipe by name, or a dict, with other fields."""
    base = mh.Recipe.load(chosen) if isinstance(chosen, str) else mh.Recipe.from_dict(chosen)
    return dataclasses.replace(base, **fields)


def check_bytes_in_groups_of_2_3_and_4():
    """P52, P54: real collectives, a NaN on one rank, an empty share."""
    for size in range(2, WORLD + 1):
        group = dist.new_group(list(range(size)))
        if rank() >= size:
            continue
        for row, col, source in PAIRS:
            quantizer = mh.HybridQuantizer(row, col, source)
            masters = [drawn(torch.randn, m, k, seed=m) for m, k in ((40, 72), (33, 17))]
            masters[0][7, 3] = float("nan")
            params = [torch.nn.Parameter(quantizer.quantize(torch.zeros_like(m).bfloat16())) for m in masters]
            cuts = [[0, 577, 577, 1000, 40 * 72][-size - 1 :], [0, 1, 100, 350, 33 * 17][-size - 1 :]]
            cuts = [[0, *c[1:]] for c in cuts]
            ranges = [[(c[r], c[r + 1]) for c in cuts] for r in range(size)]
            weights = ShardedWeights(params, ranges, rank(), gather="both")
            shares = [m.reshape(-1)[a:b] for m, (a, b) in zip(masters, ranges[rank()])]
            (amaxes,) = start_max([weights.amaxes(shares).view(torch.float32)], group)()
            chunk = weights.cast(shares, amaxes.view(torch.int32))
            chunks = torch.empty(size * chunk.numel(), dtype=torch.uint8)
            dist.all_gather_into_tensor(chunks, chunk, group=group)
            weights.scatter(chunks.view(size, -1))
            for p, m in zip(params, masters):
                expected = p.detach().clone().update(m)
                assert equal(p.rowwise, expected.rowwise) and equal(p.columnwise, expected.columnwise), (size, row, col)


def training(chosen, *, tp=1, ep=1, clip=0.0, make=build, **ddp):
    """DDP, optimizer and driver of the tiny model, data parallel over the ranks that are not tensor parallel."""
    parallel(tp=tp, ep=ep)
    model = make(chosen)
    hooks = driver.attach([model.module], seed=1)
    overlap = {key: True for key in ddp if key.startswith("overlap")}
    wrapped = DistributedDataParallel(
        model.config if hasattr(model, "config") else model.module.config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True, **ddp),
        model,
    )
    settings = OptimizerConfig(
        lr=2e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, weight_decay=0.1, clip_grad=clip,
        overlap_param_gather="overlap_param_gather" in overlap,
    )  # fmt: skip
    hooks.controller.reduce_amaxes(hooks.group, hooks.expert_groups)  # as the driver does before a first step
    return wrapped, get_megatron_optimizer(settings, [wrapped]), hooks


def step(run, i: int) -> float:
    model, optimizer, hooks = run
    hooks.controller.begin_step(i)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    tokens = drawn(torch.randint, 0, VOCAB, (B, S), seed=100 * (i % 7) + mpu.get_data_parallel_rank())
    loss = model(tokens, torch.arange(S).expand(B, S), None, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    model.finish_grad_sync()
    optimizer.step()
    hooks.controller.end_step(hooks.group, hooks.expert_groups)
    return loss.item()


def whole_masters(model) -> dict[str, torch.Tensor]:
    """The FP32 masters of all quantized weights, put together from the shards of the ranks that share them."""
    names = {id(p): n for n, p in model.named_parameters()}
    found = {}
    for bucket_group in model.bucket_groups + model.expert_parallel_bucket_groups:
        if (gather := getattr(bucket_group, GATHER, None)) is None:
            continue
        shards = [None] * gather.world
        mine = [None if master is None else master.detach() for master in gather.masters]
        dist.all_gather_object(shards, mine, group=gather.group)
        for i, p in enumerate(gather.params):
            flat = torch.empty(p.numel())
            for shard, ranges in zip(shards, gather.ranges):
                a, b = ranges[i]
                flat[a:b] = shard[i] if b > a else flat[a:b]
            found[names[id(p)]] = flat.view(p.shape)
    return found


def assert_masters_are_cast(run, before: dict, note) -> None:
    """Every weight has moved; the payloads of all quantized ones are `cast(master)`, with the modules' scales."""
    parameters = dict(run[0].named_parameters())
    for n, master in whole_masters(run[0]).items():
        weight = parameters[n]
        owner = weight._stale.owner
        expected = weight.detach().clone().update(owner.rounded(master, weight.dtype), **owner.keys(weight.device))
        assert equal(weight.rowwise, expected.rowwise) and equal(weight.columnwise, expected.columnwise), (note, n)
    for n, p in parameters.items() if before else ():
        old = before[n]
        moved = p.rowwise.qdata.ne(old.rowwise.qdata) if isinstance(p, mh.HybridTensor) else p.ne(old)
        assert moved.any(), (note, n)


def check_after_a_step_the_bytes_are_the_whole_master_s():
    """P52, c45, and no silent update of nothing: every weight has moved, the payloads are `cast(master)`, all ranks."""
    overlapped = dict(BUCKETS, overlap_param_gather=True)
    for name, gather, cast, how in (
        ("mxfp8_fprop_nvfp4_bwd", "both", "fp32", {}), ("fp8_delayed", "both", "param_dtype", {}),
        ("fp8_current", "rowwise", "fp32", {}), ("nvfp4_fprop_mxfp8_bwd", "high_precision", "fp32", {}),
        ("fp8_block", "both", "param_dtype", {}), (TILES, "rowwise", "fp32", {}), ("fp8_rowwise", "both", "fp32", BUCKETS),
        ("mxfp8_fprop_nvfp4_bwd", "both", "fp32", BUCKETS), ("fp8_delayed", "both", "fp32", overlapped),
        ("nvfp4_fprop_mxfp8_bwd", "both", "fp32", overlapped),
    ):  # fmt: skip
        run = training(recipe(name, weights="quantized", param_gather=gather, master_cast=cast), clip=1.0, **how)
        assert (len(gathers_of(run[0])) > 1) == bool(how)
        before = {n: p.detach().clone() for n, p in run[0].named_parameters()}
        for i in (1, 2):
            step(run, i)
            if run[0].ddp_config.overlap_param_gather:  # they would come layer by layer in the next forward
                run[0].disable_forward_pre_hook()
                run[0].enable_forward_pre_hook()
            for p in run[0].parameters() if i == 1 else ():  # other memory from now on: never write to the old
                if isinstance(p, mh.HybridTensor):
                    p.data = p.detach().clone()
            assert_masters_are_cast(run, before if i == 2 else {}, (name, gather, i))
        quantized = [p for p in run[0].parameters() if isinstance(p, mh.HybridTensor)]
        assert quantized and all(p.get_high_precision_init_val() is None for p in quantized)


def check_no_memory_for_a_parameter_buffer():
    """The quantized weights' half of Megatron's buffer is the gradients' memory; nothing of 16 bits is kept of them."""
    model, _, _ = training(recipe("mxfp8", weights="quantized"))
    (ours,) = [b for b in model.buffers if isinstance(b.params[0], mh.HybridTensor)]
    assert ours.param_data.untyped_storage().data_ptr() == ours.grad_data.untyped_storage().data_ptr()


def gathers_of(model) -> list:
    """What casts and gathers the weights of each bucket group."""
    groups = model.bucket_groups + model.expert_parallel_bucket_groups
    return [group.hq_gather for group in groups if getattr(group, GATHER, None) is not None]


def bytes_of_payloads(params, gather: str, cast: str) -> int:
    """What has to travel, from formats alone: codes and scales of both directions, of the row, or the values they are cast
    from."""
    if gather == "high_precision":
        return sum(p.numel() for p in params) * (4 if cast == "fp32" else 2)
    total = 0
    for p in params:
        derived = p.quantizer.derives_columnwise or gather == "rowwise" or shares_codes(*p.quantizer.formats())
        payloads = [p.rowwise] if derived else [p.rowwise, p.columnwise]
        total += sum(buffer.nbytes for s in payloads for buffer in s.buffers().values())
    return total


def check_bytes_on_the_wire_are_payloads_and_scales():
    """P62: payloads of quantized weights travel once, over the ranks that share their masters, and nothing of them in bf16;
    before them amaxes, in one collective a bucket and kind of ranks. A rank's share is padded to the largest."""
    all_gather = param_and_grad_buffer.dist_all_gather_func
    for name, gather, cast, tp, how in (
        ("mxfp8", "both", "fp32", 1, {}), ("fp8_block", "both", "fp32", 1, {}), ("mxfp8_fprop_nvfp4_bwd", "both", "fp32", 1, {}),
        ("fp8_current", "rowwise", "fp32", 1, {}), (TILES, "rowwise", "fp32", 1, {}), ("mxfp8", "both", "fp32", 1, BUCKETS),
        ("fp8_rowwise", "high_precision", "fp32", 1, {}), ("fp8_rowwise", "high_precision", "param_dtype", 1, {}),
        ("fp8_current", "both", "fp32", WORLD // 2, {}), ("mxfp8_fprop_nvfp4_bwd", "both", "fp32", WORLD // 2, {}),
    ):  # fmt: skip
        run, what = training(recipe(name, weights="quantized", param_gather=gather, master_cast=cast), tp=tp, **how), (name, gather)
        step(run, 1)
        gathers, members = gathers_of(run[0]), dist.get_process_group_ranks(mpu.get_data_parallel_group())
        world = len(members)
        with on_the_wire() as sent:
            param_and_grad_buffer.dist_all_gather_func = dist.all_gather_into_tensor
            try:
                run[0].start_param_sync(force_sync=True)
            finally:
                param_and_grad_buffer.dist_all_gather_func = all_gather
        ours = [s for s in sent if s.name == "all_gather_into_tensor" and s.dtype == torch.uint8]
        needed = [bytes_of_payloads(part.params, gather, cast) for part in gathers]
        assert len(ours) == len(gathers) and all(s.ranks == tuple(members) for s in ours), (what, ours)
        for s, bytes_of in zip(ours, needed):  # masters are shared out evenly, payloads and padding nearly so
            assert bytes_of <= s.nbytes * world <= 1.01 * bytes_of + 256 * world, (what, s.nbytes * world, bytes_of)
        others = [s for s in sent if s.name == "all_gather_into_tensor" and s.dtype != torch.uint8]
        plain = sum(p.numel() for p in run[0].parameters() if not isinstance(p, mh.HybridTensor))
        assert 2 * plain <= sum(s.nbytes for s in others) * world <= 2 * plain + 2 * 128 * world * 4, (what, others)
        reduced = [s for s in sent if s.name == "all_reduce"]
        tensor_parallel = tuple(dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group()))
        assert all(s.ranks in (tuple(members), tensor_parallel) for s in reduced) and len(reduced) <= 2 * len(gathers), what
        assert any(s.ranks == tensor_parallel for s in reduced) == (tp > 1 and tp < WORLD and "mxfp8" != name), (what, reduced)
        assert sum(s.nbytes for s in reduced) <= 0.3 * sum(needed), (what, reduced)


def losses_of(chosen, steps: int, **ddp) -> list[float]:
    run = training(chosen, tp=WORLD // 2, **ddp)
    return [step(run, i) for i in range(1, steps + 1)]


def check_100_steps_have_the_losses_of_bf16_parameters():
    """P56: `master_cast: param_dtype`, no difference at all; with overlap, and with delayed scales, too.

    Two data-parallel ranks: a sum of two gradients has one order, whatever the buffers' layout.
    """
    assert_losses_of_bf16_parameters(losses_of, STEPS, overlapped=10)


def assert_losses_of_bf16_parameters(losses_of, steps: int, *, overlapped: int) -> None:
    """losses_of: (recipe, steps, **DDP's options) -> losses. overlapped: steps with overlap."""
    overlap = dict(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=20000)
    plain = losses_of(recipe("mxfp8"), steps)
    assert losses_of(recipe("mxfp8", **LIVES), steps) == plain
    assert losses_of(recipe("mxfp8", **LIVES), overlapped, **overlap) == plain[:overlapped]
    assert sum(plain[-10:]) < sum(plain[:10])
    delayed = losses_of(recipe("fp8_delayed"), 10)
    for gather in ("both", "high_precision"):
        assert losses_of(recipe("fp8_delayed", **{**LIVES, "param_gather": gather}), 10) == delayed


def check_step_rules_cast_from_the_split_masters():
    run = trained_by_step_rules({"steps": "2:"}, training)
    assert_follows_step_rules(run[0].module.module.decoder.layers[0].mlp.linear_fc1.weight)


def trained_by_step_rules(match: dict, train):
    """The run with weights that live quantized, after four steps with the losses of bf16 parameters. match: of the rule;
    train: recipe -> run."""
    rules = [{"match": match, "use": {"fprop": "fp8_block_e4m3:2d", "dgrad": "nvfp4"}}]
    fields, losses = dict(mh.Recipe.load("mxfp8").to_dict(), rules=rules), []
    for more in ({}, LIVES):
        run = train(mh.Recipe.from_dict({**fields, **more}))
        losses.append([])
        for i in range(1, 5):
            run[2].controller.begin_step(i)
            for gather in driver.gathers(run[2].controller.runtimes):
                gather.follow_formats()
            losses[-1].append(step(run, i))
    assert losses[0] == losses[1]
    return run


def assert_follows_step_rules(weight) -> None:
    assert (str(weight.rowwise.format), str(weight.columnwise.format)) == ("fp8_block_e4m3:2d", "nvfp4")


def check_state_of_the_optimizer_brings_the_weights_back():
    run = training(recipe("nvfp4_fprop_mxfp8_bwd", weights="quantized", param_gather="both"))
    step(run, 1)
    saved = run[1].state_dict()
    weights = [p for p in run[0].parameters() if isinstance(p, mh.HybridTensor)]
    before = [p.detach().clone() for p in weights]
    with torch.no_grad():
        for p in weights:  # as a checkpoint does: the decode, cast again
            p.copy_(p.detach().dequantize(dtype=torch.bfloat16))
    assert not all(equal(p.columnwise, b.columnwise) for p, b in zip(weights, before))
    run[1].load_state_dict(saved)
    assert all(equal(p.rowwise, b.rowwise) and equal(p.columnwise, b.columnwise) for p, b in zip(weights, before))


def check_masters_of_a_fine_tuning_start_from_the_loaded_values():
    run = training(recipe("nvfp4_fprop_mxfp8_bwd", weights="quantized", param_gather="both"))
    values = {}
    for n, p in run[0].named_parameters():
        if isinstance(p, mh.HybridTensor):
            values[n] = drawn(torch.randn, p.shape, seed=len(n)).bfloat16()
            p.data.copy_(values[n])
    run[1].reload_model_params()
    masters = whole_masters(run[0])
    assert values and masters.keys() == values.keys()
    for n, master in masters.items():
        assert torch.equal(master, values[n].float())


def tensor_parallel_whole(t: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(t) for _ in range(2)]
    dist.all_gather(parts, t.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return torch.cat(parts, dim)


def check_scales_over_tensor_parallel_ranks_are_of_the_whole_weight():
    """TP 2 x DP 2: at the start and after a step every shard has the codes and scales of the whole weight, cut."""
    for name, gather in (("fp8_current", "both"), ("nvfp4_fprop_mxfp8_bwd", "both"), (TILES, "rowwise"),
                         ("fp8_rowwise", "both"), ("nvfp4_fprop_mxfp8_bwd", "high_precision")):  # fmt: skip
        run = training(recipe(name, weights="quantized", param_gather=gather), tp=2)
        parameters = {n: p for n, p in run[0].named_parameters() if isinstance(p, mh.HybridTensor)}
        for i in (0, 1):
            compared = 0
            if i:
                step(run, i)
            for n, master in whole_masters(run[0]).items():
                if n.endswith(("linear_fc1.weight", "layers.0.mlp.linear_fc2.weight")):
                    p, dim = parameters[n], int(n.endswith("linear_fc2.weight"))
                    compared += 1
                    whole = p.quantizer.quantize(tensor_parallel_whole(master, dim))
                    for mine, one in ((p.rowwise, whole.rowwise), (p.columnwise, whole.columnwise)):
                        part = one.dequantize().chunk(2, dim)[mpu.get_tensor_model_parallel_rank()]
                        assert torch.equal(mine.dequantize(), part), (name, gather, n, i, mine.direction)
            assert compared >= 2, (name, list(parameters))


def main() -> None:
    start()
    patches.apply_all()
    run_checks(globals(), vars(mcore_groups), leave_out={f"check_{name}" for name in OF_EVEN_RANKS} if WORLD % 2 else ())
    assert mpu.model_parallel_is_initialized()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
