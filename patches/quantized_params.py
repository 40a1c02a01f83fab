"""Let Megatron's DDP and distributed optimizer hold weights that live quantized.

Megatron asks four module globals whether a parameter is quantized; they name our tensor class (beside Transformer
Engine's, where that is installed). Casting masters and gathering bytes are ours: `megatron_hybrid.mcore.param_sync`.
Other parameters and models pass untouched.
"""

from __future__ import annotations

from megatron_hybrid.mcore import param_sync
from megatron_hybrid.tensor import HybridTensor

from .framework import MISSING, Change, Patch, value

_FP8, _BUFFERS = "megatron.core.fp8_utils", "megatron.core.distributed.param_and_grad_buffer"
_GROUP = f"{_BUFFERS}:_ParamAndGradBucketGroup"
_CHECKPOINTS = "megatron.core.dist_checkpointing.serialization"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def beside(original):
    """Our class with the one that is there: what `isinstance` takes."""
    if original in (None, MISSING):
        return HybridTensor
    return (*original, HybridTensor) if isinstance(original, tuple) else (original, HybridTensor)


def around_modify_storage(original):
    def _modify_underlying_storage_impl(tensor, new_raw_data):
        if not isinstance(tensor, HybridTensor):  # ours keep their own buffers
            original(tensor, new_raw_data)

    return _modify_underlying_storage_impl


def around_post_all_gather(original):
    def te_post_all_gather_processing(params):
        others = [param for param in params if not isinstance(param, HybridTensor)]
        if original is not None and others:
            original(others)

    return te_post_all_gather_processing


def of_classmethod(around):
    return lambda original: classmethod(around(original.__func__))


PATCH = Patch(
    name="quantized_params",
    changes=(
        Change(f"{_FP8}:FP8_TENSOR_CLASS", beside),
        Change(f"{_FP8}:HAVE_TE_FP8_TENSOR_CLASS", value(True)),
        Change(f"{_FP8}:MXFP8Tensor", beside, create=True),
        Change(f"{_FP8}:HAVE_TE_MXFP8TENSOR", value(True)),
        Change(f"{_FP8}:_modify_underlying_storage_impl", around_modify_storage),
        Change(f"{_FP8}:te_post_all_gather_processing", around_post_all_gather),
        Change(f"{_GROUP}.start_param_sync", param_sync.around_start_param_sync),
        Change(f"{_GROUP}._post_param_sync", param_sync.around_post_param_sync),
        Change(
            "megatron.core.distributed.distributed_data_parallel:partition_buckets", param_sync.around_partition_buckets
        ),
        Change(f"{_OPTIMIZER}.__init__", param_sync.around_init),
        Change(
            f"{_OPTIMIZER}._build_model_and_main_param_groups", of_classmethod(param_sync.around_build_groups)
        ),
        Change(f"{_OPTIMIZER}._copy_main_params_to_model_params", param_sync.around_copy_to_model),
        Change(f"{_OPTIMIZER}._copy_model_params_to_main_params", param_sync.around_copy_to_main),
        Change(f"{_OPTIMIZER}.load_state_dict", param_sync.around_load),
        Change(f"{_OPTIMIZER}.load_parameter_state_from_dp_zero", param_sync.around_load_from_file),
        Change("megatron.training.checkpointing:generate_state_dict", param_sync.around_generate_state_dict),
        Change(f"{_CHECKPOINTS}:save_preprocess", param_sync.around_preprocess),
        Change(f"{_CHECKPOINTS}:load_preprocess", param_sync.around_preprocess),
    ),
    versions=">=0.19.2,<0.20",
    why="quantized parameters are Transformer Engine's classes there, with one byte an element in one buffer and no "
    "scales in it: other formats, and a format for each direction, do not fit",
    remove_when="Megatron's buffers ask a parameter for its bytes instead of its class",
)
