"""HybridGroupedLinear: one linear an expert over contiguous groups of rows, one (E, N, K) weight."""

from __future__ import annotations

import math

import torch

from ..linear import LOCAL, dgrad, fprop, placeholder_gradient, save_for_backward, wgrad
from ..plan import GRAD_OUTPUT
from ..recipe import Recipe
from ..roles import GROUPED_LINEAR, ModuleRole
from ..runtime import LinearRuntime


class GroupedLinearFunction(torch.autograd.Function):
    """The three equations for every group. x (T, K), weight (E, N, K), bias (E, N) or None, splits: E ints."""

    @staticmethod
    def forward(ctx, x, weight, bias, calls, splits):
        needs = ctx.needs_input_grad
        y = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
        kept = []
        for e, (call, x_e, y_e) in enumerate(zip(calls, x.split(splits), y.split(splits))):
            out, x_kept, w_kept = fprop(call, x_e, weight[e], keep_input=needs[1], keep_weight=needs[0])
            y_e.copy_(out if bias is None else out.add_(bias[e]))
            kept += [x_kept, w_kept]
        ctx.calls, ctx.splits, ctx.weight, ctx.x_shape, ctx.dtype = calls, splits, weight, x.shape, x.dtype
        ctx.unpack = save_for_backward(ctx, *kept)
        return y

    @staticmethod
    def backward(ctx, dy):
        needs, weight = ctx.needs_input_grad, ctx.weight
        kept = ctx.unpack(ctx.saved_tensors)
        main_grad = getattr(weight, "main_grad", None)
        dx = torch.empty(ctx.x_shape, dtype=ctx.dtype, device=dy.device) if needs[0] else None
        dw = torch.empty_like(weight) if needs[1] and main_grad is None else None
        db = torch.empty(weight.shape[:2], dtype=weight.dtype, device=dy.device) if needs[2] else None
        start = 0
        for e, (call, rows) in enumerate(zip(ctx.calls, ctx.splits)):
            dy_e = dy[start : start + rows]
            x_kept, w_kept = kept[2 * e : 2 * e + 2]
            dy_row, dy_col = call.quantize(GRAD_OUTPUT, dy_e, rowwise=needs[0], columnwise=needs[1])
            if needs[0]:
                dx[start : start + rows] = dgrad(call, dy_row, w_kept, ctx.dtype)
            if needs[1] and main_grad is not None:
                wgrad(call, dy_col, x_kept, main_grad.dtype, accumulate_into=main_grad[e])
            elif needs[1]:
                dw[e] = wgrad(call, dy_col, x_kept, weight.dtype)
            if needs[2]:
                db[e] = dy_e.sum(dim=0)
            start += rows
        if needs[1] and main_grad is not None:
            dw = placeholder_gradient(weight)
        return dx, dw, db, None, None


class HybridGroupedLinear(torch.nn.Module):
    """`num_gemms` linears over contiguous row groups: `y[group e] = x[group e] @ weight[e].T + bias[e]`.

    weight: one (E, N, K) parameter. first_expert: global index of the first local expert, for rules on experts.
    Every group has its own scales. recipe, name, layer, num_layers, backend, device, dtype: as `HybridLinear`.
    """

    def __init__(
        self, num_gemms, in_features, out_features, bias=False, *, recipe="bf16", name="", layer=None, num_layers=None,
        first_expert=0, backend=None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
        made = dict(device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(torch.empty(num_gemms, out_features, in_features, **made))
        self.bias = torch.nn.Parameter(torch.empty(num_gemms, out_features, **made)) if bias else None
        self.reset_parameters()
        self.hq = torch.nn.ModuleList(
            LinearRuntime(
                recipe, ModuleRole(GROUPED_LINEAR, name, layer, num_layers, expert=first_expert + e),
                self.weight.device, backend=backend,
            )
            for e in range(num_gemms)
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """`torch.nn.Linear`'s initialisation of every expert."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: torch.Tensor, m_splits) -> torch.Tensor:
        """x (T, K); m_splits: rows of each group, a list or an int32 tensor (E,). Raises ``ValueError`` when they
        are not `num_gemms` non-negative numbers that add up to T."""
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        if len(splits) != self.num_gemms or min(splits, default=0) < 0 or sum(splits) != x.shape[0]:
            raise ValueError(
                f"m_splits {splits}: expected {self.num_gemms} numbers >= 0 that add up to the {x.shape[0]} rows of x"
            )
        calls = [r.call(self.weight.device, LOCAL, training=self.training) for r in self.hq]
        return GroupedLinearFunction.apply(x, self.weight, self.bias, calls, splits)

    def extra_repr(self) -> str:
        return f"{self.num_gemms} x ({self.in_features}, {self.out_features}), bias={self.bias is not None}"
