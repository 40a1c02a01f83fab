"""Recipes: which format every operand of every gemm gets, as declarative data.

A recipe comes from a YAML or JSON file or a dict, is frozen, and goes back to a dict. :meth:`Recipe.resolve` turns
it into a :class:`ModuleQuant` for one module at one step. The grammar is docs/recipes.md.

The rest of the package asks a recipe only for ``name``, ``resolve``, ``change_steps``, ``check_matches``,
``to_dict``, ``fingerprint`` and the whole-recipe fields (``weights`` ... ``master_cast``); anything else with these
can stand in for one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from .formats import nearest
from .quantizer_spec import BACKWARD, DEFAULT_SETTINGS, GEMMS, ModuleQuant
from .recipe_grammar import (
    CHOICES,
    DEFAULTS_KEYS,
    QUANTIZED,
    VERSION,
    lone_rht_message,
    read_recipe,
    read_rule,
    settings_to_dict,
)
from .recipe_rules import Rule, Settings, explain_idle_part, explain_no_match
from .recipe_source import SUFFIXES, RecipeError, RecipeWarning, from_object, read_file
from .roles import DPA, LINEAR, ModuleRole

__all__ = ["DEFAULT_RECIPE", "QUANTIZED", "Recipe", "RecipeError", "RecipeWarning", "ModuleQuant", "list_recipes"]

DEFAULT_RECIPE = "bf16"  # of modules and runs that are given none

# the package's own copy when installed, the repository's folder in a source checkout
_FOLDERS = (
    Path(__file__).parent / "configs" / "recipes",
    Path(__file__).parent.parent / "configs" / "recipes",
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe. Make one with :meth:`load` or :meth:`from_dict`.

    ``defaults`` are the settings that hold where no rule decides, ``rules`` come in order of precedence.
    ``file`` and ``lines`` only serve messages: two recipes that differ there are equal.
    """

    defaults: Settings = tuple(DEFAULT_SETTINGS.items())
    rules: tuple[Rule, ...] = ()
    version: int = VERSION
    name: str = "unnamed"
    description: str = ""
    weights: str = CHOICES["weights"][0]
    lm_head: bool = False
    dispatch: str = CHOICES["dispatch"][0]
    param_gather: str = CHOICES["param_gather"][0]
    master_cast: str = CHOICES["master_cast"][0]
    file: str | None = dataclasses.field(default=None, compare=False, repr=False)
    lines: tuple[tuple[str, int], ...] = dataclasses.field(default=(), compare=False, repr=False)

    # --- from and to files ---

    @classmethod
    def load(cls, name_or_path: str | Path) -> Recipe:
        """A shipped recipe by name, or one's own by the path of a .yaml, .yml or .json file.

        Raises ``RecipeError`` for an unknown name (with the nearest one), a file that cannot be read, and every
        mistake in it, with file and line.
        """
        path = Path(name_or_path)
        if path.suffix not in SUFFIXES and path.name == str(name_or_path):
            path = _shipped(path.name)
        _refuse_suffix(path)
        return cls._checked({"name": path.stem, **read_recipe(read_file(path))})

    @classmethod
    def from_dict(cls, data: Mapping) -> Recipe:
        """The recipe that a dict in the file's grammar describes. Raises ``RecipeError`` that names the key."""
        if isinstance(data, Mapping) and data.get("callable"):
            raise RecipeError(
                f"recipe {data.get('name')!r} was a Python function, which no file or checkpoint holds; give the function"
            )
        return cls._checked(read_recipe(from_object(data)))

    @classmethod
    def _checked(cls, fields: dict) -> Recipe:
        """Without rules every linear is alike, so that contradictions show before there is a model."""
        recipe = cls(**fields)
        if not recipe.rules:
            recipe.resolve(ModuleRole(LINEAR, "any linear"))
        return recipe

    def to_dict(self) -> dict:
        """The whole recipe in the file's grammar, defaults spelled out; ``from_dict`` gives an equal one back."""
        settings = settings_to_dict(self.defaults)
        return {
            "version": self.version,
            "name": self.name,
            **({"description": self.description} if self.description else {}),
            "defaults": {key: settings[key] for key in DEFAULTS_KEYS},
            "accumulate": settings["accumulate"],
            "backward": settings["backward"],
            "lm_head": self.lm_head,
            **{key: getattr(self, key) for key in CHOICES},
            "rules": [{"match": rule.match.given(), "use": settings_to_dict(rule.use)} for rule in self.rules],
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the recipe does: its canonical JSON without name and description.

        Checkpoints record it. Comments, the order of keys and the spelling of formats do not change it.
        """
        meaning = {k: v for k, v in self.to_dict().items() if k not in ("name", "description")}
        return hashlib.sha256(json.dumps(meaning, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    # --- variants ---

    @property
    def backward(self) -> str:
        """The shorthand that holds where no rule sets it."""
        return dict(self.defaults)["backward"]

    def with_backward(self, mode: str) -> Recipe:
        """This recipe with another top-level ``backward``; rules that set their own keep it.

        Raises ``ValueError`` for an unknown mode.
        """
        if mode not in BACKWARD:
            raise ValueError(f"backward must be one of {', '.join(BACKWARD)}, found {mode!r}{nearest(mode, BACKWARD)}")
        return dataclasses.replace(self, defaults=tuple({**dict(self.defaults), "backward": mode}.items()))

    def with_weights(self, weights: str) -> Recipe:
        """This recipe with another ``weights``: ``high_precision`` or ``quantized``."""
        return dataclasses.replace(self, weights=weights)

    def with_first_rule(self, match: Mapping, use) -> Recipe:
        """This recipe with one more rule before the others. Raises ``RecipeError`` as a rule in a file would."""
        rule = read_rule(from_object({"match": match, "use": use}, "added rule"))
        return dataclasses.replace(self, rules=(rule, *self.rules))

    # --- resolution ---

    def resolve(self, module: ModuleRole, *, step: int | None = None) -> ModuleQuant:
        """What the recipe says about one module at one step; without a step, rules with ``steps`` are off.

        Raises ``RecipeError`` when the settings contradict each other for this module: ``rht`` on one operand of a
        gemm only, ``param_gather: rowwise`` where the columnwise weight does not follow from the rowwise one, or
        ``last:N`` where the module does not say how many layers there are.
        """
        if not self._rules_reach(module):
            return ModuleQuant.from_settings(module, DEFAULT_SETTINGS)
        settings: dict[str, object] = {}
        decided = []
        for index, rule in enumerate(self.rules):
            if not (rule.match.holds_at(step) and self._rule_holds(index, module)):
                continue
            unset = {key: value for key, value in rule.use if key not in settings}
            settings.update(unset)
            if unset:
                decided.append(index)
        quant = ModuleQuant.from_settings(module, {**dict(self.defaults), **settings}, tuple(decided))
        self._check(quant)
        return quant

    @property
    def has_step_rules(self) -> bool:
        """Whether any rule is for some steps only, those that hold at every step included."""
        return any(rule.match.steps for rule in self.rules)

    def change_steps(self) -> tuple[int, ...]:
        """The steps, in order, at which :meth:`resolve` may start to give something else than at the step before."""
        edges = {edge for rule in self.rules if rule.match.steps for edge in rule.match.steps.boundaries()}
        return tuple(sorted(edge for edge in edges if edge > 1))

    def late_rules(self, last_step: int) -> list[str]:
        """A line for each rule whose steps all come after the last one of a run."""
        late = {
            index: rule.match.steps
            for index, rule in enumerate(self.rules)
            if rule.match.steps and min(span.start or 1 for span in rule.match.steps.spans) > last_step
        }
        return [
            f"{self._rule_place(index)} never takes effect: its steps are {steps}, the run ends with step {last_step}"
            for index, steps in late.items()
        ]

    def check_matches(self, modules: Iterable[ModuleRole]) -> None:
        """Check the recipe against the whole model: the modules of all pipeline stages and all experts.

        Raises ``RecipeError`` for a rule that matches none of them, names layers or experts that are not among them or
        has no effect on those it matches, and for whatever :meth:`resolve` refuses for any of them at any step. Warns of a rule that never decides anything
        because earlier rules always do.
        """
        modules = list(modules)
        if not modules:
            raise RecipeError("the model has no modules that a recipe could apply to", self.file)
        for index in range(len(self.rules)):
            self._check_rule(index, modules)
        decided: set[int] = set()
        for step in (None, 1, *self.change_steps()):
            for module in modules:
                decided.update(self.resolve(module, step=step).rules)
        for index, rule in enumerate(self.rules):
            if index not in decided and any(self._rules_reach(m) and rule.match.holds_for(m) for m in modules):
                warnings.warn(
                    f"{self._rule_place(index)} never decides anything: for each setting the first matching rule "
                    "wins, and earlier rules make all of its settings",
                    RecipeWarning,
                    stacklevel=2,
                )

    def _rules_reach(self, module: ModuleRole) -> bool:
        """False for what stays in high precision whatever the rules say: attention, and mostly the output layer."""
        return module.module_type != DPA and (self.lm_head or not module.lm_head)

    def _rule_holds(self, index: int, module: ModuleRole) -> bool:
        rule = self.rules[index]
        if module.num_layers is None and rule.match.needs_num_layers(module):
            raise self._error(
                f"rules[{index}] counts layers from the last; module {module.label} does not say how many there are",
                rule.line,
            )
        return rule.match.holds_for(module)

    def _check_rule(self, index: int, modules: list[ModuleRole]) -> None:
        rule = self.rules[index]
        matched = [module for module in modules if self._rule_holds(index, module)]
        if not matched:
            reason = explain_no_match(rule.match, modules)
            raise self._error(f"rules[{index}] matches nothing in the model: {reason}", rule.line)
        if idle := explain_idle_part(rule.match, modules):
            raise self._error(f"rules[{index}] names what the model has not: {idle}; leave that part out", rule.line)
        if rule.leaves_alone or any(self._rules_reach(module) for module in matched):
            return
        reason = (
            "only the output layer, which is left alone without 'lm_head: true'"
            if any(module.lm_head for module in matched)
            else f"only attention ({DPA}), which no backend quantizes yet"
        )
        raise self._error(f"rules[{index}] has no effect: it matches {reason} ({matched[0].name})", rule.line)

    def _check(self, quant: ModuleQuant) -> None:
        """Refuse what no module can do with these settings."""
        gemm = quant.lone_rht()
        if gemm is not None:
            message = lone_rht_message(gemm, *(quant.slot(gemm, operand) for operand in GEMMS[gemm]))
            raise self._error(f"module {quant.module.label}: {message}", self._line_of(quant, gemm))
        if self.param_gather == "rowwise" and not quant.columnwise_derivable("weight"):
            row, column, _ = quant.quantizer("weight")
            raise self._error(
                f"module {quant.module.label}: param_gather: rowwise needs a columnwise weight that follows from the "
                f"rowwise one, found rowwise {row} and columnwise {column} from the original; right would be "
                "columnwise_source: {weight: rowwise_dequantized}, one per-tensor or 2d format for both, or "
                "param_gather: both",
                dict(self.lines).get("param_gather"),
            )

    def _line_of(self, quant: ModuleQuant, gemm: str) -> int | None:
        """Line of the first rule that decided a slot of the gemm, else of the defaults."""
        for index in quant.rules:
            if any(key.startswith(f"{gemm}.") for key, _ in self.rules[index].use):
                return self.rules[index].line
        return dict(self.lines).get("defaults")

    def _rule_place(self, index: int) -> str:
        line = self.rules[index].line
        return f"{self.file}:{line}: rules[{index}]" if self.file and line else f"recipe {self.name!r}: rules[{index}]"

    def _error(self, message: str, line: int | None) -> RecipeError:
        return RecipeError(message if self.file else f"recipe {self.name!r}: {message}", self.file, line)


def _recipe_files() -> dict[str, Path]:
    folder = next((f for f in _FOLDERS if f.is_dir()), None)
    if folder is None:
        raise RecipeError(f"the shipped recipes are missing; looked in {' and '.join(map(str, _FOLDERS))}")
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _shipped(name: str) -> Path:
    files = _recipe_files()
    if name not in files:
        raise RecipeError(
            f"unknown recipe {name!r}{_file_here(name) or nearest(name, files) or '.'} Shipped recipes: {', '.join(files)}; "
            f"one's own is given by the path of its file, ending in {', '.join(SUFFIXES)}"
        )
    return files[name]


def _file_here(name: str) -> str:
    """The hint for a file of the working folder that was named without its suffix, or ''."""
    found = next((name + suffix for suffix in SUFFIXES if name and Path(name + suffix).is_file()), None)
    return f"; did you mean the file {found!r}?" if found else ""


def _refuse_suffix(path: Path) -> None:
    """``mxfp8.yaml`` where there is no such file: a shipped recipe goes by its name."""
    if path.name == str(path) and path.stem in _recipe_files() and not path.exists():
        raise RecipeError(f"no such recipe file; the shipped recipe is {path.stem!r}, without a suffix", str(path))


def list_recipes() -> list[tuple[str, str]]:
    """Name and one-line description of every shipped recipe, in order of name."""
    return [(name, Recipe.load(path).description) for name, path in _recipe_files().items()]
