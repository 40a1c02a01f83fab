"""The patch framework on stub modules: replaced, idempotent, reverted, refused, all or nothing."""

import sys
import types

import pytest

from megatron_hybrid.patches.framework import (
    APPLIED,
    NOT_APPLIED,
    NOT_NEEDED,
    OVERWRITTEN,
    UNAVAILABLE,
    Change,
    Patch,
    PatchError,
    value,
)


@pytest.fixture
def stub(monkeypatch):
    """A package ``stub`` 1.2 with a function, a constant and a class."""
    package, module = types.ModuleType("stub"), types.ModuleType("stub.core")
    package.__version__ = "1.2"
    package.core = module

    class Base:
        def inherited(self):
            return "base"

    class Engine(Base):
        @staticmethod
        def static():
            return "static"

    module.run, module.LIMIT, module.Engine = (lambda: "original"), 3, Engine
    monkeypatch.setitem(sys.modules, "stub", package)
    monkeypatch.setitem(sys.modules, "stub.core", module)
    return module


def make_patch(*changes, **options):
    defaults = dict(name="stub_patch", package="stub", versions=">=1.0,<2", why="a fault", remove_when="mended")
    return Patch(changes=changes, **{**defaults, **options})


def wrapping(original):
    return lambda: f"patched {original()}"


@pytest.fixture
def applied_patches():
    """Patches to take back whatever the test does."""
    patches = []
    yield patches
    for patch in patches:
        if patch.status().state == APPLIED:
            patch.revert()


def test_apply_is_idempotent_and_reverts(stub, applied_patches):
    original = stub.run
    patch = make_patch(Change("stub.core:run", wrapping), Change("stub.core:LIMIT", value(7)))
    applied_patches.append(patch)
    assert patch.status().state == NOT_APPLIED
    assert patch.apply().state == APPLIED
    replaced = stub.run
    assert stub.run() == "patched original" and stub.LIMIT == 7
    assert replaced.__megatron_hybrid_patch__ == "stub_patch"
    assert patch.apply().state == APPLIED
    assert stub.run is replaced and stub.run() == "patched original"
    assert patch.revert().state == NOT_APPLIED
    assert stub.run is original and stub.LIMIT == 3
    assert patch.revert().state == NOT_APPLIED


def test_inherited_and_static_attributes(stub, applied_patches):
    static = vars(stub.Engine)["static"]
    patch = make_patch(
        Change("stub.core:Engine.inherited", lambda original: lambda self: original(self) + "!"),
        Change("stub.core:Engine.static", lambda original: staticmethod(lambda: original.__func__() + "!")),
    )
    applied_patches.append(patch)
    patch.apply()
    assert stub.Engine().inherited() == "base!" and stub.Engine.static() == "static!"
    patch.revert()
    assert "inherited" not in vars(stub.Engine) and vars(stub.Engine)["static"] is static


def test_created_symbol_is_deleted_again(stub, applied_patches):
    patch = make_patch(Change("stub.core:NEW", value(1), create=True))
    applied_patches.append(patch)
    patch.apply()
    assert stub.NEW == 1
    patch.revert()
    assert not hasattr(stub, "NEW")


@pytest.mark.parametrize(
    "target, found",
    [
        ("stub.core:gone", "no such symbol"),
        ("stub.core:Gone.method", "has no Gone"),
        ("stub.missing:run", "cannot import stub.missing"),
    ],
)
def test_missing_symbol_is_named_and_nothing_changes(stub, target, found):
    original = stub.run
    patch = make_patch(Change("stub.core:run", wrapping), Change(target, value(None)))
    with pytest.raises(PatchError) as error:
        patch.apply()
    assert target in str(error.value) and "stub 1.2" in str(error.value) and found in str(error.value)
    assert stub.run is original
    status = patch.status()
    assert status.state == UNAVAILABLE and target in status.detail


def test_failing_replacement_changes_nothing(stub):
    def fails(original):
        raise RuntimeError("no")

    original = stub.run
    with pytest.raises(RuntimeError):
        make_patch(Change("stub.core:run", wrapping), Change("stub.core:LIMIT", fails)).apply()
    assert stub.run is original


def test_failing_assignment_is_undone(stub):
    class Sealed(type):
        def __setattr__(cls, name, new):
            raise TypeError("sealed")

    stub.Box = Sealed("Box", (), {"x": 1})
    original = stub.run
    patch = make_patch(Change("stub.core:run", wrapping), Change("stub.core:Box.x", value(2)))
    with pytest.raises(TypeError, match="sealed"):
        patch.apply()
    assert stub.run is original and not patch.is_applied


@pytest.mark.parametrize("versions", [">=1.3", "<1.2", "==2.*"])
def test_version_out_of_range(stub, versions):
    patch = make_patch(Change("stub.core:run", wrapping), versions=versions)
    with pytest.raises(PatchError) as error:
        patch.apply()
    assert "stub.core:run" in str(error.value) and "1.2" in str(error.value)
    assert versions in str(error.value)
    assert patch.status().state == UNAVAILABLE


def test_package_not_installed():
    patch = make_patch(Change("stub.core:run", wrapping))
    with pytest.raises(PatchError, match="stub is not installed"):
        patch.check()


def test_not_needed(stub):
    original = stub.run
    patch = make_patch(Change("stub.core:run", wrapping), not_needed=lambda: "already well")
    status = patch.apply()
    assert status.state == NOT_NEEDED and status.detail == "already well"
    assert stub.run is original and "already well" in str(status)


def test_someone_elses_change_is_left_alone(stub):
    patch = make_patch(Change("stub.core:run", wrapping), Change("stub.core:LIMIT", value(7)))
    patch.apply()
    ours, theirs = stub.run, lambda: "theirs"
    stub.run = theirs
    assert patch.status().state == OVERWRITTEN
    with pytest.raises(PatchError, match="stub.core:run was replaced again"):
        patch.revert()
    assert stub.run is theirs and stub.LIMIT == 7
    stub.run = ours
    patch.revert()
    assert stub.run() == "original"
