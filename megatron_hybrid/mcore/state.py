"""Delayed-scaling state in Megatron's checkpoints: plain tensors, the same on all tensor- and data-parallel ranks.

Megatron stores the tensors of all layers under one key, stacked, unless told otherwise; only some layers of a recipe
may have histories, and their lengths may differ, so these get a key a layer.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ..checkpoint_file import RECORD
from . import checkpoint

PREFIX = "hq."
_FSDP_MODEL = "model.module."  # before a parameter's path, in checkpoints of Megatron-FSDP


class Fresh(LocalNonpersistentObject):
    """A tensor that the checkpoint lacks. Megatron's experts one by one give whatever they hold a number of its copy."""

    replica_id = (0, 0, 0)


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
            tensor = Fresh(tensor.data)
        tensors[f"{prefix}{PREFIX}{name}"] = tensor
    return tensors


def follow_recipe(args, controller) -> None:
    """With ``--hq-switch-recipe`` or ``--finetune``: loaded delayed scales are made anew where formats differ."""
    from megatron.training.checkpointing import checkpoint_exists

    if checkpoint_exists(args.load) and any(runtime._buffers for runtime in controller.runtimes):
        loaded = checkpoint.loaded_recipe(args)
        is_same = loaded is not None and loaded.fingerprint == json.loads(getattr(args, RECORD))["fingerprint"]
        from_there = args.finetune and loaded is not None and loaded.recipe is not None  # its last step is not ours
        if loaded is not None and (from_there or not is_same):
            controller.rescale_from(loaded.recipe, loaded.step)


def possible_keys(role, name: str, *, fsdp: bool = False) -> tuple[str, ...]:
    """Where a checkpoint may hold a history: a layer a key, or stacked; with fsdp, in one of Megatron-FSDP."""
    module = role.name
    if fsdp:
        if role.expert is None:
            return (f"{_FSDP_MODEL}{module}.{PREFIX}{name}",)
        alone = module.replace(".experts.", f".experts.local_experts.{role.expert}.", 1)
        return f"{_FSDP_MODEL}{module}.{PREFIX}{role.expert}.{name}", f"{_FSDP_MODEL}{alone}.{PREFIX}{name}"
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
    fsdp = args.use_megatron_fsdp
    found = {key: shape for key, shape in _shapes(folder, fsdp).items() if f".{PREFIX}" in key}
    total = missing = resized = 0
    for runtime in stateful:
        shapes = {
            name: next((found[key] for key in possible_keys(runtime.role, name, fsdp=fsdp) if key in found), None)
            for name in runtime._buffers
        }
        runtime.missing_state = {name for name, shape in shapes.items() if shape is None}
        runtime.expect_scales()
        total, missing = total + len(shapes), missing + len(runtime.missing_state)
        for name, shape in shapes.items():
            if shape is not None and shape != tuple(runtime._buffers[name].shape):
                runtime.take_length(name, *shape)
                resized += 1
    _say_missing(args, missing, resized, total)


def _shapes(folder: Path, fsdp: bool) -> dict[str, tuple[int, ...]]:
    """Of every tensor in a checkpoint, by key."""
    if fsdp:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
        return {key: tuple(tensor.size) for key, tensor in stored.items() if isinstance(tensor, TensorStorageMetadata)}
    return {key: tuple(t.global_shape) for key, t in dist_checkpointing.load_tensors_metadata(str(folder)).items()}


def without_missing(state_dict: dict, model) -> dict:
    """A state dict to load in place, without the buffers that the checkpoint lacks; nothing is lacking once training began."""
    modules = (module for module in model.modules() if getattr(module, "missing_state", ()))
    lacks = {module._buffers[name].data_ptr() for module in modules for name in module.missing_state}
    if not lacks:
        return state_dict
    kept = {key: value for key, value in state_dict["model"].items() if _address(value) not in lacks}
    return state_dict | {"model": kept}


def _address(value) -> int | None:
    """Of a tensor that is whole here."""
    return value.data_ptr() if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else None


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
    if args.use_megatron_fsdp:
        return folder if (folder / ".metadata").is_file() else None
    return folder if dist_checkpointing.check_is_distributed_checkpoint(str(folder)) else None
