"""The models that both sides know: what Megatron's arguments say and what a Hugging Face config says, as one thing.

=========  =====================================================================
Llama      dense
Qwen2      dense, biases of query, key and value
Qwen3      dense, query/key norm
Qwen2-MoE  experts beside a gated shared one, with or without those biases
Qwen3-MoE  experts, query/key norm
=========  =====================================================================

Each with plain rotary embeddings or those scaled as Llama 3.1 does (`llama3`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..mcore.modules import layer_pattern


class ConversionError(ValueError):
    """A model that the other side has no name for; says which argument and why."""


LLAMA, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE = "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"
_CLASSES = {
    LLAMA: "LlamaForCausalLM", QWEN2: "Qwen2ForCausalLM", QWEN3: "Qwen3ForCausalLM",
    QWEN2_MOE: "Qwen2MoeForCausalLM", QWEN3_MOE: "Qwen3MoeForCausalLM",
}  # fmt: skip
_WITH_EXPERTS = (QWEN2_MOE, QWEN3_MOE)
# what Megatron's --use-rope-scaling has beside a factor
_ROPE_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# Megatron's arguments with the values that convert; others are refused
_REQUIRED = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0, None),
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "multi_latent_attention": (False, None),
    "mtp_num_layers": (None, 0),
    "window_size": (None,),
    "qk_l2_norm": (False, None),
    "attention_output_gate": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "hybrid_layer_pattern": (None,),
    "no_rope_freq": (None,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0, None),
}
_REQUIRED_OF_EXPERTS = {
    "moe_router_score_function": ("softmax", None),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_num_groups": (None,),
    "moe_router_topk_scaling_factor": (None,),
    "moe_apply_probs_on_input": (False, None),
    "moe_latent_size": (None,),
}


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and choices.

    moe_layers  whether each layer has experts
    vocab       rows of the embedding
    shared_ffn  width of the shared expert, which a gate scales; 0 where there is none
    rope_factor of rotary scaling as in Llama 3.1, None without it
    """

    num_layers: int
    hidden: int
    heads: int
    groups: int
    head_size: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_base: float
    dtype: torch.dtype
    tied: bool = False
    qk_norm: bool = False
    moe_layers: tuple[bool, ...] = ()
    experts: int = 0
    expert_ffn: int = 0
    topk: int = 0
    shared_ffn: int = 0
    qkv_bias: bool = False
    rope_factor: float | None = None
    renormalize: bool = True  # router probabilities of the chosen experts add up to one
    one_centered_norm: bool = False  # Megatron keeps norm weights minus one

    @property
    def kind(self) -> str:
        if self.experts:
            return QWEN3_MOE if self.qk_norm else QWEN2_MOE
        if self.qk_norm:
            return QWEN3
        return QWEN2 if self.qkv_bias else LLAMA

    @property
    def is_homogeneous(self) -> bool:
        """Whether Megatron stores all layers' tensors stacked."""
        return len(set(self.moe_layers)) <= 1

    # ---- Megatron

    @classmethod
    def from_args(cls, args: Mapping, where: str) -> ModelSpec:
        """From the arguments of a run. Raises `ConversionError` naming what does not convert."""
        experts = args.get("num_experts") or 0
        for name, allowed in {**_REQUIRED, **(_REQUIRED_OF_EXPERTS if experts else {})}.items():
            if args.get(name, allowed[0]) not in allowed:
                raise ConversionError(
                    f"{where}: trained with {name} = {args[name]!r}; only {' or '.join(map(repr, allowed))} converts"
                )
        qk_norm, qkv_bias = bool(args.get("qk_layernorm")), bool(args.get("add_qkv_bias"))
        shared = (args.get("moe_shared_expert_intermediate_size") or 0) if experts else 0
        _check_shape(where, qk_norm, qkv_bias, bool(experts), bool(shared), bool(args.get("moe_shared_expert_gate")))
        heads, hidden, layers = args["num_attention_heads"], args["hidden_size"], args["num_layers"]
        return cls(
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            groups=args["num_query_groups"] if args.get("group_query_attention") else heads,
            head_size=args.get("kv_channels") or hidden // heads,
            ffn=args["ffn_hidden_size"],
            vocab=args["padded_vocab_size"],
            max_positions=args.get("max_position_embeddings") or args["seq_length"],
            # the second name of two, here and of the centred norm, is that of older Megatrons
            norm_eps=args.get("layernorm_epsilon", args.get("norm_epsilon", 1e-5)),
            rope_base=float(args.get("rotary_base", 10000)),
            dtype=args.get("params_dtype", torch.bfloat16),
            tied=not args.get("untie_embeddings_and_output_weights", False),
            qk_norm=qk_norm,
            moe_layers=tuple(layer_pattern(layers, args.get("moe_layer_freq", 1))) if experts else (False,) * layers,
            experts=experts,
            expert_ffn=(args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"]) if experts else 0,
            topk=args.get("moe_router_topk", 2) if experts else 0,
            shared_ffn=shared,
            qkv_bias=qkv_bias,
            rope_factor=float(args.get("rope_scaling_factor", 8.0)) if args.get("use_rope_scaling") else None,
            renormalize=not args.get("moe_router_pre_softmax", False),
            one_centered_norm=bool(args.get("layernorm_zero_centered_gamma") or args.get("apply_layernorm_1p")),
        )

    def to_args(self) -> dict:
        """Megatron's arguments of this model, without those of a run."""
        args = {
            "num_layers": self.num_layers, "hidden_size": self.hidden, "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.heads, "group_query_attention": self.groups != self.heads,
            "num_query_groups": self.groups, "kv_channels": self.head_size, "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_eps, "swiglu": True, "add_bias_linear": False,
            "position_embedding_type": "rope", "rotary_base": int(self.rope_base),
            "max_position_embeddings": self.max_positions, "padded_vocab_size": self.vocab,
            "untie_embeddings_and_output_weights": not self.tied, "qk_layernorm": self.qk_norm,
            "add_qkv_bias": self.qkv_bias, "use_rope_scaling": self.rope_factor is not None,
            "params_dtype": self.dtype, "bf16": self.dtype == torch.bfloat16, "fp16": self.dtype == torch.float16,
        }  # fmt: skip
        if self.rope_factor is not None:
            args["rope_scaling_factor"] = self.rope_factor
        if self.shared_ffn:
            args |= {"moe_shared_expert_intermediate_size": self.shared_ffn, "moe_shared_expert_gate": True}
        if self.experts:
            freq = 1 if all(self.moe_layers) else list(map(int, self.moe_layers))
            args |= {
                "num_experts": self.experts, "moe_ffn_hidden_size": self.expert_ffn, "moe_router_topk": self.topk,
                "moe_router_pre_softmax": not self.renormalize, "moe_layer_freq": freq, "moe_grouped_gemm": True,
            }  # fmt: skip
        return args

    def flags(self) -> list[str]:
        """The command-line flags that build this model in Megatron."""
        words = [
            *("--num-layers", self.num_layers, "--hidden-size", self.hidden, "--ffn-hidden-size", self.ffn),
            *("--num-attention-heads", self.heads, "--kv-channels", self.head_size, "--normalization", "RMSNorm"),
            *(
                "--norm-epsilon",
                self.norm_eps,
                "--swiglu",
                "--disable-bias-linear",
                "--position-embedding-type",
                "rope",
            ),
            *("--rotary-base", int(self.rope_base), "--max-position-embeddings", self.max_positions),
        ]
        if self.groups != self.heads:
            words += ["--group-query-attention", "--num-query-groups", self.groups]
        words += [] if self.tied else ["--untie-embeddings-and-output-weights"]
        words += ["--qk-layernorm"] if self.qk_norm else []
        words += ["--add-qkv-bias"] if self.qkv_bias else []
        words += [] if self.rope_factor is None else ["--use-rope-scaling", "--rope-scaling-factor", self.rope_factor]
        if self.shared_ffn:
            words += ["--moe-shared-expert-intermediate-size", self.shared_ffn, "--moe-shared-expert-gate"]
        words += {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}.get(self.dtype, [])
        if self.experts:
            words += ["--num-experts", self.experts, "--moe-ffn-hidden-size", self.expert_ffn, "--moe-grouped-gemm"]
            words += ["--moe-router-topk", self.topk, *([] if self.renormalize else ["--moe-router-pre-softmax"])]
            words += ["--moe-token-dispatcher-type", "alltoall"]
            if not all(self.moe_layers):
                words += ["--moe-layer-freq", str(list(map(int, self.moe_layers))).replace(" ", "")]
        return [str(word) for word in words]

    # ---- Hugging Face

    def hf_config(self) -> dict:
        """config.json."""
        config = {
            "architectures": [_CLASSES[self.kind]], "model_type": self.kind, "hidden_size": self.hidden,
            "intermediate_size": self.ffn, "num_hidden_layers": self.num_layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups, "head_dim": self.head_size, "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions, "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_base, "rope_scaling": self._rope_scaling(), "hidden_act": "silu",
            "attention_dropout": 0.0, "tie_word_embeddings": self.tied,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }  # fmt: skip
        if self.kind == LLAMA:
            config["mlp_bias"] = False
        if self.kind in (LLAMA, QWEN3, QWEN3_MOE):
            config["attention_bias"] = False
        if self.kind == QWEN2_MOE:
            config |= {"qkv_bias": self.qkv_bias, "shared_expert_intermediate_size": self.shared_ffn}
        if self.experts:
            config |= {
                "num_experts": self.experts, "num_experts_per_tok": self.topk, "decoder_sparse_step": 1,
                "moe_intermediate_size": self.expert_ffn, "norm_topk_prob": self.renormalize,
                "mlp_only_layers": [i for i, moe in enumerate(self.moe_layers) if not moe],
            }  # fmt: skip
        return config

    def _rope_scaling(self) -> dict | None:
        if self.rope_factor is None:
            return None
        return {"rope_type": "llama3", "factor": self.rope_factor, **_ROPE_SCALING}

    @classmethod
    def from_hf(cls, config: Mapping, where: str) -> ModelSpec:
        """From config.json. Raises `ConversionError` naming what Megatron would need to have."""
        if not isinstance(config, Mapping):
            raise ConversionError(f"{where}: an object is expected, found {type(config).__name__}")
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in _CLASSES:
            raise ConversionError(f"{where}: model_type {kind!r}; these convert: {', '.join(_CLASSES)}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ConversionError(f"{where}: rope_scaling = {rope!r} does not convert")
        size, number = functools.partial(_number, config, where, int), functools.partial(_number, config, where, float)
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        refused = {
            "attention_bias": config.get("attention_bias"),
            "mlp_bias": config.get("mlp_bias"),
            "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
            "rope_scaling": rope_type not in ("default", "llama3") or not _fits(rope, rope_type),
            "use_sliding_window": config.get("use_sliding_window"),
        }
        for name, is_refused in refused.items():
            if is_refused:
                found = rope if name == "rope_scaling" else config.get(name)
                raise ConversionError(f"{where}: {name} = {found!r} does not convert")
        layers, experts = size("num_hidden_layers"), size("num_experts", 0) if kind in _WITH_EXPERTS else 0
        heads, dense = size("num_attention_heads"), config.get("mlp_only_layers") or ()
        if not isinstance(dense, Sequence):
            raise ConversionError(f"{where}: mlp_only_layers is a list of layers, found {dense!r}")
        every = size("decoder_sparse_step", 1)
        sparse = tuple(bool(experts) and i not in dense and (i + 1) % every == 0 for i in range(layers))
        dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConversionError(f"{where}: torch_dtype = {config.get('dtype') or config.get('torch_dtype')!r}: no such dtype")
        return cls(
            num_layers=layers,
            hidden=size("hidden_size"),
            heads=heads,
            groups=size("num_key_value_heads", heads),
            head_size=size("head_dim", size("hidden_size") // heads),
            ffn=size("intermediate_size"),
            vocab=size("vocab_size"),
            max_positions=size("max_position_embeddings"),
            norm_eps=number("rms_norm_eps"),
            rope_base=_number(rope, where, float, "rope_theta", number("rope_theta", 10000.0)),
            dtype=dtype,
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind in (QWEN3, QWEN3_MOE),
            moe_layers=sparse,
            experts=experts,
            expert_ffn=size("moe_intermediate_size", 0) if experts else 0,
            topk=size("num_experts_per_tok", 0) if experts else 0,
            shared_ffn=size("shared_expert_intermediate_size") if kind == QWEN2_MOE else 0,
            qkv_bias=kind == QWEN2 or (kind == QWEN2_MOE and config.get("qkv_bias", True)),
            rope_factor=_number(rope, where, float, "factor") if rope_type == "llama3" else None,
            renormalize=bool(config.get("norm_topk_prob", False)) if experts else True,
        )


def _number(config: Mapping, where: str, kind: type, name: str, default=None):
    """A number above zero of config.json, the default where it has none. Raises `ConversionError`."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 < value < math.inf:
        whole = "a whole number" if kind is int else "a number"
        raise ConversionError(f"{where}: {name} must be {whole} above zero, found {value!r}")
    return kind(value)


def _fits(rope: Mapping, rope_type: str) -> bool:
    """Whether Megatron's scaling has these numbers."""
    return rope_type == "default" or all(rope.get(name) == value for name, value in _ROPE_SCALING.items())


def _check_shape(where: str, qk_norm: bool, qkv_bias: bool, experts: bool, shared: bool, gate: bool) -> None:
    """Raise `ConversionError` for a combination of parts that no model of `_CLASSES` has."""
    if qk_norm and qkv_bias:
        raise ConversionError(f"{where}: --qk-layernorm beside --add-qkv-bias; no model that converts has both")
    if qk_norm and shared:
        raise ConversionError(f"{where}: --qk-layernorm beside a shared expert; no model that converts has both")
    if shared and not gate:
        raise ConversionError(
            f"{where}: a shared expert without --moe-shared-expert-gate; the Qwen2-MoE shape has a gate"
        )
    if experts and not qk_norm and not shared:
        raise ConversionError(
            f"{where}: experts without --qk-layernorm, which the Qwen3-MoE shape has, and without "
            "--moe-shared-expert-intermediate-size, which the Qwen2-MoE shape has"
        )
