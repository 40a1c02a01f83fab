"""Megatron's CUDA graphs of layers (``--cuda-graph-impl local``) over our linears: what is refused, what a replay needs.

Megatron records the layers that a first step runs, captures each one's forward and backward at its end, and replays them
from the second step on. No Python of a layer runs then: what it decides must be the same in every step, and what it reads
must be where it was. So scales, histories, keys and cached weights stay in their memory (`Controller.stand`), and weights
are cast before the layer is replayed, by the code that casts them without graphs.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord
from megatron.core.transformer.enums import InferenceCudaGraphScope

from .errors import UserError
from .experts import HybridGroupedParallelLinear
from .layers import HybridParallelLinear, compute_device

LOCAL = "local"
_FLAG = "--cuda-graph-impl"
_ANGLES = "rotary_pos_emb"
_NO_PYTHON = "a replayed layer runs no Python"
_MOVING_MEMORY = "gives parameters other memory in every step, and a captured layer reads where they were"

# attribute in the arguments -> flag, why it does not go with graphs
_NOT_BESIDE_GRAPHS = {
    "hq_stats_interval": ("--hq-stats-interval", f"{_NO_PYTHON}, which measures the casts"),
    "hq_profile_step": ("--hq-profile-step", f"{_NO_PYTHON}, which tells a step's parts apart"),
    "hq_check_nan": ("--hq-check-nan", "it waits for the device at every cast, which a capture does not allow"),
    "hq_offload_layers": ("--hq-offload-layers", f"{_NO_PYTHON}, which moves saved tensors"),
    "recompute_granularity": ("--recompute-granularity", "Megatron recomputes nothing inside of a captured layer"),
    "use_torch_fsdp2": ("--use-torch-fsdp2", f"it {_MOVING_MEMORY}"),
    "use_megatron_fsdp": ("--use-megatron-fsdp", f"it {_MOVING_MEMORY}"),
}


class GraphedLayer:
    """What our layers add to Megatron's for graphs: evaluation runs without them, and weights are cast before a replay."""

    def _should_call_local_cudagraph(self, *args, **kwargs):
        # what is captured records amaxes and saves for backward: a training step's forward, not an evaluation's
        training = self.training and torch.is_grad_enabled()
        return training and super()._should_call_local_cudagraph(*args, **kwargs)

    def __call__(self, *args, **kwargs):
        if not self._should_call_local_cudagraph(*args, **kwargs):
            return super().__call__(*args, **kwargs)
        if _CudagraphGlobalRecord.cudagraph_created:
            for module, runtimes in self._quantized_linears:
                self.cudagraph_manager.call_ddp_preforward_hook(module)  # waits for a weight that is being gathered
                for runtime in runtimes:
                    runtime.refresh()
        angles = kwargs.get(_ANGLES)
        if angles is not None and not self.cudagraph_manager.reuse_cudagraphs:
            # stages capture a backward before the forwards of later microbatches, until when Megatron expects nobody to
            # share an input: the angles are one tensor in the whole run
            kwargs[_ANGLES] = angles.detach()
        return super().__call__(*args, **kwargs)

    @functools.cached_property
    def _quantized_linears(self) -> list[tuple]:
        """(linear, its runtimes), in the layer's order: the same on all ranks that reduce amaxes together."""
        kinds = HybridParallelLinear, HybridGroupedParallelLinear
        return [(m, _runtimes(m)) for m in self.modules() if isinstance(m, kinds)]


def _runtimes(linear) -> list:
    """Those that may hold cast weights; of experts at once it is the first's."""
    return list(linear.hq) if isinstance(linear, HybridGroupedParallelLinear) else [linear.hq]


