"""A producer told its consumer's role casts its output for it (issue: one cast saved), and roles (property 32)."""

import copy

import pytest
import torch
from linear_cases import DELAYED, STATELESS, assert_same, counted_casts, randn, recipe, saved_tensors

import megatron_hybrid as mh
from megatron_hybrid.modules.attention import DotProductAttention, HybridSelfAttention
from megatron_hybrid.modules.norm import Norm
from megatron_hybrid.roles import QuantizerRole


class TwoReaders(torch.nn.Module):
    """One norm feeding two linears."""

    def __init__(self, rcp, **second):
        super().__init__()
        torch.manual_seed(0)
        made = dict(recipe=rcp, dtype=torch.bfloat16)
        self.norm = Norm(64, dtype=torch.bfloat16)
        self.q = mh.HybridLinear(64, 48, name="q", **made)
        self.k = mh.HybridLinear(64, 48, name="k", **{**made, **second})

    def forward(self, x):
        h = self.norm(x)
        return self.q(h) + self.k(h)


def run(net, x, dy):
    net.zero_grad()
    x = x.clone().requires_grad_()
    with counted_casts() as casts:
        y = net(x)
        y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())], casts


@pytest.mark.parametrize("backward", ["nvfp4", "high_precision"])
@pytest.mark.parametrize("fmt", [f for f in STATELESS if f != "high_precision" and "rht" not in f])
def test_one_norm_feeding_two_linears_casts_once_with_the_same_bits(fmt, backward):
    x, dy = randn(24, 64), randn(24, 48, seed=1)
    plain, told = TwoReaders(recipe(fmt, backward, backward)), TwoReaders(recipe(fmt, backward, backward))
    told.norm.output.bind(told.q)
    want, before = run(plain, x, dy)
    got, after = run(told, x, dy)
    assert_same(got, want)
    one = [(tuple(x.shape), d) for d in (["rowwise", "columnwise"] if backward == "nvfp4" else ["rowwise"])]
    assert len(after) == len(before) - len(one)  # of the two casts of the input, one remains
    assert after[: len(one)] == one and after.count(one[0]) == before.count(one[0]) - 1


def test_the_gradient_flows_and_a_derived_column_is_kept_as_its_row():
    source = {"columnwise_source": {"input": "rowwise_dequantized"}}
    plain, told = (TwoReaders(recipe("nvfp4", "mxfp8_e4m3", "mxfp8_e4m3", **source)) for _ in range(2))
    told.norm.output.bind(told.q)
    x, dy = randn(24, 64), randn(24, 48, seed=1)
    (want, _), (got, _) = run(plain, x, dy), run(told, x, dy)
    assert_same(got, want)
    assert told.norm(x).columnwise is None and told.q.plan.saved["input"] == "rowwise"


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "nvfp4:row_scaled", "fp8_current_e4m3", DELAYED])
def test_linear_to_linear_to_mlp_in_a_chain(fmt):
    def chain():
        torch.manual_seed(0)
        made = dict(recipe=recipe(fmt, "mxfp8_e4m3", "mxfp8_e4m3"), dtype=torch.bfloat16)
        return torch.nn.Sequential(
            mh.HybridLinear(64, 64, **made), mh.HybridLinear(64, 64, **made), mh.HybridMLP(64, 96, gated=True, **made)
        )

    plain, told = chain(), chain()
    told[0].output.bind(told[1])
    told[1].output.bind(told[2].linear_fc1)
    told[2].activation.output.bind(told[2].linear_fc2)
    controllers = [mh.prepare(net) for net in (plain, told)]
    for step in (1, 2, 3):
        for c in controllers:
            c.begin_step(step)
        x, dy = randn(24, 64, seed=step), randn(24, 64, seed=step + 9)
        (want, before), (got, after) = run(plain, x, dy), run(told, x, dy)
        assert_same(got, want)
        assert sorted(before) == sorted(after)  # moved, not repeated
        for c in controllers:
            c.end_step()
    states = zip(plain.state_dict().values(), told.state_dict().values())
    assert all(torch.equal(a, b) for a, b in states)  # amaxes were recorded once, by the producer


