"""Compile every fused kernel for sm_90 as a Llama-8B-shaped layer launches it: no GPU needed, nothing runs.

Prints kernel -> [registers, bytes spilled, widest global access in bits, FP8 products of warp groups,
stores to global memory, bytes of shared memory] as JSON. Compiled with Triton's own
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

from megatron_hybrid.formats import parse_format
from megatron_hybrid.groups import Groups
from megatron_hybrid.observe.statistics import measure_fused
from megatron_hybrid.ops_triton import grouped_gemm, permute, turn
from megatron_hybrid.ops_triton import statistics as fused_statistics
from megatron_hybrid.ops_triton.cross_entropy import cross_entropy
from megatron_hybrid.ops_triton.norm import norm
from megatron_hybrid.ops_triton.rotary import split_rotate
from megatron_hybrid.ops_triton.sums import column_sum
from megatron_hybrid.ops_triton.swiglu import swiglu, weighted_swiglu
from megatron_hybrid.permutation import RowMap
from megatron_hybrid.storage import QuantizedStorage

HOPPER = GPUTarget("cuda", 90, 32)
FLAGS = ("MEAN", "RESIDUAL", "BIASED", "BACKWARD", "FAST", "ADD", "WEIGHTED", "BESIDE", "CHOSEN")  # that tell kernels apart
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
        flags = "".join(f" {k}" for k in FLAGS if kwargs.get(k))
        flags += f" {kwargs['SCALED']}" if "SCALED" in kwargs else ""
        flags += f" {kwargs['PACK']}" if "PACK" in kwargs else ""
        if self.fn is grouped_gemm._rows.fn and args[4].dtype == torch.float32:
            flags += " FP32"
        if self.fn is fused_statistics._compare.fn:  # decodes as casts do
            flags = f" {kwargs['HOW'][0]} {kwargs['BLOCK']} {kwargs['ROWS']}"
            assert not re.search(r"\.ftz|\bfma\.", kernel.asm["ptx"])
        compiled[self.fn.__name__ + flags] = measure(kernel)
        return kernel

    JITFunction.run = warm


def measure(kernel) -> list:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{k}:(\d+)", usage)[1]) for k in ("REG", "STACK", "LOCAL"))
    words = re.findall(r"(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"])
    products = len(re.findall(r"wgmma\.mma_async\S*\.e4m3\.e4m3", kernel.asm["ptx"]))
    stores = kernel.asm["ptx"].count("st.global")
    return [registers, stack + local, max(int(n or 1) * int(bits) for n, bits in words), products, stores, kernel.metadata.shared]


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
    grouped()
    statistics()
    moved()
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):  # an expert's weight or its codes
        turn.turn(torch.empty(2, 1536, 2048, dtype=dtype))
    json.dump(compiled, sys.stdout)


def grouped(E=128, T=1024, K=2048, N=1536) -> None:
    """The kernels of grouped linears, as 128 experts launch them."""
    layout = Groups([T // E] * E, E, T, torch.device("cpu")).layout(grouped_gemm.BLOCK)
    where = layout.blocks
    fp8, scale = torch.float8_e4m3fn, torch.zeros(1)
    a, w = torch.empty(T, K, dtype=fp8), torch.empty(E * N, K, dtype=fp8)
    y, dw = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((T, N), (E, N, K)))
    columns = torch.empty(N, layout.rows, dtype=fp8), torch.empty(K, layout.rows, dtype=fp8)
    for of, kind, fast in grouped_gemm._TILES:
        for out in (y, y.float()) if of == "rows" else ():
            grouped_gemm.multiply_rows(a, w, scale, scale, out, where, kind, fast=fast)
    for kind in (grouped_gemm.ROW, grouped_gemm.BLOCKS):
        for out in (dw, dw.float()):
            add = out.dtype == torch.float32
            grouped_gemm.multiply_columns(*columns, scale, scale, out, where, kind, fast=False, add=add)


def statistics() -> None:
    """Of payloads by rows and of transposed columns, as recorded steps measure them."""
    x = torch.zeros(256, 4096, dtype=torch.bfloat16)
    for name in ("fp8_current_e4m3", "fp8_block_e4m3", "mxfp8_e4m3", "nvfp4"):
        for direction, transposed in (("rowwise", False), ("columnwise", True)):
            fmt = parse_format(name)
            measure_fused(QuantizedStorage.empty(fmt, direction, (256, 4096), x.dtype, "cpu", transposed=transposed), x)


def moved(tokens=64, E=128, K=2048, F=768) -> None:
    """The kernels around experts: rows moved to them and back, their activation."""
    x = torch.zeros(tokens, K, dtype=torch.bfloat16)
    choice, starts, rows, _ = permute.index(torch.zeros(tokens, E, dtype=torch.bool), 8 * tokens)
    permute.chunks_by_expert(torch.zeros(4, 2 * E, dtype=torch.int64), E, E, 8 * tokens)
    y, weights = permute.gather(x, choice, E), torch.zeros(8 * tokens)
    permute.gather(x, choice, E, weights)
    packed = torch.zeros(8 * tokens, K + 4, dtype=torch.uint8)
    codes, scales = (torch.zeros(tokens, width, dtype=torch.uint8) for width in (K, 4))
    permute.gather_two(codes, scales, *packed.split([K, 4], 1), choice, E)
    permute.copies(x, choice, starts, rows, E)
    permute.copies(x.view(torch.uint8), choice, starts, rows, E, torch.zeros(tokens, K // 128))
    for w in (None, weights):
        permute.sums(y, starts, rows, w)
    permute.dots(x, y, choice, E)
    permute.scatter(weights, choice, tokens * E)
    permute.scale_rows(y, weights, torch.zeros(E, K), rows.long())
    gated = torch.zeros(8 * tokens, 2 * F, dtype=torch.bfloat16, requires_grad=True)
    weighted_swiglu(gated, weights.requires_grad_()).sum().backward()
    probs = torch.zeros(tokens, E, requires_grad=True)
    weighted_swiglu(gated, probs, RowMap(choice, starts, rows, E)).sum().backward()


if __name__ == "__main__":
    main()
