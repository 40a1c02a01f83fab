"""The controller: cache windows, random counters, delayed scaling, step rules (properties 27, 29, 30, 36, 38; cases 34-39, 63, 67)."""

import copy
import warnings

import pytest
import torch
from linear_cases import counted_casts

import megatron_hybrid as mh
from megatron_hybrid.storage import cast
from torch.utils.checkpoint import checkpoint

DELAYED = {"fprop": "fp8_delayed_e4m3:history=4", "dgrad": {"grad_output": "fp8_delayed_e5m2:history=3,algo=most_recent",
           "weight": "fp8_delayed_e4m3:history=4"}, "wgrad": {"grad_output": "fp8_delayed_e5m2:history=3,algo=most_recent",
           "input": "mxfp8_e4m3"}}  # fmt: skip
SR = {"fprop": "nvfp4:sr", "dgrad": "nvfp4:sr", "wgrad": "nvfp4:rht,sr"}


def recipe(defaults, rules=(), **top):
    return mh.Recipe.from_dict({"version": 1, "name": "t", "defaults": defaults, "rules": list(rules), **top})


def model(rcp, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        mh.HybridLinear(48, 64, recipe=rcp, name="fc1", layer=1, num_layers=2, dtype=torch.bfloat16),
        torch.nn.GELU(),
        mh.HybridLinear(64, 32, recipe=rcp, name="fc2", layer=2, num_layers=2, dtype=torch.bfloat16),
    )


def batches(n, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(16, 48, generator=g).bfloat16() for _ in range(n)]


def train(net, ctl, steps, micro=2, start=1, wrap=lambda f, x: f(x)):
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for i in range(start, start + steps):
        ctl.begin_step(i)
        for j, x in enumerate(batches(micro, seed=i)):
            ctl.microbatch(j)
            loss = wrap(net, x.requires_grad_()).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        opt.step()
        opt.zero_grad()
        ctl.end_step()
    return losses


