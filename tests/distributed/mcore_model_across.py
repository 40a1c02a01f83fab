"""Checks of experts over two ranks whose linears read rows as they come; run_mcore_model.py runs them.

What they are held to is Megatron's own dispatcher, which sorts rows by expert and back.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from mcore_model_common import F, H, bf16, losses, parallel, rank
from mcore_model_experts import (
    ROWSCALED,
    SR_INPUT,
    all_dispatchers_megatron_s,
    dispatched,
    moe,
    moe_layers,
    route_to,
)
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hybrid import Recipe, patches
from megatron_hybrid.mcore import dispatch, driver
from megatron_hybrid.mcore.expert_parallel import AcrossRanks

PERMUTED = dict(num_layers=1, moe_permute_fusion=True)
RECOMPUTED = dict(recompute_granularity="selective")


def quantized(name: str) -> Recipe:
    """Tokens travel as codes and scales; the input's columns are made from its rows."""
    changed = Recipe.load(name).to_dict()
    changed["defaults"]["columnwise_source"] = {"input": "rowwise_dequantized"}
    return Recipe.from_dict(changed | {"dispatch": "quantized"})


def stepped(recipe, routing: list[int] | None = None, *, ours=True, **changes):
    """(model after forward and backward, losses and gradients). ours: the dispatcher, else Megatron's."""
    if not ours:
        with all_dispatchers_megatron_s():
            return stepped(recipe, routing, **changes)
    parallel(ep=2)
    patches.apply_all(["moe_permutation"])
    model = moe(recipe, **PERMUTED | changes)
    attached = driver.attach([model.module], seed=1)
    if attached is not None:
        attached.controller.begin_step(1)
    if routing is not None:
        route_to(model, routing)
    loss = losses(model)
    loss.sum().backward()
    return model, [loss.detach(), *(p.grad for p in model.parameters())]


def agree(recipe, routing=None, **changes):
    """Both models, ours first, whose results are the same bits."""
    ours, found = stepped(recipe, routing, **changes)
    theirs, expected = stepped(recipe, routing, ours=False, **changes)
    assert isinstance(moe_layers(ours)[0].token_dispatcher, AcrossRanks)
    assert not isinstance(moe_layers(theirs)[0].token_dispatcher, AcrossRanks)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b), (recipe, routing, changes)
    return ours, theirs


RECIPES = ("bf16", "fp8_rowwise", "mxfp8", ROWSCALED, "fp8_delayed", "nvfp4")


def check_rows_read_as_they_come_are_those_of_megatron_s_dispatcher():
    """Losses and gradients, of recipes that run at once and one by one, and of tokens that travel quantized."""
    for recipe in (*RECIPES, *map(quantized, ("fp8_rowwise", ROWSCALED)), SR_INPUT):
        agree(recipe)
    whole_tiles = dict(hidden_size=128, ffn_hidden_size=128, moe_ffn_hidden_size=128)
    for recipe in ("fp8_block", quantized("fp8_block")):
        agree(recipe, **whole_tiles)


def check_rows_as_they_come_in_every_setting():
    settings = (
        dict(moe_router_topk=1, moe_router_pre_softmax=True),
        dict(num_moe_experts=2),  # one on each rank, which has nothing to sort
        dict(num_moe_experts=8, moe_router_topk=4),
        dict(moe_shared_expert_intermediate_size=F),
        dict(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5, moe_router_dtype="fp32"),
        dict(**RECOMPUTED, recompute_modules=["moe"]),
        dict(**RECOMPUTED, recompute_modules=["moe_act"]),
    )
    for changes in settings:
        for recipe in ("bf16", "fp8_rowwise", quantized("fp8_rowwise")):
            agree(recipe, **changes)


def check_ranks_and_experts_without_rows_that_come():
    """Everything to one rank, to one expert of each, and to experts that leave some without any."""
    for recipe in ("bf16", "fp8_rowwise", ROWSCALED, quantized(ROWSCALED)):
        for routing in ([0, 1], [2, 3], [0, 3]):
            ours, _ = agree(recipe, routing)
            for weight in moe_layers(ours)[0].experts.parameters():
                used = [torch.any(grad != 0).item() for grad in weight.grad]
                assert used == [expert in routing for expert in (2 * rank(), 2 * rank() + 1)], (recipe, routing, used)


