"""What a cast did to a tensor, measured on its device without waiting for it: numbers of one direction's payload."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from .. import ops_triton
from ..formats import ELEMENTS, ROWWISE, parse_format
from ..storage import FP8_DTYPES, QuantizedStorage

# floats of one measurement, in the order of the tensor that `measure` returns
FIELDS = (
    "amax", "scale_min", "scale_max", "zeros", "underflow", "saturation", "nonfinite", "signal", "noise", "gain",
)  # fmt: skip
LOWEST_EXPONENT, HIGHEST_EXPONENT = -150, 128  # of float32 decode scales: power-of-two floor
_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
_PART = 2**24  # elements summed in FP32
_RUN = 2**26  # elements transformed at a time
_BLOCK = 16  # of the Hadamard transform
_SCALE_OF_ZEROS = 2.0**-127  # the smallest an E8M0 byte can say, which a block of zeros has; E4M3 says 0


class Measured(NamedTuple):
    """numbers: float64 (len(FIELDS),). exponents: int64, how many scale blocks have each exponent from
    LOWEST_EXPONENT on. Both on the payload's device."""

    numbers: torch.Tensor
    exponents: torch.Tensor


@torch.no_grad()
def measure(s: QuantizedStorage, x: torch.Tensor) -> Measured:
    """Compare a payload with the tensor (M, K) that it was cast from.

    saturation is the share of elements that the largest code stands for although they lie beyond what rounds to it.
    signal is |x|^2, noise |x - q|^2 and gain |x|^2 - |q|^2, of which derived numbers keep their digits. With a Hadamard
    transform both are compared in the transformed domain, where the codes are.
    """
    return measure_fused(s, x) if x.numel() and ops_triton.reason(s.device) is None else measure_by_torch(s, x)


def measure_by_torch(s: QuantizedStorage, x: torch.Tensor) -> Measured:
    """`measure` anywhere, with some 24 bytes an element for FP32 copies of the tensor."""
    decoded = s.decode(torch.empty(s.shape, dtype=torch.float32, device=s.device), inverse_rht=False)
    scale = s.scale_inv()
    numbers = _range(scale)
    if x.numel():
        reference = hadamard(x, s.direction) if s.format.rht else x.float()
        numbers |= _compare(reference, decoded, s)
    values = [_scalar(numbers.get(name, float("nan")), s.device) for name in FIELDS]
    return Measured(torch.stack(values), exponents(scale))


def measure_fused(s: QuantizedStorage, x: torch.Tensor) -> Measured:
    """`measure` of a tensor that is not empty, by Triton kernels: each buffer is read once, no copy of x is made."""
    from ..ops_triton import statistics as fused

    block, outer = s.block_scale(), None if s.outer_amax is None else s.outer_scale()
    inverse = block if outer is None else block * outer
    of_scales = fused.scales(inverse, _SCALE_OF_ZEROS, LOWEST_EXPONENT, HIGHEST_EXPONENT)
    numbers = fused.compare(_references(s, x), _stored(s, block, outer), _codes(s.format.element))
    shares = numbers[1:5] / x.numel()
    both = (numbers[:1], of_scales.least.view(1), of_scales.most.view(1), shares, numbers[5:])
    return Measured(torch.cat(both), of_scales.exponents)


def _stored(s: QuantizedStorage, block: torch.Tensor, outer: torch.Tensor | None):
    from ..ops_triton.statistics import Stored

    of_outer = {"none": (None, None), "tensor": (None, None), "row": (1, None) if s.direction == ROWWISE else (None, 1)}
    sizes = [tuple(n or 0 for n in size) for size in (s.format.block(s.direction), of_outer[s.format.outer_axis])]
    scales = [block, outer]
    if s.transposed:
        sizes, scales = [size[::-1] for size in sizes], [t.T if t is not None and t.dim() else t for t in scales]
    return Stored(s.qdata.contiguous(), *scales, *sizes)


