"""Grouped experts in Megatron-FSDP's checkpoints (``fsdp_dtensor``): a tensor an expert, under Megatron's names.

The parameter is one (E, N, K) tensor, whose FP32 shards are runs of its elements. In a state dict that is written or
loaded in place an expert's part of them stands for it: views, under the global number of the expert, a gated one as
two. What a checkpoint to load lacks of delayed scaling is left out, for all linears. `patches.fsdp_experts` calls what
is here.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import make_fsdp_dtensor
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from megatron.core.tensor_parallel.layers import copy_tensor_model_parallel_attributes

from ..distributed.shard_map import overlap
from . import state
from .experts import HybridGroupedParallelLinear

_MOMENTS = ("exp_avg", "exp_avg_sq")


def grouped_linears(model) -> dict[str, HybridGroupedParallelLinear]:
    """By their path in a wrapped model."""
    return {path: m for path, m in model.named_modules() if isinstance(m, HybridGroupedParallelLinear)}


def around_preprocess(original):
    @functools.wraps(original)
    def preprocess_fsdp_dtensor_state_dict(args, raw_state_dict, model):
        linears = grouped_linears(model)
        if not linears:
            return state.without_missing(original(args, raw_state_dict, model), model)
        rest, tensors = _taken_apart(raw_state_dict, linears)
        done = original(args, rest, model)
        for part, found in tensors.items():
            preprocess_state_dict_for_uneven_dtensor(found)
            (done[part] if part == "model" else done[part]["state"]).update(found)
        return state.without_missing(done, model)

    return preprocess_fsdp_dtensor_state_dict


def around_expert_index(original):
    """Megatron numbers an expert by its name; the name of all of them together has no number."""

    @functools.wraps(original)
    def get_expert_index_from_key(key):
        return None if key.endswith((".linear_fc1.weight", ".linear_fc2.weight")) and ".experts.linear" in key else original(key)

    return get_expert_index_from_key


def _taken_apart(state_dict: dict, linears: dict) -> tuple[dict, dict]:
    """(the state dict without what belongs to all experts of a rank, by part of it what stands for that)."""
    rest, tensors = {**state_dict, "model": dict(state_dict["model"])}, {"model": {}}
    if "optimizer" in state_dict:
        rest["optimizer"] = {**state_dict["optimizer"], "state": dict(state_dict["optimizer"]["state"])}
        tensors["optimizer"] = {}
    for path, module in linears.items():
        for name in ("weight", "bias"):
            param = module._parameters.get(name)
            if param is None:
                continue
            key, optimizer_key = f"{path.removeprefix('module.')}.{name}", f"module.{path}.{name}"
            tensors["model"] |= _experts(module, key, rest["model"].pop(key), param)
            moments = rest.get("optimizer", {}).get("state", {}).pop(optimizer_key, None)
            for moment, data in (moments or {}).items():
                for each, value in (_experts(module, optimizer_key, data, param) if moment in _MOMENTS else {}).items():
                    tensors["optimizer"].setdefault(each, {})[moment] = value
        _number_histories(rest["model"], tensors["model"], f"{path.removeprefix('module.')}.hq.", module)
    return rest, tensors


def _experts(module, key: str, data, param) -> dict:
    """Every expert's part of a sharded (E, ...) tensor; data: a DTensor over this rank's elements of it."""
    found, held = {}, param.megatron_fsdp_slice
    local = data.to_local().view(-1)
    gated = module.sharded_rows and module.config.gated_linear_unit
    template = torch.empty(param.orig_param.shape[1:], device="meta")
    copy_tensor_model_parallel_attributes(template, param)
    if getattr(template, "tensor_model_parallel", False):
        template.partition_dim = param.partition_dim - 1
    for e in range(module.num_gemms):
        pieces = {"_w": 0, "_v": 1} if gated else {"": 0}
        size = template.numel() // len(pieces)
        for suffix, piece in pieces.items():
            first = e * template.numel() + piece * size
            start, stop = overlap(held.start, held.stop, first, first + size)
            like = template[: len(template) // len(pieces)]
            copy_tensor_model_parallel_attributes(like, template)
            found[f"{key}{module.first_expert + e}{suffix}"] = make_fsdp_dtensor(
                local[start:stop], like, dist_index=param.megatron_fsdp_dist_index, is_expert_param=True, run_check=True,
                update_uneven_dtensor_chunk_meta=True,
            )  # fmt: skip
    return found


def _number_histories(model: dict, found: dict, prefix: str, module) -> None:
    """Delayed-scaling state under the global number of its expert."""
    for key in [key for key in model if key.startswith(prefix)]:
        number, _, name = key.removeprefix(prefix).partition(".")
        found[f"{prefix}{module.first_expert + int(number)}.{name}"] = model.pop(key)
