"""What a module saves for backward: plain tensors, exactly the plan's bytes, and only those. properties.md 12."""

import pytest
import torch
from tensor_cases import VARIED, tensor

import megatron_hybrid as mh
from megatron_hybrid.testing.assertions import assert_bitwise_equal

STATELESS = [f.replace("mxfp8_e5m2", "mxfp8_e4m3") for f in VARIED if "sr" not in f and "delayed" not in f]


def layer(fmt: str, source: str):
    recipe = mh.Recipe.from_dict({
        "version": 1, "name": "saved", "defaults": {
            "fprop": fmt, "dgrad": {"grad_output": fmt, "weight": fmt}, "wgrad": fmt,
            "columnwise_source": {"input": source, "weight": source},
        },
    })  # fmt: skip
    torch.manual_seed(0)
    return mh.HybridLinear(96, 40, False, recipe=recipe, name="fc", dtype=torch.bfloat16)


def step(module, x, pack, unpack):
    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = module(x)
    y.backward(tensor(tuple(y.shape), seed=5))
    grads = x.grad, module.weight.grad
    module.weight.grad = None
    return grads


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("fmt", STATELESS)
def test_p12_hooks_see_the_plans_bytes_as_plain_tensors_and_may_move_them(fmt, source):
    module, x = layer(fmt, source), tensor((24, 96))
    seen = []
    plain = step(module, x, lambda t: (seen.append(t), t)[1], lambda t: t)
    assert all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in seen)
    expected = []
    for operand, original in (("input", x), ("weight", module.weight.detach())):
        kept = module.plan.saved[operand]
        if kept == "original":
            expected.append(original)
            continue
        row, col = module.plan.quantize(operand, original, rowwise=kept == "rowwise", columnwise=kept == "columnwise")
        expected.extend((row if kept == "rowwise" else col).buffers().values())
    assert len(seen) == len(expected)
    for mine, theirs in zip(seen, expected):
        assert_bitwise_equal(mine, theirs, f"{fmt} {source}")

    def offload(t):
        return t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), t.shape, t.dtype

    def restore(packed):
        data, shape, dtype = packed
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)

    for a, b in zip(step(module, x, offload, restore), plain):
        assert_bitwise_equal(a, b, f"{fmt} {source}: gradients after a round trip through bytes")
