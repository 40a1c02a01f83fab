"""Self-attention around two quantized linears. The scores and their softmax stay in high precision."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..consumer import Output
from ..roles import DPA, ModuleRole, QuantizerRole
from ..weights import module_recipe
from .linear import HybridLinear, part_name


class DotProductAttention(torch.nn.Module):
    """softmax(scale * q k^T) v for q, k, v of shape (batch, heads, sequence, head size).

    Its tensors have roles (``qkv``, ``s``, ``o``, ``do``, ``dp``), which recipes can match and for now only leave
    alone: no backend quantizes them. name, layer, num_layers: as `HybridLinear`.
    """

    def __init__(self, *, causal=True, recipe=None, name="", layer=None, num_layers=None):
        super().__init__()
        self.causal = causal
        self.role = ModuleRole(DPA, name, layer=layer, num_layers=num_layers)
        self.output = Output()
        module_recipe(recipe).resolve(self.role)  # raises for a quantized answer

    def roles(self) -> tuple[QuantizerRole | None, ...]:
        """qkv, s, o, do, dp, then output (the consumer's; None by default)."""
        return (*self.role.operands(), self.output.role)

    @property
    def input_role(self) -> QuantizerRole:
        return self.role.operand("qkv")

    def cast_input(self, x: torch.Tensor) -> torch.Tensor:
        """As it is: attention reads high precision."""
        return x

    def forward(self, q, k, v) -> torch.Tensor:
        """-> (batch, sequence, heads * head size); k and v may have fewer heads than q, which then share them."""
        scale = 1 / math.sqrt(q.shape[-1])
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale, enable_gqa=grouped)
        return self.output(out.transpose(1, 2).flatten(2))


class HybridSelfAttention(torch.nn.Module):
    """`proj(attention(qkv(x)))` for x (batch, sequence, hidden).

    num_heads: of the queries. num_query_groups: heads of keys and values, by default as many. name: prefix; the
    parts are `<name>.linear_qkv`, `<name>.core_attention` and `<name>.linear_proj`. recipe, layer, num_layers: as
    `HybridLinear`. Raises ``ValueError`` for sizes that do not divide.
    """

    def __init__(
        self, hidden, num_heads, *, num_query_groups=None, causal=True, bias=True, recipe=None, name="",
        layer=None, num_layers=None, output_role=None, device=None, dtype=None, **linear,
    ):  # fmt: skip
        super().__init__()
        groups = num_query_groups or num_heads
        if hidden % num_heads or num_heads % groups:
            raise ValueError(f"hidden {hidden}, {num_heads} heads, {groups} query groups: each must divide the one before")
        self.num_heads, self.num_query_groups, self.head_size = num_heads, groups, hidden // num_heads
        where = dict(recipe=recipe, layer=layer, num_layers=num_layers)
        made = dict(device=device, dtype=dtype, **where, **linear)
        qkv_out = self.head_size * (num_heads + 2 * groups)
        self.linear_qkv = HybridLinear(hidden, qkv_out, bias, name=part_name(name, "linear_qkv"), **made)
        self.core_attention = DotProductAttention(causal=causal, name=part_name(name, "core_attention"), **where)
        self.linear_proj = HybridLinear(
            hidden, hidden, bias, name=part_name(name, "linear_proj"), output_role=output_role, **made
        )
        self.linear_qkv.output.bind(self.core_attention)

    @property
    def output(self) -> Output:
        """The result on its way out, cast for its consumer where one is bound."""
        return self.linear_proj.output

    def roles(self):
        """Those of qkv, of the core, of proj. qkv's output role is the core's ``qkv``."""
        return self.linear_qkv.roles() + self.core_attention.roles() + self.linear_proj.roles()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, sequence, hidden) -> the same shape."""
        qkv = self.linear_qkv(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q, k, v = qkv.split((self.num_heads, self.num_query_groups, self.num_query_groups), dim=1)
        return self.linear_proj(self.core_attention(q, k, v))
