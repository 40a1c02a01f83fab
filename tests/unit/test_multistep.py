"""N steps equal a straightforward re-implementation on decoded operands, optimizer states included (property 37)."""

import pytest
import torch
from linear_cases import STOCHASTIC, randn, recipe, saved_tensors

import megatron_hybrid as mh
from megatron_hybrid.formats import ELEMENTS, parse_format
from megatron_hybrid.scaling import DelayedState
from megatron_hybrid.storage import cast

STEPS, LR = 8, 0.1
DELAYED = "fp8_delayed_e4m3:history=3,algo=max"

RECIPES = {
    "mxfp8 | nvfp4": dict(fprop="mxfp8_e4m3", dgrad="nvfp4", wgrad="nvfp4"),
    "nvfp4 | mxfp8": dict(fprop="nvfp4:2d", dgrad={"grad_output": "fp8_current_e5m2", "weight": "mxfp8_e4m3"}, wgrad="mxfp8_e4m3"),
    "block": dict(fprop={"input": "fp8_block_e4m3", "weight": "fp8_block_e4m3:2d"}, dgrad="fp8_rowwise_e4m3", wgrad="fp8_block_e4m3:no_pow2"),
    "from the row": dict(fprop="nvfp4:row_scaled", dgrad="mxfp8_e4m3", wgrad="mxfp8_e4m3", source="rowwise_dequantized"),
    "delayed": dict(fprop=DELAYED, dgrad={"grad_output": "fp8_delayed_e5m2:history=2,algo=most_recent,margin=1", "weight": DELAYED}, wgrad="fp8_current_e4m3"),
    "high precision": dict(fprop="high_precision", dgrad="high_precision", wgrad="high_precision"),
}  # fmt: skip
SLOT = {  # (operand, direction) -> gemm
    ("input", "rowwise"): "fprop", ("weight", "rowwise"): "fprop", ("grad_output", "rowwise"): "dgrad",
    ("weight", "columnwise"): "dgrad", ("grad_output", "columnwise"): "wgrad", ("input", "columnwise"): "wgrad",
}  # fmt: skip


class Written:
    """One linear written out: decode, multiply, round; delayed scales by their rule with plain numbers."""

    def __init__(self, formats, source="original"):
        self.formats, self.source = formats, source
        self.scale, self.history, self.seen = {}, {}, {}

    def format(self, operand, direction):
        slot = self.formats[SLOT[operand, direction]]
        return parse_format(slot if isinstance(slot, str) else slot[operand])

    def decode(self, operand, direction, x):
        """float64 (M, K): what the gemm multiplies."""
        x, fmt = x.detach(), self.format(operand, direction)
        if direction == "columnwise" and self.source != "original" and operand != "grad_output":
            x = cast(x, self.format(operand, "rowwise"), "rowwise").dequantize(x.dtype)
        state = None
        if fmt.is_stateful:
            key = operand, direction
            self.seen[key] = max(self.seen.get(key, 0.0), x.float().abs().max().item())
            state = DelayedState(torch.tensor(self.scale.get(key, 1.0)), None)
        return cast(x, fmt, direction, state=state).dequantize(torch.float32).double()

    def end_step(self):
        for key, amax in self.seen.items():
            fmt = self.format(*key)
            past = self.history.setdefault(key, [])
            past.insert(0, amax)
            del past[fmt.option("history") :]
            used = max(past) if fmt.option("algo") == "max" else past[0]
            top = torch.tensor(ELEMENTS[fmt.element].max * 2.0 ** -fmt.option("margin"))
            self.scale[key] = (top / torch.tensor(used)).item()
        self.seen = {}


class WrittenFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, spec):
        ctx.spec, ctx.operands = spec, (x, w)
        y = (spec.decode("input", "rowwise", x) @ spec.decode("weight", "rowwise", w).T).float().bfloat16()
        # the columns are cast now: a delayed scale must be this step's
        ctx.columns = spec.decode("input", "columnwise", x), spec.decode("weight", "columnwise", w)
        return y + b

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.columns
        dx = (ctx.spec.decode("grad_output", "rowwise", dy) @ w).float().bfloat16()
        dw = (ctx.spec.decode("grad_output", "columnwise", dy).T @ x).float().bfloat16()
        return dx, dw, dy.sum(0), None


