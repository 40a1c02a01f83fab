"""What does not go with Megatron's CUDA graphs, each with its reason, and what goes."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import CudaGraphModule, InferenceCudaGraphScope

from megatron_hybrid.mcore import graphs
from megatron_hybrid.mcore.errors import UserError

DENSE = dict(
    cuda_graph_impl="local", cuda_graph_modules=[], inference_cuda_graph_scope=InferenceCudaGraphScope.layer,
    num_moe_experts=None,
)  # fmt: skip
EXPERTS = dict(
    num_moe_experts=4, moe_grouped_gemm=True, expert_model_parallel_size=1, expert_tensor_parallel_size=1,
    moe_token_dispatcher_type="alltoall", moe_expert_capacity_factor=None,
)  # fmt: skip
RUN = dict(
    cuda_graph_impl="local", hq_recipe="mxfp8", hq_stats_interval=0, hq_profile_step=0, hq_check_nan=False, hq_offload_layers=0,
    recompute_granularity=None, use_torch_fsdp2=False, use_megatron_fsdp=False, rampup_batch_size=None,
    pipeline_model_parallel_size=1,
)  # fmt: skip


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(graphs, "compute_device", lambda: torch.device("cuda"))


CONFIGS = {
    "transformer_engine": (dict(cuda_graph_impl="transformer_engine"), "transformer_engine: it needs Transformer Engine"),
    "full_iteration": (dict(cuda_graph_impl="full_iteration"), "an evaluation would go on with the cast weights.*impl local"),
    "modules": (dict(cuda_graph_modules=[CudaGraphModule.attn]), "--cuda-graph-modules: .* captured whole; leave it out$"),
    "block": (dict(inference_cuda_graph_scope=InferenceCudaGraphScope.block), "captures no layer in training"),
    "one by one": (EXPERTS | dict(moe_grouped_gemm=False), "without --moe-grouped-gemm: the host has to wait"),
    "expert parallel": (EXPERTS | dict(expert_model_parallel_size=2), "beside --expert-model-parallel-size 2"),
    "expert tensor parallel": (EXPERTS | dict(expert_tensor_parallel_size=2), "size 2 and --moe-token-dispatcher-type alltoall"),
    "capacity": (EXPERTS | dict(moe_expert_capacity_factor=1.0), "beside --moe-expert-capacity-factor"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_that_are_refused(name, on_gpu):
    changes, message = CONFIGS[name]
    with pytest.raises(UserError, match=message):
        graphs.refuse_unsupported(SimpleNamespace(**DENSE | changes))


def test_configurations_that_go(on_gpu):
    gathers = EXPERTS | dict(expert_tensor_parallel_size=2, moe_token_dispatcher_type="allgather")
    for changes in ({}, EXPERTS, gathers, dict(cuda_graph_impl="none", cuda_graph_modules=[CudaGraphModule.attn])):
        graphs.refuse_unsupported(SimpleNamespace(**DENSE | changes))


def test_a_cpu_has_none(monkeypatch):
    monkeypatch.setattr(graphs, "compute_device", lambda: torch.device("cpu"))
    with pytest.raises(UserError, match="--cuda-graph-impl local: a CPU has no CUDA graphs; leave it out$"):
        graphs.refuse_unsupported(SimpleNamespace(**DENSE))


ARGUMENTS = {
    "--hq-stats-interval": dict(hq_stats_interval=5),
    "--hq-profile-step": dict(hq_profile_step=3),
    "--hq-check-nan": dict(hq_check_nan=True),
    "--hq-offload-layers": dict(hq_offload_layers=1),
    "--recompute-granularity": dict(recompute_granularity="selective"),
    "--use-torch-fsdp2": dict(use_torch_fsdp2=True),
    "--use-megatron-fsdp": dict(use_megatron_fsdp=True),
    "--rampup-batch-size": dict(rampup_batch_size=["8", "8", "64"], pipeline_model_parallel_size=2),
}


@pytest.mark.parametrize("flag", ARGUMENTS)
def test_flags_that_are_refused(flag):
    with pytest.raises(UserError, match=f"^{flag} beside --cuda-graph-impl local"):
        graphs.check_run(SimpleNamespace(**RUN | ARGUMENTS[flag]), {1: {}})
    graphs.check_run(SimpleNamespace(**RUN | ARGUMENTS[flag] | dict(cuda_graph_impl="none")), {1: {}})


def test_rules_on_steps_are_refused():
    with pytest.raises(UserError, match="recipe mxfp8 has rules on steps .it changes at 3, 9. beside"):
        graphs.check_run(SimpleNamespace(**RUN), {1: {}, 3: {}, 9: {}})


def test_a_run_that_goes():
    args = SimpleNamespace(**RUN | dict(rampup_batch_size=["8", "8", "64"]), te_rng_tracker=False)
    graphs.check_run(args, {1: {}})
    graphs.choose_rng_tracker(args)
    assert args.te_rng_tracker
    config = SimpleNamespace(cuda_graph_impl="local", deallocate_pipeline_outputs=True)
    graphs.configure(config)
    assert not config.deallocate_pipeline_outputs
