"""The linear layer: three equations, six operands, one plan.

    fprop   y  = x  @ w.T     input.rowwise           weight.rowwise
    dgrad   dx = dy @ w       grad_output.rowwise     weight.columnwise
    wgrad   dw = dy.T @ x     grad_output.columnwise  input.columnwise

What each operand's two directions are, and what is kept between forward and backward, is the plan's; how tensors
move between ranks is the `Communication`'s; neither is decided here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from . import kernels
from .formats import COLUMNWISE, DIRECTIONS, ROWWISE
from .gather import start_grad_output, start_input, start_input_column
from .lean import casts_lean, lean_linear, runs_lean, sums_in_cast
from .plan import GRAD_OUTPUT, INPUT, ORIGINAL, WEIGHT, GemmPlan, PlanError
from .quantizer import as_matrix
from .saved import main_grad, placeholder_gradient, save_for_backward
from .scaling import Rng
from .tensor import HybridTensor, payload
from .weight_cache import WeightCache


class Communication:
    """How a linear's tensors move between ranks. This one does not: a single rank.

    Tensor-parallel layers pass their own (`megatron_hybrid.distributed`); which operand is split how, and which is
    gathered, is the plan's `sharding`. What starts a transfer returns a function that waits and gives the result.
    """

    rank, size = 0, 1
    in_node = None  # what csrc/node makes of it, where the C++ node can speak to these ranks

    def start_max(self, amaxes: list[torch.Tensor]):
        """Start taking the maximum of each amax over the ranks, in one collective."""
        return lambda: amaxes

    def start_gather(self, *tensors: torch.Tensor):
        """Start putting the ranks' tensors, each contiguous, together along dimension 0, all in one transfer."""
        return lambda: tensors

    def reduce_output(self, y: torch.Tensor) -> torch.Tensor:
        """What a rank gives back of its output (M, N)."""
        return y

    def reduce_dgrad(self, dx: torch.Tensor):
        """Start the reduction of the input gradient (M, K)."""
        return lambda: dx


LOCAL = Communication()


