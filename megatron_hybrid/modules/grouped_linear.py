"""HybridGroupedLinear: one linear an expert over contiguous groups of rows, one (E, N, K) weight."""

from __future__ import annotations

import math

import torch

from ..expert_weights import HoldsExpertWeights
from ..grouped import ExpertRuntimes
from ..grouped_at_once import GroupedPlan
from ..plan import PAYLOAD, GemmPlan
from ..roles import GROUPED_LINEAR, ModuleRole
from ..weights import module_recipe


class HybridGroupedLinear(HoldsExpertWeights, torch.nn.Module):
    """`num_gemms` linears over contiguous row groups: `y[group e] = x[group e] @ weight[e].T + bias[e]`.

    weight: one (E, N, K) parameter. Weights that live quantized are a parameter (N, K) an expert instead, ``weight0``
    and so on, since every expert has its own formats and scales. State dicts of either kind load into the other.

    first_expert: global index of the first local expert, for rules on experts. recipe, name, layer, num_layers,
    save_input, backend, device, dtype: as `HybridLinear`. Raises ``ValueError`` without any expert, `PlanError`
    naming the expert for a plan that cannot run.
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
        self.hq = ExpertRuntimes(
            module_recipe(recipe), ModuleRole(GROUPED_LINEAR, name, layer, num_layers, expert=first_expert), num_gemms,
            self.weight.device, weight_rows=out_features, backend=backend, save_input=save_input,
        )  # fmt: skip
        self.reset_parameters()
        self.hold_expert_weights()

    def reset_parameters(self) -> None:
        """`torch.nn.Linear`'s initialisation of every expert; delayed scales start anew."""
        for runtime in self.hq:
            runtime.reset_states()
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        if self.weight is not None:
            torch.nn.init.uniform_(self.weight, -bound, bound)
        else:
            shape, first = (self.num_gemms, self.out_features, self.in_features), self.weight0
            values = torch.empty(shape, dtype=first.dtype, device=first.device).uniform_(-bound, bound)
            with torch.no_grad():
                for weight, value in zip(self.weights(), values):
                    weight.copy_(value)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def plans(self) -> list[GemmPlan]:
        """One an expert."""
        return self.hq.plans(self.weight_device)

    @property
    def how(self) -> GroupedPlan | str:
        """How the experts run together, or why they run one by one."""
        return self.hq.how_each(self.weights()) if self.weight is None else self.hq.how(self.weight)

    def roles(self):
        """input, weight, output (None), grad_output of every expert."""
        return self.hq.roles()

    def forward(self, x: torch.Tensor, m_splits) -> torch.Tensor:
        """x (T, K); m_splits: rows of each group, a list or an int32 tensor (E,). Raises ``ValueError`` when they
        are not `num_gemms` non-negative numbers that add up to T; on a GPU they stay there, unread, where experts
        run at once."""
        return self.multiply(x, self.bias, m_splits)

    def extra_repr(self) -> str:
        return f"{self.num_gemms} x ({self.in_features}, {self.out_features}), bias={self.bias is not None}"