def refuse_unsupported(config) -> None:
    """Raise `UserError` for what a TransformerConfig asks of graphs and this adapter does not do."""
    impl = config.cuda_graph_impl
    if impl == "none":
        return
    reasons = {
        f"{_FLAG} {impl}: it needs Transformer Engine": impl == "transformer_engine",
        f"{_FLAG} {impl}: the graph of an evaluation would go on with the cast weights of its capture": (
            impl == "full_iteration"
        ),
        f"{_FLAG} {impl}: a CPU has no CUDA graphs": compute_device().type != "cuda",
        "--cuda-graph-modules: layers of quantized linears are captured whole": bool(config.cuda_graph_modules),
        "--inference-cuda-graph-scope block: Megatron then captures no layer in training": (
            config.inference_cuda_graph_scope == InferenceCudaGraphScope.block
        ),
    }
    for why, asked in reasons.items():
        if asked:
            instead = f" or give {_FLAG} {LOCAL}" if impl != LOCAL else ""
            raise UserError(f"{why}; leave it out{instead}")
    if config.num_moe_experts is not None:
        _refuse_host_sizes(config)


def _refuse_host_sizes(config) -> None:
    """Experts whose groups' sizes the host must know: it would wait for the device, which a capture does not allow."""
    ranks, parts = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    alltoall = config.moe_token_dispatcher_type == "alltoall"
    reasons = {
        "without --moe-grouped-gemm": not config.moe_grouped_gemm,
        f"beside --expert-model-parallel-size {ranks}": ranks > 1,
        f"beside --expert-tensor-parallel-size {parts} and --moe-token-dispatcher-type alltoall": alltoall and parts > 1,
        "beside --moe-expert-capacity-factor": config.moe_expert_capacity_factor is not None,
    }
    for what, asked in reasons.items():
        if asked:
            raise UserError(
                f"{_FLAG} {LOCAL} with experts {what}: the host has to wait for the sizes of their groups, which a capture "
                f"does not allow; leave {_FLAG} out"
            )


def check_run(args, at_step: dict[int, dict]) -> None:
    """Refuse flags and recipes that do not go with graphs. at_step: plans by step and name."""
    if args.cuda_graph_impl != LOCAL:
        return
    for attribute, (flag, why) in _NOT_BESIDE_GRAPHS.items():
        if getattr(args, attribute, None):
            raise UserError(f"{flag} beside {_FLAG} {LOCAL}: {why}; leave one out")
    if args.rampup_batch_size and args.pipeline_model_parallel_size > 1:
        raise UserError(
            f"--rampup-batch-size beside {_FLAG} {LOCAL} and --pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
            ": every microbatch of the first step has graphs of its own, and there are more microbatches later; leave one out"
        )
    if len(at_step) > 1:
        later = ", ".join(map(str, list(at_step)[1:]))
        raise UserError(
            f"recipe {args.hq_recipe} has rules on steps (it changes at {later}) beside {_FLAG} {LOCAL}: a captured layer goes "
            "on with the formats of its capture; leave one out"
        )


def configure(config) -> None:
    """What a model's TransformerConfig needs beside graphs."""
    if config.cuda_graph_impl == LOCAL:
        # a pipeline stage would free the memory of its output once it is sent: here every step writes it there
        config.deallocate_pipeline_outputs = False


def choose_rng_tracker(args) -> None:
    """Megatron's models ask for ``--te-rng-tracker`` beside graphs; without Transformer Engine that is Megatron's own."""
    if args.cuda_graph_impl == LOCAL:
        args.te_rng_tracker = True


def prepare(chunks: list, controller) -> None:
    """Before the first step of chunks that will be captured. Raises `UserError` for experts that run one by one."""
    for module in (m for chunk in chunks for m in chunk.modules() if isinstance(m, HybridGroupedParallelLinear)):
        how = module.hq.how(module.weight) if module.weight is not None else module.hq.how_each(module.weights())
        if isinstance(how, str):
            raise UserError(
                f"{_FLAG} {LOCAL}: the experts of {module.hq[0].role.name} run one by one ({how}), for which the host has to "
                f"wait for their sizes; leave {_FLAG} out"
            )
    controller.stand()


def say_captured(chunks: list, say) -> None:
    """How many layers replay graphs from now on, after the first step."""
    managers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, CudaGraphManager) and m.cudagraph_runners]
    runners = [runner for manager in managers for runner in manager.cudagraph_runners]
    captured = sum(runner.fwd_graph is not None and runner.bwd_graph is not None for runner in runners)
    say(
        f"CUDA graphs: {captured} of {len(runners)} forwards and backwards of {len(managers)} layers captured; replayed from "
        "now on"
    )
