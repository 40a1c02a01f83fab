"""The models that both sides know: what Megatron's arguments say and what a Hugging Face config says, as one thing.

========================  ==============================================
Llama                     dense, no query/key norm
Qwen3                     dense, query/key norm
Qwen3-MoE                 experts, query/key norm
========================  ==============================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..mcore.modules import layer_pattern


class ConversionError(ValueError):
    """A model that the other side has no name for; says which argument and why."""


LLAMA, QWEN3, QWEN3_MOE = "llama", "qwen3", "qwen3_moe"
_CLASSES = {LLAMA: "LlamaForCausalLM", QWEN3: "Qwen3ForCausalLM", QWEN3_MOE: "Qwen3MoeForCausalLM"}

# Megatron's arguments with the values that convert; others are refused
_REQUIRED = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False, None),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0, None),
    "rotary_interleaved": (False, None),
    "use_rope_scaling": (False, None),
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
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_router_score_function": ("softmax", None),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_num_groups": (None,),
    "moe_router_topk_scaling_factor": (None,),
    "moe_apply_probs_on_input": (False, None),
    "moe_latent_size": (None,),
}


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and choices. `moe_layers`: whether each layer has experts. `vocab`: rows of the embedding."""

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
    renormalize: bool = True  # router probabilities of the chosen experts add up to one
    one_centered_norm: bool = False  # Megatron keeps norm weights minus one

    @property
    def kind(self) -> str:
        if self.experts:
            return QWEN3_MOE
        return QWEN3 if self.qk_norm else LLAMA

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
        qk_norm = bool(args.get("qk_layernorm"))
        if experts and not qk_norm:
            raise ConversionError(
                f"{where}: experts without --qk-layernorm; the Qwen3-MoE shape has query and key norms"
            )
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
            norm_eps=args.get("norm_epsilon", 1e-5),
            rope_base=float(args.get("rotary_base", 10000)),
            dtype=args.get("params_dtype", torch.bfloat16),
            tied=not args.get("untie_embeddings_and_output_weights", False),
            qk_norm=qk_norm,
            moe_layers=tuple(layer_pattern(layers, args.get("moe_layer_freq", 1))) if experts else (False,) * layers,
            experts=experts,
            expert_ffn=(args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"]) if experts else 0,
            topk=args.get("moe_router_topk", 2) if experts else 0,
            renormalize=not args.get("moe_router_pre_softmax", False),
            one_centered_norm=bool(args.get("apply_layernorm_1p")),
        )

    def to_args(self) -> dict:
        """Megatron's arguments of this model, without those of a run."""
        args = {
            "num_layers": self.num_layers, "hidden_size": self.hidden, "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.heads, "group_query_attention": self.groups != self.heads,
            "num_query_groups": self.groups, "kv_channels": self.head_size, "normalization": "RMSNorm",
            "norm_epsilon": self.norm_eps, "swiglu": True, "add_bias_linear": False,
            "position_embedding_type": "rope", "rotary_base": int(self.rope_base),
            "max_position_embeddings": self.max_positions, "padded_vocab_size": self.vocab,
            "untie_embeddings_and_output_weights": not self.tied, "qk_layernorm": self.qk_norm,
            "params_dtype": self.dtype, "bf16": self.dtype == torch.bfloat16, "fp16": self.dtype == torch.float16,
        }  # fmt: skip
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
            "rope_theta": self.rope_base, "rope_scaling": None, "hidden_act": "silu", "attention_bias": False,
            "attention_dropout": 0.0, "tie_word_embeddings": self.tied,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }  # fmt: skip
        if self.kind == LLAMA:
            config["mlp_bias"] = False
        if self.experts:
            config |= {
                "num_experts": self.experts, "num_experts_per_tok": self.topk, "decoder_sparse_step": 1,
                "moe_intermediate_size": self.expert_ffn, "norm_topk_prob": self.renormalize,
                "mlp_only_layers": [i for i, moe in enumerate(self.moe_layers) if not moe],
            }  # fmt: skip
        return config

    @classmethod
    def from_hf(cls, config: Mapping, where: str) -> ModelSpec:
        """From config.json. Raises `ConversionError` naming what Megatron would need to have."""
        kind = config.get("model_type")
        if kind not in _CLASSES:
            raise ConversionError(f"{where}: model_type {kind!r}; these convert: {', '.join(_CLASSES)}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        refused = {
            "attention_bias": config.get("attention_bias"),
            "mlp_bias": config.get("mlp_bias"),
            "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
            "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
            "use_sliding_window": config.get("use_sliding_window"),
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise ConversionError(f"{where}: {name} = {config.get(name)!r} does not convert")
        layers, experts = config["num_hidden_layers"], config.get("num_experts", 0) if kind == QWEN3_MOE else 0
        heads, dense = config["num_attention_heads"], set(config.get("mlp_only_layers") or ())
        every = config.get("decoder_sparse_step", 1)
        sparse = tuple(bool(experts) and i not in dense and (i + 1) % every == 0 for i in range(layers))
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        return cls(
            num_layers=layers,
            hidden=config["hidden_size"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            dtype=getattr(torch, str(dtype).removeprefix("torch.")),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind != LLAMA,
            moe_layers=sparse,
            experts=experts,
            expert_ffn=config.get("moe_intermediate_size", 0) if experts else 0,
            topk=config.get("num_experts_per_tok", 0) if experts else 0,
            renormalize=bool(config.get("norm_topk_prob", False)) if experts else True,
        )
