"""What a GEMM backend is: the question put to it, and what it answers.

There is one canonical layout: ``out[rows_a, rows_b] = A @ B.T`` with both operands contraction-last. A rowwise
payload of (M, K) is the operand (M, K); a columnwise payload of (M, K) is the operand (K, M).

========  =================  =======================  ======================  ======  ======  ===========
gemm      equation           operand A                operand B               rows_a  rows_b  contraction
========  =================  =======================  ======================  ======  ======  ===========
fprop     y = x @ w.T        input.rowwise            weight.rowwise          M       N       K
dgrad     dx = dy @ w        grad_output.rowwise      weight.columnwise       M       K       N
wgrad     dw = dy.T @ x      grad_output.columnwise   input.columnwise        N       K       M
========  =================  =======================  ======================  ======  ======  ===========
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ..formats import COLUMNWISE, ROWWISE, Format
from ..quantizer_spec import GEMMS
from ..storage import QuantizedStorage

_DIRECTIONS = {"fprop": (ROWWISE, ROWWISE), "dgrad": (ROWWISE, COLUMNWISE), "wgrad": (COLUMNWISE, COLUMNWISE)}

# gemm -> ((operand A, its direction), (operand B, its direction))
OPERANDS = {gemm: tuple(zip(names, _DIRECTIONS[gemm])) for gemm, names in GEMMS.items()}

# (operand, direction) -> the gemm that reads it
READ_BY = {operand: gemm for gemm, operands in OPERANDS.items() for operand in operands}

# gemm -> the module's dimensions that are (rows_a, rows_b, contraction)
DIMENSIONS = {"fprop": ("M", "N", "K"), "dgrad": ("M", "K", "N"), "wgrad": ("N", "K", "M")}


@dataclass(frozen=True)
class DeviceKind:
    """What a backend may depend on: the device type and, on CUDA, the compute capability."""

    type: str
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, device) -> DeviceKind:
        """The kind of a torch device; a `DeviceKind` is one already."""
        if isinstance(device, DeviceKind):
            return device
        device = torch.device(device)
        if device.type == "cuda" and torch.cuda.is_available():
            return cls("cuda", torch.cuda.get_device_capability(device))
        return cls(device.type)

    def __str__(self) -> str:
        return self.type if self.capability is None else f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class GemmPair:
    """The question put to a backend: this gemm, these two formats, this device, this accumulation."""

    gemm: str
    a: Format
    b: Format
    device: DeviceKind
    accumulate: str = "full"

    @property
    def is_quantized(self) -> bool:
        return self.a.is_quantized or self.b.is_quantized


class Alignment(NamedTuple):
    """Multiples to which a backend pads a gemm's dimensions; the padding is zeros and is cut off the result."""

    rows_a: int = 1
    rows_b: int = 1
    contraction: int = 1


class GemmBackend(Protocol):
    """One way to run gemms. name; native: True when it multiplies the codes themselves."""

    name: str
    native: bool

    def reason(self, pair: GemmPair) -> str | None:
        """None when this backend can run the pair; else why not."""

    def wants_transposed(self, pair: GemmPair) -> bool:
        """Whether column operands should be written (K, M), contraction contiguous."""

    def alignment(self, pair: GemmPair) -> Alignment:
        """What it pads this pair's dimensions to."""

    def accumulation(self, pair: GemmPair) -> str:
        """``fast`` or ``full``: what its sums keep when `pair.accumulate` is asked for."""

    def prepare(self, pair: GemmPair):
        """`run` for one pair: a function of (a, b, out_dtype, accumulate_into), with what can be decided decided."""

    def run(
        self, a: QuantizedStorage, b: QuantizedStorage, pair: GemmPair, out_dtype: torch.dtype,
        accumulate_into: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`A @ B.T` in `out_dtype`, or added to `accumulate_into` (which is returned)."""


def pair_error(pair: GemmPair) -> str | None:
    """Pairs no backend may run, whatever the device."""
    if pair.a.rht != pair.b.rht:
        return "a Hadamard transform on one operand only changes the product: use `rht` on both or on neither"
    return None


def finish(out: torch.Tensor, out_dtype: torch.dtype, accumulate_into: torch.Tensor | None) -> torch.Tensor:
    """Round a result once to its dtype, or add it to an accumulator."""
    if accumulate_into is None:
        if out.dtype != out_dtype and torch.compiler.is_compiling():
            from ..ops import round_to

            return round_to(out, out_dtype)
        return out.to(out_dtype)
    return accumulate_into.add_(out)
