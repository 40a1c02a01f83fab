"""Every mistake in a recipe is one line with file, line and what would be right."""

import json
import os
import textwrap
import warnings

import pytest

from megatron_hybrid.recipe import Recipe, RecipeError, RecipeWarning

# case: (line of the mistake, text of the file, words of the message)
MISTAKES = {
    "unknown top key": (2, "version: 1\ndefalts: mxfp8_e4m3\n", ["'defalts'", "did you mean 'defaults'"]),
    "line of the key, not of its block": (
        2,
        "version: 1\ndefalts:\n  fprop: mxfp8_e4m3\n",
        ["'defalts'", "did you mean 'defaults'"],
    ),
    "unknown format": (2, "version: 1\ndefaults: mxfp8_e4m4\n", ["'mxfp8_e4m4'", "did you mean 'mxfp8_e4m3'"]),
    "unknown format in a slot": (
        3,
        "version: 1\ndefaults:\n  dgrad: {weight: nvfp5}\n",
        ["'nvfp5'", "did you mean 'nvfp4'"],
    ),
    "unknown option": (3, 'version: 1\ndefaults:\n  fprop: "nvfp4:rhd"\n', ["'rhd'", "did you mean 'rht'"]),
    "option value": (
        2,
        'version: 1\ndefaults: "fp8_delayed_e4m3:history=0"\n',
        ["history='0'", ">= 1"],
    ),
    "a history of any length": (
        2, 'version: 1\ndefaults: "fp8_delayed_e4m3:history=99999999999"\n', ["history='99999999999' must be at most 1048576"],
    ),
    "a margin that leaves nothing": (
        2, 'version: 1\ndefaults: "fp8_delayed_e4m3:margin=19"\n', ["margin=19: every element", "e4m3 has room for 18"],
    ),
    "a margin of E5M2 that leaves nothing": (
        2, 'version: 1\ndefaults: "fp8_delayed_e5m2:margin=99999999999999"\n', ["e5m2 has room for 32"],
    ),
    "eps beyond FP32": (2, 'version: 1\ndefaults: "fp8_block_e4m3:eps=1e39"\n', ["eps='1e39' must be at most 3.4"]),
    "options that exclude each other": (
        2,
        'version: 1\ndefaults: "nvfp4:2d,rht"\n',
        ["2d and rht", "cannot be combined"],
    ),
    "a family without its element": (2, "version: 1\ndefaults: mxfp8\n", ["did you mean 'mxfp8_e4m3'"]),
    "a format like no other": (2, "version: 1\ndefaults: zzz\n", ["unknown format 'zzz'. Valid formats"]),
    "a dtype for a format": (
        2, "version: 1\ndefaults: bf16\n", ["unknown format 'bf16'; not to quantize is 'high_precision'. Valid formats"],
    ),
    "a key like no other": (2, "version: 1\nzzz: 1\n", ["unknown key 'zzz' in the recipe. Valid keys"]),
    "the forward by another name": (2, "version: 1\ndefaults: {fwd: nvfp4}\n", ["the forward's gemm is fprop. Valid keys"]),
    "the backward by another name": (
        4, "version: 1\nrules:\n- match: {name: a}\n  use: {bwd: nvfp4}\n", ["dgrad and wgrad. Valid keys"],
    ),
    "version in quotes": (1, 'version: "1"\n', ["version must be 1", "a string '1'"]),
    "unknown gemm": (3, "version: 1\ndefaults:\n  drgad: nvfp4\n", ["'drgad'", "did you mean 'dgrad'"]),
    "unknown operand": (
        4,
        "version: 1\ndefaults:\n  dgrad:\n    wieght: nvfp4\n",
        ["'wieght'", "did you mean 'weight'", "grad_output"],
    ),
    "operand of another gemm": (
        3,
        "version: 1\ndefaults:\n  fprop: {grad_output: nvfp4}\n",
        ["'grad_output'", "input, weight"],
    ),
    "unknown source": (
        3,
        "version: 1\ndefaults:\n  columnwise_source: {weight: rowwise}\n",
        ["'rowwise'", "did you mean 'rowwise_dequantized'"],
    ),
    "source of an unknown operand": (
        3,
        "version: 1\ndefaults:\n  columnwise_source: {dy: original}\n",
        ["'dy'", "grad_output"],
    ),
    "accumulate": (2, "version: 1\naccumulate: {fprop: slow}\n", ["'slow'", "fast, full"]),
    "accumulate in the wrong place": (
        3,
        "version: 1\ndefaults:\n  accumulate: {fprop: fast}\n",
        ["'accumulate'", "top level"],
    ),
    "gemm in the wrong place": (2, "version: 1\nfprop: nvfp4\n", ["'fprop'", "under defaults"]),
    "backward": (2, "version: 1\nbackward: dequantised\n", ["'dequantised'", "did you mean 'dequantized'"]),
    "weights": (2, "version: 1\nweights: quantised\n", ["'quantised'", "did you mean 'quantized'"]),
    "param_gather": (2, "version: 1\nparam_gather: row\n", ["'row'", "high_precision, rowwise, both"]),
    "lm_head is no word": (2, "version: 1\nlm_head: quantized\n", ["lm_head", "a boolean", "found a string"]),
    "name is no string": (2, "version: 1\nname: 17\n", ["name must be a string", "found a number"]),
    "missing version": (1, "name: mine\ndefaults: nvfp4\n", ["no version", "version: 1"]),
    "other version": (1, "version: 2\n", ["version must be 1", "a number '2'"]),
    "version is a string": (1, 'version: "1"\n', ["version must be 1"]),
    "empty file": (1, "", ["the file is empty"]),
    "only comments": (1, "# nothing\n\n", ["the file is empty"]),
    "a list": (1, "- version: 1\n", ["must be a mapping", "found a list"]),
    "a word": (1, "mxfp8\n", ["must be a mapping", "found a string"]),
    "empty value": (2, "version: 1\ndefaults:\n", ["defaults", "found nothing"]),
    "list for a format": (3, "version: 1\ndefaults:\n  fprop: [nvfp4, nvfp4]\n", ["defaults.fprop", "found a list"]),
    "number for a format": (2, "version: 1\ndefaults: 8\n", ["a format such as", "found a number"]),
    "duplicate key": (3, "version: 1\ndefaults: nvfp4\ndefaults: mxfp8_e4m3\n", ["'defaults'", "twice", "line 2"]),
    "duplicate nested key": (
        4,
        "version: 1\ndefaults:\n  fprop: nvfp4\n  fprop: nvfp4\n",
        ["'fprop'", "twice", "line 3"],
    ),
    "syntax": (2, "version: 1\ndefaults: {fprop: nvfp4\n", ["not valid YAML"]),
    "tab": (3, "version: 1\ndefaults:\n\tfprop: nvfp4\n", ["not valid YAML", "\\t"]),
    "two documents": (2, "version: 1\n---\nversion: 1\n", ["not valid YAML", "document"]),
    "alias to itself": (2, "version: 1\ndefaults: &a {fprop: *a}\n", ["contains itself"]),
    "control character": (2, "version: 1\nname: a\x01b\n", ["not valid YAML"]),
    "escape sequence in a name": (2, 'version: 1\nname: "a\\e[31mb"\n', ["name", "control characters"]),
    "lone surrogate in a name": (2, 'version: 1\nname: "\\ud800"\n', ["name", "control characters"]),
    "tag on a mapping": (2, "version: 1\ndefaults: !mine {fprop: nvfp4}\n", ["defaults", "mapping as !mine"]),
    "aliases that stand for billions": (
        1,
        "rules: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join(10 * [f'*a{i - 1}'])}]\n" for i in range(1, 10)),
        ["more than 20000 values"],
    ),
    "deep nesting": (1, "rules: " + "[" * 3000 + "]" * 3000, ["nested more than 50 deep"]),
    "nesting": (1, "rules: " + "[" * 60 + "]" * 60, ["nested more than 50 deep"]),
    "megabytes": (1, "#" * 1_000_001, ["1000001 bytes are no recipe"]),
    "foreign tag": (2, "version: 1\nname: !!python/name:os.system\n", ["name", "python/name"]),
    "lone rht in both slots of a gemm": (
        3,
        'version: 1\ndefaults:\n  wgrad: {grad_output: nvfp4, input: "nvfp4:rht"}\n',
        ["wgrad: rht", "grad_output nvfp4", "input nvfp4:rht"],
    ),
    "lone rht beside an unset slot": (
        2,
        'version: 1\ndefaults:\n  wgrad: {input: "nvfp4:rht"}\n',
        ["wgrad: rht", "grad_output high_precision"],
    ),
    "rowwise gather of an underivable column": (
        3,
        "version: 1\ndefaults: mxfp8_e4m3\nparam_gather: rowwise\n",
        ["param_gather", "mxfp8_e4m3", "rowwise_dequantized", "both"],
    ),
}


