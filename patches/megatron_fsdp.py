"""Let Megatron-FSDP hold weights that live quantized.

Megatron-FSDP asks module globals whether a parameter is Transformer Engine's, and who casts masters; they name our tensor
class and our cast beside Transformer Engine's. What it gathers for such parameters, and when a gather's bytes become
payloads, is ours: `megatron_hybrid.mcore.fsdp_payloads`. Other parameters and models pass untouched.
"""

from __future__ import annotations

import importlib

from megatron_hybrid.tensor import HybridTensor

from .framework import Change, Patch, value
from .quantized_params import beside

_PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_OURS = "megatron_hybrid.mcore.fsdp_payloads"
_CLASSES, _BUFFERS = f"{_PACKAGE}.mixed_precision", f"{_PACKAGE}.param_and_grad_buffer"


def not_needed() -> str | None:
    try:
        importlib.import_module(_BUFFERS)
    except ImportError as error:
        return f"Megatron-FSDP cannot be imported here: {error}"
    return None


def ours(module: str, name: str):
    """A change's replacement out of a module that needs Megatron-FSDP."""

    def replacement(original):
        return getattr(importlib.import_module(module), name)(original)

    return replacement


def around_cast_masters(original):
    """The parameters of one kind of ranks come together, all of them at every call."""

    def cast_master_weights_to_fp8(model_params, main_params, start_offsets, group, shards=None, **kwargs):
        given = zip(model_params, main_params, start_offsets, shards, strict=True)
        others = [row for row in given if not isinstance(row[0], HybridTensor)]
        if others:
            params, masters, offsets, pieces = map(list, zip(*others))
            original(params, masters, offsets, group, pieces, **kwargs)
        importlib.import_module(_OURS).cast_masters(model_params)

    return cast_master_weights_to_fp8


def around_post_all_gather(original):
    def post_all_gather_processing(params):
        """params: one, or a list."""
        others = [p for p in (params if isinstance(params, list) else [params]) if not isinstance(p, HybridTensor)]
        if others:
            original(others)

    return post_all_gather_processing


PATCH = Patch(
    name="megatron_fsdp",
    changes=(
        Change(f"{_CLASSES}:HAVE_TE", value(True)),
        Change(f"{_CLASSES}:FP8_TENSOR_CLASS", beside, create=True),
        Change(f"{_CLASSES}:HAVE_TE_MXFP8TENSOR", value(True)),
        Change(f"{_CLASSES}:MXFP8Tensor", beside, create=True),
        Change(f"{_CLASSES}:HAVE_TE_CAST_MASTER_WEIGHTS_TO_FP8", value(True)),
        Change(f"{_CLASSES}:cast_master_weights_to_fp8", around_cast_masters, create=True),
        Change(f"{_CLASSES}:HAVE_TE_POST_ALL_GATHER_PROCESSING", value(True)),
        Change(f"{_CLASSES}:post_all_gather_processing", around_post_all_gather, create=True),
        Change(f"{_BUFFERS}:DataParallelBuffer", ours(_OURS, "buffer_for")),
        Change(f"{_BUFFERS}:ParamAndGradBuffer._init_each_parameter_group_buffers", ours(_OURS, "around_init_buffers")),
        Change(f"{_BUFFERS}:AllGatherPipeline.wait_bucket_ready", ours(_OURS, "around_wait_bucket_ready")),
    ),
    versions=">=0.19.2,<0.20",
    why="quantized parameters are Transformer Engine's classes there, one byte an element in one buffer and no scales",
    remove_when="Megatron-FSDP's buffers ask a parameter for its bytes instead of its class",
    not_needed=not_needed,
)
