"""The linear layer: three equations, six operands, one plan.

    fprop   y  = x  @ w.T     input.rowwise           weight.rowwise
    dgrad   dx = dy @ w       grad_output.rowwise     weight.columnwise
    wgrad   dw = dy.T @ x     grad_output.columnwise  input.columnwise

What each operand's two directions are, and what is kept between forward and backward, is the plan's; how tensors
move between ranks is the `Communication`'s; neither is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .formats import COLUMNWISE, ROWWISE
from .plan import GRAD_OUTPUT, INPUT, ORIGINAL, WEIGHT, GemmPlan
from .storage import QuantizedStorage


class Communication:
    """How a linear's tensors move between ranks. This one does not: a single rank.

    Tensor-parallel layers pass their own (`megatron_hybrid.distributed`).
    """

    keeps_local_input = False  # True: backward gathers the input again instead of keeping the gathered payload

    def gather_input(self, x: torch.Tensor) -> torch.Tensor:
        """The full input of the GEMMs from this rank's."""
        return x

    def reduce_dgrad(self, dx: torch.Tensor):
        """Start the reduction of the input gradient; returns a function that waits and gives the result."""
        return lambda: dx


LOCAL = Communication()


class WeightCache:
    """A weight's payloads inside one microbatch window: cast once a step, not once a microbatch.

    The window is opened and closed by `invalidate`, which the optimizer step, a parameter sync and a load call.
    The storage pointer and torch's version counter are checked too, but they alone do not see writes through
    `.data` or a flat buffer.
    """

    def __init__(self):
        self.invalidate()

    def __reduce__(self):
        return WeightCache, ()  # a copied or pickled module starts with an empty cache

    def invalidate(self) -> None:
        self._key, self._held = None, [None, None]

    def get(self, weight, cast, wanted: tuple[bool, bool]):
        """(rowwise, columnwise) payloads; `cast(weight, rowwise=, columnwise=)` makes those not held yet."""
        key = (weight.data_ptr(), weight._version, weight.device)
        if key != self._key:
            self.invalidate()
            self._key = key
        missing = [w and h is None for w, h in zip(wanted, self._held)]
        if any(missing):
            new = cast(weight, rowwise=missing[0], columnwise=missing[1])
            self._held = [n if m else h for n, m, h in zip(new, missing, self._held)]
        return tuple(h if w else None for h, w in zip(self._held, wanted))


@dataclass(frozen=True)
class LinearCall:
    """What one call needs besides tensors: the plan, the ranks, and what the casts read."""

    plan: GemmPlan
    comm: Communication = LOCAL
    rng: dict | None = None  # operand -> Rng, for stochastic rounding
    state: dict | None = None  # operand -> (rowwise, columnwise) DelayedState
    weight_cache: WeightCache | None = None

    def keys(self, operand: str) -> dict:
        return dict(rng=(self.rng or {}).get(operand), state=(self.state or {}).get(operand))

    def quantize(self, operand, x, *, rowwise=False, columnwise=False):
        """(rowwise, columnwise) payloads of an operand, the weight's from its cache when there is one."""

        def cast(x, *, rowwise, columnwise):
            return self.plan.quantize(operand, x, rowwise=rowwise, columnwise=columnwise, **self.keys(operand))

        if operand == WEIGHT and self.weight_cache is not None:
            return self.weight_cache.get(x, cast, (rowwise, columnwise))
        return cast(x, rowwise=rowwise, columnwise=columnwise)

    def columnwise(self, operand, kept):
        return self.plan.columnwise(operand, kept, **self.keys(operand))


class HybridLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, call: LinearCall):
        comm, needs = call.comm, ctx.needs_input_grad
        x_full = comm.gather_input(x)
        y, x_kept, w_kept = fprop(call, x_full, weight, keep_input=needs[1], keep_weight=needs[0])
        if comm.keeps_local_input and needs[1]:
            x_kept = x
        ctx.call, ctx.weight, ctx.shape, ctx.dtype = call, weight, x_full.shape, x.dtype
        ctx.unpack = save_for_backward(ctx, x_kept, w_kept)
        y = y.view(*x_full.shape[:-1], weight.shape[0])
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, dy):
        call, comm, weight, needs = ctx.call, ctx.call.comm, ctx.weight, ctx.needs_input_grad
        x_kept, w_kept = ctx.unpack(ctx.saved_tensors)
        finish_dx, dw, db = (lambda: None), None, None
        dy_row, dy_col = call.quantize(GRAD_OUTPUT, dy, rowwise=needs[0], columnwise=needs[1])
        if needs[0]:
            dx = dgrad(call, dy_row, w_kept, ctx.dtype)
            finish_dx = comm.reduce_dgrad(dx.view(ctx.shape))
        if needs[1]:
            if comm.keeps_local_input:
                x_kept = comm.gather_input(x_kept)
            main_grad = getattr(weight, "main_grad", None)
            dw = wgrad(call, dy_col, x_kept, weight.dtype, accumulate_into=main_grad)
            dw = dw if main_grad is None else placeholder_gradient(weight)
        if needs[2]:
            db = dy.reshape(-1, dy.shape[-1]).sum(dim=0)
        return finish_dx(), dw, db, None


def fprop(call: LinearCall, x, weight, *, keep_input: bool, keep_weight: bool):
    """`y = x @ w.T` (M, N), and what is kept of x and of w for backward (None where nothing is needed)."""
    x_row, x_kept = _forward_operand(call, INPUT, x, keep_input)
    w_row, w_kept = _forward_operand(call, WEIGHT, weight, keep_weight)
    return call.plan.run("fprop", x_row, w_row, x.dtype), x_kept, w_kept


def dgrad(call: LinearCall, dy_row, w_kept, dtype):
    """`dx = dy @ w` (M, K) in `dtype`."""
    return call.plan.run("dgrad", dy_row, call.columnwise(WEIGHT, w_kept), dtype)


def wgrad(call: LinearCall, dy_col, x_kept, dtype, accumulate_into=None):
    """`dw = dy.T @ x` (N, K) in `dtype`, or added to `accumulate_into`."""
    x_col = call.columnwise(INPUT, x_kept)
    return call.plan.run("wgrad", dy_col, x_col, dtype, accumulate_into=accumulate_into)


def _forward_operand(call, operand, x, keep: bool):
    """(rowwise payload for fprop, what the plan keeps for backward) of an operand."""
    kept = call.plan.saved[operand] if keep else None
    if kept == COLUMNWISE and call.comm.keeps_local_input and operand == INPUT:
        kept = ORIGINAL  # the caller keeps the local shard instead
    row, col = call.quantize(operand, x, rowwise=True, columnwise=kept == COLUMNWISE)
    return row, {None: None, ROWWISE: row, COLUMNWISE: col, ORIGINAL: x}[kept]


def save_for_backward(ctx, *kept):
    """Hand payloads to autograd as plain tensors; returns the function that rebuilds them in backward."""
    tensors, frames = [], []
    for item in kept:
        buffers = item.buffers() if isinstance(item, QuantizedStorage) else {} if item is None else {"": item}
        frame = replace(item, qdata=None, scale=None, outer_amax=None) if isinstance(item, QuantizedStorage) else None
        frames.append((frame, tuple(buffers)))
        tensors.extend(buffers.values())
    ctx.save_for_backward(*tensors)

    def unpack(saved):
        saved = iter(saved)
        out = []
        for frame, names in frames:
            buffers = {n: next(saved) for n in names}
            out.append(frame.with_buffers(buffers) if frame is not None else buffers.get(""))
        return out

    return unpack


def placeholder_gradient(weight) -> torch.Tensor:
    """What backward returns once the gradient is in `weight.main_grad`.

    Megatron's DDP hooks need a gradient to exist, and add nothing once `grad_added_to_main_grad` is set.
    """
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)


def hybrid_linear(x, weight, bias, call: LinearCall) -> torch.Tensor:
    """`x (..., K) @ weight (N, K).T + bias (N,)` as `call.plan` says; differentiable in all three."""
    return HybridLinearFunction.apply(x, weight, bias, call)
