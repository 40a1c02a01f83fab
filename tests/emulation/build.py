"""Compiles the CUDA tile kernels for the CPU, as a module like ``_C_cuda`` or with a driver under a sanitizer.

    python tests/emulation/build.py FOLDER                     # FOLDER/_C_cuda.so
    python tests/emulation/build.py FOLDER --sanitize address  # builds and runs the driver: accesses and alignment
    python tests/emulation/build.py FOLDER --sanitize thread   # the same: races within a thread block
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
CASTS = ("amax", "quantize", "cast_bf16", "cast_f16", "cast_f32", "dequantize")
KERNELS = (*CASTS, "group_amax", "group_map", "group_strips", "dense_strips", "fp4_strips", "whole_rows")
FLAGS = f"-std=c++17 -O1 -fPIC -ffp-contract=off -w -I{HERE} -I{CSRC} -DMH_BACKEND=cuda -DMH_IS_CUDA".split()
SANITIZERS = {"address": "address,alignment,bounds", "thread": "thread"}


def compile_all(folder: Path, sources: list[Path], flags: list[str]) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [str(folder / f"{source.stem}.o") for source in sources]

    def one(source, output):
        subprocess.run(["g++", *FLAGS, *flags, "-x", "c++", "-c", str(source), "-o", output], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, sources, outputs))
    return outputs


def build_module(folder: Path) -> Path:
    """The extension module over emulated kernels."""
    import pybind11

    includes = [f"-isystem{p}" for p in (pybind11.get_include(), sysconfig.get_paths()["include"])]
    sources = [CSRC / "cuda" / f"{k}.cu" for k in KERNELS] + [HERE / "emulate.cpp", CSRC / "bindings.cpp"]
    objects = compile_all(folder, sources, ["-fvisibility=hidden", "-DMH_MODULE=_C_cuda", *includes])
    module = folder / "_C_cuda.so"
    subprocess.run(["g++", "-shared", *objects, "-o", str(module)], check=True)
    return module


def build_driver(folder: Path, sanitizer: str) -> Path:
    flags = ["-g1", f"-fsanitize={SANITIZERS[sanitizer]}", "-fno-sanitize-recover=all"]
    sources = [CSRC / "cuda" / f"{k}.cu" for k in KERNELS] + [HERE / "emulate.cpp", HERE / "driver.cpp"]
    driver = folder / f"driver_{sanitizer}"
    objects = compile_all(folder / sanitizer, sources, flags)
    subprocess.run(["g++", *flags, *objects, "-o", str(driver)], check=True)
    return driver


def build_program(folder: Path, name: str) -> Path:
    """`codes`, `fp4_codes` or `decode`: compares codes that lines make, or decodes inside a product, with the definition;
    without emulated threads."""
    program = folder / name
    objects = compile_all(folder, [HERE / f"{name}.cpp", HERE / "emulate.cpp"], ["-O2"])
    subprocess.run(["g++", *objects, "-o", str(program)], check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sanitize", choices=list(SANITIZERS))
    parser.add_argument("--calls", type=int, default=200, help="random casts that the driver makes")
    args = parser.parse_args()
    if not args.sanitize:
        print(build_module(args.folder))
        return
    driver = build_driver(args.folder, args.sanitize)
    subprocess.run([str(driver), str(args.calls)], check=True, env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"})


if __name__ == "__main__":
    main()
