"""Our command-line flags, and the defaults of Megatron's that a machine without Transformer Engine needs.

Importing this costs nothing: Megatron is imported when a parser is built.
"""

# No `from __future__ import annotations`: Megatron's ArgumentGroupFactory reads the fields' types.
import argparse
import dataclasses
import difflib
import importlib.util
import typing
from dataclasses import dataclass

from ..recipe import DEFAULT_RECIPE
from .errors import UserError


def _flag(default, help: str, **argparse_kwargs):
    return dataclasses.field(default=default, metadata={"argparse_meta": {"help": help, **argparse_kwargs}})


@dataclass
class HybridQuantConfig:
    """Per-direction quantization of the model's linears."""

    hq_recipe: str | None = _flag(
        None,
        "Recipe: a shipped one by name (megatron-hybrid recipes lists them), the path of a .yaml or .json file, or "
        "module:function, a Python function from a role to a HybridQuantizer. "
        f"Default: {DEFAULT_RECIPE}, unless --spec is given.",
        metavar="NAME|PATH|MODULE:FUNCTION",
    )
    hq_explain: bool = _flag(False, "Print which formats and which backend every gemm gets, and stop.")
    hq_strict: bool = _flag(False, "Refuse emulated gemms and gathers in high precision instead of counting them.")
    hq_backward: typing.Literal["default", "high_precision", "dequantized"] | None = _flag(
        None, "Override the recipe's `backward`: what dgrad and wgrad read."
    )
    hq_switch_recipe: bool = _flag(False, "Go on with this recipe from a checkpoint of another one.")
    hq_metrics_file: str | None = _flag(
        None,
        "Append a JSON line for every logged iteration (iteration, loss, grad_norm, lr, ms) and for every "
        "evaluation (iteration, valid_loss or test_loss), in full precision.",
        metavar="PATH",
    )
    hq_full_log: bool = _flag(
        False,
        "Print all that Megatron says at the start: every argument, every parameter of its buckets, every dataset file. "
        "Without it the recipe and the progress are on one screen; warnings are there always.",
    )
    hq_stats_interval: int = _flag(
        0,
        "Every N iterations, measure what quantization does to each tensor (SNR, underflow, saturation, exponents) and "
        "write it to --hq-stats-file and TensorBoard; 0: never.",
        metavar="N",
    )
    hq_stats_file: str | None = _flag(
        None,
        "Where statistics go, as JSON lines, a file a rank. Default: hq_stats.jsonl in the folder of --hq-metrics-file, "
        "--tensorboard-dir or --save, the first that is given.",
        metavar="PATH",
    )
    hq_profile_step: int = _flag(
        0,
        "At this iteration, measure what its time goes to (casts, gemms, attention, collectives, the rest) and write "
        "hq_profile.json, a file a rank, where --hq-stats-file goes; `megatron-hybrid report` shows it. 0: never.",
        metavar="N",
    )
    hq_check_nan: bool = _flag(
        False,
        "Stop at the first NaN or Inf among the operands and results of the linears, naming module, tensor, direction, "
        "rank, step and microbatch, before Megatron's own check of losses and gradients, which must not be off. Slow on "
        "a GPU: it waits for every cast.",
    )
    hq_plain_layers: bool = _flag(
        False,
        "Norms, SwiGLU, rotary embedding and loss as Megatron has them in torch, also where the fused kernels could run.",
    )
    hq_offload_layers: int = _flag(
        0,
        "Keep what the first N layers of each pipeline stage save for backward in host memory: the same bits, less memory "
        "on the device, as many copies as bytes saved.",
        metavar="N",
    )
    hq_offload_least_bytes: int = _flag(
        1 << 20, "Tensors smaller than this stay on the device beside --hq-offload-layers.", metavar="BYTES"
    )
    hq_offload_optimizer: bool = _flag(
        False,
        "Keep Adam's moments in host memory and bring them to the device for its step: the same bits, 8 bytes a parameter "
        "(of a rank's share, with the distributed optimizer) less on the device. Megatron's --optimizer-cpu-offload "
        "computes the step on the CPU.",
    )
    hq_backward_in_main_thread: bool = _flag(
        False,
        "Run backward in the thread that calls it, not in autograd's own (torch.autograd.set_multithreading_enabled): the "
        "same bits, less host time where the host limits a step.",
    )
    hq_data_seed: int | None = _flag(
        None,
        "scripts/pretrain_gpt.py shuffles the data with this seed instead of --seed: runs that differ in their initial "
        "weights read the same tokens in the same order.",
        metavar="SEED",
    )
    hq_demo_disable_attention: bool = _flag(False, argparse.SUPPRESS)