def _references(s: QuantizedStorage, x: torch.Tensor):
    """(first row, tensor) of runs of rows in the order in which the codes lie; of a transform's FP32 results only a run
    is there at a time, which begins where a block does."""
    dim, rows = (1, x.shape[1]) if s.transposed else (0, x.shape[0])
    step = max(1, _RUN // (x.numel() // rows) // _BLOCK) * _BLOCK if s.format.rht else rows
    for first in range(0, rows, step):
        run = x.narrow(dim, first, min(step, rows - first))
        if s.format.rht:
            run = hadamard(run, s.direction)
        yield first, run.T if s.transposed else run


@functools.lru_cache(maxsize=None)
def _codes(element: str):
    """What the kernels know of an element type."""
    from ..ops_triton.statistics import Codes

    e, largest = ELEMENTS[element], largest_code(element)
    mantissa, exponents = e.significant_bits - 1, e.bits - e.significant_bits
    has_infinity = largest >> mantissa < (1 << exponents) - 1  # as IEEE's types, whose highest exponent has no numbers
    one = 2.0 ** (127 - ((1 << (exponents - 1)) - 1))
    return Codes(e.bits, mantissa, one, largest, largest + 1 if has_infinity else -1, _furthest_rounded(element))


def _range(scale: torch.Tensor) -> dict:
    """Smallest and largest scale; infinite where no block has one. Blocks of zeros do not count."""
    if scale.numel() == 0:
        return {}
    used = torch.isfinite(scale) & (scale > _SCALE_OF_ZEROS)
    inf = float("inf")
    return {"scale_min": torch.where(used, scale, inf).min(), "scale_max": torch.where(used, scale, -inf).max()}


def _compare(reference: torch.Tensor, decoded: torch.Tensor, s: QuantizedStorage) -> dict:
    count, magnitude, zero = reference.numel(), reference.abs(), decoded == 0
    largest = (s.codes() & (2 ** (s.format.bits - 1) - 1)) == largest_code(s.format.element)
    shares = {
        "zeros": zero,
        "underflow": zero & (reference != 0),
        "saturation": largest & (magnitude > decoded.abs() * _furthest_rounded(s.format.element)),
        "nonfinite": ~(magnitude <= torch.finfo(torch.float32).max),
    }
    error = reference - decoded
    return {
        "amax": magnitude.max(),
        "signal": _dot(reference, reference),
        "noise": _dot(error, error),
        "gain": _dot(error, decoded.add_(reference)),
        **{name: torch.count_nonzero(mask).double() / count for name, mask in shares.items()},
    }


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum of products in FP32, a pass over memory; of parts that BLAS's 32-bit sizes hold."""
    return sum(
        torch.dot(x, y).double() for x, y in zip(a.reshape(-1).split(_PART), b.reshape(-1).split(_PART), strict=True)
    )


def _scalar(value, device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


@functools.lru_cache(maxsize=None)
def largest_code(element: str) -> int:
    """The code of the largest finite magnitude of an element type."""
    dtype = FP8_DTYPES.get(element)
    if dtype is None:  # no Inf or NaN: all bits but the sign
        return 2 ** (ELEMENTS[element].bits - 1) - 1
    return torch.tensor(ELEMENTS[element].max).to(dtype).view(torch.uint8).item()


@functools.lru_cache(maxsize=None)
def _furthest_rounded(element: str) -> float:
    """What rounds to the largest code at most, as a multiple of it: half a step further. Beyond it lies saturation."""
    e = ELEMENTS[element]
    step = 2.0 ** (math.floor(math.log2(e.max)) - (e.significant_bits - 1))
    return 1 + step / 2 / e.max


def exponents(scale: torch.Tensor) -> torch.Tensor:
    """int64 counts of floor(log2(scale)) from LOWEST_EXPONENT, of zeros, to HIGHEST_EXPONENT, of Inf and NaN too."""
    flat = scale.reshape(-1)
    _, power = torch.frexp(flat)  # scale = mantissa * 2^power, mantissa in [0.5, 1); 0 * 2^0
    floor = torch.where(flat == 0, LOWEST_EXPONENT, power.long() - 1).where(torch.isfinite(flat), HIGHEST_EXPONENT)
    bins = torch.zeros(_BINS, dtype=torch.int64, device=scale.device)
    return bins.scatter_add_(
        0, floor.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT, torch.ones_like(floor)
    )


@functools.lru_cache(maxsize=None)
def _hadamard_matrix(device: torch.device) -> torch.Tensor:
    """float32 (16, 16) R with transformed = x @ R: what the kernels' inverse makes of the unit vectors, transposed."""
    fmt = parse_format("nvfp4:rht")
    unit = QuantizedStorage.empty(fmt, ROWWISE, (_BLOCK, _BLOCK), torch.float32, "cpu")
    codes = torch.zeros(_BLOCK, _BLOCK, dtype=torch.uint8)
    codes.fill_diagonal_(2)  # E2M1 of 1
    unit.qdata.copy_(codes[:, ::2] | codes[:, 1::2] << 4)
    unit.scale.copy_(torch.ones(()).to(torch.float8_e4m3fn).view(torch.uint8))
    unit.outer_amax.fill_(448.0 * 6.0)
    return unit.dequantize().T.contiguous().to(device)


def hadamard(x: torch.Tensor, direction: str) -> torch.Tensor:
    """`x` (M, K) in FP32 with each full block of 16 along the contraction transformed, to FP32 rounding."""
    (M, K), matrix = x.shape, _hadamard_matrix(x.device)
    dim = 1 if direction == ROWWISE else 0
    count = x.shape[dim] // _BLOCK
    full = count * _BLOCK
    blocks = x.narrow(dim, 0, full).float()
    if direction == ROWWISE:
        out = (blocks.reshape(M * count, _BLOCK) @ matrix).view(M, full)
    else:
        out = torch.bmm(matrix.T.expand(count, -1, -1), blocks.reshape(count, _BLOCK, K)).view(full, K)
    return out if full == x.shape[dim] else torch.cat((out, x.narrow(dim, full, x.shape[dim] - full).float()), dim)
