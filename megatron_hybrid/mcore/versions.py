"""The versions of Megatron-Core that this adapter was written for and tested with."""

from __future__ import annotations

import importlib.metadata

from packaging.specifiers import SpecifierSet

from .errors import UserError

DISTRIBUTION = "megatron-core"
SUPPORTED = ">=0.19.2,<0.20"


def installed() -> str | None:
    """The installed version of Megatron-Core, or None."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def require() -> str:
    """The installed version. Raises `UserError` when Megatron-Core is missing or outside the supported range."""
    version = installed()
    if version is None:
        raise UserError(f"{DISTRIBUTION} is not installed; needed is {DISTRIBUTION}{SUPPORTED}")
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        raise UserError(f"{DISTRIBUTION} {version} is installed; megatron_hybrid works with {DISTRIBUTION}{SUPPORTED}")
    return version
