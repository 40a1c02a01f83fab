"""From documents to indexed datasets: split, tokenize, write, measure, record.

Files appear whole or not at all: everything is written under a temporary name and renamed, the record
(``PREFIX.meta.json``) last, and a record is what makes a later run reuse the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ..whole_file import write_whole
from .check import check_dataset
from .entropy import Entropies, measure
from .sources import Source, not_text, read_documents
from .tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")
META_VERSION = 1
BATCH = 4 << 20  # characters that are tokenized together
MIN_DOCUMENTS = 2  # a split; with none Megatron's index building never ends


class DatasetBuilder(Protocol):
    """The part of Megatron's ``IndexedDatasetBuilder`` that is used."""

    def add_document(self, tensor: np.ndarray, lengths: list[int]) -> None: ...

    def finalize(self, idx_path: str) -> None: ...


OpenBuilder = Callable[[str, type[np.number]], DatasetBuilder]


class Progress(Protocol):
    """Hears of bytes read (a tqdm bar, say)."""

    def update(self, n: int) -> object: ...


@dataclass(frozen=True)
class Options:
    """What decides the content of the datasets, besides the input files."""

    split: tuple[float, ...] = (0.95, 0.05)
    max_document_bytes: int = 64 << 10
    json_key: str = "text"

    def __post_init__(self) -> None:
        if not 1 <= len(self.split) <= 3 or min(self.split) < 0 or self.split[0] == 0:
            raise ValueError(f"--split {self.split}: one to three shares (train, valid, test) are expected, train > 0")
        if abs(sum(self.split) - 1) > 1e-6:
            shares = ",".join(map(str, self.split))
            raise ValueError(f"--split {shares}: the shares add up to {sum(self.split):g}, not 1")


@dataclass
class SplitRecord:
    """One split's dataset."""

    prefix: str
    documents: int = 0
    tokens: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Prepared:
    """What is on disk after `prepare`."""

    splits: dict[str, SplitRecord]
    entropies: Entropies | None
    num_files: int
    skipped: list[str]
    reused: bool


