"""What this installation can do: every finding with its reason."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import __version__, kernels, node, ops_triton
from ..explain import backends
from ..gemm import DeviceKind, cublaslt, grouped_cuda

OK, NOTE, FAIL = "ok", "note", "FAIL"

# what Apex's modules do in Megatron: import name -> use
_APEX = {
    "amp_C": "fused Adam, gradient norms and scaling",
    "fused_weight_gradient_mlp_cuda": "weight gradients added to FP32 inside the gemm",
    "scaled_masked_softmax_cuda": "fused softmax of Megatron's own attention",
}


@dataclass(frozen=True)
class Finding:
    """One line: a section, ``ok``, ``note`` or ``FAIL``, the thing, and what was found."""

    section: str
    state: str
    what: str
    detail: str

    def record(self) -> dict[str, str]:
        return dataclasses.asdict(self)


def examine() -> list[Finding]:
    """Every finding, in order. Changes nothing; imports Megatron where it is installed."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [
        *_versions(),
        *_kernels(devices),
        *(finding for kind in _kinds(devices) for finding in _backends(kind)),
        *_megatron(),
        *_apex(),
    ]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    section = "installation"
    yield Finding(section, OK, "megatron_hybrid", f"{__version__}, Python {platform.python_version()}")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding(section, OK, "torch", f"{torch.__version__}, {cuda}")
    found = _version("transformer_engine")
    yield Finding(section, OK if found else NOTE, "Transformer Engine", found or "not installed; nothing needs it")


def _kernels(devices) -> Iterator[Finding]:
    section = "kernels"
    yield _probed(section, "CPU", torch.device("cpu"), lambda built: f"built for {_isas(built)}")
    if not devices:
        yield Finding(section, NOTE, "CUDA device", f"none found; training runs on the CPU ({_cuda_build()})")
    for device in devices:
        properties = torch.cuda.get_device_properties(device)
        what = f"{device} {properties.name}, {DeviceKind.of(device)}, {properties.total_memory / 2**30:.0f} GiB"
        yield _probed(section, what, device, lambda built: f"built for {_archs(built)}")
    direct = cublaslt.library() is not None
    detail = "called directly on Hopper" if direct else "through torch: no `_C_lt` in this build, or a library before 12.9"
    yield Finding(section, OK if direct else NOTE, "cuBLASLt", detail)
    built = grouped_cuda.library() is not None
    detail = "in CUDA on Hopper" if built else "in Triton: no `_C_gemm` in this build (needs nvcc and sm_90a)"
    yield Finding(section, OK if built else NOTE, "grouped FP8 GEMMs", detail)
    detail = "experts' on Hopper; others by name (`decoding`)" if built else "no `_C_gemm` in this build"
    yield Finding(section, OK if built else NOTE, "GEMMs that decode MXFP8 and NVFP4 inside", detail)
    built = node.library() is not None
    detail = "the commonest linear runs without Python in backward" if built else "no `_C_node` for this torch: Python serves"
    yield Finding(section, OK if built else NOTE, "autograd node", detail)
    for reason in dict.fromkeys(ops_triton.reason(device) for device in devices or [torch.device("cpu")]):
        detail = "used in Megatron's layers" if reason is None else f"not used, plain torch instead: {reason}"
        what = "norm, SwiGLU, rotary embedding, loss, casts of groups (Triton)"
        yield Finding(section, OK if reason is None else NOTE, what, detail)


def _probed(section: str, what: str, device: torch.device, describe) -> Finding:
    """Cast a known tensor on the device: a kernel that is missing or built for another one shows itself."""
    try:
        built = kernels.extension(device.type)
        _probe(device)
    except (RuntimeError, AssertionError) as error:
        return Finding(section, FAIL, what, str(error) or "a cast gave wrong bytes")
    return Finding(section, OK, what, f"{describe(built)}; a cast gives the expected bytes")


