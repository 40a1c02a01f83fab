"""A Python function in the place of a recipe file: `role -> quantizer`.

    def recipe(role):                       # a QuantizerRole
        if role.tensor_type == "weight":
            return mh.HybridQuantizer("mxfp8_e4m3", "mxfp8_e4m3:2d")
        return mh.HybridQuantizer("mxfp8_e4m3", "nvfp4")

    layer = mh.HybridLinear(64, 64, recipe=recipe)

A function cannot go into a checkpoint; `to_dict` says that it did not.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .formats import COLUMNWISE, HIGH_PRECISION, ROWWISE, nearest
from .quantizer import HybridQuantizer
from .quantizer_spec import BACKWARD, DEFAULT_SETTINGS, READERS, ModuleQuant
from .recipe import Recipe, RecipeError
from .recipe_grammar import CHOICES, VERSION, read_rule
from .recipe_rules import Rule
from .recipe_source import from_object
from .roles import DPA, OPERANDS, ModuleRole, QuantizerRole

_HIGH = HybridQuantizer(HIGH_PRECISION, HIGH_PRECISION)
_IMPORTED = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class CallableRecipe:
    """A function `QuantizerRole -> HybridQuantizer` (None: high precision) that can stand in for a `Recipe`.

    It is asked for every operand of every linear, and for attention's tensors, which must stay in high precision;
    never for the output layer, unless `lm_head`. `backward`, `weights`, `param_gather` and
    `master_cast` are those of recipe files. Everything else has a recipe file's defaults.
    """

    function: Callable[[QuantizerRole], HybridQuantizer | None]
    name: str = ""
    backward: str = DEFAULT_SETTINGS["backward"]
    lm_head: bool = False
    weights: str = CHOICES["weights"][0]
    param_gather: str = CHOICES["param_gather"][0]
    master_cast: str = CHOICES["master_cast"][0]
    rules: tuple[Rule, ...] = ()  # before the function's answers, see `with_first_rule`
    version = VERSION
    description = ""
    dispatch = CHOICES["dispatch"][0]

    def __post_init__(self):
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__qualname__", type(self.function).__qualname__))
        if self.backward not in BACKWARD:
            raise RecipeError(
                f"backward must be one of {', '.join(BACKWARD)}, found {self.backward!r}"
                f"{nearest(str(self.backward), BACKWARD)}"
            )

    def with_backward(self, mode: str) -> CallableRecipe:
        """This recipe with another ``backward``."""
        return replace(self, backward=mode)

    def with_weights(self, weights: str) -> CallableRecipe:
        """This recipe with another ``weights``."""
        return replace(self, weights=weights)

    def with_first_rule(self, match: Mapping, use) -> CallableRecipe:
        """This recipe with a rule whose settings hold whatever the function says, and before earlier such rules.

        Raises `RecipeError` as a rule in a file would, and for a rule on steps, which functions do not know.
        """
        rule = read_rule(from_object({"match": match, "use": use}, "added rule"))
        if rule.match.steps is not None:
            raise RecipeError(f"recipe function {self.name!r}: a rule on steps needs a recipe file")
        return replace(self, rules=(rule, *self.rules))

    def to_dict(self) -> dict:
        """A record that a function was used: its name, not what it does. `Recipe.from_dict` refuses it."""
        options = {"backward": self.backward, "lm_head": self.lm_head}
        options |= {key: getattr(self, key) for key, (default, *_) in CHOICES.items() if getattr(self, key) != default}
        rules = [{"match": r.match.given(), "use": {key: str(value) for key, value in r.use}} for r in self.rules]
        return {"version": self.version, "name": self.name, "callable": True, **options, **({"rules": rules} if rules else {})}

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the record: equal for functions of one name, whatever they do."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def late_rules(self, last_step: int) -> list[str]:
        """None: a function knows no steps."""
        return []

    def resolve(self, module: ModuleRole, *, step: int | None = None) -> ModuleQuant:
        """What the function says about one module. Raises `RecipeError` for an answer that no module can follow."""
        found = {role.tensor_type: self._ask(role, module) for role in module.operands()}
        if module.module_type == DPA:
            for tensor, quantizer in found.items():
                if any(f is not None and f.is_quantized for f in quantizer.formats()):
                    raise self._error(module, f"{tensor}: no backend quantizes attention")
            return ModuleQuant.from_settings(module, DEFAULT_SETTINGS)
        settings = {**DEFAULT_SETTINGS, "backward": self.backward}
        for operand in OPERANDS:
            settings[f"columnwise_source.{operand}"] = found[operand].columnwise_source
            for gemm, direction in zip(READERS[operand], (ROWWISE, COLUMNWISE)):
                fmt = getattr(found[operand], direction)
                if fmt is None:
                    raise self._error(module, f"{operand}: the quantizer has no {direction} format, which {gemm} contracts")
                settings[f"{gemm}.{operand}"] = fmt
        for rule in reversed(self.rules):
            if (self.lm_head or not module.lm_head) and rule.match.holds_for(module):
                settings.update(rule.use)
        return ModuleQuant.from_settings(module, settings)

    def _ask(self, role: QuantizerRole, module: ModuleRole) -> HybridQuantizer:
        if module.lm_head and not self.lm_head:
            return _HIGH
        quantizer = self.function(role)
        if quantizer is None:
            return _HIGH
        if not isinstance(quantizer, HybridQuantizer):
            raise self._error(module, f"{role.tensor_type}: expected a HybridQuantizer or None, found {quantizer!r}")
        return quantizer

    has_step_rules = False

    def change_steps(self) -> tuple[int, ...]:
        """None: a function is not asked again during training."""
        return ()

    def check_matches(self, modules: Iterable[ModuleRole]) -> None:
        """Raise `RecipeError` for whatever `resolve` refuses for any of the modules."""
        for module in modules:
            self.resolve(module)

    def _error(self, module: ModuleRole, message: str) -> RecipeError:
        return RecipeError(f"recipe function {self.name!r}, module {module.label}, {message}")


def as_recipe(recipe) -> Recipe | CallableRecipe:
    """A recipe from whatever stands for one: itself, a function, or a text for `load_recipe`.

    Raises `RecipeError` for anything else.
    """
    if isinstance(recipe, (Recipe, CallableRecipe)):
        return recipe
    if isinstance(recipe, (str, Path)):
        return load_recipe(recipe)
    if callable(recipe):
        return CallableRecipe(recipe)
    raise RecipeError(f"expected a Recipe, the name or path of one, or a function of a role, found {recipe!r}")


def load_recipe(text: str | Path) -> Recipe | CallableRecipe:
    """A shipped recipe by name, a file by path, or ``module:function``, a function to import.

    Raises `RecipeError` for what is none of them, naming what is missing.
    """
    if not (found := _IMPORTED.fullmatch(str(text))):
        return Recipe.load(text)
    try:
        function = getattr(importlib.import_module(found["module"]), found["function"])
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"recipe {text}: {error}; expected an importable module and a function in it") from None
    if not callable(function):
        raise RecipeError(f"recipe {text}: expected a function of a role, found {function!r}")
    return as_recipe(function)
