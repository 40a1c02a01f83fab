"""The `megatron-hybrid` command: `recipes` lists what ships. Other subcommands are not there yet (docs/status.md)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .recipe import list_recipes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megatron-hybrid", description="Tools of megatron_hybrid.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("recipes", help="list the shipped recipes, a line each")
    parser.parse_args(argv)
    rows = list_recipes()
    width = max(len(name) for name, _ in rows)
    for name, description in rows:
        print(f"{name.ljust(width)}  {description}")
    return 0
