"""The grouped linear with one cast of all groups an operand, and one GEMM where the device has one.

What is computed is what grouped.py's loop over experts computes; on the CPU bit for bit. It is used where every
expert has the same plan and a cast of all groups gives the bytes of a cast of each (stacked.py says where not).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from . import grouped_node, kernels, node
from .expert_stack import ExpertStack
from .formats import COLUMNWISE, ROWWISE, shares_codes
from .gemm import grouped as gemms
from .grouped_casts import GroupedCasts
from .grouped_payloads import GroupedPayloads
from .groups import Groups
from .linear import LinearCall
from .permutation import RowMap
from .plan import GRAD_OUTPUT, INPUT, ORIGINAL, WEIGHT, GemmPlan, PlanError
from .saved import main_grad, placeholder_gradients, save_for_backward
from .stacked import GroupedColumns, StackedWeight, columns_alignment, copied_rows, unstackable
from .storage import QuantizedStorage
from .tensor import HybridTensor

_CAST_BEFORE = (GroupedPayloads, HybridTensor)


@dataclass(frozen=True)
class GroupedPlan:
    """How the gemms of all experts run together.

    plans       one an expert, equal but for their names
    fprop, dgrad, wgrad    backends of gemm/grouped.py
    alignment   the multiple of rows at which groups begin in wgrad's operands: what its formats and its backend need
    shape, dtype    (N, K) of a weight; of tensors in high precision
    """

    plans: tuple[GemmPlan, ...]
    fprop: gemms.GroupedBackend
    dgrad: gemms.GroupedBackend
    wgrad: gemms.GroupedBackend
    alignment: int
    shape: tuple[int, int]
    dtype: torch.dtype

    @functools.cached_property
    def casts(self) -> dict[str, GroupedCasts]:
        """Of input and grad_output."""
        (N, K), found = self.shape, {}
        for operand, width in ((INPUT, K), (GRAD_OUTPUT, N)):
            found[operand] = GroupedCasts(self.plans[0], operand, width, self.dtype, self.alignment)
        return found

    @functools.cached_property
    def node(self) -> grouped_node.GroupedNodePlan | None:
        """How the C++ node runs calls; None for a plan that is Python's (`grouped_node.why_not`)."""
        return grouped_node.GroupedNodePlan.of(self)

    def __str__(self) -> str:
        names = ", ".join(f"{gemm} {getattr(self, gemm).name}" for gemm in ("fprop", "dgrad", "wgrad"))
        return f"{names}; groups padded to {self.alignment} rows in wgrad"


def why_not(plans: list[GemmPlan], shape: tuple[int, int]) -> str | None:
    """Why the experts with these plans run one by one; None where they run at once. shape: (N, K) of a weight."""
    first = plans[0]
    for plan in plans[1:]:
        if (plan.steps(), plan.quantizers, plan.saved) != (first.steps(), first.quantizers, first.saved):
            return "experts have different plans"
    return unstackable(first, *shape)


def build(plans: list[GemmPlan], shape: tuple[int, int], dtype: torch.dtype) -> GroupedPlan:
    """The plan of experts for which `why_not` says None."""
    first = plans[0]
    chosen = {gemm: gemms.choose(step, shape, dtype).prepared(step.pair) for gemm, step in first.steps().items()}
    need = [columns_alignment(first), chosen["wgrad"].alignment(first.wgrad.pair)]
    return GroupedPlan(tuple(plans), **chosen, alignment=max(need), shape=shape, dtype=dtype)  # powers of two


