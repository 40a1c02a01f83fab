"""Subcommands of `megatron-hybrid`, one module each: `add_arguments(parser)` and `run(args) -> exit status`.

Importing them imports neither torch nor Megatron.
"""
