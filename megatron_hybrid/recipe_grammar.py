"""The grammar of a recipe: nodes to fields of :class:`~megatron_hybrid.recipe.Recipe`, and back to plain dicts.

docs/recipes.md is the reference. Every function here raises ``RecipeError`` that names the value, where it stands
and what would be right.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable

from .formats import Format, parse_format
from .quantizer_spec import ACCUMULATE, BACKWARD, COLUMNWISE_SOURCES, DEFAULT_SETTINGS, GEMMS, SLOTS
from .recipe_rules import Match, Ranges, Rule, Settings, name_pattern, parse_ranges
from .recipe_source import Node, RecipeWarning
from .roles import DPA, MODULE_TYPES, OPERANDS, TENSOR_TYPES

VERSION = 1
QUANTIZED = "quantized"

# top-level choices; the first is the default
CHOICES = {
    "weights": ("high_precision", QUANTIZED),
    "dispatch": ("high_precision", QUANTIZED),
    "param_gather": ("high_precision", "rowwise", "both"),
    "master_cast": ("fp32", "param_dtype"),
}
DEFAULTS_KEYS = (*GEMMS, "columnwise_source")
USE_KEYS = (*DEFAULTS_KEYS, "accumulate", "backward")
MATCH_KEYS = tuple(Match.__dataclass_fields__)
TOP_KEYS = (
    *("version", "name", "description", "defaults", "accumulate", "backward"),
    *("weights", "lm_head", "dispatch", "param_gather", "master_cast", "rules"),
)
# what others call the gemms
_FORWARD, _BACKWARD = "; the forward's gemm is fprop.", "; the backward's gemms are dgrad and wgrad."
_OTHER_NAMES = dict.fromkeys(("fwd", "forward"), _FORWARD) | dict.fromkeys(("bwd", "bprop"), _BACKWARD)
_TOP_HINTS = {key: "; it belongs under defaults or under a rule's use." for key in DEFAULTS_KEYS}
_DEFAULTS_HINTS = {key: "; it belongs at the top level of the recipe." for key in TOP_KEYS} | _OTHER_NAMES
_USE_HINTS = {key: "; it holds for the whole recipe, not for a rule." for key in (*CHOICES, "lm_head")} | _OTHER_NAMES


def read_format(node: Node) -> Format:
    if not isinstance(node.value, str):
        raise node.error(f"{node.path} must be a format such as mxfp8_e4m3, found {node.kind}")
    try:
        fmt = parse_format(node.value)
    except ValueError as error:
        raise node.error(str(error)) from None
    return fmt


def _one_of(words: tuple[str, ...]) -> Callable[[Node], str]:
    return lambda node: node.choice(words)


# what each table of settings is divided into, and how one value is read
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Node], object]]] = {
    **{gemm: (operands, read_format) for gemm, operands in GEMMS.items()},
    "columnwise_source": (OPERANDS, _one_of(COLUMNWISE_SOURCES)),
    "accumulate": (tuple(GEMMS), _one_of(ACCUMULATE)),
}


def read_settings(node: Node, keys: tuple[str, ...], hints: dict[str, str]) -> dict[str, object]:
    """Settings by flat key from a scalar (one format for all six slots) or from a mapping of tables."""
    if node.is_scalar:
        return dict.fromkeys(SLOTS, read_format(node))
    node.expect(dict, "{fprop: mxfp8_e4m3}").expect_keys(keys, hints)
    settings: dict[str, object] = {}
    for key, child in node.items():
        if key == "backward":
            settings[key] = child.choice(BACKWARD)
        else:
            settings.update(_read_table(key, child))
    return settings


def _read_table(key: str, node: Node) -> dict[str, object]:
    """One table, such as ``dgrad``: a scalar holds for all its parts."""
    parts, read = TABLES[key]
    if node.is_scalar:
        value = read(node)
        return {f"{key}.{part}": value for part in parts}
    node.expect(dict, f"{{{parts[0]}: ...}}").expect_keys(parts)
    return {f"{key}.{part}": read(child) for part, child in node.items()}


def _warn_mx_gradients(node: Node, settings: dict[str, object]) -> None:
    for slot in ("dgrad.grad_output", "wgrad.grad_output"):
        fmt = settings.get(slot)
        if fmt is not None and fmt.scale == "e8m0" and fmt.element == "e5m2":
            warnings.warn(
                f"{node.where()}: {slot} is {fmt}: MX gradients in E5M2 are known to diverge; mxfp8_e4m3 is right",
                RecipeWarning,
                stacklevel=2,
            )


def _refuse_lone_rht(node: Node, settings: dict[str, object]) -> None:
    """Both operands of a gemm are set here and only one has the Hadamard transform."""
    for gemm, operands in GEMMS.items():
        formats = [settings.get(f"{gemm}.{operand}") for operand in operands]
        if None not in formats and formats[0].rht != formats[1].rht:
            raise node.error(lone_rht_message(gemm, *formats))


def lone_rht_message(gemm: str, a: Format, b: Format) -> str:
    left, right = GEMMS[gemm]
    return f"{gemm}: rht must be on both operands or on neither, found {left} {a} and {right} {b}"


# --- rules ---


def _read_name(node: Node) -> str:
    glob = node.expect(str, '"*.linear_fc2"').value
    try:
        name_pattern(glob)
    except re.error as error:
        raise node.error(f"name {glob!r} is not a pattern: {error}") from None
    return glob


def _read_ranges(what: str, lowest: int, edges: bool = False) -> Callable[[Node], Ranges]:
    def read(node: Node) -> Ranges:
        if not node.is_scalar or not node.text:
            raise node.error(f'{node.path} must be a range in quotes such as "3:5", found {node.kind}')
        try:
            return parse_ranges(node.text, what, lowest, edges)
        except ValueError as error:
            raise node.error(str(error)) from None

    return read


_ALL_TENSOR_TYPES = tuple(dict.fromkeys(t for types in TENSOR_TYPES.values() for t in types))
CONDITIONS: dict[str, Callable[[Node], object]] = {
    "name": _read_name,
    "module_type": _one_of(MODULE_TYPES),
    "tensor_type": _one_of(_ALL_TENSOR_TYPES),
    "layers": _read_ranges("layers", 1, edges=True),
    "experts": _read_ranges("experts", 0),
    "steps": _read_ranges("steps", 1),
}


def _read_match(node: Node) -> Match:
    node.expect(dict, '{name: "*.linear_fc2"}').expect_keys(MATCH_KEYS)
    if not node.value:
        raise node.error(f"{node.path} has no condition; what holds everywhere belongs under defaults")
    match = Match(**{key: CONDITIONS[key](child) for key, child in node.items()})
    if match.module_type and match.tensor_type and match.tensor_type not in TENSOR_TYPES[match.module_type]:
        raise node.value["tensor_type"].error(
            f"a {match.module_type} has no tensor {match.tensor_type!r}; it has "
            f"{', '.join(TENSOR_TYPES[match.module_type])}"
        )
    return match


def read_rule(node: Node) -> Rule:
    node.expect(dict, '{match: {name: "*.linear_fc2"}, use: high_precision}').expect_keys(("match", "use"))
    for key in ("match", "use"):
        if key not in node.value:
            raise node.error(f"{node.path} has no {key!r}")
    match, use = _read_match(node.value["match"]), node.value["use"]
    settings = read_settings(use, USE_KEYS, _USE_HINTS)
    if not settings:
        raise use.error(f"{use.path} sets nothing")
    _warn_mx_gradients(use, settings)
    if match.names_attention:
        _refuse_quantized_attention(use, settings)
    elif match.tensor_type is not None:
        settings = _only_operand(use, settings, match.tensor_type)
    _refuse_lone_rht(use, settings)
    return Rule(match, _sorted(settings), node.line)


def _refuse_quantized_attention(use: Node, settings: dict[str, object]) -> None:
    for key, value in settings.items():
        if str(value) != "high_precision":
            raise use.error(
                f"{use.path} sets {key} to {value} for attention ({DPA}): no backend quantizes attention yet, "
                "only high_precision is possible there"
            )


def _only_operand(use: Node, settings: dict[str, object], operand: str) -> dict[str, object]:
    """The settings of one operand. Naming another one outright is a contradiction; scalars just narrow."""
    for key, child in use.items():
        if key in ("accumulate", "backward"):
            raise child.error(f"{child.path} is not about one tensor, the rule matches {operand!r} only", at_key=True)
        for part, leaf in child.items():
            if part != operand:
                raise leaf.error(f"{leaf.path} is about {part!r}, the rule matches {operand!r} only", at_key=True)
        if operand not in TABLES[key][0]:
            raise child.error(f"{child.path}: {key} does not read {operand!r}, which the rule matches", at_key=True)
    return {key: value for key, value in settings.items() if key.rpartition(".")[2] == operand}


# --- the whole recipe ---


def _read_version(node: Node) -> int:
    if type(node.value) is not int or node.value != VERSION:
        raise node.error(f"version must be {VERSION}, the one this release reads, found {node.kind} {node.text!r}")
    return node.value


def _read_one_line(node: Node) -> str:
    value = node.expect(str, '"my_recipe" (in quotes)').value
    if not value.strip().isprintable() or not value.strip():
        raise node.error(f"{node.path} must be one line of text, without control characters")
    return value.strip()


def _read_rules(node: Node) -> tuple[Rule, ...]:
    return tuple(read_rule(child) for child in node.expect(tuple, "- match: ...").value)


FIELDS: dict[str, Callable[[Node], object]] = {
    "version": _read_version,
    "name": _read_one_line,
    "description": _read_one_line,
    "lm_head": lambda node: node.expect(bool, "true").value,
    **{key: _one_of(words) for key, words in CHOICES.items()},
    "rules": _read_rules,
}


def read_recipe(root: Node) -> dict[str, object]:
    """Keyword arguments of a :class:`~megatron_hybrid.recipe.Recipe`. Raises ``RecipeError``."""
    root.expect(dict, "{version: 1, name: mine, defaults: mxfp8_e4m3}").expect_keys(TOP_KEYS, _TOP_HINTS)
    if "version" not in root.value:
        raise root.error(f"there is no version; a recipe starts with 'version: {VERSION}'")
    fields = {key: FIELDS[key](child) for key, child in root.items() if key in FIELDS}
    settings = dict(DEFAULT_SETTINGS)
    for key, child in root.items():
        if key == "defaults":
            given = read_settings(child, DEFAULTS_KEYS, _DEFAULTS_HINTS)
            settings.update(given)
            _warn_mx_gradients(child, given)
            _refuse_lone_rht(child, given)
        elif key == "backward":
            settings[key] = child.choice(BACKWARD)
        elif key == "accumulate":
            settings.update(_read_table(key, child))
    lines = tuple((key, child.key_line) for key, child in root.items() if child.key_line is not None)
    return {**fields, "defaults": _sorted(settings), "file": root.file, "lines": lines}


def _sorted(settings: dict[str, object]) -> Settings:
    """In the order of the grammar, so that equal settings are equal tuples."""
    return tuple((key, settings[key]) for key in DEFAULT_SETTINGS if key in settings)


def settings_to_dict(settings: Iterable[tuple[str, object]]) -> dict:
    """Flat keys back to the nested form: ``dgrad.weight`` becomes ``{dgrad: {weight: ...}}``."""
    nested: dict = {}
    for key, value in settings:
        table, _, part = key.partition(".")
        if part:
            nested.setdefault(table, {})[part] = str(value)
        else:
            nested[table] = str(value)
    return nested
