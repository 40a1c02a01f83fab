"""Hugging Face folders from Megatron checkpoints, and back.

Query, key and value are one matrix in Megatron, a run of rows for each group of heads: its queries, its key, its value.
Gate and up of a gated MLP are one matrix, all of the gate first. Experts are stacked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..checkpoint_file import COMMON, TRACKER, Checkpoint, CheckpointError
from . import safetensors_file
from .model_spec import ConversionError, ModelSpec

CONFIG = "config.json"
MAX_FILE_BYTES = 5 * 10**9
_EMBEDDING, _FINAL_NORM, _OUTPUT = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)
_FC1, _FC2 = "linear_fc1", "linear_fc2"


def export(checkpoint: Checkpoint, out: Path, *, vocab_size: int | None = None) -> ModelSpec:
    """Write config.json and safetensors files into a folder, which must be empty or new.

    Memory: the largest tensor of all layers together, and a file. vocab_size: rows of the embedding to keep; the rest
    is Megatron's padding. Raises `ConversionError` and `CheckpointError`.
    """
    spec = ModelSpec.from_args(checkpoint.args, str(checkpoint.folder))
    rows = spec.vocab if vocab_size is None else vocab_size
    if not 0 < rows <= spec.vocab:
        raise ConversionError(f"--vocab-size {rows}: the embedding has {spec.vocab} rows")
    _fresh_folder(out)
    source = _Source(checkpoint, spec)
    safetensors_file.save_sharded(out, _hf_tensors(source, spec, rows), MAX_FILE_BYTES)
    config = {**spec.hf_config(), "vocab_size": rows}
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return spec


def _fresh_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConversionError(f"{out} is there and not an empty folder; nothing is overwritten")
    out.mkdir(parents=True, exist_ok=True)


class _Source:
    """A checkpoint's tensors of one linear in every layer, whether it keeps layers stacked or apart."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec):
        self.checkpoint, self.spec, self.names = checkpoint, spec, checkpoint.tensors()

    def get(self, name: str) -> torch.Tensor:
        return self.checkpoint.load([name])[name]

    def layers(self, *leaves: str) -> Iterator[tuple[int, torch.Tensor]]:
        """(layer, tensor) of the first of these names that a layer has."""
        for leaf in leaves:
            if f"decoder.layers.{leaf}" in self.names:
                yield from enumerate(self.get(f"decoder.layers.{leaf}"))
                return
        for layer in range(self.spec.num_layers):
            for leaf in leaves:
                if (name := f"decoder.layers.{layer}.{leaf}") in self.names:
                    yield layer, self.get(name)
                    break

    def norm(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1 if self.spec.one_centered_norm else tensor


def _hf_tensors(source: _Source, spec: ModelSpec, rows: int) -> Iterator[tuple[str, torch.Tensor]]:
    if spec.one_centered_norm and spec.dtype != torch.float32:
        raise ConversionError("norm weights kept minus one (--apply-layernorm-1p) lose bits in the other form")
    yield "model.embed_tokens.weight", source.get(_EMBEDDING)[:rows]
    counts = dict.fromkeys(("norm", "qkv", "mlp"), 0)
    for i, norm in source.layers("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"):
        counts["norm"] += 1
        yield f"model.layers.{i}.input_layernorm.weight", source.norm(norm)
    for i, qkv in source.layers("self_attention.linear_qkv.weight"):
        counts["qkv"] += 1
        for name, part in zip("qkv", split_qkv(qkv, spec)):
            yield f"model.layers.{i}.self_attn.{name}_proj.weight", part
    for i, bias in source.layers("self_attention.linear_qkv.bias") if spec.qkv_bias else ():
        for name, part in zip("qkv", split_qkv(bias, spec)):
            yield f"model.layers.{i}.self_attn.{name}_proj.bias", part
    for i, proj in source.layers("self_attention.linear_proj.weight"):
        yield f"model.layers.{i}.self_attn.o_proj.weight", proj
    if spec.qk_norm:
        for name in "qk":
            for i, norm in source.layers(f"self_attention.{name}_layernorm.weight"):
                yield f"model.layers.{i}.self_attn.{name}_norm.weight", source.norm(norm)
    for i, norm in source.layers("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"):
        yield f"model.layers.{i}.post_attention_layernorm.weight", source.norm(norm)
    for i, fc1 in source.layers("mlp.linear_fc1.weight"):
        counts["mlp"] += 1
        yield from _gate_and_up(f"model.layers.{i}.mlp.", fc1)
    for i, fc2 in source.layers("mlp.linear_fc2.weight"):
        yield f"model.layers.{i}.mlp.down_proj.weight", fc2
    if spec.experts:
        for i, router in source.layers("mlp.router.weight"):
            yield f"model.layers.{i}.mlp.gate.weight", router.to(spec.dtype)
        for i, fc1 in source.layers("mlp.experts.experts.linear_fc1.weight"):
            counts["mlp"] += 1
            for e, one in enumerate(fc1):
                yield from _gate_and_up(f"model.layers.{i}.mlp.experts.{e}.", one)
        for i, fc2 in source.layers("mlp.experts.experts.linear_fc2.weight"):
            for e, one in enumerate(fc2):
                yield f"model.layers.{i}.mlp.experts.{e}.down_proj.weight", one
    if spec.shared_ffn:
        yield from _shared_expert(source)
    if set(counts.values()) != {spec.num_layers}:
        raise CheckpointError(
            f"{source.checkpoint.folder}: tensors of some layers are missing ({counts} of {spec.num_layers})"
        )
    yield "model.norm.weight", source.norm(source.get(_FINAL_NORM))
    if not spec.tied:
        yield "lm_head.weight", source.get(_OUTPUT)[:rows]


def _shared_expert(source: _Source) -> Iterator[tuple[str, torch.Tensor]]:
    for i, fc1 in source.layers("mlp.shared_experts.linear_fc1.weight"):
        yield from _gate_and_up(f"model.layers.{i}.mlp.shared_expert.", fc1)
    for i, fc2 in source.layers("mlp.shared_experts.linear_fc2.weight"):
        yield f"model.layers.{i}.mlp.shared_expert.down_proj.weight", fc2
    for i, gate in source.layers("mlp.shared_experts.gate_weight"):
        yield f"model.layers.{i}.mlp.shared_expert_gate.weight", gate


def _gate_and_up(prefix: str, fc1: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    gate, up = fc1.chunk(2)
    yield f"{prefix}gate_proj.weight", gate
    yield f"{prefix}up_proj.weight", up


def split_qkv(qkv: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) of Megatron's one matrix ((heads + 2 groups) x head size, hidden), or of its bias."""
    queries = spec.heads // spec.groups
    parts = qkv.reshape(spec.groups, queries + 2, spec.head_size, *qkv.shape[1:])
    return tuple(part.flatten(0, 2) for part in parts.split([queries, 1, 1], dim=1))


def join_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """The inverse of `split_qkv`."""
    parts = [part.reshape(spec.groups, -1, spec.head_size, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def import_hf(folder: Path, out: Path, *, vocab_multiple: int = 128) -> ModelSpec:
    """Write a torch_dist checkpoint ("release", as Megatron calls weights without a training state) from a folder.

    Every parallel layout can load it, with ``--finetune``. vocab_multiple: the embedding is padded with zeros to a
    multiple of it, which must be the run's ``--make-vocab-size-divisible-by`` times its tensor-parallel size. Memory:
    the whole model. Raises `ConversionError` and `SafetensorsError`.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ConversionError(f"{folder}: no {CONFIG} in it")
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConversionError(f"{path}: not JSON ({error})") from None
    spec = ModelSpec.from_hf(config, str(path))
    reader = safetensors_file.Reader(folder)
    if spec.tied and "lm_head.weight" in reader and "model.embed_tokens.weight" not in reader:
        raise ConversionError(f"{folder}: tied embeddings without model.embed_tokens.weight")
    if vocab_multiple < 1:
        raise ConversionError(f"--vocab-multiple {vocab_multiple}: at least 1")
    padded = -(-spec.vocab // vocab_multiple) * vocab_multiple
    state = _megatron_tensors(reader.get, spec, padded)
    args = {**spec.to_args(), "padded_vocab_size": padded}
    common = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 0}
    _fresh_folder(out)
    write_checkpoint(out, {**state, COMMON: [common]})
    return spec


def write_checkpoint(out: Path, state: dict) -> None:
    """One torch_dist checkpoint from one process."""
    import warnings

    import torch.distributed.checkpoint as dcp

    target = out / "release"
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that one process saves alone
        dcp.save(state, storage_writer=dcp.FileSystemWriter(str(target)), planner=planner, no_dist=True)
    (target / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (out / TRACKER).write_text("release")


def _megatron_tensors(get: Callable[[str], torch.Tensor], spec: ModelSpec, padded: int) -> dict:
    def pad(tensor):
        return torch.cat((tensor, tensor.new_zeros(padded - tensor.shape[0], tensor.shape[1])))

    state = {_EMBEDDING: pad(get("model.embed_tokens.weight").to(spec.dtype)), _FINAL_NORM: get("model.norm.weight")}
    if not spec.tied:
        state[_OUTPUT] = pad(get("lm_head.weight").to(spec.dtype))
    layers = [_layer(get, spec, i) for i in range(spec.num_layers)]
    if spec.is_homogeneous:
        state |= {f"decoder.layers.{leaf}": torch.stack([layer[leaf] for layer in layers]) for leaf in layers[0]}
    else:
        state |= {f"decoder.layers.{i}.{leaf}": x for i, layer in enumerate(layers) for leaf, x in layer.items()}
    state = {name: tensor.to(spec.dtype) for name, tensor in state.items()}
    return state | dict.fromkeys(_extra_states(spec), [None])


def _layer(get, spec: ModelSpec, i: int) -> dict[str, torch.Tensor]:
    """One layer's tensors under Megatron's names."""
    attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
    norm = get(f"model.layers.{i}.post_attention_layernorm.weight")
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": get(f"model.layers.{i}.input_layernorm.weight"),
        "self_attention.linear_qkv.weight": join_qkv(*(get(f"{attention}{x}_proj.weight") for x in "qkv"), spec),
        "self_attention.linear_proj.weight": get(f"{attention}o_proj.weight"),
    }
    if spec.qkv_bias:
        layer["self_attention.linear_qkv.bias"] = join_qkv(*(get(f"{attention}{x}_proj.bias") for x in "qkv"), spec)
    if spec.qk_norm:
        layer |= {f"self_attention.{x}_layernorm.weight": get(f"{attention}{x}_norm.weight") for x in "qk"}
    if not spec.moe_layers[i]:
        gate_up = torch.cat([get(f"{mlp}{x}_proj.weight") for x in ("gate", "up")])
        down = get(f"{mlp}down_proj.weight")
        return layer | {
            f"mlp.{_FC1}.layer_norm_weight": norm,
            f"mlp.{_FC1}.weight": gate_up,
            f"mlp.{_FC2}.weight": down,
        }
    experts = [f"{mlp}experts.{e}." for e in range(spec.experts)]
    gate_up = [torch.cat([get(f"{expert}{x}_proj.weight") for x in ("gate", "up")]) for expert in experts]
    if spec.shared_ffn:
        shared = f"{mlp}shared_expert."
        layer |= {
            f"mlp.shared_experts.{_FC1}.weight": torch.cat([get(f"{shared}{x}_proj.weight") for x in ("gate", "up")]),
            f"mlp.shared_experts.{_FC2}.weight": get(f"{shared}down_proj.weight"),
            "mlp.shared_experts.gate_weight": get(f"{mlp}shared_expert_gate.weight"),
        }
    return layer | {
        "pre_mlp_layernorm.weight": norm,
        "mlp.router.weight": get(f"{mlp}gate.weight"),
        f"mlp.experts.experts.{_FC1}.weight": torch.stack(gate_up),
        f"mlp.experts.experts.{_FC2}.weight": torch.stack([get(f"{expert}down_proj.weight") for expert in experts]),
    }


def _extra_states(spec: ModelSpec) -> Iterator[str]:
    """Names of the empty objects that Megatron's linears look for."""
    for i in range(spec.num_layers):
        stem, place, of = ("", f"{i}", f"{spec.num_layers}") if spec.is_homogeneous else (f"{i}.", "0", "1")
        leaves = ["self_attention.linear_qkv", "self_attention.linear_proj"]
        leaves += [] if spec.moe_layers[i] else [f"mlp.{_FC1}", f"mlp.{_FC2}"]
        if spec.moe_layers[i] and spec.shared_ffn:
            leaves += [f"mlp.shared_experts.{_FC1}", f"mlp.shared_experts.{_FC2}"]
        for leaf in leaves:
            yield f"decoder.layers.{stem}{leaf}._extra_state/shard_{place}_{of}"
        for e in range(spec.experts if spec.moe_layers[i] else 0):
            where = f"{place}.{e}_{of}.{spec.experts}" if spec.is_homogeneous else f"{e}_{spec.experts}"
            for leaf in (_FC1, _FC2):
                yield f"decoder.layers.{stem}mlp.experts.experts.{leaf}._extra_state/shard_{where}"
