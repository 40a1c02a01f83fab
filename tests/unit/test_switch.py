"""Switching recipes in a running job: bitwise the run that had the new recipe with the same state (property 29, case 67)."""

import copy
import logging

import pytest
import torch
from linear_cases import training_losses

import megatron_hybrid as mh

RECIPES = ["bf16", "mxfp8", "fp8_delayed", "nvfp4", "mxfp8_fprop_nvfp4_bwd"]
PAIRS = [(old, new) for old in RECIPES for new in RECIPES if old != new]
LAYERS = 4


def model(recipe):
    torch.manual_seed(0)
    layers = [
        mh.HybridLinear(64, 64, recipe=recipe, name=f"fc{i}", layer=i, num_layers=LAYERS) for i in range(1, LAYERS + 1)
    ]
    return torch.nn.Sequential(*layers).to(torch.bfloat16)


def started(recipe):
    net = model(recipe)
    return net, mh.prepare(net, recipe, seed=5, num_microbatches=2), mh.FusedAdam(net.parameters(), lr=1e-2)


@pytest.mark.parametrize("old, new", PAIRS)
def test_p29_c67_a_switched_run_is_the_run_that_had_the_recipe(old, new):
    """The other run is built with the new recipe and given weights and optimizer state; histories start fresh in both."""
    net, ctl, optimizer = started(old)
    training_losses(net, ctl, optimizer, 1, 2)
    twin, twin_ctl, twin_optimizer = started(new)
    twin.load_state_dict({k: v for k, v in net.state_dict().items() if ".hq." not in k}, strict=False)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ctl.switch(new)
    assert training_losses(net, ctl, optimizer, 3, 5) == training_losses(twin, twin_ctl, twin_optimizer, 3, 5)
    for (name, a), b in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("new", ["mxfp8", "fp8_delayed", "nvfp4"])
def test_c67_rules_on_steps_are_the_switch_at_that_step(new):
    slots = mh.Recipe.load(new).to_dict()
    rules = [{"match": {"steps": ":3"}, "use": "high_precision"}, *slots.pop("rules", [])]
    ruled, ctl, optimizer = started(mh.Recipe.from_dict({**slots, "name": "ruled", "rules": rules}))
    switched, other_ctl, other_optimizer = started("bf16")
    found = training_losses(ruled, ctl, optimizer, 1, 5)
    expected = training_losses(switched, other_ctl, other_optimizer, 1, 2)
    other_ctl.switch(new)
    assert found == expected + training_losses(switched, other_ctl, other_optimizer, 3, 5)


def test_a_rule_on_all_steps_holds_from_the_first():
    rules = [{"match": {"steps": "1:"}, "use": "mxfp8_e4m3"}]
    net, ctl, _ = started(mh.Recipe.from_dict({"version": 1, "name": "a", "defaults": "nvfp4", "rules": rules}))
    assert str(net[0].plan.fprop.pair.a) == "nvfp4"  # no step is known
    ctl.begin_step(7)
    assert str(net[0].plan.fprop.pair.a) == "mxfp8_e4m3"


def test_c67_switching_there_and_back_keeps_histories():
    """What delayed scaling knew is still there: a pause, not a restart."""
    net, ctl, optimizer = started("fp8_delayed")
    training_losses(net, ctl, optimizer, 1, 3)
    before = {k: v.clone() for k, v in net.state_dict().items() if ".hq." in k}
    assert before
    ctl.switch("mxfp8")
    training_losses(net, ctl, optimizer, 4, 4)
    ctl.switch("fp8_delayed")
    after = net.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_changes_of_plans_are_said(caplog):
    caplog.set_level(logging.INFO, logger="megatron_hybrid")
    rules = [{"match": {"steps": "2:", "layers": "1:3"}, "use": {"fprop": "high_precision"}}]
    net, ctl, optimizer = started(
        mh.Recipe.from_dict({"version": 1, "name": "a", "defaults": "mxfp8_e4m3", "rules": rules})
    )
    assert not caplog.messages
    training_losses(net, ctl, optimizer, 1, 3)
    ctl.switch("bf16")
    assert caplog.messages == [
        "step 2: rules on steps change 2 of 4 linears; gemms: 10 emulated, 2 high precision",
        "recipe a becomes bf16 from the next forward on (step 3 has begun); gemms: 12 high precision",
    ]


