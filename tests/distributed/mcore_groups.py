"""Checks of who shares amaxes and payloads, in every layout of 2 to 4 ranks; run_param_gather.py runs them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from mcore_model_common import VOCAB, B, S, build, drawn, mpu, parallel, rank
from mcore_model_experts import moe
from tp_cases import on_the_wire

from megatron_hybrid import Recipe
from megatron_hybrid.mcore import driver
from megatron_hybrid.mcore.layers import HybridParallelLinear

WORLD = int(os.environ["WORLD_SIZE"])
DENSE = {2: [dict(), dict(tp=2), dict(pp=2), dict(cp=2)]}
DENSE[3] = [dict()]
DENSE[4] = [*DENSE[2], dict(tp=2, pp=2), dict(tp=2, cp=2), dict(pp=2, cp=2), dict(tp=4), dict(pp=4)]
EXPERTS = {2: [dict(), dict(ep=2), dict(tp=2), dict(tp=2, ep=2, etp=1)], 3: []}
EXPERTS[4] = [dict(ep=2), dict(ep=4), dict(tp=2), dict(tp=2, ep=2, etp=1), dict(tp=2, ep=2), dict(tp=2, ep=4, etp=1), dict(etp=2),
              dict(ep=2, pp=2), dict(ep=2, cp=2)]  # fmt: skip


def states_of(control) -> dict[tuple, object]:
    """(module's global name, expert, number of the state) -> state, of this rank."""
    found = {}
    for runtime in control.controller.runtimes:
        for number, (_, state) in enumerate(runtime.states()):
            found[runtime.role.name, runtime.role.expert, number] = state
    return found


def amaxes_are_of_all_ranks_with_the_module(model, note) -> list[dict]:
    """Every rank records an amax of its own for every tensor; after the step it has the largest of the ranks that hold a
    tensor of this name, all of it or a part, and of no other. What each rank recorded."""
    control = driver.attach([model.module], seed=1)
    control.controller.begin_step(1)
    states = states_of(control)
    for number, state in enumerate(states.values()):
        state.history[0] = 1 + (rank() + number) % WORLD  # another rank has the largest of the next one
    own = {key: state.history[0].item() for key, state in states.items()}
    of_ranks = [None] * WORLD
    dist.all_gather_object(of_ranks, own)
    with on_the_wire() as sent:
        control.controller.end_step(control.group, control.expert_groups)
    for key, state in states.items():
        expected = max(found[key] for found in of_ranks if key in found)
        assert state.history[1].item() == expected, (note, key, own[key], state.history[1].item(), expected)
    assert len(sent) <= 1 + 2 * any(expert is not None for _, expert, _ in states), (note, "one a kind of ranks", sent)
    assert all(s.name == "all_reduce" and s.op == dist.ReduceOp.MAX for s in sent), (note, sent)
    return of_ranks


def check_amaxes_of_delayed_scaling_in_every_layout():
    recipe = Recipe.load("fp8_delayed").with_first_rule({"layers": "last:1"}, {"fprop": "mxfp8_e4m3"})
    for layout in DENSE[WORLD]:
        parallel(**layout)
        stages = layout.get("pp", 1)
        of_ranks = amaxes_are_of_all_ranks_with_the_module(build(recipe, num_layers=max(2, stages)), layout)
        assert (len({len(found) for found in of_ranks}) > 1) == (stages > 1), (layout, "stages hold as many tensors")
        tp, cp = layout.get("tp", 1), layout.get("cp", 1)
        assert mpu.get_tensor_model_parallel_world_size() == tp and mpu.get_context_parallel_world_size() == cp


def check_amaxes_of_delayed_scaling_of_experts_in_every_layout():
    recipe = Recipe.load("fp8_delayed").with_first_rule({"experts": "1:2"}, {"fprop": "mxfp8_e4m3"})
    for layout in EXPERTS[WORLD]:
        for grouped in (True, False):
            parallel(**layout)
            changes = dict(expert_tensor_parallel_size=layout.get("etp", layout.get("tp", 1)), sequence_parallel="tp" in layout)
            model = moe(recipe, grouped=grouped, num_layers=max(2, layout.get("pp", 1)), **changes)
            of_ranks = amaxes_are_of_all_ranks_with_the_module(model, (layout, grouped))
            experts = [{key[1] for key in found if key[1] is not None} for found in of_ranks]
            assert all(len(found) == 4 // layout.get("ep", 1) for found in experts), (layout, experts)


def run_by_python(model) -> None:
    """Collectives of the C++ node cannot be looked at; run_tp.py has its bits compared in groups of a larger world."""
    for module in model.modules():
        if isinstance(module, HybridParallelLinear) and module.plan.lean is not None:
            module.plan.lean.node = None


def check_collectives_of_linears_stay_among_the_ranks_that_split_them():
    """Amaxes of current scaling and gathered payloads, whatever stands beside tensor parallelism, experts included."""
    neighbours = (rank() - rank() % 2, rank() - rank() % 2 + 1)
    recipe = Recipe.load("fp8_current")
    for layout, make in [*((layout, build) for layout in DENSE[WORLD]), *((layout, moe) for layout in EXPERTS[WORLD])]:
        if layout.get("tp") != 2 or "pp" in layout:
            continue
        parallel(**layout)
        split = {} if make is build else dict(expert_tensor_parallel_size=layout.get("etp", 2))
        model = make(recipe, sequence_parallel=True, num_layers=1, **split)
        run_by_python(model)
        length = S // layout.get("cp", 1)
        tokens = drawn(torch.randint, 0, VOCAB, (B, length), seed=3 + rank() // 2)
        with on_the_wire() as sent:
            model(tokens, torch.arange(length).expand(B, -1), None, labels=tokens.roll(-1, 1)).sum().backward()
        ours = [s for s in sent if s.dtype in (torch.int32, torch.uint8)]
        assert {s.dtype for s in ours} == {torch.int32, torch.uint8}, (layout, "amaxes and payloads", ours)
        assert {s.ranks for s in ours} == {neighbours}, (layout, make, ours)
