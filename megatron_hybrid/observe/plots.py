"""Pictures of runs: losses, signal-to-noise by layer and operand, where an iteration's time goes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

import numpy as np

from .runs import SLOTS, Cell
from .training_log import TrainingLog

_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_LOW_DB, _HIGH_DB = 5.0, 40.0  # from useless to FP8's best

# The first two stay apart in grey and for the colour-blind.
_COLOURS = (
    "#1f6fb4", "#d1661c", "#2e8b57", "#7a4fa3", "#b3202c", "#17a2b0", "#8a6d3b", "#d05ba0", "#6b8e23", "#4d4d4d",
)  # fmt: skip
_MARKERS = ("o", "x", "^", "s", "+", "v", "D")
_FONT = 8.0  # of labels beside the axes, in points
_LABEL = 1.9 * _FONT / 72  # height of one, in inches
_OFF_THE_CHART = 1e6  # a loss that no axis is made for


def plot_losses(
    runs: Mapping[str, TrainingLog], path: str | Path, *, levels: Mapping[str, float] | None = None, title: str = ""
) -> None:
    """Training (thin) and validation (dots) loss of each run, and a dashed line for each of ``levels``.

    Every run is named beside the end of its curve, in its colour, with its last loss. The axis leaves out the first
    descent: it is cut just above the highest level, or above the loss after a tenth of the run. Written under a temporary
    name and renamed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    height = max(4.8, 1.2 + _LABEL * len(runs))
    figure, axes = plt.subplots(figsize=(8.0, height), dpi=140, layout="constrained")
    try:
        ends = []
        for index, (name, log) in enumerate(runs.items()):  # a thin line over a thick one: curves that agree both show
            colour = _COLOURS[index % len(_COLOURS)]
            _draw_run(axes, log, colour, _MARKERS[index % len(_MARKERS)], (2.6, 1.4)[index % 2], len(runs))
            if (end := _end(log)) is not None:
                ends.append((f"{name}  {_last(log):.3f}", end, colour))
        for name, value in (levels or {}).items():
            axes.axhline(value, color="0.35", linewidth=1.0, linestyle=(0, (5, 3)), zorder=1)
            axes.annotate(
                f"{name} {value:.2f}",
                (1.0, value),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                va="bottom",
                color="0.25",
                fontsize=9,
            )
        axes.set_xlabel("iteration (thin: training; marked: validation)")
        axes.set_ylabel("loss (nats/token)")
        axes.set_title(title, fontsize=11)
        axes.set_ylim(*_limits(runs, levels or {}))
        axes.set_xlim(0, 1.01 * max([1, *(x for _, (x, _), _ in ends)]))
        axes.xaxis.get_major_locator().set_params(integer=True)  # there is no iteration 2.5
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        _label_ends(axes, ends)
        _save(figure, Path(path))
    finally:
        plt.close(figure)


def _draw_run(axes, log: TrainingLog, colour: str, marker: str, width: float, num_runs: int) -> None:
    train = _shown(log.train)
    if train:
        axes.plot(*zip(*train), color=colour, linewidth=0.9, alpha=0.55 if num_runs <= 3 else 0.2)
    if points := _shown(log.valid):
        style = {"linewidth": width, "marker": marker, "markersize": 3.0 + 1.5 * width}
        axes.plot(*zip(*points), color=colour, **style)


def _shown(points: Iterable) -> list[tuple[int, float]]:
    """(iteration, loss) of those that a picture can show: a run that diverged has others."""
    return [(p.iteration, p.loss) for p in points if p.loss is not None and abs(p.loss) < _OFF_THE_CHART]  # no NaN is


def _end(log: TrainingLog) -> tuple[int, float] | None:
    """The last point of a curve: of validation, else of training."""
    points = _shown(log.valid) or _shown(log.train)
    return points[-1] if points else None


def _last(log: TrainingLog) -> float:
    """The loss to name beside a curve: NaN of one that ended so."""
    return [point.loss for point in log.valid or log.train if point.loss is not None][-1]


def _label_ends(axes, ends: list[tuple[str, tuple[int, float], str]]) -> None:
    """A label right of the axes for each (text, point, colour), as high as its point where there is room for it."""
    low, high = axes.get_ylim()
    step = _LABEL / (axes.figure.get_figheight() - 1)
    ends = sorted(ends, key=lambda end: end[1][1])
    wanted = [(y - low) / (high - low) for _, (_, y), _ in ends]
    for (text, point, colour), height in zip(ends, spread(wanted, step)):
        axes.annotate(
            text, point, xytext=(1.04, height), textcoords="axes fraction", color=colour, fontsize=_FONT, va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 3, "shrinkB": 3,
                        "relpos": (0, 0.5), "patchA": None},
        )  # fmt: skip