def add_arguments(
    parser: argparse.ArgumentParser, *, on_cpu: bool, hybrid_models: bool = False
) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser and set the defaults right; mistakes raise `UserError`.

    hybrid_models: whether the script gives hybrid models their layers (`hybrid_model.configure`).
    """
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(HybridQuantConfig).build_group(parser, "hybrid quantization")
    parser.set_defaults(**_defaults(on_cpu), hq_hybrid_models=hybrid_models)
    parser.error = lambda message: _refuse(parser, message)
    return parser


def _defaults(on_cpu: bool) -> dict:
    """Defaults of Megatron's that fail where Transformer Engine or Apex is missing, each with what it does there."""
    defaults = {
        "eval_interval": 1000,  # None: a TypeError when the datasets' sizes are computed
        "enable_one_logger": _importable("one_logger"),  # a warning about a package that is not public
        "create_attention_mask_in_dataloader": False,  # causal attention needs none; a mask costs the fast kernels
        "no_persist_layer_norm": True,  # names a kernel of Apex
        "transformer_impl": "local",  # transformer_engine: builds its layers
        "megatron_fsdp_main_grads_dtype": "fp32",  # auto: the weights' dtype, unlike without Megatron-FSDP
    }
    if not _importable("transformer_engine"):
        defaults["apply_rope_fusion"] = False  # refused: "Please install TE"
    if not _importable("fused_weight_gradient_mlp_cuda"):
        defaults["gradient_accumulation_fusion"] = False  # refused by every ColumnParallelLinear
    if not _importable("scaled_masked_softmax_cuda"):
        defaults["masked_softmax_fusion"] = False  # ModuleNotFoundError in the first forward
    if on_cpu:
        defaults |= {
            "distributed_backend": "gloo",
            "bias_gelu_fusion": False,  # these three need a compiler that targets a GPU
            "bias_swiglu_fusion": False,
            "bias_dropout_fusion": False,
            "num_workers": 0,  # loader processes only compete for the few cores
        }
    return defaults


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _refuse(parser: argparse.ArgumentParser, message: str):
    """argparse's own answer is its usage, several hundred lines here, on every rank."""
    hint = ""
    if message.startswith("unrecognized arguments:"):
        known = list(parser._option_string_actions)
        for word in message.split()[2:]:
            flag = word.partition("=")[0]
            if flag.startswith("--") and (close := difflib.get_close_matches(flag, known, n=1)):
                hint += f"; {flag}: did you mean {close[0]}?"
    raise UserError(f"{message}{hint}")


def help_text(prog: str) -> str:
    """Our flags alone, printed without importing Megatron."""
    lines = [
        f"usage: torchrun --nproc-per-node N {prog} [Megatron's flags] [our flags]",
        "",
        "Train a GPT with Megatron-Core, its linears quantized per direction as a recipe says. Without a GPU it",
        "trains on the CPU. Every flag of Megatron's pretrain_gpt.py works; --help-all lists them.",
        "",
        f"{HybridQuantConfig.__doc__}",
    ]
    for field in dataclasses.fields(HybridQuantConfig):
        meta = field.metadata["argparse_meta"]
        if meta["help"] is argparse.SUPPRESS:
            continue
        flag = "--" + field.name.replace("_", "-")
        choices = typing.get_args(typing.get_args(field.type)[0]) if typing.get_args(field.type) else ()
        value = meta.get("metavar") or ("{" + ",".join(choices) + "}" if choices else "")
        lines += ["", f"  {flag} {value}".rstrip(), *_wrap(meta["help"])]
    return "\n".join([*lines, ""])


def _wrap(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
