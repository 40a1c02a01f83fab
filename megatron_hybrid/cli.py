"""The `megatron-hybrid` command. Each subcommand is a module of `commands`: `add_arguments(parser)` and `run(args)`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import __version__
from .interrupts import imports_end_at_once, say
from .loading import recipe_warnings_as_lines, say_loading

COMMANDS = {
    "doctor": "check the installation: kernels, devices, gemm backends, Megatron, its patches, Apex",
    "explain": "what every gemm of a model would run, and the bytes it keeps and gathers; nothing is trained",
    "export": "write a checkpoint as a Hugging Face folder",
    "import": "write a Hugging Face folder as a checkpoint to train from",
    "report": "an HTML page about runs: losses, signal-to-noise ratios, outliers, time, recipes",
    "recipes": "list the shipped recipes, a line each",
}
_LOADS = {"doctor": ("torch", "megatron.core"), "explain": ("torch",), "export": ("torch",), "import": ("torch",)}
_MODULES = {"import": "import_"}  # a word of the language cannot be a module's name
EXIT_MISTAKE, EXIT_INTERRUPTED = 2, 130


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    main_parser = argparse.ArgumentParser(prog="megatron-hybrid", description="Tools of megatron_hybrid.")
    main_parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f".commands.{_MODULES.get(name, name)}", __package__)
        sub = commands.add_parser(name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Exit status: 0; 1 where a check failed; 2 for a mistake, whose cause is printed; 130 after Ctrl-C."""
    whole = parser()
    args = whole.parse_args(argv)
    if args.command is None:
        whole.print_help(sys.stderr)
        return EXIT_MISTAKE
    say_loading(*_LOADS.get(args.command, ()))
    try:
        with recipe_warnings_as_lines(), imports_end_at_once(lambda _: say("interrupted")):
            return args.run(args)
    except BrokenPipeError:  # a reader such as head has seen enough
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError, RuntimeError) as error:  # ours are ValueErrors that say what would be right
        print(f"error: {error}", file=sys.stderr)
        return EXIT_MISTAKE


if __name__ == "__main__":
    raise SystemExit(main())
