"""Resolution: slots, precedence, backward modes, steps, and rules checked against a whole model."""

import itertools
import warnings

import pytest
import yaml

from megatron_hybrid.formats import parse_format
from megatron_hybrid.quantizer_spec import GEMMS, SLOTS
from megatron_hybrid.recipe import Recipe, RecipeError, RecipeWarning
from megatron_hybrid.roles import DPA, GROUPED_LINEAR, LINEAR, ModuleRole

HP, MX, FP4, FP8 = "high_precision", "mxfp8_e4m3", "nvfp4", "fp8_current_e4m3"
ROW = "rowwise_dequantized"


def recipe(defaults=HP, rules=(), **more):
    return Recipe.from_dict({"version": 1, "name": "test", "defaults": defaults, "rules": list(rules), **more})


def rule(use, **match):
    return {"match": match, "use": use}


def linear(layer=1, leaf="mlp.linear_fc1", num_layers=4, **more):
    return ModuleRole(LINEAR, f"decoder.layers.{layer - 1}.{leaf}", layer=layer, num_layers=num_layers, **more)


def expert(e, layer=1):
    name = f"decoder.layers.{layer - 1}.mlp.experts.linear_fc1"
    return ModuleRole(GROUPED_LINEAR, name, layer=layer, num_layers=4, expert=e)


def slots(quant):
    """The six formats by flat key."""
    return {f"{g}.{o}": str(quant.slot(g, o)) for g, operands in GEMMS.items() for o in operands}


def test_the_six_slots_are_the_three_gemms():
    names = ["nvfp4", "nvfp4:2d", "mxfp8_e4m3", "mxfp8_e4m3:2d", "fp8_block_e4m3", "fp8_rowwise_e4m3"]
    table = {"fprop": {"input": names[0], "weight": names[1]}, "dgrad": {"grad_output": names[2], "weight": names[3]}}
    quant = recipe({**table, "wgrad": {"grad_output": names[4], "input": names[5]}}).resolve(linear())
    formats = dict(zip(SLOTS, map(parse_format, names)))
    assert list(quant.slots) == list(formats.values())
    assert tuple(quant.quantizer("input")) == (formats["fprop.input"], formats["wgrad.input"], "original")
    assert tuple(quant.quantizer("weight")) == (formats["fprop.weight"], formats["dgrad.weight"], "original")
    grad = (formats["dgrad.grad_output"], formats["wgrad.grad_output"], "original")
    assert tuple(quant.quantizer("grad_output")) == grad
    with pytest.raises(KeyError, match="fprop multiplies input and weight"):
        quant.slot("fprop", "grad_output")
    with pytest.raises(KeyError, match="no tensor 'qkv'"):
        quant.quantizer("qkv")


def test_scalars_hold_for_everything_below():
    assert set(slots(recipe(MX).resolve(linear())).values()) == {MX}
    quant = recipe({"dgrad": FP4, "columnwise_source": ROW}, accumulate="full").resolve(linear())
    assert slots(quant) == {s: FP4 if s.startswith("dgrad") else HP for s in SLOTS}
    assert quant.columnwise_source["grad_output"] == ROW
    assert {quant.accumulate[g] for g in GEMMS} == {"full"}


def test_defaults_of_the_defaults():
    quant = Recipe.from_dict({"version": 1}).resolve(linear())
    assert not quant.is_quantized and quant.backward == "default" and quant.rules == ()
    assert [quant.accumulate[g] for g in ("fprop", "dgrad", "wgrad")] == ["fast", "full", "full"]
    assert vars(quant.columnwise_source) == dict.fromkeys(("input", "weight", "grad_output"), "original")


