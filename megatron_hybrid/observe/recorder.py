"""Statistics of quantization in a training loop: every Nth step, of the first microbatch, to a file and TensorBoard.

    ctl = mh.prepare(model, "mxfp8")
    ctl.record_statistics(every=100, path="runs/mine/stats.jsonl")      # then train as ever

In a step that is recorded, modules get an `ObservedPlan` in place of their plan; nothing else knows of it, and in the
other steps nothing runs. The device is read once, at the end of a recorded step. Compiled code is not measured, nor is
an input that came quantized, which its producer's plan sees.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from ..gemm import READ_BY
from ..plan import GemmPlan
from ..quantizer import as_matrix
from ..storage import QuantizedStorage
from .statistics import FIELDS, LOWEST_EXPONENT, Measured, measure

_SCALARS = ("snr_db", "cosine", "amax", "scale_min", "scale_max", "underflow", "saturation", "zeros")


class StatisticsError(ValueError):
    """A place that statistics cannot be written to, or an interval that is none."""


class Clock:
    """Time spent: of the device where that is a GPU, else of the host."""

    def __init__(self):
        self._host, self._events = 0.0, []

    @contextlib.contextmanager
    def running(self, device: torch.device):
        """Add what happens inside."""
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            start = time.perf_counter()
            yield
            self._host += time.perf_counter() - start

    def seconds(self) -> float:
        """Waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._host + sum(start.elapsed_time(end) for start, end in self._events) * 1e-3


@dataclass
class Observer:
    """What one module's casts measured in this step: (operand, direction) -> what it was, and `Measured`."""

    clock: Clock
    found: dict[tuple[str, str], tuple[dict, Measured]] = field(default_factory=dict)

    def watch(self, plan: GemmPlan) -> ObservedPlan:
        """The same plan, its casts seen by this."""
        same = {f.name: getattr(plan, f.name) for f in fields(plan) if f.init}
        return ObservedPlan(**same, observer=self)

    def see(self, operand: str, payload: QuantizedStorage | None, reference, source: str = "original") -> None:
        """Measure the first quantized payload of each operand and direction.

        reference: a function that gives the tensor (M, K). source: what that tensor is.
        """
        if payload is None or not payload.format.is_quantized or (operand, payload.direction) in self.found:
            return
        with self.clock.running(payload.device):
            what = {"format": str(payload.format), "shape": list(payload.shape), "source": source}
            self.found[operand, payload.direction] = what, measure(payload, reference().detach())


@dataclass(frozen=True)
class ObservedPlan(GemmPlan):
    """A plan whose casts are measured."""

    observer: Observer | None = None

    def quantize(self, operand, x, **options):
        payloads = super().quantize(operand, x, **options)
        for payload in payloads:
            self.observer.see(operand, payload, lambda: as_matrix(x))
        return payloads

    def derive(self, operand, row, **options):
        payload = super().derive(operand, row, **options)  # only the row is left to compare with
        self.observer.see(operand, payload, lambda: row.dequantize(row.dtype), "rowwise")
        return payload


