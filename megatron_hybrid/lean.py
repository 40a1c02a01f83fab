"""The linear of linear.py for its commonest case, in as few host operations as there are.

One rank, plain tensors, columns cast from the original tensor, nobody watching: then everything but the tensors is known
once the plan is built. Equations, payloads and what is kept for backward are those of linear.py, bit for bit; only the way
there is shorter. `LeanCasts.of` says which plans these are, `runs_lean` which calls.
"""

from __future__ import annotations

import functools

import torch
from torch.autograd.function import once_differentiable

from . import kernels, node
from .formats import COLUMNWISE, ROWWISE, Format
from .quantizer import HybridQuantizer, as_matrix
from .saved import main_grad, placeholder_gradient, save_for_backward
from .storage import SCALE_DTYPES, QuantizedStorage
from .tensor import HybridTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BLOCK = 16  # of formats that draw


class SideCast:
    """One direction of an operand: how its payload is allocated, and what the kernels are told about it."""

    def __init__(self, fmt: Format, direction: str, transposed: bool, device_type: str):
        self._made_of = fmt, direction, transposed, device_type
        self.format, self.direction, self.quantized = fmt, direction, fmt.is_quantized
        self.transposed = transposed and fmt.is_quantized
        self.index = 0 if direction == ROWWISE else 1
        self.measures, self.keeps_amax = fmt.outer_axis != "none", fmt.keeps_amax
        self.scale_dtype = SCALE_DTYPES.get(fmt.scale)
        self.scratch = device_type == "cuda" and direction == ROWWISE and fmt.outer_axis == "row"
        self.spec = kernels.spec(fmt, direction, torch.device(device_type)) if fmt.is_quantized else None

    def __reduce__(self):
        return SideCast, self._made_of

    def empty(self, x: torch.Tensor, states, known=None):
        """(payload of `x` (M, K) to be written, arguments for `kernels.cast_directions`, what lives until then).

        known: the amax, where it is not to be measured; reduced over ranks.
        """
        (M, K), device, fmt = x.shape, x.device, self.format
        rows, last = (K, M) if self.transposed else (M, K)
        qdata = torch.empty((rows, fmt.packed(last)), dtype=torch.uint8, device=device)
        scale = torch.empty(fmt.scale_shape(M, K, self.direction), dtype=self.scale_dtype, device=device)
        amax = measured = scratch = None
        if fmt.is_stateful:
            amax, measured = states[self.index].scale, states[self.index].history
        elif known is not None:
            amax = known
        elif self.measures:
            amax = measured = torch.empty(fmt.amax_shape(M, K, self.direction), dtype=torch.float32, device=device)
            scratch = kernels.row_scratch(M, device) if self.scratch else None
        outer = amax if self.keeps_amax else None
        payload = QuantizedStorage.of(fmt, self.direction, (M, K), x.dtype, self.transposed, qdata, scale, outer)
        arguments = (
            self.spec, qdata.data_ptr(), self.transposed, scale.data_ptr(), 0 if amax is None else amax.data_ptr(),
            fmt.is_stateful, 0 if measured is None else measured.data_ptr(),
            0 if scratch is None else scratch.data_ptr(),
        )  # fmt: skip
        return payload, arguments, (amax, scratch)

    def made(self, x: torch.Tensor, states, known):
        """`empty`; of `x` (M, K) in high precision: itself, and nothing to be written."""
        if self.quantized:
            return self.empty(x, states, known)
        return QuantizedStorage.of(self.format, self.direction, tuple(x.shape), x.dtype, False, x), None, None

    def payload(self, M: int, K: int, dtype, codes, scale, amax) -> QuantizedStorage:
        """The payload (M, K) over tensors of these, or over their bytes."""
        fmt, shape = self.format, (M, K)
        if not self.quantized:
            return QuantizedStorage.of(fmt, self.direction, shape, dtype, False, codes)
        rows, last = (K, M) if self.transposed else shape
        qdata = codes.view(rows, fmt.packed(last))
        scale = scale.view(self.scale_dtype).view(fmt.scale_shape(M, K, self.direction))
        outer = None if amax is None else amax.view(torch.float32).view(fmt.amax_shape(M, K, self.direction))
        return QuantizedStorage.of(fmt, self.direction, shape, dtype, self.transposed, qdata, scale, outer)


