"""HybridGroupedLinear: one linear an expert over contiguous groups of rows, one (E, N, K) weight."""

from __future__ import annotations

import math

import torch

from ..grouped import ExpertRuntimes
from ..grouped_at_once import GroupedPlan
from ..plan import PAYLOAD, GemmPlan
from ..roles import GROUPED_LINEAR, ModuleRole
from ..weights import module_recipe


class HybridGroupedLinear(torch.nn.Module):
    """`num_gemms` linears over contiguous row groups: `y[group e] = x[group e] @ weight[e].T + bias[e]`.

    weight: one (E, N, K) parameter. first_expert: global index of the first local expert, for rules on experts.
    Every group has its own scales. recipe, name, layer, num_layers, save_input, backend, device, dtype: as
    `HybridLinear`. Raises ``ValueError`` without any expert, `PlanError` naming the expert for a plan that cannot run.
    """

    def __init__(
        self, num_gemms, in_features, out_features, bias=False, *, recipe=None, name="", layer=None, num_layers=None,
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
        self.hq = ExpertRuntimes(
            module_recipe(recipe), ModuleRole(GROUPED_LINEAR, name, layer, num_layers, expert=first_expert), num_gemms,
            self.weight.device, weight_rows=out_features, backend=backend, save_input=save_input,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """`torch.nn.Linear`'s initialisation of every expert."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def plans(self) -> list[GemmPlan]:
        """One an expert."""
        return self.hq.plans(self.weight.device)

    @property
    def how(self) -> GroupedPlan | str:
        """How the experts run together, or why they run one by one."""
        return self.hq.how(self.weight)

    def roles(self):
        """input, weight, output (None), grad_output of every expert."""
        return self.hq.roles()

    def forward(self, x: torch.Tensor, m_splits) -> torch.Tensor:
        """x (T, K); m_splits: rows of each group, a list or an int32 tensor (E,). Raises ``ValueError`` when they
        are not `num_gemms` non-negative numbers that add up to T; on a GPU they stay there, unread."""
        return self.hq(x, self.weight, self.bias, m_splits, training=self.training)

    def extra_repr(self) -> str:
        return f"{self.num_gemms} x ({self.in_features}, {self.out_features}), bias={self.bias is not None}"
