"""Megatron's `torch_dist` checkpoints read without Megatron and without process groups: sizes, arguments, tensors."""

from __future__ import annotations

import argparse
import functools
import io
import json
import pickle
import types
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"  # what it says of weights without a training state
COMMON = "common_state/shard_0_1"
RECORD = "hq_recipe_record"
_SHORT = 12  # characters of what is not expected


class CheckpointError(ValueError):
    """A folder that is not a checkpoint this can read; says what was found and what would be right."""


class Checkpoint:
    """One saved iteration. `path`: its folder (``iter_0000100``), or the run's, of which the latest is taken.

    Raises `CheckpointError` for a folder that holds no distributed checkpoint.
    """

    def __init__(self, path: str | Path):
        from torch.distributed.checkpoint import FileSystemReader

        self.folder = _iteration_folder(Path(path))
        self._reader = FileSystemReader(str(self.folder))
        self._metadata = _read_metadata(self.folder)
        self._common = self._read_common()

    @property
    def iteration(self) -> int | None:
        return self._common.get("iteration")

    @property
    def args(self) -> dict:
        """Megatron's arguments of the run. Values of other classes than plain ones are missing."""
        args = self._common.get("args")
        if not isinstance(args, argparse.Namespace):
            raise CheckpointError(f"{self.folder} holds no arguments of Megatron's training")
        return {name: value for name, value in vars(args).items() if not isinstance(value, _Unknown)}

    @property
    def recipe(self) -> dict | None:
        """The recipe that trained it, for `Recipe.from_dict`; None where none is recorded."""
        text = self.args.get(RECORD)
        return None if text is None else json.loads(text)["recipe"]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of all tensors, by name."""
        return {
            name: tuple(entry.size)
            for name, entry in self._metadata.state_dict_metadata.items()
            if hasattr(entry, "size")
        }

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Whole tensors on the CPU, from whatever shards they were written in. Raises `CheckpointError`."""
        import torch.distributed.checkpoint as dcp

        entries = self._entries
        missing = [name for name in names if name not in entries]
        if missing:
            raise CheckpointError(f"{self.folder} has no tensor {missing[0]} (found: {', '.join(self.tensors())})")
        state = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it says that one process loads alone
            try:
                dcp.load(state, storage_reader=self._reader, no_dist=True)
            except dcp.api.CheckpointException as error:  # which is no Exception
                raise CheckpointError(f"{self.folder} cannot be read: {reasons(error)}") from None
        return state

    @functools.cached_property
    def _entries(self) -> dict:
        """What is stored, by name. Looks once whether the files are all there."""
        _check_whole(self.folder, self._metadata)
        return self._metadata.state_dict_metadata

    def _read_common(self) -> dict:
        old = self.folder / "common.pt"  # Megatron-Core up to 0.16
        if old.is_file():
            return _load_plain(old, old.read_bytes())
        for index, info in self._metadata.storage_data.items():
            if index.fqn == COMMON:
                path = self.folder / info.relative_path
                _check_size(path, info.offset + info.length)
                with path.open("rb") as file:
                    file.seek(info.offset)
                    return _load_plain(path, file.read(info.length))
        return {}


def check_files(folder: Path) -> None:
    """Raise `CheckpointError` for the folder of an iteration that is not all there: a copy that stopped."""
    _check_whole(folder, _read_metadata(folder))


def _read_metadata(folder: Path):
    from torch.distributed.checkpoint import FileSystemReader

    try:
        return FileSystemReader(str(folder)).read_metadata()
    except Exception as error:  # whatever a damaged pickle raises
        raise CheckpointError(f"{folder}/.metadata cannot be read: {error}") from None


def _check_whole(folder: Path, metadata) -> None:
    sizes = {}
    for info in metadata.storage_data.values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    for name, size in sorted(sizes.items()):
        _check_size(folder / name, size)


def _check_size(path: Path, size: int) -> None:
    """Raise `CheckpointError` unless a file has `size` bytes or more."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, which its .metadata names")
    if path.stat().st_size < size:
        raise CheckpointError(f"{path} is cut off: {path.stat().st_size} bytes of {size}")


def reasons(error) -> str:
    """What each rank says, of torch's exception of all ranks' failures."""
    found = dict.fromkeys(f"{type(failure[0]).__name__}: {failure[0]}" for failure in error.failures.values())
    return " ".join("; ".join(found).split())


def folder_of(iteration: int) -> str:
    """The name of the folder that Megatron writes a checkpoint of this iteration into."""
    return f"iter_{iteration:07d}"


def named_by(tracker: Path) -> str:
    """The folder that a tracker names. Raises `CheckpointError` for one that names none."""
    word = tracker.read_text(errors="replace").strip()
    if word != RELEASE and not (word.isdecimal() and word.isascii()):
        raise CheckpointError(f"{tracker}: an iteration or `{RELEASE}` is expected, found {word[:_SHORT]!r}")
    return RELEASE if word == RELEASE else folder_of(int(word))


def _iteration_folder(path: Path) -> Path:
    tracker = path / TRACKER
    if tracker.is_file():
        path = path / named_by(tracker)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint in {path}: no such folder")
    if not (path / ".metadata").is_file():
        inside = next((inner for inner in sorted(path.iterdir()) if (inner / TRACKER).is_file()), None)
        hint = "" if inside is None else f"; {inside} is such a folder"
        raise CheckpointError(
            f"{path} is not a distributed checkpoint (no .metadata in it); needed is one saved with "
            f"--ckpt-format torch_dist, by iteration or by the folder of --save{hint}"
        )
    return path


class _Unknown:
    """What stands for an object of a class that is not loaded from files."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass


_PLAIN = {
    ("argparse", "Namespace"), ("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "complex"),
    ("torch", "Size"), ("torch._utils", "_rebuild_tensor_v2"), ("torch", "ByteStorage"), ("torch", "FloatStorage"),
    ("torch", "LongStorage"), ("torch", "IntStorage"), ("torch", "BFloat16Storage"),
    ("torch", "float32"), ("torch", "bfloat16"), ("torch", "float16"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Builds plain values only; any other class becomes `_Unknown`, so that a file cannot run code."""

    def find_class(self, module, name):
        return super().find_class(module, name) if (module, name) in _PLAIN else _Unknown


def _load_plain(path: Path, data: bytes) -> dict:
    module = types.ModuleType("plain_pickle")
    module.Unpickler, module.load = _Unpickler, lambda file, **options: _Unpickler(file, **options).load()
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", pickle_module=module, weights_only=False)
    except Exception as error:  # whatever a damaged pickle raises
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    loaded = loaded[0] if isinstance(loaded, list) and loaded else loaded
    return loaded if isinstance(loaded, dict) else {}
