"""Native FP8 GEMMs through torch's `scaled_mm`: FP32 scales a tensor, a row, 1 x 128 blocks, 128 x 128 tiles.

The library takes a row-major A and a column-major B, that is both operands contraction-contiguous, with the
contraction and B's rows multiples of 16. Which scales it is given is said, never guessed from their shapes; how it
wants those of each kind is in `_scale_a` and `_scale_b`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .. import kernels
from ..formats import COLUMNWISE, ROWWISE, Format
from ..storage import FP8_DTYPES, QuantizedStorage
from ..turn import turned
from . import cublaslt
from .backend import Alignment, GemmPair, finish

_ALIGN, _BLOCK_ROWS = 16, 4
_BLOCK = 128

TENSOR, ROW, BLOCK, TILE = "tensor", "row", "1x128", "128x128"
# what the library calls each kind of scales
_RECIPES = {
    TENSOR: F.ScalingType.TensorWise.value,
    ROW: F.ScalingType.RowWise.value,
    BLOCK: F.ScalingType.BlockWise1x128.value,
    TILE: F.ScalingType.BlockWise128x128.value,
}
# kinds of scales of (A, B) -> (lowest, highest) compute capability that has them
_FP8, _HOPPER = ((8, 9), None), ((9, 0), (9, 0))
_PAIRS = {(TENSOR, TENSOR): _FP8, (ROW, ROW): _FP8, (BLOCK, TILE): _HOPPER, (BLOCK, BLOCK): _HOPPER}


class ScaledMmBackend:
    """torch's `scaled_mm` for the pairs of `_PAIRS`; E4M3 x E4M3, E4M3 x E5M2 and E5M2 x E4M3."""

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
        return Alignment(rows_a=_rows_a(pair), rows_b=_ALIGN, contraction=_ALIGN)

    def accumulation(self, pair: GemmPair) -> str:
        return pair.accumulate if scale_kind(pair.b) in (TENSOR, ROW) else "full"  # blocks are always promoted

    def prepare(self, pair: GemmPair) -> ScaledMm:
        kind_a, kind_b = scale_kind(pair.a), scale_kind(pair.b)
        direct = pair.device.capability == (9, 0) and torch.cuda.is_available() and cublaslt.library() is not None
        return ScaledMm(
            kind_a, kind_b, FP8_DTYPES[pair.a.element], FP8_DTYPES[pair.b.element], _rows_a(pair),
            self.accumulation(pair) == "fast", direct,
        )  # fmt: skip

    def run(self, a, b, pair, out_dtype, accumulate_into=None):
        return self.prepare(pair)(a, b, out_dtype, accumulate_into)


@dataclass(frozen=True)
class ScaledMm:
    """`A @ B.T` of one pair of formats, with everything decided that does not depend on the tensors."""

    kind_a: str
    kind_b: str
    dtype_a: torch.dtype
    dtype_b: torch.dtype
    rows_a: int  # A's rows are padded to a multiple of this
    fast: bool
    direct: bool = False  # the library called by gemm/cublaslt.py; traced code calls it through torch all the same

    @property
    def route(self) -> str:
        """How csrc/node runs it: as `_direct` does, or by calling this."""
        return "cublaslt" if self.direct else "python"

    def __call__(self, a: QuantizedStorage, b: QuantizedStorage, out_dtype, accumulate_into=None) -> torch.Tensor:
        qa, qb = codes(a), codes(b)
        (rows_a, contraction), rows_b = qa.shape, qb.shape[0]
        dtype = out_dtype if accumulate_into is None else torch.float32
        if 0 in (rows_a, rows_b, contraction):
            out = qa.new_zeros((rows_a, rows_b), dtype=dtype)
            return finish(out, out_dtype, accumulate_into)
        # torch's rule for the shapes of traced calls knows whole blocks only
        unit = _BLOCK if self.kind_a == BLOCK and torch.compiler.is_compiling() else _ALIGN
        pad_a, pad_b, pad_c = -rows_a % self.rows_a, -rows_b % unit, -contraction % unit
        if pad_a or pad_b or pad_c:
            qa, qb = F.pad(qa, (0, pad_c, 0, pad_a)), F.pad(qb, (0, pad_c, 0, pad_b))
        scale_a, scale_b = _scale_a(self.kind_a, a, pad_a), _scale_b(self.kind_b, b, pad_b)
        if self.direct and not kernels.traced(qa) and qa.device.index == torch.cuda.current_device():
            return self._direct(qa, qb, scale_a, scale_b, rows_a, rows_b, out_dtype, accumulate_into)
        out = self._multiply(qa.view(self.dtype_a), qb.view(self.dtype_b).t(), scale_a, scale_b, dtype)
        if pad_a or pad_b:
            out = out[:rows_a, :rows_b]
        return out if accumulate_into is None else accumulate_into.add_(out)

    def _direct(self, qa, qb, scale_a, scale_b, rows_a, rows_b, out_dtype, total) -> torch.Tensor:
        """Through cublaslt.py, which adds into `total` itself where shapes and the kind of scales let it."""
        padded = qa.shape[0], qb.shape[0]
        how = dict(
            dtypes=(self.dtype_a, self.dtype_b), kinds=(self.kind_a, self.kind_b), fast=self.fast,
            scales=(scale_a.data_ptr(), scale_b.data_ptr()),
        )  # fmt: skip
        if total is not None and total.dtype == torch.float32 and total.shape == padded and total.is_contiguous():
            return cublaslt.multiply(qa, qb, total, add=True, **how)
        made = torch.bfloat16 if total is None and out_dtype == torch.bfloat16 else torch.float32
        out = cublaslt.multiply(qa, qb, torch.empty(padded, dtype=made, device=qa.device), **how)
        if padded != (rows_a, rows_b):
            out = out[:rows_a, :rows_b]
        if total is not None:
            return total.add_(out)
        return out if made == out_dtype else out.to(out_dtype)

    def _multiply(self, qa, qb, scale_a, scale_b, dtype) -> torch.Tensor:
        made = dtype if dtype == torch.bfloat16 else torch.float32
        if self.kind_a == BLOCK and self.dtype_a != self.dtype_b:
            out = _multiply_e5m2_blocks(qa, qb, scale_a, scale_b, self.kind_b, made)
        else:
            out = torch._scaled_mm_v2(
                qa, qb, [scale_a], [_RECIPES[self.kind_a]], [], [scale_b], [_RECIPES[self.kind_b]], [], None, made, (),
                self.fast,
            )  # fmt: skip
        return out if made == dtype else out.to(dtype)


