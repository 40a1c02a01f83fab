"""Write the weights of a Hugging Face folder as a checkpoint to go on training from.

Models of the Llama, Qwen2, Qwen3, Qwen2-MoE and Qwen3-MoE shapes convert. The checkpoint holds weights only: load it
with --finetune, under any parallel layout. The flags that build the model in Megatron are printed.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """FOLDER, OUT, --vocab-multiple."""
    parser.add_argument("folder", metavar="FOLDER", help="config.json and *.safetensors")
    parser.add_argument("out", metavar="OUT", help="a new folder, for --load")
    parser.add_argument(
        "--vocab-multiple", type=int, default=128, metavar="N",
        help="pad the vocabulary to a multiple of N, which is --make-vocab-size-divisible-by times the tensor-parallel "
        "size (default: 128)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint. Raises ``ValueError`` for a model that does not convert."""
    from pathlib import Path

    from ..convert.hf import import_hf

    spec = import_hf(Path(args.folder), Path(args.out), vocab_multiple=args.vocab_multiple)
    print(f"{args.out}: load it with --load {args.out} --finetune and\n  {' '.join(spec.flags())}")
    return 0
