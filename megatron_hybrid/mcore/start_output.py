"""What a run prints before its first iteration: Megatron's lists of arguments, buckets and dataset files are left out unless
``--hq-full-log`` asks for them. Warnings are never touched."""

from __future__ import annotations

import functools
import logging

# loggers that describe how a run was set up, a line a parameter or file; a level given for one of them stays
_LISTING = (
    "megatron.core.datasets",
    "megatron.core.distributed",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.quantization.quant_config",
    "megatron.core.tokenizers",
)


def shorten(args) -> None:
    """Keep the set-up's INFO lines back. ``--logging-level`` and ``--hq-full-log`` leave everything as it is."""
    if args.hq_full_log or args.logging_level is not None:
        return
    for name in _LISTING:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)


def listing_if_asked(original):
    """Around Megatron's `_print_args`, some 850 lines: printed with ``--hq-full-log``, or where no recipe is chosen."""

    @functools.wraps(original)
    def print_args(title, args):
        if args.hq_recipe is None or args.hq_full_log:
            original(title, args)

    return print_args
