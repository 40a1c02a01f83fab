"""Write a checkpoint's weights as a Hugging Face folder: config.json and safetensors files.

The checkpoint is one of torch_dist format, of any parallel layout and any recipe. Models of the Llama, Qwen2, Qwen3,
Qwen2-MoE and Qwen3-MoE shapes convert; others are refused, naming the argument. The tokenizer is not part of a
checkpoint: add its files.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """CKPT, OUT, --format, --vocab-size."""
    parser.add_argument("checkpoint", metavar="CKPT", help="the folder of --save, or of one iteration in it")
    parser.add_argument("out", metavar="OUT", help="a new folder")
    parser.add_argument("--format", choices=("hf",), default="hf", help="hf: Hugging Face (the default)")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="cut Megatron's padding off the vocabulary")


def run(args: argparse.Namespace) -> int:
    """Write the folder. Raises ``ValueError`` for a checkpoint or model that does not convert."""
    from pathlib import Path

    from ..checkpoint_file import Checkpoint
    from ..convert.hf import export

    checkpoint = Checkpoint(args.checkpoint)
    spec = export(checkpoint, Path(args.out), vocab_size=args.vocab_size)
    print(f"{args.out}: {spec.hf_config()['architectures'][0]} of iteration {checkpoint.iteration}")
    return 0