# rules; for a linear in layer 1 of 4 what the slots are (those not named: the default, MX) and which rules decided
PRECEDENCE = {
    "no rule": ([], {}, ()),
    "scalar rule": ([rule(FP4, layers=1)], dict.fromkeys(SLOTS, FP4), (0,)),
    "one gemm": ([rule({"fprop": HP}, layers=1)], {"fprop.input": HP, "fprop.weight": HP}, (0,)),
    "one slot": ([rule({"dgrad": {"weight": FP4}}, layers=1)], {"dgrad.weight": FP4}, (0,)),
    "first wins": ([rule(FP4, layers=1), rule(HP, layers=1)], dict.fromkeys(SLOTS, FP4), (0,)),
    "later fills what is unset": (
        [rule({"fprop": FP4}, layers=1), rule(HP, layers=1)],
        {s: FP4 if s.startswith("fprop") else HP for s in SLOTS},
        (0, 1),
    ),
    "within a gemm": (
        [rule({"fprop": {"input": FP4}}, layers=1), rule({"fprop": FP8}, layers=1)],
        {"fprop.input": FP4, "fprop.weight": FP8},
        (0, 1),
    ),
    "three deep": (
        [rule({"fprop": HP}, layers=1), rule({"dgrad": FP4, "fprop": FP4}, layers=1), rule({"wgrad": FP8}, layers=1)],
        {"fprop.input": HP, "fprop.weight": HP, "dgrad.grad_output": FP4, "dgrad.weight": FP4,
         "wgrad.grad_output": FP8, "wgrad.input": FP8},
        (0, 1, 2),
    ),
    "a rule for others is passed over": ([rule(FP4, layers=2), rule({"fprop": HP}, layers=1)],
                                         {"fprop.input": HP, "fprop.weight": HP}, (1,)),
    "all conditions of a rule must hold": ([rule(FP4, layers=1, name="*.linear_fc2")], {}, ()),
    "tensor type narrows a scalar": (
        [rule(FP4, tensor_type="weight")],
        {"fprop.weight": FP4, "dgrad.weight": FP4},
        (0,),
    ),
    "tensor type narrows a gemm": ([rule({"wgrad": FP4}, tensor_type="grad_output")], {"wgrad.grad_output": FP4}, (0,)),
    "tensor types side by side": (
        [rule(FP4, tensor_type="weight"), rule(HP, tensor_type="input"), rule(FP8, layers=1)],
        {"fprop.weight": FP4, "dgrad.weight": FP4, "fprop.input": HP, "wgrad.input": HP,
         "dgrad.grad_output": FP8, "wgrad.grad_output": FP8},
        (0, 1, 2),
    ),
    "attention rules leave linears alone": ([rule(HP, module_type=DPA)], {}, ()),
}  # fmt: skip


@pytest.mark.parametrize("case", PRECEDENCE)
def test_precedence_a_slot_at_a_time(case):
    rules, expected, decided = PRECEDENCE[case]
    quant = recipe(MX, rules).resolve(linear(1))
    assert slots(quant) == {**dict.fromkeys(SLOTS, MX), **expected}
    assert quant.rules == decided


def test_precedence_holds_for_every_setting():
    made = recipe(
        {"fprop": FP4, "columnwise_source": {"weight": ROW}},
        [
            rule({"accumulate": {"fprop": "full"}, "columnwise_source": {"input": ROW}}, layers=1),
            rule({"accumulate": {"fprop": "fast", "wgrad": "fast"}, "columnwise_source": "original"}, layers="1:3"),
            rule({"backward": "high_precision"}, layers="3:"),
        ],
    )
    one, two, three = (made.resolve(linear(i)) for i in (1, 2, 3))
    assert (one.accumulate.fprop, one.accumulate.dgrad, one.accumulate.wgrad) == ("full", "full", "fast")
    assert (one.columnwise_source.input, one.columnwise_source.weight) == (ROW, "original")
    assert (two.accumulate.fprop, two.columnwise_source.input) == ("fast", "original")
    assert (three.backward, two.backward) == ("high_precision", "default")


@pytest.mark.parametrize(
    "text, inside",
    [
        ("7", {7}), (7, {7}), ("3:5", {3, 4}), ("3:", {3, 4, 5, 6, 7, 8}), (":3", {1, 2}), ("first:1", {1}),
        ("last:2", {7, 8}), ("first:1,last:2", {1, 7, 8}), ("2, 4 ,6:8", {2, 4, 6, 7}), ("first:99", set(range(1, 9))),
        ("last:99", set(range(1, 9))), ("9", set()),
    ],
)  # fmt: skip
def test_layers_are_global_from_1_and_exclude_the_end(text, inside):
    made = recipe(MX, [rule(FP4, layers=text)])
    got = {i for i in range(1, 9) if slots(made.resolve(linear(i, num_layers=8)))["fprop.input"] == FP4}
    assert got == inside
    assert slots(made.resolve(ModuleRole(LINEAR, "fc")))["fprop.input"] == MX  # outside the layer stack


