"""Builds the compiled parts: ``megatron_hybrid._C`` (CPU) always, ``megatron_hybrid._C_cuda`` where nvcc is found,
``megatron_hybrid._C_gemm`` (grouped FP8 GEMMs for Hopper) beside it, ``megatron_hybrid._C_lt`` (cuBLASLt called directly)
where cublasLt.h is there too, and ``megatron_hybrid._C_node`` (the linear as a node of autograd) where torch and its
headers are.

No GPU is needed to build any. Package metadata lives in pyproject.toml. Environment:

MH_BUILD_CUDA   0: leave the CUDA part out; 1: fail when nvcc is missing. Unset: build it where nvcc is found.
MH_CUDA_ARCH    space-separated ``-gencode`` pairs as arch=code, default "compute_90a=sm_90a compute_90=compute_90"
CUDA_HOME, CXX  where nvcc and the C++ compiler are, when not on PATH.

The same as config settings: ``pip install -e . --no-build-isolation -C--build-option=build_ext
-C--build-option=--without-cuda`` (or ``--cuda-arch="compute_100a=sm_100a"``).
"""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_namespace_packages, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
HOPPER = "compute_90a=sm_90a"
DEFAULT_ARCH = f"{HOPPER} compute_90=compute_90"

# IEEE FP32 as numerics.md asks for it: no contraction into FMA. The last two only say that nobody reads errno or
# floating-point exception flags, without which loops with selects do not vectorise; no result changes.
CXX_FLAGS = [
    *"-std=c++17 -O3 -fPIC -fvisibility=hidden -Wall -Wextra".split(),
    *"-ffp-contract=off -fno-math-errno -fno-trapping-math".split(),
]
NVCC_FLAGS = [
    *"-std=c++17 -O3 -ftz=false -fmad=false -prec-div=true -prec-sqrt=true".split(),
    *"-Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas,-ffp-contract=off".split(),
]
ISA_FLAGS = {
    "baseline": [],
    "avx2": "-mavx2 -mfma -mf16c -mbmi2".split(),
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mbmi2 -mprefer-vector-width=512".split(),
}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def say(text: str) -> None:
    print(f"megatron_hybrid: {text}", file=sys.stderr, flush=True)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc") or (str(p) if (p := Path("/usr/local/cuda/bin/nvcc")).is_file() else None)


def cuda_root(nvcc: str) -> Path:
    """The toolkit nvcc belongs to, asked of nvcc itself: it may be a wrapper script or a link."""
    out = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    for line in out.splitlines():
        if line.startswith("#$ TOP="):
            return Path(line.removeprefix("#$ TOP=")).resolve()
    return Path(nvcc).resolve().parent.parent


def library_headers(root: Path) -> list[Path] | None:
    """Include folders for cublasLt.h: the toolkit's own, else those of the CUDA packages torch brings, then the toolkit's."""
    toolkit = root / "include"
    if (toolkit / "cublasLt.h").is_file():
        return [toolkit]
    spec = importlib.util.find_spec("nvidia")
    for folder in () if spec is None else spec.submodule_search_locations:
        for header in sorted(Path(folder).glob("*/include/cublasLt.h")):
            return [header.parent, toolkit]
    return None


def torch_build() -> tuple[list[str], list[str]] | None:
    """(flags to compile with torch's C++ headers, flags to link with it); None where torch or they are missing.

    pybind11 is the one that torch brings: its Python objects are handed over.
    """
    try:
        import torch
    except ImportError:
        return None
    root = Path(torch.__file__).parent
    folders = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    if not (folders[0] / "torch" / "csrc" / "autograd" / "python_cpp_function.h").is_file():
        return None
    flags = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-DAT_PER_OPERATOR_HEADERS"]
    flags += [f"-isystem{folder}" for folder in folders]
    return flags, [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]


def stale(output: Path, depfile: Path, command: list[str]) -> bool:
    """Whether an object must be rebuilt: a source, a header or its command changed."""
    stamp = output.with_suffix(".cmd")
    if not (output.is_file() and depfile.is_file() and stamp.is_file()) or stamp.read_text() != shlex.join(command):
        return True
    built = output.stat().st_mtime
    words = depfile.read_text().replace("\\\n", " ").partition(":")[2].split()
    return any(not os.path.exists(w) or os.path.getmtime(w) > built for w in words)


