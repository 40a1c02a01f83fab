"""cuBLASLt, called for what torch's functions leave out (csrc/lt/matmul.cpp), where this package was built with it.

It adds into FP32 buffers, takes a factor from device memory, multiplies E5M2 blocks, and looks for a problem's
algorithm once. torch's own functions do the rest, and everything where it is missing.
"""

from __future__ import annotations

import functools
import importlib

import torch

WORKSPACE = 32 << 20  # bytes: what the library wants on Hopper
_TYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.bfloat16: "bf16", torch.float32: "fp32"}
_BLOCK_SCALES_SINCE = 120900


@functools.lru_cache(maxsize=None)
def library():
    """The extension, over the library that torch has loaded; None where either is missing or too old."""
    try:
        module = importlib.import_module("megatron_hybrid._C_lt")
        version = module.load(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
    except (ImportError, RuntimeError):
        return None
    return module if version >= _BLOCK_SCALES_SINCE else None


@functools.lru_cache(maxsize=None)
def codes() -> tuple[dict, dict]:
    """The library's numbers of types and of kinds of scales (scaled_mm.py's words, and ``none``)."""
    module = library()
    modes = {"1x128": module.MODES["block"], "128x128": module.MODES["tile"], **module.MODES}
    return {dtype: module.TYPES[name] for dtype, name in _TYPES.items()}, modes


@functools.lru_cache(maxsize=None)
def workspace(device: int, stream: int) -> torch.Tensor:
    """One for every stream, whose products run one after the other."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=f"cuda:{device}")


_CONSTANTS: dict[int, torch.Tensor] = {}  # device -> 0 and 1 in its memory


def takes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `multiply` can take these high-precision operands here, with a factor."""
    return fits(a, b) and library() is not None and a.device.type == "cuda" and constants(a.device.index) is not None


def fits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether operands are what tensor cores like: bf16, packed, of such sizes."""
    return (
        a.dtype == b.dtype == torch.bfloat16 and a.is_contiguous() and b.is_contiguous()
        and min(*a.shape, b.shape[0]) > 0 and a.shape[1] % 8 == 0 and b.shape[0] % 8 == 0
    )  # fmt: skip


def constants(device: int) -> torch.Tensor | None:
    """0 and 1 in the memory of the current device; None for another, and for a graph that is being captured before they
    are there: it cannot make them."""
    if device != torch.cuda.current_device():
        return None
    if device not in _CONSTANTS and not torch.cuda.is_current_stream_capturing():
        _CONSTANTS[device] = torch.arange(2, dtype=torch.float32, device=f"cuda:{device}")
    return _CONSTANTS.get(device)


def multiply(
    a, b, out, *, dtypes, kinds=("none", "none"), scales=(0, 0), fast=False, add=False,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`out = factor * A @ B.T`, or `out += ...` with `add`. a (rows_a, K), b (rows_b, K), out (rows_a, rows_b): packed.

    dtypes: of A's and B's elements. kinds, scales: of A's and B's scales, and the addresses of what scaled_mm.py
    lays out for the library. factor: float32 (), on the device.
    """
    types, modes = codes()
    (rows_a, k), rows_b, device = a.shape, b.shape[0], a.device.index
    stream = torch._C._cuda_getCurrentRawStream(device)
    has_factor = factor is not None
    library().matmul(
        a.data_ptr(), b.data_ptr(), out.data_ptr(), rows_a, rows_b, k, types[dtypes[0]], types[dtypes[1]],
        types[out.dtype], modes[kinds[0]], modes[kinds[1]], *scales, fast, add, factor.data_ptr() if has_factor else 0,
        _CONSTANTS[device].data_ptr() if has_factor else 0, workspace(device, stream).data_ptr(), WORKSPACE, stream,
        device,
    )  # fmt: skip
    return out
