"""Is there a whole indexed dataset at this prefix? Asked before training, because Megatron's answer comes late:
a missing file is a long traceback on every rank, a truncated one a crash in the data loader's workers, and a
split without documents an endless loop in the index building."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
_LOOKED_AT = 1 << 20  # tokens; more would take a while on a large file, and ends of documents are among them
_PREPARE = "prepare it with scripts/prepare_data.py"


@dataclass(frozen=True)
class DatasetInfo:
    """What the index of a dataset says."""

    prefix: str
    documents: int
    tokens: int
    dtype: str


def check_dataset(
    prefix: str | Path,
    *,
    sequence_length: int | None = None,
    split: Sequence[float] | None = None,
    vocab_size: int | None = None,
) -> DatasetInfo:
    """Read the headers of ``prefix.idx`` and compare the sizes of both files with what they promise.

    ``sequence_length``: at least one sequence (and its shifted label) must fit. ``split``: Megatron's
    ``--split`` weights; every non-zero share must receive a document. ``vocab_size``: no token among the first million may
    be beyond it, for which Megatron's embedding would silently give zeros. Raises a one-line ``ValueError``
    naming the file and what to do.
    """
    prefix = str(prefix)
    if prefix.endswith((".bin", ".idx")):
        raise ValueError(f"dataset {prefix}: give the prefix without the suffix: {prefix[:-4]}")
    bin_path, idx_path = Path(prefix + ".bin"), Path(prefix + ".idx")
    _require_files(prefix, bin_path, idx_path)
    info, end = _read_index(prefix, idx_path)
    size = bin_path.stat().st_size
    if size != end:
        what = "truncated" if size < end else "longer than its index"
        raise ValueError(
            f"dataset {prefix}: {bin_path} is {what} ({size:,} bytes, the index says {end:,}); "
            f"copy both files again, or {_PREPARE}"
        )
    if sequence_length is not None and info.tokens < sequence_length + 1:
        raise ValueError(
            f"dataset {prefix}: {info.tokens:,} tokens are fewer than one sequence needs "
            f"({sequence_length} and a label); prepare more text or lower --seq-length"
        )
    if split is not None:
        _require_documents(info, split)
    if vocab_size is not None:
        _require_vocabulary(info, bin_path, vocab_size)
    return info


def check_data_paths(
    paths: Sequence[str],
    *,
    sequence_length: int | None = None,
    split: Sequence[float] | None = None,
    vocab_size: int | None = None,
) -> list[DatasetInfo]:
    """`check_dataset` for the value of ``--data-path`` and its kin: prefixes, or weights and prefixes in turn."""
    blend = list(paths)
    if blend and len(blend) % 2 == 0 and all(_is_number(weight) for weight in blend[::2]):
        blend = blend[1::2]
    limits = {"sequence_length": sequence_length, "split": split, "vocab_size": vocab_size}
    return [check_dataset(prefix, **limits) for prefix in blend]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _require_files(prefix: str, bin_path: Path, idx_path: Path) -> None:
    missing = [path for path in (bin_path, idx_path) if not path.is_file()]
    if missing:
        found = _nearest(prefix)
        hint = f"; there are {', '.join(found)} beside it" if found else f"; {_PREPARE}"
        raise ValueError(f"dataset {prefix}: no file {' nor '.join(map(str, missing))}{hint}")
    for path in (bin_path, idx_path):
        if path.stat().st_size == 0:
            raise ValueError(f"dataset {prefix}: {path} is empty; {_PREPARE}")


def _nearest(prefix: str) -> list[str]:
    """Whole datasets in the same folder whose name starts alike: a forgotten ``_train``, mostly."""
    base = Path(prefix)
    if not base.parent.is_dir():
        return []
    candidates = sorted(p.with_suffix("") for p in base.parent.glob("*.idx") if p.name.startswith(base.name))
    return [str(p) for p in candidates if Path(f"{p}.bin").is_file()][:3]


def _read_index(prefix: str, path: Path) -> tuple[DatasetInfo, int]:
    """The counts in an index, and the size in bytes that the data file must have."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
            raise ValueError(f"dataset {prefix}: {path} is not the index of a Megatron dataset; {_PREPARE}")
        if len(head) < _HEADER.size:
            raise ValueError(f"dataset {prefix}: {path} is truncated (it ends in its header); {_PREPARE}")
        _, version, code, sequences, boundaries = _HEADER.unpack(head)
        if version != 1 or code not in _DTYPES:
            raise ValueError(
                f"dataset {prefix}: {path} has version {version} and element type {code}, which this reader "
                f"does not know; {_PREPARE}"
            )
        need = _HEADER.size + 12 * sequences + 8 * boundaries
        if size not in (need, need + sequences):  # multimodal indices carry one more byte a sequence
            what = "truncated" if size < need else "not a valid index"
            raise ValueError(
                f"dataset {prefix}: {path} is {what} ({size:,} bytes, its header says {need:,}); "
                f"copy both files again, or {_PREPARE}"
            )
        lengths = np.fromfile(file, dtype=np.int32, count=sequences)
    documents = max(0, boundaries - 1)
    tokens = int(lengths.sum(dtype=np.int64))
    if documents == 0 or tokens == 0:
        raise ValueError(f"dataset {prefix}: {path} holds no documents; {_PREPARE} from text that is not empty")
    dtype = np.dtype(_DTYPES[code])
    return DatasetInfo(prefix, documents, tokens, dtype.name), tokens * dtype.itemsize


def _require_vocabulary(info: DatasetInfo, bin_path: Path, vocab_size: int) -> None:
    highest = int(np.fromfile(bin_path, dtype=info.dtype, count=_LOOKED_AT).max())
    if highest >= vocab_size:
        raise ValueError(
            f"dataset {info.prefix}: token {highest} is beyond --vocab-size {vocab_size}; give the tokenizer's flags that "
            "scripts/prepare_data.py printed"
        )


def _require_documents(info: DatasetInfo, split: Sequence[float]) -> None:
    """Megatron deals whole documents to the splits and loops for ever on a split that gets none."""
    total, edge, start = sum(split), 0.0, 0
    for name, share in zip(("train", "valid", "test"), split):
        edge += share / total
        stop = int(round(edge * info.documents))
        if share > 0 and stop == start:
            raise ValueError(
                f"dataset {info.prefix}: {info.documents} documents leave none for the {name} share of "
                f"--split {','.join(f'{s:g}' for s in split)}; prepare more documents or raise that share"
            )
        start = stop
