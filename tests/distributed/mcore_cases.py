"""What the tests of whole training runs share: a tiny GPT's flags, and run_mcore_cases.py, which runs them."""

from __future__ import annotations

import atexit
import functools
import json
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from launch import HERE, REPOSITORY, read_until, started, stop

SCRIPT = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
STOCK = str(HERE / "run_mcore_stock.py")
LAUNCHER = ["-m", "megatron_hybrid.launch"]
ITERATIONS = 4
END = "no more cases"  # what run_mcore_cases.py says after a list

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 "
    "--micro-batch-size 4 --global-batch-size 8 --use-distributed-optimizer --lr 5e-3 --min-lr 5e-4 "
    f"--lr-decay-style cosine --train-iters {ITERATIONS} --log-interval 1 --eval-iters 1 --eval-interval 100 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 64"
).split()
MOCK = ["--mock-data"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
# what scripts/pretrain_gpt.py sets by itself
STOCK_FLAGS = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-bias-swiglu-fusion --no-bias-dropout-fusion --distributed-backend gloo "
    "--no-create-attention-mask-in-dataloader --num-workers 0"
).split()
MIXED = "mxfp8_fprop_nvfp4_bwd"


@dataclass
class Case:
    """A run of a script on the ranks of `run_cases`; ``{folder}`` in its arguments is the results folder."""

    name: str
    argv: list[str]
    ranks: int | None = None
    patches: bool = False  # apply our patches for a script that does not ask for them
    environment: dict[str, str] = field(default_factory=dict)  # added to the launch's
    exit: list[int] = field(default_factory=list)
    output: list[str] = field(default_factory=list)


@functools.cache
def server() -> subprocess.Popen:
    """run_mcore_cases.py, which all tests of this process share: it has imported Megatron once."""
    process = started([sys.executable, str(HERE / "run_mcore_cases.py")], stdin=subprocess.PIPE)
    atexit.register(stop, process)
    return process


def run_cases(cases: list[Case], folder: Path, timeout: float = 500, ranks: int = 2) -> dict[str, Case]:
    """Run them one after another on so many ranks or fewer; exit statuses and outputs by rank."""
    process = server()
    try:
        process.stdin.write(json.dumps(dict(cases=described(cases, folder), folder=str(folder), ranks=ranks)) + "\n")
        process.stdin.flush()
        read_until(process, END, timeout)
    except BaseException:  # an interrupted test must not leave runs behind
        server.cache_clear()
        stop(process)
        raise
    return outcomes(cases, folder, ranks)


def described(cases: list[Case], folder: Path) -> list[dict]:
    """What run_mcore_cases.py runs."""
    return [dict(name=c.name, ranks=c.ranks, patches=c.patches, environment=c.environment,
                 argv=[a.format(folder=folder) for a in c.argv]) for c in cases]  # fmt: skip


def outcomes(cases: list[Case], folder: Path, ranks: int) -> dict[str, Case]:
    """The cases with exit statuses and outputs by rank, after they ran."""
    done = {case.name: case for case in cases}
    for rank in range(ranks):
        file = folder / f"results.{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []  # no case ran on all of the ranks
        for result in map(json.loads, lines):
            done[result["name"]].exit.append(result["exit"])
            done[result["name"]].output.append((folder / f"{result['name']}.{rank}.out").read_text(errors="replace"))
    return done


def metrics(path: Path) -> dict[int, dict]:
    """The metrics file of a run: numbers by iteration, evaluations merged in."""
    found: dict[int, dict] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["iteration"], {}).update(entry)
    return found


def numbers(runs, name: str) -> dict[int, dict]:
    """`metrics` of a run; runs: (folder, cases)."""
    return metrics(runs[0] / f"{name}.metrics")


def same(found: dict[int, dict], expected: dict[int, dict], but=("ms",)) -> None:
    """Every number of every iteration found is the expected one, bit for bit."""
    assert found
    for iteration, entry in found.items():
        for key in entry.keys() - set(but):
            assert entry[key] == expected[iteration][key], (iteration, key)


def assert_ended(case: Case) -> None:
    """The run ended well on all of its ranks, two where it does not say; else the end of its output."""
    assert case.exit == [0] * (case.ranks or 2), case.output[0][-3000:]


def write_dataset(prefix: Path, documents: list[int]) -> None:
    """An indexed dataset of documents of these lengths, byte by byte: no Megatron in this process."""
    lengths = np.array(documents, dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) * 2 if len(lengths) else lengths
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(boundaries))
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + starts.tobytes() + boundaries.tobytes())
    prefix.with_suffix(".bin").write_bytes(np.ones(int(lengths.sum()), dtype=np.uint16).tobytes())
