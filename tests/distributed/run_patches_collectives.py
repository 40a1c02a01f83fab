"""Worker, 2 ranks: the collectives of the CPU stand-in that gloo alone cannot do, or does wrongly."""

from megatron_hybrid.patches import cpu_device

cpu_device.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def values(rank, *shape, dtype=torch.float32):
    """Small integers that differ by rank: exact in every type."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 4 + 1 + 4 * rank).float().to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def check_movement_of_every_type(rank):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int16, torch.uint8, torch.bool):
        mine = values(rank, 4, 3, dtype=dtype)
        expected = torch.cat([bits(values(r, 4, 3, dtype=dtype)) for r in range(2)])
        gathered = torch.empty(8, 3, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(gathered, mine)
        assert torch.equal(bits(gathered), expected), dtype
        gathered.zero_()
        dist.all_gather_into_tensor(gathered, mine, async_op=True).wait()
        assert torch.equal(bits(gathered), expected), dtype
        pieces = list(torch.empty(8, 3, dtype=dtype).chunk(2))
        dist.all_gather(pieces, mine)
        assert torch.equal(bits(torch.cat([bits(piece) for piece in pieces])), expected), dtype
        flat = torch.empty(4, dtype=dtype)
        dist.all_to_all_single(flat, values(rank, 4, dtype=dtype))
        half = bits(values(0, 4, dtype=dtype)[2 * rank : 2 * rank + 2])
        assert torch.equal(bits(flat)[: half.numel()], half), dtype
        sent = values(0, 5, dtype=dtype) if rank == 0 else torch.empty(5, dtype=dtype)
        dist.broadcast(sent, 0)
        assert torch.equal(bits(sent), bits(values(0, 5, dtype=dtype)))


def check_coalescing_keeps_mixed_types_apart(rank):
    for asynchronous in (False, True):
        inputs = [values(rank, 3, dtype=dtype) for dtype in (torch.uint8, torch.bfloat16, torch.float32)]
        outputs = [torch.empty(6, dtype=tensor.dtype) for tensor in inputs]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for output, tensor in zip(outputs, inputs, strict=True):
                assert dist.all_gather_into_tensor(output, tensor, async_op=asynchronous) is None
        if asynchronous:
            manager.wait()
        for output in outputs:
            assert output.tolist() == [*values(0, 3).tolist(), *values(1, 3).tolist()], output
        shards = [torch.empty(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for shard in shards:
                dist.reduce_scatter_tensor(shard, values(rank, 4, dtype=shard.dtype), async_op=asynchronous)
        manager.wait()
        total = values(0, 4) + values(1, 4)
        for shard in shards:
            assert shard.tolist() == total[2 * rank : 2 * rank + 2].tolist()


def check_sums_of_multiples(rank):
    """`PREMUL_SUM`, in place and not, whose input stays; the shard may lie in it."""
    half, total = dist._make_nccl_premul_sum(0.5), (values(0, 4) + values(1, 4)) / 2
    whole = values(rank, 4)
    dist.all_reduce(whole, op=half)
    assert torch.equal(whole, total)
    shard, whole = torch.empty(2), values(rank, 4)
    dist.reduce_scatter_tensor(shard, whole, op=half)
    assert torch.equal(shard, total[2 * rank : 2 * rank + 2]) and torch.equal(whole, values(rank, 4))
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(output=whole[2 * rank : 2 * rank + 2], input=whole, op=half)
    assert torch.equal(whole[2 * rank : 2 * rank + 2], total[2 * rank : 2 * rank + 2])


def check_unequal_sizes(rank):
    sizes = [3, 5]
    pieces = [torch.empty(size, 2, dtype=torch.bfloat16) for size in sizes]
    dist.all_gather(pieces, values(rank, sizes[rank], 2, dtype=torch.bfloat16))
    for r, piece in enumerate(pieces):
        assert torch.equal(piece, values(r, sizes[r], 2, dtype=torch.bfloat16))
    output = torch.empty(sizes[rank])
    dist.reduce_scatter(output, [values(rank, size) for size in sizes])
    assert torch.equal(output, values(0, sizes[rank]) + values(1, sizes[rank]))
    # Rank r sends (r + 1) rows to rank 0 and none to rank 1; sizes as tensors, as Megatron leaves them.
    send, receive = [rank + 1, 0], [1, 2] if rank == 0 else [0, 0]
    output = torch.empty(sum(receive), 2)
    dist.all_to_all_single(
        output, values(rank, rank + 1, 2), torch.tensor(receive), torch.tensor(send)
    )
    if rank == 0:
        assert torch.equal(output, torch.cat([values(0, 1, 2), values(1, 2, 2)]))


def check_lists_and_layouts(rank):
    outputs = [torch.empty(2), torch.empty(2)]
    inputs = [values(rank, 2) + 10 * destination for destination in range(2)]
    dist.all_to_all(outputs, inputs)
    assert all(torch.equal(outputs[r], values(r, 2) + 10 * rank) for r in range(2))
    target = torch.zeros(4, 4)
    operations = [
        dist.P2POp(dist.isend, values(rank, 4, 2), 1 - rank),
        dist.P2POp(dist.irecv, target[:, :2], 1 - rank),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(target[:, :2], values(1 - rank, 4, 2)) and not target[:, 2:].any()


def check_reductions(rank):
    for dtype in (torch.bfloat16, torch.float32):
        tensor = values(rank, 6, dtype=dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        assert torch.equal(tensor, ((values(0, 6) + values(1, 6)) / 2).to(dtype)), tensor
        shard = torch.empty(3, dtype=dtype)
        dist.reduce_scatter_tensor(shard, values(rank, 6, dtype=dtype), op=dist.ReduceOp.AVG)
        assert torch.equal(shard, ((values(0, 6) + values(1, 6)) / 2).to(dtype)[3 * rank : 3 * rank + 3])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def check_groups(rank):
    group = dist.new_group([0, 1], backend="nccl", pg_options=object(), group_desc="test")
    assert dist.get_backend(group) == "gloo" and dist.get_backend() == "gloo"
    dist.barrier(group, device_ids=[0])
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    mesh = init_device_mesh("cuda", (2,))
    assert mesh.device_type == "cpu" and DeviceMesh.from_group(group, "cuda").device_type == "cpu"


def main():
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    rank = dist.get_rank()
    for check in (
        check_movement_of_every_type,
        check_coalescing_keeps_mixed_types_apart,
        check_sums_of_multiples,
        check_unequal_sizes,
        check_lists_and_layouts,
        check_reductions,
        check_groups,
    ):
        check(rank)
        dist.barrier()
        if rank == 0:
            print("OK", check.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
