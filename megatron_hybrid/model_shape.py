"""Sizes of a model's linears on one rank, from Megatron's flags alone: no model is built, nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from .formats import COLUMNWISE, DIRECTIONS, ROWWISE
from .plan import GRAD_OUTPUT, INPUT, ORIGINAL, WEIGHT, GemmPlan
from .sharding import AS_IS, HIGH_PRECISION, PAYLOAD, ROW_PAYLOAD
from .storage import QuantizedStorage
from .storage_layout import row_dims
from .whole_file import has_no_end

_DTYPE = torch.bfloat16
SHARDED_WEIGHTS = "optim_grads_params"  # of Megatron-FSDP's --data-parallel-sharding-strategy, and its default
_GATED_MULTIPLE = 64  # Megatron rounds a gated MLP's default width up to it
_MOST_EXPERTS = 1_000_000  # of all layers together: a plan is made for each
_MAY_BE_ZERO = ("num_experts", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")


class ShapeError(ValueError):
    """A model file that does not say what a size needs; names the file and the flag."""


@dataclass(frozen=True)
class LinearShape:
    """One linear on one rank in one microbatch: `rows` (M) tokens reach its gemms, `out_features` N, `in_features` K.

    gathers, gathered: how many ranks' rows of which operand are put together before its gemms; 1 where none are.
    experts: how many linears of this size a grouped one is on the rank; sizes are of one, bytes of all.
    sharded_weight: the weight's memory is there in a pass alone, and so is what is cast from it.
    """

    rows: int
    out_features: int
    in_features: int
    gathers: int = 1
    gathered: str = INPUT
    experts: int = 1
    sharded_weight: bool = False

    def own_rows(self, operand: str) -> int:
        """Tokens of an operand on this rank, before a gather."""
        return self.rows // (self.gathers if operand == self.gathered else 1)

    def size(self, operand: str) -> tuple[int, int]:
        """(M, K) of this rank's part."""
        if operand == WEIGHT:
            return self.out_features, self.in_features
        return self.own_rows(operand), self.in_features if operand == INPUT else self.out_features

    def _hp_bytes(self, operand: str) -> int:
        return math.prod(self.size(operand)) * _DTYPE.itemsize * self.experts

    @property
    def hp_weight_bytes(self) -> int:
        """The parameter in bf16."""
        return self._hp_bytes(WEIGHT)

    @property
    def hp_input_bytes(self) -> int:
        """What a bf16 linear keeps of its input: this rank's share."""
        return self._hp_bytes(INPUT)

    @property
    def hp_gathered_bytes(self) -> int:
        """What this rank of a bf16 linear receives in forward and backward: an input twice, a gradient once."""
        return self._hp_bytes(self.gathered) * (self.gathers - 1) * (2 if self.gathered == INPUT else 1)

    def gathered_bytes(self, plan: GemmPlan, direction: str) -> int:
        """What this rank receives of the gathered operand's direction from the others."""
        operand = plan.gathered
        if operand is None:
            return 0
        rows, gradient = self.own_rows(operand), operand == GRAD_OUTPUT
        way = plan.gather(direction, rows)
        if way == ROW_PAYLOAD:
            if gradient:
                return 0  # it is there for dgrad
            way, direction = PAYLOAD, ROWWISE
        if way == PAYLOAD:
            made = self._payload(plan, operand, direction)
            moved = sum(made.buffers()[name].nbytes for name, dim in row_dims(made).items() if dim is not None)
            return moved * (self.gathers - 1)
        if gradient and direction == COLUMNWISE and plan.gather(ROWWISE, rows) in (AS_IS, HIGH_PRECISION):
            return 0  # the tensor travels once
        return self._hp_bytes(operand) * (self.gathers - 1)

    def saved_bytes(self, plan: GemmPlan, operand: str) -> int:
        """What forward keeps of an operand for backward, beside the parameter itself."""
        kept = plan.saved[operand]
        if operand == WEIGHT and self.sharded_weight:
            return 0
        if operand == INPUT and plan.gathered == INPUT:
            kept = plan.kept_of_gathered(self.own_rows(INPUT))
        if kept == ORIGINAL:
            return self.hp_input_bytes if operand == INPUT else 0
        return self.payload_bytes(plan, operand, kept)

    def held_weight_bytes(self, plan: GemmPlan) -> int:
        """What is held through a step of the weight's casts."""
        return 0 if self.sharded_weight else sum(self.payload_bytes(plan, WEIGHT, d) for d in DIRECTIONS)

    def payload_bytes(self, plan: GemmPlan, operand: str, direction: str) -> int:
        """Codes and scales of one direction of this rank's part of an operand; 0 where it stays in high precision."""
        fmt = getattr(plan.quantizers[operand], direction)
        return self._payload(plan, operand, direction).nbytes * self.experts if fmt.is_quantized else 0

    def _payload(self, plan: GemmPlan, operand: str, direction: str) -> QuantizedStorage:
        fmt = getattr(plan.quantizers[operand], direction)
        transposed = direction == COLUMNWISE and plan.transposed(operand)
        return QuantizedStorage.empty(fmt, direction, self.size(operand), _DTYPE, "meta", transposed=transposed)


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
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str = SHARDED_WEIGHTS

    @property
    def num_moe_experts(self) -> int | None:
        """The TransformerConfig's name of ``--num-experts``."""
        return self.num_experts

    @classmethod
    def of(cls, args: Mapping, where: str = "the model") -> ModelShape:
        """From Megatron's arguments (`vars(args)`), or flags spelled like them; its defaults fill what is not there.

        Raises `ShapeError` naming a size that is missing, is no number, or that ranks or heads do not divide.
        """
        given = {name: args[name] for f in fields(cls) if args.get(name := f.name) is not None}
        counts = [f.name for f in fields(cls) if f.type in ("int", "int | None")]
        more = {name: args[name] for name in ("vocab_size", "make_vocab_size_divisible_by") if args.get(name) is not None}
        for name in (*_NEEDED, *more, *(name for name in counts if name in given)):
            _check_count(name, (given | more).get(name), where)
        hidden, heads = given["hidden_size"], given["num_attention_heads"]
        if "kv_channels" not in given and hidden % heads:
            raise ShapeError(f"{where}: --hidden-size {hidden} is not a multiple of --num-attention-heads {heads}")
        given.setdefault("kv_channels", hidden // heads)
        if "ffn_hidden_size" not in given:
            given["ffn_hidden_size"] = 4 * hidden
            if args.get("swiglu"):
                given["ffn_hidden_size"] = int(4 * hidden * 2 / 3 / _GATED_MULTIPLE) * _GATED_MULTIPLE
        if not args.get("group_query_attention"):
            given["num_query_groups"] = heads
        given.setdefault("num_query_groups", heads)
        given.setdefault("moe_ffn_hidden_size", given["ffn_hidden_size"])
        given.setdefault("expert_tensor_parallel_size", given.get("tensor_model_parallel_size", 1))
        if "padded_vocab_size" not in given and args.get("vocab_size"):
            multiple = (args.get("make_vocab_size_divisible_by") or 128) * given.get("tensor_model_parallel_size", 1)
            given["padded_vocab_size"] = -(-args["vocab_size"] // multiple) * multiple
        made = cls(**given)
        made._check_ranks(where)
        return made

    def _check_ranks(self, where: str) -> None:
        """Raise `ShapeError` for sizes that the ranks which split them do not divide, and for more experts than are planned."""
        tp, etp = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        for name, by, ranks in (
            ("num_attention_heads", "tensor_model_parallel_size", tp),
            ("ffn_hidden_size", "tensor_model_parallel_size", tp),
            ("moe_ffn_hidden_size", "expert_tensor_parallel_size", etp if self.num_experts else 1),
            ("num_experts", "expert_model_parallel_size", self.expert_model_parallel_size),
        ):
            if (size := getattr(self, name) or 0) % ranks:
                raise ShapeError(f"{where}: {flag_of(name)} {size} is not a multiple of {flag_of(by)} {ranks}")
        if (count := self.num_layers * (self.num_experts or 1)) > _MOST_EXPERTS:
            raise ShapeError(f"{where}: --num-layers and --num-experts make {count} parts; at most {_MOST_EXPERTS} are planned")

    @classmethod
    def load(cls, path: str | Path) -> ModelShape:
        """From a file of flags such as configs/models/gpt_demo.yaml. Raises `ShapeError`."""
        import yaml

        path = Path(path)
        if has_no_end(path):
            raise ShapeError(f"{path}: not a regular file")
        try:
            flags = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ShapeError(f"{path}: {error.strerror or error}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ShapeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(flags, dict):
            raise ShapeError(
                f"{path}: expected a mapping from Megatron's flags to values, found {type(flags).__name__}"
            )
        return cls.of({str(name).lstrip("-").replace("-", "_"): value for name, value in flags.items()}, str(path))

    @property
    def rows_of_a_rank(self) -> int:
        """Tokens of a microbatch that a sequence-parallel rank has."""
        rows = self.seq_length * self.micro_batch_size // self.context_parallel_size
        return rows // (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    def ranks(self, role) -> int:
        """How many ranks split the linear of a `ModuleRole`."""
        return self.tensor_model_parallel_size if role.expert is None else self.expert_tensor_parallel_size

    @property
    def shards_weights(self) -> bool:
        """Whether the memory of weights comes and goes, and nothing that is cast from them is kept."""
        return self.use_megatron_fsdp and self.data_parallel_sharding_strategy == SHARDED_WEIGHTS

    def linear(self, role) -> LinearShape | None:
        """Sizes of the linear of a `ModuleRole`, by the last part of its name; None where they are not known."""
        found = self._linear(role)
        return found and replace(found, sharded_weight=self.shards_weights)

    def _linear(self, role) -> LinearShape | None:
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
            return LinearShape(rows, self.hidden_size, row[leaf] // tp, gathers, GRAD_OUTPUT)
        return None

    def _expert(self, leaf: str, rows: int) -> LinearShape | None:
        """One expert, whose tokens are counted as if all experts had as many."""
        ffn = self.moe_ffn_hidden_size or self.ffn_hidden_size
        etp = self.expert_tensor_parallel_size
        sent = rows * etp // self.tensor_model_parallel_size * self.moe_router_topk
        tokens = -(-sent // (self.num_experts or 1)) * self.expert_model_parallel_size
        if leaf == "linear_fc1":
            return LinearShape(tokens, ffn * (2 if self.swiglu else 1) // etp, self.hidden_size)
        return LinearShape(tokens, self.hidden_size, ffn // etp, gathered=GRAD_OUTPUT) if leaf == "linear_fc2" else None


def _check_count(name: str, value, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ShapeError(f"{where}: {flag_of(name)} must be a whole number, found {value!r}")
    if value < (least := 0 if name in _MAY_BE_ZERO else 1):
        raise ShapeError(f"{where}: {flag_of(name)} must be at least {least}, found {value}")


def flag_of(name: str) -> str:
    """An attribute of Megatron's arguments as its flag."""
    return f"--{name.replace('_', '-')}"