def test_a_refused_switch_leaves_run_and_log_as_they_were(caplog):
    caplog.set_level(logging.INFO, logger="megatron_hybrid")
    net, ctl, optimizer = started("mxfp8")
    twin, twin_ctl, twin_optimizer = started("mxfp8")
    training_losses(net, ctl, optimizer, 1, 1), training_losses(twin, twin_ctl, twin_optimizer, 1, 1)
    bad = mh.Recipe.from_dict(
        {"version": 1, "name": "b", "defaults": "nvfp4", "rules": [{"match": {"name": "no.*"}, "use": "nvfp4"}]}
    )
    with pytest.raises(mh.RecipeError):
        ctl.switch(bad)
    assert training_losses(net, ctl, optimizer, 2, 2) == training_losses(twin, twin_ctl, twin_optimizer, 2, 2) and not caplog.messages


E5M2, E4M3 = "fp8_delayed_e5m2:history=4", "fp8_delayed_e4m3:history=4"


def _relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def _gradient_error(m, step, ctl, x, dy):
    ctl.begin_step(step)
    m.weight.grad = None
    m(x).backward(dy)
    ctl.end_step()
    return _relative_error(m.weight.grad, dy.T @ x)


def _delayed(fmt, rules=()):
    return mh.Recipe.from_dict({"version": 1, "name": "delayed", "defaults": fmt, "rules": list(rules)})


@pytest.mark.parametrize("how", ["switch", "rule", "load"])
@pytest.mark.parametrize("before, after", [(E5M2, E4M3), (E4M3, E5M2)])
def test_p30_c67_delayed_scales_follow_a_change_of_element_type(before, after, how):
    """The largest numbers differ by 128: a scale made for the other type would saturate everything, or lose it."""
    torch.manual_seed(0)
    x, dy = torch.randn(64, 96), torch.randn(64, 32)
    first = _delayed(before, [{"match": {"steps": "4:"}, "use": after}] if how == "rule" else ())
    m = mh.HybridLinear(96, 32, bias=False, recipe=first)
    ctl = mh.prepare(m)
    for step in (1, 2, 3):
        error = _gradient_error(m, step, ctl, x, dy)
    if how == "switch":
        ctl.switch(_delayed(after))
    if how == "load":
        loaded = mh.HybridLinear(96, 32, bias=False, recipe=_delayed(after))
        loaded.load_state_dict(m.state_dict())
        m, ctl = loaded, mh.prepare(loaded)
        ctl.rescale_from(first)
    # rounding errors of the two types: 2^-4 and 2^-3 at most an operand, uniform, two operands
    assert error < 0.12 and _gradient_error(m, 4, ctl, x, dy) < 0.12
    assert list(ctl.runtimes[0].states())  # still scaled by history


def test_a_later_rules_longer_history_leaves_the_one_in_use_alone():
    """Buffers of later steps are made ahead; those that this step records into keep their length and values."""
    now = {"fprop": "fp8_delayed_e4m3:history=3", "dgrad": "high_precision", "wgrad": "high_precision"}
    m = mh.HybridLinear(64, 32, bias=False, recipe=_delayed(now))
    ctl = mh.prepare(m)
    x, dy = torch.randn(16, 64), torch.randn(16, 32)
    for step in (1, 2):
        _gradient_error(m, step, ctl, x, dy)
    before = m.hq.input_rowwise_history.clone()
    ctl.switch(_delayed(now, [{"match": {"steps": "9:"}, "use": "fp8_delayed_e4m3:history=16"}]))
    assert before.any() and torch.equal(m.hq.input_rowwise_history, before)
    assert m.hq.grad_output_rowwise_history.shape == (16,)
    m(x)