def test_last_layers_need_the_number_of_layers():
    made = recipe(MX, [rule(FP4, layers="last:1")])
    with pytest.raises(RecipeError, match=r"rules\[0\] counts layers from the last; module 'fc'"):
        made.resolve(ModuleRole(LINEAR, "fc", layer=1))
    assert recipe(MX, [rule(FP4, layers="first:1")]).resolve(ModuleRole(LINEAR, "fc", layer=1)).rules == (0,)


def test_experts_are_global_from_0_and_exclude_the_end():
    made = recipe(MX, [rule(FP4, experts="0:4")])
    assert [e for e in range(8) if made.resolve(expert(e)).rules] == [0, 1, 2, 3]
    assert made.resolve(linear()).rules == ()


NAME = "decoder.layers.{}.mlp.linear_fc1"


@pytest.mark.parametrize(
    "pattern, layers",
    [
        ("decoder.layers.2.mlp.linear_fc1", {2}),
        ("*layers.2*", {2}),
        ("*.layers.2.*", {2}),
        ("decoder.layers.2.*", {2}),
        ("*2.mlp.*", {2}),
        ("*.layers.2?.*", {20, 21}),
        ("*.layers.[12].*", {1, 2}),
        ("*.layers.[!12].*", {3}),
        ("*.linear_fc*", {1, 2, 3, 12, 20, 21}),
        ("*", {1, 2, 3, 12, 20, 21}),
        ("layers.2", set()),
        ("*.LAYERS.2.*", set()),
        ("*layers+2*", set()),
        ("*fc", set()),
    ],
)
def test_a_pattern_covers_the_whole_name_and_whole_numbers(pattern, layers):
    made = recipe(MX, [rule(FP4, name=pattern)])
    assert {i for i in (1, 2, 3, 12, 20, 21) if made.resolve(ModuleRole(LINEAR, NAME.format(i))).rules} == layers


def test_steps_are_exact():
    made = recipe(FP4, [rule({"fprop": HP}, steps="9000:"), rule({"wgrad": HP}, steps="10:20,9500")])
    assert made.change_steps() == (10, 20, 9000, 9500, 9501)

    def high(step):
        return {s for s, f in slots(made.resolve(linear(), step=step)).items() if f == HP}

    fprop, wgrad = {"fprop.input", "fprop.weight"}, {"wgrad.grad_output", "wgrad.input"}
    for step, expected in {
        None: set(), 1: set(), 9: set(), 10: wgrad, 19: wgrad, 20: set(), 8999: set(), 9000: fprop, 9499: fprop,
        9500: fprop | wgrad, 9501: fprop, 10**9: fprop,
    }.items():  # fmt: skip
        assert high(step) == expected, step


def test_resolution_changes_only_at_change_steps():
    made = recipe(
        FP4, [rule(HP, steps=":5"), rule({"fprop": MX}, steps="8:12", layers=1), rule({"dgrad": MX}, steps=10)]
    )
    for step in range(2, 20):
        before, now = (made.resolve(linear(), step=s) for s in (step - 1, step))
        assert (before == now) or step in made.change_steps(), step
    assert made.change_steps() == (5, 8, 10, 11, 12)
    assert recipe(FP4, [rule(MX, layers=1)]).change_steps() == ()
    assert recipe(FP4, [rule(MX, steps="1:")]).change_steps() == ()


SOURCES = {"default": ("original", "original"), "high_precision": ("original", "original"), "dequantized": (ROW, ROW)}


FORWARD = (MX, "nvfp4:row_scaled", "fp8_delayed_e4m3")


@pytest.mark.parametrize("mode, forward, top", list(itertools.product(SOURCES, FORWARD, (True, False))))
def test_backward_modes(mode, forward, top):
    """The forward's slots stay, dgrad and wgrad multiply high-precision operands (properties 33 to 35)."""
    table = {"fprop": forward, "dgrad": FP4, "wgrad": {"grad_output": "nvfp4:rht,sr", "input": "nvfp4:rht"}}
    if top:
        quant = recipe(table, backward=mode).resolve(linear())
    else:
        quant = recipe(HP, [rule({**table, "backward": mode}, layers=1)]).resolve(linear())
    plain = recipe(table).resolve(linear())
    for operand in ("input", "weight"):
        row, column, source = quant.quantizer(operand)
        assert str(row) == forward
        assert column == (plain.quantizer(operand).columnwise if mode == "default" else parse_format(HP))
        assert source == SOURCES[mode][0]
    grads = plain.quantizer("grad_output") if mode == "default" else (parse_format(HP), parse_format(HP), "original")
    assert quant.quantizer("grad_output") == grads
    assert quant.backward == mode


