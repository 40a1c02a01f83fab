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


# Roundings that a compiler must not fuse away: inductor keeps FP32 between operations it fuses, eager rounds after each.


@torch.library.custom_op(f"{_LIB}::round_to", mutates_args=())
def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` rounded to another dtype, in memory of its own."""
    return x.to(dtype, copy=True)


@round_to.register_fake
def _(x, dtype):
    return torch.empty_like(x, dtype=dtype)


@torch.library.custom_op(f"{_LIB}::add_bias", mutates_args=())
def add_bias(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`y + bias` in y's dtype."""
    return torch.add(y, bias).to(y.dtype)


@add_bias.register_fake
def _(y, bias):
    return torch.empty_like(y)


@torch.library.custom_op(f"{_LIB}::column_sums", mutates_args=())
def column_sums(x: torch.Tensor) -> torch.Tensor:
    """See `kernels.column_sums`."""
    return kernels.column_sums(x)


@column_sums.register_fake
def _(x):
    return x.new_empty(x.shape[1])


@torch.library.custom_op(f"{_LIB}::add_to_main_grad", mutates_args=())
def add_to_main_grad(weight: torch.Tensor, dw: torch.Tensor) -> torch.Tensor:
    """Add the FP32 gradient of a weight to its `main_grad`; gives the placeholder for autograd.

    `main_grad` is not an argument, because no compiled backward may write to an argument of its forward: the operator
    finds it on the parameter when it runs, as a hook would. Nothing else in a graph may read or write it.
    """
    from .saved import main_grad, placeholder_gradient

    main_grad(weight).add_(dw)
    return placeholder_gradient(weight)


@add_to_main_grad.register_fake
def _(weight, dw):
    return torch.empty_like(weight)


for _op in (amax_, quantize_, dequantize_, outer_scale_):
    _op.register_fake(lambda *args: None)
