"""Tensor-parallel linears by the C++ node in one process, whose other rank is torch's fake process group: which calls it
takes, and what surrounds them. Bits and collectives of real ranks: tests/distributed/run_tp.py."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from linear_cases import randn, recipe
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_hybrid import lean, node
from megatron_hybrid.distributed.tp import (
    ColumnParallel, ColumnSequenceParallel, RowSequenceParallel, TensorParallel, column_sharding, row_sharding,
)  # fmt: skip
from megatron_hybrid.linear import hybrid_linear
from megatron_hybrid.roles import ModuleRole
from megatron_hybrid.runtime import LinearRuntime
from megatron_hybrid.weight_cache import WeightCache

pytestmark = pytest.mark.skipif(node.library() is None, reason="this build has no _C_node")
K, N, RANKS = 64, 96, 2
KINDS = {"column": ColumnParallel, "column SP": ColumnSequenceParallel, "row": TensorParallel, "row SP": RowSequenceParallel}


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield dist.group.WORLD
    dist.destroy_process_group()


def runtime(kind: str, fmt="mxfp8_e4m3") -> LinearRuntime:
    sharding = column_sharding(RANKS, N, sequence_parallel="SP" in kind)
    if "row" in kind:
        sharding = row_sharding(RANKS, K, sequence_parallel="SP" in kind)
    hq = LinearRuntime(recipe(fmt, fmt, fmt), ModuleRole("linear", name="fc"), "cpu", sharding=sharding)
    hq.weight_cache = WeightCache()
    return hq


def tensors(kind: str, rows: int):
    """x, w: of this rank."""
    n, k = (N // RANKS, K) if "column" in kind else (N, K // RANKS)
    x = randn(rows // RANKS if kind == "column SP" else rows, 1, k)
    return x.requires_grad_(), randn(n, k, seed=1).requires_grad_()


def forward(kind: str, hq: LinearRuntime, x, w, comm=None, bias=None):
    comm = comm or KINDS[kind](dist.group.WORLD)
    rows = x.shape[0] // RANKS if kind == "row SP" else x.shape[0]
    return hybrid_linear(x, w, bias, hq.call(torch.device("cpu"), comm, training=True, rows=rows))


def traffic(kind: str, hq: LinearRuntime, x, w):
    """The collectives of a forward and a backward in their order, with sizes and types."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        forward(kind, hq, x, w).sum().backward()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    sent = [e for e in events if e.name().startswith("c10d::")]
    return [(e.name(), [math.prod(shape) for shape in e.shapes() if shape], e.dtypes()[:2]) for e in sent]


def by_node(y) -> bool:
    return type(y.grad_fn) is node.library().LinearBackward


@pytest.mark.parametrize("kind", KINDS)
def test_which_calls_it_takes(kind):
    hq, (x, w) = runtime(kind), tensors(kind, 128)
    y = forward(kind, hq, x, w)
    assert by_node(y) and y.shape == ({"column SP": 128, "row SP": 64}.get(kind, 128), 1, w.shape[0])
    assert not lean.takes_payloads(y), "what is gathered or reduced is a plain gradient"
    ragged = forward(kind, hq, *tensors(kind, 132))
    assert by_node(ragged) == ("SP" not in kind), "blocks that end inside another rank's rows are linear.py's"
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not by_node(forward(kind, hq, x, w))
    plain = TensorParallel(dist.group.WORLD)
    plain.in_node = None
    if kind == "row":
        assert not by_node(forward(kind, hq, x, w, plain))


def test_plans_that_are_left_to_python():
    """Amaxes that are kept in payloads and cover other ranks."""
    for kind, fmt, taken in (
        ("column SP", "nvfp4", True), ("row", "nvfp4", True), ("row", "nvfp4:row_scaled", True),
        ("row SP", "nvfp4:sr", True), ("row", "nvfp4:rht,sr", True),
        ("row", "fp8_rowwise_e4m3", True), ("column SP", "fp8_current_e4m3", True), ("row SP", "mxfp8_e4m3", True),
    ):  # fmt: skip
        assert (runtime(kind, fmt).plan_for(torch.device("cpu")).lean.node is not None) == taken, (kind, fmt)


