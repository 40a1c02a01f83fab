"""A machine without a GPU that plans for Hopper's: what stands where kernels are looked for, and their tables for C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from .. import kernels, node, ops_triton
from ..gemm import DeviceKind, grouped_cuda

POINTER = ctypes.c_void_p


def capsule(name: str, addresses: Sequence[int | None]) -> tuple[object, object]:
    """A table of functions as csrc/entry.h has it, in a capsule; and what must live as long."""
    table, encoded = (POINTER * len(addresses))(*addresses), name.encode()
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [POINTER, ctypes.c_char_p, POINTER]
    return make(ctypes.addressof(table), encoded, None), (table, encoded)


def replacements(casts, gemms) -> list[tuple[object, str, object]]:
    """(where, name, what) to put there, so that linears on the CPU are planned as on a Hopper GPU. casts, gemms: in place
    of `_C_cuda` and `_C_gemm`. `kernels._spec` has a cache to be cleared then, and after."""
    of = DeviceKind.of

    def hopper(device):
        found = of(device)
        return DeviceKind("cuda", (9, 0)) if found.type == "cpu" else found

    return [
        (DeviceKind, "of", hopper),
        (kernels, "extension", lambda device_type: casts),
        (ops_triton, "_reason_on_cuda", lambda: None),
        (grouped_cuda, "library", lambda: gemms if kernels.fits(gemms) else None),
        (grouped_cuda, "takes", lambda *tensors: True),
        (node, "serves", lambda device_type: node.library() is not None),
    ]