def _history(length):
    return f"fp8_delayed_e4m3:history={length}"


@pytest.mark.parametrize("how", ["switch", "rule", "load", "resume"])
@pytest.mark.parametrize("before, after", [(4, 9), (9, 4)])
def test_c67_a_history_of_another_length_keeps_the_newest_amaxes(before, after, how):
    """Three steps, which either length holds: bit for bit the run that had the new length from the start."""
    torch.manual_seed(0)
    x, dy = torch.randn(64, 96), torch.randn(64, 32)
    scales = [3.0**-step for step in range(9)]  # the first amax rules until it has dropped out

    def made(recipe):
        torch.manual_seed(1)
        m = mh.HybridLinear(96, 32, bias=False, recipe=recipe)
        return m, mh.prepare(m)

    def run(m, ctl, first, last):
        return [_gradient_error(m, step, ctl, x * scales[step - 1], dy) for step in range(first, last + 1)]

    rules = [{"match": {"steps": "4:"}, "use": _history(after)}]
    old = _delayed(_history(before), rules if how in ("rule", "resume") else ())
    twin, (m, ctl) = made(_delayed(_history(after))), made(old)
    expected = run(*twin, 1, 9)
    assert run(m, ctl, 1, 3) == expected[:3]
    if how == "switch":
        ctl.switch(_delayed(_history(after)))
    if how == "resume":  # after the rule's step, into a module that was never at one
        assert run(m, ctl, 4, 5) == expected[3:5]
    if how in ("load", "resume"):
        state = m.state_dict()
        m, ctl = made(_delayed(_history(after)) if how == "load" else old)
        m.load_state_dict(state)
    first = 6 if how == "resume" else 4
    assert run(m, ctl, first, 9) == expected[first - 1 :]
    assert all(torch.equal(a, b) for a, b in zip(m.hq.buffers(), twin[0].hq.buffers(), strict=True))


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
@pytest.mark.parametrize("loads", [[9], [2], [9, 2], [9, 4], [4]])
def test_a_load_of_other_lengths_leaves_histories_in_their_memory(loads, weights):
    """Where a captured CUDA graph reads and writes them: from the next step on they have the plan's length again, there."""

    def made(length):
        rec = _delayed(_history(length)).with_weights(weights)
        return (m := mh.HybridLinear(96, 32, bias=False, recipe=rec)), mh.prepare(m)

    torch.manual_seed(0)
    x, dy = torch.randn(64, 96), torch.randn(64, 32)
    m, ctl = made(4)
    ctl.begin_step(1)
    where = {name: buffer.data_ptr() for name, buffer in m.hq.named_buffers()}
    own = m.state_dict()
    for length in loads:
        other, other_ctl = made(length)
        for step in range(1, 4):
            _gradient_error(other, step, other_ctl, x * step, dy)
        m.load_state_dict(_decoded(other.state_dict()))
    fresh, fresh_ctl = made(4)
    fresh.load_state_dict(_decoded(other.state_dict()))
    errors = [_gradient_error(*pair, x, dy) for pair in ((m, 4, ctl), (fresh, 4, fresh_ctl))]
    assert {name: buffer.data_ptr() for name, buffer in m.hq.named_buffers()} == where
    assert errors[0] == errors[1]
    assert all(torch.equal(a, b) for a, b in zip(m.hq.buffers(), fresh.hq.buffers(), strict=True))
    m.load_state_dict(own)  # what a load brings may be the very buffers
    assert all(torch.equal(a, b) for a, b in zip(m.hq.buffers(), fresh.hq.buffers(), strict=True))


