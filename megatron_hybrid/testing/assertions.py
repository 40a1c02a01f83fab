"""Exact comparisons that say where two arrays first differ."""

from __future__ import annotations

import numpy as np


def _to_numpy(t) -> np.ndarray:
    """NumPy array or torch tensor (any device, bfloat16 included) -> NumPy array with the same bytes."""
    if not hasattr(t, "detach"):
        return np.asarray(t)
    t = t.detach().cpu().contiguous()
    if str(t.dtype) == "torch.bfloat16":
        import ml_dtypes
        import torch

        return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return t.numpy()


def _bits(t: np.ndarray) -> np.ndarray:
    """Each element's bytes as one unsigned integer, same shape."""
    return np.ascontiguousarray(t).view(f"u{t.dtype.itemsize}").reshape(t.shape)


def assert_bitwise_equal(a, b, what: str, *, any_nan: bool = False) -> None:
    """Fail unless ``a`` and ``b`` have the same shape, dtype and bytes.

    The message gives the number of differing elements and the coordinate, bytes and values of the first.
    any_nan: a NaN equals any other NaN (arithmetic does not define a NaN's payload; codes do).
    """
    a, b = _to_numpy(a), _to_numpy(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise AssertionError(f"{what}: {a.dtype}{a.shape} against {b.dtype}{b.shape}")
    different = _bits(a) != _bits(b)
    if any_nan:
        different &= ~((a != a) & (b != b))
    if not different.any():
        return
    at = tuple(int(i) for i in np.argwhere(different)[0])
    width = 2 * a.dtype.itemsize
    raise AssertionError(
        f"{what}: {int(different.sum())} of {a.size} elements differ, first at {at}: "
        f"0x{int(_bits(a)[at]):0{width}x} ({a[at]}) against 0x{int(_bits(b)[at]):0{width}x} ({b[at]})"
    )
