"""Native FP8 GEMMs through torch's `scaled_mm`: FP32 scales a tensor, a row, 1 x 128 blocks, 128 x 128 tiles.

The library takes a row-major A and a column-major B, that is both operands contraction-contiguous, with the
contraction and B's rows multiples of 16. How it wants the scales of each kind is in `_scale_a` and `_scale_b`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..formats import ROWWISE, Format
from ..storage import QuantizedStorage
from .backend import Alignment, GemmPair, finish

_ALIGN = 16
_BLOCK = 128
_TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

TENSOR, ROW, BLOCK, TILE = "tensor", "row", "1x128", "128x128"
# kinds of scales of (A, B) -> (lowest, highest) compute capability that has them
_FP8, _HOPPER = ((8, 9), None), ((9, 0), (9, 0))
_PAIRS = {(TENSOR, TENSOR): _FP8, (ROW, ROW): _FP8, (BLOCK, TILE): _HOPPER, (BLOCK, BLOCK): _HOPPER}


class ScaledMmBackend:
    """`torch._scaled_mm` for the pairs of `_PAIRS`; E4M3 x E4M3, E4M3 x E5M2 and E5M2 x E4M3."""

    name, native = "scaled_mm", True

    def reason(self, pair: GemmPair) -> str | None:
        if pair.device.type != "cuda":
            return f"needs a CUDA device, found {pair.device}"
        kinds = scale_kind(pair.a), scale_kind(pair.b)
        if kinds not in _PAIRS:
            offered = ", ".join(f"{a} x {b}" for a, b in _PAIRS)
            return f"takes FP8 operands with FP32 scales ({offered}), found {pair.a} x {pair.b}"
        (low, high), found = _PAIRS[kinds], pair.device.capability
        if found is not None and (found < low or (high is not None and found > high)):
            need = f"sm_{low[0]}{low[1]}{' or newer' if high is None else ''}"
            return f"needs FP8 tensor cores with {kinds[0]} x {kinds[1]} scales ({need}), found {pair.device}"
        if pair.a.element == pair.b.element == "e5m2":
            return "E5M2 x E5M2 is not offered by the library"
        return None

    def wants_transposed(self, pair: GemmPair) -> bool:
        return True

    def alignment(self, pair: GemmPair) -> Alignment:
        return Alignment(rows_b=_ALIGN, contraction=_ALIGN)

    def accumulation(self, pair: GemmPair) -> str:
        return pair.accumulate if scale_kind(pair.b) in (TENSOR, ROW) else "full"  # blocks are always promoted

    def run(self, a, b, pair, out_dtype, accumulate_into=None):
        qa, qb = _codes(a), _codes(b)
        (rows_a, contraction), rows_b = qa.shape, qb.shape[0]
        dtype = torch.float32 if accumulate_into is not None else out_dtype
        if 0 in (rows_a, rows_b, contraction):
            out = torch.zeros(rows_a, rows_b, dtype=dtype, device=qa.device)
            return finish(out, out_dtype, accumulate_into)
        pad_c, pad_b = -contraction % _ALIGN, -rows_b % _ALIGN
        if pad_c or pad_b:
            qa, qb = _pad(qa, 0, pad_c), _pad(qb, pad_b, pad_c)
        kind = scale_kind(b.format)
        if kind == BLOCK and contraction <= _BLOCK:
            kind = ROW  # one block a row: the library takes it for that
        out = _multiply(qa, qb, _scale_a(a), _scale_b(b, pad_b), dtype, kind, self.accumulation(pair))
        return finish(out[:, :rows_b] if pad_b else out, out_dtype, accumulate_into)


def scale_kind(fmt: Format) -> str | None:
    """What one FP32 scale of an FP8 format covers, seen along the contraction; None for other formats."""
    if fmt.scale != "fp32":
        return None
    if fmt.outer_axis != "none":
        return fmt.outer_axis
    return TILE if fmt.tile else BLOCK


def _multiply(qa, qb, scale_a, scale_b, dtype, kind: str, accumulation: str) -> torch.Tensor:
    fast = accumulation == "fast"
    if kind == ROW and dtype != torch.bfloat16:
        # the library's row-scaled kernel rounds to bf16: multiply the codes in FP32 and scale the result instead
        one = torch.ones((), dtype=torch.float32, device=qa.device)
        out = torch._scaled_mm(qa, qb.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast)
        return out.mul_(scale_a).mul_(scale_b).to(dtype)
    made = dtype if kind == TENSOR or dtype == torch.bfloat16 else torch.float32
    out = torch._scaled_mm(qa, qb.T, scale_a=scale_a, scale_b=scale_b, out_dtype=made, use_fast_accum=fast)
    return out.to(dtype)


def _operand_scale(s: QuantizedStorage) -> torch.Tensor:
    """The scales in the GEMM view: (rows, contraction blocks), (row tiles, contraction tiles), (rows, 1) or ()."""
    return s.scale if s.direction == ROWWISE or s.scale.dim() == 0 else s.scale.T


def _scale_a(s: QuantizedStorage) -> torch.Tensor:
    """As the library takes the scales of A: blocks (rows, blocks) with adjacent rows adjacent in memory."""
    scale = _operand_scale(s)
    return scale.T.contiguous().T if scale_kind(s.format) == BLOCK else scale


def _scale_b(s: QuantizedStorage, pad_rows: int) -> torch.Tensor:
    """As the library takes the scales of B, whose rows are padded by `pad_rows`.

    Rows: (1, rows). Blocks: (blocks, rows), contiguous. Tiles: (contraction tiles, row tiles) with adjacent
    contraction tiles adjacent in memory and columns a multiple of four apart; other distances give wrong results.
    """
    kind, scale = scale_kind(s.format), _operand_scale(s)
    if kind == TENSOR:
        return scale
    if kind == TILE:  # padded rows stay inside the last tile, since 128 is a multiple of the padding
        return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().T[: scale.shape[1]]
    return F.pad(scale, (0, 0, 0, pad_rows), value=1.0).T.contiguous()


def _codes(s: QuantizedStorage) -> torch.Tensor:
    """FP8 codes as (rows, contraction), contraction contiguous."""
    q = s.qdata if s.transposed == (s.direction == "columnwise") else s.qdata.T.contiguous()
    return q.view(_TORCH_DTYPES[s.format.element])


def _pad(q: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return F.pad(q.view(torch.uint8), (0, columns, 0, rows)).view(q.dtype)