def rule(text, before="version: 1\nrules:\n"):
    return before + textwrap.indent(textwrap.dedent(text), "  ")


# the rule starts in line 3
RULE_MISTAKES = {
    "unknown rule key": (3, "- matches: {name: a}\n  use: nvfp4\n", ["'matches'", "did you mean 'match'"]),
    "no use": (3, "- match: {name: a}\n", ["rules[0] has no 'use'"]),
    "no match": (3, "- use: nvfp4\n", ["rules[0] has no 'match'"]),
    "a rule that is a word": (3, "- nvfp4\n", ["rules[0] must be a mapping"]),
    "empty match": (3, "- match: {}\n  use: nvfp4\n", ["no condition", "defaults"]),
    "empty use": (4, "- match: {name: a}\n  use: {}\n", ["rules[0].use sets nothing"]),
    "unknown condition": (3, "- match: {layer: 7}\n  use: nvfp4\n", ["'layer'", "did you mean 'layers'"]),
    "unknown use key": (4, "- match: {name: a}\n  use: {frop: nvfp4}\n", ["'frop'", "did you mean 'fprop'"]),
    "use of the whole recipe's": (
        4,
        "- match: {name: a}\n  use: {weights: quantized}\n",
        ["'weights'", "whole recipe"],
    ),
    "module type": (3, "- match: {module_type: group_linear}\n  use: nvfp4\n", ["did you mean 'grouped_linear'"]),
    "tensor type": (3, "- match: {tensor_type: grad}\n  use: nvfp4\n", ["'grad'", "grad_output"]),
    "tensor of another module": (
        3,
        "- match: {module_type: linear, tensor_type: qkv}\n  use: nvfp4\n",
        ["no tensor 'qkv'"],
    ),
    "layers misspelt": (3, '- match: {layers: "frist:1"}\n  use: nvfp4\n', ["'frist:1'", "did you mean 'first'"]),
    "layer 0": (3, "- match: {layers: 0}\n  use: nvfp4\n", ["numbered from 1"]),
    "layers from 0": (3, '- match: {layers: "0:4"}\n  use: nvfp4\n', ["numbered from 1"]),
    "empty layers": (3, '- match: {layers: "5:5"}\n  use: nvfp4\n', ["holds nothing", "excludes b"]),
    "first:0": (3, '- match: {layers: "first:0"}\n  use: nvfp4\n', ["holds nothing"]),
    "negative layer": (3, "- match: {layers: -1}\n  use: nvfp4\n", ["'-1'", "not a range"]),
    "layers is a list": (3, "- match: {layers: [1, 2]}\n  use: nvfp4\n", ["in quotes", "found a list"]),
    "steps without quotes": (4, "- match:\n    steps: {9000: }\n  use: nvfp4\n", ["in quotes", "found a mapping"]),
    "steps from the last": (3, '- match: {steps: "last:100"}\n  use: nvfp4\n', ["'last:100'", "not a range"]),
    "steps from 0": (3, '- match: {steps: "0:100"}\n  use: nvfp4\n', ["numbered from 1"]),
    "no steps": (3, '- match: {steps: ":"}\n  use: nvfp4\n', ["not a range"]),
    "until the first step": (3, '- match: {steps: ":1"}\n  use: nvfp4\n', ["holds nothing"]),
    "range without quotes": (3, "- match: {steps: 9000:}\n  use: nvfp4\n", ["not valid YAML", "need quotes"]),
    "pattern without quotes": (3, "- match: {name: *.linear_fc2}\n  use: nvfp4\n", ["not valid YAML", "need quotes"]),
    "comma without quotes": (3, "- match: {layers: first:1,last:1}\n  use: nvfp4\n", ["'last:1'", "need quotes"]),
    "experts": (3, '- match: {experts: "four"}\n  use: nvfp4\n', ["'four'", "not a range"]),
    "name is a number": (3, "- match: {name: 7}\n  use: nvfp4\n", ["name must be a string"]),
    "name is no pattern": (3, '- match: {name: "layers.[z-a].*"}\n  use: nvfp4\n', ["not a pattern"]),
    "lone rht in a rule": (
        4,
        '- match: {name: a}\n  use: {wgrad: {grad_output: "nvfp4:rht,sr", input: mxfp8_e4m3}}\n',
        ["wgrad: rht", "mxfp8_e4m3"],
    ),
    "other operand than the match": (
        4,
        "- match: {tensor_type: weight}\n  use: {fprop: {input: nvfp4}}\n",
        ["'input'", "matches 'weight' only"],
    ),
    "gemm without the operand": (
        4,
        "- match: {tensor_type: weight}\n  use: {wgrad: nvfp4}\n",
        ["wgrad does not read 'weight'"],
    ),
    "accumulate of a tensor": (
        4,
        "- match: {tensor_type: weight}\n  use: {accumulate: full}\n",
        ["accumulate", "matches 'weight' only"],
    ),
    "quantized attention": (
        4,
        "- match: {module_type: dpa}\n  use: mxfp8_e4m3\n",
        ["attention", "mxfp8_e4m3", "no backend"],
    ),
    "quantized attention tensor": (
        4,
        "- match: {tensor_type: do}\n  use: {dgrad: nvfp4}\n",
        ["attention", "no backend"],
    ),
}
ALL = MISTAKES | {name: (line, rule(text), words) for name, (line, text, words) in RULE_MISTAKES.items()}


