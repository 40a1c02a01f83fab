"""The first NaN or Inf is named: module, tensor, direction, gemm, rank, step, microbatch (`--hq-check-nan`)."""

import pytest
import torch
from linear_cases import assert_same, gradients, randn, recipe
from torch.utils.checkpoint import checkpoint

import megatron_hybrid as mh
from megatron_hybrid.observe.nan_check import NanFound

HYBRID = recipe("mxfp8_e4m3", "nvfp4", "nvfp4")


def two_layers(rcp=HYBRID, rank=None):
    torch.manual_seed(0)
    made = dict(recipe=rcp, dtype=torch.bfloat16)
    net = torch.nn.Sequential(mh.HybridLinear(32, 48, name="fc1", **made), mh.HybridLinear(48, 32, name="fc2", **made))
    controller = mh.prepare(net, num_microbatches=2)
    controller.check_nan(rank)
    controller.begin_step(7)
    controller.microbatch(1)
    return net


def test_an_input():
    net, x = two_layers(), randn(4, 32)
    x[2, 5], x[3, 0] = float("nan"), float("inf")
    with pytest.raises(NanFound) as caught:
        net(x.requires_grad_())
    assert str(caught.value) == (
        "step 7, microbatch 1, module fc1: input (rowwise for fprop and columnwise for wgrad) has 1 NaN and 1 Inf in (4, 32), "
        "the first at (2, 5)"
    )


def test_a_weight_and_the_rank():
    net = two_layers(rank=3)
    net[1].weight.data[0, 1] = float("-inf")
    with torch.no_grad(), pytest.raises(NanFound, match=r"^rank 3, step 7, .*module fc2: weight \(rowwise for fprop\) has 0 NaN and 1 Inf"):
        net(randn(4, 32))


def test_a_gradient_in_backward():
    net = two_layers()
    y = net(randn(4, 32).requires_grad_())
    dy = torch.zeros_like(y)
    dy[1, 1] = float("nan")
    with pytest.raises(NanFound, match=r"module fc2: grad_output \(rowwise for dgrad and columnwise for wgrad\) has 1 NaN .* at \(1, 1\)"):
        y.backward(dy)


@pytest.mark.parametrize("gemm,what", [("fprop", "output"), ("dgrad", "input gradient"), ("wgrad", "weight gradient")])
def test_a_product_that_overflows(gemm, what):
    layer = mh.HybridLinear(32, 32, False, recipe=recipe("fp8_current_e4m3", "fp8_current_e4m3", "fp8_current_e4m3"), name="fc")
    mh.prepare(layer).check_nan()
    x, dy = torch.ones(4, 32), torch.ones(4, 32)
    layer.weight.data.fill_(1e20 if gemm != "wgrad" else 1.0)
    if gemm != "dgrad":
        x.fill_(1e20)
    if gemm != "fprop":
        dy.fill_(1e20)
    with pytest.raises(NanFound, match=rf"module fc: {what} \({gemm}\) has 0 NaN"):
        layer(x.requires_grad_()).backward(dy)


def test_experts_and_recomputation(monkeypatch):
    m = mh.HybridGroupedLinear(3, 32, 32, recipe=HYBRID, name="experts.fc1", dtype=torch.bfloat16)
    mh.prepare(m).check_nan()
    x = randn(6, 32)
    x[4, 0] = float("nan")
    with pytest.raises(NanFound, match=r"module experts.fc1, expert 2: input"):
        m(x, [2, 2, 2])
    monkeypatch.setattr(type(m.hq), "how", lambda self, weight: pytest.fail("experts run at once are not looked at"))
    m(randn(6, 32), [2, 2, 2])
    net = two_layers()
    net[0].register_forward_hook(lambda m, a, y: y if torch._C._current_graph_task_id() == -1 else y * float("nan"))
    with pytest.raises(NanFound, match="module fc2: input"):
        checkpoint(net, randn(4, 32).requires_grad_(), use_reentrant=True).sum().backward()


@pytest.mark.parametrize("name", ["mxfp8_fprop_nvfp4_bwd", "fp8_delayed", "bf16"])
def test_finite_numbers_keep_every_bit(name):
    runs = []
    for check in (False, True):
        torch.manual_seed(0)
        mlp = mh.HybridMLP(32, 48, norm="RMSNorm", recipe=name, dtype=torch.bfloat16)
        controller = mh.prepare(mlp)
        if check:
            controller.check_nan()
        controller.begin_step(1)
        runs.append(gradients(mlp, randn(8, 32), randn(8, 32, seed=1)))
    assert_same(*runs)


def test_beside_statistics(tmp_path):
    net = two_layers()
    controller = mh.prepare(net)
    controller.check_nan()
    controller.record_statistics(1, tmp_path / "s.jsonl", say=None)
    controller.begin_step(1)
    net(randn(4, 32).requires_grad_()).sum().backward()
    controller.end_step()
    assert (tmp_path / "s.jsonl").read_text().count("fc2") == 6
    controller.begin_step(2)
    with pytest.raises(NanFound):
        net(torch.full((4, 32), float("nan"), dtype=torch.bfloat16))