def test_a_state_that_is_the_modules_own_survives_a_load_of_another_length():
    """Loaded back before the next step: its tensors are the memory that histories go back to."""
    m, other = (mh.HybridLinear(96, 32, bias=False, recipe=_delayed(_history(length))) for length in (4, 9))
    ctl = mh.prepare(m)
    _gradient_error(m, 1, ctl, torch.randn(64, 96), torch.randn(64, 32))
    own, values = m.state_dict(), [buffer.clone() for buffer in m.hq.buffers()]
    m.load_state_dict(other.state_dict() | {k: v for k, v in own.items() if not k.endswith("_history")})
    m.load_state_dict(own)
    assert all(torch.equal(a, b) for a, b in zip(m.hq.buffers(), values, strict=True))


MX = "mxfp8_e4m3"
SHORT, RANGE = "fp8_delayed_e4m3:history=2", "fp8_delayed_e5m2:history=2,margin=1"
PLAIN, LIVES = {}, {"weights": "quantized"}


def _whole(formats: str, weights: dict, rules=()):
    return mh.Recipe.from_dict({"version": 1, "name": "whole", "defaults": formats, "rules": list(rules), **weights})


def _decoded(state_dict: dict) -> dict:
    return {k: v.dequantize(dtype=v.dtype) if isinstance(v, mh.HybridTensor) else v for k, v in state_dict.items()}


@pytest.mark.parametrize("weights", [PLAIN, LIVES], ids=["plain", "lives"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("steps, use", [*((s, RANGE) for s in ("2:", "4:", "2:3", "2:5")), ("2:", MX), ("3:", MX)])
def test_p38_a_resume_takes_loaded_scales_for_those_of_the_step_before(steps, use, at, weights):
    """Bit for bit, whatever the rules have at that step, at the next one, and without a step, as modules are built.
    The largest amax, which made a scale, may have dropped out of the history since."""
    rec = _whole(SHORT, weights, [{"match": {"steps": steps}, "use": use}])
    expected = training_losses(*started(rec), 1, 6)
    net, ctl, optimizer = started(rec)
    assert training_losses(net, ctl, optimizer, 1, at) == expected[: 2 * at]  # microbatches
    state = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    resumed, ctl, optimizer = started(rec)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.copy_(torch.ones(parameter.shape))
    resumed.load_state_dict(_decoded(state[0]))
    optimizer.load_state_dict(state[1])
    assert training_losses(resumed, ctl, optimizer, at + 1, 6) == expected[2 * at :]


@pytest.mark.parametrize("before, after", [(RANGE, SHORT), (SHORT, RANGE)])
def test_c67_weights_that_live_quantized_follow_scales_of_another_recipe(before, after):
    """A load casts them with the scales that it brings; the next forward reads a cast of the master with its own."""
    old, new = (_whole(formats, LIVES) for formats in (before, after))
    switched = started(old)
    training_losses(*switched, 1, 2)
    state = copy.deepcopy((_decoded(switched[0].state_dict()), switched[2].state_dict()))
    switched[1].switch(new)
    net, ctl, optimizer = started(new)
    net.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    ctl.rescale_from(old, 2)
    assert training_losses(net, ctl, optimizer, 3, 5) == training_losses(*switched, 3, 5)


@pytest.mark.parametrize("weights", [PLAIN, LIVES], ids=["plain", "lives"])
def test_scales_of_a_recipe_that_nobody_knows_are_made_anew(weights):
    """As of a Python function, which no file has: E5M2's scale would cut all of E4M3 that is not tiny."""
    old, new = (_whole(formats, weights) for formats in (RANGE, SHORT))
    net, ctl, optimizer = started(old)
    training_losses(net, ctl, optimizer, 1, 2)
    state = copy.deepcopy((_decoded(net.state_dict()), optimizer.state_dict()))
    losses = []
    for known in (old, None):
        net, ctl, optimizer = started(new)
        net.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        ctl.rescale_from(known, 2)
        losses.append(training_losses(net, ctl, optimizer, 3, 5))
    assert losses[0] == losses[1]
