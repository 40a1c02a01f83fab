"""GEMM backends, in the order of preference, and the choice among them."""

from __future__ import annotations

from ..formats import nearest
from .backend import DIMENSIONS, GEMMS, OPERANDS, READ_BY, Alignment, DeviceKind, GemmBackend, GemmPair, pair_error
from .backends import EmulatedBackend, HighPrecisionBackend, ReferenceBackend
from .decoding import DecodingBackend
from .scaled_mm import ScaledMmBackend

BACKENDS: tuple[GemmBackend, ...] = (
    HighPrecisionBackend(),
    ScaledMmBackend(),
    EmulatedBackend(),
    DecodingBackend(),
    ReferenceBackend(),
)


def choose(pair: GemmPair, name: str | None = None) -> GemmBackend:
    """The first backend that can run the pair, or the one asked for by name.

    Raises ``ValueError`` for a pair that no backend may run, a name that does not exist (with the nearest one) and
    a named backend that cannot run the pair, giving its reason.
    """
    if (error := pair_error(pair)) is not None:
        raise ValueError(error)
    if name is None:
        return next(backend for backend in BACKENDS if backend.reason(pair) is None)  # emulation runs every pair
    named = {backend.name: backend for backend in BACKENDS}
    if name not in named:
        raise ValueError(f"unknown gemm backend {name!r}{nearest(name, named)}; there are {', '.join(named)}")
    if (reason := named[name].reason(pair)) is not None:
        raise ValueError(f"backend {name} cannot run it: {reason}")
    return named[name]


__all__ = [
    "BACKENDS",
    "DIMENSIONS",
    "GEMMS",
    "OPERANDS",
    "READ_BY",
    "Alignment",
    "DeviceKind",
    "GemmBackend",
    "GemmPair",
    "choose",
    "pair_error",
]
