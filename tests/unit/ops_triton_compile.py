"""Compile every fused kernel for sm_90 as a Llama-8B-shaped layer launches it: no GPU needed, nothing runs.

Prints kernel -> [registers, bytes spilled, widest global access in bits] as JSON. Compiled with Triton's own
assembler, through a driver that only says what the target is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megatron_hybrid.ops_triton.cross_entropy import cross_entropy
from megatron_hybrid.ops_triton.norm import norm
from megatron_hybrid.ops_triton.rotary import split_rotate
from megatron_hybrid.ops_triton.sums import column_sum
from megatron_hybrid.ops_triton.swiglu import swiglu

HOPPER = GPUTarget("cuda", 90, 32)
compiled: dict[str, list] = {}


def compile_only() -> None:
    """From here on a launch compiles its kernel and does nothing else."""
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: HOPPER, get_current_device=lambda: 0, get_current_stream=lambda device: 0,
            get_active_torch_device=lambda: torch.device("cpu"),
        )
    )  # fmt: skip
    run = JITFunction.run

    def warm(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        flags = "".join(f" {k}" for k in ("MEAN", "RESIDUAL", "BIASED", "BACKWARD") if kwargs.get(k))
        compiled[self.fn.__name__ + flags] = measure(kernel)
        return kernel

    JITFunction.run = warm


def measure(kernel) -> list:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, local = (int(re.search(rf"{k}:(\d+)", usage)[1]) for k in ("REG", "LOCAL"))
    words = re.findall(r"(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"])
    return [registers, local, max(int(n or 1) * int(bits) for n, bits in words)]


def main() -> None:
    compile_only()
    x = torch.zeros(32, 1, 4096, dtype=torch.bfloat16, requires_grad=True)
    gamma, beta = (torch.ones(4096, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    for given, residual in ((None, False), (None, True), (beta, True)):
        y = norm(x, gamma, given, eps=1e-5, centered=False, dtype=torch.bfloat16, residual=residual)
        torch.autograd.backward(y, torch.zeros_like(x) if not residual else (torch.zeros_like(x),) * 2)
    wide = torch.zeros(32, 1, 28672, dtype=torch.bfloat16, requires_grad=True)
    for bias in (None, torch.zeros(28672, dtype=torch.bfloat16, requires_grad=True)):
        swiglu(wide, bias).sum().backward()
    mixed = torch.zeros(32, 1, 6144, dtype=torch.bfloat16, requires_grad=True)
    out = split_rotate(mixed, torch.zeros(32, 1, 1, 128), groups=8, head_size=128)
    torch.autograd.backward(out, [torch.zeros_like(o) for o in out])
    logits = torch.zeros(32, 1, 32000, dtype=torch.bfloat16, requires_grad=True)
    cross_entropy(logits * 1, torch.zeros(32, 1, dtype=torch.int64)).sum().backward()
    column_sum(x.detach())
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    main()
