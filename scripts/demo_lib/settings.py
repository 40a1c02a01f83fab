"""What the demo runs: the model's flags, the command lines, and where everything goes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
MODEL_CONFIG = ROOT / "configs" / "models" / "gpt_demo.yaml"
DEFAULT_RECIPE = "mxfp8_fprop_nvfp4_bwd"
NUM_RANKS = 2


@dataclass(frozen=True)
class Settings:
    """One demo, resolved from its command line."""

    out: Path
    data_prefix: Path
    data_key: str  # of the data's content: Megatron's cached indices are only good for the data they were built from
    recipe: str = DEFAULT_RECIPE
    iterations: int = 160
    resumed: int = 10  # iterations run again from a checkpoint; 0: no checkpoint, no resumed run
    seed: int = 1234
    device: str = "cpu"
    disable_attention: bool = False
    trainer: Path = ROOT / "scripts" / "pretrain_gpt.py"
    launcher: str = "torchrun"
    extra: tuple[str, ...] = ()
    model: dict = field(default_factory=dict)

    def tokens_per_iteration(self) -> int:
        return int(self.model["seq-length"]) * int(self.model["global-batch-size"])


@dataclass(frozen=True)
class Run:
    """One training process group: a name for people, a folder, and the command."""

    name: str
    folder: Path
    command: list[str]
    env: dict[str, str]
    first_iteration: int
    last_iteration: int

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


def load_model(path: Path = MODEL_CONFIG) -> dict:
    """The flags of the model file, checked to be flags."""
    model = yaml.safe_load(path.read_text())
    if not isinstance(model, dict) or not all(isinstance(value, (bool, int, float, str)) for value in model.values()):
        raise ValueError(f"{path}: a mapping from Megatron's flags to plain values is expected")
    return model


def megatron_flags(model: dict) -> list[str]:
    """The mapping as command-line flags."""
    flags: list[str] = []
    for name, value in model.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not False:
            flags += [f"--{name}", str(value)]
    return flags


def training_run(settings: Settings, recipe: str, kind: str = "plain") -> Run:
    """The command of one run.

    ``kind``: ``plain``; ``saving``, which also leaves a checkpoint ``settings.resumed`` iterations before the
    end; or ``resumed``, which starts from that checkpoint.
    """
    name = Path(recipe).stem
    folder = settings.out / (f"{name}_resumed" if kind == "resumed" else name)
    checkpoints = str(settings.out / name / "checkpoints")
    split_point = settings.iterations - settings.resumed
    flags = megatron_flags(settings.model)
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "258"]
    for split in ("train", "valid"):
        flags += [f"--{split}-data-path", f"{settings.data_prefix}_{split}"]
    flags += ["--data-cache-path", str(settings.data_prefix.parent / f"cache-{settings.data_key[:12]}")]
    flags += ["--train-iters", str(settings.iterations), "--seed", str(settings.seed)]
    warmup = settings.model.get("lr-warmup-iters")
    if warmup is not None and warmup >= settings.iterations:  # a shorter run warms up for a quarter of it
        flags += ["--lr-warmup-iters", str(settings.iterations // 4)]
    flags += ["--hq-recipe", recipe, "--hq-metrics-file", str(folder / "metrics.jsonl")]
    if kind == "saving":
        flags += ["--save", checkpoints, "--save-interval", str(split_point)]
    elif kind == "resumed":
        flags += ["--load", checkpoints, "--ckpt-step", str(split_point)]
    if settings.disable_attention:
        flags.append("--hq-demo-disable-attention")
    command = [*_launcher(settings), str(settings.trainer), *flags, *settings.extra]
    first = split_point if kind == "resumed" else 0
    return Run(folder.name, folder, command, _environment(settings), first, settings.iterations)


def _launcher(settings: Settings) -> list[str]:
    if settings.launcher == "none":
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]


def _environment(settings: Settings) -> dict[str, str]:
    env = dict(os.environ)
    env["PYTHONUNBUFFERED"] = "1"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // NUM_RANKS)))
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it with tensor and sequence parallelism
    if settings.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env