def _multiply_e5m2_blocks(qa, qb, scale_a, scale_b, kind_b: str, dtype) -> torch.Tensor:
    """Block scales with one operand in E5M2, which torch lets through to the library by its older function only.

    That one tells the kinds of scales by shape and strides, and asks of tiles that they be densely packed, which the
    library they go to does not read: it reads columns of tiles a multiple of four apart, wherever they begin. The view
    says the one, the memory behind it is the other.
    """
    if kind_b == TILE:
        tiles = -(-qb.shape[0] // _BLOCK)
        scale_b = scale_b.as_strided((tiles, scale_b.shape[1]), (1, tiles))
    else:
        scale_b = scale_b.t()
    return torch._scaled_mm(qa, qb, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)


def scale_kind(fmt: Format) -> str | None:
    """What one FP32 scale of an FP8 format covers, seen along the contraction; None for other formats."""
    if fmt.scale != "fp32":
        return None
    if fmt.outer_axis != "none":
        return fmt.outer_axis
    return TILE if fmt.tile else BLOCK


def _rows_a(pair: GemmPair) -> int:
    """Block scales of A are read in groups of four rows."""
    return _BLOCK_ROWS if scale_kind(pair.a) == BLOCK else 1


def _operand_scale(s: QuantizedStorage) -> torch.Tensor:
    """The scales in the GEMM view: (rows, contraction blocks), (row tiles, contraction tiles) or (rows, 1)."""
    return s.scale if s.direction == ROWWISE else s.scale.t()


def _rows_adjacent(scale: torch.Tensor, pad_rows: int) -> torch.Tensor:
    """(rows + pad_rows, blocks) with adjacent rows adjacent in memory."""
    if pad_rows:
        scale = F.pad(scale, (0, 0, 0, pad_rows), value=1.0)
    rows, blocks = scale.shape
    return scale.t().contiguous().as_strided((rows, blocks), (1, rows))  # said also where there is one block only


def _scale_a(kind: str, s: QuantizedStorage, pad_rows: int) -> torch.Tensor:
    """As the library takes the scales of A: (), (rows, 1), or blocks with adjacent rows adjacent in memory."""
    if kind == TENSOR:
        return s.scale
    return _rows_adjacent(_operand_scale(s), pad_rows) if kind == BLOCK else _operand_scale(s)


def _scale_b(kind: str, s: QuantizedStorage, pad_rows: int) -> torch.Tensor:
    """As the library takes the scales of B, whose rows are padded by `pad_rows`.

    Rows: (1, rows). Blocks: as for A. Tiles: (contraction tiles, padded to a multiple of four, row tiles) with adjacent
    contraction tiles adjacent in memory. Padded rows stay inside the last tile, since 128 is a multiple of the padding.
    """
    if kind == TENSOR:
        return s.scale
    scale = _operand_scale(s)
    if kind == BLOCK:
        return _rows_adjacent(scale, pad_rows)
    if kind == ROW:
        return F.pad(scale, (0, 0, 0, pad_rows), value=1.0).t() if pad_rows else scale.t()
    pad = -scale.shape[1] % 4
    scale = F.pad(scale, (0, pad)) if pad else scale.contiguous()
    return scale.as_strided(scale.shape[::-1], (1, scale.shape[1]))


def codes(s: QuantizedStorage) -> torch.Tensor:
    """uint8 codes as (rows, contraction), contraction contiguous."""
    return s.qdata if s.transposed == (s.direction == COLUMNWISE) else turned(s.qdata)
