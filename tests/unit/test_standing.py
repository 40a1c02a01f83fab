"""What captured CUDA graphs read stays where it is and is written there: keys, scales, cached weights (case 40)."""

import pytest
import torch
from linear_cases import counted_casts
from test_control import DELAYED, SR, batches, model, recipe, train

import megatron_hybrid as mh
from megatron_hybrid.plan import GRAD_OUTPUT, INPUT, WEIGHT
from megatron_hybrid.random_keys import RandomKeys
from megatron_hybrid.roles import ModuleRole
from megatron_hybrid.scaling import Pieces

BLOCKS = {"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "nvfp4"}
DERIVED = dict(fprop="mxfp8_e4m3", wgrad="nvfp4", columnwise_source={"weight": "rowwise_dequantized"})
HALF = {"fprop": "mxfp8_e4m3"}
RECIPES = {"delayed": DELAYED, "stochastic": SR, "blocks": BLOCKS, "derived": DERIVED, "half": HALF, "none": {}}
ROLE = ModuleRole("linear", "fc")
MAPS = (None, (8, 16, 64), Pieces(0, ((0, 0, 64), (32, 0, 64))))


@pytest.fixture
def capturing(monkeypatch):
    """Have casts believe that a graph is being captured, or not."""
    state = {"now": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["now"])
    return lambda now: state.update(now=now)


def standing(defaults, **options):
    net = model(recipe(defaults))
    ctl = mh.prepare(net, seed=7, num_microbatches=2, **options)
    ctl.stand()
    return net, ctl


@pytest.mark.parametrize("name", RECIPES)
def test_training_is_the_same(name, capturing):
    ends = []
    for stands in (False, True):
        net = model(recipe(RECIPES[name]))
        ctl = mh.prepare(net, seed=7, num_microbatches=2)
        if stands:
            ctl.stand()
        ends.append((train(net, ctl, 4), net.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][key], ends[1][1][key]) for key in ends[0][1])


