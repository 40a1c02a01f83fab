"""A plain forward of Llama, Qwen2, Qwen3, Qwen2-MoE and Qwen3-MoE folders, from config.json and safetensors alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_hybrid.convert.safetensors_file import Reader


class PlainModel:
    """dtype: of the arithmetic; norms, softmax and rotary angles are FP32 always."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.config, reader = json.loads((folder / "config.json").read_text()), Reader(folder)
        self.weights = {name: reader.get(name).to(dtype) for name in reader}
        self.eps, self.head = self.config["rms_norm_eps"], self.config["head_dim"]

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, sequence) -> logits (batch, sequence, vocabulary)."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for i in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{i}."
            x = x + self.attention(f"{name}self_attn.", self.norm(x, f"{name}input_layernorm"))
            x = x + self.mlp(f"{name}mlp.", self.norm(x, f"{name}post_attention_layernorm"))
        output = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return self.linear(self.norm(x, "model.norm"), output)

    def linear(self, x, name):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x, name):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weights[f"{name}.weight"].float()).to(x.dtype)

    def rotate(self, x):
        angles = torch.arange(x.shape[2])[:, None] * self.frequencies()
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x.float().chunk(2, -1)
        return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)

    def frequencies(self):
        found = self.config["rope_theta"] ** (-torch.arange(0, self.head, 2) / self.head)
        scaling = self.config["rope_scaling"]
        if scaling is None:
            return found
        turns = scaling["original_max_position_embeddings"] * found / (2 * torch.pi)  # of the context trained on
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return found * (kept + (1 - kept) / scaling["factor"])

    def attention(self, name, x):
        batch, sequence, _ = x.shape
        q, k, v = (self.linear(x, f"{name}{p}_proj").view(batch, sequence, -1, self.head) for p in "qkv")
        if f"{name}q_norm.weight" in self.weights:
            q, k = self.norm(q, f"{name}q_norm"), self.norm(k, f"{name}k_norm")
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        return self.linear(out.transpose(1, 2).flatten(2), f"{name}o_proj")

    def mlp(self, name, x):
        if f"{name}gate.weight" not in self.weights:
            return self.linear(
                F.silu(self.linear(x, f"{name}gate_proj")) * self.linear(x, f"{name}up_proj"), f"{name}down_proj"
            )
        probabilities = self.linear(x, f"{name}gate").float().softmax(-1)
        chosen, experts = probabilities.topk(self.config["num_experts_per_tok"], -1)
        if self.config["norm_topk_prob"]:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e in range(self.config["num_experts"]):
            weight = (chosen * (experts == e)).sum(-1, keepdim=True).to(x.dtype)
            at = f"{name}experts.{e}."
            hidden = F.silu(self.linear(x, f"{at}gate_proj")) * self.linear(x, f"{at}up_proj")
            out = out + self.linear(hidden, f"{at}down_proj") * weight
        if f"{name}shared_expert_gate.weight" not in self.weights:
            return out
        at = f"{name}shared_expert."
        hidden = F.silu(self.linear(x, f"{at}gate_proj")) * self.linear(x, f"{at}up_proj")
        return out + self.linear(hidden, f"{at}down_proj") * self.linear(x, f"{name}shared_expert_gate").sigmoid()
