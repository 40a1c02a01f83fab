"""What a step's time goes to: kernels told apart and counted once, a file from a plain loop, on the CPU and a GPU."""

import json

import pytest
import torch

import megatron_hybrid as mh
from megatron_hybrid.observe.profile import kind, split_of_kernels


def test_kernels_are_told_apart():
    found = [kind(name) for name in (
        "ncclDevKernel_AllGather_RING_LL(...)", "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NTN", "sm90_xmma_gemm_bf16",
        "void mh::cuda::cast_tiles<...>", "_swiglu_forward", "Memcpy DtoD (Device -> Device)", "fmha_cutlass_forward",
        "void at::native::vectorized_elementwise_kernel<...>", "something else",
    )]  # fmt: skip
    assert found == ["collectives", "gemms", "gemms", "casts", "fused", "copies", "attention", "torch elementwise", "other"]


def test_time_is_counted_once():
    """Collectives where nothing else runs, gaps as waiting; everything adds up to the whole."""
    kernels = [("nccl", 0.0, 4.0), ("gemm", 1.0, 3.0), ("mh::cast", 5.0, 6.0), ("nccl", 5.5, 7.0)]
    split = split_of_kernels(kernels, 10.0)
    assert split == {"waiting for the host": 4.0, "collectives": 3.0, "gemms": 2.0, "casts": 1.0}


def profiled(tmp_path, device):
    torch.manual_seed(0)
    model = mh.HybridMLP(256, 512, device=device, dtype=torch.bfloat16)
    said = []
    ctl = mh.prepare(model, "mxfp8_fprop_nvfp4_bwd", seed=1)
    ctl.profile_step(2, tmp_path / "run" / "hq_profile.json", say=said.append)
    x, outputs = torch.randn(64, 256, device=device, dtype=torch.bfloat16), []
    for step in (1, 2, 3):
        ctl.begin_step(step)
        outputs.append(model(x))
        outputs[-1].float().square().sum().backward()
        ctl.end_step()
        assert (tmp_path / "run" / "hq_profile.json").exists() == (step >= 2)
    assert len(said) == 1 and "casts" in said[0]
    found = json.loads((tmp_path / "run" / "hq_profile.json").read_text())
    assert found["step"] == 2 and found["split"]["casts"] > 0 and found["split"]["gemms"] > 0
    assert all(runtime.profile is None for runtime in ctl.runtimes)
    return found


def test_a_plain_loop_on_the_cpu(tmp_path):
    found = profiled(tmp_path, "cpu")
    assert sum(found["split"].values()) == pytest.approx(found["ms"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_plain_loop_on_a_gpu(tmp_path):
    found = profiled(tmp_path, "cuda")
    assert sum(found["split"].values()) >= 0.999 * found["ms"] and found["device"] == torch.cuda.get_device_name()


def test_a_step_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="steps count from 1"):
        mh.prepare(mh.HybridLinear(32, 32), "mxfp8").profile_step(0, tmp_path / "p.json")
