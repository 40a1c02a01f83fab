"""Where documents come from: text files, folders, JSON lines, the standard library's source."""

from __future__ import annotations

import codecs
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

JSONL_SUFFIXES = (".jsonl", ".ndjson")
DEFAULT_SUFFIXES = (".txt", ".md", ".rst", ".py", *JSONL_SUFFIXES)
_STDLIB_SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """A file to read. ``label`` is its name in messages and in the fingerprint, free of the machine's paths."""

    path: Path
    label: str
    named: bool  # given by name, so not to be skipped silently


def find_sources(inputs: Sequence[str], suffixes: Sequence[str] = DEFAULT_SUFFIXES) -> list[Source]:
    """The files behind ``inputs``; folders are walked in sorted order, hidden entries left out."""
    sources: list[Source] = []
    for item in inputs:
        root = Path(item)
        if root.is_file():
            sources.append(Source(root, root.name, named=True))
        elif root.is_dir():
            files = (p for p in sorted(root.rglob("*")) if p.suffix in suffixes and p.is_file())
            found = [p for p in files if not _hidden(p, root)]
            if not found:
                endings = ", ".join(suffixes)
                raise ValueError(f"input {item}: the folder has no file ending in {endings} (see --suffixes)")
            sources += [Source(p, p.relative_to(root).as_posix(), named=False) for p in found]
        else:
            raise ValueError(f"input {item}: no such file or folder")
    return sources


def stdlib_sources() -> list[Source]:
    """The Python source of the running interpreter's standard library, its tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [p for p in sorted(root.rglob("*.py")) if not _STDLIB_SKIP & set(p.relative_to(root).parts)]
    if not found:
        raise ValueError(f"the standard library at {root} has no source files; give --input instead of --stdlib")
    return [Source(p, p.relative_to(root).as_posix(), named=False) for p in found]


def cap_sources(sources: Sequence[Source], max_bytes: int | None) -> list[Source]:
    """At most ``max_bytes``, files picked in the order of their names' hashes: an even sample, the same each time."""
    if max_bytes is None:
        return list(sources)
    kept, total = set(), 0
    for source in sorted(sources, key=lambda s: hashlib.sha256(s.label.encode()).digest()):
        size = source.path.stat().st_size
        if total + size <= max_bytes:
            kept.add(source)
            total += size
    if not kept:
        raise ValueError(f"no input file is as small as the limit of {max_bytes:,} bytes (--max-mib)")
    return [source for source in sources if source in kept]


def not_text(source: Source) -> str | None:
    """Why a file is not UTF-8 text, or None. Reads it once, so that no half-read document is ever written."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with source.path.open("rb") as file:
        while True:
            block = file.read(1 << 20)
            if b"\0" in block:
                return "holds zero bytes"
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as exc:
                return f"is not UTF-8 ({exc.reason})"
            if not block:
                return None


def read_documents(source: Source, max_bytes: int, json_key: str, advance: Callable[[int], None]) -> Iterator[str]:
    """The documents of one file; text longer than ``max_bytes`` (0: no limit) is cut at a line end.

    ``advance`` hears how many bytes were read.
    """
    if source.path.suffix in JSONL_SUFFIXES:
        yield from _read_jsonl(source, json_key, advance)
        return
    with source.path.open("rb") as file:
        while block := _read_lines(file, max_bytes):
            yield block.decode("utf-8")
            advance(len(block))


def _read_lines(file: BinaryIO, max_bytes: int) -> bytes:
    """Whole lines, about ``max_bytes`` of them; 0 means the rest of the file."""
    return file.read(max_bytes) + file.readline() if max_bytes else file.read()


def _read_jsonl(source: Source, key: str, advance: Callable[[int], None]) -> Iterator[str]:
    with source.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{source.path}:{number}"
            if line.strip():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as exc:
                    raise ValueError(f"{where}: not a line of JSON: {exc.msg} (column {exc.colno})") from None
                except RecursionError:
                    raise ValueError(f"{where}: not a line of JSON that is read: nested too deep") from None
                yield _text_of(record, key, where)
            advance(len(line))


def _text_of(record: object, key: str, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON object is expected, found {type(record).__name__}")
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"{where}: no key {key!r}; there are {keys} (see --json-key)")
    if not isinstance(record[key], str):
        raise ValueError(f"{where}: key {key!r} holds {type(record[key]).__name__}, text is expected")
    try:
        record[key].encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: key {key!r} holds half of a surrogate pair, which no text is") from None
    return record[key]


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