@dataclass(frozen=True)
class GroupedCall:
    """One call: how, what its casts read, where the groups are, and the weights' payloads where they live quantized."""

    how: GroupedPlan
    call: LinearCall  # of the first expert; random bits count rows of the whole tensor
    groups: Groups
    stack: ExpertStack | None = None

    def taken(self, operand: str, x: torch.Tensor) -> tuple[torch.Tensor, RowMap | None]:
        """x as it is cast, and whose copies the T rows are then (None: x has them). Tokens are cast before they are
        copied where the copies' casts would be the same."""
        copies = self._copies(operand)
        if copies is None or self.how.casts[operand].casts_tokens:
            return x, copies
        return copies.expand(x), None

    def _copies(self, operand: str) -> RowMap | None:
        return self.groups.copies if operand == INPUT else self.groups.sums

    def takes_computed(self, operand: str) -> bool:
        """Whether SwiGLU, whose result or gradient this is, can cast it by rows and by columns as it computes it."""
        watched = self.call.plan is not self.how.plans[0]
        whole = self._copies(operand) is None and (operand == GRAD_OUTPUT or self.call.plan.saved[INPUT] == COLUMNWISE)
        return whole and not watched and self.how.casts[operand].takes_computed

    def computed(self, operand: str, x: torch.Tensor, **computed) -> GroupedPayloads:
        """What is computed from rows like x (`kernels.cast_groups`), as what this operand is cast to."""
        layout = self.groups.layout(self.how.alignment)
        if self.how.node is not None:
            row, col = self.how.node.computed(operand, x, layout, **computed)
        else:
            row, col = self.how.casts[operand].computed(x, layout, **computed)
        return GroupedPayloads(row, GroupedColumns(col, layout))

    def rows(self, operand: str, x: torch.Tensor) -> QuantizedStorage:
        """The rowwise payload of x; a `HybridTensor` brings it."""
        if isinstance(x, HybridTensor):
            return self.call.plan.held_payloads(operand, x, True, False)[0]
        watched = self.call.plan is not self.how.plans[0]  # by who wants to see every cast
        if not watched and (made := self.how.casts[operand].rows(x)) is not None:
            return made
        amax = self.call.start_amaxes(operand, x, True, False)()
        return self.call.plan.quantize(operand, x, rowwise=True, amax=amax, **self.call.keys(operand))[0]

    def columns(self, operand: str, source: torch.Tensor | QuantizedStorage, copies: RowMap | None = None) -> GroupedColumns:
        """The columnwise payload of a tensor, or of what its rowwise payload decodes to.

        Raises `PlanError` for a tensor that was quantized before.
        """
        if isinstance(source, HybridTensor):
            raise PlanError(
                f"{self.call.plan.label}: {operand} was quantized before, to {source.describe()}; columns of experts' "
                "groups are cast from high precision: give it as it was, or freeze the weights"
            )
        if isinstance(source, QuantizedStorage):
            source = source.dequantize(source.dtype)
        plan, layout = self.call.plan, self.groups.layout(self.how.alignment)
        if (made := self.how.casts[operand].columns(source, layout, copies)) is not None:
            return GroupedColumns(made, layout)
        return GroupedColumns.make(
            source, plan.quantizers[operand].columnwise, layout, copies, transposed=plan.transposed(operand)
        )

    def both(self, operand: str, x: torch.Tensor, copies: RowMap | None) -> tuple[QuantizedStorage, GroupedColumns]:
        """The T rows by rows and by columns, from one read of x where its formats and the device have that."""
        if type(x) is GroupedPayloads:
            return x.row, x.columns
        if type(x) is torch.Tensor:
            layout = self.groups.layout(self.how.alignment)
            found = self.how.casts[operand].both(x, layout, copies)
            if found is not None:
                return found[0], GroupedColumns(found[1], layout)
        row, derived = self.rows(operand, x), self.call.plan.quantizers[operand].derives_columnwise
        return copied_rows(row, copies), self.columns(operand, row if derived else x, copies)

    def weight(self, weights: list[torch.Tensor], *, rowwise=False, columnwise=False):
        """(rowwise, columnwise) payloads of the weights: those held, from the cache where there is one, or cast."""
        if self.stack is not None:
            return self._held(ROWWISE) if rowwise else None, self._held(COLUMNWISE) if columnwise else None
        (weight,), cache = weights, self.call.weight_cache
        if cache is None:
            return self._cast_weight(weight, rowwise=rowwise, columnwise=columnwise)
        return cache.get(weight, self._cast_weight, (rowwise, columnwise), training=self.call.training)

    def _held(self, direction: str) -> StackedWeight:
        s = getattr(self.stack, direction)
        return StackedWeight(s, direction, s.format, self.groups.num)

    def gradient(self, dy: torch.Tensor, by_rows: bool, by_columns: bool):
        """The output's gradient by rows and by columns, None for what is not asked for. A column is cast from dy.

        Raises `PlanError` for one without memory on a GPU, as a backward under fake tensors has it.
        """
        if dy.is_cuda and type(dy) not in _CAST_BEFORE and kernels.traced(dy) and not torch.compiler.is_compiling():
            raise PlanError(f"{self.call.plan.label}: {gemms.NO_OPERATORS}")
        dy, copies = self.taken(GRAD_OUTPUT, dy)
        if by_rows and by_columns and not self.call.plan.quantizers[GRAD_OUTPUT].derives_columnwise:
            return self.both(GRAD_OUTPUT, dy, copies)
        row = copied_rows(self.rows(GRAD_OUTPUT, dy), copies) if by_rows else None
        return row, self.columns(GRAD_OUTPUT, dy, copies) if by_columns else None

    def kept_input(self, kept: torch.Tensor | QuantizedStorage) -> GroupedColumns:
        """The columnwise payload, from what forward kept."""
        if isinstance(kept, QuantizedStorage) and kept.direction == COLUMNWISE:
            return GroupedColumns(kept, self.groups.layout(self.how.alignment))
        return self.columns(INPUT, kept, self._copies(INPUT) if self.how.casts[INPUT].casts_tokens else None)

    def kept_weight(self, kept: torch.Tensor | QuantizedStorage) -> StackedWeight:
        """The columnwise payload, from what forward kept."""
        plan = self.call.plan
        quantizer, saved = plan.quantizers[WEIGHT], plan.saved[WEIGHT]
        num = self.groups.num
        if saved == COLUMNWISE:
            return StackedWeight(kept, COLUMNWISE, quantizer.columnwise, num)
        if saved == ORIGINAL:
            return self._cast_weight(kept, rowwise=False, columnwise=True)[1]
        return self._stack(StackedWeight(kept, ROWWISE, quantizer.rowwise, num).dequantize(), COLUMNWISE)

    def weight_gradients(self, dy_col: GroupedColumns, x_col: GroupedColumns, weights) -> list[torch.Tensor]:
        """What autograd gets for each of `weights`: placeholders where all have a `main_grad`, which is added to."""
        contract = self.how.wgrad.contract
        totals, dtype, one = [main_grad(weight) for weight in weights], weights[0].dtype, weights[0].dim() == 3
        if any(total is None for total in totals):
            dw = contract(self.how.plans, dy_col, x_col, dtype)
            return [dw] if one else list(dw.unbind())
        contract(self.how.plans, dy_col, x_col, dtype, totals[0] if one else totals)
        return placeholder_gradients(weights)

    def _stack(self, weight: torch.Tensor, direction: str) -> StackedWeight:
        fmt = getattr(self.call.plan.quantizers[WEIGHT], direction)
        if not fmt.is_quantized:
            return StackedWeight(weight, direction, fmt, weight.shape[0])
        return StackedWeight.make(weight, fmt, direction, reduce_amax=self.call.reduce_amax(WEIGHT, direction))

    def _cast_weight(self, weight, *, rowwise, columnwise):
        row = col = None
        quantizer = self.call.plan.quantizers[WEIGHT]
        derived = columnwise and quantizer.derives_columnwise
        if rowwise and columnwise and not derived and WEIGHT not in self.call.plan.reduced:
            both = StackedWeight.make_both(weight, *quantizer.formats())
            if both is not None:
                return both
        if rowwise or derived:
            row = self._stack(weight, ROWWISE)
        if columnwise and rowwise and not derived and shares_codes(*quantizer.formats()):
            col = row.as_columns()
        elif columnwise:
            col = self._stack(row.dequantize() if derived else weight, COLUMNWISE)
        return row if rowwise else None, col


