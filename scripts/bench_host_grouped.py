"""Grouped linears for `bench_host.py --grouped`, and kernels that do nothing, with which a machine without a GPU runs
what the host does where there is a Hopper one (`--no-kernels`)."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from bench_linear import load_recipe

import megatron_hybrid as mh
from megatron_hybrid import kernels, stacked
from megatron_hybrid.groups import Groups
from megatron_hybrid.testing.hopper import capsule, replacements

EMPTY = "autograd"


class TorchGrouped(torch.nn.Module):
    """What torch has for groups: `_grouped_mm` on a GPU, elsewhere a linear a group."""

    def __init__(self, num: int, features: int, **made):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(num, features, features, **made) * features**-0.5)

    def forward(self, x, sizes):
        if x.is_cuda:
            return torch._grouped_mm(x, self.weight.transpose(1, 2), offs=sizes.cumsum(0, dtype=torch.int32))
        return torch.cat([F.linear(part, w) for part, w in zip(x.split(sizes.tolist()), self.weight.unbind())])


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Nothing(TorchGrouped):
    """An empty function of autograd."""

    def forward(self, x, sizes):
        return _Nothing.apply(x, self.weight)


def layers(args) -> dict:
    """torch's groups, nothing, and every recipe's grouped linear: with the weight cast in every call and once a step,
    with `--python` both without the C++ node too where it runs them."""
    num, features, made = args.grouped, args.features, dict(device=args.device, dtype=torch.bfloat16)
    found = {EMPTY: Nothing(num, features, **made)}
    if not args.no_kernels:
        found = {"torch": TorchGrouped(num, features, **made), **found}
    ways = (False, True) if args.python else (False,)
    for name, cached, python in itertools.product(args.recipes, (False, True), ways):
        layer = mh.HybridGroupedLinear(num, features, features, recipe=load_recipe(name), name="experts.fc1", **made)
        if isinstance(layer.how, str):
            raise SystemExit(f"{name}: experts run one by one: {layer.how}")
        if cached:
            mh.prepare(layer, num_microbatches=1).begin_step(1)
        if python:
            if layer.how.node is None:
                continue
            layer.how.__dict__["node"] = None
        found[name + (", weight cached" if cached else "") + (", by Python" if python else "")] = layer
    sizes = torch.full((num,), args.tokens // num, dtype=torch.int32, device=args.device)
    sizes[0] += args.tokens - num * (args.tokens // num)
    return {name: Sized(layer, sizes, args.no_kernels) for name, layer in found.items()}


class Sized:
    """A grouped linear of groups of these sizes, called as a linear is. unread: sizes are where the host does not read
    them."""

    def __init__(self, layer, sizes, unread: bool):
        self.layer, self.sizes, self.weight, self.unread = layer, sizes, layer.weight, unread
        self.ours = isinstance(layer, mh.HybridGroupedLinear)
        self.host = sizes.tolist()

    def __call__(self, x):
        if not (self.unread and self.ours):
            return self.layer(x, self.sizes)
        groups = Groups(self.host, len(self.host), x.shape[0], x.device)
        groups._host, groups._device = None, self.sizes
        return self.layer(x, groups)


@contextlib.contextmanager
def no_kernels():
    """Grouped linears on the CPU are planned as on a Hopper GPU; casts and GEMMs of all groups do nothing."""
    from megatron_hybrid.ops_triton import grouped_gemm

    casts, none = kernels.extension("cpu"), ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    of_casts, *kept = capsule("megatron_hybrid.casts", [none] * 5)  # kept: here until the end
    of_gemms, *kept_too = capsule("megatron_hybrid.grouped", [none] * 2)

    def nothing(*args, **kwargs):
        pass

    interface = dict(INTERFACE=casts.INTERFACE)
    quiet = SimpleNamespace(
        FormatSpec=casts.FormatSpec, PANEL_ROWS=casts.PANEL_ROWS, CASTS=of_casts,
        quantize_pair=nothing, quantize=nothing, amax=nothing, group_amax=nothing, group_map=nothing, **interface,
    )  # fmt: skip
    gemms = SimpleNamespace(GROUPED=of_gemms, rows=nothing, columns=nothing, Codes=lambda *fields: fields, **interface)

    def turned(x):
        return x.new_empty(*x.shape[:-2], x.shape[-1], x.shape[-2])

    def made_map(sizes, count):
        blocks = [torch.empty(shape, dtype=torch.int32) for shape in (sizes.shape, (3, count))]
        return grouped_gemm.BlockMap(*blocks)

    with contextlib.ExitStack() as patched:
        for where, name, what in (
            *replacements(quiet, gemms), (grouped_gemm, "block_map", made_map), (stacked, "turned", turned),
            (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        ):  # fmt: skip
            patched.enter_context(patch.object(where, name, what, create=True))
        kernels._spec.cache_clear()
        yield
    kernels._spec.cache_clear()
