"""A recipe on its way through Megatron's own hook: `config.quant_recipe` to every module's `finish_init`.

Megatron then also tells modules of the first microbatch of a step (`is_first_microbatch`).
"""

from __future__ import annotations

from megatron.core.quantization.quant_config import GlobMatcher, QuantizationConfig, RecipeConfig

from ..recipe import Recipe, RecipeError
from ..recipe_callable import CallableRecipe

_KEY = "megatron_hybrid"


def carry(recipe: Recipe | CallableRecipe) -> RecipeConfig:
    """Megatron's form of a recipe: every module gets all of it, and resolves it for its own role.

    The recipe itself travels, not its dict: a function has none, and this configuration stays in the process.
    """
    return RecipeConfig([GlobMatcher("*", _KEY)], {_KEY: {"recipe": recipe}})


def carried(quant_config: QuantizationConfig | None, module) -> Recipe | CallableRecipe:
    """The recipe that `finish_init` brought."""
    if quant_config is None or quant_config.config_key != _KEY:
        raise RecipeError(
            f"{type(module).__name__} was built without a recipe; use megatron_hybrid.mcore.spec.HybridLayerSpec, "
            "or --spec megatron_hybrid.mcore.recipes NAME|PATH"
        )
    return quant_config.config["recipe"]