class GroupedAtOnceFunction(torch.autograd.Function):
    """The three equations for all groups. x (T, K), or tokens whose copies these rows are; bias (E, N) or None; weights:
    one (E, N, K), maybe gathered as payloads, or E of (N, K) that live quantized."""

    @staticmethod
    def forward(ctx, x, bias, call: GroupedCall, *weights):
        for_x, needs_bias, _, *needs = ctx.needs_input_grad
        y, x_kept, w_kept = forward(x, weights, bias, call, keep_input=any(needs), keep_weight=for_x)
        ctx.call, ctx.weights, ctx.dtype = call, weights, x.dtype
        ctx.wanted = for_x, any(needs), needs_bias
        ctx.unpack = save_for_backward(ctx, x_kept, w_kept)
        return y

    @staticmethod
    def backward(ctx, dy):
        # as lean.py has it: what refuses a second derivative costs host time
        return _backward_once(ctx, dy) if torch.is_grad_enabled() else _backward(ctx, dy)


def _backward(ctx, dy):
    x_kept, w_kept = ctx.unpack(ctx.saved_tensors)
    dx, db, dws = gradients(ctx.call, ctx.wanted, x_kept, w_kept, ctx.weights, dy, ctx.dtype)
    return dx, db, None, *dws


def gradients(call: GroupedCall, needs, x_kept, w_kept, weights, dy, dtype):
    """(dx, db, those of the weights), None where `needs` (of x, of the weights, of the bias) has it that nobody asks.

    x_kept, w_kept: what forward kept of x and of the weights. dtype: of x.
    """
    how, plans, groups = call.how, call.how.plans, call.groups
    dx, dws, db = None, [None] * len(weights), None
    dy_row, dy_col = call.gradient(dy, *needs[:2])
    if needs[0]:
        dx = how.dgrad.rows("dgrad", plans, dy_row, call.kept_weight(w_kept), groups, dtype)
        dx = dx if groups.copies is None else groups.copies.sum(dx)
    if needs[1]:
        dws = call.weight_gradients(dy_col, call.kept_input(x_kept), weights)
    if needs[2]:
        db = group_sums(dy if groups.sums is None else groups.sums.expand(dy), groups)
    return dx, db, dws


