"""The linear of lean.py as a node of autograd written in C++ (csrc/node), where this package was built with it.

What Python costs in the thread that runs backward is more than what the node does there. A `NodePlan` tells the node once
what lean.py works out from a plan; the functions below are what the node still asks of Python. Calls that it does not take
(`runs` in csrc/node/linear.cpp) are lean.py's.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys

import torch

from . import kernels
from .formats import COLUMNWISE, DIRECTIONS, ROWWISE
from .gemm import cublaslt
from .gemm.backend import OPERANDS
from .gemm.scaled_mm import BLOCK, ROW, TENSOR, TILE
from .quantizer import as_matrix
from .saved import main_grad, placeholder_gradient  # noqa: F401  which the node calls
from .sharding import AS_IS, PAYLOAD, ROW_PAYLOAD, ROWS, block_along
from .storage import QuantizedStorage
from .storage_layout import relayout
from .tensor import HybridTensor

_KINDS = (None, TENSOR, ROW, BLOCK, TILE)  # as csrc/node counts them
_NO_TYPES, _NO_MODES = {torch.bfloat16: 0, torch.float32: 0}, {"none": 0}  # of a plan that does not ask cuBLASLt


@functools.lru_cache(maxsize=None)
def library():
    """The extension; None where it is not built, for another torch, or of another time than this file."""
    try:
        module = importlib.import_module("megatron_hybrid._C_node")
    except ImportError:
        return None
    return module if kernels.fits(module) else None


@functools.lru_cache(maxsize=None)
def serves(device_type: str) -> bool:
    """Whether linears on such devices can run by the node: it is there, and what it calls is there and of the same build."""
    try:
        casts = kernels.extension(device_type)
    except RuntimeError:
        return False
    products = cublaslt.library() if device_type == "cuda" else None
    return library() is not None and kernels.fits(casts) and (products is None or kernels.fits(products))


class NodePlan:
    """A plan as the node reads it. Calling it with (x, weight, bias, call) gives y, or None for a call that is lean.py's."""

    def __init__(self, casts: tuple, steps: tuple, kept: tuple[str, str], sums: bool, device_type: str, shards=None):
        """casts: an `OperandCast` an operand. steps: a `GemmStep` a gemm. kept: of input and weight, as `GemmPlan.saved`.
        shards: of a plan of several ranks, what `shards_of` says."""
        self._made_of = casts, steps, kept, sums, device_type, shards
        direct = any(_asks_cublaslt(step) for step in steps) and cublaslt.library() is not None
        types, modes = cublaslt.codes() if direct else (_NO_TYPES, _NO_MODES)
        self.run = library().Plan(
            sides=[[side(s) for s in (cast.row, cast.col)] for cast in casts],
            products=[_product(step) for step in steps], kept=kept, derives=[cast.derives for cast in casts], sums=sums,
            bf16=types[torch.bfloat16], fp32=types[torch.float32], no_scale=modes["none"],
            casts=kernels.extension(device_type).CASTS, matmul=cublaslt.library().MATMUL if direct else None,
            workspace_bytes=cublaslt.WORKSPACE, python=sys.modules[__name__],
            sharding=None if shards is None else library().Sharding(**shards),
        )  # fmt: skip

    def __reduce__(self):
        return NodePlan, self._made_of

    def __call__(self, x, weight, bias, call):
        return self.run(x, weight, bias, call)


def shards_of(plan) -> dict | None:
    """How ranks split a plan's operands, as the node reads it; None where it cannot run such a plan."""
    sharding, quantizers = plan.sharding, plan.quantizers
    reduced = [plan.reduced.get(operand, (False, False)) for operand in quantizers]
    amaxes = dict(reduced=reduced, same_amax=[q.has_one_amax for q in quantizers.values()])
    for operand, both in zip(quantizers, reduced):
        in_backward = plan.saved.get(operand, COLUMNWISE) != COLUMNWISE and not quantizers[operand].derives_columnwise
        if both[1] and in_backward:
            return None
    if sharding.gathered is None:
        return dict(gathered=-1, ways=[PAYLOAD] * 2, unit=1, **amaxes)
    formats = quantizers[sharding.gathered].formats()
    unit = math.lcm(*(block_along(fmt, d, ROWS) for fmt, d in zip(formats, DIRECTIONS)))
    ways = [plan.gather(direction, unit) for direction in DIRECTIONS]
    if not {PAYLOAD, ROW_PAYLOAD, AS_IS}.issuperset(ways):
        return None
    return dict(gathered=list(quantizers).index(sharding.gathered), ways=ways, unit=unit, **amaxes)


def side(side):
    """A `SideCast` as the node reads it."""
    fmt, axis = side.format, DIRECTIONS.index(side.direction)
    if not side.quantized:
        return library().Side(quantized=False, axis=axis)
    fields = kernels.spec_fields(fmt, side.direction)
    return library().Side(quantized=True, transposed=side.transposed, stateful=fmt.is_stateful, **fields)


