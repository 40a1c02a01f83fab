"""FP8 GEMMs of all groups in CUDA for Hopper (csrc/gemm), where this package was built with them.

The same products as `ops_triton.grouped_gemm`'s, which serves where they are missing: sums of 128 products in the
tensor cores, scaled and added up in FP32. One warpgroup of a program fetches, two multiply, so that the tensor cores go
on while sums are promoted.
"""

from __future__ import annotations

import functools
import importlib

import torch

from .. import kernels

ROW, BLOCKS, TILES = 0, 1, 2  # what a scale covers: a row; 1 x 128; 128 x 128; of both operands, or of B (TILES)
_KINDS = {(ROW, True): "row_fast", (ROW, False): "row", (BLOCKS, False): "block", (TILES, False): "tile"}
_OUT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_ALIGN = 16  # bytes at which operands and results begin
BLOCK_ROWS = 128  # rows of a block of a group, as maps of blocks count them


@functools.lru_cache(maxsize=None)
def library():
    """The extension; None where it was not built, or at another time than this file."""
    try:
        module = importlib.import_module("megatron_hybrid._C_gemm")
    except ImportError:
        return None
    return module if kernels.fits(module) else None


def kind_of(kind: int, fast: bool) -> str:
    """The extension's word for scales of a kind, and whether sums stay in the tensor cores."""
    return _KINDS[kind, fast]


def takes(*tensors: torch.Tensor) -> bool:
    """Whether operands, scales and result are here and can be read and written in runs of 16 bytes."""
    here = all([t.is_cuda and t.data_ptr() % _ALIGN == 0 for t in tensors])
    return here and library() is not None


def run(what: str, a, b, a_scale, b_scale, out, where, rows_a: int, n: int, kind: int, fast: bool, add: bool, e5m2):
    """`rows` or `columns` of the extension. e5m2: whether a's and b's codes are E5M2, else E4M3; their dtype is not asked."""
    module, device = library(), a.device.index
    getattr(module, what)(
        module.Codes(a.data_ptr(), a_scale.data_ptr(), e5m2[0]), module.Codes(b.data_ptr(), b_scale.data_ptr(), e5m2[1]),
        out.data_ptr(), where.ends.data_ptr(), where.blocks.data_ptr(), where.ends.shape[0], where.count, rows_a, n,
        a.shape[1], kind_of(kind, fast), _OUT[out.dtype], add, torch._C._cuda_getCurrentRawStream(device), device,
    )  # fmt: skip
    return out


def _types(*tensors) -> tuple:
    return tuple(t.dtype == torch.float8_e5m2 for t in tensors)


def multiply_rows(a, w, a_scale, w_scale, out, where, kind: int, *, fast: bool) -> torch.Tensor:
    """`ops_triton.grouped_gemm.multiply_rows`."""
    sizes = a.shape[0], out.shape[1]
    return run("rows", a, w, a_scale, w_scale, out, where, *sizes, kind, fast, False, _types(a, w))


def multiply_columns(a, b, a_scale, b_scale, out, where, kind: int, *, fast: bool, add: bool) -> torch.Tensor:
    """`ops_triton.grouped_gemm.multiply_columns`."""
    return run("columns", a, b, a_scale, b_scale, out, where, *out.shape[1:], kind, fast, add, _types(a, b))
