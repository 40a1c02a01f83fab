"""Checks that the sizes of experts' groups stay on the device, on two ranks; run_mcore_model.py runs them."""

from __future__ import annotations

import itertools
from contextlib import contextmanager, nullcontext

import torch
from checks import raises
from mcore_model_common import B, H, S, bf16, losses, parallel
from mcore_model_experts import ROWSCALED, moe, moe_layers
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hybrid import Recipe
from megatron_hybrid.gemm import grouped as gemms
from megatron_hybrid.groups import Groups
from megatron_hybrid.mcore import dispatch, driver, experts, moe_layer
from megatron_hybrid.mcore.spec import HybridLayerSpec

OURS = {"alltoall": moe_layer.OneRankAllToAll, "allgather": moe_layer.OneRankAllGather}
MEGATRON = {"alltoall": MoEAlltoAllTokenDispatcher, "allgather": MoEAllGatherTokenDispatcher}


def unfused(recipe, **changes):
    """Experts without `--moe-permute-fusion`, which the fused parts of a GPU turn on; run_moe_graph.py is about that."""
    recipe = Recipe.load(recipe) if isinstance(recipe, str) else recipe
    return moe(recipe, spec=HybridLayerSpec(recipe, fused=False), **changes)


def dispatcher_of(model):
    return moe_layers(model)[0].token_dispatcher


def there_and_back(dispatcher) -> torch.Tensor:
    """A dispatcher's six steps, and their backward, over tensors without data: what reads one raises. The sizes."""
    tokens, chosen = torch.empty(S, B, H, device="meta"), torch.empty(S * B, 4, device="meta", dtype=torch.bool)
    tokens.requires_grad_()
    probs = torch.empty(S * B, 4, device="meta", requires_grad=True)
    rows, sizes, weights = dispatcher.dispatch_postprocess(
        *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(tokens, chosen, probs))
    )
    assert rows.shape == (2 * S * B, H) and weights.shape == (2 * S * B,)
    y = dispatcher.combine_preprocess(rows * weights.unsqueeze(-1))
    y = dispatcher.combine_postprocess(dispatcher.token_combine(y))
    assert y.shape == tokens.shape
    y.sum().backward()
    assert tokens.grad.shape == tokens.shape and probs.grad.shape == probs.shape
    return sizes


def check_one_rank_s_dispatchers_read_no_sizes():
    for kind in ("alltoall", "allgather"):
        parallel()
        dispatcher = dispatcher_of(unfused("bf16", num_layers=1, moe_token_dispatcher_type=kind))
        assert type(dispatcher) is OURS[kind]
        sizes = there_and_back(dispatcher)
        assert sizes.is_meta and sizes.shape == (4,)
        dispatcher.__class__ = MEGATRON[kind]
        with raises((RuntimeError, NotImplementedError), "meta"):
            there_and_back(dispatcher)


def check_other_dispatchers_are_megatron_s():
    """Where rows travel by sizes, or are dropped, or experts run one by one, the host must know the sizes."""
    capacity = dict(moe_expert_capacity_factor=1.0)
    for layout, changes in (
        (dict(ep=2), dict(add_bias_linear=True)), (dict(), capacity), (dict(), {"grouped": False}),
        (dict(tp=2), dict(sequence_parallel=True, expert_tensor_parallel_size=2)),
    ):  # fmt: skip
        parallel(**layout)
        assert type(dispatcher_of(moe("bf16", num_layers=1, **changes))) is MEGATRON["alltoall"], (layout, changes)


def trained(recipe, cls, **changes) -> list[torch.Tensor]:
    """Loss and gradients of a model whose dispatcher is of this class."""
    model = moe(recipe, num_layers=1, **changes)
    for layer in moe_layers(model):
        assert cls is not None or type(layer.token_dispatcher) not in MEGATRON.values()
        layer.token_dispatcher.__class__ = cls or type(layer.token_dispatcher)
    driver.attach([model.module], seed=1).controller.begin_step(1)
    loss = losses(model)
    loss.sum().backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def check_bits_are_those_of_megatron_s_dispatchers():
    """Losses and gradients, top 1 and 2, biases of experts, and tokens of expert-tensor-parallel ranks brought together."""
    split = dict(sequence_parallel=True, expert_tensor_parallel_size=2)
    biased = dict(add_bias_linear=True)
    for recipe, kind, (layout, changes) in itertools.chain(
        itertools.product((ROWSCALED, "fp8_delayed"), OURS, [({}, {}), ({}, dict(moe_router_topk=1, moe_router_pre_softmax=True)), ({}, biased)]),
        [(ROWSCALED, "allgather", ({"tp": 2}, split))],
    ):
        results = []
        for cls in (None, MEGATRON[kind]):
            parallel(**layout)
            results.append(trained(recipe, cls, moe_token_dispatcher_type=kind, **changes))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (recipe, kind, changes)


def check_tokens_of_one_rank_are_cast_before_without_the_host():
    recipe = Recipe.from_dict({**Recipe.load(ROWSCALED).to_dict(), "dispatch": "quantized"})
    results = []
    for cls in (None, dispatch.QuantizedDispatcher):
        parallel()
        results.append(trained(recipe, cls))
    assert type(dispatcher_of(moe(recipe))) is dispatch.QuantizedOnOneRank
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class SizesOfTheDevice(Groups):
    """Groups whose sizes only the device knows, wherever they are."""

    def __init__(self, splits, num, rows, device):
        super().__init__(splits, num, rows, device)
        self._host, self._device = None, splits

    @property
    def host(self):
        raise AssertionError("the sizes of groups were read")


class NothingIsRead(TorchDispatchMode):
    """Raises where an operation's result, or its shape, makes the host wait for the device."""

    READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in self.READS, f"{func} reads the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def products_at_once():
    """Products of all experts at once, that need no sizes on the host, on CPUs too."""
    choose = gemms.choose
    if torch.get_default_device().type == "cpu":
        gemms.choose = lambda step, shape, dtype: gemms.BF16
    try:
        yield
    finally:
        gemms.choose = choose


@contextmanager
def sizes_on_the_device():
    """Errors for what reads sizes of groups, or anything else."""
    known, experts.Groups = experts.Groups, SizesOfTheDevice
    try:
        with NothingIsRead():
            yield
    finally:
        experts.Groups = known


def check_a_layer_s_forward_and_backward_read_no_sizes():
    """Router to combination, cast and quantized weights: the bits of the same products with the sizes on the host."""
    for recipe, kind in itertools.product(("bf16", ROWSCALED, "quantized weights"), OURS):
        name = ROWSCALED if recipe == "quantized weights" else recipe
        chosen = Recipe.from_dict({**Recipe.load(name).to_dict(), **({"weights": "quantized"} if name != recipe else {})})
        found = []
        for where in (nullcontext, sizes_on_the_device):
            parallel()
            with products_at_once():
                model = unfused(chosen, num_layers=1, moe_token_dispatcher_type=kind)
                driver.attach([model.module], seed=1).controller.begin_step(1)
                layer, x, dy = moe_layers(model)[0], bf16(S, B, H, seed=3).requires_grad_(), bf16(S, B, H, seed=4)
                with where():
                    y = layer(x)[0]
                    y.backward(dy)
            found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), (recipe, kind)
