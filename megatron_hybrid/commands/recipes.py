"""List the shipped recipes, a line each: name and what it does."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    from ..recipe import list_recipes

    rows = list_recipes()
    width = max(len(name) for name, _ in rows)
    for name, description in rows:
        print(f"{name.ljust(width)}  {description}")
    return 0