def check_routing_and_aux_loss_of_rows_as_they_come():
    """The router's losses see what they see with Megatron's dispatcher."""
    found = []
    for ours in (True, False):
        get_moe_metrics_tracker().clear()
        stepped("fp8_rowwise", ours=ours)
        found.append(get_moe_metrics_tracker().metrics["load_balancing_loss"].values.clone())
    assert found[0].any() and torch.equal(*found)


def check_what_rows_as_they_come_put_on_the_wire():
    """One gather of counts; tokens, probabilities and results, and their gradients back, the bytes of Megatron's."""
    moved = []
    for recipe in ("fp8_rowwise", quantized("fp8_rowwise")):
        of_both = []
        for ours in (True, False):
            with counted_collectives() as calls:
                stepped(recipe, ours=ours)
            of_both.append(calls)
        ours, theirs = ([sorted(calls[kind]) for kind in ("all_to_all", "gather")] for calls in of_both)
        assert ours[0] == theirs[0] and len(ours[0]) == 6, of_both
        assert ours[1] == [4 * 4], of_both  # of four experts, 32 bits each
        moved.append(of_both[0]["all_to_all"])
    rows = moved[0][0] // (2 * H)  # tokens come first
    assert moved[0][0] == rows * 2 * H and moved[1][0] == rows * (H + 4)


@contextmanager
def counted_collectives():
    """Bytes of what every all-to-all and every gather of counts is given."""
    calls = {"all_to_all": [], "gather": []}
    originals = dist.all_to_all_single, dist.all_gather_into_tensor

    def all_to_all(output, input, *args, **kwargs):
        calls["all_to_all"].append(input.nbytes)
        return originals[0](output, input, *args, **kwargs)

    def gather(output, input, *args, **kwargs):
        calls["gather"].append(input.nbytes)
        return originals[1](output, input, *args, **kwargs)

    dist.all_to_all_single, dist.all_gather_into_tensor = all_to_all, gather
    try:
        yield calls
    finally:
        dist.all_to_all_single, dist.all_gather_into_tensor = originals


class Operations(TorchDispatchMode):
    """Counts torch operations, views left out."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **kwargs or {})


def check_rows_as_they_come_take_fewer_operations():
    """Views left out."""
    counts = {}
    for ours in (True, False):
        for recipe in ("bf16", "fp8_rowwise", quantized("fp8_rowwise")):
            with Operations() as operations:
                stepped(recipe, ours=ours)
            counts[ours, str(recipe)] = operations.count
    for (ours, recipe), count in counts.items():
        assert not ours or count < counts[False, recipe], counts


def check_megatron_s_dispatcher_stays_where_rows_must_be_sorted():
    unfused = [] if bf16(1).is_cuda else [dict(moe_permute_fusion=False)]  # our kernels turn it on
    for changes in (
        *unfused,
        dict(moe_expert_capacity_factor=1.0),
        dict(add_bias_linear=True),
        dict(moe_shared_expert_intermediate_size=F, moe_shared_expert_overlap=True),
        dict(moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True),
        dict(moe_token_dispatcher_type="allgather"),
        dict(grouped=False),
    ):
        parallel(ep=2)
        model = moe("bf16", **PERMUTED | changes)
        assert not isinstance(moe_layers(model)[0].token_dispatcher, AcrossRanks), changes


def check_random_bits_of_tokens_taken_in_place_follow_their_source():
    """A row draws for its token and which of its experts it goes to, as with Megatron's dispatcher in between."""
    patches.apply_all(["moe_permutation"])
    found = []
    for ours in (True, False):
        with nullcontext() if ours else all_dispatchers_megatron_s():
            model, _, sent, loss = dispatched(SR_INPUT, ep=2, backward=True, changes=dict(moe_permute_fusion=True))
        assert isinstance(moe_layers(model)[0].token_dispatcher, dispatch.QuantizedAcrossRanks) == ours
        found.append((sent, [loss.detach(), *(p.grad for p in model.parameters())]))
    (ours, results), (theirs, expected) = found
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[source], theirs[source]) for source in ours)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