def spread(wanted: list[float], step: float) -> list[float]:
    """Heights in [0, 1] as close as can be to those wanted, which ascend, and at least a step apart where that fits."""
    step = min(step, 1 / max(1, len(wanted) - 1))
    runs: list[list[float]] = []  # of neighbours that touch: their wanted heights, each less the steps below it
    for i, height in enumerate(wanted):
        runs.append([height - i * step])
        while len(runs) > 1 and fmean(runs[-2]) > fmean(runs[-1]):
            last = runs.pop()
            runs[-1] += last
    lowest = [fmean(run) for run in runs for _ in run]
    top = 1 - (len(wanted) - 1) * step
    return [min(max(height, 0.0), top) + i * step for i, height in enumerate(lowest)]


def _limits(runs: Mapping[str, TrainingLog], levels: Mapping[str, float]) -> tuple[float, float]:
    low, high = list(levels.values()), list(levels.values())
    for log in runs.values():
        losses = [loss for _, loss in _shown(log.train)]
        losses_late = losses[len(losses) // 10 :]
        low += losses_late + [loss for _, loss in _shown(log.valid)]
        high += losses_late[:1]
    if not low:
        return 0.0, 1.0
    bottom, top = min(low), max(high + low[:1])
    margin = 0.06 * max(top - bottom, 1e-3, 1e-6 * abs(top))
    return bottom - margin, top + 2 * margin


def plot_snr(cells: Iterable[Cell], path: str | Path, *, title: str = "") -> None:
    """SNR of every cast, a row for each linear's operand and a column for each layer; grey where nothing was cast."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows, columns, grid = snr_grid(cells)
    size = (3.2 + 0.46 * max(len(columns), 6), 1.6 + 0.27 * len(rows))
    figure, axes = plt.subplots(figsize=size, dpi=140, layout="constrained")
    try:
        colours = plt.get_cmap("viridis").with_extremes(bad="0.88")
        image = axes.imshow(grid, cmap=colours, vmin=_LOW_DB, vmax=_HIGH_DB, aspect="auto")
        for (y, x), value in ((at, grid[at]) for at in np.ndindex(grid.shape) if np.isfinite(grid[at])):
            dark = value < (_LOW_DB + _HIGH_DB) / 2
            axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
        axes.set_xticks(range(len(columns)), columns, fontsize=8)
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.set_xlabel("layer")
        axes.set_title(title, fontsize=10)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, label="SNR (dB)", shrink=0.8, extend="both")
        _save(figure, Path(path))
    finally:
        plt.close(figure)


def snr_grid(cells: Iterable[Cell]) -> tuple[list[str], list[str], np.ndarray]:
    """Rows ``linear_fc1 dgrad weight nvfp4``, columns layers, values in dB (NaN where there is none; of several modules
    in one place, experts say, the lowest)."""
    cells = sorted((cell for cell in cells if cell.snr_db is not None), key=_place)
    places = {cell: (_row_name(cell), "-" if cell.layer is None else str(cell.layer)) for cell in cells}
    rows = list(dict.fromkeys(row for row, _ in places.values()))
    columns = sorted(
        {column for _, column in places.values()}, key=lambda c: (not c.isdigit(), int(c) if c.isdigit() else 0)
    )
    grid = np.full((len(rows), len(columns)), np.nan)
    for cell, (row, column) in places.items():
        at = rows.index(row), columns.index(column)
        grid[at] = np.fmin(grid[at], cell.snr_db)
    return rows, columns, grid


def _place(cell: Cell) -> tuple:
    """Linears in a layer's order, then the six slots."""
    leaf = cell.leaf.partition(",")[0]
    return _LINEARS.index(leaf) if leaf in _LINEARS else len(_LINEARS), leaf, SLOTS.index((cell.gemm, cell.operand))


def _row_name(cell: Cell) -> str:
    return f"{cell.leaf.partition(',')[0]}  {cell.gemm} {cell.operand}  {cell.format}"


def plot_times(times: Mapping[str, Mapping[str, float]], path: str | Path, label="ms an iteration (slowest rank)") -> None:
    """A bar a run of milliseconds an iteration, split by what they were spent on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8.0, 1.2 + 0.5 * len(times)), dpi=140, layout="constrained")
    try:
        parts = list(dict.fromkeys(part for split in times.values() for part in split))
        colours = plt.get_cmap("tab10")
        left = dict.fromkeys(times, 0.0)
        for index, part in enumerate(parts):
            widths = [times[run].get(part, 0.0) for run in times]
            axes.barh(list(times), widths, left=list(left.values()), label=part, height=0.6,
                      color="0.8" if part in ("other", "not split") else colours(index % 10))  # fmt: skip
            left = {run: left[run] + width for run, width in zip(times, widths)}
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, ncols=6, loc="lower left", bbox_to_anchor=(0, 1.02), frameon=False)
        _save(figure, Path(path))
    finally:
        plt.close(figure)


def _save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
