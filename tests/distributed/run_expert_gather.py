"""Checks of experts whose weights live quantized, under Megatron's distributed optimizer on 2 or 4 ranks.

The masters of an expert are split among the ranks that hold it: WORLD / EP of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from checks import run_checks, start
from mcore_model_common import mpu
from mcore_model_experts import moe
from run_param_gather import TILES, WORLD, assert_masters_are_cast, recipe, step, training, whole_masters

import megatron_hybrid as mh
from megatron_hybrid import patches

LIVES = dict(weights="quantized", param_gather="both")
EXPERTS = 4
# recipe, param_gather, master_cast: every kind of scale
RUNS = [
    ("mxfp8", "both", "fp32"), ("fp8_block", "both", "param_dtype"),
]  # fmt: skip


def experts(grouped: bool):
    return lambda chosen: moe(chosen, grouped=grouped, num_layers=1)


def check_after_a_step_the_bytes_are_the_whole_master_s():
    """P52, c45: grouped and one by one, over 1, 2 and all of the expert-data-parallel ranks; every weight moves."""
    for ep in (1, 2):
        for grouped in (True, False):
            for name, gather, cast in RUNS:
                chosen = recipe(name, weights="quantized", param_gather=gather, master_cast=cast)
                run = training(chosen, ep=ep, make=experts(grouped), clip=1.0)
                before = {n: p.detach().clone() for n, p in run[0].named_parameters()}
                for i in (1, 2):
                    step(run, i)
                    assert_masters_are_cast(run, before if i == 2 else {}, (name, gather, ep, grouped, i))
                mine = {n: p for n, p in run[0].named_parameters() if ".experts." in n}
                assert len(mine) == 2 * EXPERTS // ep and all(isinstance(p, mh.HybridTensor) for p in mine.values())
                assert mine.keys() <= whole_masters(run[0]).keys()
                assert all(p.get_high_precision_init_val() is None for p in mine.values())


def main() -> None:
    start()
    patches.apply_all()
    run_checks(globals())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
