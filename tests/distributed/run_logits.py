"""The logits that Megatron's own model gives for fixed tokens, of a checkpoint: no training.

    run_logits.py <flags of pretrain_gpt.py> --load CHECKPOINT --skip-train --hq-metrics-file OUT

The first rank writes OUT.pt: (batch, sequence, vocabulary), and the rotary frequencies as OUT.rotary.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from pretrain_gpt import build_datasets  # noqa: E402

from megatron_hybrid import launch  # noqa: E402
from megatron_hybrid.mcore.errors import user_errors  # noqa: E402

BATCH, SEQUENCE = 4, 32


def fixed_tokens(vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))


def write_logits(data_iterator, model):
    """In place of a forward step: then the run is over."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_args

    args = get_args()
    tokens = fixed_tokens(args.vocab_size)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    with torch.no_grad():
        logits = gather_from_tensor_model_parallel_region(model(tokens, positions, None))
    if args.rank == 0:
        torch.save(logits.clone(), f"{args.hq_metrics_file}.pt")
        torch.save(get_attr_wrapped_model(model, "rotary_pos_emb").inv_freq, f"{args.hq_metrics_file}.rotary.pt")
    raise SystemExit(0)


def main() -> None:
    with user_errors():
        launch.prepare()
        from megatron.core.enums import ModelType
        from megatron.training import pretrain
        from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        args = parse_and_validate_args()
        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        pretrain(config, build_datasets, ModelType.encoder_or_decoder, write_logits)


if __name__ == "__main__":
    main()
