"""The CPU stand-in for CUDA, in processes of their own (it must come before megatron)."""

import os
import subprocess
import sys
import textwrap

UNTOUCHED = """
    import sys
    import torch, torch.cuda.nvtx, torch.distributed, torch.distributed.distributed_c10d as c10d
    import torch.utils.data.dataloader, torch.distributed.device_mesh
    watched = [torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.nvtx,
               torch.distributed, c10d, torch.utils.data.dataloader._BaseDataLoaderIter,
               torch.distributed.device_mesh, torch.distributed.device_mesh.DeviceMesh]
    import torch._dynamo, torch.utils._device    # importing these adds attributes to torch
    def snapshot():
        return [dict(vars(owner)) for owner in watched]
    def changed(before):
        after = snapshot()
        return [(owner, name) for owner, old, new in zip(watched, before, after)
                for name in old if name not in new or new[name] is not old[name]]
    before = snapshot()
"""


def run(code, ok=True):
    """Run Python code in a process without GPUs; its output."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (result.returncode == 0) == ok, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_importing_changes_nothing():
    run(
        UNTOUCHED
        + """
    import megatron_hybrid
    import megatron_hybrid.patches
    import megatron_hybrid.patches.cpu_device as cpu_device
    assert not changed(before), changed(before)
    assert not any(name == "megatron" or name.startswith("megatron.") for name in sys.modules)
    assert not cpu_device.is_installed() and not torch.cuda.is_available()
    """
    )


def test_install_and_uninstall_are_inverse():
    run(
        UNTOUCHED
        + """
    from megatron_hybrid.patches import cpu_device
    assert cpu_device.install().state == "applied" and cpu_device.install().state == "applied"
    assert cpu_device.is_installed() and torch.cuda.is_available() and changed(before)
    assert "cuda" in vars(torch.Tensor)
    cpu_device.uninstall()
    assert not changed(before), changed(before)
    assert "cuda" not in vars(torch.Tensor) and not torch.cuda.is_available()
    """
    )


def test_cuda_means_cpu():
    run("""
    import torch
    from megatron_hybrid.patches import cpu_device
    cpu_device.install()
    CPU = torch.device("cpu")
    for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.cuda.current_device()):
        assert torch.zeros(2, device=device).device == CPU
        assert torch.ones(2).to(device).device == CPU
        assert torch.ones(2).to(device=device, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.ones(2).new_zeros(3, device=device).device == CPU
        assert torch.tensor([1], device=device, pin_memory=True).device == CPU
        assert torch.empty_like(torch.ones(2), device=device).device == CPU
    assert torch.ones(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.ones(2).device.type == "meta"
    x = torch.ones(2)
    assert x.cuda() is x and x.pin_memory() is x and not x.is_cuda
    assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type(torch.int32).dtype == torch.int32 and x.type("torch.cuda.HalfTensor").dtype == torch.half
    assert torch.nn.Linear(2, 2, device="cuda").cuda().to("cuda").weight.device == CPU
    assert torch.compile(len) is len and torch.compile(mode="max-autotune")(len) is len

    stream, event, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        event.record()
    end.record(); end.synchronize()
    assert event.elapsed_time(end) >= 0 and torch.cuda.memory_allocated() > 0
    assert torch.cuda.get_device_properties(0).major == torch.cuda.get_device_capability()[0]

    torch.manual_seed(3); first = torch.rand(2, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(first, torch.rand(2))
    state = torch.cuda.get_rng_state(); second = torch.rand(2); torch.cuda.set_rng_state(state)
    assert torch.equal(second, torch.rand(2))

    x = torch.ones(2, requires_grad=True)
    class Make(torch.autograd.Function):    # a device named inside backward, too
        @staticmethod
        def forward(ctx, x): return x * 2
        @staticmethod
        def backward(ctx, g): return torch.full((2,), 5.0, device=torch.cuda.current_device())
    Make.apply(x).sum().backward()
    assert x.grad.tolist() == [5.0, 5.0]

    # Dropout after a resume must see the numbers that it would have seen without it.
    state = torch.cuda.get_rng_state()
    iter(torch.utils.data.DataLoader([1, 2, 3]))
    assert torch.equal(state, torch.cuda.get_rng_state())
    """)


def test_refusals():
    """One at a time: megatron imported already, and a machine with GPUs; ``force`` goes ahead."""
    output = run("""
    import sys, types
    import torch
    from megatron_hybrid.patches import cpu_device
    def refused():
        try:
            cpu_device.install()
        except RuntimeError as error:
            print(error)
        assert not cpu_device.is_installed() and "cuda" not in vars(torch.Tensor)
    sys.modules["megatron.core"] = types.ModuleType("megatron.core")
    refused()
    del sys.modules["megatron.core"]
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_name = lambda: "Some GPU"
    refused()
    cpu_device.install(force=True)
    assert cpu_device.is_installed() and torch.cuda.device_count() == 1
    """)
    assert "must run before megatron is imported" in output and "2 GPU(s) (Some GPU)" in output
