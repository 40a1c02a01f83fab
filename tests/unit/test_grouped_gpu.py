"""Grouped linears on a GPU: against the loop over experts, without host waits, in CUDA graphs (cases 4, 6, 14, 17)."""

import pytest
import torch
from linear_cases import gradients, randn, recipe

import megatron_hybrid as mh
from megatron_hybrid.gemm import decoding
from megatron_hybrid.grouped_at_once import GroupedPlan
from megatron_hybrid.groups import Groups
from megatron_hybrid.stacked import GroupedColumns

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = "cuda"
K, N, EXPERTS = 512, 384, 4  # an expert's scales of 128 x 128 blocks are whole 16 bytes
SPLITS = [[44, 20, 7, 1], [0, 64, 0, 33], [300, 1, 0, 128]]
DERIVED = {"columnwise_source": {"input": "rowwise_dequantized", "weight": "rowwise_dequantized"}}
RECIPES = {
    "bf16": recipe(),
    "mxfp8": recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"),
    "rowscaled": recipe("nvfp4:row_scaled", "mxfp8_e4m3", "mxfp8_e4m3", **DERIVED),
    "fp8_rowwise": recipe("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "fp8_rowwise_e4m3"),
    "fp8_block": mh.Recipe.load("fp8_block"),
    "fast": recipe("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "fp8_rowwise_e4m3", top={"accumulate": "fast"}),
}
BACKEND = {"fp8_rowwise": "grouped_fp8", "fp8_block": "grouped_fp8", "fast": "grouped_fp8"}
U = 2.0**-8  # bf16's unit roundoff
CUT = 34 * 2.0**-13  # what adding 32 FP8 products to a running sum may lose, of the largest of them (test_gemm_gpu.py)


def grouped(name, *, one_by_one=False, shape=(N, K), bias=False, backend=None):
    torch.manual_seed(1)
    m = mh.HybridGroupedLinear(
        EXPERTS, shape[1], shape[0], bias, recipe=RECIPES[name], name="fc1", backend=backend, dtype=torch.bfloat16
    ).to(CUDA)
    mh.prepare(m, seed=3).begin_step(1)
    m.hq.one_by_one = one_by_one
    return m


def data(rows, shape=(N, K)):
    return randn(rows, shape[1], seed=0).to(CUDA), randn(rows, shape[0], seed=1).to(CUDA)


def near(name, found, x, dy, splits, shape=(N, K), bias=False):
    """Within the bound of the exact products of the same codes: two roundings to bf16, sums in FP32, or as the FP8
    tensor cores cut them: at every 32 products, of a running sum that `full` accumulation starts anew every 128."""
    exact = gradients(reference(name, shape, bias), x, dy, splits)
    sizes = gradients(reference(name, shape, bias, absolute=True), x.abs(), dy.abs(), splits)
    contractions = {"y": shape[1], "dx": shape[0], "dw": max(splits), "db": max(splits)}
    for (what, contraction), f, e, size in zip(contractions.items(), found, exact, sizes):
        steps = 4 if name != "fast" else -(-contraction // 32)
        lost = steps * CUT if name in BACKEND and what != "db" else 2.0**-20
        bound = 3 * U * e.abs().float() + lost * 1.1 * size.float()
        off = (f.float() - e.float()).abs()
        assert (off <= bound).all(), f"{what}: {int((off > bound).sum())} of {off.numel()} off, worst {float(off.max())}"


def reference(name, shape, bias, absolute=False):
    m = grouped(name, one_by_one=True, shape=shape, bias=bias, backend="reference")
    if absolute:
        m.weight.data.abs_()
    return m


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("on_device", [False, True])
def test_c04_c06_equals_the_loop_within_roundings(name, splits, on_device):
    x, dy = data(sum(splits))
    m = grouped(name)
    decodes = name in ("mxfp8", "rowscaled") and decoding.pair_reason(m.plans()[0].fprop.pair) is None
    expected = BACKEND.get(name, "grouped_mm")
    assert isinstance(m.how, GroupedPlan) and m.how.wgrad.name == expected
    assert m.how.fprop.name == ("grouped_decoding" if decodes else expected)
    sizes = torch.tensor(splits, dtype=torch.int32, device=CUDA) if on_device else splits
    poison()
    found = gradients(m, x, dy, sizes)
    near(name, found, x, dy, splits)
    assert all((found[2][e] == 0).all() for e in range(EXPERTS) if splits[e] == 0)


def poison():
    """Fill memory that the allocator will hand out again with NaN."""
    trash = [torch.full((1 << 20,), float("nan"), device=CUDA) for _ in range(16)]
    del trash


def test_all_groups_empty():
    m = grouped("fp8_rowwise")
    x, dy = data(0)
    y, dx, dw = gradients(m, x, dy, torch.zeros(EXPERTS, dtype=torch.int32, device=CUDA))
    torch.cuda.synchronize()
    assert y.shape == (0, N) and dx.shape == (0, K) and (dw == 0).all()


@pytest.mark.parametrize("shape", [(768, 128), (128, 768), (1536, 2048)])
def test_c17_shapes(shape):
    splits = [128, 0, 40, 88]
    x, dy = data(256, shape)
    for name in ("fp8_rowwise", "fp8_block", "mxfp8"):
        near(name, gradients(grouped(name, shape=shape), x, dy, splits), x, dy, splits, shape)


@pytest.mark.parametrize("fmt", ["fp8_rowwise_e4m3", "fp8_rowwise_e4m3:pow2", "fp8_block_e4m3", "fp8_block_e5m2"])
def test_columns_of_groups_are_the_cpu_s_bytes(fmt):
    splits = [133, 0, 16, 7]
    x = randn(156, 64, seed=5) * torch.logspace(-6, 6, 64).bfloat16()
    x[140, 3], x[141, 4], x[2, 5], x[:, 6] = float("nan"), float("inf"), -float("nan"), 0
    fmt, sizes = mh.parse_format(fmt), torch.tensor(splits, dtype=torch.int32, device=CUDA)
    layout = Groups(sizes, 4, 156, torch.device(CUDA)).layout(128)
    payload = GroupedColumns.make(x.to(CUDA), fmt, layout, transposed=True).payload
    for group, part in enumerate(x.split(splits)):
        expected = mh.HybridQuantizer(columnwise=fmt).quantize(part).columnwise
        found = GroupedColumns(payload, layout).piece(group)
        assert torch.equal(found.codes().cpu(), expected.codes()) and torch.equal(found.scale.cpu(), expected.scale)


def quantized(name):
    """`grouped` with parameters that live quantized, from the same values."""
    torch.manual_seed(1)
    with mh.quantized_model_init(RECIPES[name], True):
        m = mh.HybridGroupedLinear(EXPERTS, K, N, recipe=RECIPES[name], name="fc1", dtype=torch.bfloat16).to(CUDA)
    mh.prepare(m, seed=3).begin_step(1)
    return m


QUANTIZED = [name for name in RECIPES if name != "bf16"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_run_at_once_with_the_bits_of_cast_ones(name):
    """Their bytes are the same; only bf16 products of columns read them in another layout, and may sum in another order."""
    splits = [44, 0, 7, 46]
    x, dy = data(97)
    m, sizes = quantized(name), torch.tensor(splits, dtype=torch.int32, device=CUDA)
    assert isinstance(m.how, GroupedPlan)
    y, dx, *dws = gradients(m, x, dy, sizes)
    expected = gradients(grouped(name), x, dy, sizes)
    assert torch.equal(y, expected[0]) and torch.equal(torch.stack(dws), expected[2])
    assert name not in BACKEND or torch.equal(dx, expected[1])
    near(name, [y, dx, torch.stack(dws)], x, dy, splits)


@pytest.mark.parametrize("name", QUANTIZED)
def test_main_grads_of_quantized_experts(name):
    m, (x, dy) = quantized(name), data(97)
    dws = gradients(m, x, dy, [44, 0, 7, 46])[2:]
    m.zero_grad()  # autograd adds to a gradient that is there, and that of a weight with a main_grad holds nothing
    for w in m.weights():
        w.main_grad = torch.ones(N, K, device=CUDA)
    m(x, [44, 0, 7, 46]).backward(dy)
    for w, dw in zip(m.weights(), dws):
        dw = dw.float()  # rounded once more where sums are in FP32
        assert ((w.main_grad - 1 - dw).abs() <= U * dw.abs() + 2.0**-23 * (1 + dw.abs())).all()
    assert (m.weights()[1].main_grad == 1).all()


@pytest.mark.parametrize("make, name", [*((grouped, name) for name in RECIPES), *((quantized, name) for name in QUANTIZED)])
def test_c14_no_host_wait_and_graphs_with_new_splits(make, name):
    """Captured once, replayed with other groups of the same total: as eager, bit for bit."""
    m = make(name)
    x, dy = data(97)
    sizes = torch.tensor([44, 20, 32, 1], dtype=torch.int32, device=CUDA)
    x.requires_grad_()

    def step():
        x.grad = None
        m.zero_grad()
        y = m(x, sizes)
        y.backward(dy)
        return y, x.grad, *(p.grad for p in m.parameters())

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for splits in ([44, 20, 32, 1], [0, 97, 0, 0], [1, 7, 44, 45]):
        sizes.copy_(torch.tensor(splits, dtype=torch.int32))
        graph.replay()
        replayed = [t.clone() for t in captured]
        for f, e in zip(replayed, step()):
            assert torch.equal(f, e), splits


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_block"])
def test_main_grad_on_the_gpu(name):
    """FP32 sums are added in place: what lies between is one rounding of theirs to bf16, and one of the total."""
    m = grouped(name)
    m.weight.main_grad = torch.ones(m.weight.shape, device=CUDA)
    x, dy = data(72)
    m(x, [44, 20, 0, 8]).backward(dy)
    assert m.weight.grad_added_to_main_grad and (m.weight.main_grad[2] == 1).all()
    dw = gradients(grouped(name), x, dy, [44, 20, 0, 8])[2].float()
    assert ((m.weight.main_grad - 1 - dw).abs() <= U * dw.abs() + 2.0**-23 * (1 + dw.abs())).all()


def test_bias_gradients_with_sizes_on_the_device():
    splits = [44, 20, 0, 8]
    x, dy = data(72)
    found = gradients(grouped("mxfp8", bias=True), x, dy, torch.tensor(splits, device=CUDA))
    near("mxfp8", found, x, dy, splits, bias=True)