@pytest.mark.parametrize("case", ALL)
def test_a_mistake_is_one_line_with_file_and_line(case, tmp_path):
    line, text, words = ALL[case]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        Recipe.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: "), message
    assert (caught.value.file, caught.value.line) == (str(path), line)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_the_first_valid_rules_are_not_blamed(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(rule("- match: {layers: 1}\n  use: nvfp4\n- match: {layers: 2}\n  use: nvfp\n"))
    with pytest.raises(RecipeError, match="mine.yaml:6: .*'nvfp'"):
        Recipe.load(path)


JSON_MISTAKES = {
    "key": (3, '{\n\t"version": 1,\n\t"defalts": "nvfp4"\n}\n', "did you mean 'defaults'"),
    "format": (4, '{\n\t"version": 1,\n\t"defaults":\n\t\t{"fprop": "nvfp5"}\n}\n', "did you mean 'nvfp4'"),
    "twice": (3, '{"version": 1,\n "name": "a",\n "name": "b"}', "twice"),
    "syntax": (2, '{"version": 1,\n "name": }', "not valid JSON"),
    "yaml in json": (1, "version: 1\n", "not valid JSON"),
    "empty": (1, " \n", "the file is empty"),
    "deep": (1, 100_000 * '{"a":', "nested more than 50 deep"),
}


@pytest.mark.parametrize("case", JSON_MISTAKES)
def test_json_says_the_line_too(case, tmp_path):
    line, text, words = JSON_MISTAKES[case]
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        Recipe.load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ") and words in str(caught.value)


@pytest.mark.parametrize(
    "data, words",
    [
        ({"version": 1, "defaults": {"fprop": {"inptu": "nvfp4"}}}, ["defaults.fprop", "did you mean 'input'"]),
        ({"version": 1, "rules": [{"match": {"name": "a"}, "use": "nvfp"}]}, ["rules[0].use", "did you mean 'nvfp4'"]),
        ({"version": 1, "defaults": None}, ["defaults", "found nothing"]),
        ({"version": 1, "defaults": object()}, ["defaults", "object"]),
        ({"version": True}, ["version must be 1"]),
        ({}, ["no version"]),
        ([], ["must be a mapping"]),
        ({"version": 1, 7: "x"}, ["unknown key '7'"]),
    ],
)
def test_a_dict_has_paths_instead_of_lines(data, words):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(data)
    assert caught.value.file is None and caught.value.line is None
    for word in words:
        assert word in str(caught.value)


def test_a_file_by_its_bare_name_and_a_shipped_recipe_with_a_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("version: 1\n")
    with pytest.raises(RecipeError, match="unknown recipe 'mine'; did you mean the file 'mine.yaml'"):
        Recipe.load("mine")
    for name in ("mxfp8.yaml", "mxfp8.yml"):
        with pytest.raises(RecipeError, match=f"{name}: no such recipe file; the shipped recipe is 'mxfp8', without a suffix"):
            Recipe.load(name)
    (tmp_path / "mxfp8.yaml").write_text("version: 1\nname: own\n")
    assert Recipe.load("mxfp8.yaml").name == "own"


def test_unknown_names_and_files(tmp_path):
    with pytest.raises(RecipeError, match="unknown recipe 'mxfp9'.*did you mean 'mxfp8'.*fp8_block"):
        Recipe.load("mxfp9")
    (tmp_path / "mine.yaml").write_text("version: 1\n")
    with pytest.raises(RecipeError, match="no such recipe file; did you mean 'mine.yaml'"):
        Recipe.load(tmp_path / "mime.yaml")
    with pytest.raises(RecipeError, match="ends in .yaml, .yml, .json"):
        Recipe.load(tmp_path / "mine.toml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.load(tmp_path / "folder.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"version: 1\nname: caf\xe9\n")
    with pytest.raises(RecipeError, match="latin.yaml:2: not a text file in UTF-8"):
        Recipe.load(tmp_path / "latin.yaml")
    (tmp_path / "link.yaml").symlink_to("gone.yaml")
    with pytest.raises(RecipeError, match="link.yaml: a link to gone.yaml, which does not exist"):
        Recipe.load(tmp_path / "link.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")  # nothing would ever come out
    (tmp_path / "zeros.yaml").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        with pytest.raises(RecipeError, match=f"{name}.yaml: not a regular file"):
            Recipe.load(tmp_path / f"{name}.yaml")


@pytest.mark.parametrize("before", ["defaults: ", "defaults: nvfp4\nrules:\n- match: {layers: 1}\n  use: "])
def test_c71_mx_gradients_in_e5m2_warn(before, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"version: 1\n{before}{{wgrad: {{grad_output: mxfp8_e5m2}}}}\n")
    with pytest.warns(RecipeWarning, match=r"mine.yaml:\d+: wgrad.grad_output is mxfp8_e5m2.*diverge"):
        Recipe.load(path)
    path.write_text("version: 1\ndefaults: {fprop: mxfp8_e5m2, wgrad: {grad_output: fp8_current_e5m2}}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Recipe.load(path)


def test_json_and_yaml_give_the_same_recipe(tmp_path):
    recipe = Recipe.load("nvfp4")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(recipe.to_dict(), indent="\t"))
    assert Recipe.load(path) == recipe