def _asks_cublaslt(step) -> bool:
    how = step.multiply
    return how.route == "cublaslt" or (how.route == "decoded" and any(map(any, how.in_bf16)))


def _product(step):
    how = step.multiply
    if how.route == "decoded":
        return library().Product(route=how.route, backend=step.backend.name, in_bf16=how.in_bf16)
    if how.route != "cublaslt":
        return library().Product(route=how.route, backend=step.backend.name)
    types, modes = cublaslt.codes()
    kinds, dtypes = (how.kind_a, how.kind_b), (how.dtype_a, how.dtype_b)
    return library().Product(
        route=how.route, backend=step.backend.name, kinds=[_KINDS.index(kind) for kind in kinds],
        types=[types[dtype] for dtype in dtypes], modes=[modes[kind] for kind in kinds], rows_a=how.rows_a, fast=how.fast,
    )  # fmt: skip


# ---- what the node asks for


def workspace(device: int, stream: int) -> int:
    """The address of cuBLASLt's working memory on a stream."""
    return cublaslt.workspace(device, stream).data_ptr()


def constants(device: int) -> int:
    """The address of 0 and 1 in a device's memory; 0 where they are not there and cannot be made now."""
    found = cublaslt.constants(device)
    return 0 if found is None else found.data_ptr()


def cached(call, weight: torch.Tensor, columnwise: bool):
    """(rowwise, columnwise) payloads of a weight from its cache."""
    lean = call.plan.lean
    both = lean.cast_weight(weight, columnwise, call, None if call.state is None else call.state["weight"])
    return _parts(both[0], lean.weight.row), _parts(both[1], lean.weight.col)


def cast(call, operand: str, x: torch.Tensor, rowwise: bool, columnwise: bool, amaxes: tuple):
    """(rowwise, columnwise) payloads of an operand (M, K) that the node does not cast itself.

    amaxes: those that were reduced over ranks, flat, else None.
    """
    lean, formats = call.plan.lean, call.plan.quantizers[operand].formats()
    known = [a if a is None else a.view(f.amax_shape(*x.shape, d)) for a, f, d in zip(amaxes, formats, DIRECTIONS)]
    reduced = None if amaxes == (None, None) else lambda: known
    row, col = call.cast(operand, x, rowwise=rowwise, columnwise=columnwise, amax=reduced)
    return _parts(row, lean.side(operand, ROWWISE)), _parts(col, lean.side(operand, COLUMNWISE))


def has_memory(dy: torch.Tensor) -> bool:
    """Whether a gradient of a subclass is one whose payloads kernels can read."""
    if type(dy) is not HybridTensor:
        return False
    held = dy.rowwise or dy.columnwise
    return held is not None and not kernels.traced(held.qdata)


def gradients(call, needs: tuple, x, w, dy: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, shape: tuple) -> tuple:
    """Those of Python's linear, where dy has no memory or a graph is made of operators. x, w: payloads of the node, tensors
    or None."""
    from . import lean, linear

    casts = call.plan.lean
    by_operators = lean.gradients if casts.alone else linear.gradients
    kept = (
        casts.side(operand, casts.kept[operand]).payload(*k) if isinstance(k, tuple) else k
        for operand, k in (("input", x), ("weight", w))
    )
    return by_operators(call, needs, *kept, dy, weight, dtype, shape)


def derived_column(call, operand: str, row: tuple, whole: bool):
    """The columnwise payload of an operand that is cast from its rowwise one's decode. whole: see `LinearCall.cast`."""
    lean = call.plan.lean
    kept = lean.side(operand, ROWWISE).payload(*row)
    return _parts(call.columnwise(operand, kept, whole=whole), lean.side(operand, COLUMNWISE))


def column_of(call, row: tuple):
    """The columnwise payload of a whole gradient that holds the codes of its rowwise one."""
    from .gather import column_of

    lean = call.plan.lean
    return _parts(column_of(call, lean.grad_output.row.payload(*row)), lean.grad_output.col)


def payloads_of(call, dy: torch.Tensor, rowwise: bool, columnwise: bool):
    """(rowwise, columnwise) payloads of a gradient (..., N) that was cast as it was computed."""
    lean = call.plan.lean
    both = lean.cast_gradient(as_matrix(dy), rowwise, columnwise, call)
    return _parts(both[0], lean.grad_output.row), _parts(both[1], lean.grad_output.col)


def product(call, gemm: str, a: tuple, b: tuple, dtype: torch.dtype, total: torch.Tensor | None) -> torch.Tensor:
    """`GemmPlan.run` of two payloads of the node."""
    sides = [call.plan.lean.side(*which) for which in OPERANDS[gemm]]
    return call.plan.run(gemm, *(side.payload(*found) for side, found in zip(sides, (a, b))), dtype, total)


def _parts(s: QuantizedStorage | None, side):
    """(M, K, dtype, codes, scales, amaxes) of a payload, as the node takes it."""
    if s is None:
        return None
    s = relayout(s, side.transposed)
    return *s.shape, s.dtype, s.qdata, s.scale, s.outer_amax