@dataclass(frozen=True)
class LinearCall:
    """What one call needs besides tensors: the plan, the ranks, and what the casts read."""

    plan: GemmPlan
    comm: Communication
    rng: dict | None = None  # operand -> Rng, for stochastic rounding
    state: dict | None = None  # operand -> (rowwise, columnwise) DelayedState
    weight_cache: WeightCache | None = None
    whole_rng: Rng | None = None  # of the gathered operand, where a rank casts all of it
    training: bool = False  # with gradients on

    def keys(self, operand: str, whole: bool = False) -> dict:
        rng = self.whole_rng if whole else (self.rng or {}).get(operand)
        return dict(rng=rng, state=(self.state or {}).get(operand))

    def quantize(self, operand, x, *, rowwise=False, columnwise=False, amax=None):
        """(rowwise, columnwise) payloads of an operand. amax: see `cast`.

        A `HybridTensor` brings its own, which must be the plan's; a weight's may be in its cache, which compiled
        code does not use.
        """
        if isinstance(x, HybridTensor):
            return self.plan.held_payloads(operand, x, rowwise, columnwise)

        def cast(x, *, rowwise, columnwise):
            return self.cast(operand, x, rowwise=rowwise, columnwise=columnwise, amax=amax)

        if operand == WEIGHT and self.weight_cache is not None and not torch.compiler.is_compiling():
            record = any(s is not None and s.history is not None for s in (self.state or {}).get(WEIGHT, ()))
            update = self.weight_update(x) if self.weight_cache.stands else None
            options = dict(record=record, training=self.training, update=update)
            return self.weight_cache.get(x, cast, (rowwise, columnwise), **options)
        return cast(x, rowwise=rowwise, columnwise=columnwise)

    def weight_update(self, weight):
        """`update` of `WeightCache.get`; None where other ranks' amaxes come into the cast."""
        if WEIGHT in self.plan.reduced:
            return None

        def update(row, col, noop):
            self.plan.quantizers[WEIGHT].update(row, col, as_matrix(weight.detach()), noop=noop, **self.keys(WEIGHT))

        return update

    def cast(self, operand, x, *, rowwise=False, columnwise=False, whole=False, amax=None):
        """`quantize` of a plain tensor, no cache.

        whole: x is all of a gathered operand, on every rank. amax: what `start_amaxes` returned, where it was called
        before.
        """
        keys = self.keys(operand, whole)
        if not whole and operand in self.plan.reduced:
            pair = self.weight_cache.amaxes() if operand == WEIGHT and self.weight_cache is not None else None
            if pair is None:
                pair = (amax or self.start_amaxes(operand, x, rowwise, columnwise))()
            keys |= dict(amax=pair, reduce_amax=self.reduce_amax(operand))
        given = keys["state"], keys.get("amax"), keys["rng"]
        if casts_lean(x, operand, self.plan, (rowwise, columnwise), *given):
            return self.plan.lean.cast(operand, x, rowwise, columnwise, *given)
        return self.plan.quantize(operand, x, rowwise=rowwise, columnwise=columnwise, **keys)

    def start_amaxes(self, operand, x, rowwise: bool, columnwise: bool):
        """Start the maximum over ranks of an operand's amaxes that cover other ranks' elements, where there are any.

        Returns a function that waits and gives the (rowwise, columnwise) pair; None for those the cast itself finds.
        """
        return start_amaxes([self], operand, [x], [(rowwise, columnwise)])[0]

    def own_amaxes(self, operand, x, rowwise: bool, columnwise: bool):
        """This rank's (rowwise, columnwise) amaxes that cover other ranks' elements too; None for the others."""
        row, col = self.plan.reduced.get(operand, (False, False))
        quantizer = self.plan.quantizers[operand]
        from_row = columnwise and quantizer.derives_columnwise  # the row is cast too, given out or not
        rowwise, columnwise = (rowwise or from_row) and row, columnwise and col
        if not (rowwise or columnwise):
            return None, None
        return quantizer.outer_amaxes(as_matrix(x), rowwise, columnwise)

    def reduce_amax(self, operand, direction=COLUMNWISE):
        """For an amax that is known only when the cast runs, as a derived column's is: a function that gives its maximum
        over the ranks, None where it covers this rank's elements alone."""
        if not self.plan.reduced.get(operand, (False, False))[DIRECTIONS.index(direction)]:
            return None
        return lambda amax: self.comm.start_max([amax])()[0]

    def columnwise(self, operand, kept, whole=False):
        """The columnwise payload, from what the plan kept of the operand. whole: see `cast`."""
        if isinstance(kept, torch.Tensor):
            return self.cast(operand, kept, columnwise=True, whole=whole)[1]
        if kept.direction == COLUMNWISE:
            return kept
        reduce = None if whole else self.reduce_amax(operand)
        return self.plan.derive(operand, kept, reduce_amax=reduce, **self.keys(operand, whole))


def start_amaxes(calls: list[LinearCall], operand: str, tensors, wanted: list[tuple[bool, bool]]) -> list:
    """`LinearCall.start_amaxes` of one operand of several linears that the same ranks share, in one collective.

    wanted: (rowwise, columnwise) of each.
    """
    pairs = [call.own_amaxes(operand, x, *both) for call, x, both in zip(calls, tensors, wanted)]
    own = {id(a): a for pair in pairs for a in pair if a is not None}  # one that both directions share goes once
    if not own:
        return [lambda: (None, None)] * len(pairs)
    wait = calls[0].comm.start_max(list(own.values()))
    found = functools.cache(lambda: dict(zip(own, wait())))
    return [lambda pair=pair: tuple(found().get(id(a)) for a in pair) for pair in pairs]


class HybridLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, call: LinearCall):
        needs = ctx.needs_input_grad
        y, x_kept, w_kept = forward(x, weight, bias, call, keep_input=needs[1], keep_weight=needs[0])
        ctx.call, ctx.weight, ctx.dtype, ctx.shape = call, weight, x.dtype, x.shape
        ctx.unpack = save_for_backward(ctx, x_kept, w_kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        kept = ctx.unpack(ctx.saved_tensors)
        return *gradients(ctx.call, ctx.needs_input_grad, *kept, dy, ctx.weight, ctx.dtype, ctx.shape), None


def gradients(call: LinearCall, needs, x_kept, w_kept, dy, weight, dtype, shape):
    """(dx, dw, db), None where `needs` has it that nobody asks.

    x_kept, w_kept: what `forward` kept; dtype, shape: of the input.
    """
    dx, dw, db = None, None, None
    wanted = dict(rowwise=needs[0], columnwise=needs[1])
    amax = call.start_amaxes(GRAD_OUTPUT, dy, *wanted.values())
    get_x = None
    if needs[1] and call.plan.gathered == INPUT:
        # before dgrad, which it overlaps; the reduction of dgrad's result comes after it and overlaps wgrad
        get_x = start_input_column(call, x_kept)
    if call.plan.gathered == GRAD_OUTPUT:
        get_dy_row, get_dy_col = start_grad_output(call, dy, **wanted, amax=amax)
    else:
        dy_row, dy_col = call.cast(GRAD_OUTPUT, dy, **wanted, amax=amax)
        get_dy_row, get_dy_col = (lambda: dy_row), (lambda: dy_col)
    if needs[0]:
        finish_dx = call.comm.reduce_dgrad(dgrad(call, get_dy_row(), w_kept, dtype))
    if needs[1]:
        x_kept = x_kept if get_x is None else get_x()
        dw = weight_gradient(call, get_dy_col(), x_kept, weight)
    if needs[2]:
        db = bias_gradient(call.plan, as_matrix(dy))
    if needs[0]:
        dx = finish_dx().view(shape)
    return dx, dw, db


def forward(x, weight, bias, call: LinearCall, *, keep_input: bool, keep_weight: bool):
    """`y` (..., N), and what is kept of x and of w for backward (None where nothing is needed).

    y is a fresh view at the end: Dynamo loses the gradients of a Function that returns what a `.to` without effect
    returned.
    """
    if call.plan.gathered == INPUT:
        if isinstance(x, HybridTensor):
            raise PlanError(f"{call.plan.label}: an input that is gathered cannot be quantized before")
        get_x, x_kept = start_input(call, x, keep_input)
        w_row, w_kept = _forward_operand(call, WEIGHT, weight, keep_weight)
        y = call.plan.run("fprop", get_x(), w_row, x.dtype)
    else:
        y, x_kept, w_kept = fprop(call, x, weight, keep_input=keep_input, keep_weight=keep_weight)
    y = call.comm.reduce_output(add_bias(y, bias))
    return torch.ops.aten._unsafe_view(y, (*_output_rows(x, y), weight.shape[0])), x_kept, w_kept


def _output_rows(x, y) -> tuple[int, ...]:
    """Leading dimensions of y (M', N): those of x; the first follows M' where rows were gathered or scattered."""
    rows = x.shape[:-1]
    if x.dim() < 2 or y.shape[0] == math.prod(rows):
        return rows
    return y.shape[0] * rows[0] // math.prod(rows), *rows[1:]


def add_bias(y, bias):
    """`y + bias` in y's dtype, rounded once."""
    if bias is None:
        return y
    if torch.compiler.is_compiling():
        from .ops import add_bias as opaque

        return opaque(y, bias)
    return torch.add(y, bias).to(y.dtype)


def bias_gradient(plan: GemmPlan, dy):
    """dy (M, N) summed over M, with the bits of the sums that `LeanLinear` takes in the cast."""
    return kernels.column_sums(dy) if sums_in_cast(plan) else dy.sum(dim=0)


def fprop(call: LinearCall, x, weight, *, keep_input: bool, keep_weight: bool, amax=None):
    """`y = x @ w.T` (M, N), and what is kept of x and of w for backward (None where nothing is needed).

    amax: of x, see `LinearCall.cast`.
    """
    x_row, x_kept = _forward_operand(call, INPUT, x, keep_input, amax)
    w_row, w_kept = _forward_operand(call, WEIGHT, weight, keep_weight)
    return call.plan.run("fprop", x_row, w_row, x.dtype), x_kept, w_kept


def dgrad(call: LinearCall, dy_row, w_kept, dtype):
    """`dx = dy @ w` (M, K) in `dtype`."""
    return call.plan.run("dgrad", dy_row, call.columnwise(WEIGHT, w_kept), dtype)


def wgrad(call: LinearCall, dy_col, x_kept, dtype, accumulate_into=None):
    """`dw = dy.T @ x` (N, K) in `dtype`, or added to `accumulate_into`."""
    x_col = call.columnwise(INPUT, x_kept)
    return call.plan.run("wgrad", dy_col, x_col, dtype, accumulate_into=accumulate_into)


def weight_gradient(call: LinearCall, dy_col, x_kept, weight):
    """What autograd gets: dw, or a placeholder once dw is in the weight's `main_grad`."""
    total = main_grad(weight)
    if total is None:
        return wgrad(call, dy_col, x_kept, weight.dtype)
    if torch.compiler.is_compiling():
        from .ops import add_to_main_grad

        return add_to_main_grad(weight, wgrad(call, dy_col, x_kept, torch.float32))
    wgrad(call, dy_col, x_kept, weight.dtype, accumulate_into=total)
    return placeholder_gradient(weight)


def _forward_operand(call, operand, x, keep: bool, amax=None):
    """(rowwise payload for fprop, what the plan keeps for backward) of an operand."""
    kept = call.plan.saved[operand] if keep else None
    if kept == ORIGINAL and isinstance(x, HybridTensor):
        kept = COLUMNWISE  # the original is not there any more, its columnwise payload is
    if kept == COLUMNWISE and isinstance(x, HybridTensor) and payload(x, COLUMNWISE) is None:
        kept = ROWWISE if call.plan.quantizers[operand].derives_columnwise else kept  # backward derives it
    row, col = call.quantize(operand, x, rowwise=True, columnwise=kept == COLUMNWISE, amax=amax)
    return row, {None: None, ROWWISE: row, COLUMNWISE: col, ORIGINAL: x}[kept]


def check_dtypes(plan: GemmPlan, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise `PlanError` for an input of another dtype than the weight's that the plan cannot take: what a product in high
    precision has no dtype for, unless autocast chooses one, and what no cast reads."""
    if not plan.fprop.pair.is_quantized:
        if not torch.is_autocast_enabled(x.device.type):
            raise PlanError(
                f"{plan.label}: fprop is in high precision, its input {x.dtype} and its weight {weight.dtype}; give it an "
                f"input in {weight.dtype}, or run it under torch.autocast"
            )
    elif x.dtype not in kernels.SOURCE_CODES:
        known = ", ".join(map(str, kernels.SOURCE_CODES))
        raise PlanError(f"{plan.label}: its input is {x.dtype}; what is quantized is one of {known}")


def hybrid_linear(x, weight, bias, call: LinearCall) -> torch.Tensor:
    """`x (..., K) @ weight (N, K).T + bias (N,)` as `call.plan` says; differentiable in all three.

    x and weight may be `HybridTensor`s whose formats are the plan's: they are not cast again, and gradients are
    those of the nominal tensors. Without gradients (`no_grad`) only rowwise copies are made and nothing is kept.

    `torch.compile(fullgraph=True)` traces it, forward and backward, with eager's bits; casts, roundings and the sum
    into `main_grad` stay opaque operators. Compiled code neither uses the weight cache nor counts in `plan.calls`.
    """
    if x.dtype is not weight.dtype:
        check_dtypes(call.plan, x, weight)
    if not kernels.traced(x) and runs_lean(x, weight, call):
        y = lean_linear(x, weight, bias, call)
        if y is not None:
            return y
    if not torch.is_grad_enabled():
        return forward(x, weight, bias, call, keep_input=False, keep_weight=False)[0]
    return HybridLinearFunction.apply(x, weight, bias, call)
