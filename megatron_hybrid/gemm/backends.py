"""The backends that need no special hardware: high precision, emulated, reference."""

from __future__ import annotations

import torch

from ..formats import Format
from ..storage import QuantizedStorage
from .backend import Alignment, GemmPair, finish


class _ExactSums:
    """What the backends here share: FP32 sums or wider, any sizes, no codes multiplied."""

    native = False

    def reason(self, pair: GemmPair) -> str | None:
        return None

    def wants_transposed(self, pair: GemmPair) -> bool:
        return False

    def alignment(self, pair: GemmPair) -> Alignment:
        return Alignment()

    def accumulation(self, pair: GemmPair) -> str:
        return "full"


class HighPrecisionBackend(_ExactSums):
    """Both operands as they are: torch's own matmul in the tensors' dtype."""

    name, native = "high_precision", True

    def reason(self, pair: GemmPair) -> str | None:
        return "an operand is quantized" if pair.is_quantized else None

    def run(self, a, b, pair, out_dtype, accumulate_into=None):
        x, w = a.operand(a.dtype), b.operand(b.dtype)
        if accumulate_into is None and out_dtype == x.dtype:
            return torch.mm(x, w.T)
        return finish(mm_fp32(x, w), out_dtype, accumulate_into)


class EmulatedBackend(_ExactSums):
    """Decode both operands, multiply exactly what the native instruction would multiply.

    On CUDA the operands are decoded to bf16, in which codes times block scales are exact (E2M1 x E4M3 needs 6
    significant bits, E4M3 x 2^k needs 4, of 8), and outer scales go into the epilogue. FP32 scales along the
    contraction do not fit bf16: those operands are decoded to FP32. On the CPU everything is decoded to FP32.
    """

    name = "emulated"

    def wants_transposed(self, pair: GemmPair) -> bool:
        return True

    def run(self, a, b, pair, out_dtype, accumulate_into=None):
        if a.device.type == "cpu" or not (exact_in_bf16(a) and exact_in_bf16(b)):
            out = mm_fp32(a.operand(torch.float32), b.operand(torch.float32))
        else:
            # an FP32 per-tensor or per-row scale is outside the contraction: multiply codes, scale the result
            out = mm_fp32(bf16_operand(a), bf16_operand(b))
            for s, along_rows in ((a, True), (b, False)):
                if (scale := epilogue_scale(s)) is not None:
                    out *= scale.reshape(-1, 1) if along_rows else scale.reshape(1, -1)
        return finish(out, out_dtype, accumulate_into)


class ReferenceBackend(_ExactSums):
    """FP32 decode, float64 product, one rounding. Slow; last in the order, so only asking for it gets it (tests)."""

    name = "reference"

    def run(self, a, b, pair, out_dtype, accumulate_into=None):
        out = a.operand(torch.float32).double() @ b.operand(torch.float32).double().T
        return finish(out.float(), out_dtype, accumulate_into)


def mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b.T` with an FP32 result: FP32 products on the CPU, bf16 operands with FP32 output on CUDA."""
    if a.device.type == "cuda" and a.dtype == b.dtype != torch.float32:
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float().T)


def _scales_outside(fmt: Format) -> bool:
    """FP32 scales that do not vary along the contraction."""
    return fmt.scale == "fp32" and fmt.outer_axis != "none"


def fits_bf16(fmt: Format) -> bool:
    """Whether codes times the scales along the contraction are exact in bf16."""
    return not fmt.is_quantized or fmt.scale != "fp32" or fmt.pow2 or _scales_outside(fmt)


def exact_in_bf16(s: QuantizedStorage) -> bool:
    """Whether `bf16_operand` loses nothing."""
    return fits_bf16(s.format) if s.format.is_quantized else s.dtype == torch.bfloat16


def bf16_operand(s: QuantizedStorage) -> torch.Tensor:
    """The GEMM view (rows, contraction) in bf16, without the scales that `epilogue_scale` gives."""
    if not s.format.is_quantized or not _scales_outside(s.format):
        return s.operand(torch.bfloat16, outer=False)
    return s.with_buffers({"scale": torch.ones_like(s.scale)}).operand(torch.bfloat16)


def epilogue_scale(s: QuantizedStorage) -> torch.Tensor | None:
    """FP32 scales a row of the GEMM view, or one, that the result is multiplied by; None where there are none."""
    if not s.format.is_quantized:
        return None
    if _scales_outside(s.format):
        return s.scale
    return None if s.outer_amax is None else s.outer_scale()
