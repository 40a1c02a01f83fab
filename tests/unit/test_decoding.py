"""GEMMs that decode MXFP8 and NVFP4 weights where they are multiplied: who gets them, and on Hopper their results."""

import pytest
import torch

import megatron_hybrid as mh
from megatron_hybrid import gemm
from megatron_hybrid.formats import COLUMNWISE, ROWWISE
from megatron_hybrid.gemm import DeviceKind, GemmPair, decoding, grouped_cuda
from megatron_hybrid.gemm import grouped as gemms
from megatron_hybrid.groups import Groups
from megatron_hybrid.stacked import StackedWeight
from megatron_hybrid.storage import cast

built = pytest.mark.skipif(grouped_cuda.library() is None, reason="this build has no _C_gemm")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
    built,
]
CUDA, BF16 = "cuda", torch.bfloat16
HOPPER, OLDER = DeviceKind("cuda", (9, 0)), DeviceKind("cuda", (8, 0))
MX, MX5, NV = (mh.parse_format(name) for name in ("mxfp8_e4m3", "mxfp8_e5m2", "nvfp4:row_scaled"))
TILES = mh.parse_format("mxfp8_e4m3:2d")
GROUPS = {
    "ragged": [0, 1, 7, 44, 128, 300, 0, 129],
    "one row": [0, 0, 1, 0],
    "many": [(37 * i) % 300 for i in range(40)],  # more tiles than multiprocessors, one to three blocks each
    "long": [700, 0, 64, 192, 257, 1025],
}


def pair(a, b, which="fprop", device=HOPPER):
    return GemmPair(which, a, b, device)


def step(pair, backend):
    from megatron_hybrid.plan import GemmStep

    return GemmStep(pair, gemm.choose(pair, backend))


@built
def test_experts_rows_and_dense_products_by_name_only():
    for formats in ((MX, MX), (NV, NV)):
        for which in ("fprop", "dgrad"):
            assert gemm.choose(pair(*formats, which)).name == "emulated"
            assert gemms.choose(step(pair(*formats, which), None), (256, 256), BF16) is gemms.DECODING
            assert gemms.choose(step(pair(*formats, which), decoding.NAME), (256, 256), BF16) is gemms.DECODING_ALWAYS
        assert gemms.choose(step(pair(*formats, "wgrad"), None), (256, 256), BF16).name != "grouped_decoding"
    assert gemms.choose(step(pair(MX, MX), None), (256, 192), BF16).name == "grouped_mm"


@built
@pytest.mark.parametrize("rows", [0, 2048, 2049])
def test_many_rows_an_expert_are_decoded_before(rows, monkeypatch):
    """And whatever `multiply` does not take."""
    asked = []
    monkeypatch.setattr(decoding, "multiply", lambda *args: asked.append(True))
    monkeypatch.setattr(gemms.GroupedMm, "rows", lambda *args: "before")
    groups, w = Groups([rows, 0], 2, rows, torch.device("cpu")), StackedWeight.make(torch.ones(2, 32, 32), MX, ROWWISE)
    for backend, wanted in ((gemms.DECODING, rows <= 2048), (gemms.DECODING_ALWAYS, True)):
        asked.clear()
        assert backend.rows("fprop", None, None, w, groups, BF16) == "before" and bool(asked) == wanted


@built
@pytest.mark.parametrize(
    "pair, shape, dtype, why",
    [
        (pair(MX, MX, device=OLDER), (256, 256), BF16, "needs sm_90"),
        (pair(MX, NV), (256, 256), BF16, "takes MXFP8 x MXFP8 and NVFP4 x NVFP4"),
        (pair(MX, MX), (256, 192), BF16, "a contraction in 128s, found 256 and 192"),
        (pair(MX, MX), (252, 256), BF16, "rows of B in 8s"),
        (pair(MX, MX, "dgrad"), (192, 256), BF16, "a contraction in 128s, found 256 and 192"),
        (pair(MX, MX), (256, 256), torch.float32, "needs bf16 tensors"),
        (pair(MX, MX, "wgrad"), (256, 256), BF16, "rows only"),
    ],
)
def test_reasons(pair, shape, dtype, why, monkeypatch):
    monkeypatch.setattr(gemms.ops_triton, "reason", lambda device: None)
    assert why in gemms.DECODING.reason(pair, shape, dtype)


