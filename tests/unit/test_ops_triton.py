"""Fused kernels against float64: on the CPU in Triton's interpreter, one process for all; on a GPU compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import interpreted
import pytest
import torch

from megatron_hybrid import ops_triton

CASES = Path(__file__).with_name("ops_triton_cases.py")
COMPILE = CASES.with_name("ops_triton_compile.py")
CHECKS = interpreted.names(CASES)

if sys.platform != "linux":
    pytest.skip("the lock has Triton for Linux only", allow_module_level=True)


@pytest.fixture(scope="module")
def errors() -> dict:
    return interpreted.errors_of(CASES, seconds=550)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check, errors):
    assert errors[check] is None, errors[check]


def test_every_kernel_compiles_for_hopper(tmp_path):
    """As a Llama-8B-shaped layer and 128 experts launch them: nothing spilled, global memory in 16-byte words.

    Grouped GEMMs multiply FP8 by warp groups and may fill the registers; three with FP32 results spill where they leave."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, COMPILE], env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert len(kernels) == 55
    for name, (registers, spilled, width, products, _, shared) in kernels.items():
        grouped = name.startswith(("_rows", "_contract"))
        allowed = {"_contract ADD 0": 192, "_contract ADD 1": 192, "_rows 0 FP32": 8}.get(name, 0)
        assert registers <= (255 if grouped else 128) and spilled <= allowed, (name, registers, spilled)
        assert shared <= 227 << 10, (name, shared)
        assert width == (32 if name == "_scatter" else 128) and (products > 0) == grouped, (name, width, products)
    a_tile = 8  # stores of 16 bytes a thread; there are two kinds of tiles, those of empty groups must not be optimized out
    assert kernels["_contract 0"][-2] == kernels["_contract 1"][-2] == 2 * a_tile


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("check", CHECKS)
def test_compiled(check):
    import ops_triton_cases

    ops_triton_cases.CHECKS[check]("cuda")


def test_reasons():
    assert ops_triton.reason(torch.device("cpu")) == "they need a CUDA device, found cpu"
    gpu = ops_triton.reason(torch.device("cuda"))
    assert gpu is None or "compiler" in gpu


def test_importing_the_package_imports_no_triton():
    code = "import sys, megatron_hybrid.ops_triton; assert 'triton' not in sys.modules, 'triton was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
