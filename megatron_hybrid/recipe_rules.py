"""Rules of a recipe: which modules and steps one applies to, and the settings it makes.

Two small languages live here, ranges (``first:1,last:2``, ``7``, ``3:5``) and name patterns (``*.linear_fc2``).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

from .formats import nearest
from .roles import DPA, TENSOR_TYPES, ModuleRole

Settings = tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Span:
    """``start`` included, ``stop`` excluded, None is open; or, with ``last``, the final ``last`` numbers."""

    start: int | None = None
    stop: int | None = None
    last: int | None = None

    def holds(self, number: int, total: int | None) -> bool:
        if self.last is not None:
            return total is not None and number > total - self.last
        return (self.start is None or number >= self.start) and (self.stop is None or number < self.stop)


@dataclass(frozen=True)
class Ranges:
    """A set of numbers, as a rule writes it. ``text`` is the canonical spelling."""

    text: str
    spans: tuple[Span, ...] = field(compare=False)

    @property
    def needs_total(self) -> bool:
        return any(span.last is not None for span in self.spans)

    def holds(self, number: int, total: int | None = None) -> bool:
        return any(span.holds(number, total) for span in self.spans)

    def idle_parts(self, numbers: range) -> list[str]:
        """The parts of the comma list that hold none of the numbers."""
        parts = zip(self.text.split(","), self.spans)
        return [part for part, span in parts if not any(span.holds(number, numbers[-1]) for number in numbers)]

    def boundaries(self) -> set[int]:
        """Numbers at which membership can change."""
        return {edge for span in self.spans for edge in (span.start, span.stop) if edge is not None}

    def __str__(self) -> str:
        return self.text


_ITEM = re.compile(r"(?P<edge>first|last):(?P<count>\d+)|(?P<start>\d*)(?P<colon>:)(?P<stop>\d*)|(?P<single>\d+)")


def parse_ranges(text: str, what: str, lowest: int, edges: bool = False) -> Ranges:
    """Read ``7``, ``3:5`` (5 excluded), ``3:``, ``:5``, with ``edges`` also ``first:2``, ``last:2``; or a comma list.

    Raises ``ValueError`` for anything else, for numbers below ``lowest`` and for ranges that hold nothing.
    """
    items = ["".join(item.split()) for item in text.split(",")]
    return Ranges(",".join(items), tuple(_parse_span(item, what, lowest, edges) for item in items))


def _parse_span(item: str, what: str, lowest: int, edges: bool) -> Span:
    found = _ITEM.fullmatch(item)
    if not found or item == ":" or (found["edge"] and not edges):
        example = "'7', '3:5', 'first:2' or 'last:2'" if edges else "'7', '3:5', '3:' or ':5'"
        hint = nearest(item.partition(":")[0], ("first", "last")) if edges else ""
        raise ValueError(f"{what} {item!r} is not a range such as {example}{hint}")
    if found["edge"]:
        count = int(found["count"])
        if count == 0:
            raise ValueError(f"{what} {item!r} holds nothing")
        return Span(start=1, stop=count + 1) if found["edge"] == "first" else Span(last=count)
    start, stop = (int(found[part]) if found[part] else None for part in ("start", "stop"))
    if found["single"]:
        start = int(found["single"])
        stop = start + 1
    if start is not None and start < lowest:
        raise ValueError(f"{what} {item!r}: {what} are numbered from {lowest}")
    if stop is not None and stop <= (lowest if start is None else start):
        raise ValueError(f"{what} {item!r} holds nothing: a:b includes a and excludes b")
    return Span(start, stop)


_TOKEN = re.compile(r"\*+|\?|\[!?[^\]]+\]|\d+|[^*?\[\d]+|\[")


@functools.cache
def name_pattern(glob: str) -> re.Pattern:
    """A pattern over full module names: ``*`` any characters (dots too), ``?`` one, ``[12]`` one of these.

    It covers the whole name. A number beside ``*`` is a whole number: ``*layers.2*`` does not match layer 20.
    """
    tokens = _TOKEN.findall(glob)
    parts = []
    for i, token in enumerate(tokens):
        before, after = (tokens[i - 1] if i else ""), (tokens[i + 1] if i + 1 < len(tokens) else "")
        if token.startswith("*"):
            parts.append(".*")
        elif token == "?":
            parts.append(".")
        elif token.startswith("[") and token != "[":
            parts.append(_character_set(token[1:-1]))
        elif token.isdigit():
            parts.append(("(?<!\\d)" if "*" in before else "") + token + ("(?!\\d)" if "*" in after else ""))
        else:
            parts.append(re.escape(token))
    return re.compile("".join(parts), re.DOTALL)


def _character_set(inner: str) -> str:
    negated = inner.startswith("!")
    escaped = inner[negated:].replace("\\", "\\\\").replace("^", "\\^").replace("[", "\\[")
    return f"[{'^' if negated else ''}{escaped}]"


@dataclass(frozen=True)
class Match:
    """The conditions of a rule, all of which must hold; None is no condition."""

    name: str | None = None
    module_type: str | None = None
    tensor_type: str | None = None
    layers: Ranges | None = None
    experts: Ranges | None = None
    steps: Ranges | None = None

    @property
    def names_attention(self) -> bool:
        """True when the rule asks for attention tensors by type; no other rule touches them."""
        return self.module_type == DPA or self.tensor_type in TENSOR_TYPES[DPA]

    def given(self) -> dict[str, str]:
        """The conditions as written, by key."""
        return {key: str(value) for key in self.__dataclass_fields__ if (value := getattr(self, key)) is not None}

    def needs_num_layers(self, module: ModuleRole) -> bool:
        """True when the answer depends on how many layers the model has."""
        return self.layers is not None and self.layers.needs_total and module.layer is not None

    def holds_for(self, module: ModuleRole) -> bool:
        """True when every condition on the module holds; steps are another question."""
        return all(test(self, module) for test in MODULE_TESTS.values())

    def holds_at(self, step: int | None) -> bool:
        """True when the rule is on at this step. Without a step, rules with ``steps`` are off."""
        return self.steps is None or (step is not None and self.steps.holds(step))


def _in_layers(match: Match, module: ModuleRole) -> bool:
    return match.layers is None or (module.layer is not None and match.layers.holds(module.layer, module.num_layers))


def _in_experts(match: Match, module: ModuleRole) -> bool:
    return match.experts is None or (module.expert is not None and match.experts.holds(module.expert))


# one test a condition, so that a rule which matches nothing can say which condition fails
MODULE_TESTS = {
    "name": lambda match, module: match.name is None or bool(name_pattern(match.name).fullmatch(module.name)),
    "module_type": lambda match, module: match.module_type in (None, module.module_type),
    "tensor_type": lambda match, module: match.tensor_type in (None, *module.tensor_types),
    "layers": _in_layers,
    "experts": _in_experts,
}


@dataclass(frozen=True)
class Rule:
    """``use`` are the settings it makes, by flat key. ``line`` is where the file has it."""

    match: Match
    use: Settings
    line: int | None = field(default=None, compare=False)

    @property
    def leaves_alone(self) -> bool:
        """True when all it says is high precision."""
        return all(str(value) == "high_precision" for _, value in self.use)


def explain_no_match(match: Match, modules: list[ModuleRole]) -> str:
    """Why a rule matches none of the modules: the conditions that no module meets, and what there is instead."""
    unmet = [key for key, test in MODULE_TESTS.items() if not any(test(match, module) for module in modules)]
    if not unmet:
        return f"no module meets {' and '.join(k for k in match.given() if k != 'steps')} together"
    return "; ".join(f"{key} {match.given()[key]!r}: {_EXISTING[key](match, modules)}" for key in unmet)


def explain_idle_part(match: Match, modules: list[ModuleRole]) -> str | None:
    """What a rule that matches something says in vain: a part of its layers or experts that the model has not."""
    for key, lowest, attributes in (("layers", 1, ("layer", "num_layers")), ("experts", 0, ("expert",))):
        ranges = getattr(match, key)
        if ranges is not None:
            highest = max(n for module in modules for a in attributes if (n := getattr(module, a)) is not None)
            if idle := ranges.idle_parts(range(lowest, highest + 1)):
                return f"{key} {', '.join(map(repr, idle))} of {ranges.text!r}, the model's are {lowest} to {highest}"
    return None


def _existing_names(match: Match, modules: list[ModuleRole]) -> str:
    leaves = sorted({module.name.rpartition(".")[2] for module in modules})
    wanted = match.name.rstrip("*.").rpartition(".")[2]
    return (
        f"a pattern covers the whole name, such as {modules[0].name!r}{nearest(wanted, leaves)} "
        f"Names end in {', '.join(leaves)}"
    )


def _existing_types(match: Match, modules: list[ModuleRole]) -> str:
    return f"the model has {', '.join(sorted({module.module_type for module in modules}))}"


def _existing_numbers(attribute: str, noun: str):
    def text(match: Match, modules: list[ModuleRole]) -> str:
        numbers = {n for module in modules if (n := getattr(module, attribute)) is not None}
        if numbers:
            return f"the model's {noun} are {min(numbers)} to {max(numbers)}"
        hint = "; plain modules say theirs with layer= and num_layers=" if attribute == "layer" else ""
        return f"the model has no {noun}{hint}"

    return text


_EXISTING = {
    "name": _existing_names,
    "module_type": _existing_types,
    "tensor_type": _existing_types,
    "layers": _existing_numbers("layer", "layers"),
    "experts": _existing_numbers("expert", "experts"),
}
