"""mh.offload_activations: the same bits, the plan's payload bytes on the host, weights left alone; on a GPU less memory."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_hybrid as mh

K, M = 128, 64


def layers(device="cpu", num=4, width=K):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(mh.HybridMLP(width, 2 * width, norm="RMSNorm", gated=True, device=device, dtype=torch.bfloat16) for _ in range(num))
    )


def train(model, recipe, device="cpu", rows=M, microbatches=2, steps=2, gather=False):
    """Losses and gradients; the last microbatch's forward comes before the first one's backward, as in a pipeline. gather:
    FSDP2 gathers payloads."""
    width = model[0].hidden if hasattr(model[0], "hidden") else next(model.parameters()).shape[-1]
    ctl = mh.prepare(model, recipe, seed=3, num_microbatches=microbatches)
    if gather:
        assert len(mh.gather_quantized(model, ctl).weights) == 4
    found = []
    for step in range(1, steps + 1):
        ctl.begin_step(step)
        outputs = []
        for j in range(microbatches):
            ctl.microbatch(j)
            g = torch.Generator().manual_seed(10 * step + j)
            x = torch.randn(rows, width, generator=g).to(device, torch.bfloat16).requires_grad_()
            outputs.append((x, model(x).float().square().mean()))
        for j, (x, loss) in enumerate(outputs):
            ctl.microbatch(j)
            loss.backward()
            found += [loss.detach(), x.grad]
        found += [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        ctl.end_step()
    return found


def same(a, b):
    assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "mxfp8_fprop_nvfp4_bwd", "nvfp4_fprop_mxfp8_bwd"])
def test_the_same_bits(recipe):
    expected = train(layers(), recipe)
    model = layers()
    offload = mh.offload_activations(model[:3], least_bytes=1)
    same(train(model, recipe), expected)
    assert all(count > 0 for count in offload.bytes.values()) and len(offload.bytes) == 3
    assert f"{offload.bytes[0]:,} bytes" in str(offload)


def test_weights_and_their_cached_casts_stay():
    """What moves of a linear is its input's payload: no byte of the weight, in high precision, cast or living quantized."""
    for name in ("bf16", "mxfp8"):
        for quantized in (False, True):
            if quantized:
                with mh.quantized_model_init(name):
                    linear = mh.HybridLinear(K, 2 * K, bias=False, dtype=torch.bfloat16)
            else:
                linear = mh.HybridLinear(K, 2 * K, bias=False, dtype=torch.bfloat16, recipe=name)
            ctl = mh.prepare(linear)
            ctl.begin_step(1)
            offload = mh.offload_activations([linear], least_bytes=1)
            x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
            linear(x).sum().backward()
            codes = M * K * (2 if name == "bf16" else 1)
            scales = 0 if name == "bf16" else M // 32 * K
            assert offload.bytes == {0: codes + scales}, (name, quantized)


def test_a_retained_graph_and_evaluation():
    model = layers(num=2)
    offload = mh.offload_activations(model, least_bytes=1)
    mh.prepare(model, "mxfp8").begin_step(1)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    y = model(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(first, second)
    before = dict(offload.bytes)
    with torch.no_grad():
        model(x)
    assert offload.bytes == before
    with pytest.raises(ValueError, match="no modules"):
        mh.offload_activations([])


class Experts(torch.nn.Module):
    """A layer of two grouped linears of four experts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (mh.HybridGroupedLinear(4, *pair, dtype=torch.bfloat16) for pair in ((K, 2 * K), (2 * K, K)))

    def forward(self, x):
        splits = [20, 0, x.shape[0] - 30, 10]
        return self.down(torch.tanh(self.up(x, splits)), splits)


def experts(units=None, reshard=True):
    """units: "layers" or "linears", what FSDP2 gathers at once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Experts(), Experts())
    if units is not None:
        linears = [linear for layer in model for linear in (layer.up, layer.down)] if units == "linears" else []
        for module in (*linears, *model, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=reshard)
    return model


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4_rowscaled_fprop_mxfp8_bwd"])
def test_grouped_experts_and_their_cached_casts(recipe):
    """At once or one by one: the same bits, and of the weights nothing moves."""
    expected, model = train(experts(), recipe), experts()
    offload = mh.offload_activations(model, least_bytes=1)
    same(train(model, recipe), expected)
    assert offload.bytes[0] == offload.bytes[1] > 0


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "recipe, units, reshard",
    [("mxfp8", "layers", True), ("mxfp8", "linears", True), ("mxfp8", "linears", False), ("fp8_current", "linears", True)],
)
def test_experts_that_fsdp2_gathers(one_rank, recipe, units, reshard):
    """In high precision or as payloads, a layer or a linear at once: the same bits and bytes as without FSDP2."""
    model = experts()
    plain = mh.offload_activations(model, least_bytes=1)
    expected = train(model, recipe, microbatches=1)
    for gather in (False, True):
        model = experts(units, reshard)
        offload = mh.offload_activations(model, least_bytes=1)
        found = train(model, recipe, microbatches=1, gather=gather)
        same([t.full_tensor() if hasattr(t, "full_tensor") else t for t in found], expected)
        assert offload.bytes == plain.bytes, (gather, offload.bytes, plain.bytes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "mxfp8"])
def test_less_device_memory_and_the_same_bits(recipe):
    found, peaks = [], []
    for offloaded in (False, True):
        model = layers("cuda", num=8, width=1024)
        if offloaded:
            mh.offload_activations(model[:7])
        train(model, recipe, "cuda", rows=8192, microbatches=1, steps=1)  # allocations of the first step
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found.append([t.cpu() for t in train(model, recipe, "cuda", rows=8192, microbatches=1, steps=1)])
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model
    same(*found)
    assert peaks[1] < 0.75 * peaks[0], peaks
