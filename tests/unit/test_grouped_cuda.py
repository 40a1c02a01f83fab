"""Grouped FP8 GEMMs in CUDA: the sums of the Triton kernels, bit for bit, whatever the groups, shapes, scales and types."""

import pytest
import torch

from megatron_hybrid.gemm import grouped_cuda

pytestmark = pytest.mark.skipif(grouped_cuda.library() is None, reason="this build has no _C_gemm")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"),
]

CUDA = "cuda"
ROW, BLOCKS, TILES = grouped_cuda.ROW, grouped_cuda.BLOCKS, grouped_cuda.TILES
GROUPS = {
    "ragged": [0, 1, 7, 44, 128, 300, 0, 129],
    "one row": [0, 0, 1, 0],
    "none": [0, 0, 0],
    "many": [(37 * i) % 300 for i in range(40)],  # more tiles than multiprocessors, one to three blocks each
}
KINDS = [(ROW, True), (ROW, False), (BLOCKS, False), (TILES, False)]
U = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def codes(rows, k, dtype=torch.float8_e4m3fn):
    return torch.randn(rows, k, device=CUDA).to(dtype)


def scales(*shape):
    return torch.rand(shape, device=CUDA) + 0.5


def over(size, by=128):
    return -(-size // by)


def where(sizes):
    from megatron_hybrid.ops_triton.grouped_gemm import block_map

    return block_map(torch.tensor(sizes, dtype=torch.int32, device=CUDA), over(sum(sizes)) + len(sizes))


def both(function, *tensors_and_more, start, **options):
    """What Triton's and CUDA's kernels write over `start`."""
    from megatron_hybrid.ops_triton import grouped_gemm

    *tensors, blocks, kind = tensors_and_more
    results = []
    for module in (grouped_gemm, grouped_cuda):
        out = start.clone()
        getattr(module, function)(*tensors, out, blocks, kind, **options)
        results.append(out)
    return results


def nothing(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype, device=CUDA)


class TestRows:
    pytestmark = on_gpu

    def check(self, sizes, N, K, kind, fast, dtype=torch.bfloat16, types=(torch.float8_e4m3fn,) * 2):
        torch.manual_seed(0)
        T, E = sum(sizes), len(sizes)
        scale = {
            ROW: lambda: (scales(T), scales(E * N)),
            BLOCKS: lambda: (scales(T, over(K)), scales(E * N, over(K))),
            TILES: lambda: (scales(T, over(K)), scales(E * N // 128, over(K))),
        }[kind]()
        operands = codes(T, K, types[0]), codes(E * N, K, types[1])
        triton, cuda = both(
            "multiply_rows", *operands, *scale, where(sizes), kind, start=nothing(T, N, dtype=dtype), fast=fast
        )
        assert torch.isfinite(cuda).all() and torch.equal(triton, cuda)

    @pytest.mark.parametrize("kind, fast", KINDS)
    def test_no_rows_at_all(self, kind, fast):
        empty, scale = codes(0, 256), scales(4 * 256)
        out = torch.empty(0, 256, dtype=torch.bfloat16, device=CUDA)
        grouped_cuda.multiply_rows(empty, codes(3 * 256, 256), scale, scale, out, where([0, 0, 0]), kind, fast=fast)
        torch.cuda.synchronize()

    @pytest.mark.parametrize("kind, fast", KINDS)
    @pytest.mark.parametrize("N, K", [(256, 256), (384, 144), (128, 2048)])
    @pytest.mark.parametrize("groups", [name for name in GROUPS if sum(GROUPS[name])])  # Triton maps no empty tensor
    def test_are_tritons_bits(self, groups, N, K, kind, fast):
        self.check(GROUPS[groups], N, K, kind, fast)

    @pytest.mark.parametrize("kind, fast", KINDS[:3])
    def test_narrow_results(self, kind, fast):
        self.check(GROUPS["ragged"], 80, 112, kind, fast)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_types_of_results(self, dtype):
        self.check(GROUPS["ragged"], 384, 384, TILES, False, dtype)

    @pytest.mark.parametrize("kind, fast", KINDS)
    @pytest.mark.parametrize("a", [torch.float8_e4m3fn, torch.float8_e5m2])
    @pytest.mark.parametrize("b", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_types_of_operands(self, a, b, kind, fast):
        self.check(GROUPS["ragged"], 256, 384, kind, fast, types=(a, b))


class TestColumns:
    pytestmark = on_gpu

    def check(self, sizes, N, K, kind, fast, dtype=torch.bfloat16, add=False, types=(torch.float8_e4m3fn,) * 2):
        torch.manual_seed(0)
        E, blocks = len(sizes), where(sizes)
        R = blocks.count * 128
        groups = {ROW: (E,), BLOCKS: (R // 128,)}[kind]
        start = torch.randn(E, N, K, device=CUDA).to(dtype) if add else nothing(E, N, K, dtype=dtype)
        triton, cuda = both(
            "multiply_columns", codes(N, R, types[0]), codes(K, R, types[1]), scales(*groups, N), scales(*groups, K), blocks, kind,
            start=start, fast=fast, add=add,
        )  # fmt: skip
        assert torch.isfinite(cuda).all()
        if not add:
            return self.equal(triton, cuda, sizes)
        # Triton may multiply by a scale and add to what is there in one instruction, which rounds once less
        bound = U[dtype] * cuda.abs().float() + 2 * U[torch.float32] * (cuda.float().abs() + start.float().abs())
        assert ((triton.float() - cuda.float()).abs() <= 2 * bound).all()
        assert torch.equal(cuda[[s == 0 for s in sizes]], start[[s == 0 for s in sizes]])

    def equal(self, triton, cuda, sizes):
        assert torch.equal(triton, cuda)
        assert (cuda[[s == 0 for s in sizes]] == 0).all()

    @pytest.mark.parametrize("kind, fast", KINDS[:3])
    @pytest.mark.parametrize("N, K", [(256, 256), (384, 144), (80, 112)])
    @pytest.mark.parametrize("groups", GROUPS)
    def test_are_tritons_bits(self, groups, N, K, kind, fast):
        self.check(GROUPS[groups], N, K, kind, fast)

    @pytest.mark.parametrize("kind, fast", KINDS[:3])
    @pytest.mark.parametrize("dtype", U)
    @pytest.mark.parametrize("add", [False, True])
    def test_types_of_results(self, dtype, add, kind, fast):
        self.check(GROUPS["ragged"], 384, 272, kind, fast, dtype, add)

    @pytest.mark.parametrize("a", [torch.float8_e4m3fn, torch.float8_e5m2])
    @pytest.mark.parametrize("b", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_types_of_operands(self, a, b):
        self.check(GROUPS["ragged"], 256, 384, BLOCKS, False, types=(a, b))


def test_tensors_of_the_host_and_odd_addresses_are_left_to_others():
    assert not grouped_cuda.takes(torch.zeros(16))


def test_unknown_words_are_named():
    library = grouped_cuda.library()
    operand = library.Codes(0, 0, False)
    with pytest.raises(ValueError, match="no scales are called rows"):
        library.rows(operand, operand, 0, 0, 0, 0, 0, 0, 0, 0, "rows", "bf16", False, 0, 0)
    with pytest.raises(ValueError, match="no result is in fp8"):
        library.columns(operand, operand, 0, 0, 0, 0, 0, 0, 0, 0, "row", "fp8", False, 0, 0)
