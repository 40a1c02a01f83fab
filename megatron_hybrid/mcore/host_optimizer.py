"""``--hq-offload-optimizer``: Adam's moments in host memory between steps."""

from __future__ import annotations

from ..optimizer import OffloadedAdam
from ..patches.framework import Change, Patch, value
from . import versions
from .errors import UserError

# attribute in Megatron's arguments -> (flag, why it does not go together)
_NOT_BESIDE = {
    "optimizer_cpu_offload": ("--optimizer-cpu-offload", "both move the optimizer's state"),
    "use_precision_aware_optimizer": ("--use-precision-aware-optimizer", "it needs Transformer Engine's Adam"),
    "use_torch_fsdp2": ("--use-torch-fsdp2", "its parameters are DTensors"),
    "use_megatron_fsdp": ("--use-megatron-fsdp", "its parameters are DTensors"),
    "async_save": ("--async-save", "the next step changes the moments while they are written"),
    "optimizer_cuda_graph": ("--optimizer-cuda-graph", "a captured step cannot wait for the host"),
}


def refuse_unsupported(args) -> None:
    """Raise `UserError` for what does not go together with moments in host memory."""
    if not args.hq_offload_optimizer:
        return
    if args.optimizer != "adam":
        raise UserError(f"--hq-offload-optimizer keeps Adam's moments, beside --optimizer {args.optimizer}; leave one out")
    for attribute, (flag, why) in _NOT_BESIDE.items():
        if getattr(args, attribute, False):
            raise UserError(f"--hq-offload-optimizer beside {flag}: {why}; leave one out")


def patch() -> Patch:
    """Lets Megatron build its optimizers from `OffloadedAdam`; `patches.fused_adam` comes before."""
    return Patch(
        name="host_optimizer",
        changes=(
            Change("megatron.core.optimizer:Adam", value(OffloadedAdam)),
            Change("megatron.core.optimizer.distrib_optimizer:Adam", value(OffloadedAdam)),
        ),
        versions=versions.SUPPORTED,
        why="Megatron names the class of its optimizer in module globals",
        remove_when="Megatron takes an optimizer's class as an argument",
    )