def net(rcp):
    torch.manual_seed(3)
    made = dict(recipe=rcp, backend="reference", dtype=torch.bfloat16)
    return torch.nn.Sequential(mh.HybridLinear(48, 64, **made), torch.nn.ReLU(), mh.HybridLinear(64, 32, **made))


def loss_of(y, x):
    return (y.float() - x[:, :32].float()).square().mean()


def training(rcp, optimizer):
    """(losses, all gradients, parameters and optimizer states) of `STEPS` steps with the package."""
    model = net(rcp)
    controller = mh.prepare(model)
    return record(model, optimizer, model, controller.begin_step, controller.end_step)


def training_written_out(spec, optimizer):
    spec = dict(spec)
    source = spec.pop("source", "original")
    model = net("bf16")  # for its parameters
    layers = [Written(spec, source) for _ in range(2)]

    def forward(x):
        h = WrittenFunction.apply(x, model[0].weight, model[0].bias, layers[0])
        return WrittenFunction.apply(model[1](h), model[2].weight, model[2].bias, layers[1])

    return record(model, optimizer, forward, lambda step: None, lambda: [layer.end_step() for layer in layers])


def record(model, optimizer, forward, begin, end):
    opt = optimizer(model.parameters())
    out = []
    for step in range(1, STEPS + 1):
        begin(step)
        x = randn(16, 48, seed=step).requires_grad_()
        loss = loss_of(forward(x), x.detach())
        loss.backward()
        out += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        opt.step()
        opt.zero_grad()
        end()
    states = [t for s in opt.state.values() for t in s.values() if torch.is_tensor(t)]
    return out, [*(p.detach() for p in model.parameters()), *states]


@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), lambda p: torch.optim.Adam(p, lr=LR / 10)], ids=["sgd", "adam"])  # fmt: skip
@pytest.mark.parametrize("name", RECIPES)
def test_p37_steps_equal_the_equations_written_out(name, optimizer):
    spec = RECIPES[name]
    columns = {"columnwise_source": {"input": spec["source"], "weight": spec["source"]}} if "source" in spec else {}
    rcp = recipe(**{k: v for k, v in spec.items() if k != "source"}, **columns)
    got, got_end = training(rcp, optimizer)
    want, want_end = training_written_out(spec, optimizer)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"step {1 + i // 6}, value {i % 6}"
    assert all(torch.equal(a, b) for a, b in zip(got_end, want_end, strict=True))
    assert got[-6] < 0.95 * got[0]  # and it learns


KEPT_NOWHERE = {
    "mxfp8": ("mxfp8_e4m3",) * 3, "delayed": (DELAYED,) * 3, "stochastic": (STOCHASTIC,) * 3, "high precision": (),
    "derived": ("mxfp8_e4m3", "nvfp4", "nvfp4"), "dequantized": ("nvfp4",) * 3,
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT_NOWHERE)
def test_a_weight_whose_memory_comes_and_goes_is_cast_in_every_pass(name):
    """Same bits as with the cache over two microbatches; of the weight only itself is kept for backward."""
    source = "rowwise_dequantized" if name == "derived" else "original"
    rcp, runs = recipe(*KEPT_NOWHERE[name], columnwise_source={"weight": source}), []
    rcp = rcp.with_backward("dequantized") if name == "dequantized" else rcp
    for keeps in (True, False):
        torch.manual_seed(0)
        layer = mh.HybridLinear(64, 96, recipe=rcp, name="fc", dtype=torch.bfloat16)
        ctl = mh.prepare(layer, seed=1, num_microbatches=2)
        if not keeps:
            layer.hq.keep_no_weight()
        ctl.begin_step(1)
        found = []
        for j in range(2):
            ctl.microbatch(j)
            x = randn(32, 64, seed=j).requires_grad_()
            with saved_tensors() as kept:
                y = layer(x)
            y.backward(randn(32, 96, seed=5 + j))
            found += [y.detach(), x.grad]
            assert keeps or sum(t is layer.weight for t in kept) == 1
        ctl.end_step()
        runs.append([*found, layer.weight.grad, *layer.hq.buffers()])
        assert keeps or layer.hq.weight_cache is None
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