@built
def test_none_where_all_fits(monkeypatch):
    monkeypatch.setattr(gemms.ops_triton, "reason", lambda device: None)
    for a, b in ((MX, MX), (MX, TILES), (MX5, MX), (NV, NV)):
        assert gemms.DECODING.reason(pair(a, b), (264, 256), BF16) is None


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(grouped_cuda, "library", lambda: None)
    assert gemms.DECODING.reason(pair(MX, MX), (256, 256), BF16) == "this build has no _C_gemm"


def test_operands_without_memory_are_left_alone(monkeypatch):
    """Addresses of nothing would end the process."""
    monkeypatch.setattr(grouped_cuda, "takes", lambda *tensors: True)
    s = cast(torch.ones(8, 128), MX, ROWWISE)
    s = s.with_buffers({name: buffer.to("meta") for name, buffer in s.buffers().items()})
    assert decoding.multiply(s, s) is None


def random(rows, k, seed=0):
    """Rows of different sizes."""
    made = torch.Generator(CUDA).manual_seed(seed)
    x = torch.randn(rows, k, generator=made, device=CUDA)
    return (x * torch.exp2(torch.randint(-8, 8, (rows, 1), generator=made, device=CUDA))).to(BF16)


def where(sizes):
    from megatron_hybrid.ops_triton.grouped_gemm import block_map

    return block_map(torch.tensor(sizes, dtype=torch.int32, device=CUDA), -(-sum(sizes) // 128) + len(sizes))


def wide(s):
    """What a payload's operand is in bf16, times outer scales, in float64."""
    x = s.operand(BF16, outer=False).double()
    return x if s.outer_amax is None else x * s.outer_scale().double().reshape(-1, 1)


def check(a, b, sizes, found):
    """Within the bounds of an FP32 sum, the roundings of two scales and one to bf16."""
    x, w = wide(a), wide(b).view(len(sizes), -1, a.shape[1])
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for start, size, weight in zip(starts, sizes, w):
        rows = x[start : start + size]
        exact, most = rows @ weight.T, rows.abs() @ weight.abs().T
        check_sums(found[start : start + size], exact, most)


def check_sums(found, exact, most):
    off = (found.double() - exact).abs()
    bound = 2.0**-8 * exact.abs() + 2.0**-20 * most
    worst = [(float(f), float(e), float(m)) for f, e, m in zip(found[off > bound], exact[off > bound], most[off > bound])]
    assert not worst, f"{len(worst)} of {off.numel()} off: (found, exact, sum of magnitudes) {worst[:4]}"


@pytest.mark.parametrize("fmt", [MX, MX5, NV], ids=str)
class TestSlots:
    pytestmark = on_gpu

    def test_are_the_operand_in_another_order(self, fmt):
        s = cast(random(37, 384), fmt, ROWWISE)
        rows, module = decoding._Rows.of(s), grouped_cuda.library()
        found = torch.full((37, 384), float("nan"), dtype=BF16, device=CUDA)
        module.decode_slots(rows.coded(module), found.data_ptr(), 37, 384, torch.cuda.current_stream().cuda_stream, 0)
        pairs = 32 // fmt.bits // 2  # slot 8 q + 2 t + e of 16 bytes is code q + pairs * e of word t
        codes = found.view(37, -1, pairs, 4, 2).permute(0, 1, 3, 4, 2).reshape(37, 384)
        assert torch.equal(codes * (256 if fmt.bits == 4 else 1), s.operand(BF16, outer=False))


class TestRows:
    pytestmark = on_gpu

    def check(self, sizes, N, K, a=MX, b=MX):
        x = cast(random(sum(sizes), K), a, ROWWISE)
        w = cast(random(len(sizes) * N, K, seed=1), b, ROWWISE)
        check(x, w, sizes, decoding.multiply(x, w, len(sizes), where(sizes)))

    @pytest.mark.parametrize("fmt", [MX, NV], ids=str)
    @pytest.mark.parametrize("N, K", [(256, 256), (384, 128), (136, 640), (512, 2048)])
    @pytest.mark.parametrize("groups", GROUPS)
    def test_groups_and_shapes(self, groups, N, K, fmt):
        self.check(GROUPS[groups], N, K, fmt, fmt)

    @pytest.mark.parametrize("a, b", [(MX, MX5), (MX5, MX), (MX5, MX5), (MX, TILES)], ids=str)
    def test_types_and_tiles(self, a, b):
        self.check(GROUPS["ragged"], 384, 384, a, b)

    def test_no_rows_at_all(self):
        x, w = cast(random(0, 256), MX, ROWWISE), cast(random(3 * 256, 256), MX, ROWWISE)
        assert decoding.multiply(x, w, 3, where([0, 0, 0])).shape == (0, 256)
        torch.cuda.synchronize()

    @pytest.mark.parametrize("a, b", [(MX, MX), (MX5, MX), (MX, MX5)], ids=str)
    @pytest.mark.parametrize("down, up", [((0, 20), (200, 238)), ((200, 238), (0, 20)), ((100, 150), (110, 140))])
    def test_scales_of_every_size(self, down, up, a, b):
        sizes, (N, K), made = GROUPS["ragged"], (264, 384), torch.Generator(CUDA).manual_seed(2)
        operands = []
        for fmt, rows, (low, high) in ((a, sum(sizes), down), (b, len(sizes) * N, up)):
            s = cast(random(rows, K), fmt, ROWWISE)
            scale = torch.randint(low, high, s.scale.shape, generator=made, device=CUDA, dtype=torch.uint8)
            operands.append(s.with_buffers({"scale": scale}))
        check(*operands, sizes, decoding.multiply(*operands, len(sizes), where(sizes)))

    @pytest.mark.parametrize("fmt", [MX, NV], ids=str)
    def test_nan_stays_in_its_row(self, fmt):
        x, w = random(200, 256), random(2 * 256, 256, seed=1)
        x[3, 7] = w[300, 9] = float("nan")
        y = decoding.multiply(cast(x, fmt, ROWWISE), cast(w, fmt, ROWWISE), 2, where([90, 110])).isnan()
        wanted = torch.zeros_like(y)
        wanted[3], wanted[90:, 300 - 256] = True, True
        assert torch.equal(y, wanted)

    @pytest.mark.parametrize("fmt", [MX, NV], ids=str)
    def test_again_the_same_bits(self, fmt):
        sizes = GROUPS["many"]
        x, w = cast(random(sum(sizes), 512), fmt, ROWWISE), cast(random(40 * 384, 512, seed=1), fmt, ROWWISE)
        first = decoding.multiply(x, w, 40, where(sizes))
        for _ in range(20):
            assert torch.equal(decoding.multiply(x, w, 40, where(sizes)), first)


class TestDense:
    pytestmark = on_gpu

    @pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4", "nvfp4:row_scaled", "mxfp8_e4m3:2d"])
    @pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE])
    @pytest.mark.parametrize("M, N, K", [(1, 8, 128), (300, 264, 256), (1024, 2048, 1024)])
    def test_against_float64(self, M, N, K, direction, name):
        fmt = mh.parse_format(name)
        backend = gemm.choose(pair(fmt, fmt), decoding.NAME)
        x, w = random(M, K), random(N, K, seed=1)
        x, w = (x, w) if direction == ROWWISE else (x.T.contiguous(), w.T.contiguous())
        a, b = (cast(t, fmt, direction, transposed=direction == COLUMNWISE) for t in (x, w))
        found = backend.run(a, b, pair(fmt, fmt), BF16)
        exact, most = wide(a) @ wide(b).T, wide(a).abs() @ wide(b).abs().T
        check_sums(found, exact, most)