def test_backward_can_be_replaced():
    made = recipe(MX).with_backward("dequantized")
    assert made == recipe(MX, backward="dequantized") and made.backward == "dequantized"
    with pytest.raises(ValueError, match="did you mean 'dequantized'"):
        recipe(MX).with_backward("dequantised")


def test_a_high_precision_row_has_no_other_source_than_the_original():
    quant = recipe({"wgrad": FP4, "columnwise_source": ROW}).resolve(linear())
    assert quant.quantizer("input").columnwise_source == "original"
    assert recipe({"fprop": FP4, "columnwise_source": ROW}).resolve(linear()).columnwise_source.input == ROW


def test_lone_rht_across_rules_names_module_and_gemm(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        'version: 1\ndefaults: {wgrad: "nvfp4:rht"}\nrules:\n'
        "- match: {layers: 2}\n  use: {wgrad: {input: mxfp8_e4m3}}\n"
    )
    made = Recipe.load(path)
    assert made.resolve(linear(1)).is_quantized
    with pytest.raises(
        RecipeError, match=r"mine.yaml:4: module 'decoder.layers.1.mlp.linear_fc1': wgrad: rht .*nvfp4:rht"
    ):
        made.resolve(linear(2))
    with pytest.raises(RecipeError, match="wgrad: rht"):
        made.check_matches([linear(1), linear(2)])
    completed = recipe({"wgrad": {"input": "nvfp4:rht"}}, [rule({"wgrad": "nvfp4:rht,sr"}, tensor_type="grad_output")])
    assert completed.resolve(linear()).lone_rht() is None


