"""Saved-tensor offload: plain tensors, exactly the plan's bytes, the same gradients back (properties 12, 25, 39)."""

import io
import itertools

import pytest
import torch
from linear_cases import DELAYED, STOCHASTIC, assert_same, counted_casts, gradients, nbytes, randn, recipe, saved_tensors

import megatron_hybrid as mh
from megatron_hybrid import HybridSelfAttention

FORMATS = ["high_precision", "fp8_current_e4m3", "fp8_rowwise_e4m3", "fp8_block_e4m3", "mxfp8_e4m3", "nvfp4", "nvfp4:row_scaled"]


def through_bytes():
    """Hooks that keep serialised bytes only, as an offload to disk would."""

    def pack(t):
        assert type(t) in (torch.Tensor, torch.nn.Parameter)
        buffer = io.BytesIO()
        torch.save(t.detach(), buffer)
        return buffer.getvalue()

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda b: torch.load(io.BytesIO(b), weights_only=True))


def offloaded(module, hooks, x, dy, *args):
    module.zero_grad()
    x = x.clone().requires_grad_()
    with hooks:
        y = module(x, *args)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def linear(f1, f2, **kw):
    torch.manual_seed(0)
    return mh.HybridLinear(64, 48, recipe=recipe(f1, f2, f2, **kw.pop("defaults", {})), name="fc", dtype=torch.bfloat16, **kw)


@pytest.mark.parametrize("f1,f2", list(itertools.product(FORMATS, repeat=2)))
def test_p39_every_pair_round_trips_bitwise(f1, f2):
    m, case = linear(f1, f2), (randn(24, 64), randn(24, 48, seed=1))
    want = gradients(m, *case)
    assert_same(offloaded(m, through_bytes(), *case), want)
    assert_same(offloaded(m, torch.autograd.graph.save_on_cpu(), *case), want)


@pytest.mark.parametrize("frozen", ["nothing", "weight", "input"])
@pytest.mark.parametrize("save_input", ["payload", "original"])
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("f1,f2", [("nvfp4", "mxfp8_e4m3"), ("mxfp8_e4m3", "nvfp4"), ("nvfp4", "high_precision"), (DELAYED, "fp8_block_e4m3")])
def test_p25_bytes_casts_and_gradients_are_the_plans(f1, f2, source, save_input, frozen):
    sources = {"columnwise_source": {"input": source, "weight": source}}
    m = linear(f1, f2, defaults=sources, save_input=save_input)
    payloads = linear(f1, f2, defaults=sources)  # the same, saving payloads
    for layer in (m, payloads):
        layer.weight.requires_grad_(frozen != "weight")
        layer.bias.requires_grad_(False)
    x, dy = randn(24, 64).requires_grad_(frozen != "input"), randn(24, 48, seed=1)
    with saved_tensors() as kept, counted_casts() as casts:
        y = m(x)
    plan, expected = m.plan, 0
    read_by = {"input": "weight", "weight": "input"}  # the other operand's gradient reads it
    for operand, t in (("input", x), ("weight", m.weight)):
        if read_by[operand] == frozen:
            continue
        call = m.hq.call(torch.device("cpu"), None, training=False)
        row, col = call.quantize(operand, t.detach(), rowwise=True, columnwise=True)
        expected += {"rowwise": row.nbytes, "columnwise": col.nbytes, "original": nbytes([t])}[plan.saved[operand]]
    assert nbytes(kept) == expected
    assert {type(t) for t in kept} <= {torch.Tensor, torch.nn.Parameter}
    columns = [shape for shape, direction in casts if direction == "columnwise"]
    kept_columns = [op for op in ("input", "weight") if plan.saved[op] == "columnwise" and read_by[op] != frozen]
    assert len(columns) == len(kept_columns)  # a column is cast in forward only where it is what is kept
    y.backward(dy)
    x2 = x.detach().clone().requires_grad_(frozen != "input")
    payloads(x2).backward(dy)
    for a, b in ((x, x2), (m.weight, payloads.weight)):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("fmt", ["nvfp4", STOCHASTIC, DELAYED])
@pytest.mark.parametrize("kind", ["norm_linear", "mlp", "grouped", "attention"])
def test_p12_every_module_through_bytes(kind, fmt):
    torch.manual_seed(0)
    made = dict(recipe=recipe(fmt, fmt, fmt), name="m", dtype=torch.bfloat16)
    m, x, *args = {
        "norm_linear": lambda: (mh.HybridLayerNormLinear(64, 64, **made), randn(8, 64)),
        "mlp": lambda: (mh.HybridMLP(64, 96, gated=True, activation="silu", norm="RMSNorm", **made), randn(8, 64)),
        "grouped": lambda: (mh.HybridGroupedLinear(3, 64, 64, True, **made), randn(8, 64), [5, 0, 3]),
        "attention": lambda: (HybridSelfAttention(64, 4, num_query_groups=2, **made), randn(2, 4, 64)),
    }[kind]()
    mh.prepare(m).begin_step(1)
    dy = randn(*x.shape, seed=1)
    assert_same(offloaded(m, through_bytes(), x, dy, *args), gradients(m, x, dy, *args))