class OperandCast:
    """`HybridQuantizer.cast` of one operand of a plan."""

    def __init__(self, quantizer: HybridQuantizer, transposed: bool, device_type: str):
        self.quantizer, self.transposed, self.derives = quantizer, transposed, quantizer.derives_columnwise
        self.row = SideCast(quantizer.rowwise, ROWWISE, False, device_type)
        self.col = SideCast(quantizer.columnwise, COLUMNWISE, transposed, device_type)

    @property
    def takes_computed(self) -> bool:
        """Whether both directions can be cast as they are computed: no scale needs to know all of it before."""
        known = all(s.quantized and (s.format.is_stateful or not s.measures) for s in (self.row, self.col))
        return known and not self.derives

    def __call__(
        self, x: torch.Tensor, rowwise: bool, columnwise: bool, states, amaxes=(None, None), sums=None, rng=None,
        **computed,
    ):  # fmt: skip
        """(rowwise, columnwise) payloads of `x` (M, K), None where not asked for.

        amaxes: those known, contiguous. rng: an `Rng` of one part, where a direction draws. sums, computed: see
        `kernels.cast_directions`.
        """
        if kernels.traced(x):  # where autograd has it that was not in forward: kernels are operators
            known = dict(state=states, amax=amaxes, rng=rng, transposed=self.transposed)
            return self.quantizer.cast(x, rowwise=rowwise, columnwise=columnwise, **known)
        row = col = rows = cols = alive_row = alive_col = None
        if rowwise:
            row, rows, alive_row = self.row.made(x, states, amaxes[0])
        if columnwise:
            col, cols, alive_col = self.col.made(x, states, amaxes[1])
        if rows is not None or cols is not None or sums is not None:
            if (rowwise and self.row.format.sr) or (columnwise and self.col.format.sr):
                computed |= dict(rng=rng.words(x.shape[1]), row_ids=rng.row_ids)
            kernels.cast_directions(x, rows, cols, sums=sums, **computed)
        del alive_row, alive_col  # not before
        return row, col

    def takes_parts(self, x: torch.Tensor, wanted: tuple[bool, bool], amaxes, rng) -> bool:
        """Whether `in_parts` can cast `x` (..., K): both directions draw, parts are whole blocks, and no amax that is to
        be found covers several of them."""
        dim, keys = rng.parts
        extent = x.shape[-1] if dim else x.numel() // max(x.shape[-1], 1)
        if self.derives or extent % (len(keys) * _BLOCK):
            return False
        sides = [(s, a) for s, want, a in zip((self.row, self.col), wanted, amaxes) if want]
        each = [a is not None or (s.format.outer_axis == "row" and s.index == dim) for s, a in sides]
        return all(each) and all(s.format.sr for s, _ in sides)

    def in_parts(self, x: torch.Tensor, rowwise: bool, columnwise: bool, amaxes, rng):
        """The payloads of `x` (M, K) that is made of equally long runs, each of which draws with its own key: a call of
        the kernels a run. amaxes: see `__call__`; of all of x."""
        dim, keys = rng.parts
        length = x.shape[dim] // len(keys)
        pairs = []
        for i, key in enumerate(keys):
            run = dim, i * length, length
            known = [a if a is None or not a.dim() or a.shape[dim] == 1 else a.narrow(*run) for a in amaxes]
            pairs.append(self(x.narrow(*run), rowwise, columnwise, None, known, rng=key))
        shape, directions = tuple(x.shape), zip(zip(*pairs), amaxes)
        return tuple(None if runs[0] is None else _joined(runs, dim, shape, amax) for runs, amax in directions)


def _joined(runs: tuple[QuantizedStorage, ...], dim: int, shape: tuple[int, int], amax) -> QuantizedStorage:
    """The payload of a matrix of this shape from those of its runs along a dimension. amax: outer ones of all of it, or
    None where each run has its own."""
    qdata = torch.cat([s.qdata for s in runs], dim=1 - dim if runs[0].transposed else dim)
    scale = torch.cat([s.scale for s in runs], dim=dim)
    outer = torch.cat([s.outer_amax for s in runs], dim=dim) if amax is None else amax
    return runs[0].changed(shape=shape, qdata=qdata, scale=scale, outer_amax=outer)


def sums_in_cast(plan) -> bool:
    """Whether the bias gradient is what a cast of grad_output sums (CUDA); that of plain tensors is torch's."""
    return any(f is not None and f.is_quantized for f in plan.quantizers["grad_output"].formats())


