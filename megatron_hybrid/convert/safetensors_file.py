"""The safetensors format: a JSON header of names, types, shapes and offsets, then the tensors' bytes.

Files are those of the `safetensors` package, which is not needed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGN = 8
# what a header or an index that is something else ends in
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error)


class SafetensorsError(ValueError):
    """A file or folder that does not hold what it should; names it."""


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one file."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]
        }  # fmt: skip
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGN)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def save_sharded(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> None:
    """Write tensors as they come, into files of up to `max_bytes` and an index; one file needs no index."""
    files: list[dict[str, tuple[int, ...]]] = []
    held, size, total = {}, 0, 0

    def flush():
        nonlocal held, size
        save(folder / f"part-{len(files)}.safetensors", held)
        files.append(list(held))
        held, size = {}, 0

    for name, tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        if held and size + count > max_bytes:
            flush()
        held[name] = tensor
        size, total = size + count, total + count
    flush()
    if len(files) == 1:
        (folder / "part-0.safetensors").replace(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(files, start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number - 1}.safetensors").replace(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


class Reader:
    """The tensors of a folder's safetensors files, read when asked for. Raises `SafetensorsError`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._where: dict[str, tuple[Path, torch.dtype, tuple[int, ...], int, int]] = {}
        for path in self._paths():
            self._where |= _entries(path)

    def _paths(self) -> list[Path]:
        if (self.folder / INDEX).is_file():
            try:
                names = sorted(set(json.loads((self.folder / INDEX).read_text())["weight_map"].values()))
                return [self.folder / name for name in names]
            except _DAMAGED as error:
                raise SafetensorsError(f"{self.folder / INDEX}: not an index of safetensors files ({error!r})") from None
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise SafetensorsError(f"{self.folder} holds no *.safetensors")
        return paths

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name][2]

    def get(self, name: str) -> torch.Tensor:
        """A tensor in memory of its own."""
        if name not in self._where:
            raise SafetensorsError(f"{self.folder} has no tensor {name}")
        path, dtype, shape, start, end = self._where[name]
        with path.open("rb") as file:
            file.seek(start)
            data = bytearray(file.read(end - start))
        if len(data) != end - start:
            raise SafetensorsError(f"{path}: {name} is cut off")
        return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _entries(path: Path) -> dict:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError(f"a header of {length} bytes in a file of {path.stat().st_size}")
            header = json.loads(file.read(length))
        base, found = 8 + length, {}
        for name, entry in header.items():
            if name != "__metadata__":
                dtype, shape, (start, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
                if min(start, *shape, 0) < 0 or end - start != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"{name}: {end - start} bytes at {start} for {shape} of {dtype}")
                found[name] = path, dtype, shape, base + start, base + end
        return found
    except _DAMAGED as error:
        raise SafetensorsError(f"{path}: not a safetensors file ({error!r})") from None
