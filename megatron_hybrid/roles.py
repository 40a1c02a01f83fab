"""Roles: which tensor of which module a quantizer works for.

A :class:`ModuleRole` describes a module once (type, full name, global layer number, expert). Its operands are
:class:`QuantizerRole`: the module's role plus a tensor type. Recipes match them, plans and reports name them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from .formats import nearest

LINEAR, GROUPED_LINEAR, DPA = "linear", "grouped_linear", "dpa"

INPUT, WEIGHT, GRAD_OUTPUT = OPERANDS = ("input", "weight", "grad_output")

# the tensors of a module type, in the order in which the module emits their roles
TENSOR_TYPES = {
    LINEAR: OPERANDS,
    GROUPED_LINEAR: OPERANDS,
    DPA: ("qkv", "s", "o", "do", "dp"),
}
MODULE_TYPES = tuple(TENSOR_TYPES)


def _check_module(role) -> None:
    if role.module_type not in TENSOR_TYPES:
        raise ValueError(
            f"module {role.name!r}: unknown module type {role.module_type!r}"
            f"{nearest(str(role.module_type), MODULE_TYPES)} Valid: {', '.join(MODULE_TYPES)}"
        )
    if role.layer is not None and role.layer < 1:
        raise ValueError(f"module {role.name!r}: layers are numbered globally from 1, found {role.layer}")
    if role.expert is not None and role.expert < 0:
        raise ValueError(f"module {role.name!r}: experts are numbered globally from 0, found {role.expert}")


@dataclass(frozen=True)
class QuantizerRole:
    """One tensor of one module.

    ``name`` is the module's full name with the *global* layer index, ``layer`` the global layer number from 1
    (None outside the layer stack), ``expert`` the global expert index from 0 (None outside experts).
    Raises ``ValueError`` for an unknown module type, for a tensor type that this module type does not have and
    for a layer or expert number out of range.
    """

    module_type: str
    tensor_type: str
    name: str
    layer: int | None = None
    expert: int | None = None

    def __post_init__(self):
        _check_module(self)
        valid = TENSOR_TYPES[self.module_type]
        if self.tensor_type not in valid:
            raise ValueError(
                f"module {self.name!r}: a {self.module_type} has no tensor {self.tensor_type!r}"
                f"{nearest(str(self.tensor_type), valid)} Valid: {', '.join(valid)}"
            )


@dataclass(frozen=True)
class ModuleRole:
    """One module, or one expert of a grouped module.

    ``num_layers`` is the depth of the whole model, all pipeline stages together (needed by ``last:N`` rules).
    ``lm_head`` marks the output layer, which recipes leave alone unless they say ``lm_head: true``.
    Raises ``ValueError`` for an unknown module type and for a layer or expert number out of range.
    """

    module_type: str
    name: str
    layer: int | None = None
    num_layers: int | None = None
    expert: int | None = None
    lm_head: bool = False

    def __post_init__(self):
        _check_module(self)
        if self.layer is not None and self.num_layers is not None and self.layer > self.num_layers:
            raise ValueError(f"module {self.name!r}: layer {self.layer} of a model with {self.num_layers} layers")

    @property
    def label(self) -> str:
        """The quoted name, with the expert's number for one of a grouped module: for messages."""
        return repr(self.name) if self.expert is None else f"{self.name!r}, expert {self.expert}"

    @property
    def tensor_types(self) -> tuple[str, ...]:
        """In the order of :data:`TENSOR_TYPES`."""
        return TENSOR_TYPES[self.module_type]

    def operand(self, tensor_type: str) -> QuantizerRole:
        """Role of one tensor. Raises ``ValueError`` when the module type has no such tensor."""
        return QuantizerRole(self.module_type, tensor_type, self.name, self.layer, self.expert)

    def operands(self) -> tuple[QuantizerRole, ...]:
        """Roles of all the module's tensors, in the order of :data:`TENSOR_TYPES`."""
        return tuple(self.operand(t) for t in self.tensor_types)


def tensor_id(role: QuantizerRole) -> int:
    """32 bits that name a tensor in the key of stochastic rounding.

    They depend on the full name and the tensor type only: the same in every process, on every rank and after a
    resume. The expert is left out, since the tokens of all experts share one global row index.
    """
    return zlib.crc32(f"{role.name}|{role.tensor_type}".encode())