def compile_one(command: list[str], source: Path, output: Path) -> None:
    """Compile ``source`` unless its object is up to date."""
    depfile = output.with_suffix(".d")
    command = [*command, "-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(output)]
    if not stale(output, depfile, command):
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\nfailed:\n{done.stdout}{done.stderr}")
    if done.stderr.strip():
        say(done.stderr.strip())
    output.with_suffix(".cmd").write_text(shlex.join(command))
    say(f"compiled {source.relative_to(ROOT)} in {time.time() - start:.1f} s")


class BuildKernels(build_ext):
    """Compiles each source with the flags it needs and keeps the objects under build/, so that reinstalling is quick."""

    user_options = [
        *build_ext.user_options,
        ("without-cuda", None, "leave the CUDA kernels out"),
        ("cuda-arch=", None, f"-gencode pairs (default: {DEFAULT_ARCH})"),
    ]
    boolean_options = [*build_ext.boolean_options, "without-cuda"]

    def initialize_options(self):
        super().initialize_options()
        self.without_cuda = False
        self.cuda_arch = None

    def finalize_options(self):
        super().finalize_options()
        self.cuda_arch = self.cuda_arch or os.environ.get("MH_CUDA_ARCH") or DEFAULT_ARCH
        self.cxx = shlex.split(os.environ.get("CXX", "")) or ["g++" if shutil.which("g++") else "c++"]
        # one folder an interpreter and platform: objects of another must not be reused
        self.objects = ROOT / "build" / f"kernels-{sysconfig.get_config_var('SOABI')}"

    def run(self):
        nvcc = self._wanted_nvcc()
        self.nvcc = nvcc
        if nvcc is None:
            self._leave_out("_C_cuda")
        if nvcc is None or HOPPER not in self.cuda_arch.split():
            self._leave_out("_C_gemm")
        self.lt_includes = None if nvcc is None else library_headers(cuda_root(nvcc))
        if self.lt_includes is None:
            say("cuBLASLt: not called directly (no nvcc, or no cublasLt.h in the toolkit or in torch's CUDA packages)")
            self._leave_out("_C_lt")
        super().run()

    def _leave_out(self, name: str) -> None:
        self.extensions = [e for e in self.extensions if not e.name.endswith(name)]

    def _wanted_nvcc(self) -> str | None:
        setting = os.environ.get("MH_BUILD_CUDA", "").lower()
        if self.without_cuda or setting in ("0", "off", "false", "no"):
            say("CUDA kernels: not built (switched off)")
            return None
        nvcc = find_nvcc()
        if nvcc is None:
            if setting:
                raise RuntimeError("MH_BUILD_CUDA asks for the CUDA kernels, but nvcc is neither on PATH nor in CUDA_HOME")
            say("CUDA kernels: not built (nvcc is neither on PATH nor in CUDA_HOME)")
        return nvcc

    def build_extensions(self):
        """All of them at once; what they compile shares one pool."""
        workers = self.parallel or os.cpu_count() or 1
        with ThreadPoolExecutor(int(workers)) as self.compilers, ThreadPoolExecutor(len(self.extensions)) as builders:
            list(builders.map(self.build_extension, self.extensions))

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if ext.name.endswith("_C_cuda"):
            self._build_cuda(target)
            say(f"CUDA kernels: built for {self.cuda_arch}")
        elif ext.name.endswith("_C_gemm"):
            self._build_gemm(target)
        elif ext.name.endswith("_C_node"):
            self._build_node(target)
        elif ext.name.endswith("_C_lt"):
            flags = [f"-isystem{path}" for path in (*self.lt_includes, *self._python_includes())]
            command = [*self.cxx, *CXX_FLAGS, *flags]
            self._link(self._compile([(command, CSRC / "lt" / "matmul.cpp", self.objects / "lt_matmul.o")]), target, ["-ldl"])
        else:
            self._build_cpu(target)
            say(f"CPU kernels: built for {', '.join(ISA_FLAGS) if IS_X86 else platform.machine()}")

    def _python_includes(self) -> list[str]:
        import pybind11

        return [pybind11.get_include(), sysconfig.get_paths()["include"]]

    def _module_flags(self, module: str, backend: str) -> list[str]:
        return [f"-DMH_MODULE={module}", f"-DMH_BACKEND={backend}", *(f"-isystem{path}" for path in self._python_includes())]

    def _compile(self, jobs: list[tuple[list[str], Path, Path]]) -> list[str]:
        list(self.compilers.map(lambda job: compile_one(*job), jobs))
        return [str(output) for _, _, output in jobs]

    def _link(self, objects: list[str], target: Path, libraries: list[str]) -> None:
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
        # to a new file, then renamed: a process that has the old one mapped keeps it
        fresh = target.with_name(target.name + ".new")
        subprocess.run([*self.cxx, *shared, *objects, "-o", str(fresh), *libraries], check=True)
        os.replace(fresh, target)

    def _build_node(self, target: Path) -> None:
        found = torch_build()
        if found is None:
            return say("autograd node: not built (no torch, or not its C++ headers); Python's linear serves")
        flags, libraries = found
        python = f"-isystem{sysconfig.get_paths()['include']}"
        command = [*self.cxx, *CXX_FLAGS, "-O2", *flags, python]
        try:
            sources = sorted((CSRC / "node").glob("*.cpp"))
            objects = self._compile([(command, source, self.objects / f"node_{source.stem}.o") for source in sources])
            self._link(objects, target, libraries)
        except (RuntimeError, subprocess.CalledProcessError) as error:  # torch's C++ interface is no stable one
            return say(f"autograd node: not built, Python's linear serves; it does not compile for this torch: {error}")
        say("autograd node: built")

    def _build_cpu(self, target: Path) -> None:
        isas = ISA_FLAGS if IS_X86 else {"baseline": []}
        common = [*self.cxx, *CXX_FLAGS, "-DMH_BACKEND=cpu", *(["-DMH_X86_ISAS"] if IS_X86 else [])]
        jobs = [
            ([*common, "-fopenmp", *flags], CSRC / "cpu" / f"isa_{isa}.cpp", self.objects / f"isa_{isa}.o")
            for isa, flags in isas.items()
        ]
        jobs.append((common, CSRC / "cpu" / "dispatch.cpp", self.objects / "dispatch.o"))
        bindings = [*self.cxx, *CXX_FLAGS, "-O1", *self._module_flags("_C", "cpu")]
        jobs.append((bindings, CSRC / "bindings.cpp", self.objects / "bindings_cpu.o"))
        self._link(self._compile(jobs), target, ["-fopenmp"])

    def _build_cuda(self, target: Path) -> None:
        nvcc = self._nvcc_for(self.cuda_arch, "-DMH_BACKEND=cuda")
        sources = sorted((CSRC / "cuda").glob("*.cu"))
        jobs = [(nvcc, source, self.objects / f"cuda_{source.stem}.o") for source in sources]
        built = ", ".join(pair.split("=")[1] for pair in self.cuda_arch.split())
        bindings = [*self.cxx, *CXX_FLAGS, "-O1", "-DMH_IS_CUDA", f'-DMH_CUDA_ARCHS="{built}"']
        bindings += self._module_flags("_C_cuda", "cuda")
        jobs.append((bindings, CSRC / "bindings.cpp", self.objects / "bindings_cuda.o"))
        self._link(self._compile(jobs), target, self._runtime())

    def _build_gemm(self, target: Path) -> None:
        folder, bindings = CSRC / "gemm", [*self.cxx, *CXX_FLAGS, "-O1", *(f"-isystem{p}" for p in self._python_includes())]
        jobs = [
            *((self._nvcc_for(HOPPER), folder / f"{name}.cu", self.objects / f"gemm_{name}.o") for name in ("grouped", "decode")),
            *((bindings, folder / f"{n}.cpp", self.objects / f"gemm_{n}.o") for n in ("bindings", "decode_bindings")),
        ]
        self._link(self._compile(jobs), target, self._runtime())
        say("grouped GEMMs: built for Hopper")

    def _nvcc_for(self, archs: str, *flags: str) -> list[str]:
        pairs = [f"-gencode=arch={a},code={c}" for a, c in (pair.split("=") for pair in archs.split())]
        return [self.nvcc, *NVCC_FLAGS, "-ccbin", self.cxx[0], *pairs, *flags]

    def _runtime(self) -> list[str]:
        """Linked statically: torch brings its own, and both share the device's primary context."""
        root = cuda_root(self.nvcc)
        libs = next((d for d in (root / "lib64", root / "lib", root / "targets/x86_64-linux/lib") if d.is_dir()), root)
        return [f"-L{libs}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


# patches/ and configs/ stand beside the package in the repository and belong inside it once installed
BESIDE = {"megatron_hybrid.patches": "patches", "megatron_hybrid.configs": "configs"}
FOLDERS = [f"megatron_hybrid.configs.{name}" for name in find_namespace_packages(str(ROOT / "configs"))]

setup(
    packages=[*find_packages(str(ROOT), include=["megatron_hybrid", "megatron_hybrid.*"]), *BESIDE, *FOLDERS],
    package_dir={"megatron_hybrid": "megatron_hybrid", **BESIDE},
    package_data={name: ["*.yaml"] for name in FOLDERS},
    ext_modules=[
        *(Extension(f"megatron_hybrid.{name}", []) for name in ("_C", "_C_cuda", "_C_gemm", "_C_lt")),
        Extension("megatron_hybrid._C_node", [], optional=True),  # left out where it cannot be built
    ],
    cmdclass={"build_ext": BuildKernels},
)