class TestLinear:
    pytestmark = on_gpu

    @pytest.mark.parametrize("name", ["mxfp8", "rowscaled"])
    @pytest.mark.parametrize("splits", [[44, 20, 7, 1], [0, 64, 0, 33], [300, 1, 0, 128]])
    def test_a_grouped_linear_and_its_gradients(self, name, splits):
        from test_grouped_gpu import data, gradients, grouped, near, poison

        m = grouped(name)
        assert [m.how.fprop.name, m.how.dgrad.name, m.how.wgrad.name] == ["grouped_decoding"] * 2 + ["grouped_mm"]
        x, dy = data(sum(splits))
        poison()
        near(name, gradients(m, x, dy, torch.tensor(splits, dtype=torch.int32, device=CUDA)), x, dy, splits)

    def test_in_a_graph_without_waits(self):
        from test_grouped_gpu import data, grouped

        m, (x, _) = grouped("mxfp8"), data(96)
        sizes = torch.tensor([30, 0, 60, 6], dtype=torch.int32, device=CUDA)
        with torch.no_grad():
            eager = m(x, sizes)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                m(x, sizes)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = m(x, sizes)
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, eager)
            sizes.copy_(torch.tensor([1, 90, 0, 5]))
            graph.replay()
            assert torch.equal(y, m(x, sizes))
