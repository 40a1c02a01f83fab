"""Loss curves as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .training_log import TrainingLog

# Two hues that stay apart in grey and for the colour-blind; more runs go on to matplotlib's own.
_COLOURS = ("#1f6fb4", "#d1661c", "#2e8b57", "#7a4fa3")
_MARKERS = ("o", "x", "^", "s")


def plot_losses(
    runs: Mapping[str, TrainingLog], path: str | Path, *, levels: Mapping[str, float] | None = None, title: str = ""
) -> None:
    """Training (thin) and validation (dots) loss of each run, and a dashed line for each of ``levels``.

    The axis leaves out the first descent: it is cut just above the highest level, or above the loss after a
    tenth of the run. Written under a temporary name and renamed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8.0, 4.8), dpi=140, layout="constrained")
    try:
        for index, (name, log) in enumerate(runs.items()):  # a thin line over a thick one: curves that agree both show
            style = (_COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)], (2.6, 1.4)[index % 2])
            _draw_run(axes, name, log, *style)
        for name, value in (levels or {}).items():
            axes.axhline(value, color="0.35", linewidth=1.0, linestyle=(0, (5, 3)), zorder=1)
            axes.annotate(
                f"{name} {value:.2f}", (1.0, value), xycoords=("axes fraction", "data"), xytext=(-4, 3),
                textcoords="offset points", ha="right", va="bottom", color="0.25", fontsize=9,
            )
        axes.set_xlabel("iteration")
        axes.set_ylabel("loss (nats/token)")
        axes.set_title(title, fontsize=11)
        axes.set_ylim(*_limits(runs, levels or {}))
        axes.set_xlim(left=0)
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=9, loc="upper center", facecolor="white", edgecolor="none", framealpha=1.0)
        _save(figure, Path(path))
    finally:
        plt.close(figure)


def _draw_run(axes, name: str, log: TrainingLog, colour: str, marker: str, width: float) -> None:
    train = [(point.iteration, point.loss) for point in log.train if point.loss is not None]
    if train:
        axes.plot(*zip(*train), color=colour, linewidth=0.9, alpha=0.55, label=f"{name}, training")
    if log.valid:
        points = [(point.iteration, point.loss) for point in log.valid]
        style = {"linewidth": width, "marker": marker, "markersize": 3.0 + 1.5 * width}
        axes.plot(*zip(*points), color=colour, label=f"{name}, validation", **style)


def _limits(runs: Mapping[str, TrainingLog], levels: Mapping[str, float]) -> tuple[float, float]:
    low, high = list(levels.values()), list(levels.values())
    for log in runs.values():
        losses = [point.loss for point in log.train if point.loss is not None]
        losses_late = losses[len(losses) // 10 :]
        low += losses_late + [point.loss for point in log.valid]
        high += losses_late[:1]
    if not low:
        return 0.0, 1.0
    bottom, top = min(low), max(high + low[:1])
    margin = 0.06 * max(top - bottom, 1e-3)
    return bottom - margin, top + 2 * margin


def _save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
