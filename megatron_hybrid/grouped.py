"""The grouped linear: one linear an expert over contiguous groups of rows, one (E, N, K) weight.

    fprop   y[e]  = x[e]  @ w[e].T        dgrad   dx[e] = dy[e] @ w[e]        wgrad   dw[e] = dy[e].T @ x[e]

`ExpertRuntimes` owns the plans; `HybridGroupedLinear` and Megatron's experts call it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.autograd.function import once_differentiable

from . import kernels
from .expert_stack import ExpertStack
from .formats import COLUMNWISE
from .gathered_experts import GatheredExperts
from .grouped_at_once import GroupedCall, GroupedPlan, build, grouped_at_once, why_not
from .grouped_payloads import GroupedPayloads
from .groups import Groups
from .linear import (
    LOCAL,
    Communication,
    LinearCall,
    add_bias,
    check_dtypes,
    dgrad,
    fprop,
    hybrid_linear,
    start_amaxes,
    wgrad,
)
from .plan import GRAD_OUTPUT, INPUT, ORIGINAL, WEIGHT, GemmPlan
from .roles import ModuleRole
from .runtime import Changes, LinearRuntime
from .saved import main_grad, placeholder_gradient, save_for_backward
from .tensor import HybridTensor
from .weight_cache import WeightCache


class ExpertRuntimes(torch.nn.ModuleList):
    """The runtimes of a grouped linear's experts, and a call of all of them.

    Ranks that split experts' operands (`LinearRuntime.ranks`, the same of every expert) have the same rows, and all
    take part in every reduction, tokens or not.

    role: of the first local expert; the others count on from it. num_experts: local ones. weight_rows: rows of the
    whole weight of an expert (more than this rank's where experts are tensor parallel). Raises `PlanError` naming the
    expert for a plan that cannot run.
    """

    def __init__(self, recipe, role: ModuleRole, num_experts: int, device, *, weight_rows: int, **runtime):
        first = role.expert or 0
        super().__init__(
            LinearRuntime(recipe, replace(role, expert=first + e), device, **runtime) for e in range(num_experts)
        )
        self.weight_rows = weight_rows
        self.one_by_one = False  # True: the loop over experts, always (tests)
        self._changes = Changes()
        for runtime in self:
            runtime.changes = self._changes
        self._how: tuple | None = None  # (what it was found for, `how`)
        self.stack = ExpertStack()  # of weights that live quantized

    @property
    def first(self) -> LinearRuntime:
        """Of the first expert. `self[0]`, which takes a multiple of the time."""
        return self._modules["0"]

    @property
    def comm(self) -> Communication:
        """Between the ranks that split the experts' operands."""
        return self.first.ranks or LOCAL

    @property
    def changes(self) -> int:
        """Grows with every change of an expert's plan."""
        return self._changes.count

    def plans(self, device) -> list[GemmPlan]:
        """One an expert."""
        return [runtime.plan_for(device) for runtime in self]

    def roles(self):
        """input, weight, output (None), grad_output of every expert."""
        return tuple(role for runtime in self for role in runtime.roles())

    def make_weight_caches(self) -> None:
        """For callers without a controller that say themselves when the weights change."""
        for runtime in self:
            runtime.weight_cache = WeightCache()

    def invalidate(self) -> None:
        """Drop cached quantized weights."""
        for runtime in self:
            runtime.invalidate()

    def how(self, weight: torch.Tensor) -> GroupedPlan | str:
        """How all experts run together with an (E, N, K) weight, or why they run one by one. Found once a plan."""
        return self._how_for(weight.device, weight.dtype, weight.shape)

    def how_each(self, weights: list[torch.Tensor]) -> GroupedPlan | str:
        """`how` with a weight (N, K) an expert, whose payloads move to common memory if they run together."""
        first = weights[0]
        how = self._how_for(first.device, first.dtype, (len(weights), *first.shape))
        if isinstance(how, str):
            self.stack.forget()
            return how
        return self.stack.follow(weights) or self._unready(how.plans[0], weights) or how

    def _how_for(self, device, dtype, shape) -> GroupedPlan | str:
        key = (device, self.changes, dtype, shape, self.one_by_one)
        if self._how is None or self._how[0] != key:
            plans = self.plans(device)
            why = "asked for" if self.one_by_one else why_not(plans, tuple(shape[1:]))
            self._how = key, why or build(plans, tuple(shape[1:]), dtype)
        return self._how[1]

    def _unready(self, plan: GemmPlan, weights: list[HybridTensor]) -> str | None:
        """Why what these weights hold is not what a call at once reads; dense linears find another way, or say so."""
        if plan.saved[WEIGHT] == ORIGINAL:
            return "dgrad reads the original"
        if weights[0].quantizer != plan.quantizers[WEIGHT]:
            return "weights have other formats than the plan"
        if plan.saved[WEIGHT] == COLUMNWISE and self.stack.columnwise is None:
            return "weights hold no columns"
        if any(weight.requires_grad != weights[0].requires_grad for weight in weights):
            return "some experts are frozen"
        return None

    def forward(self, x: torch.Tensor, weight, bias, m_splits, *, training: bool) -> torch.Tensor:
        """x (T, K), plain or with the rowwise payload of the plan's input, weight (E, N, K), a parameter or gathered as
        payloads, bias (E, N) or None -> (T, N). m_splits: rows of each group, a list, an int tensor (E,) or `Groups`.
        Raises ``ValueError`` when they are not E non-negative numbers that add up to T (on a GPU they are not read)."""
        check_rows(x)
        groups = Groups.of(m_splits, len(self), x.shape[0], x.device)
        call = self.call_at_once(x, weight, groups, training=training)
        if call is not None:
            return grouped_at_once(x, [weight], bias, call)
        return groups.result_of(self._one_by_one(groups.rows_of(x), weight, bias, groups.host, training))

    def each(self, x: torch.Tensor, weights: list, bias, m_splits, *, training: bool) -> torch.Tensor:
        """`forward` with a weight (N, K) an expert, plain or quantized: at once where all are quantized alike."""
        check_rows(x)
        groups = Groups.of(m_splits, len(self), x.shape[0], x.device)
        call = self.call_each(x, weights, groups, training=training)
        if call is not None:
            return grouped_at_once(x, weights, bias, call)
        outputs, start, x = [], 0, groups.rows_of(x)
        for e, (runtime, weight, x_e) in enumerate(zip(self, weights, x.split(groups.host))):
            call = at_rows(runtime.call(weight.device, self.comm, training=training), start, 0)
            outputs.append(hybrid_linear(x_e, weight, None if bias is None else bias[e], call))
            start += groups.host[e]
        return groups.result_of(torch.cat(outputs))

    def call_at_once(self, x, weight, groups: Groups, *, training: bool) -> GroupedCall | None:
        """How `forward` runs all experts at once on rows like x; None: one by one."""
        gathered = type(weight) is GatheredExperts
        if not (gathered or type(weight) is torch.nn.Parameter) or not self._may_run_at_once(x, weight):
            return None
        how = self.how_each(weight.experts) if gathered else self.how(weight)
        return self._call(how, weight.device, groups, self.stack if gathered else None, training)

    def call_each(self, x, weights: list, groups: Groups, *, training: bool) -> GroupedCall | None:
        """How `each` runs all experts at once on rows like x; None: one by one."""
        if not self._may_run_at_once(x, weights[0]):
            return None
        return self._call(self.how_each(weights), weights[0].device, groups, self.stack, training)

    def _call(self, how: GroupedPlan | str, device, groups: Groups, stack, training: bool) -> GroupedCall | None:
        if isinstance(how, str):
            return None
        return GroupedCall(how, self.first.call(device, self.comm, training=training), groups, stack)

    def _may_run_at_once(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether nothing but plans and weights could ask for one expert after another."""
        plain = type(x) in (torch.Tensor, HybridTensor, GroupedPayloads) and x.dtype == weight.dtype and x.shape[0] > 0
        first = self.first
        watched = first.observer is not None or first.nan_check is not None
        return plain and not watched and not _traced_or_autocast(x)

    def _one_by_one(self, x, weight, bias, splits: list[int], training: bool) -> torch.Tensor:
        calls, start = [], 0
        for runtime, rows in zip(self, splits):
            call = runtime.call(weight.device, self.comm, training=training)
            if x.dtype is not weight.dtype:
                check_dtypes(call.plan, x, weight)
            calls.append(at_rows(call, start, runtime.role.expert * self.weight_rows))
            start += rows
        if not torch.is_grad_enabled():
            return forward(x, weight, bias, calls, splits, keep_input=False, keep_weight=False)[0]
        return GroupedLinearFunction.apply(x, weight, bias, calls, splits)


def check_rows(x: torch.Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"a grouped linear takes rows (T, K), found a tensor of shape {tuple(x.shape)}")


def _traced_or_autocast(x: torch.Tensor) -> bool:
    """Where the experts' own plans run: kernels of all groups are no operators, a trace would leave them out, and
    autocast must not reach a GEMM."""
    traced = kernels.traced(x) if type(x) is torch.Tensor else torch.compiler.is_compiling()
    return traced or torch.is_autocast_enabled(x.device.type)


class GroupedLinearFunction(torch.autograd.Function):
    """The three equations for every group. x (T, K), weight (E, N, K), bias (E, N) or None, splits: E ints."""

    @staticmethod
    def forward(ctx, x, weight, bias, calls, splits):
        needs = ctx.needs_input_grad
        y, kept = forward(x, weight, bias, calls, splits, keep_input=needs[1], keep_weight=needs[0])
        ctx.calls, ctx.splits, ctx.weight, ctx.dtype = calls, splits, weight, x.dtype
        ctx.unpack = save_for_backward(ctx, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        needs, weight = ctx.needs_input_grad, ctx.weight
        *kept, whole = ctx.unpack(ctx.saved_tensors)
        total = main_grad(weight) if needs[1] else None
        traced = total is not None and torch.compiler.is_compiling()  # then all experts are added at once
        dx, dws, db = [], [], []
        groups = dy.split(ctx.splits)
        amaxes = _start_amaxes(ctx.calls, GRAD_OUTPUT, groups, [needs[:2]] * len(groups))
        for e, (call, dy_e, amax) in enumerate(zip(ctx.calls, groups, amaxes)):
            x_kept, w_kept = kept[2 * e : 2 * e + 2]
            if needs[0] and w_kept is None:
                w_kept = whole[e]
            dy_row, dy_col = call.quantize(GRAD_OUTPUT, dy_e, rowwise=needs[0], columnwise=needs[1], amax=amax)
            if needs[0]:
                dx.append(dgrad(call, dy_row, w_kept, ctx.dtype))
            if total is not None and not traced:
                wgrad(call, dy_col, x_kept, total.dtype, accumulate_into=total[e])
            elif needs[1]:
                dws.append(wgrad(call, dy_col, x_kept, torch.float32 if traced else weight.dtype))
            if needs[2]:
                db.append(dy_e.sum(dim=0))
        dw = None
        if traced:
            from .ops import add_to_main_grad

            dw = add_to_main_grad(weight, torch.stack(dws))
        elif needs[1]:
            dw = placeholder_gradient(weight) if total is not None else torch.stack(dws)
        return torch.cat(dx) if needs[0] else None, dw, torch.stack(db) if needs[2] else None, None, None


def forward(x, weight, bias, calls, splits, *, keep_input: bool, keep_weight: bool):
    """`y` (T, N), and what is kept for backward: of x and of w, for every group, and the weight where one reads it as it is.

    It is kept whole and once: an expert's view would stay where the weight's memory is now.
    """
    outputs, kept, whole, groups = [], [], None, x.split(splits)
    wanted = [(True, keep_input and call.plan.saved[INPUT] == COLUMNWISE) for call in calls]
    amaxes = _start_amaxes(calls, INPUT, groups, wanted)
    for e, (call, x_e, amax) in enumerate(zip(calls, groups, amaxes)):
        y_e, x_kept, w_kept = fprop(call, x_e, weight[e], keep_input=keep_input, keep_weight=keep_weight, amax=amax)
        outputs.append(add_bias(y_e, None if bias is None else bias[e]))
        if keep_weight and call.plan.saved[WEIGHT] == ORIGINAL:
            w_kept, whole = None, weight
        kept += [x_kept, w_kept]
    return torch.cat(outputs), [*kept, whole]


def _start_amaxes(calls, operand: str, groups, wanted) -> list:
    """`start_amaxes` of all experts; None an expert where no expert's are reduced over ranks."""
    if not any(operand in call.plan.reduced for call in calls):
        return [None] * len(calls)
    return start_amaxes(calls, operand, groups, wanted)


def at_rows(call: LinearCall, tokens: int, weight: int) -> LinearCall:
    """The call of a group whose tokens and weight start at these rows of the module's whole tensors.

    Stochastic rounding draws by global row, so that groups do not repeat each other's bits.
    """
    if call.rng is None:
        return call
    rows = {INPUT: tokens, GRAD_OUTPUT: tokens, WEIGHT: weight}
    return replace(call, rng={operand: rng.moved(rows[operand]) for operand, rng in call.rng.items()})