class Recorder:
    """Every Nth step's statistics of a model's `LinearRuntime`s; the `Controller` calls `begin_step` and `end_step`.

    every: in steps. path: JSON lines, appended; rank: added to the file's name where it is not None, so that ranks do
    not share a file. writer: TensorBoard's `SummaryWriter`, or anything with its `add_scalar`, `add_histogram_raw` and
    `flush`. say: gets the line about the cost, once a recorded step; None says nothing. only: whether a runtime is
    measured; all are without it. Raises `StatisticsError`.
    """

    def __init__(self, every: int, path, *, writer=None, rank: int | None = None, say=print, only=None):
        if every < 1:
            raise StatisticsError(f"statistics every {every} steps: give a number of at least 1")
        self.every, self.writer, self.rank, self.say, self.only = every, writer, rank, say, only
        self.path = ranked_path(Path(path), rank)
        if self.path.is_dir():
            raise StatisticsError(f"statistics cannot be written to {self.path}: it is a folder")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StatisticsError(f"statistics cannot be written to {self.path}: {error}") from None
        self._observers: list[tuple] = []
        self._clock = Clock()
        self._since: float | None = None  # when the last recorded step ended

    def begin_step(self, step: int, runtimes) -> None:
        """Observe this step's casts, if it is its turn."""
        if self._since is None:
            self._since = time.perf_counter()
        self._stop()  # of a step that did not come to its end
        if step % self.every:
            return
        self._clock = Clock()
        for runtime in filter(self.only, runtimes) if self.only is not None else runtimes:
            runtime.observer = Observer(self._clock)
            self._observers.append((runtime, runtime.observer))

    def _stop(self) -> None:
        for runtime, _ in self._observers:
            runtime.observer = None
        self._observers = []

    def end_step(self, step: int) -> None:
        """Write what a recorded step found. Reads the device once; does nothing after other steps."""
        if not self._observers:
            return
        started = time.perf_counter()
        found = [(runtime, key, *seen) for runtime, o in self._observers for key, seen in o.found.items()]
        self._stop()
        records = [self._record(step, *entry) for entry in zip(found, *_to_host([m for *_, m in found]), strict=True)]
        with self.path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        if self.writer is not None:
            self._write_scalars(step, records)
        self._tell(step, len(records), self._clock.seconds() + time.perf_counter() - started)

    def _record(self, step: int, entry, numbers: list[float], exponents: list[int]) -> dict:
        runtime, (operand, direction), what, _ = entry
        values = dict(zip(FIELDS, numbers, strict=True))
        counts = {str(i + LOWEST_EXPONENT): n for i, n in enumerate(exponents) if n}
        place = {} if self.rank is None else {"rank": self.rank}
        role = {"module": runtime.label, "layer": runtime.role.layer, "operand": operand, "direction": direction}
        return {"step": step, **place, **role, "gemm": READ_BY[operand, direction], **what, **derived(values),
                "block_exponents": counts}  # fmt: skip

    def _write_scalars(self, step: int, records: list[dict]) -> None:
        for record in records:
            place = f"{record['module']}/{record['operand']}.{record['direction']}"
            for name in _SCALARS:
                if record[name] is not None:
                    self.writer.add_scalar(f"hq-{name}/{place}", record[name], step)
            if record["block_exponents"]:
                self.writer.add_histogram_raw(
                    f"hq-block_exponents/{place}", **histogram(record["block_exponents"]), global_step=step
                )
        self.writer.flush()

    def _tell(self, step: int, count: int, seconds: float) -> None:
        now = time.perf_counter()
        share = seconds / max(now - self._since, 1e-9)
        self._since = now
        if self.say is not None:
            share = f"{share:.1%} of the time since the last"
            self.say(f"> statistics of {count} casts at step {step}: {seconds:.2f} s, {share}")


def histogram(counts: dict[str, int]) -> dict:
    """What TensorBoard's `add_histogram_raw` takes, a bucket an exponent."""
    found = sorted((int(exponent), count) for exponent, count in counts.items())
    low, high, by_exponent = found[0][0], found[-1][0], dict(found)
    return {
        "min": low, "max": high, "num": sum(by_exponent.values()), "sum": sum(e * n for e, n in found),
        "sum_squares": sum(e * e * n for e, n in found), "bucket_limits": [e + 0.5 for e in range(low, high + 1)],
        "bucket_counts": [by_exponent.get(e, 0) for e in range(low, high + 1)],
    }  # fmt: skip


def ranked_path(path: Path, rank: int | None) -> Path:
    """``stats.jsonl`` of rank 3: ``stats.rank3.jsonl``."""
    return path if rank is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def derived(values: dict[str, float]) -> dict:
    """What is written of the sums: numbers, or None for what is not defined.

    snr_db is None too where the payload is exact; then `cosine` is 1.
    """
    signal, noise, gain = values["signal"], values["noise"], values["gain"]
    out = {name: values[name] for name in FIELDS[:7]}
    out["snr_db"] = 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.nan
    out["cosine"] = 1.0 - _one_minus_cosine(signal, signal - gain, noise, gain)
    return {name: value if math.isfinite(value) else None for name, value in out.items()}


def _one_minus_cosine(signal: float, decoded: float, noise: float, gain: float) -> float:
    """From |x|^2, |q|^2, |x - q|^2 and |x|^2 - |q|^2, without the cancellation of 1 - x.q / (|x| |q|)."""
    if noise == 0:
        return 0.0
    if not (signal > 0 and decoded > 0):
        return math.nan
    x, q = math.sqrt(signal), math.sqrt(decoded)
    return max(noise - (gain / (x + q)) ** 2, 0.0) / (2 * x * q)


def _to_host(measured: list[Measured]) -> tuple[list, list]:
    """Numbers and exponents as lists: one copy a device, whatever the number of tensors."""
    if not measured:
        return [], []
    device = measured[0].numbers.device
    numbers = torch.stack([m.numbers.to(device) for m in measured]).tolist()
    return numbers, torch.stack([m.exponents.to(device) for m in measured]).tolist()
