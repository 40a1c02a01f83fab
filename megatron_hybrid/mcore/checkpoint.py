"""The recipe in Megatron's checkpoints: recorded in every one, compared when a run resumes.

The record is a JSON string in Megatron's arguments, which every checkpoint format stores and which loads without
any class of ours.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import warnings

from ..checkpoint_file import RECORD
from ..recipe import Recipe
from .errors import UserError

_SHORT = 12


def record(args, recipe: Recipe) -> None:
    """Put the recipe where checkpoints are written from."""
    setattr(args, RECORD, json.dumps({"fingerprint": recipe.fingerprint, "recipe": recipe.to_dict()}, sort_keys=True))


def record_in_run(recipe: Recipe) -> None:
    """`record` and `check_resume` for scripts that only name a spec; nothing is left to do for ours."""
    args = run_args()
    if args is None or getattr(args, RECORD, None) is not None:
        return
    for line in check_resume(args, recipe):
        _print_rank_0(line)
    record(args, recipe)


def check_resume(args, recipe: Recipe, *, switch: bool = False) -> list[str]:
    """Compare with the recipe in the checkpoint that this run will load. Returns notes to print.

    Raises `UserError` when it is another one, unless ``switch``, or ``--finetune``, which starts a new run.
    """
    from megatron.training.checkpointing import checkpoint_exists

    if not checkpoint_exists(args.load):
        return []
    found = _recorded(args)
    ours = _describe(recipe.name, recipe.fingerprint)
    if found is None:
        return [f"note: the checkpoint in {args.load} records no recipe; it goes on with {ours}"]
    if found["fingerprint"] == recipe.fingerprint:
        if recipe.to_dict().get("callable"):
            return [f"note: {ours} is a Python function: the checkpoint has its name, not what it says; keep it the same"]
        return []
    theirs = _describe(found["recipe"].get("name", "unnamed"), found["fingerprint"])
    if switch or args.finetune:
        return [f"note: the checkpoint in {args.load} was trained with {theirs}; it goes on with {ours}"]
    raise UserError(
        f"the checkpoint in {args.load} was trained with {theirs}, this run has {ours}; "
        "give the same recipe, or --hq-switch-recipe to go on with the new one"
    )


def loaded_recipe(args) -> Recipe | None:
    """The recipe of the checkpoint that was loaded, where it is another one; None too for a Python function's."""
    found = _recorded(args) if args.load else None
    if found is None or found["recipe"].get("callable"):
        return None
    return Recipe.from_dict(found["recipe"])


def _recorded(args) -> dict | None:
    """The record in the checkpoint that ``--load`` and ``--ckpt-step`` name, or None."""
    from megatron.training.checkpointing import load_args_from_checkpoint

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        # it lists every argument that it takes over, and torch says that it reads alone
        warnings.simplefilter("ignore", UserWarning)
        loaded = load_args_from_checkpoint(copy.deepcopy(args))
    text = getattr(loaded[1], RECORD, None) if isinstance(loaded, tuple) else None
    return None if text is None else json.loads(text)


def _describe(name: str, fingerprint: str) -> str:
    return f"recipe {name} ({fingerprint[:_SHORT]})"


def run_args():
    """Megatron's arguments, or None where a model is built without its training loop."""
    from megatron.training import get_args

    try:
        return get_args()
    except AssertionError:
        return None


def _print_rank_0(line: str) -> None:
    from megatron.training import print_rank_0

    print_rank_0(line)
