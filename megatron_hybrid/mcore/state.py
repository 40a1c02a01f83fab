"""Delayed-scaling state in Megatron's checkpoints: plain tensors, the same on all tensor- and data-parallel ranks.

Megatron stores the tensors of all layers under one key, stacked, unless told otherwise; only some layers of a recipe
may have histories, and their lengths may differ, so these get a key a layer.
"""

from __future__ import annotations

from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from . import checkpoint

PREFIX = "hq."


def sharded(module, tensors: dict, prefix: str, offsets, metadata) -> dict:
    """A linear's sharded state dict with its histories under keys of their own."""
    hq = module._modules.get("hq")
    if hq is None or not hq._buffers:
        return tensors
    names = list(hq._buffers)
    layer = f"layer_{module.hq_layer}." if offsets else ""
    if module.hq_expert is not None:
        layer += f"expert_{module.hq_expert}."
    ours = make_sharded_tensors_for_checkpoint(
        {f"{PREFIX}{name}": hq._buffers[name] for name in names},
        prefix,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
    missing = hq.missing_state
    for name in names:
        tensor = ours[f"{prefix}{PREFIX}{name}"]
        tensor.key = f"{prefix}{PREFIX}{layer}{name}"
        if name in missing:
            tensor = LocalNonpersistentObject(tensor.data)
        tensors[f"{prefix}{PREFIX}{name}"] = tensor
    return tensors


def follow_recipe(args, controller) -> None:
    """With ``--hq-switch-recipe``: delayed scales that were loaded are made anew where formats differ."""
    from megatron.training.checkpointing import checkpoint_exists

    if checkpoint_exists(args.load) and any(runtime._buffers for runtime in controller.runtimes):
        recipe = checkpoint.loaded_recipe(args)
        if recipe is not None:
            controller.rescale_from(recipe, max(1, args.iteration))


def possible_keys(role, name: str) -> tuple[str, str]:
    """Where a checkpoint may hold a history: a layer a key, or stacked."""
    module = role.name
    if role.expert is not None:  # Megatron's keys of experts, whichever implementation
        module = module.replace(".experts.", ".experts.experts.", 1)
        name = f"expert_{role.expert}.{name}"
    apart = f"{module}.{PREFIX}{name}"
    if role.layer is None:
        return apart, apart
    number = f"layers.{role.layer - 1}."
    return apart, f"{module.replace(number, 'layers.', 1)}.{PREFIX}layer_{role.layer}.{name}"


def note_missing(runtimes, args) -> None:
    """Mark what the checkpoint to load does not hold: it starts fresh. Make room for histories of another length."""
    stateful = [runtime for runtime in runtimes if runtime._buffers]
    folder = checkpoint_folder(args) if stateful else None
    if folder is None:
        return
    found = {
        key: tuple(tensor.global_shape)
        for key, tensor in dist_checkpointing.load_tensors_metadata(str(folder)).items()
        if f".{PREFIX}" in key
    }
    total = missing = resized = 0
    for runtime in stateful:
        shapes = {
            name: next((found[key] for key in possible_keys(runtime.role, name) if key in found), None)
            for name in runtime._buffers
        }
        runtime.missing_state = {name for name, shape in shapes.items() if shape is None}
        total, missing = total + len(shapes), missing + len(runtime.missing_state)
        for name, shape in shapes.items():
            if shape is not None and shape != tuple(runtime._buffers[name].shape):
                runtime.take_length(name, *shape)
                resized += 1
    _say_missing(args, missing, resized, total)


def _say_missing(args, missing: int, resized: int, total: int) -> None:
    from megatron.training import print_rank_0

    if missing:
        print_rank_0(
            f"warning: the checkpoint in {args.load} lacks {missing} of this stage's {total} tensors of delayed scaling; "
            "they start fresh, with scale 1"
        )
    if resized:
        print_rank_0(
            f"note: the checkpoint in {args.load} has another length for {resized} of this stage's histories of "
            "delayed scaling; the newest amaxes of each stay"
        )


def forget_missing(runtimes) -> None:
    """Once training has begun, everything is saved."""
    for runtime in runtimes:
        runtime.missing_state = ()


def checkpoint_folder(args) -> Path | None:
    """The folder of the distributed checkpoint that this run will load, or None."""
    from megatron.training import checkpointing

    if args.load is None or not checkpointing.checkpoint_exists(args.load):
        return None
    # not Megatron's own reader, which is a collective: pipeline stages without histories do not come here
    text = Path(checkpointing.get_checkpoint_tracker_filename(args.load)).read_text().strip()
    iteration, release = (0, True) if text == "release" else (int(text), False)
    if args.ckpt_step is not None:
        iteration, release = args.ckpt_step, False
    folder = Path(checkpointing.get_checkpoint_name(args.load, iteration, release, return_base_dir=True))
    return folder if dist_checkpointing.check_is_distributed_checkpoint(str(folder)) else None
