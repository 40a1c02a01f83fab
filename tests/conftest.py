"""GPU test runs are recorded, and a machine without a GPU says when the CUDA kernels are newer than the record.

    pytest -m gpu tests/numerics tests/unit/test_tensor_gpu.py --record-gpu docs/measurements/gpu_tests.json

Where several processes share the files (`make test`), those that take longest begin first.
"""

import datetime
import hashlib
import json
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "measurements" / "gpu_tests.json"
KERNELS = ("csrc/cuda", "csrc/device.h", "csrc/gemm", "csrc/lt", "csrc/numerics")
OUTCOMES = ("passed", "failed", "error", "skipped")
SECONDS = Path(__file__).with_name("seconds.json")  # of processor time, of the files that take longest


def kernel_hash(root: Path = ROOT) -> str:
    """SHA-256 of the sources that CUDA code is compiled from, names and contents."""
    digest = hashlib.sha256()
    files = (p for name in KERNELS for p in (root / name, *(root / name).rglob("*")) if p.is_file())
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def record_warning(record: Path, root: Path = ROOT) -> str | None:
    """What a machine without a GPU has to say about the kernels it cannot run."""
    if not record.is_file():
        return f"no run of the GPU tests is recorded in {record.name}"
    run = json.loads(record.read_text())
    if run["kernels"] != kernel_hash(root):
        return f"{' or '.join(KERNELS)} changed since the GPU tests last ran ({run['date']}, {run['card']})"
    if run["failed"] or run["error"]:
        return f"the GPU tests failed when they last ran ({run['date']}, {run['card']})"
    return None


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # xdist's
        seconds = json.loads(SECONDS.read_text())
        items.sort(key=lambda item: -seconds.get(item.path.relative_to(ROOT).as_posix(), 0))


def pytest_addoption(parser):
    parser.addoption("--record-gpu", metavar="JSON", help="write card, versions, source hash and outcome of this run")


def pytest_terminal_summary(terminalreporter, config):
    import torch

    target = config.getoption("--record-gpu")
    if target:
        counts = {outcome: len(terminalreporter.stats.get(outcome, [])) for outcome in OUTCOMES}
        run = {
            "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__,
            "cuda": torch.version.cuda, "date": datetime.date.today().isoformat(), "kernels": kernel_hash(),
            "command": "pytest " + shlex.join(config.invocation_params.args), **counts,
        }  # fmt: skip
        Path(target).write_text(json.dumps(run, indent=1) + "\n")
    elif not torch.cuda.is_available() and (warning := record_warning(RECORD)):
        terminalreporter.section("GPU", yellow=True)
        terminalreporter.line(f"{warning}; no GPU here to run them again")
