"""The recipe in Megatron's checkpoints: recorded in every one, compared when a run resumes.

The record is a JSON string in Megatron's arguments, which every checkpoint format stores and which loads without
any class of ours.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ..checkpoint_file import RECORD, TRACKER, CheckpointError, check_files, folder_of, named_by, reasons
from ..model_shape import flag_of
from ..recipe import QUANTIZED, Recipe
from ..recipe_grammar import CHOICES
from .errors import UserError
from .modules import enumerate_modules
from .planning import living

_SHORT = 12
_LIVING = "living"
_CHECKPOINT = re.compile(r"iter_(\d{7})")
_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")  # others have the same names of parameters


def record(args, recipe: Recipe, config) -> None:
    """Put the recipe where checkpoints are written from. Of a function, whose name is all there is, also which weights
    live quantized."""
    found = {"fingerprint": recipe.fingerprint, "recipe": recipe.to_dict()}
    if recipe.weights == QUANTIZED and found["recipe"].get("callable"):
        found[_LIVING] = living(recipe, config, own_head=_has_own_head(args))
    setattr(args, RECORD, json.dumps(found, sort_keys=True))


def record_in_run(recipe: Recipe, config) -> None:
    """`record` and `check_resume` for scripts that only name a spec; nothing is left to do for ours."""
    args = run_args()
    if args is None or getattr(args, RECORD, None) is not None:
        return
    for line in check_resume(args, recipe, config):
        _print_rank_0(line)
    record(args, recipe, config)


def check_resume(args, recipe: Recipe, config, *, switch: bool = False) -> list[str]:
    """Compare with the recipe in the checkpoint that this run will load. Returns notes to print.

    Raises `UserError` when it is another one, unless ``switch``, or ``--finetune``, which starts a new run; and for a
    checkpoint of another model's sizes, of another learning-rate schedule or with other weights that live quantized,
    which Megatron would refuse in a traceback. config: the model's, with what says which layers have how many experts.
    """
    from megatron.training.checkpointing import checkpoint_exists

    if args.load:  # the same on all ranks, whatever folders each of them sees
        check_tracker(args)
    if not checkpoint_exists(args.load):
        return nothing_to_load(args)
    saved = _saved_args(args)
    check_sizes(args, saved)
    check_schedule(args, saved)
    found = _record_of(saved)
    ours = _describe(recipe.name, recipe.fingerprint)
    if found is None:
        check_masters(args, saved, recipe, config)
        return [f"note: the checkpoint in {args.load} records no recipe; it goes on with {ours}"]
    if found["fingerprint"] == recipe.fingerprint:
        if recipe.to_dict().get("callable"):
            return [f"note: {ours} is a Python function: the checkpoint has its name, not what it says; keep it the same"]
        return []
    theirs = _describe(found["recipe"].get("name", "unnamed"), found["fingerprint"])
    if switch or args.finetune:
        check_masters(args, saved, recipe, config)
        return [f"note: the checkpoint in {args.load} was trained with {theirs}; it goes on with {ours}"]
    raise UserError(
        f"the checkpoint in {args.load} was trained with {theirs}, this run has {ours}; "
        "give the same recipe, or --hq-switch-recipe to go on with the new one"
    )


def nothing_to_load(args) -> list[str]:
    """Notes on a run that begins anew.

    Raises `UserError` where ``--load`` names what is no folder of checkpoints: a file, or one checkpoint inside of one.
    """
    if not args.load:
        return []
    path = Path(args.load)
    if path.is_file():
        raise UserError(f"--load {path} is a file; give the folder that a run had as --save")
    if path.is_dir() and (one := _CHECKPOINT.fullmatch(path.resolve().name)):
        raise UserError(
            f"--load {path} is one checkpoint; give the folder that it is in, and --ckpt-step {int(one[1])} for this one"
        )
    if args.exit_on_missing_checkpoint:
        return []
    unfinished = sorted(p.name for p in path.glob("iter_*")) if path.is_dir() else []
    why = f" that was finished, only {', '.join(unfinished)}" if unfinished else ""
    return [f"note: no checkpoint in {path}{why}: the run begins anew (--exit-on-missing-checkpoint: it ends instead)"]


def check_tracker(args) -> None:
    """Refuse a tracker that names no iteration, for which Megatron ends the run as if it were complete, or one that is
    not there or not all there. Rank 0 looks and all ranks raise: thousands need not ask for the sizes of thousands of files."""
    fault = _told_by_first_rank(lambda: _fault_of_folder(args))
    if fault is not None:
        raise UserError(fault)


def _told_by_first_rank(look: Callable[[], str | None]) -> str | None:
    """What `look()` returns on rank 0, on every rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return look()
    told = [look() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _fault_of_folder(args) -> str | None:
    tracker = Path(args.load) / TRACKER
    if not tracker.is_file():  # in storage that Megatron reads by a client of its own
        return None
    try:
        tracked = named_by(tracker)
    except CheckpointError as error:
        return str(error)
    named = folder_of(args.ckpt_step) if args.ckpt_step else tracked
    folder = Path(args.load) / named
    if not folder.is_dir():
        there = sorted(path.name for path in Path(args.load).glob("iter_*")) or ["none"]
        by = f"--ckpt-step {args.ckpt_step}" if args.ckpt_step else TRACKER
        return f"--load {args.load}: no {named} in it, which {by} names; there: {', '.join(there)}"
    kind = folder / "metadata.json"
    if (folder / ".metadata").is_file():
        try:
            check_files(folder)
        except CheckpointError as error:
            return f"the checkpoint in {args.load} cannot be read: {error}; copy it again"
    elif kind.is_file() and "torch_dist" in kind.read_text(errors="replace"):
        return f"the checkpoint in {args.load} cannot be read: {named} lacks its .metadata, as a copy that stopped does"
    return None


@dataclass(frozen=True)
class LoadedRecipe:
    """The recipe of the checkpoint that was loaded. recipe: None where it was a Python function; step: its last one."""

    fingerprint: str
    recipe: Recipe | None
    step: int


def loaded_recipe(args) -> LoadedRecipe | None:
    """The recipe of the checkpoint that was loaded; None where it records none."""
    iteration, saved = _saved(args) if args.load else (0, None)
    found = _record_of(saved)
    if found is None:
        return None
    recipe = None if found["recipe"].get("callable") else Recipe.from_dict(found["recipe"])
    return LoadedRecipe(found["fingerprint"], recipe, max(1, iteration))


def check_sizes(args, saved) -> None:
    """Refuse the checkpoint of a model of other sizes. A GPT may go on as a hybrid model, which counts layers its own way."""
    names = _SIZES[1:] if args.hybrid_layer_pattern or getattr(args, "moe_use_upcycling", False) else _SIZES
    for name in names:
        theirs, ours = getattr(saved, name, None), getattr(args, name, None)
        if None not in (theirs, ours) and theirs != ours:
            flag = flag_of(name)
            raise UserError(f"the checkpoint in {args.load} is of another model: {flag} {theirs}, this run has {flag} {ours}")


def check_masters(args, saved, ours: Recipe, config) -> None:
    """Refuse an optimizer's state that lies as its buffers did, where other weights lived quantized: Megatron keeps these
    in buffers of their own. A checkpoint without a record has none such."""
    lies_as_it_did = args.ckpt_format == "torch" or getattr(saved, "dist_ckpt_optim_fully_reshardable", None) is False
    if args.use_megatron_fsdp or not (args.use_distributed_optimizer and lies_as_it_did and loads_optimizer(args)):
        return
    found = _record_of(saved)
    kind = CHOICES["weights"][0] if found is None else found["recipe"].get("weights", CHOICES["weights"][0])
    before, now = _living_then(found, args, saved, config), living(ours, config, own_head=_has_own_head(args))
    roles = enumerate_modules(config)
    changed = next((role for role in roles if _lives(role, before) != _lives(role, now)), None)
    if kind != ours.weights and (before is None or changed is not None):
        then, here, go_on = f"`weights: {kind}`", f"`weights: {ours.weights}`", f"`weights: {kind}`"
        then += " (it records no recipe)" if found is None else ""
    elif before is not None and changed is not None:
        then, here = ("quantized" if _lives(changed, of) else "in high precision" for of in (before, now))
        then, here, go_on = f"a weight of {changed.label} that lives {then}", f"one that lives {here}", "its recipe"
    else:
        return
    raise UserError(
        f"the checkpoint in {args.load} has the optimizer's state of {then}, this run has {here}: "
        "it can go from one to the other where it was saved in --ckpt-format torch_dist with "
        f"--dist-ckpt-optim-fully-reshardable; add --no-load-optim, or go on with {go_on} and save it so"
    )


def _living_then(found: dict | None, args, saved, config) -> dict | None:
    """`living` of the recipe in a checkpoint; None where that cannot be known: of a function that did not say, and of
    a model whose layers are counted otherwise."""
    if found is None or found["recipe"].get("weights") != QUANTIZED:
        return {}
    if getattr(saved, "hybrid_layer_pattern", None) != args.hybrid_layer_pattern:
        return None
    if found["recipe"].get("callable"):
        return found.get(_LIVING)
    return living(Recipe.from_dict(found["recipe"]), config, own_head=_has_own_head(saved))


def _lives(role, found: dict | None) -> bool:
    return role.expert in (found or {}).get(role.name, ())


def _has_own_head(args) -> bool:
    """Whether the output layer's weight is a parameter besides the embedding's: always, where it is on another stage."""
    return bool(args.untie_embeddings_and_output_weights) or args.pipeline_model_parallel_size > 1


def loads_optimizer(args) -> bool:
    """Whether the run goes on with the optimizer's state of a checkpoint."""
    return bool(args.load) and not (args.no_load_optim or args.finetune)


def check_schedule(args, saved) -> None:
    """Refuse a run that goes on with the optimizer's state and another learning-rate schedule, unless told which to take."""
    chosen = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    theirs, ours = _schedule(saved), _schedule(args)
    if chosen or args.finetune or args.no_load_optim or theirs is None or ours is None or theirs == ours:
        return
    raise UserError(
        f"the checkpoint in {args.load} has {_describe_schedule(theirs)}, this run {_describe_schedule(ours)}; give the "
        "same --train-iters, --lr-decay-iters, --lr and --global-batch-size, or --override-opt-param-scheduler for this "
        "run's schedule, or --use-checkpoint-opt-param-scheduler for the checkpoint's"
    )


def _schedule(args) -> tuple | None:
    """Samples of training, samples until the learning rate is lowest, and its highest value; None where that is unknown."""
    if getattr(args, "train_samples", None):
        found = args.train_samples, args.lr_decay_samples or args.train_samples, args.lr
    elif getattr(args, "train_iters", None) and getattr(args, "global_batch_size", None):
        decay = args.lr_decay_iters or args.train_iters
        found = args.train_iters * args.global_batch_size, decay * args.global_batch_size, args.lr
    else:
        return None
    return None if None in found else found


def _describe_schedule(schedule: tuple) -> str:
    samples, decay, lr = schedule
    return f"a schedule of {samples} samples, the learning rate falling from {lr:g} over {decay}"


def _record_of(saved) -> dict | None:
    """The recipe's record in a checkpoint's arguments, or None."""
    text = getattr(saved, RECORD, None)
    return None if text is None else json.loads(text)


def _saved_args(args):
    """Megatron's arguments in the checkpoint that ``--load`` and ``--ckpt-step`` name, or None."""
    return _saved(args)[1]


def _saved(args) -> tuple:
    """The iteration of the checkpoint that ``--load`` and ``--ckpt-step`` name, also where ``--finetune`` starts
    anew, and Megatron's arguments in it; 0 and None where there are none."""
    from megatron.training.checkpointing import load_args_from_checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        # it lists every argument that it takes over, and torch says that it reads alone
        warnings.simplefilter("ignore", UserWarning)
        try:
            loaded = load_args_from_checkpoint(copy.deepcopy(args))
        except (Exception, CheckpointException) as error:  # whatever Megatron, torch or a damaged pickle raises
            said = reasons(error) if isinstance(error, CheckpointException) else f"{type(error).__name__}: {error}"
            raise UserError(f"the checkpoint in {args.load} cannot be read: {' '.join(said.split())}") from error
    return (loaded[0].iteration or 0, loaded[1]) if isinstance(loaded, tuple) else (0, None)


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
