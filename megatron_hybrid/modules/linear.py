"""HybridLinear: a plain torch module whose three GEMMs follow a recipe."""

from __future__ import annotations

import math

import torch

from ..consumer import Output, cast_input
from ..linear import LOCAL, hybrid_linear
from ..plan import INPUT, PAYLOAD, GemmPlan
from ..random_keys import whole_tensors
from ..roles import LINEAR, ModuleRole, QuantizerRole
from ..runtime import LinearRuntime
from ..weights import HoldsWeight, fresh_values, module_recipe


def part_name(module: str, part: str) -> str:
    """Full name of a part; unnamed modules leave their parts unnamed too, so that `prepare` names them by path."""
    return f"{module}.{part}" if module else ""


class HybridLinear(HoldsWeight, torch.nn.Module):
    """`y = x @ weight.T + bias`, each GEMM in the formats the recipe gives it.

    in_features, out_features, bias, device, dtype: as `torch.nn.Linear`. recipe: a `Recipe`, a shipped recipe's
    name, a path, or a function `role -> HybridQuantizer`; by default that of `quantized_model_init`, else ``bf16``.
    With ``weights: quantized`` the weight is a `HybridTensor`, see weights.py. name: the module's full name, which
    the recipe's rules match. layer, num_layers: the global 1-based layer number and count, for rules on layers.
    output_role: the role of what reads y, see consumer.py. save_input: ``payload`` or ``original``, see `build_plan`.
    backend: force a gemm backend by name (tests).

    Raises `PlanError` (a ValueError) at construction for a combination no backend can run.
    """

    def __init__(
        self, in_features, out_features, bias=True, *, recipe=None, name="", layer=None, num_layers=None,
        output_role=None, save_input=PAYLOAD, backend=None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.output = Output(output_role)
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        role = ModuleRole(LINEAR, name, layer=layer, num_layers=num_layers)
        recipe = module_recipe(recipe)
        self.hq = LinearRuntime(recipe, role, self.weight.device, backend=backend, save_input=save_input)
        self.hq.index_maps = whole_tensors(in_features, out_features)
        self.reset_parameters()
        self.hold_weight()

    def reset_parameters(self) -> None:
        """`torch.nn.Linear`'s initialisation; delayed scales start anew."""
        self.hq.reset_states()
        with fresh_values(self.weight) as weight:
            torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    @property
    def plan(self) -> GemmPlan:
        """On the weight's device."""
        return self.hq.plan_for(self.weight.device)

    def roles(self) -> tuple[QuantizerRole | None, ...]:
        """input, weight, output (the consumer's; None by default), grad_output."""
        return self.hq.roles(self.output.role)

    @property
    def input_role(self) -> QuantizerRole:
        """For producers that cast this module's input."""
        return self.hq.role.operand(INPUT)

    def cast_input(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) cast as this module's input, for a producer; `forward` takes the result without a cast."""
        return cast_input(x, self.hq, self.weight, training=self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K), plain or a `HybridTensor` in the plan's formats -> (..., N)."""
        weight = self.weight  # once: it may be computed (torch.nn.utils.parametrize)
        call = self.hq.call(weight.device, LOCAL, training=self.training)
        return self.output(hybrid_linear(x, weight, self.bias, call))

    def extra_repr(self) -> str:
        gemm = ", ".join(f"{g}={s.pair.a} x {s.pair.b}" for g, s in self.plan.steps().items())
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {gemm}"
