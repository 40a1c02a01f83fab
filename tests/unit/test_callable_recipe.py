"""A Python function as recipe (design: `role -> HybridQuantizer`), accepted wherever a recipe is."""

import pytest
import torch
from linear_cases import assert_same, gradients, randn, recipe

import megatron_hybrid as mh
from megatron_hybrid import HybridSelfAttention
from megatron_hybrid import CallableRecipe
from megatron_hybrid.recipe_callable import as_recipe

TABLE = {
    "input": mh.HybridQuantizer("mxfp8_e4m3", "nvfp4"),
    "weight": mh.HybridQuantizer("mxfp8_e4m3", "nvfp4", "rowwise_dequantized"),
    "grad_output": mh.HybridQuantizer("nvfp4", "nvfp4"),
}


def by_tensor(role):
    return TABLE.get(role.tensor_type)


def same_in_yaml():
    return recipe("mxfp8_e4m3", "nvfp4", "nvfp4", columnwise_source={"weight": "rowwise_dequantized"})


def linear(rcp, **kw):
    torch.manual_seed(0)
    return mh.HybridLinear(64, 48, recipe=rcp, name="fc", dtype=torch.bfloat16, **kw)


def test_a_function_gives_the_plan_and_the_bits_of_the_same_recipe_file():
    ours, theirs = linear(by_tensor), linear(same_in_yaml())
    assert ours.plan == theirs.plan
    case = randn(16, 64), randn(16, 48, seed=1)
    assert_same(gradients(ours, *case), gradients(theirs, *case))


@pytest.mark.parametrize(
    "build",
    [
        lambda r: mh.HybridLayerNormLinear(64, 48, recipe=r, name="m"),
        lambda r: mh.HybridMLP(64, 96, recipe=r, name="m"),
        lambda r: mh.HybridGroupedLinear(2, 64, 48, recipe=r, name="m"),
        lambda r: HybridSelfAttention(64, 4, recipe=r, name="m"),
    ],
)
def test_every_module_takes_one(build):
    ours, theirs = mh.explain(build(by_tensor)), mh.explain(build(same_in_yaml()))
    assert ours.rows == theirs.rows and len(ours) >= 3


def test_prepare_and_switch_take_one():
    net = torch.nn.Sequential(mh.HybridLinear(64, 64), mh.HybridLinear(64, 64))
    controller = mh.prepare(net, by_tensor)
    assert str(net[1].plan.dgrad.pair.b) == "nvfp4" and net[1].plan.name == "1"
    controller.switch("bf16")
    assert not net[1].plan.fprop.pair.is_quantized
    controller.switch(lambda role: TABLE[role.tensor_type] if role.name == "0" else None)
    assert net[0].plan.fprop.pair.is_quantized and not net[1].plan.fprop.pair.is_quantized


def test_it_sees_full_roles():
    seen = []

    def record(role):
        seen.append((role.module_type, role.tensor_type, role.name, role.layer, role.expert))

    mh.HybridGroupedLinear(2, 64, 48, recipe=record, name="layers.3.experts", layer=4, num_layers=8, first_expert=6)
    wanted = [("grouped_linear", t, "layers.3.experts", 4, e) for e in (6, 7) for t in ("input", "weight", "grad_output")]
    assert seen == wanted


def test_none_is_high_precision():
    plan = linear(lambda role: None).plan
    assert not any(step.pair.is_quantized for step in plan.steps().values())


@pytest.mark.parametrize("mode", ["high_precision", "dequantized"])
def test_backward_shorthand(mode):
    ours, theirs = linear(CallableRecipe(by_tensor, backward=mode)), linear(same_in_yaml().with_backward(mode))
    assert ours.plan == theirs.plan
    assert CallableRecipe(by_tensor).with_backward(mode).backward == mode
    with pytest.raises(mh.RecipeError, match="did you mean 'dequantized'"):
        CallableRecipe(by_tensor, backward="dequantised")