class LeanCasts:
    """The casts of a plan, and what its forward keeps as columnwise payloads."""

    def __init__(self, plan):
        self.input, self.weight, self.grad_output = (
            OperandCast(plan.quantizers[op], plan.transposed(op), plan.device.type) for op in plan.quantizers
        )
        self.kept, self.shards = dict(plan.saved), None
        if plan.sharding is not None:
            self.shards = node.shards_of(plan)
            if plan.gathered == "input" and self.shards is not None:
                self.kept["input"] = plan.kept_of_gathered(self.shards["unit"])
        self.keeps_input, self.keeps_weight = (self.kept[op] == COLUMNWISE for op in ("input", "weight"))
        # whether this module runs such a plan without the node; else linear.py does
        self.alone = plan.sharding is None and not any(q.derives_columnwise for q in plan.quantizers.values())
        self.sums = sums_in_cast(plan)
        self.stateful = any(f.is_stateful for q in plan.quantizers.values() for f in q.formats())
        self.draws = plan.draws
        self.node = self._node(plan) if node.serves(plan.device.type) else None

    def _node(self, plan) -> node.NodePlan | None:
        if plan.sharding is not None and self.shards is None:
            return None
        casts = self.input, self.weight, self.grad_output
        steps, kept = tuple(plan.steps().values()), (self.kept["input"], self.kept["weight"])
        return node.NodePlan(casts, steps, kept, self.sums, plan.device.type, self.shards)

    def has_states(self, states) -> bool:
        """Whether what these casts scale by history is there."""
        return states is not None or not self.stateful

    def has_keys(self, rng) -> bool:
        """Whether the keys that these casts draw with are there, of one part each where the node may not be the one to cast:
        it asks linear.py for operands whose keys have more."""
        if not self.draws:
            return True
        return rng is not None and (not self.alone or all(rng[op].parts is None for op in self.draws))

    @classmethod
    def of(cls, plan) -> LeanCasts | None:
        """None for a plan that needs more than this."""
        quantizers = plan.quantizers.values()
        known = ("input", "weight", "grad_output") == tuple(plan.quantizers)
        return cls(plan) if known and all(q.rowwise and q.columnwise for q in quantizers) else None

    def side(self, operand: str, direction: str) -> SideCast:
        cast = getattr(self, operand)
        return cast.row if direction == ROWWISE else cast.col

    def cast_weight(self, weight, columnwise: bool, call, states):
        """(rowwise, columnwise) payloads of a call's weight, from its cache where there is one."""
        if not self.alone:
            return call.quantize("weight", weight, rowwise=True, columnwise=columnwise)
        rng = (call.rng or {}).get("weight")
        if call.weight_cache is None:
            return self.weight(weight, True, columnwise, states, rng=rng)

        def cast(weight, *, rowwise, columnwise):
            return self.weight(weight, rowwise, columnwise, states, rng=rng)

        record = states is not None and any(s is not None and s.history is not None for s in states)
        update = call.weight_update(weight) if call.weight_cache.stands else None
        return call.weight_cache.get(weight, cast, (True, columnwise), record=record, training=call.training, update=update)

    def cast_gradient(self, dy, rowwise: bool, columnwise: bool, call, sums=None):
        """(rowwise, columnwise) payloads of dy (M, N); one that was cast as it was computed brings them."""
        if type(dy) is HybridTensor:  # see `takes_payloads`
            return call.plan.held_payloads("grad_output", dy, rowwise, columnwise)
        states, rng = ((keys or {}).get("grad_output") for keys in (call.state, call.rng))
        return self.grad_output(dy, rowwise, columnwise, states, sums=sums, rng=rng)

    def cast(self, operand: str, x: torch.Tensor, rowwise: bool, columnwise: bool, states, amaxes, rng=None):
        """`GemmPlan.quantize` of `x` (..., K), where `casts_lean` holds. amaxes: (rowwise, columnwise), or None."""
        known = tuple(a if a is None else a.contiguous() for a in amaxes or (None, None))
        cast, x2d = getattr(self, operand), as_matrix(x)
        if operand in self.draws and rng.parts is not None:
            return cast.in_parts(x2d, rowwise, columnwise, known, rng)
        return cast(x2d, rowwise, columnwise, states, known, rng=rng)


def casts_lean(x, operand: str, plan, wanted: tuple[bool, bool], states, amaxes, rng) -> bool:
    """Whether `LeanCasts.cast` can cast a tensor of a plan. wanted: (rowwise, columnwise)."""
    if kernels.traced(x) or x.dtype not in kernels.SOURCE_CODES or x.dim() == 0:
        return False
    lean = plan.lean
    if lean is None or not lean.has_states(states) or getattr(lean, operand).derives:
        return False
    if operand not in lean.draws:
        return True
    if rng is None or rng.parts is None:
        return rng is not None
    return getattr(lean, operand).takes_parts(x, wanted, amaxes or (None, None), rng)


def runs_lean(x, weight, call) -> bool:
    """Whether `LeanLinear` can run a call, or, of several ranks, the C++ node might."""
    lean = call.plan.lean
    return (
        lean is not None and (lean.alone or lean.node is not None)
        and type(x) in _PLAIN and type(weight) in _PLAIN
        and x.dtype in kernels.SOURCE_CODES and weight.dtype in kernels.SOURCE_CODES and x.dim() > 0
        and torch.is_grad_enabled() and x.device == weight.device and lean.has_states(call.state)
        and lean.has_keys(call.rng)
    )  # fmt: skip


