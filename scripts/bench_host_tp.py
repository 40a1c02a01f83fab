"""Tensor-parallel linears of one process for `bench_host.py --tensor-parallel`: the other rank is a stand-in.

Collectives of torch's fake process group start and end where they are called and copy what this rank puts in, so that what is
left is the host's work: Megatron's own linears in bf16, and ours by recipe.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

RANKS = 2
MEGATRON = "Megatron's own"
KINDS = ("column SP", "row SP", "column", "row")


@contextmanager
def stand_in(device: str):
    """A tensor-parallel group of two ranks in this process; where there is no GPU, who asks for one is given the CPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with patch.object(torch.cuda, "current_device", (lambda: "cpu") if device == "cpu" else torch.cuda.current_device):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        from megatron.core import mpu

        mpu.initialize_model_parallel(tensor_model_parallel_size=RANKS, create_gloo_process_groups=False)
        try:
            yield
        finally:
            mpu.destroy_model_parallel()
            dist.destroy_process_group()


def linears(kind: str, args) -> dict:
    """Megatron's own linear of a kind, and ours by recipe: with the weight cast once for all, and anew in every call; with
    `--python` both without the C++ node too. Each is a function of x that gives y; see `shapes`."""
    found = {MEGATRON: Linear(kind, args, None)}
    for name in args.recipes:
        for anew, python in itertools.product((False, True), (False, True) if args.python else (False,)):
            said = name + (", weight cast" if anew else "") + (", by Python" if python else "")
            found[said] = Linear(kind, args, name, anew=anew, python=python)
    return found


def shapes(kind: str, args) -> tuple[tuple, tuple]:
    """Of a rank's x and of its y."""
    split, whole = args.features // RANKS, args.features
    rows = args.tokens // RANKS if "SP" in kind else args.tokens
    if "column" in kind:
        return (rows, 1, whole), (args.tokens, 1, split)
    return (args.tokens, 1, split), (rows, 1, whole)


class Linear(torch.nn.Module):
    """One linear of a model of many layers; `recipe` None: Megatron's own. anew: every call is a step's first."""

    def __init__(self, kind: str, args, recipe: str | None, *, anew: bool = False, python: bool = False):
        super().__init__()
        self.anew = anew
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.transformer_config import TransformerConfig

        from megatron_hybrid.mcore.layers import HybridColumnParallelLinear, HybridRowParallelLinear

        cfg = TransformerConfig(
            num_layers=80, hidden_size=args.features, num_attention_heads=RANKS, bf16=True, params_dtype=torch.bfloat16,
            tensor_model_parallel_size=RANKS, sequence_parallel="SP" in kind, gradient_accumulation_fusion=False,
            use_cpu_initialization=True,
        )  # fmt: skip
        common = dict(config=cfg, init_method=torch.nn.init.xavier_normal_, bias=False, skip_bias_add=False)
        if "column" in kind:
            made = (ColumnParallelLinear if recipe is None else HybridColumnParallelLinear), dict(gather_output=False)
        else:
            made = (RowParallelLinear if recipe is None else HybridRowParallelLinear), dict(input_is_parallel=True)
        self.linear = made[0](args.features, args.features, **made[1], **common).to(args.device)
        if recipe is not None:
            self._quantize(recipe)
        if python and self.linear.plan.lean is not None:
            self.linear.plan.lean.node = None

    def _quantize(self, recipe: str) -> None:
        from bench_linear import load_recipe
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig

        from megatron_hybrid.mcore import driver
        from megatron_hybrid.mcore.recipe_hook import carry

        layer = self.linear.config.num_layers // 2  # no recipe's first or last
        self.linear.hq_layer = layer + 1
        context = MatchContext(f"decoder.layers.{layer}.mlp.linear_fc1", layer)
        carried = carry(load_recipe(recipe)).configs["megatron_hybrid"]
        self.linear.finish_init(QuantizationConfig(carried, context, "megatron_hybrid"))
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        driver.attach([self], seed=1).controller.begin_step(1)

    @property
    def weight(self) -> torch.Tensor:
        return self.linear.weight

    def forward(self, x):
        if self.anew:
            self.linear.is_first_microbatch = True
        return self.linear(x)[0]