def test_the_dict_says_that_it_was_not_serialised():
    record = as_recipe(by_tensor).to_dict()
    assert record == {"version": 1, "name": "by_tensor", "callable": True, "backward": "default", "lm_head": False}
    with pytest.raises(mh.RecipeError, match="'by_tensor' was a Python function, which no file or checkpoint holds"):
        mh.Recipe.from_dict(record)
    assert as_recipe(by_tensor).fingerprint != CallableRecipe(by_tensor, backward="dequantized").fingerprint
    assert as_recipe(by_tensor).fingerprint != CallableRecipe(by_tensor, weights="quantized").fingerprint
    assert CallableRecipe(by_tensor, name="mine").name == "mine"


@pytest.mark.parametrize(
    "answer,message",
    [
        ({"weight": mh.HybridQuantizer("mxfp8_e4m3", None)}, "module 'fc', weight: the quantizer has no columnwise format, which dgrad"),
        ({"input": mh.HybridQuantizer(None, "nvfp4")}, "module 'fc', input: the quantizer has no rowwise format, which fprop"),
        ({"input": "mxfp8_e4m3"}, "module 'fc', input: expected a HybridQuantizer or None, found 'mxfp8_e4m3'"),
        ({"input": mh.HybridQuantizer("nvfp4", "nvfp4:rht")}, "module fc, wgrad: .*one operand only"),
    ],
)  # fmt: skip
def test_answers_that_no_module_can_follow_are_refused_at_build(answer, message):
    with pytest.raises(ValueError, match=message):
        linear(lambda role: answer.get(role.tensor_type))


def test_a_refused_switch_changes_nothing():
    net = torch.nn.Sequential(linear("mxfp8"), linear("mxfp8"))
    controller = mh.prepare(net)
    plans = [layer.plan for layer in net]
    with pytest.raises(mh.RecipeError):
        controller.switch(lambda role: mh.HybridQuantizer("nvfp4", "nvfp4") if role.tensor_type != "weight" else 3)
    assert [layer.plan for layer in net] == plans


def test_attention_stays_in_high_precision_and_so_does_the_output_layer():
    with pytest.raises(mh.RecipeError, match="qkv: no backend quantizes attention"):
        HybridSelfAttention(64, 4, recipe=lambda role: mh.HybridQuantizer("nvfp4", "nvfp4"), name="attn")
    head = mh.ModuleRole("linear", "output_layer", lm_head=True)
    assert not as_recipe(by_tensor).resolve(head).is_quantized
    assert CallableRecipe(by_tensor, lm_head=True).resolve(head).is_quantized


def test_a_function_by_its_place(tmp_path, monkeypatch):
    (tmp_path / "my_recipes.py").write_text("def hybrid(role):\n    return None\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = as_recipe("my_recipes:hybrid")
    assert isinstance(loaded, CallableRecipe) and loaded.name == "hybrid"
    for text, words in (("my_recipes:gone", "no attribute 'gone'"), ("no_such_module:f", "No module named"), ("my_recipes:number", "found 3")):
        with pytest.raises(mh.RecipeError, match=words):
            as_recipe(text)
    with pytest.raises(mh.RecipeError, match="unknown recipe 'hybrid'"):
        as_recipe("hybrid")


def test_one_more_rule_in_front_holds_whatever_the_function_says():
    plain = as_recipe(by_tensor)
    edged = plain.with_first_rule({"layers": "first:1,last:1"}, "high_precision")
    roles = [mh.ModuleRole("linear", "fc", layer=n, num_layers=3) for n in (1, 2, 3)]
    assert [edged.resolve(role).is_quantized for role in roles] == [False, True, False]
    assert edged.resolve(roles[1]) == plain.resolve(roles[1])
    assert edged.fingerprint != plain.fingerprint and edged.to_dict()["rules"][0]["match"] == {"layers": "first:1,last:1"}
    with pytest.raises(mh.RecipeError, match="a rule on steps needs a recipe file"):
        plain.with_first_rule({"steps": "3:"}, "high_precision")


def test_anything_else_is_refused():
    with pytest.raises(mh.RecipeError, match="function of a role, found 7"):
        linear(7)
