"""The commands of README, docs/tools.md and docs/megatron.md run as they stand, one after another, as a reader would.

Iterations are fewer, `<flags>` are a small model's, and a shim takes the place of an installed command.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPOSITORY
from mcore_cases import MOCK, MODEL

from megatron_hybrid.checkpoint_file import Checkpoint
from megatron_hybrid.recipe import Recipe

pytestmark = pytest.mark.dist

COMMANDS = {
    "python": "", "pip": "-m pip", "torchrun": "-m torch.distributed.run", "megatron-hybrid": "-m megatron_hybrid.cli"
}  # fmt: skip
TEXT = "the cat sat on the mat, and the dog lay by the door of the house in the rain. "
# what a text says -> what runs here: fewer iterations, so that it takes seconds
SHORTER = {"--train-iters 100": "--train-iters 10", "--hq-stats-interval 100": "--hq-stats-interval 2",
           "--hq-profile-step 20": "--hq-profile-step 3"}  # fmt: skip


def load_test_docs():
    spec = importlib.util.spec_from_file_location("docs_commands", REPOSITORY / "tests" / "unit" / "test_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shell_blocks(page: str) -> list[str]:
    """Its fenced shell blocks; `#` comments are the shell's own."""
    return list(load_test_docs().blocks(REPOSITORY / page, "", "sh", "bash"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkout's scripts and configs, an installation's commands, a reader's texts."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("scripts", "configs", "megatron_hybrid", "docs"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text('export PATH="$PWD/.venv/bin:$PATH"\n')
    for name, module in COMMANDS.items():
        shim = folder / ".venv" / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        shim.chmod(0o755)
    (folder / "my_texts").mkdir()
    for i in range(40):
        (folder / "my_texts" / f"{i}.txt").write_text(f"Chapter {i}. " + TEXT * 100)
    (folder / "book.txt").write_text(TEXT * 3000)
    (folder / "pages.jsonl").write_text("".join(json.dumps({"text": f"{i} " + TEXT * 20}) + "\n" for i in range(100)))
    return folder


def run(folder: Path, block: str, **replaced: str) -> str:
    """Output of a block under `bash -e`; words of the text are replaced by the keyword arguments' values."""
    for said, here in {**SHORTER, **replaced}.items():
        block = block.replace(said, here)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", "-ec", f"source .venv/bin/activate\n{block}"], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, block + done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_the_readmes_first_run_on_ones_own_text(folder):
    (block,) = (block for block in shell_blocks("README.md") if "prepare_data.py" in block)
    out = run(folder, block)
    assert "iteration       10/      10" in out and "validation loss at iteration 10 " in out
    assert f"> recipe mine ({Recipe.load(folder / 'mine.yaml').fingerprint[:12]})" in out
    printed = re.search(r"\[data\] train with: (.*)", out)[1].split()
    assert all(word in block.split() for word in printed)  # the flags in the text are those that it prints


def test_the_command_of_the_adapters_page(folder):
    (block,) = (block for block in shell_blocks("docs/megatron.md") if "scripts/pretrain_gpt.py" in block)
    iterations = re.search(r"--train-iters (\d+)", block)[0]
    out = run(folder, block, **{iterations: "--train-iters 2"})
    assert "iteration        1/       2" in out and "[after training is done]" in out


@pytest.fixture(scope="module")
def trained(folder):
    """docs/tools.md's runs: statistics, profile, a checkpoint of a model that converts."""
    runs = [block for block in shell_blocks("docs/tools.md") if "torchrun" in block]
    assert len(runs) == 2
    flags = " ".join([*MODEL, *MOCK, "--log-interval", "1"])
    saved = f"{flags} --save runs/mine/checkpoints --save-interval 4"
    out = [run(folder, block, **{"<flags>": given}) for block, given in zip(runs, (saved, flags), strict=True)]
    shutil.copytree(folder / "runs" / "a", folder / "runs" / "b")
    return folder, out


def test_statistics_and_profile(trained):
    folder, (statistics, profile) = trained
    assert "> statistics of 48 casts at step 2:" in statistics
    assert json.loads((folder / "runs" / "a" / "hq_profile.rank0.json").read_text())["split"], profile


def test_the_commands_that_look_at_runs(trained):
    folder, _ = trained
    lines = [line for block in shell_blocks("docs/tools.md") for line in block.replace("\\\n", " ").splitlines()]
    for line in (line for line in lines if line.startswith("megatron-hybrid")):
        assert run(folder, line), line
    assert "<title>" in (folder / "report" / "index.html").read_text()
    config = json.loads((folder / "exported" / "config.json").read_text())
    assert config["model_type"] == "llama" and Checkpoint(folder / "imported").args["num_layers"] == 2