def prepare(
    sources: Sequence[Source],
    prefix: Path,
    tokenizer: Tokenizer,
    options: Options,
    open_builder: OpenBuilder,
    progress: Callable[[int], Progress],
) -> Prepared:
    """Write ``PREFIX_train``, ``PREFIX_valid`` (and ``_test``) unless a record says they are these already."""
    if prefix.is_dir():
        raise ValueError(f"--output {prefix} is a folder; give a prefix for files, for example {prefix / 'text'}")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    fingerprint = _fingerprint(sources, tokenizer, options)
    meta_path = Path(f"{prefix}.meta.json")
    if (old := _reusable(meta_path, fingerprint, prefix)) is not None:
        return old
    meta_path.unlink(missing_ok=True)
    names = [name for name, share in zip(SPLITS, options.split) if share > 0]
    writers = {name: _SplitWriter(f"{prefix}_{name}", tokenizer, open_builder) for name in names}
    try:
        skipped: list[str] = []
        texts = _texts(sources, options, progress, skipped)
        for batch in _batches(texts):
            for text, ids in zip(batch, tokenizer.encode(batch)):
                writers[split_of(text, options.split)].add(ids)
        _refuse_too_few(writers, options, skipped)
        records = {name: writer.publish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.discard()
    entropies = _measure(records.get("valid"), tokenizer)
    result = Prepared(records, entropies, len(sources) - len(skipped), skipped, reused=False)
    _write_meta(meta_path, fingerprint, tokenizer, options, result)
    return result


class _SplitWriter:
    """One split under temporary names, until `publish`."""

    def __init__(self, prefix: str, tokenizer: Tokenizer, open_builder: OpenBuilder):
        self.record = SplitRecord(prefix)
        self._eod = tokenizer.eod
        self._temporary = f"{prefix}.{os.getpid()}.tmp"
        # Megatron's own rule for the element type (DType.optimal_dtype): readers take it from the index.
        dtype = np.uint16 if tokenizer.vocab_size < 65500 else np.int32
        self._builder = open_builder(self._temporary + ".bin", dtype)

    def add(self, ids: np.ndarray) -> None:
        tokens = np.append(ids, ids.dtype.type(self._eod))
        self._builder.add_document(tokens, [len(tokens)])
        self.record.documents += 1
        self.record.tokens += len(tokens)

    def publish(self) -> SplitRecord:
        """Give the files their names. Megatron's cached indices of an older dataset here would not fit: removed."""
        self._builder.finalize(self._temporary + ".idx")
        with open(self._temporary + ".bin", "rb") as file:
            self.record.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        shutil.rmtree(Path(self.record.prefix, "cache"), ignore_errors=True)
        for suffix in (".bin", ".idx"):
            os.replace(self._temporary + suffix, self.record.prefix + suffix)
        return self.record

    def discard(self) -> None:
        for suffix in (".bin", ".idx"):
            Path(self._temporary + suffix).unlink(missing_ok=True)


def _texts(
    sources: Sequence[Source], options: Options, progress: Callable[[int], Progress], skipped: list[str]
) -> Iterator[str]:
    """Every document; `skipped` gets the files that are left out because they are not text."""
    bar = progress(sum(source.path.stat().st_size for source in sources))
    for source in sources:
        if (reason := not_text(source)) is not None:
            if source.named:
                raise ValueError(f"input {source.path} {reason}; UTF-8 text is expected")
            skipped.append(f"{source.label} {reason}")
            bar.update(source.path.stat().st_size)
            continue
        for text in read_documents(source, options.max_document_bytes, options.json_key, bar.update):
            if text.strip():
                yield text


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Documents in order, in lists of about BATCH characters."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def split_of(text: str, shares: Sequence[float]) -> str:
    """The split of a document: its hash against the shares, so it stays where it is when others are added,
    and a document that occurs twice never lies on both sides."""
    position = int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") / 2**64
    edge = 0.0
    for name, share in zip(SPLITS, shares):
        edge += share
        if position < edge:
            return name
    return SPLITS[max(i for i, share in enumerate(shares) if share > 0)]  # sums just below 1


def _refuse_too_few(writers: dict[str, _SplitWriter], options: Options, skipped: list[str]) -> None:
    total = sum(writer.record.documents for writer in writers.values())
    if total == 0:
        more = f" ({len(skipped)} files are not text)" if skipped else ""
        raise ValueError(f"the input has no documents: every file is empty{more}")
    for name, writer in writers.items():
        if writer.record.documents < MIN_DOCUMENTS:
            raise ValueError(
                f"the {name} split gets {writer.record.documents} of {total} documents, at least {MIN_DOCUMENTS} are "
                f"needed (Megatron never finishes building the index of a split without documents); add text, "
                f"raise that share of --split {','.join(f'{s:g}' for s in options.split)}, "
                f"or cut finer with --max-document-kib (now {options.max_document_bytes >> 10})"
            )


def _measure(record: SplitRecord | None, tokenizer: Tokenizer) -> Entropies | None:
    if record is None:
        return None
    dtype = np.dtype(check_dataset(record.prefix).dtype)
    return measure(np.memmap(record.prefix + ".bin", dtype=dtype, mode="r"), tokenizer.vocab_size)


def _fingerprint(sources: Sequence[Source], tokenizer: Tokenizer, options: Options) -> str:
    """Names, sizes and times of the inputs, and everything else that decides the output."""
    files = [(s.label, s.named, s.path.stat().st_size, s.path.stat().st_mtime_ns) for s in sources]
    content = json.dumps([META_VERSION, files, tokenizer.describe(), asdict(options)])
    return hashlib.sha256(content.encode()).hexdigest()


def _reusable(meta_path: Path, fingerprint: str, prefix: Path) -> Prepared | None:
    """The recorded result, if it is of these inputs and its files are whole."""
    try:
        meta = json.loads(meta_path.read_text())
        if meta["version"] != META_VERSION or meta["inputs"]["fingerprint"] != fingerprint:
            return None
        splits = {}
        for name, record in meta["splits"].items():
            splits[name] = SplitRecord(f"{prefix}_{name}", record["documents"], record["tokens"], record["sha256"])
            info = check_dataset(splits[name].prefix)
            if (info.documents, info.tokens) != (record["documents"], record["tokens"]):
                return None
        nats = meta["entropy_nats_per_token"]
        entropies = Entropies(nats["unigram"], nats["bigram"]) if nats else None
        return Prepared(splits, entropies, meta["inputs"]["num_files"], meta["inputs"]["skipped"], reused=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_meta(path: Path, fingerprint: str, tokenizer: Tokenizer, options: Options, result: Prepared) -> None:
    meta = {
        "version": META_VERSION,
        "tokenizer": tokenizer.describe(),
        "training_flags": tokenizer.training_flags(),
        "options": asdict(options),
        "inputs": {"fingerprint": fingerprint, "num_files": result.num_files, "skipped": result.skipped},
        "splits": {
            name: {"documents": r.documents, "tokens": r.tokens, "sha256": r.sha256}
            for name, r in result.splits.items()
        },
        "entropy_nats_per_token": asdict(result.entropies) if result.entropies else None,
    }
    write_whole(path, json.dumps(meta, indent=2) + "\n")
