"""An input of another dtype than the weight's: what can be multiplied is, what cannot is refused at once and named."""

import itertools

import pytest
import torch
from linear_cases import randn

import megatron_hybrid as mh
from megatron_hybrid.linear import LOCAL
from megatron_hybrid.plan import PlanError

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PAIRS = list(itertools.permutations((FP32, BF16, FP16), 2))  # of input and weight
Q, HIGH = "mxfp8_e4m3", "high_precision"
# name -> (formats, backward); of those with a quantized forward
RECIPES = {
    "backward": (Q, "high_precision"),
    "dequantized": (Q, "dequantized"),
    "dgrad": ({"fprop": Q, "dgrad": HIGH, "wgrad": Q}, "default"),
    "wgrad": ({"fprop": Q, "dgrad": Q, "wgrad": HIGH}, "default"),
    "none": (Q, "default"),
}


def recipe(formats, backward="default"):
    return mh.Recipe.from_dict({"version": 1, "name": "t", "defaults": formats, "backward": backward})


def build(kind, rcp, dtype):
    torch.manual_seed(1)
    made = dict(recipe=rcp, name="some.fc", dtype=dtype)
    return {
        "linear": lambda: mh.HybridLinear(64, 64, **made),
        "norm_linear": lambda: mh.HybridLayerNormLinear(64, 64, **made),
        "mlp": lambda: mh.HybridMLP(64, 64, **made),
        "grouped": lambda: mh.HybridGroupedLinear(2, 64, 64, **made),
    }[kind]()


def run(module, x, dy):
    x = x.detach().requires_grad_()
    y = module(x, [40, 24]) if isinstance(module, mh.HybridGroupedLinear) else module(x)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad, [p.grad for p in module.parameters()]


@pytest.mark.parametrize("of_input, of_weight", PAIRS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "norm_linear", "mlp", "grouped"])
def test_a_quantized_forward_takes_it_and_backward_gives_gradients_of_each_ones_dtype(kind, name, of_input, of_weight):
    module = build(kind, recipe(*RECIPES[name]), of_weight)
    y, dx, gradients = run(module, randn(64, 64).to(of_input), randn(64, 64, seed=1))
    assert (y.dtype, dx.dtype) == (of_input, of_input)
    for gradient, parameter in zip(gradients, module.parameters(), strict=True):
        assert gradient.dtype == parameter.dtype and torch.isfinite(gradient).all() and gradient.any()


@pytest.mark.parametrize("of_input, of_weight", PAIRS)
@pytest.mark.parametrize("name", ["backward", "dequantized", "dgrad"])
def test_dgrad_in_high_precision_is_the_gradient_times_the_weight_rounded_to_its_dtype(name, of_input, of_weight):
    module = build("linear", recipe(*RECIPES[name]), of_weight)
    x, dy = randn(64, 64).to(of_input), randn(64, 64, seed=1).to(of_input)
    weight = module.weight.detach()
    if name == "dequantized":
        call = module.hq.call(weight.device, LOCAL, training=False)
        weight = call.cast("weight", weight, rowwise=True)[0].dequantize(of_weight)
    assert torch.equal(run(module, x, dy)[1], torch.mm(dy, weight.to(of_input)))


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_under_autocast_layers_in_high_precision_train_as_torchs_do(kind, inside):
    """Weights in FP32, and an input that a layer before rounded: outputs and input gradients bit for bit."""
    module, twin = build(kind, recipe(HIGH), FP32), torch.nn.Linear(64, 64, bias=False)
    if kind == "linear":
        module.bias = None  # torch adds it in the product
    with torch.no_grad():
        module.weight.copy_(twin.weight)  # to all experts
    x, dy, ends = randn(64, 64).to(BF16), randn(64, 64, seed=1).to(BF16), []
    for layer in (module, twin):
        x = x.detach().requires_grad_()
        with torch.autocast("cpu", BF16):
            y = layer(x, [40, 24]) if kind == "grouped" and layer is module else layer(x)
            if inside:
                y.backward(dy)
        if not inside:
            y.backward(dy)
        ends.append((y, x.grad))
    assert all(a.dtype == b.dtype == BF16 and torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert all(p.grad.dtype == FP32 and p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("of_input, of_weight", [*PAIRS, (torch.float64, FP32), (torch.int32, BF16)])
@pytest.mark.parametrize("kind", ["linear", "norm_linear", "grouped"])
def test_a_forward_in_high_precision_refuses_it_naming_both(kind, of_input, of_weight):
    if kind == "norm_linear" and of_input == torch.int32:
        pytest.skip("torch's norm refuses it")
    for rcp in (recipe(HIGH), recipe({"fprop": HIGH, "dgrad": Q, "wgrad": Q})):
        module = build(kind, rcp, of_weight)
        words = f"some.fc.*fprop is in high precision, its input {of_input} and its weight {of_weight}; give it an input in"
        with pytest.raises(PlanError, match=words):
            module(randn(64, 64).to(of_input), *([[40, 24]] if kind == "grouped" else []))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_what_no_cast_reads_is_named(kind, dtype):
    with pytest.raises(PlanError, match=f"some.fc.*its input is {dtype}; what is quantized is one of torch.float32"):
        build(kind, recipe(Q), BF16)(randn(64, 64).to(dtype), *([[40, 24]] if kind == "grouped" else []))


@pytest.mark.parametrize("name", ["backward", "none"])
def test_compiled_too(name):
    module = build("linear", recipe(*RECIPES[name]), FP32)
    x, dy = randn(64, 64).to(BF16), randn(64, 64, seed=1)
    expected = run(module, x, dy)
    module.zero_grad()
    found = run(torch.compile(module, fullgraph=True, backend="aot_eager"), x, dy)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    with pytest.raises(PlanError, match="fprop is in high precision"):
        build("linear", recipe(HIGH), FP32)(x)
