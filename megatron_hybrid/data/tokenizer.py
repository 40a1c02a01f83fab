"""The tokenizer seam: what `prepare` needs of a tokenizer, and the two that are supported."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to token ids. ``eod`` ends every document; ``training_flags`` make Megatron agree about it."""

    name: str
    vocab_size: int
    eod: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without the end-of-document token."""
        ...

    def describe(self) -> dict:
        """What `PREFIX.meta.json` records."""
        ...

    def training_flags(self) -> list[str]:
        """The flags with which Megatron reads the result."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8. No download, no training, any text.

    ids 0..255 are the bytes, 256 is padding, 257 ends a document. The order of the last two is Megatron's:
    its ``NullTokenizer`` takes the last id of the vocabulary as end of document unless told otherwise, so
    ``--tokenizer-type NullTokenizer --vocab-size 258`` agrees with the data without a further flag.
    """

    name = "byte"
    pad = 256
    eod = 257
    vocab_size = 258

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Text of the byte ids; padding and end of document are left out."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def describe(self) -> dict:
        return {"name": self.name, "vocab_size": self.vocab_size, "eod": self.eod, "pad": self.pad}

    def training_flags(self) -> list[str]:
        return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(self.vocab_size)]


class HuggingFaceTokenizer:
    """A tokenizer of the Hugging Face kind from a local folder; nothing is fetched."""

    name = "huggingface"

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"tokenizer {path}: no such folder (a folder with tokenizer.json or the like is expected)")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ValueError(
                "a Hugging Face tokenizer needs the package transformers, which is not installed: "
                "pip install transformers, or use --tokenizer byte"
            ) from None
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(self.path), local_files_only=True)
        except (OSError, ValueError) as exc:
            reason = " ".join(str(exc).split())[:200]
            raise ValueError(f"tokenizer {path}: cannot be loaded: {reason}") from None
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer {path}: it has no end-of-sequence token, which ends every document")
        self.eod = int(self._tokenizer.eos_token_id)
        self.vocab_size = len(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Fast tokenizers share the texts out over all cores, in threads of their own."""
        lists = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return [np.asarray(ids, dtype=np.int32) for ids in lists]

    def describe(self) -> dict:
        digest = hashlib.sha256()
        for file in sorted(p for p in self.path.iterdir() if p.suffix in (".json", ".txt", ".model")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        return {
            "name": self.name,
            "path": str(self.path),
            "sha256": digest.hexdigest(),
            "vocab_size": self.vocab_size,
            "eod": self.eod,
        }

    def training_flags(self) -> list[str]:
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(self.path)]
