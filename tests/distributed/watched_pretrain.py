"""A training run whose gathers are counted, and whose gathered payloads are compared with a cast of the whole master.

    watched_pretrain.py counts check|count script.py ...

counts.<rank>: a line for every gather into one tensor: iteration, dtype, bytes of this rank. Only Megatron-FSDP's.
"""

from __future__ import annotations

import json
import runpy
import sys

import megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer as buffers
import torch
import torch.distributed as dist

from megatron_hybrid.mcore import fsdp_payloads
from megatron_hybrid.mcore.driver import Driver
from megatron_hybrid.tensor_owner import written_value


def count_gathers(path: str) -> None:
    original, begin = dist.all_gather_into_tensor, Driver.begin_step
    now = {"iteration": 0}

    def counted(output_tensor, input_tensor, *args, **kwargs):
        if sys._getframe(1).f_code.co_filename == buffers.__file__:
            with open(f"{path}.{dist.get_rank()}", "a") as file:
                line = [now["iteration"], str(input_tensor.dtype).removeprefix("torch."), input_tensor.nbytes]
                file.write(json.dumps(line) + "\n")
        return original(output_tensor, input_tensor, *args, **kwargs)

    def begin_step(self, completed):
        now["iteration"] += 1
        return begin(self, completed)

    dist.all_gather_into_tensor, Driver.begin_step = counted, begin_step


def compare_payloads() -> None:
    """Every gather's bytes are those of a cast of the whole master on one rank."""
    fill = fsdp_payloads.GroupGather.fill

    def compared(self, which):
        filled = self.passes[which].received is not None
        fill(self, which)
        if filled:
            for i, part in enumerate(self.passes[which].parts):
                compare(part, whole_master(self, i))

    fsdp_payloads.GroupGather.fill = compared


def whole_master(gather, i: int) -> torch.Tensor:
    pieces = [None] * gather.world
    dist.all_gather_object(pieces, gather.masters[i], group=gather.process_group)
    order = sorted(range(gather.world), key=lambda rank: gather.ranges[rank][i])
    device = gather.masters[i].device  # each came on its rank's
    return torch.cat([pieces[rank].to(device).reshape(-1) for rank in order]).view(gather.params[i].shape)


def compare(part, master: torch.Tensor) -> None:
    expected = part.quantizer.quantize(written_value(part, master))
    for found, of_whole in ((part.rowwise, expected.rowwise), (part.columnwise, expected.columnwise)):
        if found is not None:
            assert torch.equal(found.codes(), of_whole.codes()), part
            assert torch.equal(found.scale_inv(), of_whole.scale_inv()), part


if __name__ == "__main__":
    counts, mode, *sys.argv = sys.argv[1:]
    count_gathers(counts)
    if mode == "check":
        compare_payloads()
    runpy.run_path(sys.argv[0], run_name="__main__")
