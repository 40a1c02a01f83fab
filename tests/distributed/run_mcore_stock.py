"""A pretraining script as Megatron's own: it knows nothing of megatron_hybrid. Mock data, GPT."""

from __future__ import annotations

from functools import partial

if __name__ == "__main__":  # the process that writes checkpoints imports this file again, and needs none of it
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.training import get_args, get_tokenizer, pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args


def loss_of(loss_mask, output):
    mask = loss_mask.view(-1)
    loss = (output.view(-1).float() * mask).sum()
    return loss, mask.sum().int(), {"lm loss": torch.stack((loss.detach(), mask.sum()))}


def forward_step(data_iterator, model):
    """Every rank reads: mock data is the same everywhere."""
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


def datasets(num_samples):
    args = get_args()
    config = GPTDatasetConfig(
        tokenizer=get_tokenizer(),
        random_seed=args.seed,
        sequence_length=args.seq_length,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


datasets.is_distributed = True


if __name__ == "__main__":
    arguments = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
