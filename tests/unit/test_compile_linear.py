"""torch.compile(fullgraph=True) of quantized modules, forward and backward, gives eager's bits (case 89, on the CPU)."""

import pytest
import torch
from linear_cases import DELAYED, assert_same, randn, recipe

import megatron_hybrid as mh
from megatron_hybrid import HybridSelfAttention

SR = recipe("nvfp4", {"grad_output": "nvfp4:sr", "weight": "nvfp4:2d"}, {"grad_output": "nvfp4:rht,sr", "input": "nvfp4:rht"})
RECIPES = {
    "bf16": "bf16",
    "mxfp8 | nvfp4": "mxfp8_fprop_nvfp4_bwd",
    "delayed": recipe(DELAYED, DELAYED, DELAYED),
    "stochastic": SR,
    "dequantized": recipe("nvfp4:row_scaled", top={"backward": "dequantized"}),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(kind, rcp):
    torch.manual_seed(0)
    made = dict(recipe=rcp, name="m", dtype=torch.bfloat16)
    return {
        "linear": lambda: mh.HybridLinear(64, 64, **made),
        "norm_linear": lambda: mh.HybridLayerNormLinear(64, 64, **made),
        "mlp": lambda: mh.HybridMLP(64, 32, gated=True, activation="silu", norm="RMSNorm", **made),
        "grouped": lambda: mh.HybridGroupedLinear(3, 64, 64, True, **made),
        "attention": lambda: HybridSelfAttention(64, 4, **made),
    }[kind]()


def steps(kind, rcp, backend, *, prepare_module=lambda m: None):
    """Everything two microbatches and a second step compute: outputs, gradients, amax histories."""
    m = build(kind, rcp)
    prepare_module(m)
    controller = mh.prepare(m, seed=3, num_microbatches=2)
    f = m if backend is None else torch.compile(m, fullgraph=True, backend=backend)
    args = ([5, 0, 3],) if kind == "grouped" else ()
    out = []
    for step, micro in ((1, 0), (1, 1), (2, 0)):
        if micro == 0:
            controller.begin_step(step)
        controller.microbatch(micro)
        x = randn(*((2, 4) if kind == "attention" else (8,)), 64, seed=step + micro).requires_grad_()
        y = f(x, *args)
        y.backward(randn(*y.shape, seed=9))
        out += [y.detach(), x.grad, *(p.grad.clone() for p in m.parameters()), *(b.clone() for b in m.buffers())]
        m.zero_grad()
        if (step, micro) == (1, 1):
            controller.end_step()
    assert any(t.abs().sum() > 0 for t in out[1:2])  # the gradient is there
    return out


@pytest.mark.parametrize("name", RECIPES)
def test_c89_a_linear_compiles_to_eagers_bits(name):
    assert_same(steps("linear", RECIPES[name], "aot_eager"), steps("linear", RECIPES[name], None))


@pytest.mark.parametrize("kind", ["norm_linear", "mlp", "grouped", "attention"])
def test_c89_composed_modules_compile_to_eagers_bits(kind):
    rcp = RECIPES["mxfp8 | nvfp4"]
    assert_same(steps(kind, rcp, "aot_eager"), steps(kind, rcp, None))


def test_c89_a_payload_travels_between_modules_inside_the_graph():
    def bind(m):
        m.norm.output.bind(m.linear_fc1)
        m.activation.output.bind(m.linear_fc2)

    rcp = RECIPES["mxfp8 | nvfp4"]
    assert_same(steps("mlp", rcp, "aot_eager", prepare_module=bind), steps("mlp", rcp, None))


def test_c89_without_gradients_and_in_evaluation():
    m = build("mlp", "mxfp8")
    f = torch.compile(m.eval(), fullgraph=True, backend="aot_eager")
    x = randn(8, 64)
    with torch.no_grad():
        assert torch.equal(f(x), m(x))


def test_c89_a_frozen_weight():
    m = build("linear", "mxfp8")
    m.weight.requires_grad_(False)
    f = torch.compile(m, fullgraph=True, backend="aot_eager")
    grads = []
    for g in (m, f):
        x = randn(8, 64).requires_grad_()
        g(x).backward(randn(8, 64, seed=1))
        grads.append(x.grad)
    assert torch.equal(*grads) and m.weight.grad is None


def test_main_grad_does_not_compile_and_is_not_lost_silently():
    m = build("linear", "mxfp8")
    m.weight.main_grad = torch.zeros(64, 64)
    with pytest.raises(Exception, match="side effect"):  # Dynamo cannot write to it from a backward
        torch.compile(m, fullgraph=True, backend="aot_eager")(randn(8, 64)).sum().backward()
