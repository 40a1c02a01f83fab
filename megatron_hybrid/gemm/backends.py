"""The backends that need no special hardware: high precision, emulated, reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import kernels
from ..formats import Format
from ..storage import QuantizedStorage, decode_operands
from . import cublaslt
from .backend import Alignment, GemmPair, finish


class _ExactSums:
    """What the backends here share: FP32 sums or wider, any sizes, no codes multiplied."""

    native = False

    def route(self, pair: GemmPair) -> str:
        """How csrc/node runs a pair: by itself as ``high_precision`` or ``decoded``, or ``python``: by calling this."""
        return "python"

    def decodes_to_bf16(self, fmt: Format, dtype: torch.dtype, device_type: str) -> bool:
        """Of the route ``decoded``: whether an operand that was cast from `dtype` can be decoded to bf16, not FP32."""
        return False

    def reason(self, pair: GemmPair) -> str | None:
        return None

    def wants_transposed(self, pair: GemmPair) -> bool:
        return False

    def alignment(self, pair: GemmPair) -> Alignment:
        return Alignment()

    def accumulation(self, pair: GemmPair) -> str:
        return "full"

    def prepare(self, pair: GemmPair):
        return _Prepared(self, pair)


@dataclass(frozen=True)
class _Prepared:
    """A backend's `run` for one pair."""

    backend: _ExactSums
    pair: GemmPair

    @property
    def route(self) -> str:
        return self.backend.route(self.pair)

    @property
    def in_bf16(self) -> list[list[bool]]:
        """`decodes_to_bf16` of A and B, by the dtypes that kernels cast."""
        decodes, device = self.backend.decodes_to_bf16, self.pair.device.type
        return [[decodes(fmt, dtype, device) for dtype in kernels.SOURCE_CODES] for fmt in (self.pair.a, self.pair.b)]

    def __call__(self, a, b, out_dtype, accumulate_into=None) -> torch.Tensor:
        return self.backend.run(a, b, self.pair, out_dtype, accumulate_into)


class HighPrecisionBackend(_ExactSums):
    """Both operands as they are: torch's own matmul in the tensors' dtype.

    In backward A is the gradient, whose dtype is the output's: B, a weight or an input of another one, is rounded to it, as
    autocast does. In fprop autocast does that itself, and without it `linear.check_dtypes` refuses the call.
    """

    name, native = "high_precision", True

    def reason(self, pair: GemmPair) -> str | None:
        return "an operand is quantized" if pair.is_quantized else None

    def route(self, pair: GemmPair) -> str:
        return "high_precision"

    def run(self, a, b, pair, out_dtype, accumulate_into=None):
        x, w = a.operand(a.dtype), b.operand(b.dtype)
        if accumulate_into is None and out_dtype == x.dtype:
            return torch.mm(x, (w if pair.gemm == "fprop" else w.to(x.dtype)).t())
        return mm_into(x, w, out_dtype, accumulate_into)


class EmulatedBackend(_ExactSums):
    """Decode both operands, multiply exactly what the native instruction would multiply.

    On CUDA the operands are decoded to bf16, in which codes times block scales are exact (`exact_in_bf16`), and outer
    scales go into the epilogue. Other operands are decoded to FP32. On the CPU everything is. csrc/node/products.cpp is
    the same in C++.
    """

    name = "emulated"
    bf16_devices = ("cuda",)

    def route(self, pair: GemmPair) -> str:
        return "decoded"

    def decodes_to_bf16(self, fmt: Format, dtype: torch.dtype, device_type: str) -> bool:
        return device_type in self.bf16_devices and exact_in_bf16(fmt, dtype)

    def _in_bf16(self, s: QuantizedStorage) -> bool:
        return self.decodes_to_bf16(s.format, s.dtype, s.device.type)

    def wants_transposed(self, pair: GemmPair) -> bool:
        return True

    def run(self, a, b, pair, out_dtype, accumulate_into=None):
        dtype = torch.bfloat16 if self._in_bf16(a) and self._in_bf16(b) else torch.float32
        x, w = a.unwritten_operand(dtype), b.unwritten_operand(dtype)
        if dtype == torch.float32:
            decode_operands((a, b), (x, w))
            return mm_into(x, w, out_dtype, accumulate_into)
        if _from_amaxes(a, b) and _direct(x, w, accumulate_into):
            factor = torch.empty((), dtype=torch.float32, device=x.device)
            decode_operands((a, b), (x, w), outer=False, factor=factor)
            return _multiply_scaled(x, w, factor, out_dtype, accumulate_into)
        decode_operands((_inside(a), _inside(b)), (x, w), outer=False)
        rows, columns = epilogue_scale(a), epilogue_scale(b)
        if rows is None and columns is None:
            return mm_into(x, w, out_dtype, accumulate_into)
        if (factor := _one_factor(rows, columns)) is not None and _direct(x, w, accumulate_into):
            return _multiply_scaled(x, w, factor, out_dtype, accumulate_into)
        return _scale_into(mm_fp32(x, w), rows, columns, out_dtype, accumulate_into)


class ReferenceBackend(_ExactSums):
    """FP32 decode, float64 product, one rounding. Slow; last in the order, so only asking for it gets it (tests)."""

    name = "reference"

    def run(self, a, b, pair, out_dtype, accumulate_into=None):
        out = a.operand(torch.float32).double() @ b.operand(torch.float32).double().T
        return finish(out.float(), out_dtype, accumulate_into)


def mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b.T` with an FP32 result: FP32 products on the CPU, bf16 operands with FP32 output on CUDA."""
    if _low_precision(a, b):
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return torch.mm(a.float(), b.float().t())


def mm_into(a, b, out_dtype, accumulate_into=None) -> torch.Tensor:
    """`a @ b.T` in FP32 sums, rounded once to `out_dtype` or added to `accumulate_into`, by the GEMM where it can.

    CUDA's bf16 GEMMs may add the parts of a split contraction in bf16, where
    `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` (torch's default) allows it.
    """
    if _low_precision(a, b):
        if accumulate_into is not None and accumulate_into.dtype == torch.float32:
            return torch.addmm(accumulate_into, a, b.t(), out_dtype=torch.float32, out=accumulate_into)
        if accumulate_into is None and out_dtype == a.dtype:
            return torch.mm(a, b.t())
    return finish(mm_fp32(a, b), out_dtype, accumulate_into)


def _low_precision(a, b) -> bool:
    return a.device.type == "cuda" and a.dtype == b.dtype != torch.float32


def _from_amaxes(a: QuantizedStorage, b: QuantizedStorage) -> bool:
    """Whether the scales outside of a product are one number an operand or none, and come from amaxes."""
    kept = [s.outer_amax for s in (a, b) if s.outer_amax is not None]
    outside = any(s.format.is_quantized and _scales_outside(s.format) for s in (a, b))
    return bool(kept) and not outside and all(amax.numel() == 1 for amax in kept)


def _one_factor(rows, columns) -> torch.Tensor | None:
    """The product of A's and B's outer scales where each is one number or None, else None."""
    found = [s for s in (rows, columns) if s is not None]
    if any(s.numel() != 1 for s in found):
        return None
    return found[0] if len(found) == 1 else rows * columns


def _direct(x, w, accumulate_into) -> bool:
    if kernels.traced(x) or kernels.traced(w) or not cublaslt.takes(x, w):
        return False
    return accumulate_into is None or (accumulate_into.dtype == torch.float32 and accumulate_into.is_contiguous())


def _multiply_scaled(x, w, factor, out_dtype, accumulate_into) -> torch.Tensor:
    """`factor * x @ w.T` by one GEMM that reads the factor from the device; rounded once, or added."""
    how = dict(dtypes=(x.dtype, w.dtype), factor=factor)
    if accumulate_into is not None:
        return cublaslt.multiply(x, w, accumulate_into, add=True, **how)
    made = out_dtype if out_dtype == torch.bfloat16 else torch.float32
    out = torch.empty((x.shape[0], w.shape[0]), dtype=made, device=x.device)
    return cublaslt.multiply(x, w, out, **how).to(out_dtype)


def _scale_into(out, rows, columns, out_dtype, accumulate_into) -> torch.Tensor:
    """`out * rows * columns` (FP32) rounded once, in as few passes over `out` as there are scales that do not combine.

    rows: A's outer scale, () or (rows_a, 1) in any orientation, or None; columns: B's.
    """
    rows = None if rows is None else rows.reshape(-1, 1)
    columns = None if columns is None else columns.reshape(1, -1)
    if rows is not None and columns is not None and 1 in (rows.numel(), columns.numel()):
        rows, columns = rows * columns, None
    first, last = (rows, columns) if columns is not None else (None, rows)
    if first is not None:
        out *= first
    if accumulate_into is not None:
        return accumulate_into.addcmul_(out, last)
    return torch.mul(out, last, out=out.new_empty(out.shape, dtype=out_dtype))


def _scales_outside(fmt: Format) -> bool:
    """FP32 scales that do not vary along the contraction."""
    return fmt.scale == "fp32" and fmt.outer_axis != "none"


def fits_bf16(fmt: Format) -> bool:
    """Whether codes times the scales along the contraction are exact in bf16, if cast from 16 bits; `exact_in_bf16`."""
    return not fmt.is_quantized or fmt.scale != "fp32" or fmt.pow2 or _scales_outside(fmt)


def exact_in_bf16(fmt: Format, dtype: torch.dtype) -> bool:
    """Whether `bf16_operand` of a payload that was cast from `dtype` loses nothing.

    E2M1 x E4M3 takes 6 significant bits, E4M3 x 2^k takes 4, of 8; an FP32 scale along the contraction that is no
    power of two takes more. 2^k reaches below bf16's normal numbers: there bf16 has multiples of 2^-133 and codes can
    give multiples of 2^-136. A bf16 or fp16 tensor holds multiples of 2^-133 itself, and rounding one to a coarser or
    finer grid gives another, so what was cast from those is exact. What was cast from FP32 need not be.
    """
    if not fmt.is_quantized:
        return dtype == torch.bfloat16
    if fmt.keeps_amax or _scales_outside(fmt):
        return True
    return dtype != torch.float32 and fits_bf16(fmt)


def bf16_operand(s: QuantizedStorage) -> torch.Tensor:
    """The GEMM view (rows, contraction) in bf16, without the scales that `epilogue_scale` gives."""
    return _inside(s).operand(torch.bfloat16, outer=False)


def _inside(s: QuantizedStorage) -> QuantizedStorage:
    """The payload with ones for FP32 scales that `epilogue_scale` gives."""
    if not s.format.is_quantized or not _scales_outside(s.format):
        return s
    return s.with_buffers({"scale": torch.ones_like(s.scale)})


def epilogue_scale(s: QuantizedStorage) -> torch.Tensor | None:
    """FP32 scales a row of the GEMM view, or one, that the result is multiplied by; None where there are none."""
    if not s.format.is_quantized:
        return None
    if _scales_outside(s.format):
        return s.scale
    return None if s.outer_amax is None else s.outer_scale()
