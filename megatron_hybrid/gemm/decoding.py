"""GEMMs of MXFP8 and of NVFP4 operands on Hopper that decode B where it is multiplied (csrc/gemm/decode.cu).

A's codes are decoded to bf16 in memory, in another order of the contraction (*slots*); B's only in registers. The
products are those of the emulated backend: exact operands in bf16, sums in FP32. Outer scales multiply the sums, and the
result is rounded once, to bf16.
"""

from __future__ import annotations

import torch

from .. import kernels
from ..formats import COLUMNWISE, ROWWISE
from ..storage import QuantizedStorage
from . import grouped_cuda
from .backend import GemmPair
from .backends import EmulatedBackend

NAME = "decoding"
_HOPPER = (9, 0)
_ROWS = 8  # B's are a multiple of this: rows of the result begin at multiples of 16 bytes
_DEEP = 128  # the contraction is a multiple
_SCALES = ("e8m0", "e4m3_amax")


def pair_reason(pair: GemmPair) -> str | None:
    """Why these formats' products do not run here; None where they do."""
    if pair.device.capability != _HOPPER:
        return f"needs sm_90, found {pair.device}"
    if grouped_cuda.library() is None:
        return "this build has no _C_gemm"
    if pair.a.scale not in _SCALES or pair.a.scale != pair.b.scale:
        return f"takes MXFP8 x MXFP8 and NVFP4 x NVFP4, found {pair.a} x {pair.b}"
    return None


def shape_reason(rows_b: int, contraction: int) -> str | None:
    """Why a product with (rows_b, contraction) codes of B does not run here."""
    if rows_b % _ROWS or contraction % _DEEP:
        return f"needs rows of B in {_ROWS}s and a contraction in {_DEEP}s, found {rows_b} and {contraction}"
    return None


def multiply(a: QuantizedStorage, b: QuantizedStorage, groups: int = 1, where=None) -> torch.Tensor | None:
    """Every row of A with its group's rows of B, (T, n) in bf16; None, and nothing done, where one of them lies in memory
    in another way (codes not by contraction, odd addresses, no memory at all) or there are too many groups.

    groups: B's are (groups * n, contraction). where: the `BlockMap` of A's rows, None: they are of one group.
    """
    if kernels.traced(a.qdata):  # this is no operator
        return None
    module, operands = grouped_cuda.library(), [_Rows.of(s) for s in (a, b)]
    if None in operands or groups > module.MOST_GROUPS:
        return None
    rows, weight = operands
    T, n, K = rows.codes.shape[0], weight.codes.shape[0] // groups, a.operand_shape[1]
    device = rows.codes.device
    out = torch.empty((T, n), dtype=torch.bfloat16, device=device)
    slots = torch.empty((T, K), dtype=torch.bfloat16, device=device)
    if not grouped_cuda.takes(rows.codes, weight.codes, rows.scale, weight.scale, out, slots):
        return None
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    module.decode_slots(rows.coded(module), slots.data_ptr(), T, K, stream, device.index)
    ends, blocks, count = (0, 0, -(-T // grouped_cuda.BLOCK_ROWS)) if where is None else (
        where.ends.data_ptr(), where.blocks.data_ptr(), where.count
    )  # fmt: skip
    outer = [0, 0] if rows.outer is None else [rows.outer.data_ptr(), weight.outer.data_ptr()]
    module.decoding_rows(
        slots.data_ptr(), weight.coded(module), out.data_ptr(), *outer, ends, blocks, groups, count, T, n, K,
        stream, device.index,
    )  # fmt: skip
    return out


class _Rows:
    """An operand as the kernels take it: codes by rows, scales of `block_rows` rows at once, FP32 scales a row."""

    def __init__(self, codes, scale, outer, element: str, block_rows: int):
        self.codes, self.scale, self.outer, self.element, self.block_rows = codes, scale, outer, element, block_rows

    @classmethod
    def of(cls, s: QuantizedStorage) -> _Rows | None:
        down = s.direction == COLUMNWISE
        if s.transposed != down:
            return None
        outer = None
        if s.format.keeps_amax:
            outer = s.outer_scale().reshape(-1).expand(s.operand_shape[0]).contiguous()
        scale, block = (s.scale.t() if down else s.scale), s.format.block(ROWWISE)[0]
        return cls(s.qdata.contiguous(), scale.contiguous(), outer, s.format.element, block)

    def coded(self, module):
        return module.CodedRows(self.codes.data_ptr(), self.scale.data_ptr(), self.element, self.block_rows)


class DecodingBackend(EmulatedBackend):
    """`EmulatedBackend`, by `multiply` where that takes the operands; asked for by name only."""

    name = NAME

    def reason(self, pair: GemmPair) -> str | None:
        return pair_reason(pair)

    def route(self, pair: GemmPair) -> str:
        return "python"

    def run(self, a, b, pair, out_dtype, accumulate_into=None):
        (rows_a, contraction), rows_b = a.operand_shape, b.operand_shape[0]
        exact = self._in_bf16(a) and self._in_bf16(b)
        wanted = exact and out_dtype == torch.bfloat16 and accumulate_into is None and rows_a * rows_b * contraction > 0
        if wanted and shape_reason(rows_b, contraction) is None:
            if (found := multiply(a, b)) is not None:
                return found
        return super().run(a, b, pair, out_dtype, accumulate_into)