def test_default_is_none_and_high_precision_is_left_alone():
    net = TwoReaders("bf16")
    assert net.norm.output.role is None and type(net.norm(randn(4, 64))) is torch.Tensor
    net.norm.output.bind(net.q)
    assert type(net.norm(randn(4, 64))) is torch.Tensor


def test_only_directions_that_are_needed():
    net = TwoReaders("mxfp8")
    net.norm.output.bind(net.q)
    x = randn(8, 64)
    assert net.norm(x).columnwise is not None
    with torch.no_grad():
        assert net.norm(x).columnwise is None and net.norm(x).rowwise is not None
    net.q.weight.requires_grad_(False)
    assert net.norm(x).columnwise is None


def test_it_keeps_plain_tensors_for_backward():
    net = TwoReaders("mxfp8")
    net.norm.output.bind(net.q)
    with saved_tensors() as kept:
        net(randn(8, 64))
    assert {type(t) for t in kept} <= {torch.Tensor, torch.nn.Parameter}


def test_other_formats_a_missing_direction_and_another_source_are_refused_with_names():
    x = randn(8, 64)
    net = TwoReaders("mxfp8", recipe=recipe("nvfp4", "nvfp4", "nvfp4"))
    net.norm.output.bind(net.q)
    with pytest.raises(mh.PlanError, match="module k: input was quantized before, to rowwise=mxfp8_e4m3.*input.rowwise nvfp4"):
        net(x)
    net = TwoReaders("mxfp8")
    net.norm.output.bind(net.q)
    net.q.weight.requires_grad_(False)  # no column for q; k wants one
    with pytest.raises(mh.PlanError, match="module k: .*needs input.columnwise mxfp8_e4m3"):
        net(x)
    source = {"columnwise_source": {"input": "rowwise_dequantized"}}
    net = TwoReaders("mxfp8", recipe=recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3", **source))
    net.norm.output.bind(net.q)
    with pytest.raises(mh.PlanError, match="columnwise_source=original; .*columnwise_source=rowwise_dequantized"):
        net(x)
    with pytest.raises(ValueError, match="a consumer is a quantized linear or attention, found Linear"):
        net.norm.output.bind(torch.nn.Linear(2, 2))


def test_p26_a_weight_that_is_quantized_is_not_cast_again_and_a_stale_direction_is_refused():
    net = TwoReaders("mxfp8_fprop_nvfp4_bwd")
    q = net.q
    x, dy = randn(8, 64), randn(8, 48, seed=1)
    plain = run(q, x, dy)[0]
    weight = q.plan.quantizers["weight"].quantize(q.weight)
    q.weight = torch.nn.Parameter(weight)
    for train in (True, False, True):  # evaluation in between loses no direction
        q.train(train)
        got, casts = run(q, x, dy)
        assert_same(got, plain)
        assert not any(shape == (48, 64) for shape, _ in casts)
    q.weight.update(randn(48, 64), columnwise=False)
    with pytest.raises(mh.PlanError, match="module q: weight was quantized before.*columnwise is stale"):
        q(x.clone().requires_grad_())
    with torch.no_grad():
        q(x)  # the row is fresh


def test_a_role_alone_is_enough_once_prepared():
    role = QuantizerRole("linear", "input", "1")
    net = torch.nn.Sequential(Norm(64, output_role=role), mh.HybridLinear(64, 48, recipe="mxfp8"))
    assert net[0].output.role == role
    with pytest.raises(mh.PlanError, match="call mh.prepare"):
        net(torch.randn(4, 64))
    mh.prepare(net)
    assert isinstance(net[0](torch.randn(4, 64)), mh.HybridTensor)
    assert net(torch.randn(4, 64)).shape == (4, 48)
    lost = torch.nn.Sequential(Norm(64, output_role=QuantizerRole("linear", "input", "nowhere")), mh.HybridLinear(64, 48))
    with pytest.raises(ValueError, match="0: its output is for .*nowhere.*; the model has 1"):
        mh.prepare(lost)


def test_a_copied_model_casts_for_its_own_consumer():
    net = TwoReaders("mxfp8")
    net.norm.output.bind(net.q)
    twin = copy.deepcopy(net)
    assert twin.norm.output._consumer is twin.q
    x, dy = randn(8, 64), randn(8, 48)
    assert_same(run(net, x, dy)[0], run(twin, x, dy)[0])


def words(roles):
    return [None if r is None else f"{r.module_type} {r.name} {r.tensor_type}" for r in roles]


def linear_roles(name, output=None, module_type="linear"):
    return [f"{module_type} {name} input", f"{module_type} {name} weight", output, f"{module_type} {name} grad_output"]


def test_p32_roles_of_every_module_in_order():
    assert words(mh.HybridLinear(32, 32, name="a").roles()) == linear_roles("a")
    assert words(mh.HybridLayerNormLinear(32, 32, name="b").roles()) == linear_roles("b")
    assert words(mh.HybridMLP(32, 32, name="c").roles()) == linear_roles("c.linear_fc1") + linear_roles("c.linear_fc2")
    grouped = mh.HybridGroupedLinear(2, 32, 32, name="d", first_expert=4)
    assert words(grouped.roles()) == 2 * linear_roles("d", module_type="grouped_linear")
    assert [r.expert for r in grouped.roles() if r is not None] == [4, 4, 4, 5, 5, 5]
    dpa = [f"dpa e.core_attention {t}" for t in ("qkv", "s", "o", "do", "dp")]
    attention = HybridSelfAttention(32, 4, name="e", layer=3, num_layers=4)
    assert words(attention.roles()) == [
        *linear_roles("e.linear_qkv", output=dpa[0]), *dpa, None, *linear_roles("e.linear_proj")
    ]  # fmt: skip
    assert {r.layer for r in attention.roles() if r is not None} == {3}


def test_p32_the_output_role_is_the_consumers():
    fc1, fc2 = mh.HybridLinear(32, 32, name="fc1"), mh.HybridLinear(32, 32, name="fc2")
    fc1.output.bind(fc2)
    assert words(fc1.roles()) == linear_roles("fc1", output="linear fc2 input")
    mlp = mh.HybridMLP(32, 32, name="m", output_role=QuantizerRole("dpa", "qkv", "x"))
    assert words(mlp.roles())[6] == "dpa x qkv"
    assert mlp(torch.randn(2, 32)).shape == (2, 32)  # attention casts nothing


def test_p32_rules_by_layer_name_reach_only_these_layers():
    rules = [{"match": {"name": "*.1.linear_fc2"}, "use": "nvfp4"}]
    rcp = recipe(rules=rules)
    net = torch.nn.ModuleList(mh.HybridMLP(32, 32, name=f"layers.{i}", recipe=rcp) for i in (1, 11))
    quantized = {r["module"] for r in mh.explain(net).records() if r["runs"] != "high precision"}
    assert quantized == {"layers.1.linear_fc2"}


def test_p32_rules_for_attention_match_its_roles_and_may_only_leave_it_alone():
    def net(rules):
        return HybridSelfAttention(32, 4, name="attn", recipe=recipe("mxfp8_e4m3", rules=rules))

    rule = {"match": {"module_type": "dpa"}, "use": "high_precision"}
    mh.prepare(net([]), recipe("mxfp8_e4m3", rules=[rule]))  # matches: no error
    with pytest.raises(mh.RecipeError, match="module_type 'dpa': the model has linear"):
        mh.prepare(mh.HybridLinear(32, 32, name="fc"), recipe("mxfp8_e4m3", rules=[rule]))
    with pytest.raises(mh.RecipeError, match="attention"):
        net([{"match": {"module_type": "dpa"}, "use": "mxfp8_e4m3"}])


def test_unnamed_attention_takes_its_path():
    net = torch.nn.Sequential(HybridSelfAttention(32, 4))
    mh.prepare(net)
    assert words(net[0].roles())[2] == "dpa 0.core_attention qkv"
    assert isinstance(net[0].core_attention, DotProductAttention)
    assert net(torch.randn(2, 5, 32)).shape == (2, 5, 32)
