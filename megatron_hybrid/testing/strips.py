"""Casts that go by strips wherever these can be cast, also where csrc/cuda chooses another kernel."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

from .. import kernels


class _AnyStrips:
    """A compiled module whose casts of pairs ask for strips."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)

    def quantize_pair(self, *args, **options):
        return self._module.quantize_pair(*args, any_strips=True, **options)


@contextmanager
def any_strips():
    """Inside, the casts of this process that Python calls go by strips where they can (`PairArgs.any_strips`)."""
    own = kernels.extension
    with mock.patch.object(kernels, "extension", lambda device_type: _AnyStrips(own(device_type))):
        yield
