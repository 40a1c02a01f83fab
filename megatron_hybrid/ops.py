"""The kernels as torch operators, for torch.compile: opaque calls with known effects and shapes.

Eager code does not come here (kernels.py calls the extension directly, which costs less); traced code does, and
the operators run the same kernels, so compiled and eager bytes are equal. Formats travel by name. Every operator
writes preallocated outputs, so tracing needs no shapes beyond those of its arguments.
"""

from __future__ import annotations

import torch

from . import kernels
from .formats import parse_format

_LIB = "megatron_hybrid"


@torch.library.custom_op(f"{_LIB}::amax_", mutates_args=("out",))
def amax_(x: torch.Tensor, format: str, direction: str, out: torch.Tensor) -> None:
    """See `kernels.amax`."""
    kernels.amax(x, parse_format(format), direction, out)


@torch.library.custom_op(f"{_LIB}::quantize_", mutates_args=("qdata", "scale"))
def quantize_(
    x: torch.Tensor, format: str, direction: str, qdata: torch.Tensor, scale: torch.Tensor,
    amax: torch.Tensor | None, transposed: bool, fixed_scale: bool, rng: torch.Tensor | None,
    row_ids: torch.Tensor | None, noop: torch.Tensor | None,
) -> None:  # fmt: skip
    """See `kernels.quantize`."""
    kernels.quantize(
        x, parse_format(format), direction, qdata=qdata, scale=scale, amax=amax, transposed=transposed,
        fixed_scale=fixed_scale, rng=rng, row_ids=row_ids, noop=noop,
    )  # fmt: skip


@torch.library.custom_op(f"{_LIB}::dequantize_", mutates_args=("out",))
def dequantize_(
    qdata: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, format: str, direction: str,
    transposed: bool, out: torch.Tensor, outer: bool, inverse_rht: bool,
) -> None:  # fmt: skip
    """See `kernels.dequantize`; (M, K) is the shape of `out`."""
    M, K = out.shape
    kernels.dequantize(
        qdata, scale, amax, parse_format(format), direction, M, K,
        transposed=transposed, out=out, outer=outer, inverse_rht=inverse_rht,
    )  # fmt: skip


@torch.library.custom_op(f"{_LIB}::outer_scale_", mutates_args=("out",))
def outer_scale_(amax: torch.Tensor, format: str, out: torch.Tensor) -> None:
    """See `kernels.outer_scale`."""
    kernels.outer_scale(amax, parse_format(format), out)


for _op in (amax_, quantize_, dequantize_, outer_scale_):
    _op.register_fake(lambda *args: None)
