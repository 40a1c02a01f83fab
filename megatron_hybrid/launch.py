"""Run a Megatron pretraining script with recipes: its flags, ours beside them, nothing in the script changed.

    torchrun --nproc-per-node 2 -m megatron_hybrid.launch pretrain_gpt.py <Megatron's flags> --hq-recipe mxfp8

`prepare` does all of it, and scripts/pretrain_gpt.py calls it too: the CPU stand-in where there is no GPU, the
patches for machines without Transformer Engine and Apex, our flags in Megatron's parser, and our checks around its
own. The recipe reaches the model as `--spec`, whatever way the script builds it from there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import runpy
import sys
import warnings
from pathlib import Path

from .loading import recipe_warnings_as_lines, say_loading

USAGE = """usage: torchrun --nproc-per-node N -m megatron_hybrid.launch SCRIPT.py [Megatron's flags] [--hq-... flags]

Runs a Megatron pretraining script for GPT models with the flags of scripts/pretrain_gpt.py --help added to its own.
"""
_MODULE = "megatron.training.arguments"


def prepare(*, hybrid_models: bool = False) -> None:
    """Make this process ready for a script that trains with Megatron. Call it before megatron is imported.

    hybrid_models: the script gives hybrid models their layers (`mcore.hybrid_model.configure`); else they are refused.

    Raises `UserError` when Megatron-Core is missing or of another version, and `RecipeError` for a recipe that does
    not load, before the long imports. From here on a crash in compiled code prints the Python stack of every thread.
    """
    with contextlib.suppress(AttributeError, RuntimeError, io.UnsupportedOperation):  # a stderr that is no file
        if not faulthandler.is_enabled():
            faulthandler.enable()
    from .mcore import versions
    from .recipe import Recipe, RecipeWarning

    versions.require()
    for flag, value in zip(sys.argv, sys.argv[1:]):
        if flag == "--hq-recipe" and ":" not in value:  # not a function, which may import anything
            with warnings.catch_warnings():  # they are said when it is loaded again, by `_validating_ours`
                warnings.simplefilter("ignore", RecipeWarning)
                Recipe.load(value)

    say_loading("torch", "megatron.core")
    import torch

    from . import patches
    from .patches import cpu_device

    if not torch.cuda.is_available():
        cpu_device.install()
    patches.apply_all()
    arguments_patch(hybrid_models).apply()


@contextlib.contextmanager
def ending_groups():
    """Where a run over gloo ends well, its process groups end before Python does.

    A worker thread of gloo lets go of a finished operation's tensors a little later, for which it needs Python; where that
    is being taken apart, the C library ends a run that was complete ("terminate called without an active exception",
    torch 2.11, once in some dozen runs on a machine with too much to do).
    """
    try:
        yield
    except SystemExit as leave:
        if not leave.code:
            _end_groups()
        raise
    _end_groups()


def _end_groups() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def arguments_patch(hybrid_models: bool = False):
    """Our flags and checks inside Megatron's argument handling."""
    from .mcore import start_output, versions
    from .patches.framework import Change, Patch

    return Patch(
        name="arguments",
        changes=(
            Change(f"{_MODULE}:add_megatron_arguments", functools.partial(_adding_ours, hybrid_models)),
            Change(f"{_MODULE}:validate_args", _validating_ours),
            Change(f"{_MODULE}:_print_args", start_output.listing_if_asked),
        ),
        versions=versions.SUPPORTED,
        why="unmodified scripts have no place to add flags, and Megatron answers mistakes with assertions",
        remove_when="Megatron has a registry of extensions that may add flags",
    )


def _adding_ours(hybrid_models, original):
    @functools.wraps(original)
    def add_megatron_arguments(parser):
        from .mcore import arguments
        from .patches import cpu_device

        return arguments.add_arguments(original(parser), on_cpu=cpu_device.is_installed(), hybrid_models=hybrid_models)

    return add_megatron_arguments


def _validating_ours(original):
    @functools.wraps(original)
    def validate_args(args, *defaults, **kwargs):
        if not _chosen_recipe(args):
            return original(args, *defaults, **kwargs)
        from .mcore import run, start_output
        from .mcore.errors import megatrons_checks

        with recipe_warnings_as_lines():
            recipe = run.before_validation(args)
        start_output.shorten(args)
        quiet = io.StringIO() if args.hq_explain else sys.stdout
        with megatrons_checks(), contextlib.redirect_stdout(quiet):
            result = original(args, *defaults, **kwargs)
        with recipe_warnings_as_lines():
            run.after_validation(args, recipe)
        return result

    return validate_args


def _chosen_recipe(args) -> bool:
    """Settle ``args.hq_recipe``; False when the model's layers come from elsewhere."""
    from .mcore import arguments, validation

    if args.hq_recipe is None and args.spec is None:
        args.hq_recipe = arguments.DEFAULT_RECIPE
    elif args.hq_recipe is None and args.spec[0] == validation.RECIPES_MODULE and len(args.spec) == 2:
        args.hq_recipe = args.spec[1]
    return args.hq_recipe is not None


def main() -> None:
    from .mcore.errors import UserError, user_errors

    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(USAGE)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    with user_errors():
        script = Path(sys.argv[1])
        if not script.is_file():
            raise UserError(f"no script {script}; {USAGE.splitlines()[0]}")
        prepare()
        sys.argv = sys.argv[1:]
        sys.path[0] = str(script.resolve().parent)  # where a script's own imports are looked for
        with ending_groups():
            runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
