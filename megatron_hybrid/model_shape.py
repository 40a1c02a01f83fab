"""Sizes of a model's linears on one rank, from Megatron's flags alone: no model is built, nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from .plan import INPUT, ORIGINAL, WEIGHT, GemmPlan
from .storage import QuantizedStorage

_DTYPE = torch.bfloat16
_GATED_MULTIPLE = 64  # Megatron rounds a gated MLP's default width up to it


class ShapeError(ValueError):
    """A model file that does not say what a size needs; names the file and the flag."""


@dataclass(frozen=True)
class LinearShape:
    """One linear on one rank in one microbatch: `rows` (M) tokens reach its gemms, `out_features` N, `in_features` K.

    gathers: ranks whose shares of the input are gathered, 1 where none are.
    """

    rows: int
    out_features: int
    in_features: int
    gathers: int = 1

    def size(self, operand: str) -> tuple[int, int]:
        return (self.out_features, self.in_features) if operand == WEIGHT else (self.rows, self.in_features)

    @property
    def hp_input_bytes(self) -> int:
        """What a bf16 linear keeps of its input: this rank's share."""
        return self.rows * self.in_features * _DTYPE.itemsize // self.gathers

    @property
    def gathered_bytes(self) -> int:
        """What this rank receives of the input's other shares when they travel in bf16."""
        return self.hp_input_bytes * (self.gathers - 1)

    def saved_bytes(self, plan: GemmPlan, operand: str) -> int:
        """What forward keeps of an operand for backward, beside the parameter itself."""
        if operand == INPUT and (self.gathers > 1 or plan.saved[INPUT] == ORIGINAL):
            return self.hp_input_bytes
        if plan.saved[operand] == ORIGINAL:
            return 0
        return self.payload_bytes(plan, operand, plan.saved[operand])

    def payload_bytes(self, plan: GemmPlan, operand: str, direction: str) -> int:
        """Codes and scales of one direction of an operand; 0 where it stays in high precision."""
        fmt = getattr(plan.quantizers[operand], direction)
        if not fmt.is_quantized:
            return 0
        transposed = direction == "columnwise" and plan.transposed(operand)
        made = QuantizedStorage.empty(fmt, direction, self.size(operand), _DTYPE, "meta", transposed=transposed)
        return made.nbytes


@dataclass(frozen=True)
class ModelShape:
    """A GPT's sizes under the names of Megatron's arguments, and how it is split over ranks."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    kv_channels: int
    num_query_groups: int
    seq_length: int = 1
    micro_batch_size: int = 1
    padded_vocab_size: int | None = None
    swiglu: bool = False
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_layer_freq: object = 1
    moe_grouped_gemm: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1

    @property
    def num_moe_experts(self) -> int | None:
        """The TransformerConfig's name of ``--num-experts``."""
        return self.num_experts

    @classmethod
    def of(cls, args: Mapping, where: str = "the model") -> ModelShape:
        """From Megatron's arguments (`vars(args)`), or flags spelled like them; its defaults fill what is not there.

        Raises `ShapeError` naming a size that is missing or is not a number.
        """
        given = {name: args[name] for f in fields(cls) if args.get(name := f.name) is not None}
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            if not isinstance(given.get(name), int):
                raise ShapeError(f"{where}: {_flag(name)} must be a whole number, found {given.get(name)!r}")
        hidden, heads = given["hidden_size"], given["num_attention_heads"]
        given.setdefault("kv_channels", hidden // heads)
        if "ffn_hidden_size" not in given:
            given["ffn_hidden_size"] = 4 * hidden
            if args.get("swiglu"):
                given["ffn_hidden_size"] = int(4 * hidden * 2 / 3 / _GATED_MULTIPLE) * _GATED_MULTIPLE
        if not args.get("group_query_attention"):
            given["num_query_groups"] = heads
        given.setdefault("num_query_groups", heads)
        given.setdefault("moe_ffn_hidden_size", given["ffn_hidden_size"])
        if "padded_vocab_size" not in given and args.get("vocab_size"):
            multiple = int(args.get("make_vocab_size_divisible_by") or 128) * given.get("tensor_model_parallel_size", 1)
            given["padded_vocab_size"] = -(-int(args["vocab_size"]) // multiple) * multiple
        return cls(**given)

    @classmethod
    def load(cls, path: str | Path) -> ModelShape:
        """From a file of flags such as configs/models/gpt_demo.yaml. Raises `ShapeError`."""
        import yaml

        path = Path(path)
        try:
            flags = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ShapeError(f"{path}: {error.strerror or error}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ShapeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(flags, dict):
            raise ShapeError(f"{path}: expected a mapping from Megatron's flags to values, found {type(flags).__name__}")
        return cls.of({str(name).lstrip("-").replace("-", "_"): value for name, value in flags.items()}, str(path))

    def linear(self, role) -> LinearShape | None:
        """Sizes of the linear of a `ModuleRole`, by the last part of its name; None where they are not known."""
        tp = self.tensor_model_parallel_size
        leaf = role.name.rpartition(".")[2]
        rows = self.seq_length * self.micro_batch_size // self.context_parallel_size
        gathers = tp if self.sequence_parallel else 1
        if role.expert is not None or ".experts" in role.name:
            return self._expert(leaf, rows)
        ffn = self.ffn_hidden_size
        if "shared_experts" in role.name and self.moe_shared_expert_intermediate_size:
            ffn = self.moe_shared_expert_intermediate_size
        attention = self.num_attention_heads * self.kv_channels
        column = {
            "linear_qkv": attention + 2 * self.num_query_groups * self.kv_channels,
            "linear_fc1": ffn * (2 if self.swiglu else 1),
            "output_layer": self.padded_vocab_size,
        }
        row = {"linear_proj": attention, "linear_fc2": ffn}
        if column.get(leaf):
            return LinearShape(rows, column[leaf] // tp, self.hidden_size, gathers)
        if leaf in row:
            return LinearShape(rows, self.hidden_size, row[leaf] // tp)
        return None

    def _expert(self, leaf: str, rows: int) -> LinearShape | None:
        """One expert, whose tokens are counted as if all experts had as many."""
        ffn = self.moe_ffn_hidden_size or self.ffn_hidden_size
        tokens = -(-rows * self.moe_router_topk // (self.num_experts or 1)) * self.expert_model_parallel_size
        if leaf == "linear_fc1":
            return LinearShape(tokens, ffn * (2 if self.swiglu else 1), self.hidden_size)
        return LinearShape(tokens, self.hidden_size, ffn) if leaf == "linear_fc2" else None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
