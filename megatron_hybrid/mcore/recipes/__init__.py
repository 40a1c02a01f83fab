"""`--spec megatron_hybrid.mcore.recipes NAME|PATH`: a recipe as a layer spec, for scripts that know nothing of us.

Megatron imports the first word and looks the second one up in it, whatever it is; this package answers any name or
path that `load_recipe` takes. (It is a package and not a module because Megatron reads the namespace directly: an
import that asks a *package* for a name calls its `__getattr__` first, which puts the answer there.) Asking also
applies the patches that training without Transformer Engine and Apex needs.
"""

from __future__ import annotations


def register(name: str, spec) -> None:
    """Let `name` stand for this spec in this process."""
    globals()[name] = spec


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ... import patches
    from ...recipe_callable import load_recipe
    from ..spec import HybridLayerSpec

    spec = HybridLayerSpec(load_recipe(name))
    patches.apply_all()
    register(name, spec)
    return spec
