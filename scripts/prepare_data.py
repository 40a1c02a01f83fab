#!/usr/bin/env python3
"""Turn text into Megatron's indexed datasets, and say how hard the text is.

    scripts/prepare_data.py --input book.txt notes/ pages.jsonl --output data/mine
    scripts/prepare_data.py --stdlib --output data/stdlib

writes data/mine_train.{bin,idx}, data/mine_valid.{bin,idx} and data/mine.meta.json. A second run with the same
inputs and options reuses them. Documents are dealt to the splits by the hash of their text.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megatron_hybrid.data.prepare import SPLITS, Options, Prepared, prepare
from megatron_hybrid.data.sources import DEFAULT_SUFFIXES, cap_sources, find_sources, stdlib_sources
from megatron_hybrid.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer


_MOST_KIB = 1 << 30  # a tebibyte


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="PATH", help="text files, folders (searched), .jsonl files")
    source.add_argument("--stdlib", action="store_true", help="the source of this Python's standard library")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="datasets become PREFIX_train, PREFIX_valid")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--tokenizer",
        choices=["byte"],
        default="byte",
        help="byte (default): one token a byte; ids 0-255 are the bytes, 256 padding, 257 end of document",
    )
    kind.add_argument("--tokenizer-path", metavar="DIR", help="a Hugging Face tokenizer in a local folder")
    parser.add_argument("--split", default="0.95,0.05", help="shares of train,valid[,test] (default %(default)s)")
    parser.add_argument(
        "--suffixes",
        default=",".join(DEFAULT_SUFFIXES),
        help="files taken from folders (default %(default)s)",
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help="the text of a JSON line (default text)")
    parser.add_argument(
        "--max-document-kib",
        type=int,
        default=64,
        metavar="N",
        help="text files longer than this become several documents, cut at line ends; 0: never (default %(default)s)",
    )
    parser.add_argument("--max-mib", type=float, metavar="N", help="take an even sample of the files up to this size")
    args = parser.parse_args(argv)
    if not 0 <= args.max_document_kib <= _MOST_KIB:
        parser.error(f"--max-document-kib must not be negative, and at most {_MOST_KIB}")
    if args.max_mib is not None and not 0 < args.max_mib < math.inf:
        parser.error(f"--max-mib must be a number above zero, found {args.max_mib:g}")
    for flag, given in (("--input", args.input or ()), ("--output", [args.output]), ("--tokenizer-path", [args.tokenizer_path])):
        if "" in given:
            parser.error(f"{flag}: an empty name")
    return args


def open_megatron_builder(bin_path: str, dtype: type[np.number]):
    """Megatron's own builder; imported here, as it takes seconds and a reuse or a refusal does not need it."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's import says that optional packages are absent; no use here
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    return IndexedDatasetBuilder(bin_path, dtype=dtype)


def run(args: argparse.Namespace) -> tuple[Prepared, Tokenizer]:
    """Everything but the printing."""
    tokenizer = HuggingFaceTokenizer(args.tokenizer_path) if args.tokenizer_path else ByteTokenizer()
    options = Options(_parse_split(args.split), args.max_document_kib << 10, args.json_key)
    sources = stdlib_sources() if args.stdlib else find_sources(args.input, tuple(args.suffixes.split(",")))
    sources = cap_sources(sources, None if args.max_mib is None else int(args.max_mib * 2**20))
    bars: list[tqdm] = []

    def progress(total: int) -> tqdm:
        bars.append(tqdm(total=total, unit="B", unit_scale=True, desc="[data] reading", mininterval=0.5))
        return bars[-1]

    try:
        result = prepare(sources, Path(args.output), tokenizer, options, open_megatron_builder, progress)
    finally:
        for bar in bars:
            bar.close()
    return result, tokenizer


def print_report(result: Prepared, tokenizer: Tokenizer) -> None:
    what = "files as before, reused" if result.reused else "files read"
    print(f"[data] {result.num_files:,} {what}, {tokenizer.name} tokenizer, vocabulary {tokenizer.vocab_size:,}")
    for line in result.skipped[:5]:
        print(f"[data] left out: {line}")
    if len(result.skipped) > 5:
        print(f"[data] left out: {len(result.skipped) - 5} more")
    for name, record in result.splits.items():
        print(f"[data] {name}: {record.documents:,} documents, {record.tokens:,} tokens, {record.prefix}")
    if result.entropies is not None:
        print(
            f"[data] validation text: unigram entropy {result.entropies.unigram:.4f}, "
            f"bigram entropy {result.entropies.bigram:.4f} nats a token"
        )
    paths = " ".join(f"--{name}-data-path {result.splits[name].prefix}" for name in SPLITS if name in result.splits)
    print(f"[data] train with: {paths} {' '.join(tokenizer.training_flags())}")


def _parse_split(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(share) for share in text.split(","))
        if not all(map(math.isfinite, shares)):
            raise ValueError
        return shares
    except ValueError:
        raise ValueError(f"--split {text}: numbers separated by commas are expected, for example 0.95,0.05") from None


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        result, tokenizer = run(args)
    except (ValueError, OSError) as exc:
        print(f"prepare_data.py: error: {exc}", file=sys.stderr)
        return 1
    print_report(result, tokenizer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
