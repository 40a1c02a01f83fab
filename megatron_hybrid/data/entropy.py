"""How well a model that looks at no context, or at one token of it, can do on a text: the lines a training run
must get under before it has shown anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_MAX_DENSE_PAIRS = 1 << 22
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Entropies:
    """Nats a token. ``bigram`` is the conditional entropy of a token given the one before it."""

    unigram: float
    bigram: float


def measure(tokens: np.ndarray, vocab_size: int) -> Entropies:
    """The empirical entropies of a token stream, documents one after another as Megatron packs them.

    No model of that kind can do better on this very stream. With a large vocabulary and little text the
    bigram value is a low one: most pairs are seen once.
    """
    if len(tokens) < 2:
        raise ValueError(f"entropy needs at least 2 tokens, found {len(tokens)}")
    previous = _entropy(_counts((tokens[:-1],), vocab_size))
    pairs = _entropy(_counts((tokens[:-1], tokens[1:]), vocab_size))
    return Entropies(_entropy(_counts((tokens,), vocab_size)), pairs - previous)


def _counts(columns: tuple[np.ndarray, ...], vocab_size: int) -> np.ndarray:
    """How often each token, or each pair of tokens, occurs; chunked, as the stream may be a memory map."""
    size = vocab_size ** len(columns)
    chunks = range(0, len(columns[0]), _CHUNK)
    if size <= _MAX_DENSE_PAIRS:
        total = np.zeros(size, dtype=np.int64)
        for start in chunks:
            total += np.bincount(_codes(columns, start, vocab_size), minlength=size)
        return total
    return _merge((np.unique(_codes(columns, start, vocab_size), return_counts=True) for start in chunks))


def _codes(columns: tuple[np.ndarray, ...], start: int, vocab_size: int) -> np.ndarray:
    codes = np.asarray(columns[0][start : start + _CHUNK], dtype=np.int64)
    for column in columns[1:]:
        codes = codes * vocab_size + column[start : start + _CHUNK]
    return codes


def _merge(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Counts of sparse codes that may occur in several chunks."""
    seen, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for codes, number in parts:
        seen, where = np.unique(np.concatenate([seen, codes]), return_inverse=True)
        counts = np.bincount(where, weights=np.concatenate([counts, number])).astype(np.int64)
    return counts


def _entropy(counts: np.ndarray) -> float:
    probability = counts[counts > 0] / counts.sum()
    return float(-(probability * np.log(probability)).sum())
