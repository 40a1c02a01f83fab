"""GEMM backends, in the order of preference, and the choice among them."""

from __future__ import annotations

from .backend import GEMMS, OPERANDS, DeviceKind, GemmBackend, GemmPair, pair_error
from .backends import EmulatedBackend, HighPrecisionBackend, ReferenceBackend
from .scaled_mm import ScaledMmBackend

BACKENDS: tuple[GemmBackend, ...] = (
    HighPrecisionBackend(),
    ScaledMmBackend(),
    EmulatedBackend(),
    ReferenceBackend(),
)


def choose(pair: GemmPair, name: str | None = None) -> GemmBackend:
    """The first backend that can run the pair, or the one asked for by name.

    Raises ``ValueError`` giving every backend's reason when there is none.
    """
    if (error := pair_error(pair)) is not None:
        raise ValueError(error)
    if name is not None:
        for backend in BACKENDS:
            if backend.name == name:
                return backend
        raise ValueError(f"unknown gemm backend {name!r}; there are {', '.join(b.name for b in BACKENDS)}")
    reasons = []
    for backend in BACKENDS:
        if (reason := backend.reason(pair)) is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ValueError("no backend can run it. " + "; ".join(reasons))


__all__ = ["BACKENDS", "GEMMS", "OPERANDS", "DeviceKind", "GemmBackend", "GemmPair", "choose", "pair_error"]
