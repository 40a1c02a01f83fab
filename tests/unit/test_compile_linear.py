"""torch.compile(fullgraph=True) of quantized modules, forward and backward, gives eager's bits (case 89, on the CPU)."""

import shutil

import pytest
import torch
from linear_cases import DELAYED, assert_same, gradients, randn, recipe

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


def with_main_grad(dtype):
    def prepare_module(m):
        for name, p in m.named_parameters():
            if name.endswith("weight") and p.dim() > 1:
                p.main_grad = torch.zeros(p.shape, dtype=dtype)

    return prepare_module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_c89_c49_main_grad_of_compiled_modules(kind, dtype):
    """Three microbatches added up: the same bits, the flag for Megatron's hooks set, a gradient there for autograd."""
    ends = []
    for backend in (None, "aot_eager"):
        torch._dynamo.reset()
        m = build(kind, RECIPES["mxfp8 | nvfp4"])
        with_main_grad(dtype)(m)
        f = m if backend is None else torch.compile(m, fullgraph=True, backend=backend)
        weights = [p for p in m.parameters() if hasattr(p, "main_grad")]
        for seed in range(3):
            for w in weights:
                w.grad, w.grad_added_to_main_grad = None, False
            f(randn(8, 64, seed=seed), *([[5, 0, 3]] if kind == "grouped" else [])).backward(randn(8, 64, seed=9 + seed))
            assert all(w.grad_added_to_main_grad and w.grad is not None for w in weights)
        ends.append([w.main_grad for w in weights])
    assert_same(*ends)
    assert all(g.abs().sum() > 0 for g in ends[0])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's CPU code needs a C++ compiler")
@pytest.mark.parametrize("name", ["bf16", "mxfp8 | nvfp4"])
def test_c89_inductor_rounds_where_eager_does(name):
    """Fused, a bias would be added before the rounding of the product, and an activation read it unrounded. What is
    between linears is the compiler's: it keeps FP32 inside what it fuses, so the activation here has one operation."""
    torch.manual_seed(0)
    made = dict(recipe=RECIPES[name], dtype=torch.bfloat16)
    net = torch.nn.Sequential(mh.HybridLinear(64, 64, **made), torch.nn.ReLU(), mh.HybridLinear(64, 64, False, **made), torch.nn.ReLU())
    x, dy = randn(8, 64), randn(8, 64, seed=1)
    assert_same(gradients(torch.compile(net, fullgraph=True, backend="inductor"), x, dy), gradients(net, x, dy))