def test_a_model_made_elsewhere_stands_where_it_has_moved(capturing):
    """What kernels read is where the weights are, not where the model was made."""
    found = []
    for stands in (False, True):
        layer = mh.HybridLinear(64, 32, recipe=recipe(BLOCKS), name="fc", dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        ctl = mh.prepare(layer, seed=7, num_microbatches=2)
        if stands:
            ctl.stand()
        ctl.begin_step(1)
        for microbatch in range(2):
            ctl.microbatch(microbatch)
            capturing(microbatch == 1)
            y = layer(torch.linspace(-1, 1, 32 * 64, dtype=torch.bfloat16).view(32, 64))
            y.sum().backward()
            found.append(y)
            layer.weight.data.mul_(2)  # seen by no cache; a cast of a later microbatch must not happen
        capturing(False)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def draws(keys: RandomKeys, operand: str, index_map) -> list[list[int]]:
    rng = keys.rng(ROLE, operand, torch.device("cpu"), index_map)
    parts = [rng] if rng.parts is None else rng.parts[1]
    return [part.words(64).tolist() for part in parts]


def test_keys_stay_in_their_memory_and_are_those_of_step_and_microbatch(capturing):
    moving, standing_keys = (RandomKeys(5, 3, replica=1, num_replicas=2, part=1) for _ in range(2))
    standing_keys.stand()
    rngs, seen = {}, set()
    for step, total in ((1, 3), (2, 3), (2, 3), (3, 4)):
        for microbatch in (0, 1, 2, 1):
            for keys in (moving, standing_keys):
                keys.set(step, microbatch, total)
            for operand in (INPUT, WEIGHT, GRAD_OUTPUT):
                for index_map in MAPS:
                    expected = draws(moving, operand, index_map)
                    assert draws(standing_keys, operand, index_map) == expected
                    found = standing_keys.rng(ROLE, operand, torch.device("cpu"), index_map)
                    first = rngs.setdefault((operand, index_map), found)
                    assert first.values.data_ptr() == found.values.data_ptr()
                    assert first.words(64).tolist() == expected[0]  # what a captured call holds
                    seen.add((operand, step, microbatch, first.values[2].item()))
            rows = torch.arange(4)
            pair = [k.rng_of_rows(ROLE, INPUT, torch.device("cpu"), rows).values for k in (moving, standing_keys)]
            assert torch.equal(*pair)
    counters = {(step, microbatch): c for operand, step, microbatch, c in seen if operand == INPUT}
    assert len(set(counters.values())) == len(counters) == 9


def held_addresses(net) -> list[int]:
    return [b.data_ptr() for linear in (net[0], net[2]) for s in linear.hq.weight_cache.held() for b in s.buffers().values()]


@pytest.mark.parametrize("name", RECIPES)
def test_refreshed_weights_are_a_fresh_casts_in_the_same_memory(name, capturing):
    net, ctl = standing(RECIPES[name])
    train(net, ctl, 1)
    ctl.begin_step(2)
    net(batches(1)[0].requires_grad_()).sum().backward()
    before = held_addresses(net)
    assert before
    ctl.end_step()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    ctl.begin_step(3)
    for linear in (net[0], net[2]):
        assert linear.hq.weight_cache.held() == []
        linear.hq.refresh()
        call = linear.hq.call(linear.weight.device, mh.linear.LOCAL, training=False)
        wanted = dict(rowwise=True, columnwise=call.plan.saved[WEIGHT] == "columnwise")
        fresh = call.cast(WEIGHT, linear.weight.detach(), **wanted)
        held = linear.hq.weight_cache.held()
        for ours, theirs in zip(held, [s for s in fresh if s is not None], strict=True):
            for a, b in zip(ours.buffers().values(), theirs.buffers().values(), strict=True):
                assert torch.equal(a, b)
    assert held_addresses(net) == before
    with counted_casts() as casts:
        net[0].hq.refresh()  # nothing has changed since
    assert casts == []


@pytest.mark.parametrize("name", ["delayed", "stochastic", "blocks", "derived"])
def test_a_capture_casts_the_weight_where_it_is_held_unless_the_flag_says_later(name, capturing):
    net, ctl = standing(RECIPES[name])
    linear, x = net[0], batches(1)[0].requires_grad_()
    ctl.begin_step(1)
    net(x).sum().backward()
    before = held_addresses(net)
    capturing(True)
    with torch.no_grad():
        linear.weight.data.mul_(1.5)  # unseen by torch's counter, as a flat buffer's
    for microbatch, changes in ((1, False), (0, True)):
        ctl.microbatch(microbatch)
        kept = [b.clone() for s in linear.hq.weight_cache.held() for b in s.buffers().values()]
        net(x)
        now = [b for s in linear.hq.weight_cache.held() for b in s.buffers().values()]
        assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True)) != changes
    capturing(False)
    assert held_addresses(net) == before
    wanted = [b.clone() for s in linear.hq.weight_cache.held() for b in s.buffers().values()]
    ctl.invalidate()
    net(x)
    found = [b for s in linear.hq.weight_cache.held() for b in s.buffers().values()]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    ctl.invalidate()
    with counted_casts() as casts:
        linear.hq.refresh()  # the graph casts by itself
    assert casts == []


def test_a_weight_in_high_precision_stays_the_parameter(capturing):
    net, ctl = standing({})
    ctl.begin_step(1)
    net(batches(1)[0].requires_grad_()).sum().backward()
    version = net[0].weight._version
    ctl.begin_step(2)
    net[0].hq.refresh()
    (payload,) = {s.qdata.data_ptr() for s in net[0].hq.weight_cache.held()}
    assert payload == net[0].weight.data_ptr() and net[0].weight._version == version


def test_plans_cannot_change_once_a_step_has_begun(capturing):
    net, ctl = standing(BLOCKS)
    ctl.switch(recipe(HALF))
    ctl.begin_step(1)
    with pytest.raises(mh.PlanError, match="captured in CUDA graphs go on with the formats of their capture"):
        ctl.switch(recipe(BLOCKS))
    assert str(net[0].plan.dgrad.pair.a) == "high_precision"


@pytest.mark.parametrize("name", ["delayed", "stochastic", "blocks"])
def test_c40_eager_steps_after_captured_ones_are_those_of_a_run_without(name, capturing):
    net, ctl = standing(RECIPES[name])
    capturing(True)
    losses = train(net, ctl, 2)
    capturing(False)
    losses += train(net, ctl, 2, start=3)
    other = model(recipe(RECIPES[name]))
    assert losses == train(other, mh.prepare(other, seed=7, num_microbatches=2), 4)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
