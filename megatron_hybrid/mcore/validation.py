"""Checks of a run's arguments before anything is built, each with an answer that is the same on every rank."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import torch

from ..data import check_data_paths
from ..distributed.param_gather import HIGH_PRECISION
from ..model_shape import flag_of
from ..plan import WEIGHT, PlanError
from ..recipe import QUANTIZED
from .checkpoint import loads_optimizer
from .errors import UserError

RECIPES_MODULE = "megatron_hybrid.mcore.recipes"

# Megatron's own precision flags: attribute in its arguments, flag
_PRECISION_FLAGS = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "fp8_param_gather": "--fp8-param-gather",
    "fp4_param_gather": "--fp4-param-gather",
    "te_precision_config_file": "--te-precision-config-file",
    "tp_comm_overlap": "--tp-comm-overlap",
}

# attributes in Megatron's arguments that count something, and mean nothing below 1
_COUNTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "seq_length",
    "vocab_size", "micro_batch_size", "global_batch_size", "train_iters", "train_samples", "moe_router_topk",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)  # fmt: skip
_NOT_NEGATIVE = ("hq_profile_step", "hq_offload_layers")


def check_counts(args) -> None:
    """Refuse numbers that Megatron or we would divide by, or make nothing of."""
    for names, least in ((_COUNTS, 1), (_NOT_NEGATIVE, 0)):
        for name in names:
            if (value := getattr(args, name)) is not None and value < least:
                raise UserError(f"{flag_of(name)} {value}: at least {least} is expected")
    if args.num_experts and args.moe_router_topk > args.num_experts:
        raise UserError(f"--moe-router-topk {args.moe_router_topk} of --num-experts {args.num_experts}: there are not as many")


def check_flags(args) -> None:
    """Refuse flags that contradict each other, naming both."""
    for attribute, flag in _PRECISION_FLAGS.items():
        if getattr(args, attribute, None):
            raise UserError(
                f"{flag} beside --hq-recipe {args.hq_recipe}: the recipe decides formats and gathers, and Megatron's "
                f"own quantization needs Transformer Engine; leave {flag} out"
            )
    if args.spec is not None and args.spec[0] != RECIPES_MODULE:
        raise UserError(
            f"--spec {' '.join(args.spec)} beside --hq-recipe {args.hq_recipe}: both name the model's layers; "
            "leave one out"
        )
    if args.hybrid_layer_pattern is not None and not args.hq_hybrid_models:
        raise UserError(
            f"--hybrid-layer-pattern beside --hq-recipe {args.hq_recipe}: a script's hybrid model cannot be reached; "
            "train it with scripts/pretrain_gpt.py"
        )
    _check_statistics(args)
    _check_megatron_fsdp(args)
    _check_checkpoint_format(args)
    if args.use_torch_fsdp2 and args.calculate_per_token_loss:
        raise UserError(
            "--use-torch-fsdp2 beside --calculate-per-token-loss: Megatron does not divide FSDP2's gradients by the number of "
            "tokens; leave one out"
        )
    if args.use_torch_fsdp2 and args.num_experts and not args.moe_grouped_gemm and (args.save or args.load):
        raise UserError(
            "--use-torch-fsdp2 with experts one by one beside --save or --load: Megatron takes the shards of such an expert "
            "for copies and writes the first only; add --moe-grouped-gemm"
        )
    if args.fp16 and args.use_precision_aware_optimizer and args.clip_grad > 0:
        raise UserError(
            f"--use-precision-aware-optimizer beside --fp16 and --clip-grad {args.clip_grad:g}: Megatron clips no gradients in "
            "FP16; use --bf16, or --clip-grad 0"
        )
    if args.hq_offload_layers and args.recompute_granularity is not None:
        raise UserError(
            f"--hq-offload-layers {args.hq_offload_layers} beside --recompute-granularity {args.recompute_granularity}: what "
            "is recomputed is not saved; choose one"
        )
    if args.hq_check_nan and not args.check_for_nan_in_loss_and_grad:
        raise UserError("--hq-check-nan beside --no-check-for-nan-in-loss-and-grad: they contradict each other")


def _check_statistics(args) -> None:
    if args.hq_stats_interval < 0:
        raise UserError(f"--hq-stats-interval {args.hq_stats_interval}: a number of iterations, or 0 for never")
    wanted = {"--hq-stats-interval": args.hq_stats_interval, "--hq-profile-step": args.hq_profile_step}
    for flag, asked in wanted.items():
        if asked and statistics_path(args) is None:
            raise UserError(
                f"{flag} has no place to write to; give --hq-stats-file, --hq-metrics-file, --tensorboard-dir or --save"
            )
    if args.hq_stats_file and not any(wanted.values()):
        raise UserError(
            f"--hq-stats-file {args.hq_stats_file} without {' or '.join(wanted)} N: nothing would be written"
        )


def _check_checkpoint_format(args) -> None:
    plain = args.ckpt_format == "torch" and args.use_distributed_optimizer
    if plain and args.ckpt_step and loads_optimizer(args):
        raise UserError(
            f"--ckpt-step {args.ckpt_step} beside --ckpt-format torch and --use-distributed-optimizer: Megatron takes "
            "the weights of that step and the optimizer of the latest one; write the step into "
            "latest_checkpointed_iteration.txt instead"
        )
    if args.ckpt_format == "torch_dcp" and (args.save or args.load):
        raise UserError(
            "--ckpt-format torch_dcp beside --save or --load: Megatron writes such checkpoints and fails to load them; "
            "use --ckpt-format torch_dist"
        )


def _check_megatron_fsdp(args) -> None:
    if not args.use_megatron_fsdp:
        return
    stages, instances = args.pipeline_model_parallel_size, args.num_distributed_optimizer_instances
    for flags, given, why in (
        (
            "--data-parallel-sharding-strategy no_shard", args.data_parallel_sharding_strategy == "no_shard",
            "nothing is sharded; leave --use-megatron-fsdp out",
        ),
        (f"--pipeline-model-parallel-size {stages}", stages > 1, "its mesh of ranks has no pipeline stages"),
        (
            f"--num-distributed-optimizer-instances {instances}", instances > 1,
            "it does not reduce a single microbatch's gradients over the instances",
        ),
        ("--fp16", args.fp16, "Megatron then looks for gradients where Megatron-FSDP has none; use --bf16"),
    ):  # fmt: skip
        if given:
            raise UserError(f"--use-megatron-fsdp beside {flags}: {why}")


def statistics_path(args) -> Path | None:
    """The file of ``--hq-stats-interval``, before ranks are told apart."""
    if args.hq_stats_file:
        return Path(args.hq_stats_file)
    folders = (args.hq_metrics_file and Path(args.hq_metrics_file).parent, args.tensorboard_dir, args.save)
    return next((Path(folder) / "hq_stats.jsonl" for folder in folders if folder), None)


def check_outputs(args) -> None:
    """Every folder that the run will write into, made and tried now: a save would say so hours later, on one rank."""
    files = {"--hq-metrics-file": args.hq_metrics_file, "--hq-stats-file": args.hq_stats_file}
    folders = {flag: (path, Path(path).parent) for flag, path in files.items() if path}
    folders |= {f"--{name}": (path, Path(path)) for name in ("save", "tensorboard-dir")
                if (path := getattr(args, name.replace("-", "_"), None))}  # fmt: skip
    for flag, (given, folder) in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            if flag == "--hq-metrics-file" and os.path.lexists(given):
                with open(given, "ab"):
                    pass
        except OSError as error:
            raise UserError(f"{flag} {given}: cannot be written to ({error.strerror})") from None


# attribute in Megatron's arguments -> flag, of what does not know weights that live quantized
_NOT_BESIDE_QUANTIZED_WEIGHTS = {
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step",
    "use_layer_wise_distributed_optimizer": "--use-layer-wise-distributed-optimizer",
}


def check_quantized_weights(args, recipe) -> None:
    """Refuse what would leave weights that live quantized without masters, or never update them."""
    if recipe.weights != QUANTIZED:
        return
    what = f"recipe {recipe.name} with `weights: quantized`"
    if args.use_torch_fsdp2:
        raise UserError(
            f"{what} beside --use-torch-fsdp2, whose shards stay in high precision and are the masters; leave `weights` out: "
            "`param_gather: both` alone has FSDP2 gather payloads"
        )
    if not args.use_distributed_optimizer:
        raise UserError(f"{what} needs --use-distributed-optimizer, which keeps the FP32 masters")
    if not (args.bf16 or args.fp16):
        raise UserError(f"{what} needs --bf16 or --fp16, the dtype that the weights stand for")
    if getattr(args, "num_distributed_optimizer_instances", 1) > 1:
        raise UserError(f"{what} beside --num-distributed-optimizer-instances: only 1 is supported")
    if args.optimizer_cpu_offload:
        raise UserError(
            f"{what} beside --optimizer-cpu-offload: its masters start from BF16 shards, which these weights have not; "
            "--hq-offload-optimizer keeps moments in host memory"
        )
    if args.use_megatron_fsdp and args.megatron_fsdp_main_params_dtype != torch.float32:
        raise UserError(f"{what} needs --megatron-fsdp-main-params-dtype fp32: its masters")
    if args.use_megatron_fsdp and args.init_model_with_meta_device:
        raise UserError(f"{what} beside --init-model-with-meta-device: its masters start from the initial weights")
    for attribute, flag in _NOT_BESIDE_QUANTIZED_WEIGHTS.items():
        if getattr(args, attribute, False):
            raise UserError(f"{what} beside {flag} is not supported; leave one out")


def check_param_gather(recipe, at_step: dict[int, dict]) -> None:
    """Refuse weights that live quantized in a format whose bytes cannot be cast share by share, at any step.

    at_step: plans by step and name. Raises `PlanError` naming the module.
    """
    if recipe.weights != QUANTIZED or recipe.param_gather == HIGH_PRECISION:
        return
    for plan in (plan for plans in at_step.values() for plan in plans.values()):
        quantizer = plan.quantizers[WEIGHT]
        row, column = quantizer.formats()
        for fmt in (row,) if quantizer.derives_columnwise else (row, column):
            if fmt.rht:
                raise PlanError(
                    f"{plan.label}: its weight lives quantized as {fmt}, whose Hadamard transform mixes elements that several "
                    "ranks hold; give the recipe `param_gather: high_precision`, or leave `rht` out of weights"
                )


def check_ranks(args) -> None:
    """The parallel sizes must divide the number of ranks, and the sequence."""
    sizes = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
    }
    product = math.prod(sizes.values())
    given = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
    if args.world_size % product:
        raise UserError(
            f"{given} needs a multiple of {product} ranks, found {args.world_size}; start as many with "
            f"torchrun --nproc-per-node, or lower the sizes"
        )
    _check_expert_ranks(args)
    tp = args.tensor_model_parallel_size
    if args.sequence_parallel and args.seq_length is not None and args.seq_length % tp:
        raise UserError(
            f"--sequence-parallel splits --seq-length {args.seq_length} over --tensor-model-parallel-size {tp} ranks, "
            "which does not divide it"
        )


def _check_expert_ranks(args) -> None:
    """Expert-parallel ranks come out of the data-parallel ones, and the experts are divided among them."""
    ep, experts = args.expert_model_parallel_size, args.num_experts or None  # 0 means none to Megatron
    if experts is None:
        if ep > 1:
            raise UserError(f"--expert-model-parallel-size {ep} without --num-experts: there are no experts to divide")
        return
    if experts % ep:
        raise UserError(f"--num-experts {experts} over --expert-model-parallel-size {ep} ranks, which does not divide it")
    etp, pp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    needed = ep * etp * pp
    if args.world_size % needed:
        raise UserError(
            f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {etp} x --pipeline-model-parallel-size "
            f"{pp} needs a multiple of {needed} ranks, found {args.world_size}; lower the sizes"
        )


def check_data(args) -> None:
    """Every dataset that the run names must be there, whole, large enough, and of the vocabulary that the run names.

    Only `NullTokenizer` takes that from --vocab-size: beside a tokenizer with a vocabulary of its own Megatron ignores it.
    """
    vocab_size = args.vocab_size if args.tokenizer_type == "NullTokenizer" else None
    limits = {"sequence_length": args.seq_length, "vocab_size": vocab_size}
    if args.data_path:
        split = args.split or "969, 30, 1"  # Megatron's own default
        _check_paths(args.data_path, split=_parse_split(split), **limits)
    for paths in (args.train_data_path, args.valid_data_path, args.test_data_path):
        if paths:
            _check_paths(paths, **limits)


def _check_paths(paths, **limits) -> None:
    try:
        check_data_paths(paths, **limits)
    except ValueError as error:
        raise UserError(str(error)) from None


def _parse_split(text: str) -> list[float]:
    try:
        shares = [float(share) for share in text.replace("/", ",").split(",")]
    except ValueError:
        raise UserError(f"--split {text!r} is not a list of numbers such as 99,1,0") from None
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) == 0:
        raise UserError(f"--split {text!r}: up to three shares (train, valid, test), not negative, not all zero")
    return shares