def _probe(device: torch.device) -> None:
    from ..quantizer import HybridQuantizer

    x = torch.tensor([[0.0, 1.0, -2.0, 448.0]], device=device).repeat(1, 8)
    tensor = HybridQuantizer("mxfp8_e4m3", "nvfp4").quantize(x)
    assert tensor.rowwise.codes()[0, :4].tolist() == [0, 0x38, 0xC0, 0x7E]
    assert torch.equal(tensor.rowwise.dequantize(), x)


def _isas(built) -> str:
    others = [name for name in built.isas() if name != built.isa()]
    return f"{built.isa()} (in use), {', '.join(others)}" if others else f"{built.isa()} (in use)"


def _archs(built) -> str:
    return getattr(built, "archs", None) or "architectures that were not recorded"


def _cuda_build() -> str:
    try:
        return f"the CUDA kernels are built for {_archs(kernels.extension('cuda'))}"
    except RuntimeError:
        return "the CUDA kernels are not built"


def _kinds(devices) -> list[DeviceKind]:
    return list(dict.fromkeys(DeviceKind.of(device) for device in devices)) or [DeviceKind("cpu")]


def _backends(kind: DeviceKind) -> Iterator[Finding]:
    """A line a backend: the pairs of operands that it is chosen for, or why it is for none."""
    rows = backends(kind).records()
    for name in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == name]
        chosen = [row["operands"] for row in mine if row["verdict"] == "chosen"]
        usable = [row for row in mine if row["verdict"] != "-"]
        runs = mine[0]["runs"]
        if chosen:
            yield Finding(f"gemm backends on {kind}", OK, name, f"{runs}; chosen for {', '.join(chosen)}")
        elif usable:
            yield Finding(f"gemm backends on {kind}", NOTE, name, f"{runs}; usable, only by name")
        else:
            reasons = dict.fromkeys(row["reason"].split(", found")[0] for row in mine)
            yield Finding(f"gemm backends on {kind}", NOTE, name, f"not usable: {'; '.join(reasons)}")


def _megatron() -> Iterator[Finding]:
    from ..mcore import versions

    section = "Megatron"
    try:
        yield Finding(section, OK, "megatron-core", f"{versions.require()} (needed: {versions.SUPPORTED})")
    except ValueError as error:
        yield Finding(section, FAIL, "megatron-core", str(error))
        return
    states = {"applied": OK, "not applied": OK, "not needed": OK, "unavailable": FAIL, "overwritten": FAIL}
    words = {"not applied": "fits this version", "unavailable": "does not fit", "not needed": "not needed here"}
    try:
        statuses = list(_patches())
    except ImportError as error:
        detail = f"cannot be imported ({error}); is the package installed? `make setup` does it"
        yield Finding(section, FAIL, "patches", detail)
        return
    for status in statuses:
        detail = words.get(status.state, status.state) + (f": {status.detail}" if status.detail else "")
        yield Finding(section, states[status.state], f"patch {status.name}", detail)


def _patches() -> Iterator:
    """The state of every patch: those of Megatron's faults, our flags and numbers, and where there is no GPU its stand-in."""
    from .. import launch, patches
    from ..mcore import metrics
    from ..patches import cpu_device

    yield from patches.statuses()
    with patches.quiet_missing_te_warnings():
        yield launch.arguments_patch().status()
        yield metrics.patch(metrics.Recorder(Path())).status()
        if not torch.cuda.is_available():
            yield cpu_device.patch().status()


def _apex() -> Iterator[Finding]:
    section = "Apex"
    if importlib.util.find_spec("apex") is None and not any(map(importlib.util.find_spec, _APEX)):
        yield Finding(section, NOTE, "apex", "not installed; own fused Adam and foreach kernels take its place")
        return
    for module, use in _APEX.items():
        there = importlib.util.find_spec(module) is not None
        yield Finding(section, OK if there else NOTE, module, f"{use}: {'used' if there else 'not built'}")
