"""The grouped linear of grouped_at_once.py in FP8 as a node of autograd written in C++ (csrc/node/grouped.cpp), where
this package was built with it.

A `GroupedNodePlan` tells the node once what is known of a plan, `why_not` says of which plans; the functions below are
what the node asks of Python. Calls that it does not take (`runs` in csrc/node/linear.cpp) are
`GroupedAtOnceFunction`'s.
"""

from __future__ import annotations

import sys

import torch

from . import kernels, node
from .formats import COLUMNWISE, DIRECTIONS, ROWWISE
from .gemm import grouped_cuda
from .gemm.grouped import PreparedFp8
from .grouped_payloads import GroupedPayloads
from .lean import SideCast
from .plan import GRAD_OUTPUT, INPUT
from .roles import OPERANDS
from .saved import main_grad, placeholder_gradient
from .stacked import GroupedColumns, StackedWeight, copied_rows
from .storage import QuantizedStorage
from .tensor import HybridTensor


def why_not(how) -> str | None:
    """Why calls of a `GroupedPlan` run by Python's function; None where they can run by the node."""
    plan = how.plans[0]
    if not node.serves(plan.device.type):
        return "the node is not built"
    if grouped_cuda.library() is None:
        return "FP8 GEMMs of all groups are not built in CUDA"
    for gemm in ("fprop", "dgrad", "wgrad"):
        if type(getattr(how, gemm)) is not PreparedFp8:
            return f"{gemm} runs by {getattr(how, gemm).name}"
    derives = plan.quantizers[INPUT].derives_columnwise
    for operand in (GRAD_OUTPUT,) if derives else (INPUT, GRAD_OUTPUT):
        if not how.casts[operand].one_read:
            return f"{operand} is not cast by rows and columns in one read"
    if not how.casts[INPUT].casts_tokens:
        return "the amaxes of its tokens are other ranks' too"
    for operand, kept in plan.saved.items():
        if kept != COLUMNWISE:
            return f"{operand} is kept as its {kept}"
    return None


class GroupedNodePlan:
    """A plan as the node reads it. Calling it with (x, weights, call) gives y, or None for a call that is Python's."""

    def __init__(self, plan, gemms: tuple[PreparedFp8, PreparedFp8, PreparedFp8], num: int):
        """plan: of any expert. gemms: fprop, dgrad and wgrad of all. num: of experts."""
        self._made_of, self._plan = (plan, gemms, num), plan
        self._derives = plan.quantizers[INPUT].derives_columnwise
        device, made = plan.device.type, node.library()
        sides = [[_side(plan, operand, direction) for direction in DIRECTIONS] for operand in OPERANDS]
        steps = [made.Product(route="python", backend=step.backend.name) for step in plan.steps().values()]
        expert = made.Plan(
            sides=sides, products=steps, kept=(COLUMNWISE, COLUMNWISE), derives=[False] * 3, sums=False, bf16=0, fp32=0,
            no_scale=0, casts=kernels.extension(device).CASTS, matmul=None, workspace_bytes=0,
            python=sys.modules[__name__], sharding=None,
        )  # fmt: skip
        products = [made.GroupedProduct(kind=grouped_cuda.kind_of(g.kind, g.fast), e5m2=g.e5m2) for g in gemms]
        self.run = made.GroupedPlan(
            expert=expert, products=products, gemms=grouped_cuda.library().GROUPED, experts=num,
            derives=self._derives,
        )  # fmt: skip

    @classmethod
    def of(cls, how) -> GroupedNodePlan | None:
        """Of a `GroupedPlan`; None where `why_not` says why."""
        return cls(how.plans[0], (how.fprop, how.dgrad, how.wgrad), len(how.plans)) if why_not(how) is None else None

    def __reduce__(self):
        return GroupedNodePlan, self._made_of

    def __call__(self, x: torch.Tensor, weights, call):
        groups, before = call.groups, type(x) is HybridTensor and not self._derives
        if call.call.plan is not self._plan or before or type(weights[0]) not in _WEIGHTS:
            return None
        return self.run(x, weights, groups.layout(grouped_cuda.BLOCK_ROWS).blocks, groups.copies, groups.sums, call)

    def computed(self, operand: str, x: torch.Tensor, layout, gate=None, grad=None, weights=None) -> tuple:
        """`GroupedCasts.computed`."""
        codes, scale, turned, scales = self.run.computed(operand == GRAD_OUTPUT, x, layout.blocks, gate, grad, weights)
        fmt, of, shape = self._plan.quantizers[operand], QuantizedStorage.of, tuple(codes.shape)
        row = of(fmt.rowwise, ROWWISE, shape, x.dtype, False, codes, scale)
        return row, of(fmt.columnwise, COLUMNWISE, (layout.rows, shape[1]), x.dtype, True, turned, scales)


