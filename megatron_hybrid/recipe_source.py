"""Recipe files as nodes that know their line.

YAML, JSON and plain dicts become the same :class:`Node` tree, so that there is one grammar and every message can
say where. Lines live only as long as the validation; what must be reported later is kept by the recipe.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from .formats import nearest
from .whole_file import has_no_end

SUFFIXES = (".yaml", ".yml", ".json")
_MOST_BYTES, _MOST_VALUES, _DEEPEST = 1_000_000, 20_000, 50
_TOO_DEEP = f"values nested more than {_DEEPEST} deep"
QUOTES = "values with ':', ',' or '*' need quotes"


class RecipeError(ValueError):
    """A mistake in a recipe. ``file`` and ``line`` say where, as far as that is known; so does the text."""

    def __init__(self, message: str, file: str | None = None, line: int | None = None):
        place = file if line is None else f"{file}:{line}"
        super().__init__(f"{place}: {message}" if file else message)
        self.file, self.line = file, line


class RecipeWarning(UserWarning):
    """A recipe that is valid and probably not what was meant."""


@dataclass(frozen=True)
class Node:
    """A value of a recipe, where it stands and, for a scalar, its text as written.

    ``value`` is a str, int, float, bool or None, a tuple of nodes, or a dict of nodes by key.
    ``key_line`` is the line of the key that holds the value.
    """

    value: object
    path: str
    file: str | None = None
    line: int | None = None
    key_line: int | None = None
    text: str = ""

    @property
    def kind(self) -> str:
        return _KINDS.get(type(self.value), f"a {type(self.value).__name__}")

    @property
    def is_scalar(self) -> bool:
        return not isinstance(self.value, (dict, tuple))

    def items(self):
        """(key, node) pairs of a mapping; none for anything else."""
        return self.value.items() if isinstance(self.value, dict) else ()

    def error(self, message: str, at_key: bool = False) -> RecipeError:
        """The error to raise about this value (or about its key). Without a file the path says where."""
        if self.file is None:
            place = "" if self.path in message else f"{self.path}: "
            return RecipeError(f"recipe: {place}{message}")
        return RecipeError(message, self.file, self.key_line if at_key else self.line)

    def where(self) -> str:
        return f"recipe: {self.path}" if self.file is None else f"{self.file}:{self.line}"

    def expect(self, kind: type, example: str) -> Node:
        """This node, if its value is a ``kind``; else raises ``RecipeError`` showing the example."""
        if type(self.value) is not kind:
            raise self.error(f"{self.path or 'a recipe'} must be {_KINDS[kind]} such as {example}, found {self.kind}")
        return self

    def expect_keys(self, valid: Sequence[str], hints: Mapping[str, str] = {}) -> Node:
        """This mapping, if all its keys are valid; else raises ``RecipeError`` with the nearest valid key."""
        for key, child in self.items():
            if key not in valid:
                hint = hints.get(key) or (f"; {QUOTES}." if child.kind == "nothing" else nearest(key, valid) or ".")
                raise child.error(
                    f"unknown key {key!r} in {self.path or 'the recipe'}{hint} Valid keys: {', '.join(valid)}",
                    at_key=True,
                )
        return self

    def choice(self, valid: Sequence[str]) -> str:
        """The value, if it is one of the valid words; else raises ``RecipeError`` with the nearest one."""
        if self.value not in valid:
            raise self.error(
                f"{self.path} must be one of {', '.join(valid)}, found {_shown(self)}{nearest(self.text, valid)}"
            )
        return self.value


_KINDS = {
    dict: "a mapping",
    tuple: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "nothing",
}


def _shown(node: Node) -> str:
    return repr(node.text) if node.is_scalar and node.text else node.kind


def read_file(path: str | Path) -> Node:
    """The node tree of a recipe file.

    Raises ``RecipeError`` for a file that is missing, empty, not text, not valid YAML or JSON, or that gives a key
    twice; the message is one line with file and line.
    """
    path = Path(path).expanduser()
    if path.suffix not in SUFFIXES:
        raise RecipeError(f"a recipe file ends in {', '.join(SUFFIXES)}", str(path))
    text = _read_text(path)
    if path.suffix == ".json":
        text = _checked_json(text, str(path))
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark.index >= len(text.rstrip()):  # something is open at the end: its start tells more
            mark = error.context_mark or mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(f"not valid YAML: {reason} ({QUOTES})", str(path), mark.line + 1) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(f"not valid YAML: {error.reason}", str(path), line) from None
    except RecursionError:
        raise RecipeError(_TOO_DEEP, str(path), 1) from None
    if root is None:
        raise RecipeError("the file is empty; a recipe starts with 'version: 1'", str(path), 1)
    return _from_yaml(root, str(path), "", None, (), itertools.count(1))


def _read_text(path: Path) -> str:
    try:
        if has_no_end(path):
            raise RecipeError("not a regular file", str(path))
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise RecipeError(f"{size} bytes are no recipe; at most {_MOST_BYTES} are read", str(path), 1)
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if path.is_symlink():
            raise RecipeError(f"a link to {os.readlink(path)}, which does not exist", str(path)) from None
        siblings = [p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES]
        raise RecipeError(f"no such recipe file{nearest(path.name, siblings)}", str(path)) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecipeError("not a text file in UTF-8", str(path), line) from None
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", str(path)) from None


def _checked_json(text: str, file: str) -> str:
    """Valid JSON, with the tabs that YAML (which finds the lines for us) would refuse made into spaces."""
    if not text.strip():
        raise RecipeError("the file is empty; a recipe starts with 'version: 1'", file, 1)
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise RecipeError(f"not valid JSON: {error.msg}", file, error.lineno) from None
    except RecursionError:
        raise RecipeError(_TOO_DEEP, file, 1) from None
    return text.expandtabs()


def _from_yaml(node: yaml.Node, file: str, path: str, key_line: int | None, above: tuple, numbers: Iterator[int]) -> Node:
    """numbers: counts the values. An alias is what it stands for, and a few lines of them can stand for billions."""
    line = node.start_mark.line + 1
    key_line = line if key_line is None else key_line
    if node in above:
        raise RecipeError(f"{path} contains itself", file, key_line)
    if len(above) > _DEEPEST:
        raise RecipeError(_TOO_DEEP, file, line)
    if next(numbers) > _MOST_VALUES:
        raise RecipeError(f"more than {_MOST_VALUES} values, each alias counted as what it stands for", file, line)
    if node.tag.startswith("!") and not isinstance(node, yaml.ScalarNode):
        raise RecipeError(f"{path or 'the recipe'}: cannot read {node.id} as {node.tag}", file, line)
    above = (*above, node)
    match node:
        case yaml.MappingNode():
            value = _mapping(node, file, path, above, numbers)
        case yaml.SequenceNode():
            children = enumerate(node.value)
            value = tuple(_from_yaml(child, file, f"{path}[{i}]", None, above, numbers) for i, child in children)
        case _:
            return Node(_scalar(node, file, path, line), path, file, line, key_line, node.value)
    return Node(value, path, file, line, key_line)


def _mapping(node: yaml.MappingNode, file: str, path: str, above: tuple, numbers: Iterator[int]) -> dict[str, Node]:
    value: dict[str, Node] = {}
    for key_node, child in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise RecipeError(f"a key of {path or 'the recipe'} is not a word", file, line)
        key = key_node.value
        if key in value:
            first = value[key].key_line
            raise RecipeError(f"key {key!r} is given twice, first in line {first}", file, line)
        value[key] = _from_yaml(child, file, f"{path}.{key}" if path else key, line, above, numbers)
    return value


def _scalar(node: yaml.ScalarNode, file: str, path: str, line: int):
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (yaml.YAMLError, ValueError):
        raise RecipeError(f"{path or 'the recipe'}: cannot read {node.value!r} as {node.tag}", file, line) from None


def from_object(obj, path: str = "") -> Node:
    """The node tree of a plain object: dicts, lists and scalars. There are no lines; messages give the path."""
    match obj:
        case Mapping():
            return Node({str(k): from_object(v, f"{path}.{k}" if path else str(k)) for k, v in obj.items()}, path)
        case str():
            return Node(obj, path, text=obj)
        case Sequence():
            return Node(tuple(from_object(v, f"{path}[{i}]") for i, v in enumerate(obj)), path)
    return Node(obj, path, text="" if obj is None else str(obj))
