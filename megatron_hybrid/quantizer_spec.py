"""What a recipe says about one module: the six slots and what goes with them.

The table that everything follows from, as data::

    gemm    operand A               operand B
    fprop   input.rowwise           weight.rowwise
    dgrad   grad_output.rowwise     weight.columnwise
    wgrad   grad_output.columnwise  input.columnwise

A *setting* is one decision of a recipe, under a flat key: a slot (``fprop.input``), ``columnwise_source.weight``,
``accumulate.wgrad`` or ``backward``. Rules decide settings one by one; a :class:`ModuleQuant` is a complete set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .formats import HIGH_PRECISION, Format, shares_codes
from .roles import OPERANDS, ModuleRole

# operands A and B of each gemm
GEMMS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}

# the gemms that read an operand's rowwise and columnwise copy
READERS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}

SLOTS = tuple(f"{gemm}.{operand}" for gemm, operands in GEMMS.items() for operand in operands)

ORIGINAL, ROWWISE_DEQUANTIZED = "original", "rowwise_dequantized"
COLUMNWISE_SOURCES = (ORIGINAL, ROWWISE_DEQUANTIZED)
ACCUMULATE = ("fast", "full")
BACKWARD = ("default", "high_precision", "dequantized")

DEFAULT_SETTINGS = {
    **{slot: HIGH_PRECISION for slot in SLOTS},
    **{f"columnwise_source.{operand}": ORIGINAL for operand in OPERANDS},
    "accumulate.fprop": "fast",
    "accumulate.dgrad": "full",
    "accumulate.wgrad": "full",
    "backward": "default",
}


class Slots(NamedTuple):
    """The six formats, one a gemm and operand, in the order of :data:`SLOTS`."""

    fprop_input: Format
    fprop_weight: Format
    dgrad_grad_output: Format
    dgrad_weight: Format
    wgrad_grad_output: Format
    wgrad_input: Format


class _Table:
    def __getitem__(self, key: str) -> str:
        return vars(self)[key]


@dataclass(frozen=True)
class PerOperand(_Table):
    """One word an operand, as ``table.weight`` or ``table["weight"]``."""

    input: str
    weight: str
    grad_output: str


@dataclass(frozen=True)
class PerGemm(_Table):
    """One word a gemm, as ``table.fprop`` or ``table["fprop"]``."""

    fprop: str
    dgrad: str
    wgrad: str


class OperandQuant(NamedTuple):
    """What a quantizer of one operand is made of."""

    rowwise: Format
    columnwise: Format
    columnwise_source: str


@dataclass(frozen=True)
class ModuleQuant:
    """The recipe resolved for one module at one step.

    ``rules`` are the indices of the rules that decided at least one setting; two results that differ only there
    compare equal.
    """

    module: ModuleRole
    slots: Slots
    columnwise_source: PerOperand
    accumulate: PerGemm
    backward: str
    rules: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def from_settings(cls, module: ModuleRole, settings: dict, rules: tuple[int, ...] = ()) -> ModuleQuant:
        """Build from a complete set of settings, applying the ``backward`` shorthand."""
        settings = _rewrite_backward(settings)
        return cls(
            module,
            Slots(*(settings[slot] for slot in SLOTS)),
            PerOperand(*(_source(settings, operand) for operand in OPERANDS)),
            PerGemm(*(settings[f"accumulate.{gemm}"] for gemm in GEMMS)),
            settings["backward"],
            rules,
        )

    def slot(self, gemm: str, operand: str) -> Format:
        """Format of one operand of one gemm. Raises ``KeyError`` when the gemm has no such operand."""
        if operand not in GEMMS[gemm]:
            raise KeyError(f"{gemm} multiplies {' and '.join(GEMMS[gemm])}, not {operand}")
        return getattr(self.slots, f"{gemm}_{operand}")

    def quantizer(self, operand: str) -> OperandQuant:
        """Formats of an operand's rowwise and columnwise copies, and what the columnwise one is cast from.

        Attention tensors (``dpa``) are left in high precision. Raises ``KeyError`` for a tensor type that the
        module does not have.
        """
        if operand not in self.module.tensor_types:
            raise KeyError(f"a {self.module.module_type} has no tensor {operand!r}")
        if operand not in READERS:
            return OperandQuant(HIGH_PRECISION, HIGH_PRECISION, ORIGINAL)
        row_gemm, column_gemm = READERS[operand]
        row, column = self.slot(row_gemm, operand), self.slot(column_gemm, operand)
        return OperandQuant(row, column, self.columnwise_source[operand])

    @property
    def is_quantized(self) -> bool:
        return any(f.is_quantized for f in self.slots)

    def columnwise_derivable(self, operand: str) -> bool:
        """True when the columnwise copy follows from the rowwise payload alone, without the original tensor."""
        row, column, source = self.quantizer(operand)
        if source == ROWWISE_DEQUANTIZED or not row.is_quantized:
            return True
        return shares_codes(row, column)

    def lone_rht(self) -> str | None:
        """The first gemm with a Hadamard transform on one operand only (its product would be wrong), or None."""
        for gemm, (a, b) in GEMMS.items():
            if self.slot(gemm, a).rht != self.slot(gemm, b).rht:
                return gemm
        return None


def _rewrite_backward(settings: dict) -> dict:
    """Settings with the ``backward`` shorthand spelled out: dgrad and wgrad read high-precision operands."""
    mode = settings["backward"]
    if mode == "default":
        return settings
    source = ROWWISE_DEQUANTIZED if mode == "dequantized" else ORIGINAL
    backward_slots = [slot for slot in SLOTS if not slot.startswith("fprop.")]
    return {
        **settings,
        **dict.fromkeys(backward_slots, HIGH_PRECISION),
        "columnwise_source.input": source,
        "columnwise_source.weight": source,
        "columnwise_source.grad_output": ORIGINAL,
    }


def _source(settings: dict, operand: str) -> str:
    """A row in high precision is the original, so there is no other source then."""
    row_is_quantized = settings[f"{READERS[operand][0]}.{operand}"].is_quantized
    return settings[f"columnwise_source.{operand}"] if row_is_quantized else ORIGINAL