def lean_linear(x, weight, bias, call) -> torch.Tensor | None:
    """`linear.hybrid_linear` of a call that `runs_lean`: by the C++ node where it is there and can. None for one that neither
    it nor `LeanLinear` can run: linear.py is what is left."""
    lean = call.plan.lean
    rounds = x.dtype is not weight.dtype and not call.plan.dgrad.pair.is_quantized  # the weight to the gradient's dtype
    y = None if lean.node is None or rounds else lean.node(x, weight, bias, call)
    return LeanLinear.apply(x, weight, bias, call) if y is None and lean.alone else y


class LeanLinear(torch.autograd.Function):
    """y = x @ w.T + b, dx = dy @ w, dw = dy.T @ x; see linear.py."""

    @staticmethod
    def forward(ctx, x, weight, bias, call):
        plan, lean, needs, states = call.plan, call.plan.lean, ctx.needs_input_grad, call.state or {}
        x2d = x if x.dim() == 2 else as_matrix(x)
        drawn = (call.rng or {}).get("input")
        x_row, x_col = lean.input(x2d, True, needs[1] and lean.keeps_input, states.get("input"), rng=drawn)
        w_row, w_col = lean.cast_weight(weight, needs[0] and lean.keeps_weight, call, states.get("weight"))
        y = plan.run("fprop", x_row, w_row, x.dtype)
        if bias is not None:
            y = torch.add(y, bias).to(y.dtype)
        ctx.call, ctx.weight, ctx.dtype, ctx.shape = call, weight, x.dtype, x.shape
        x_kept = None if not needs[1] else x_col if lean.keeps_input else x
        w_kept = None if not needs[0] else w_col if lean.keeps_weight else weight
        ctx.unpack = save_for_backward(ctx, x_kept, w_kept)
        return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx, dy):
        # with create_graph, once_differentiable refuses a second derivative; it costs host time that is saved else
        return _backward_once(ctx, dy) if torch.is_grad_enabled() else _backward(ctx, dy)


def _backward(ctx, dy):
    x_kept, w_kept = ctx.unpack(ctx.saved_tensors)
    return *gradients(ctx.call, ctx.needs_input_grad, x_kept, w_kept, dy, ctx.weight, ctx.dtype, ctx.shape), None


def gradients(call, needs, x_kept, w_kept, dy, weight, dtype, shape):
    """(dx, dw, db), None where `needs` has it that nobody asks.

    x_kept, w_kept: the columnwise payload of input or weight, or what backward casts to it; dtype, shape: of the input.
    """
    plan, lean, states, rng = call.plan, call.plan.lean, call.state or {}, call.rng or {}
    dx = dw = db = sums = None
    dy2d = dy if dy.dim() == 2 else as_matrix(dy)
    summed = needs[2] and lean.sums and type(dy) is not HybridTensor
    if summed and not kernels.traced(dy2d):
        sums = kernels.sum_parts(dy2d)
    dy_row, dy_col = lean.cast_gradient(dy2d, needs[0], needs[1], call, sums)
    if needs[0]:
        w_col = w_kept
        if not lean.keeps_weight:
            w_col = lean.weight(w_kept, False, True, states.get("weight"), rng=rng.get("weight"))[1]
        dx = plan.run("dgrad", dy_row, w_col, dtype)
        dx = dx if len(shape) == 2 else dx.view(shape)
    if needs[1]:
        x_col = x_kept
        if not lean.keeps_input:
            x_col = lean.input(as_matrix(x_kept), False, True, states.get("input"), rng=rng.get("input"))[1]
        total = main_grad(weight)
        dw = plan.run("wgrad", dy_col, x_col, weight.dtype, total)
        dw = dw if total is None else placeholder_gradient(weight)
    if needs[2] and sums is not None:
        db = sums.sum(dim=0).to(dy.dtype)
    elif needs[2]:
        db = kernels.column_sums(dy2d) if summed else dy2d.sum(dim=0)
    return dx, dw, db


_backward_once = once_differentiable(_backward)


def takes_payloads(x) -> bool:
    """Whether the gradient of `x`, which nothing else reads, can be a `HybridTensor` of the payloads that the linear which
    made `x` casts it to: its backward is the next and takes no sums of it."""
    made_by = x.grad_fn
    if type(made_by) not in _backward_types() or x._backward_hooks or x.retains_grad:
        return False
    return not made_by.needs_input_grad[2] and made_by.call.plan.sharding is None


@functools.lru_cache(maxsize=None)
def _backward_types() -> tuple:
    own = () if node.library() is None else (node.library().LinearBackward,)
    return LeanLinear._backward_cls, *own
