"""Every shipped recipe does exactly what the table in its own comment says (property 31)."""

import re
from pathlib import Path

import pytest

from megatron_hybrid.quantizer_spec import GEMMS
from megatron_hybrid.recipe import Recipe, list_recipes
from megatron_hybrid.roles import DPA, GROUPED_LINEAR, LINEAR, ModuleRole

FOLDER = Path(__file__).parents[2] / "configs" / "recipes"
NAMES = [
    "bf16", "fp8_block", "fp8_current", "fp8_delayed", "fp8_rowwise", "hp_fprop_mxfp8_bwd", "mxfp8",
    "mxfp8_fprop_hp_bwd", "mxfp8_fprop_nvfp4_bwd", "nvfp4", "nvfp4_fprop_mxfp8_bwd", "nvfp4_late_bf16_fprop",
    "nvfp4_rowscaled_fprop_mxfp8_bwd",
]  # fmt: skip
LAYERS = 6


def comment_table(name):
    """[(selector words, {gemm: (cell A, cell B)})] in the order of the comment; the first that applies holds."""
    groups = []
    for line in (FOLDER / f"{name}.yaml").read_text().splitlines():
        cells = [cell.strip() for cell in line.lstrip("# ").strip("|").split("|")]
        if not line.startswith("# |") or cells[0] == "modules" or set(cells[0]) == {"-"}:
            continue
        if cells[0]:
            groups.append((cells[0].split(", "), {}))
        groups[-1][1][cells[1]] = (cells[2], cells[3])
    return groups


def applies(word, module, step):
    """Selector words: a module type, 'layers first:N,last:N' or 'steps N:'."""
    if word in (LINEAR, GROUPED_LINEAR):
        return None
    if word.startswith("steps "):
        return step is not None and step >= int(re.fullmatch(r"steps (\d+):", word)[1])
    first, last = re.fullmatch(r"layers first:(\d+),last:(\d+)", word).groups()
    return module.layer <= int(first) or module.layer > LAYERS - int(last)


def row_for(groups, module, step):
    for words, gemms in groups:
        types = [w for w in words if w in (LINEAR, GROUPED_LINEAR)] or [LINEAR, GROUPED_LINEAR]
        conditions = [applies(w, module, step) for w in words]
        if module.module_type in types and False not in conditions:
            return gemms
    raise AssertionError(f"the comment says nothing of {module} at step {step}")


def cells_of(quant):
    """The resolution in the words of the comment; both directions of 'from row' operands are columnwise ones."""

    def cell(gemm, operand):
        columnwise = gemm != "fprop" and (gemm, operand) != ("dgrad", "grad_output")
        derived = columnwise and quant.columnwise_source[operand] == "rowwise_dequantized"
        return f"{operand} {quant.slot(gemm, operand)}{' from row' if derived else ''}"

    return {gemm: tuple(cell(gemm, operand) for operand in operands) for gemm, operands in GEMMS.items()}


def test_the_list_is_complete():
    assert [name for name, _ in list_recipes()] == NAMES == sorted(p.stem for p in FOLDER.iterdir())
    for name, description in list_recipes():
        assert description and "\n" not in description and len(description) <= 110, name
        assert Recipe.load(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_p31_a_recipe_resolves_to_its_own_comment(name):
    recipe, groups = Recipe.load(name), comment_table(name)
    assert groups and all(list(gemms) == list(GEMMS) for _, gemms in groups)
    steps = [None, 1, *(s + d for s in recipe.change_steps() for d in (-1, 0, 1)), 10**6]
    seen = []
    for kind, expert in ((LINEAR, None), (GROUPED_LINEAR, None), (GROUPED_LINEAR, 3)):
        for layer in range(1, LAYERS + 1):
            module = ModuleRole(kind, f"decoder.layers.{layer - 1}.mlp.fc", layer, LAYERS, expert)
            for step in steps:
                expected = row_for(groups, module, step)
                assert cells_of(recipe.resolve(module, step=step)) == expected, (module, step)
                seen.append(id(expected))
    assert set(seen) == {id(gemms) for _, gemms in groups}, "a row of the comment that is never true"
    for module in (
        ModuleRole(DPA, "attn", layer=2, num_layers=LAYERS),
        ModuleRole(LINEAR, "output_layer", lm_head=True),
    ):
        assert not recipe.resolve(module, step=1).is_quantized


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_round_trips(name):
    recipe = Recipe.load(name)
    again = Recipe.from_dict(recipe.to_dict())
    assert again == recipe and again.fingerprint == recipe.fingerprint and again.to_dict() == recipe.to_dict()
    assert recipe == Recipe.load(FOLDER / f"{name}.yaml")


def test_shipped_recipes_differ_in_what_they_do():
    assert len({Recipe.load(name).fingerprint for name in NAMES}) == len(NAMES)


def test_every_comment_says_where_it_was_published_or_that_it_was_not():
    for name in NAMES:
        text = (FOLDER / f"{name}.yaml").read_text()
        assert name == "bf16" or "Published:" in text or "no published training run" in text, name
