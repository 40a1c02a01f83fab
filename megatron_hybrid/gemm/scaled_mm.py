"""Native FP8 GEMMs of sm_90 through torch's `scaled_mm`.

Per-tensor and per-row FP32 scales. The library takes a row-major A and a column-major B, that is both operands
contraction-contiguous, with the contraction and B's rows multiples of 16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..formats import Format
from ..storage import QuantizedStorage
from .backend import GemmPair, finish

_ALIGN = 16
_TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class ScaledMmBackend:
    name, native = "scaled_mm", True

    def reason(self, pair: GemmPair) -> str | None:
        if pair.device.type != "cuda":
            return f"needs a CUDA device, found {pair.device}"
        if pair.device.capability is not None and pair.device.capability < (8, 9):
            return f"needs FP8 tensor cores (sm_89 or newer), found {pair.device}"
        kinds = [_scale_kind(f) for f in (pair.a, pair.b)]
        if None in kinds or kinds[0] != kinds[1]:
            return f"takes per-tensor x per-tensor or row x row FP8 operands, found {pair.a} x {pair.b}"
        if pair.a.element == pair.b.element == "e5m2":
            return "E5M2 x E5M2 is not offered by the library"
        return None

    def wants_transposed(self, pair: GemmPair) -> bool:
        return True

    def run(self, a, b, pair, out_dtype, accumulate_into=None):
        qa, qb = _codes(a), _codes(b)
        contraction, rows_b = qa.shape[1], qb.shape[0]
        pad_c, pad_b = -contraction % _ALIGN, -rows_b % _ALIGN
        if pad_c or pad_b:
            qa, qb = _pad(qa, 0, pad_c), _pad(qb, pad_b, pad_c)
        if _scale_kind(a.format) == "tensor":
            scale_a, scale_b = a.scale, b.scale
        else:
            scale_a, scale_b = a.scale.reshape(-1, 1), F.pad(b.scale.reshape(1, -1), (0, pad_b), value=1.0)
        dtype = torch.float32 if accumulate_into is not None else out_dtype
        if qa.numel() == 0 or qb.numel() == 0:
            out = torch.zeros(qa.shape[0], qb.shape[0], dtype=dtype, device=qa.device)
        else:
            out = _scaled_mm(qa, qb, scale_a, scale_b, dtype, fast=pair.accumulate == "fast")
        return finish(out[:, :rows_b] if pad_b else out, out_dtype, accumulate_into)


def _scaled_mm(qa, qb, scale_a, scale_b, dtype, *, fast):
    if scale_a.dim() == 0 or dtype == torch.bfloat16:
        return torch._scaled_mm(qa, qb.T, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
    # the library's row-scaled kernel rounds to bf16: multiply the codes in FP32 and scale the result instead
    one = torch.ones((), dtype=torch.float32, device=qa.device)
    out = torch._scaled_mm(qa, qb.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast)
    return out.mul_(scale_a).mul_(scale_b).to(dtype)


def _scale_kind(fmt: Format) -> str | None:
    if fmt.scale != "fp32" or fmt.outer_axis == "none":
        return None
    return fmt.outer_axis


def _codes(s: QuantizedStorage) -> torch.Tensor:
    """FP8 codes as (rows, contraction), contraction contiguous."""
    q = s.qdata if s.transposed == (s.direction == "columnwise") else s.qdata.T.contiguous()
    return q.view(_TORCH_DTYPES[s.format.element])


def _pad(q: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return F.pad(q.view(torch.uint8), (0, columns, 0, rows)).view(q.dtype)