@pytest.mark.parametrize("defaults", [DELAYED, SR, {"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "nvfp4"}])
def test_p27_the_weight_cache_saves_casts_and_changes_no_bit(defaults):
    results = {}
    for cached in (True, False):
        net = model(recipe(defaults))
        ctl = mh.prepare(net, seed=7, num_microbatches=2)
        if not cached:
            for r in ctl.runtimes:
                r.weight_cache = None
        with counted_casts() as casts:
            losses = train(net, ctl, 3)
        weight_casts = [shape for shape, _ in casts].count((64, 48))
        results[cached] = losses, [p.clone() for p in net.parameters()], weight_casts
    assert results[True][0] == results[False][0]
    assert all(torch.equal(a, b) for a, b in zip(results[True][1], results[False][1]))
    assert results[True][2] * 2 == results[False][2] == 3 * 2 * 2  # steps x microbatches x directions


@pytest.mark.parametrize("how", ["in_place", "data_copy", "foreach", "load_state_dict"])
def test_c34_a_changed_weight_is_used_at_once_after_the_step(how):
    net = model(recipe({"fprop": "mxfp8_e4m3"}))
    ctl = mh.prepare(net)
    ctl.begin_step(1)
    x = batches(1)[0]
    net(x)
    new = torch.randn_like(net[0].weight)
    with torch.no_grad():
        {
            "in_place": lambda: net[0].weight.copy_(new),
            "data_copy": lambda: net[0].weight.data.copy_(new),
            "foreach": lambda: torch._foreach_copy_([net[0].weight.data], [new]),
            "load_state_dict": lambda: net.load_state_dict({**net.state_dict(), "0.weight": new}),
        }[how]()
    if how != "load_state_dict":  # a load invalidates by itself
        ctl.end_step()
    fresh = copy.deepcopy(net)
    mh.prepare(fresh).begin_step(1)
    assert torch.equal(net(x), fresh(x))


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_c34_where_no_window_is_open_a_write_that_torch_does_not_count_is_seen(kind):
    """Optimizers and moving averages that write through `.data`: before the first step, after the last one, in a copy."""
    rcp = recipe({"fprop": "mxfp8_e4m3", "dgrad": "mxfp8_e4m3"})
    made = dict(recipe=rcp, dtype=torch.bfloat16)
    net = mh.HybridLinear(48, 64, **made) if kind == "linear" else mh.HybridGroupedLinear(2, 48, 64, **made)
    x, *splits = (batches(1)[0],) if kind == "linear" else (batches(1)[0], [5, 11])

    def sees(module):
        before = module(x, *splits)
        module.weight.data.mul_(2)
        after = module(x, *splits)
        return not torch.equal(before, after)

    ctl = mh.prepare(net)
    assert sees(net)
    ctl.begin_step(1)
    assert not sees(net)  # inside of a step the cast weight is kept
    assert sees(copy.deepcopy(net))
    ctl.end_step()
    assert sees(net)
    ctl.invalidate()  # an evaluation, whose weights are cast once
    with torch.no_grad():
        assert not sees(net)
    ctl.begin_step(2)
    assert not sees(net)


class Times(torch.nn.Module):
    """A parametrization that gives another weight at every call."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * self.calls


@pytest.mark.parametrize("defaults", [DELAYED, {"fprop": "mxfp8_e4m3", "dgrad": "mxfp8_e4m3"}, {"fprop": "fp8_rowwise_e4m3"}])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", ["parametrized", "functional_call"])
def test_c34_a_weight_computed_for_each_call_is_used_though_it_lies_where_the_last_one_did(how, defaults, grad):
    def linear():
        torch.manual_seed(0)
        return mh.HybridLinear(48, 64, bias=False, recipe=recipe(defaults), dtype=torch.bfloat16)

    x, weight, net = batches(1)[0], linear().weight.detach(), linear()
    mh.prepare(net).begin_step(1)
    if how == "parametrized":
        torch.nn.utils.parametrize.register_parametrization(net, "weight", Times())  # calls it once
    for n in range(2, 6):
        alone = linear()
        alone.weight.data.mul_(n)
        with torch.set_grad_enabled(grad):
            y = net(x) if how == "parametrized" else torch.func.functional_call(net, {"weight": weight * n}, (x,))
        assert torch.equal(y, alone(x))
        del y


def test_inference_tensors_have_no_version_and_are_cast_at_every_call():
    with torch.inference_mode():
        net = model(recipe({"fprop": "mxfp8_e4m3"}))
        mh.prepare(net).begin_step(1)
        x = batches(1)[0]
        before = net(x)
        net[0].weight.mul_(2)
        fresh = copy.deepcopy(net)
        mh.prepare(fresh).begin_step(1)
        assert torch.equal(net(x), fresh(x)) and not torch.equal(net(x), before)


def test_c35_first_microbatch_under_no_grad_fills_only_what_it_needs():
    losses = {}
    for wrap in ("plain", "reentrant"):
        net = model(recipe({"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "nvfp4"}))
        ctl = mh.prepare(net, num_microbatches=3)
        f = (lambda m, x: m(x)) if wrap == "plain" else (lambda m, x: checkpoint(m, x, use_reentrant=True))
        losses[wrap] = train(net, ctl, 2, micro=3, wrap=f), [p.clone() for p in net.parameters()]
    assert losses["plain"][0] == losses["reentrant"][0]
    assert all(torch.equal(a, b) for a, b in zip(losses["plain"][1], losses["reentrant"][1]))


def test_c36_evaluation_between_steps_changes_nothing():
    def run(evaluate):
        net = model(recipe(DELAYED))
        ctl = mh.prepare(net, num_microbatches=2)
        losses = train(net, ctl, 1)
        if evaluate:
            net.eval()
            with torch.no_grad():
                net(batches(1, seed=99)[0] * 1e3)
            net.train()
        return losses + train(net, ctl, 2, start=2)

    assert run(True) == run(False)


@pytest.mark.parametrize("defaults, says", [(DELAYED, True), ({"fprop": "mxfp8_e4m3"}, False)])
def test_a_loop_in_which_nobody_moves_delayed_scales_is_told(defaults, says):
    def warned(steps):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            steps()
        return [str(w.message) for w in found]

    net, x = model(recipe(defaults)), batches(1)[0]
    alone = warned(lambda: net(x))
    assert bool(alone) == says and all("trains without a controller" in line for line in alone)
    ctl = mh.prepare(net)

    def step(i, ends):
        ctl.begin_step(i)
        net(x).sum().backward()
        if ends:
            ctl.end_step()

    assert not warned(lambda: [step(1, False), step(1, True), step(2, False)])  # one that is repeated, one that is ended
    found = warned(lambda: [step(3, False), step(4, False)])
    assert len(found) == says and all("begin_step(3) without `ctl.end_step()` of the step before" in line for line in found)


def test_p30_ten_steps_of_histories_equal_a_hand_run_of_the_rule():
    net = model(recipe({"fprop": "fp8_delayed_e4m3:history=4,margin=1"}))
    ctl = mh.prepare(net)
    hq = net[0].hq
    history, scale = [0.0] * 4, 1.0
    for i in range(1, 11):
        ctl.begin_step(i)
        x = batches(1, seed=i)[0] * 10.0**(i % 3)
        assert hq.input_rowwise_scale.item() == scale
        net(x.requires_grad_())
        history[0] = max(history[0], x.abs().max().item())
        assert hq.input_rowwise_history.tolist() == history
        ctl.end_step()
        amax = max(history)
        scale = (torch.tensor(448.0 * 0.5) / torch.tensor(amax)).item()
        history = [0.0, *history[:-1]]
    assert hq.input_rowwise_history.tolist() == history


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_loss_scaling_skips_leaves_no_infinite_amax(bad):
    """The finite ones of that step stay; without the call a history keeps its scale until it has dropped out."""
    net = model(recipe("fp8_delayed_e4m3:history=4"))
    ctl, hq = mh.prepare(net), net[0].hq
    for step, is_skipped in ((1, True), (2, False)):
        ctl.begin_step(step)
        y = net(batches(1)[0])
        y.backward(torch.full_like(y, bad if is_skipped else 1000.0))
        if is_skipped:
            ctl.forget_overflow()
        ctl.end_step()
        assert all(torch.isfinite(buffer).all() for buffer in net[2].hq.buffers())
        assert hq.input_rowwise_history[1] > 0
    assert net[2].hq.grad_output_rowwise_history.tolist() == [0, 1000, 0, 0]
    assert net[2].hq.grad_output_rowwise_scale.item() == torch.tensor(448.0).div(1000).item()


def test_d10_delayed_state_is_plain_tensors_in_the_state_dict():
    net = model(recipe(DELAYED))
    keys = [k for k in net.state_dict() if ".hq." in k]
    assert "0.hq.input_rowwise_scale" in keys and "2.hq.grad_output_columnwise_history" in keys
    assert "0.hq.input_columnwise_scale" not in keys  # mxfp8 keeps none
    assert not [k for k in model("mxfp8").state_dict() if "hq" in k]


@pytest.mark.parametrize("defaults", [DELAYED, SR])
def test_p38_resume_is_bitwise(defaults, tmp_path):
    whole = model(recipe(defaults))
    losses = train(whole, mh.prepare(whole, seed=3, num_microbatches=2), 6)
    first = model(recipe(defaults))
    train(first, mh.prepare(first, seed=3, num_microbatches=2), 3)
    torch.save(first.state_dict(), tmp_path / "c.pt")
    second = model(recipe(defaults), seed=5)
    second.load_state_dict(torch.load(tmp_path / "c.pt", weights_only=True))
    assert train(second, mh.prepare(second, seed=3, num_microbatches=2), 3, start=4) == losses[6:]


@pytest.mark.parametrize("defaults", [SR, DELAYED], ids=["sr", "delayed"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_p36_recompute_draws_the_same_random_bits_and_records_the_same_amaxes(reentrant, defaults):
    ends = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=reentrant)):
        net = model(recipe(defaults))
        train(net, mh.prepare(net, seed=2, num_microbatches=2), 3, wrap=wrap)
        ends.append([t.clone() for t in net.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends))


def test_c36_an_evaluation_inside_the_window_does_not_keep_the_weight_from_being_recorded():
    ends = []
    for evaluate in (False, True):
        net = model(recipe(DELAYED))
        ctl = mh.prepare(net)
        ctl.begin_step(1)
        if evaluate:
            before = net[0].hq.weight_rowwise_history.clone()
            net.eval()(batches(1)[0])
            assert torch.equal(net[0].hq.weight_rowwise_history, before)
            net.train()
        net(batches(1)[0]).sum().backward()
        ctl.end_step()
        ends.append(net.state_dict())
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


def test_stochastic_rounding_needs_a_controller_and_says_so():
    with pytest.raises(mh.PlanError, match="fc1.*mh.prepare"):
        model(recipe(SR))(batches(1)[0])


def test_random_keys_differ_by_step_microbatch_and_seed_and_repeat_exactly():
    net = model(recipe(SR))
    x = batches(1)[0]
    outputs = {}
    for seed in (0, 1):
        ctl = mh.prepare(net, seed=seed, num_microbatches=2)
        for step in (1, 2, 1):
            ctl.begin_step(step)
            for j in (0, 1):
                ctl.microbatch(j)
                y = net(x)
                assert torch.equal(outputs.setdefault((seed, step, j), y), y)
    values = list(outputs.values())
    assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])
    with pytest.raises(ValueError, match="microbatch 2 of 2"):
        ctl.microbatch(2)


def test_step_rules_take_effect_exactly_at_the_step():
    rcp = recipe({"fprop": "mxfp8_e4m3"}, [{"match": {"steps": "3:"}, "use": {"fprop": "high_precision"}}])
    net = model(rcp)
    ctl = mh.prepare(net)
    x = batches(1)[0]
    for step, fmt in ((1, "mxfp8_e4m3"), (2, "mxfp8_e4m3"), (3, "high_precision"), (2, "mxfp8_e4m3")):
        ctl.begin_step(step)
        assert str(net[0].plan.fprop.pair.a) == fmt
        net(x)


def test_c67_switch_requantizes_and_a_bad_recipe_changes_nothing():
    net = model(recipe({"fprop": "mxfp8_e4m3"}))
    ctl = mh.prepare(net)
    ctl.begin_step(1)
    x = batches(1)[0]
    before = net(x)
    with pytest.raises(ValueError):
        ctl.switch(recipe({"fprop": "nvfp4"}, [{"match": {"name": "nothing.*"}, "use": "bf16"}]))
    assert torch.equal(net(x), before)
    ctl.switch(recipe({"fprop": "nvfp4"}))
    fresh = model(recipe({"fprop": "nvfp4"}))
    assert torch.equal(net(x), fresh(x))


def test_p33_switching_modes_between_steps():
    net = model(recipe({"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "nvfp4"}))
    ctl = mh.prepare(net)
    x = batches(1)[0]
    ctl.begin_step(1)
    y = net(x)
    for mode in ("high_precision", "dequantized"):
        ctl.switch(recipe({"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "nvfp4"}, backward=mode))
        assert torch.equal(net(x), y)


def test_prepare_names_modules_and_refuses_a_model_without_any():
    net = torch.nn.Sequential(mh.HybridLinear(16, 16, recipe="mxfp8"))
    mh.prepare(net)
    assert net[0].hq.role.name == "0"
    with pytest.raises(ValueError, match="no quantized module"):
        mh.prepare(torch.nn.Linear(2, 2))


def test_outer_amax_given_by_the_caller_is_used():
    x = batches(1)[0]
    q = mh.HybridQuantizer("nvfp4", "fp8_current_e4m3")
    row, col = q.amax(x)
    t = q.quantize(x, amax=(row * 2, col * 2))
    assert torch.equal(t.rowwise.amax(), row * 2)
    whole = torch.cat((x, 2 * x))
    assert torch.equal(t.rowwise.codes(), q.quantize(whole).rowwise.codes()[:16])
    assert cast(x, q.rowwise, "rowwise").outer_amax.item() == x.abs().max().item()


def operands(monkeypatch):
    """(gemm, payload of the weight) of every fprop and dgrad from now on; Python runs them all."""
    from megatron_hybrid.node import NodePlan
    from megatron_hybrid.plan import GemmPlan

    seen, original = [], GemmPlan.run

    def run(self, gemm, a, b, *args, **kwargs):
        if gemm != "wgrad" and self.name == "fc1":
            seen.append((gemm, b))
        return original(self, gemm, a, b, *args, **kwargs)

    monkeypatch.setattr(GemmPlan, "run", run)
    monkeypatch.setattr(NodePlan, "__call__", lambda *args: None)
    return seen


@pytest.mark.parametrize("cached", [True, False])
def test_c37_a_weights_codes_and_scale_are_of_one_step_in_every_microbatch(monkeypatch, cached):
    net = model(recipe(DELAYED))
    ctl = mh.prepare(net, num_microbatches=2)
    if not cached:
        for r in ctl.runtimes:
            r.weight_cache = None
    seen, opt, scales = operands(monkeypatch), torch.optim.SGD(net.parameters(), lr=5.0), set()
    for step in (1, 2, 3):
        ctl.begin_step(step)
        seen.clear()
        state = {d: getattr(net[0].hq, f"weight_{d}_scale").clone() for d in ("rowwise", "columnwise")}
        for j, x in enumerate(batches(2, seed=step)):
            ctl.microbatch(j)
            net(x.requires_grad_()).float().square().mean().backward()
        assert [gemm for gemm, _ in seen] == ["fprop", "dgrad"] * 2
        for _, payload in seen:
            frozen = mh.DelayedState(state[payload.direction], None)
            want = cast(net[0].weight.detach(), payload.format, payload.direction, state=frozen, transposed=payload.transposed)
            assert torch.equal(payload.qdata, want.qdata) and torch.equal(payload.scale, want.scale)
            scales.add(payload.scale.item())
        opt.step()
        opt.zero_grad()
        ctl.end_step()
    assert len(scales) > 2  # they did move


@pytest.mark.parametrize("how", ["optimizer", "data_copy"])
def test_c38_backward_after_a_step_reads_the_new_weights_column(monkeypatch, how):
    net = model(recipe({"fprop": "mxfp8_e4m3", "dgrad": "nvfp4", "wgrad": "nvfp4"}))
    ctl, seen = mh.prepare(net), operands(monkeypatch)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    for step in (1, 2, 3):
        ctl.begin_step(step)
        seen.clear()
        net(batches(1, seed=step)[0].requires_grad_()).float().square().sum().backward()
        (_, row), (_, column) = seen
        for payload in (row, column):
            want = cast(net[0].weight.detach(), payload.format, payload.direction, transposed=payload.transposed)
            assert torch.equal(payload.qdata, want.qdata) and torch.equal(payload.scale, want.scale), payload.direction
        opt.step() if how == "optimizer" else net[0].weight.data.copy_(torch.randn_like(net[0].weight))
        opt.zero_grad()
        ctl.end_step()


def test_c39_loading_into_a_quantized_weight_writes_the_column_too():
    layer = mh.HybridLinear(48, 64, False, recipe="mxfp8_fprop_nvfp4_bwd", dtype=torch.bfloat16)
    q = layer.plan.quantizers["weight"]
    source = mh.HybridLinear(48, 64, False, recipe="mxfp8_fprop_nvfp4_bwd", dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(q.quantize(torch.zeros(64, 48, dtype=torch.bfloat16)))
    layer.load_state_dict(source.state_dict())
    x, got = batches(1)[0], []
    for m in (layer, source):
        dx = x.clone().requires_grad_()
        m(dx).sum().backward()
        got.append(dx.grad)
    assert torch.equal(*got) and got[0].abs().sum() > 0


def test_c51_main_grad_beside_fsdp2_is_refused_and_gradients_go_through_its_reduction(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net, alone = model(recipe({"fprop": "mxfp8_e4m3"})), model(recipe({"fprop": "mxfp8_e4m3"}))
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        x = batches(1)[0]
        for m in (net, alone):
            mh.prepare(m).begin_step(1)
            m(x.clone()).float().square().mean().backward()
        for sharded, p in zip(net.parameters(), alone.parameters()):
            assert torch.equal(sharded.grad.full_tensor(), p.grad)
        net[2].weight.main_grad = torch.zeros(32, 64)
        with pytest.raises(ValueError, match="parameter 2.weight: it is sharded .* and has `main_grad`"):
            mh.prepare(net)
    finally:
        dist.destroy_process_group()


def test_a_change_of_dtype_and_back_drops_the_cast_of_the_weight_before():
    """Memory and version may be those of before, the values are rounded."""
    net = model(recipe("mxfp8_e4m3"))
    ctl = mh.prepare(net)
    ctl.begin_step(1)
    (x,) = batches(1)
    before = net(x)
    net.to(torch.float8_e5m2).to(torch.bfloat16)
    after = net(x)
    ctl.invalidate()
    assert torch.equal(after, net(x)) and not torch.equal(after, before)


def test_a_controller_that_another_one_followed_says_so():
    """Its steps would draw the same random bits again and again, and histories would move on twice a step."""
    net = model(recipe(SR))
    whole = mh.prepare(net, seed=1)
    whole.begin_step(1)
    part = mh.prepare(net[2], seed=1)
    part.begin_step(1)
    with pytest.raises(RuntimeError, match="module fc2: `mh.prepare` was called for it again, .* go on with the later one"):
        whole.begin_step(2)
    part.begin_step(2)
    again = mh.prepare(net, seed=1)
    again.begin_step(2)
    with pytest.raises(RuntimeError, match="go on with the later one"):
        part.begin_step(3)
