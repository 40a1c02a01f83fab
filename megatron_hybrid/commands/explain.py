"""What every gemm of a model would run: operands, formats, backend, native or emulated, bytes kept and gathered.

The model is a file of Megatron's flags (configs/models/*.yaml) or what a checkpoint records. Nothing is built or
allocated, and the device need not be there: --device sm_100 plans for a GPU of that architecture.
"""

from __future__ import annotations

import argparse
import re

_SM = re.compile(r"sm_?(\d+)(\d)a?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--recipe, --model or --checkpoint, --device, --per-layer."""
    parser.add_argument(
        "--recipe", metavar="NAME|PATH", help="the recipe; default: the one that a --checkpoint was trained with"
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="FILE.yaml", help="Megatron's flags of a model, as in configs/models")
    model.add_argument("--checkpoint", metavar="DIR", help="a torch_dist checkpoint, or the folder of --save")
    parser.add_argument(
        "--device", default="here", metavar="sm_90|cpu", help="sm_NN, cpu, or here: this machine's (the default)"
    )
    parser.add_argument(
        "--per-layer", action="store_true", help="a row for every linear and gemm, some 200 columns wide, nothing grouped"
    )


def run(args: argparse.Namespace) -> int:
    """Print the tables. Raises ``ValueError`` for a recipe or model that cannot be planned."""
    from ..checkpoint_file import Checkpoint
    from ..mcore.modules import enumerate_modules
    from ..mcore.planning import explained, headline, plans_by_step, with_bf16_edges
    from ..model_shape import ModelShape
    from ..recipe import Recipe

    if args.checkpoint:
        checkpoint = Checkpoint(args.checkpoint)
        shape = ModelShape.of(checkpoint.args, args.checkpoint)
        recorded = checkpoint.recipe if args.recipe is None else None
        if args.recipe is None and recorded is None:
            raise ValueError(f"{args.checkpoint} records no recipe; say which with --recipe")
        recipe = Recipe.from_dict(recorded) if args.recipe is None else Recipe.load(args.recipe)
    elif args.recipe is None:
        raise ValueError("explain --model needs --recipe NAME|PATH (`megatron-hybrid recipes` lists names)")
    else:
        shape, recipe = ModelShape.load(args.model), Recipe.load(args.recipe)
    recipe = with_bf16_edges(recipe, shape)
    recipe.check_matches(enumerate_modules(shape))
    device = parse_device(args.device)
    print(headline(recipe, device))
    for part in explained(plans_by_step(recipe, shape, device, shape), shape, per_layer=args.per_layer):
        print(part)
    return 0


def parse_device(text: str):
    """The `DeviceKind` of ``cpu``, ``here`` or ``sm_90``. Raises ``ValueError`` for anything else."""
    import torch

    from ..gemm import DeviceKind

    if text == "here":
        return DeviceKind.of("cuda" if torch.cuda.is_available() else "cpu")
    if text == "cpu":
        return DeviceKind("cpu")
    if match := _SM.fullmatch(text):
        return DeviceKind("cuda", (int(match.group(1)), int(match.group(2))))
    raise ValueError(f"--device {text}: expected cpu, here, or an architecture such as sm_90")
