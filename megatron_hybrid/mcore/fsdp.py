"""Megatron's ``--use-torch-fsdp2``: payload gathers where the recipe asks for them.

FSDP2 shards high-precision parameters, which stay the masters: a recipe with ``param_gather: both`` (or ``rowwise``, where
the column follows from the row), without ``weights: quantized``, gathers their payloads. The gather moves the direction that a pass
needs, whichever of the two the recipe names.
"""

from __future__ import annotations

from ..distributed.fsdp2 import gather_quantized
from ..distributed.param_gather import HIGH_PRECISION
from ..plan import PlanError


def gather_payloads(chunk, args, controller) -> None:
    """Arrange it for one chunk, wrapped and loaded, and say on rank 0 what is gathered how.

    Raises `PlanError` under ``--hq-strict`` for a quantized weight that is gathered in high precision.
    """
    if controller.runtimes[0].recipe.param_gather == HIGH_PRECISION:
        return
    gathers = gather_quantized(chunk, controller, recompute=args.recompute_granularity is not None)
    if getattr(args, "hq_strict", False) and gathers.skipped:
        path, reason = next(iter(gathers.skipped.items()))
        raise PlanError(f"--hq-strict: {path}.weight is gathered in high precision (--use-torch-fsdp2): {reason}")
    if args.rank == 0:
        print(gathers, flush=True)