_backward_once = once_differentiable(_backward)


def call_for_gradient(x: torch.Tensor) -> GroupedCall | None:
    """The call that made `x`, which nothing else reads, if its backward is next and takes x's gradient as payloads."""
    made_by = x.grad_fn
    if type(made_by) not in _backward_types() or x._backward_hooks or x.retains_grad:
        return None
    whole = made_by.wanted == (True, True, False)
    return made_by.call if whole and made_by.call.takes_computed(GRAD_OUTPUT) else None


@functools.lru_cache(maxsize=None)
def _backward_types() -> tuple:
    own = () if node.library() is None else (node.library().GroupedBackward,)
    return GroupedAtOnceFunction._backward_cls, *own


def forward(x, weights, bias, call: GroupedCall, *, keep_input: bool, keep_weight: bool):
    """y (T, N), or of tokens, and what the plan keeps of x and of w for backward (None where nothing is needed)."""
    saved, groups = call.call.plan.saved, call.groups
    x, copies = call.taken(INPUT, x)
    x_kept = None
    if keep_input and saved[INPUT] == COLUMNWISE:
        x_row, x_col = call.both(INPUT, x, copies)
        x_kept = x_col.payload
    else:
        row = call.rows(INPUT, x)
        x_row = copied_rows(row, copies)
        if keep_input:
            x_kept = {ORIGINAL: x, ROWWISE: row}[saved[INPUT]]
    w_row, w_col = call.weight(weights, rowwise=True, columnwise=keep_weight and saved[WEIGHT] == COLUMNWISE)
    y = call.how.fprop.rows("fprop", call.how.plans, x_row, w_row, groups, x.dtype)
    if bias is not None:
        y = (y + bias[groups.of_row]).to(y.dtype)
    y = y if groups.sums is None else groups.sums.sum(y)
    w_kept = None
    if keep_weight:
        w_kept = weights[0] if saved[WEIGHT] == ORIGINAL else {ROWWISE: w_row, COLUMNWISE: w_col}[saved[WEIGHT]].payload
    return y, x_kept, w_kept


def group_sums(dy: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Sums of each group's rows: dy (T, N) -> (E, N)."""
    if groups.known_to_host:
        return torch.stack([part.sum(dim=0) for part in dy.split(groups.host)])
    lengths = groups.sizes
    return torch.segment_reduce(dy.float(), "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0).to(dy.dtype)


def grouped_at_once(x, weights, bias, call: GroupedCall) -> torch.Tensor:
    """`y[group e] = x[group e] @ weight[e].T + bias[e]` for all groups. weights: as `GroupedAtOnceFunction`'s."""
    if not torch.is_grad_enabled():
        return forward(x, weights, bias, call, keep_input=False, keep_weight=False)[0]
    by_node = call.how.node if bias is None else None
    y = None if by_node is None else by_node(x, weights, call)
    return GroupedAtOnceFunction.apply(x, bias, call, *weights) if y is None else y