def _side(plan, operand: str, direction: str):
    fmt = getattr(plan.quantizers[operand], direction)
    return node.side(SideCast(fmt, direction, direction == COLUMNWISE, plan.device.type))


_WEIGHTS = (torch.nn.Parameter, torch.Tensor, HybridTensor)  # not those that are gathered for a call


# ---- what the node asks for


def weights(call, weights, columnwise: bool) -> tuple:
    """(codes, scales) by rows, and where they are asked for the `StackedWeight` by columns, its codes and scales, and
    whether these are as parameters hold them."""
    row, col = call.weight(weights, rowwise=True, columnwise=columnwise)
    rows = row.by_rows()
    if col is None:
        return rows.qdata, rows.scale
    columns = col.payload
    return rows.qdata, rows.scale, col, columns.qdata, columns.scale, columns.direction == COLUMNWISE


def turned(weight: StackedWeight, codes: torch.Tensor, scale: torch.Tensor) -> tuple:
    """(codes, scales) of columns as the product reads them, made of what parameters hold."""
    rows = _with(weight, codes, scale).by_rows()
    return rows.qdata, rows.scale


def _with(weight: StackedWeight, codes, scale) -> StackedWeight:
    return StackedWeight(weight.payload.changed(qdata=codes, scale=scale), weight.direction, weight.format, weight.num)


def derived_input(call, x: torch.Tensor, columns: bool) -> tuple:
    """Of an input whose columns derive from its rows: (codes, scales) by rows, then by columns where those are asked
    for. It may be quantized before, as tokens are that travel so."""
    x, copies = call.taken(INPUT, x)
    if not columns:
        row = copied_rows(call.rows(INPUT, x), copies)
        return row.qdata, row.scale
    row, col = call.both(INPUT, x, copies)
    return row.qdata, row.scale, col.payload.qdata, col.payload.scale


def payloads(x: torch.Tensor) -> tuple | None:
    """(codes, scales) by rows, then by columns, of what was cast as it was computed; None for any other tensor."""
    if type(x) is not GroupedPayloads:
        return None
    row, col = x.row, x.columns.payload
    return row.qdata, row.scale, col.qdata, col.scale


def total(weight: torch.Tensor) -> tuple:
    """What a weight's gradient is added to, and what autograd gets instead; (None, None) where there is nothing."""
    found = main_grad(weight)
    return found, None if found is None else placeholder_gradient(weight)


def add_to(call, dy_codes, dy_scale, x_codes, x_scale, total: torch.Tensor) -> None:
    """Add the gradient of all weights to a total that the node's product cannot write."""
    dy, x = _columns(call, GRAD_OUTPUT, dy_codes, dy_scale), _columns(call, INPUT, x_codes, x_scale)
    call.how.wgrad.contract(call.how.plans, dy, x, total.dtype, total)


def weight_gradients(call, dy_codes, dy_scale, x_codes, x_scale, weights: list) -> list:
    """`GroupedCall.weight_gradients`."""
    dy, x = _columns(call, GRAD_OUTPUT, dy_codes, dy_scale), _columns(call, INPUT, x_codes, x_scale)
    return call.weight_gradients(dy, x, weights)


def gradients(call, wanted: tuple, x: tuple | None, w: StackedWeight | None, weights: list, dy, dtype) -> list:
    """Those of Python's function, where dy has no memory or a graph is made of operators. x: (codes, scales) by
    columns."""
    from .grouped_at_once import gradients

    x_kept = None if x is None else _columns(call, INPUT, *x).payload
    dx, _, dws = gradients(call, wanted, x_kept, None if w is None else w.payload, weights, dy, dtype)
    return [dx, *dws]


def _columns(call, operand: str, codes: torch.Tensor, scale: torch.Tensor) -> GroupedColumns:
    plan, (columns, rows) = call.how.plans[0], codes.shape
    fmt, shape = plan.quantizers[operand].columnwise, (rows, columns)
    payload = QuantizedStorage.of(fmt, COLUMNWISE, shape, call.how.dtype, True, codes, scale)
    return GroupedColumns(payload, call.groups.layout(call.how.alignment))
