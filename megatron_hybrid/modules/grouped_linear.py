"""HybridGroupedLinear: one linear an expert over contiguous groups of rows, one (E, N, K) weight."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.autograd.function import once_differentiable

from ..linear import LOCAL, LinearCall, add_bias, dgrad, fprop, placeholder_gradient, save_for_backward, wgrad
from ..plan import GRAD_OUTPUT, INPUT, PAYLOAD, WEIGHT, GemmPlan
from ..recipe_callable import as_recipe
from ..roles import GROUPED_LINEAR, ModuleRole
from ..runtime import LinearRuntime
from ..scaling import Rng


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
        kept = ctx.unpack(ctx.saved_tensors)
        main_grad = getattr(weight, "main_grad", None)
        dx, dws, db = [], [], []
        for e, (call, dy_e) in enumerate(zip(ctx.calls, dy.split(ctx.splits))):
            x_kept, w_kept = kept[2 * e : 2 * e + 2]
            dy_row, dy_col = call.quantize(GRAD_OUTPUT, dy_e, rowwise=needs[0], columnwise=needs[1])
            if needs[0]:
                dx.append(dgrad(call, dy_row, w_kept, ctx.dtype))
            if needs[1] and main_grad is not None:
                wgrad(call, dy_col, x_kept, main_grad.dtype, accumulate_into=main_grad[e])
            elif needs[1]:
                dws.append(wgrad(call, dy_col, x_kept, weight.dtype))
            if needs[2]:
                db.append(dy_e.sum(dim=0))
        dw = None
        if needs[1]:
            dw = placeholder_gradient(weight) if main_grad is not None else torch.stack(dws)
        return torch.cat(dx) if needs[0] else None, dw, torch.stack(db) if needs[2] else None, None, None


def forward(x, weight, bias, calls, splits, *, keep_input: bool, keep_weight: bool):
    """`y` (T, N), and what is kept for backward: of x and of w, for every group."""
    outputs, kept = [], []
    for e, (call, x_e) in enumerate(zip(calls, x.split(splits))):
        y_e, x_kept, w_kept = fprop(call, x_e, weight[e], keep_input=keep_input, keep_weight=keep_weight)
        outputs.append(add_bias(y_e, None if bias is None else bias[e]))
        kept += [x_kept, w_kept]
    return torch.cat(outputs), kept


def at_rows(call: LinearCall, tokens: int, weight: int) -> LinearCall:
    """The call of a group whose tokens and weight start at these rows of the module's whole tensors.

    Stochastic rounding draws by global row, so that groups do not repeat each other's bits.
    """
    if call.rng is None:
        return call
    rows = {INPUT: tokens, GRAD_OUTPUT: tokens, WEIGHT: weight}
    return replace(call, rng={operand: _shifted(rng, rows[operand]) for operand, rng in call.rng.items()})


def _shifted(rng: Rng, rows: int) -> Rng:
    values = rng.values.clone()
    values[3] += rows
    return Rng.view(values)


class HybridGroupedLinear(torch.nn.Module):
    """`num_gemms` linears over contiguous row groups: `y[group e] = x[group e] @ weight[e].T + bias[e]`.

    weight: one (E, N, K) parameter. first_expert: global index of the first local expert, for rules on experts.
    Every group has its own scales. recipe, name, layer, num_layers, save_input, backend, device, dtype: as
    `HybridLinear`. Raises ``ValueError`` without any expert, `PlanError` naming the expert for a plan that cannot run.
    """

    def __init__(
        self, num_gemms, in_features, out_features, bias=False, *, recipe="bf16", name="", layer=None, num_layers=None,
        first_expert=0, save_input=PAYLOAD, backend=None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        if num_gemms < 1:
            raise ValueError(f"HybridGroupedLinear needs at least one expert, found {num_gemms}")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        made = dict(device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(torch.empty(num_gemms, out_features, in_features, **made))
        self.bias = torch.nn.Parameter(torch.empty(num_gemms, out_features, **made)) if bias else None
        self.reset_parameters()
        recipe = as_recipe(recipe)
        self.hq = torch.nn.ModuleList(
            LinearRuntime(
                recipe, ModuleRole(GROUPED_LINEAR, name, layer, num_layers, expert=first_expert + e),
                self.weight.device, backend=backend, save_input=save_input,
            )
            for e in range(num_gemms)
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """`torch.nn.Linear`'s initialisation of every expert."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def plans(self) -> list[GemmPlan]:
        """One an expert."""
        return [runtime.plan_for(self.weight.device) for runtime in self.hq]

    def roles(self):
        """input, weight, output (None), grad_output of every expert."""
        return tuple(role for runtime in self.hq for role in runtime.roles())

    def forward(self, x: torch.Tensor, m_splits) -> torch.Tensor:
        """x (T, K); m_splits: rows of each group, a list or an int32 tensor (E,). Raises ``ValueError`` when they
        are not `num_gemms` non-negative numbers that add up to T."""
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        if len(splits) != self.num_gemms or min(splits) < 0 or sum(splits) != x.shape[0]:
            raise ValueError(
                f"m_splits {splits}: expected {self.num_gemms} numbers >= 0 that add up to the {x.shape[0]} rows of x"
            )
        calls, start = [], 0
        for runtime, rows in zip(self.hq, splits):
            call = runtime.call(self.weight.device, LOCAL, training=self.training)
            calls.append(at_rows(call, start, runtime.role.expert * self.out_features))
            start += rows
        if not torch.is_grad_enabled():
            return forward(x, self.weight, self.bias, calls, splits, keep_input=False, keep_weight=False)[0]
        return GroupedLinearFunction.apply(x, self.weight, self.bias, calls, splits)

    def extra_repr(self) -> str:
        return f"{self.num_gemms} x ({self.in_features}, {self.out_features}), bias={self.bias is not None}"