@pytest.mark.parametrize(
    "row, column, source, derivable",
    [
        (MX, MX, "original", False), (MX, MX, ROW, True), ("mxfp8_e4m3:2d", "mxfp8_e4m3:2d", "original", True),
        ("nvfp4:2d", "nvfp4:2d", "original", True), ("nvfp4:2d,sr", "nvfp4:2d,sr", "original", False),
        ("nvfp4:2d", "mxfp8_e4m3:2d", "original", False), (FP8, FP8, "original", True),
        (FP8, "fp8_current_e5m2", "original", False), ("fp8_delayed_e4m3", "fp8_delayed_e4m3", "original", True),
        ("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "original", False), (FP8, HP, "original", False), (FP8, HP, ROW, True),
        (HP, FP4, "original", True), ("nvfp4:row_scaled", FP4, ROW, True), (FP4, FP4, "original", False),
    ],
)  # fmt: skip
def test_rowwise_gather_only_where_the_column_is_derivable(row, column, source, derivable):
    table = {"fprop": {"weight": row}, "dgrad": {"weight": column}, "columnwise_source": {"weight": source}}
    gather = {"weights": "quantized", "param_gather": "rowwise"}
    if derivable:
        assert recipe(table, **gather).resolve(linear()).columnwise_derivable("weight")
    else:
        with pytest.raises(RecipeError, match="param_gather: rowwise"):
            recipe(table, **gather)
        later = recipe(HP, [rule(table, layers=2)], **gather)
        with pytest.raises(RecipeError, match="'decoder.layers.1.mlp.linear_fc1': param_gather: rowwise"):
            later.resolve(linear(2))
    assert recipe(table, param_gather="both").resolve(linear())


def test_the_output_layer_and_attention_are_left_alone():
    head = ModuleRole(LINEAR, "output_layer", lm_head=True)
    assert not recipe(MX, [rule(FP4, name="*")]).resolve(head).is_quantized
    assert recipe(MX, lm_head=True).resolve(head).is_quantized
    attention = ModuleRole(DPA, "decoder.layers.0.self_attention.core_attention", layer=1)
    quant = recipe(MX, [rule(FP4, name="*")]).resolve(attention)
    for role in attention.operands():
        assert tuple(map(str, quant.quantizer(role.tensor_type))) == (HP, HP, "original")


# --- a recipe against the whole model ---

MODEL = [
    *[
        linear(i, leaf)
        for i in range(1, 5)
        for leaf in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    ],
    *[
        ModuleRole(DPA, f"decoder.layers.{i - 1}.self_attention.core_attention", layer=i, num_layers=4)
        for i in range(1, 5)
    ],
    ModuleRole(LINEAR, "output_layer", lm_head=True),
]
EXPERTS = [ModuleRole(GROUPED_LINEAR, "mlp.experts.linear_fc1", layer=2, num_layers=4, expert=e) for e in range(8)]


@pytest.mark.parametrize(
    "match, words",
    [
        ({"name": "*.linear_fc3"}, ["name '*.linear_fc3'", "did you mean 'linear_fc", "output_layer"]),
        ({"name": "layers.2"}, ["a pattern covers the whole name", "decoder.layers.0"]),
        ({"layers": 5}, ["layers '5'", "1 to 4"]),
        ({"layers": "9:12", "steps": "10:"}, ["layers '9:12'", "1 to 4"]),
        ({"module_type": "grouped_linear"}, ["module_type 'grouped_linear'", "the model has dpa, linear"]),
        ({"experts": "0:4"}, ["experts '0:4'", "no experts"]),
        ({"name": "output_layer", "layers": "last:1"}, ["no module meets name and layers together"]),
        ({"name": "output_layer"}, ["no effect", "output layer", "lm_head: true"]),
        ({"name": "*core_attention"}, ["no effect", "attention", "core_attention"]),
    ],
)
def test_c81_a_rule_that_matches_nothing_is_an_error(match, words, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\nrules:\n" + yaml.safe_dump([rule(FP4, layers=1), rule({"fprop": MX}, **match)]))
    made = Recipe.load(path)
    line = made.rules[1].line
    assert line > made.rules[0].line
    with pytest.raises(RecipeError) as caught:
        made.check_matches(MODEL)
    assert str(caught.value).startswith(f"{path}:{line}: rules[1] ")
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "match, words",
    [
        ({"layers": "first:1,last:1,9"}, "layers '9' of 'first:1,last:1,9', the model's are 1 to 4"),
        ({"layers": "7:9,2,5"}, "layers '7:9', '5' of '7:9,2,5'"),
        ({"experts": "0,40:", "name": "*"}, "experts '40:' of '0,40:', the model's are 0 to 7"),
    ],
)
def test_a_part_of_a_list_beyond_the_model_is_an_error(match, words, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\nrules:\n" + yaml.safe_dump([rule(FP4, layers=1), rule({"fprop": MX}, **match)]))
    made = Recipe.load(path)
    with pytest.raises(RecipeError) as caught:
        made.check_matches([*MODEL, *EXPERTS])
    assert str(caught.value).startswith(f"{path}:{made.rules[1].line}: rules[1] names what the model has not: {words}")


def test_rules_that_match_pass():
    rules = [
        rule(HP, layers="first:1,last:1"), rule(FP4, name="*.linear_fc2"), rule(HP, module_type=DPA),
        rule(HP, name="output_layer"), rule({"fprop": HP}, steps="9000:"), rule({"fprop": FP8}, tensor_type="input"),
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe(MX, rules).check_matches(iter(MODEL))
    with pytest.raises(RecipeError, match="no modules"):
        recipe(MX).check_matches([])


def test_contradictions_at_a_later_step_show_at_once():
    made = recipe({"wgrad": "nvfp4:rht"}, [rule({"wgrad": {"input": HP}}, steps="9000:")])
    assert made.resolve(linear(), step=1)
    with pytest.raises(RecipeError, match="wgrad: rht"):
        made.check_matches(MODEL)


def test_a_rule_that_earlier_ones_always_cover_warns():
    made = recipe(HP, [rule(MX, name="*"), rule(FP4, layers=1)])
    with pytest.warns(RecipeWarning, match=r"rules\[1\] never decides anything"):
        made.check_matches(MODEL)


def test_one_more_rule_in_front():
    made = recipe(MX, [rule(FP4, layers=1)]).with_first_rule({"layers": "first:1"}, HP)
    assert slots(made.resolve(linear(1)))["fprop.input"] == HP and len(made.rules) == 2
    with pytest.raises(RecipeError, match="did you mean 'layers'"):
        made.with_first_rule({"layer": 1}, HP)


def test_rules_whose_steps_come_after_the_last():
    made = recipe(MX, [rule(FP4, steps="5:9"), rule(HP, steps="10:"), rule(HP, steps=":3"), rule(FP8, steps="12,4")])
    (late,) = made.late_rules(9)
    assert "rules[1] never takes effect: its steps are 10:, the run ends with step 9" in late
    assert made.late_rules(10) == [] and len(made.late_rules(4)) == 2
