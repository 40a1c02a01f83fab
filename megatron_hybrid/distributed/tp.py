"""How a column-parallel linear's tensors move between the ranks of a tensor-parallel group.

A row-parallel linear needs nothing here: its reduction lies outside its GEMMs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..linear import Communication


class ColumnParallel(Communication):
    """The input is the same on every rank; the input gradient is the sum over ranks.

    The sum runs while the weight gradient is computed.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def reduce_dgrad(self, dx: torch.Tensor):
        work = dist.all_reduce(dx, group=self.group, async_op=True)

        def finish():
            work.wait()
            return dx

        return finish


class SequenceParallel(Communication):
    """The input is split along its first dimension, the sequence; so is the input gradient.

    Backward gathers the input again instead of keeping the gathered copy, as Megatron does: a rank's share is all
    that stays in memory. Gathers are in high precision.
    """

    keeps_local_input = True

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def gather_input(self, x: torch.Tensor) -> torch.Tensor:
        return self.start_gather(x)()

    def start_gather(self, x: torch.Tensor):
        x = x.contiguous()
        full = torch.empty(x.shape[0] * self.group.size(), *x.shape[1:], dtype=x.dtype, device=x.device)
        work = dist.all_gather_into_tensor(full, x, group=self.group, async_op=True)

        def finish(_keep_alive=x):
            work.wait()
            return full

        return finish

    def reduce_dgrad(self, dx: torch.Tensor):
        local = torch.empty(dx.shape[0] // self.group.size(), *dx.shape[1:], dtype=dx.dtype, device=dx.device)
        work = dist.reduce_scatter_tensor(local, dx, group=self.group, async_op=True)

        def finish(_keep_alive=dx):
            work.wait()
            return local

        return finish
