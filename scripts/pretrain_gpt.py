#!/usr/bin/env python
"""Pretrain a GPT with Megatron-Core, its linears quantized per direction as a recipe says.

    torchrun --nproc-per-node 2 scripts/pretrain_gpt.py <Megatron's flags> --hq-recipe mxfp8_fprop_nvfp4_bwd

Training is Megatron's own `pretrain()`. What stands here is what Megatron leaves to every script: where batches come
from and what the loss is. docs/megatron.md says how recipes come in (`megatron_hybrid.launch`).
"""

from __future__ import annotations

import sys
from functools import partial

from megatron_hybrid import launch
from megatron_hybrid.mcore.arguments import help_text
from megatron_hybrid.mcore.errors import user_errors

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def get_batch(data_iterator, micro_batch_size: int, vp_stage: int | None) -> list:
    """The tensors of BATCH_KEYS on this rank: read by the first tensor-parallel rank, sent to the others.

    Pipeline stages between the first and the last need none: all None.
    """
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
    from megatron.training import get_args
    from megatron.training.utils.common_utils import is_first_or_last_pipeline_stage

    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * len(BATCH_KEYS)
    args, batch = get_args(), {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return [batch.get(key) for key in BATCH_KEYS]


def masked_loss(loss_mask, output):
    """(sum of the losses of unmasked tokens, their number, both for the log), as Megatron's schedules take it."""
    import torch
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    mask = loss_mask.view(-1).float()
    loss, num_tokens = torch.sum(output.view(-1).float() * mask), mask.sum()
    if get_args().check_for_nan_in_loss_and_grad:
        for rejects, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"{name} in this rank's loss",
                tolerance=0.0,
                fatal=True,
            )
    report = {"lm loss": torch.stack((loss.detach(), num_tokens))}
    return loss, num_tokens.int(), report


def forward_step(data_iterator, model):
    """One microbatch forward; returns the output and the function that makes the loss of it."""
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_args, get_timers

    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    size = args.micro_batch_size if model.training else args.eval_micro_batch_size
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator, size, vp_stage)
    timers("batch-generator").stop()
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(masked_loss, loss_mask)


def build_datasets(num_samples, vp_stage: int | None = None):
    """(train, valid, test) datasets of as many samples, on the ranks that read batches."""
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
    from megatron.training import get_args
    from megatron.training.utils.common_utils import is_first_or_last_pipeline_stage

    def is_built_here():
        return is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0

    kind = MockGPTDataset if get_args().mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, is_built_here, dataset_config(get_args())).build()


build_datasets.is_distributed = True  # Megatron then calls it on every rank


def dataset_config(args):
    """What the arguments say about the datasets."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training import get_tokenizer
    from megatron.training.utils.common_utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        tokenizer=get_tokenizer(),
        blend=blend,
        blend_per_split=blend_per_split,
        random_seed=args.seed if args.hq_data_seed is None else args.hq_data_seed,
        sequence_length=args.seq_length,
        path_to_cache=args.data_cache_path,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        **{
            name: getattr(args, name)
            for name in (
                *("split", "multiple_validation_sets", "full_validation", "num_dataset_builder_threads"),
                *("mmap_bin_files", "mid_level_dataset_surplus", "allow_ambiguous_pad_tokens"),
                *("object_storage_cache_path", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
            )
        },
    )


def model_config(args):
    """A GPT, or with ``--hybrid-layer-pattern`` Megatron's HybridModel, its layers those of the recipe."""
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    if args.hybrid_layer_pattern is None:
        return gpt_config_from_args(args)
    from megatron_hybrid.mcore import hybrid_model

    config = hybrid_config_from_args(args)
    if (spec := config.hybrid_stack_spec) is not None and hasattr(spec, "recipe"):
        hybrid_model.configure(config, spec)
    return config


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(help_text("scripts/pretrain_gpt.py"))
        return
    sys.argv = ["--help" if word == "--help-all" else word for word in sys.argv]
    with user_errors():
        launch.prepare(hybrid_models=True)
        from megatron.core.enums import ModelType
        from megatron.training import pretrain
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        args = parse_and_validate_args()
        config = pretrain_cfg_container_from_args(args, model_config(args))
        with launch.ending_groups():
            pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
