"""Recipes as files and data: where they are found, round trips, fingerprints, what importing costs."""

import copy
import dataclasses
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from megatron_hybrid.recipe import Recipe, RecipeError

REPO = Path(__file__).parents[2]

# every key of the grammar (the example of the design, with the rules' other conditions)
FULL = """
version: 1
name: everything
description: one of each
defaults:
  fprop: mxfp8_e4m3
  dgrad: {grad_output: "nvfp4:sr", weight: nvfp4}
  wgrad: {grad_output: "nvfp4:rht,sr", input: "nvfp4:rht"}
  columnwise_source: {weight: rowwise_dequantized}
accumulate: {fprop: fast, dgrad: full, wgrad: full}
backward: default
weights: quantized
lm_head: true
dispatch: quantized
param_gather: rowwise
master_cast: param_dtype
rules:
  - match: {layers: "first:1,last:2"}
    use: high_precision
  - match: {name: "*.linear_fc2", module_type: grouped_linear, tensor_type: weight, experts: "0:4", steps: 100:200}
    use: {fprop: nvfp4, columnwise_source: original}
  - match: {steps: "9000:"}
    use: {fprop: high_precision, backward: dequantized, accumulate: {dgrad: fast}}
"""


@pytest.fixture
def full(tmp_path):
    path = tmp_path / "everything.yaml"
    path.write_text(FULL)
    return Recipe.load(path)


def test_every_key_arrives(full):
    assert (full.name, full.description, full.version) == ("everything", "one of each", 1)
    assert (full.weights, full.dispatch, full.param_gather) == ("quantized", "quantized", "rowwise")
    assert (full.master_cast, full.lm_head, full.backward) == ("param_dtype", True, "default")
    data = full.to_dict()
    assert data["defaults"]["wgrad"] == {"grad_output": "nvfp4:rht,sr", "input": "nvfp4:rht"}
    assert data["rules"][1]["match"] == {
        "name": "*.linear_fc2", "module_type": "grouped_linear", "tensor_type": "weight", "experts": "0:4",
        "steps": "100:200",
    }  # fmt: skip
    assert data["rules"][1]["use"] == {"fprop": {"weight": "nvfp4"}, "columnwise_source": {"weight": "original"}}


def test_round_trips(full, tmp_path):
    assert Recipe.from_dict(full.to_dict()) == full == copy.deepcopy(full) == pickle.loads(pickle.dumps(full))
    assert hash(Recipe.from_dict(full.to_dict())) == hash(full)
    path = tmp_path / "again.yml"
    path.write_text(yaml.safe_dump(full.to_dict()))
    assert Recipe.load(path) == full


def test_a_recipe_is_frozen(full):
    for field in dataclasses.fields(full):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(full, field.name, None)
    full.to_dict()["rules"].clear()
    full.to_dict()["defaults"]["fprop"]["input"] = "nvfp4"
    assert len(full.to_dict()["rules"]) == 3 and full.to_dict()["defaults"]["fprop"]["input"] == "mxfp8_e4m3"


def test_the_name_is_the_file_s_unless_given(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\n")
    assert Recipe.load(str(path)).name == "mine"
    assert Recipe.from_dict({"version": 1}).name == "unnamed"


# --- fingerprints ---


def test_the_fingerprint_is_stable():
    """Checkpoints hold it: this literal changes only together with what recipes mean."""
    assert Recipe.load("mxfp8").fingerprint == "c0bf86b7d175987eb4b1dacee8485e568e9a764a9c4374854af76d6dbc51576d"


def test_the_fingerprint_is_about_meaning(tmp_path):
    def fingerprint(text):
        path = tmp_path / "mine.yaml"
        path.write_text(textwrap.dedent(text))
        return Recipe.load(path).fingerprint

    base = fingerprint('version: 1\ndefaults: {fprop: "nvfp4:rht,sr"}\nrules: [{match: {layers: "1, 2"}, use: nvfp4}]')
    same = """
        # a comment
        rules:
          - use: {wgrad: nvfp4, dgrad: nvfp4, fprop: {weight: nvfp4, input: nvfp4}}
            match: {layers: "1,2"}
        description: other words
        defaults:
          fprop: {weight: "nvfp4: sr, rht", input: "nvfp4:rht,sr"}
        accumulate: {fprop: fast}
        name: other
        version: 1
        """
    assert fingerprint(same) == base
    assert (
        fingerprint('version: 1\ndefaults: {fprop: "nvfp4:rht,sr"}\nrules: [{match: {layers: "1,3"}, use: nvfp4}]')
        != base
    )
    assert (
        fingerprint('version: 1\ndefaults: {fprop: "nvfp4:rht"}\nrules: [{match: {layers: "1,2"}, use: nvfp4}]') != base
    )


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "high_precision"}, {"lm_head": False}, {"dispatch": "high_precision"}, {"param_gather": "both"},
        {"master_cast": "fp32"}, {"backward": "dequantized"}, {"accumulate": {"fprop": "full"}}, {"rules": []},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_every_field_is_in_the_fingerprint(full, change):
    other = Recipe.from_dict({**full.to_dict(), **change})
    assert other.fingerprint != full.fingerprint and other != full


def test_the_order_of_rules_is_in_the_fingerprint(full):
    data = full.to_dict()
    data["rules"].reverse()
    assert Recipe.from_dict(data).fingerprint != full.fingerprint


# --- places ---


def python(code, cwd):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_recipes_are_found_from_any_folder(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(REPO)!r});"
        "from megatron_hybrid.recipe import *; print(len(list_recipes()))"
    )
    assert python(code, tmp_path).strip() == str(len(list((REPO / "configs" / "recipes").glob("*.yaml"))))


def test_recipes_are_found_in_an_installed_package(tmp_path):
    package = tmp_path / "megatron_hybrid"
    package.mkdir()
    (package / "__init__.py").touch()
    for source in ("formats", "roles", "quantizer_spec", "recipe", "recipe_grammar", "recipe_rules", "recipe_source"):
        shutil.copy(REPO / "megatron_hybrid" / f"{source}.py", package)
    code = "from megatron_hybrid.recipe import *; print(Recipe.load('nvfp4').file, len(list_recipes()))"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        python(code, tmp_path)
    assert "the shipped recipes are missing" in caught.value.stderr
    shutil.copytree(REPO / "configs" / "recipes", package / "configs" / "recipes")
    file, count = python(code, tmp_path).split()
    assert Path(file) == package / "configs" / "recipes" / "nvfp4.yaml" and int(count) > 10


def test_reading_a_recipe_needs_neither_torch_nor_megatron():
    code = (
        "import sys; from megatron_hybrid.recipe import Recipe; Recipe.load('nvfp4').fingerprint;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron', 'numpy')])"
    )
    assert python(code, REPO).strip() == "[]"


def test_a_shipped_name_wins_over_a_file_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "bf16").write_text("version: 1\ndefaults: nvfp4\n")
    monkeypatch.chdir(tmp_path)
    assert not Recipe.load("bf16").to_dict()["rules"] and Recipe.load("bf16").description
    with pytest.raises(RecipeError, match="ends in"):
        Recipe.load(tmp_path / "bf16")


def test_the_examples_of_the_reference_are_recipes(tmp_path):
    blocks = re.findall(r"^```yaml\n(.*?)^```", (REPO / "docs" / "recipes.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        (tmp_path / "example.yaml").write_text(block)
        assert Recipe.load(tmp_path / "example.yaml").rules
