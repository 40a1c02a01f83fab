"""HybridLinear: a plain torch module whose three GEMMs follow a recipe."""

from __future__ import annotations

import math

import torch

from ..linear import LOCAL, hybrid_linear
from ..plan import GemmPlan
from ..recipe import Recipe
from ..roles import ModuleRole
from ..runtime import LinearRuntime


class HybridLinear(torch.nn.Module):
    """`y = x @ weight.T + bias`, each GEMM in the formats the recipe gives it.

    in_features, out_features, bias, device, dtype: as `torch.nn.Linear`. recipe: a `Recipe`, a shipped recipe's
    name or a path. name: the module's full name, which the recipe's rules match. layer, num_layers: the global
    1-based layer number and count, for rules on layers. backend: force a gemm backend by name (tests).

    Raises `PlanError` (a ValueError) at construction for a combination no backend can run.
    """

    def __init__(
        self, in_features, out_features, bias=True, *, recipe="bf16", name="", layer=None, num_layers=None,
        backend=None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()
        role = ModuleRole("linear", name, layer=layer, num_layers=num_layers)
        self.hq = LinearRuntime(recipe, role, self.weight.device, backend=backend)

    def reset_parameters(self) -> None:
        """`torch.nn.Linear`'s initialisation."""
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    @property
    def plan(self) -> GemmPlan:
        return self.hq.plan_for(self.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = self.hq.call(self.weight.device, LOCAL, training=self.training)
        return hybrid_linear(x, self.weight, self.bias, call)

    def extra_repr(self) -> str:
        gemm = ", ".join(f"{g}={s.pair.a} x {s.pair.b}" for g, s in self.plan.steps().items())
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {gemm}"
