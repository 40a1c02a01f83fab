"""Declared, versioned, reversible changes to another package's symbols.

A :class:`Patch` names every symbol that it replaces, the versions that it was written for, why it exists and
when it can go. ``apply`` checks everything before it changes anything, so a patch is wholly in or not at all;
applying twice changes nothing; ``revert`` puts the very objects back that were there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

APPLIED, NOT_APPLIED, NOT_NEEDED, OVERWRITTEN, UNAVAILABLE = (
    "applied",
    "not applied",
    "not needed",
    "overwritten",
    "unavailable",
)
MARKER = "__megatron_hybrid_patch__"
MISSING = object()


class PatchError(RuntimeError):
    """A patch cannot be applied or taken back; nothing was changed."""


@dataclass(frozen=True)
class Change:
    """One symbol and what takes its place.

    ``target`` reads ``package.module:attribute`` or ``package.module:Class.attribute``; ``replacement`` is
    called with the original and returns the new object. ``create`` allows a symbol that is not there yet
    (the original is then ``MISSING``, and reverting deletes the symbol).
    """

    target: str
    replacement: Callable[[Any], Any]
    create: bool = False


def value(new: Any) -> Callable[[Any], Any]:
    """A replacement that does not depend on the original."""
    return lambda original: new


@dataclass(frozen=True)
class Status:
    """A patch's line in a table: its state and, where that needs a word, the reason."""

    name: str
    state: str
    detail: str
    targets: tuple[str, ...]
    versions: str
    why: str
    remove_when: str

    def __str__(self) -> str:
        return f"{self.name}: {self.state}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class _Applied:
    """What one change did: enough to recognise it and to take it back."""

    target: str
    owner: Any
    attribute: str
    original: Any
    new: Any
    was_own: bool  # False: the owner only inherited it, so reverting deletes our entry

    def is_in_place(self) -> bool:
        return inspect.getattr_static(self.owner, self.attribute, MISSING) is self.new

    def put_back(self) -> None:
        if self.was_own:
            setattr(self.owner, self.attribute, self.original)
        else:
            delattr(self.owner, self.attribute)


_applied: dict[str, list[_Applied]] = {}


@dataclass(frozen=True)
class Patch:
    """A set of changes that belong together, with their reason.

    ``package`` is what ``versions`` speaks of. ``not_needed`` returns a reason when this installation does
    not have the fault (the patch then stays out), else None.
    """

    name: str
    changes: tuple[Change, ...]
    versions: str
    why: str
    remove_when: str
    package: str = "megatron.core"
    not_needed: Callable[[], str | None] = lambda: None

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(change.target for change in self.changes)

    @property
    def is_applied(self) -> bool:
        return self.name in _applied

    def check(self) -> None:
        """Raise :class:`PatchError` if the patch could not be applied here. Changes nothing."""
        if not self.is_applied:
            self._find()

    def apply(self) -> Status:
        """Put every change in place, or raise :class:`PatchError` and change nothing."""
        if self.is_applied:
            return self.status()
        located, reason = self._find()
        if reason:
            return self._status(NOT_NEEDED, reason)
        prepared = [self._prepare(change, owner, name) for change, owner, name in located]
        done: list[_Applied] = []
        try:
            for record in prepared:
                setattr(record.owner, record.attribute, record.new)
                done.append(record)
        except BaseException:
            for record in reversed(done):
                record.put_back()
            raise
        _applied[self.name] = done
        return self.status()

    def revert(self) -> Status:
        """Put the originals back. Refuses when someone else replaced one of our symbols since."""
        records = _applied.get(self.name)
        if records is None:
            return self.status()
        lost = [record.target for record in records if not record.is_in_place()]
        if lost:
            raise PatchError(f"patch {self.name}: {', '.join(lost)} was replaced again since; not reverted")
        for record in reversed(records):
            record.put_back()
        del _applied[self.name]
        return self.status()

    def status(self) -> Status:
        """The state now. Changes nothing, and imports only what the patch is about."""
        records = _applied.get(self.name)
        if records is not None:
            lost = [record.target for record in records if not record.is_in_place()]
            return self._status(OVERWRITTEN, ", ".join(lost)) if lost else self._status(APPLIED)
        try:
            _, reason = self._find()
        except PatchError as error:
            return self._status(UNAVAILABLE, str(error))
        return self._status(NOT_NEEDED, reason) if reason else self._status(NOT_APPLIED)

    def _status(self, state: str, detail: str = "") -> Status:
        return Status(self.name, state, detail, self.targets, self.versions, self.why, self.remove_when)

    def _find(self) -> tuple[list[tuple[Change, Any, str]], str | None]:
        """Where every change goes; or the reason why none is needed."""
        version = self._check_version()
        reason = self.not_needed()
        if reason:
            return [], reason
        return [(change, *self._locate(change, version)) for change in self.changes], None

    def _check_version(self) -> str:
        version = installed_version(self.package)
        if version is None:
            raise PatchError(f"patch {self.name}: {self.package} is not installed")
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            raise PatchError(
                f"patch {self.name}: written for {self.package} {self.versions}, found {version}; "
                f"symbols: {', '.join(self.targets)}"
            )
        return version

    def _locate(self, change: Change, version: str) -> tuple[Any, str]:
        """The object that holds the symbol, and the symbol's name in it."""
        module_name, _, path = change.target.partition(":")
        *parents, attribute = path.split(".")
        where = f"patch {self.name}: {change.target} ({self.package} {version})"
        try:
            owner = importlib.import_module(module_name)
        except ImportError as error:
            raise PatchError(f"{where}: cannot import {module_name}: {error}") from error
        for parent in parents:
            owner = getattr(owner, parent, MISSING)
            if owner is MISSING:
                raise PatchError(f"{where}: {module_name} has no {parent}")
        if inspect.getattr_static(owner, attribute, MISSING) is MISSING and not change.create:
            raise PatchError(f"{where}: no such symbol")
        return owner, attribute

    def _prepare(self, change: Change, owner: Any, attribute: str) -> _Applied:
        original = inspect.getattr_static(owner, attribute, MISSING)
        new = change.replacement(original)
        if callable(new) and not isinstance(new, type):
            try:
                setattr(new, MARKER, self.name)
            except (AttributeError, TypeError):
                pass  # a builtin: recognised by identity alone
        return _Applied(change.target, owner, attribute, original, new, attribute in vars(owner))


def installed_version(package: str) -> str | None:
    """The version of the package that an import gives, which need not be the installed distribution's."""
    try:
        module = importlib.import_module(package)
    except ImportError:
        return None
    version = getattr(module, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version(package.replace(".", "-"))
        except importlib.metadata.PackageNotFoundError:
            return None
    return str(version)
