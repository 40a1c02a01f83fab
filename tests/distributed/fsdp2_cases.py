"""What the checks of FSDP2 with payload gathers share."""

from __future__ import annotations

import os

import torch
from checks import arguments

import megatron_hybrid as mh

WORLD = int(os.environ["WORLD_SIZE"])
DEVICE = "cpu" if arguments().backend == "gloo" else "cuda"


def weight_recipe(row, col, source="original", **more):
    """Only weights are quantized: an emulated product with high-precision operands runs in any format."""
    columns = {} if source == "original" else {"columnwise_source": {"weight": source}}
    return mh.Recipe.from_dict(
        dict(
            version=1, name="pair",
            defaults=dict(
                fprop=dict(input="high_precision", weight=row),
                dgrad=dict(grad_output="high_precision", weight=col),
                wgrad="high_precision", **columns,
            ),
            **more,
        )
    )  # fmt: skip


def full(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def assert_same(a, b):
    assert a[0] == b[0], (a[0], b[0])
    for x, y in zip(a[1], b[1], strict=True):
        assert torch.equal(x, y)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def trained(model, ctl, optimizer, batch, steps, group=None, forward=None):
    """Losses of two microbatches a step, `batch(step, microbatch)`, and the whole weights at the end."""
    losses = []
    for i in range(1, steps + 1):
        ctl.begin_step(i)
        for j in range(2):
            ctl.microbatch(j)
            loss = (forward or model)(batch(i, j)).square().sum()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        ctl.end_step(group)
    return losses, [full(p).detach().clone() for p in model.parameters()]
