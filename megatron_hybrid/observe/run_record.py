"""What a run is, written beside its numbers: recipe, model, ranks, device. `megatron-hybrid report` reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..recipe import Recipe
from ..whole_file import write_whole

if TYPE_CHECKING:  # whoever reads a record need not load it
    import torch

SUFFIX = ".run.json"
_ARGUMENTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "global_batch_size",
    "micro_batch_size", "train_iters", "lr", "seed", "world_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "num_experts",
)  # fmt: skip


def record_path(numbers: Path) -> Path:
    """``metrics.jsonl`` has its record in ``metrics.run.json``."""
    return numbers.with_name(numbers.stem + SUFFIX)


def write(numbers: str | Path, recipe: Recipe, summary: list[str], args: dict, device: torch.device) -> None:
    """Describe the run whose numbers go into a file; a record that is there (of a run that is resumed) is replaced."""
    import torch

    path = record_path(Path(numbers))
    device = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    found = {
        "megatron_hybrid": __version__,
        "torch": torch.__version__,
        "device": device,
        "recipe": recipe.to_dict(),
        "fingerprint": recipe.fingerprint,
        "summary": summary,
        "arguments": {name: args[name] for name in _ARGUMENTS if args.get(name) is not None},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(found, indent=1, default=str) + "\n")


def read(numbers: Path) -> dict:
    """The record beside a file of numbers; empty where there is none. Raises ``ValueError`` for one that is damaged."""
    path = record_path(numbers)
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise TypeError(f"a mapping is expected, found {type(found).__name__}")
        recipe = found.get("recipe")
        if recipe is not None and not (isinstance(recipe, dict) and isinstance(found.get("fingerprint"), str)):
            raise TypeError("its recipe or fingerprint is damaged")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: not a record of a run ({error})") from None
    return found