def test_an_amax_of_a_weight_that_nobody_keeps_is_python_s():
    """Its maximum over ranks is found where the weight is cast."""
    hq, (x, w) = runtime("row", "fp8_current_e4m3"), tensors("row", 32)
    assert by_node(forward("row", hq, x, w))
    hq.weight_cache = None
    assert not by_node(forward("row", hq, x, w))


def test_a_bias_inside_of_a_linear_whose_gradient_is_gathered_is_python_s():
    hq, (x, w) = runtime("row SP"), tensors("row SP", 128)
    assert not by_node(forward("row SP", hq, x, w, bias=randn(N).requires_grad_()))
    assert by_node(forward("row SP", hq, x, w, bias=randn(N)))


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_backward_without_memory(kind):
    hq, (x, w) = runtime(kind), tensors(kind, 32)
    y = forward(kind, hq, x, w, TensorParallel(dist.group.WORLD))
    assert by_node(y)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y.backward(torch.ones_like(y))
    assert type(x.grad) is type(w.grad) is FakeTensor
    assert x.grad.shape == x.shape and w.grad.shape == w.shape


def test_a_second_backward_is_refused():
    hq, (x, w) = runtime("column SP"), tensors("column SP", 64)
    y = forward("column SP", hq, x, w)
    y.backward(torch.ones_like(y))
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(torch.ones_like(y))


def test_copies_of_a_plan():
    """Its parts in C++ are made anew."""
    hq, (x, w) = runtime("row SP"), tensors("row SP", 128)
    expected = forward("row SP", hq, x, w)
    for other in (copy.deepcopy(hq), pickle.loads(pickle.dumps(hq))):
        y = forward("row SP", other, x, w)
        assert by_node(y) and y.shape == expected.shape


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "fp8_current_e4m3", "fp8_delayed_e4m3"])
def test_a_gathered_gradient_travels_in_one_order(fmt):
    """Its row first, in high precision too: one rank may run by Python."""
    sent = []
    for python in (False, True):
        formats = recipe(fmt, {"grad_output": "high_precision", "weight": fmt}, fmt)
        sharding = row_sharding(RANKS, K, sequence_parallel=True)
        hq = LinearRuntime(formats, ModuleRole("linear", name="fc"), "cpu", sharding=sharding)
        hq.weight_cache = WeightCache()
        lean_casts = hq.plan_for(torch.device("cpu")).lean
        assert lean_casts.node is not None
        if python:
            lean_casts.node = None
        sent.append(traffic("row SP", hq, *tensors("row SP", 128)))
    assert sent[0] == sent[1]
    gathers = [types[0] for name, _, types in sent[0] if name == "c10d::_allgather_base_"]
    assert gathers == ["c10::BFloat16", "unsigned char"]


class OfPython(dist.ProcessGroup):
    """As wrappers that rebuild a group, or that survive lost ranks: C++ knows of no backend."""

    def __init__(self):
        super().__init__(0, RANKS)


def test_a_group_that_is_a_class_of_python_s(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    comm = TensorParallel(OfPython())
    assert comm.in_node is None and TensorParallel(dist.group.WORLD).in_node is not None
    hq, (x, w) = runtime("row"), tensors("row", 32)
    assert not by_node(forward("row", hq, x, w, comm))


def test_a_checked_backend_has_no_coalesced_gather(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert TensorParallel(dist.group.WORLD)._coalesces
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    assert not TensorParallel(dist.group.WORLD)._coalesces


def test_it_is_not_there_for_another_torch():
    """Classes of torch's C++ are laid out otherwise there."""
    script = (
        "import torch, megatron_hybrid.node as node; torch.__version__ = {!r}; "
        "raise SystemExit(node.library() is not None)"
    )
    for version, found in ((torch.__version__, 1), ("2.999.0+cu999", 0)):
        assert subprocess.run([sys.executable, "-c", script.format(str(version))], timeout=120).returncode == found
