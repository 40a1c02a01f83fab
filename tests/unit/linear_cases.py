"""What tests of linears share: formats, recipes, inputs, and counters of saved bytes and casts."""

import contextlib

import torch

import megatron_hybrid as mh

STATELESS = [
    "high_precision", "fp8_current_e4m3", "fp8_current_e5m2", "fp8_current_e4m3:pow2", "fp8_rowwise_e4m3",
    "fp8_rowwise_e5m2", "fp8_block_e4m3", "fp8_block_e5m2", "fp8_block_e4m3:2d", "fp8_block_e4m3:no_pow2", "mxfp8_e4m3",
    "mxfp8_e5m2", "mxfp8_e4m3:2d", "nvfp4", "nvfp4:2d", "nvfp4:row_scaled", "nvfp4:rht", "nvfp4:row_scaled,rht",
]  # fmt: skip
STOCHASTIC, DELAYED = "nvfp4:sr", "fp8_delayed_e4m3:history=3"
EVERY = [*STATELESS, STOCHASTIC, DELAYED]


def recipe(fprop="high_precision", dgrad="high_precision", wgrad="high_precision", *, rules=(), top=None, **defaults):
    defaults = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad, **defaults}
    return mh.Recipe.from_dict({"version": 1, "name": "t", "defaults": defaults, "rules": list(rules), **(top or {})})


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextlib.contextmanager
def saved_tensors():
    """The tensors that autograd keeps inside the block, in order."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        yield kept


def over_steps(layers, steps: int, compare) -> None:
    """Take layers through steps of two microbatches side by side. compare(seed): runs and compares them, each time."""
    ctls = [mh.prepare(layer) for layer in layers]
    for step in range(1, steps + 1):
        for ctl in ctls:
            ctl.begin_step(step, num_microbatches=2)
        for microbatch in range(2):
            for ctl in ctls:
                ctl.microbatch(microbatch)
            compare(10 * step + microbatch)
        for ctl in ctls:
            ctl.end_step()


def training_losses(net, ctl, optimizer, first: int, last: int) -> list[float]:
    """Steps first to last of two microbatches, a network of 64 to 64 features taught to be the identity."""
    losses = []
    for step in range(first, last + 1):
        ctl.begin_step(step)
        for j in range(2):
            ctl.microbatch(j)
            x = randn(32, 64, seed=10 * step + j).requires_grad_()
            loss = (net(x) - x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        ctl.end_step()
    return losses


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@contextlib.contextmanager
def counted_casts():
    """(shape, direction) of every cast to a quantized format inside the block, in order; Python makes them all."""
    from megatron_hybrid import kernels, node
    from megatron_hybrid.formats import DIRECTIONS

    seen, originals = [], {name: getattr(kernels, name) for name in ("quantize_pair", "cast_directions")}

    def spy(name):
        def call(x, row, col, **kwargs):
            seen.extend((tuple(x.shape), d) for d, side in zip(DIRECTIONS, (row, col)) if side is not None)
            return originals[name](x, row, col, **kwargs)

        return call

    by_node = node.NodePlan.__call__
    node.NodePlan.__call__ = lambda *args: None
    for name in originals:
        setattr(kernels, name, spy(name))
    try:
        yield seen
    finally:
        node.NodePlan.__call__ = by_node
        for name, original in originals.items():
            setattr(kernels, name, original)


def gradients(module, x, dy, *args):
    """y, dx and the gradients of all parameters, of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x, *args)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_same(got, want):
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want)):
        assert g.shape == w.shape and torch.equal(g, w), f"tensor {i} differs"
