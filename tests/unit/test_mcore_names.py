"""Names and roles of a model's linears, from the configuration alone."""

from types import SimpleNamespace

import pytest

from megatron_hybrid.mcore.modules import enumerate_modules, layer_module_name, linear_role, output_layer_role
from megatron_hybrid.recipe import Recipe


def test_every_module_once_in_order():
    roles = enumerate_modules(SimpleNamespace(num_layers=3))
    names = [role.name for role in roles]
    assert len(names) == len(set(names)) == 3 * 5 + 1
    assert names[:5] == [
        "decoder.layers.0.self_attention.linear_qkv",
        "decoder.layers.0.self_attention.core_attention",
        "decoder.layers.0.self_attention.linear_proj",
        "decoder.layers.0.mlp.linear_fc1",
        "decoder.layers.0.mlp.linear_fc2",
    ]
    assert {role.layer for role in roles[5:10]} == {2} and {role.num_layers for role in roles} == {3}
    assert roles[-1] == output_layer_role(3) and roles[-1].lm_head


@pytest.mark.parametrize("local,layer", [(0, 1), (0, 13), (11, 24)])
def test_paths_of_a_pipeline_stage_get_global_names(local, layer):
    role = linear_role(f"decoder.layers.{local}.mlp.linear_fc2", layer, 24)
    assert role.name == layer_module_name(layer, "mlp.linear_fc2") == f"decoder.layers.{layer - 1}.mlp.linear_fc2"
    assert role in enumerate_modules(SimpleNamespace(num_layers=24))


def test_output_layer():
    assert linear_role("output_layer", None, 4) == output_layer_role(4)


def test_rules_by_layer_reach_the_global_layer_only():
    recipe = Recipe.load("mxfp8").with_first_rule({"layers": "first:1,last:1"}, "high_precision")
    roles = [role for role in enumerate_modules(SimpleNamespace(num_layers=4)) if role.module_type == "linear"]
    left_alone = {role.layer for role in roles if not recipe.resolve(role).is_quantized}
    assert left_alone == {1, 4, None}  # None: the output layer


def test_layers_of_a_hybrid_pattern():
    """A symbol a layer, whatever the pipeline's bars; what a recipe cannot reach is refused by name."""
    sizes = dict(num_layers=5, num_moe_experts=2, moe_shared_expert_intermediate_size=None, moe_layer_freq=1)
    roles = enumerate_modules(SimpleNamespace(**sizes, hybrid_layer_pattern="*-|*E-"))
    found = [(role.layer, role.name.split(".", 3)[-1], role.expert) for role in roles if role.module_type != "dpa"]
    assert found == [
        (1, "self_attention.linear_qkv", None), (1, "self_attention.linear_proj", None),
        (2, "mlp.linear_fc1", None), (2, "mlp.linear_fc2", None),
        (3, "self_attention.linear_qkv", None), (3, "self_attention.linear_proj", None),
        *((4, f"mlp.experts.linear_fc{n}", expert) for n in (1, 2) for expert in range(2)),
        (5, "mlp.linear_fc1", None), (5, "mlp.linear_fc2", None), (None, "output_layer", None),
    ]  # fmt: skip
    for pattern, words in (("M*-", "layers M are not supported"), ("*E", "without --num-experts")):
        with pytest.raises(ValueError, match=words):
            enumerate_modules(SimpleNamespace(num_layers=2, num_moe_experts=None, hybrid_layer_pattern=pattern))
