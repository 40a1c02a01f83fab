"""One HTML page about runs, everything inside it, and the same pictures as PNG files."""

from __future__ import annotations

import base64
import difflib
import html
from collections.abc import Iterable
from pathlib import Path

from .plots import plot_losses, plot_snr, plot_times
from .runs import Run, outliers

_MOST_OUTLIERS = 30
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 0.86rem; } td, th { padding: 0.2rem 0.7rem 0.2rem 0; text-align: left; }
th { border-bottom: 1px solid #999; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; } pre { background: #f6f6f4; padding: 0.7rem; overflow-x: auto; font-size: 0.8rem; }
.add { color: #1a6b35; } .del { color: #a4271f; } .note { color: #666; } .bad { color: #a4271f; font-weight: 600; }
.scroll { overflow-x: auto; }
"""


def write_report(runs: list[Run], folder: Path) -> Path:
    """``index.html`` and its PNGs in a folder, which is made; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = [
        ("Runs", _overview(runs)),
        ("Losses", _losses(runs, folder)),
        ("Signal-to-noise ratio", _snr(runs, folder)),
        ("Outlier layers", _outliers(runs)),
        ("Time", _times(runs, folder)),
        ("Inside a step", _profiles(runs, folder)),
        ("Recipes", _recipes(runs)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>\n" for title, content in sections)
    page = folder / "index.html"
    title = "Runs: " + ", ".join(run.name for run in runs)
    page.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}</body></html>\n",
        encoding="utf-8",
    )
    return page


def _table(header: Iterable[str], rows: Iterable[Iterable], numbers: int = 0) -> str:
    """Cells are escaped; the last `numbers` columns are aligned right."""

    def line(tag, cells):
        cells = list(cells)
        first = len(cells) - numbers
        made = (
            f"<{tag}{' class=n' if i >= first else ''}>{html.escape(str(cell))}</{tag}>" for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(made)}</tr>"

    return f'<div class="scroll"><table>{line("th", header)}{"".join(line("td", row) for row in rows)}</table></div>'


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def _picture(path: Path, alt: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}"></p>'


def _number(value: float | None, digits: str) -> str:
    return "-" if value is None else format(value, digits)


def _overview(runs: list[Run]) -> str:
    header = (
        "run",
        "recipe",
        "device",
        "iterations",
        "training loss",
        "validation loss",
        "against the first",
        "ms/iteration",
    )
    base = runs[0].log.final_valid_loss()
    rows = []
    for run in runs:
        last, final = (run.log.train[-1] if run.log.train else None), run.log.final_valid_loss()
        gap = f"{final / base - 1:+.2%}" if final and base and run is not runs[0] else "-"
        rows.append(
            (
                run.name, run.recipe_name, run.record.get("device", "-"), last.iteration if last else "-",
                _number(last.loss if last else None, ".4f"), _number(final, ".4f"), gap,
                _number(run.milliseconds(), ".1f"),
            )
        )  # fmt: skip
    bad = [(run, point) for run in runs if (point := run.log.first_bad()) is not None]
    notes = "".join(
        f'<p class="bad">{html.escape(run.name)}: NaN or infinite at iteration {point.iteration}</p>'
        for run, point in bad
    )
    return _table(header, rows, numbers=5) + notes


def _losses(runs: list[Run], folder: Path) -> str:
    logs = {run.name: run.log for run in runs if run.log.train or run.log.valid}
    if not logs:
        return _note("No run has left losses: --hq-metrics-file PATH writes them.")
    plot_losses(logs, folder / "losses.png")
    return _picture(folder / "losses.png", "losses of the runs over iterations")


def _snr(runs: list[Run], folder: Path) -> str:
    made = []
    for number, run in enumerate(runs):
        cells = [cell for cell in run.cells.values() if cell.snr_db is not None]
        if cells:
            path = folder / f"snr_{number}.png"
            step = max(cell.step for cell in cells)
            plot_snr(cells, path, title=f"{run.name}, iteration {step}")
            made.append(_picture(path, f"SNR by layer and operand of {run.name}"))
    what = (
        "How much of each tensor is left after its cast: 10 log10(|x|^2 / |x - q|^2), the last iteration that was "
        "recorded. E4M3 with block scales reaches about 31 dB, E2M1 about 20."
    )
    return (
        _note(what) + "".join(made) if made else _note("No run has left statistics: --hq-stats-interval N writes them.")
    )


def _outliers(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        for outlier in outliers(run.cells.values())[:_MOST_OUTLIERS]:
            cell = outlier.cell
            rows.append(
                (
                    run.name, cell.module, f"{cell.gemm} {cell.operand}", cell.format, outlier.reason,
                    _number(cell.snr_db, ".1f"), _number(cell.amax, ".3g"),
                )
            )  # fmt: skip
    if not any(run.cells for run in runs):
        return _note("No run has left statistics.")
    if not rows:
        return _note("None: no cast saturates, underflows much, or stands out from those of other layers.")
    return _table(("run", "module", "cast", "format", "what", "SNR (dB)", "amax"), rows, numbers=2)


def _times(runs: list[Run], folder: Path) -> str:
    times = {}
    for run in runs:
        whole = run.milliseconds()
        if run.timers or whole is not None:
            rest = max((whole or 0.0) - sum(run.timers.values()), 0.0)
            times[run.name] = {**run.timers, "other" if run.timers else "not split": rest}
    if not times:
        return _note("No run has left times.")
    plot_times(times, folder / "time.png")
    untimed = [run.name for run in runs if run.name in times and not run.timers]
    hint = (
        f"Not split: {', '.join(untimed)}; --timing-log-level 2 and the output in log.txt split it." if untimed else ""
    )
    return _picture(folder / "time.png", "time of an iteration by run") + (_note(hint) if hint else "")


def _profiles(runs: list[Run], folder: Path) -> str:
    profiled = {run.name: run.profile for run in runs if run.profile}
    if not profiled:
        return _note("No run has left a profile: --hq-profile-step N writes one.")
    plot_times(profiled, folder / "profile.png", label="ms of the profiled iteration (slowest rank)")
    parts = list(dict.fromkeys(part for split in profiled.values() for part in split))
    rows = [(part, *(f"{split.get(part, 0.0):.1f}" for split in profiled.values())) for part in parts]
    table = _table(("ms", *profiled), rows, numbers=len(profiled))
    return _picture(folder / "profile.png", "what the time of a step goes to, by run") + table


def _recipes(runs: list[Run]) -> str:
    import yaml

    texts = {
        run.name: yaml.safe_dump(run.record["recipe"], sort_keys=False).splitlines()
        for run in runs
        if run.record.get("recipe")
    }
    if not texts:
        return _note("No run has left its recipe: it stands beside the file of --hq-metrics-file.")
    first, *others = texts
    made = [f"<p>{html.escape(first)}</p><pre>{html.escape(chr(10).join(texts[first]))}</pre>"]
    for name in others:
        lines = list(difflib.unified_diff(texts[first], texts[name], first, name, lineterm="", n=2))
        shown = "\n".join(map(_diff_line, lines)) if lines else "the same"
        made.append(f"<p>{html.escape(name)} against {html.escape(first)}</p><pre>{shown}</pre>")
    return "".join(made)


def _diff_line(line: str) -> str:
    kind = {"+": "add", "-": "del"}.get(line[:1])
    return f'<span class="{kind}">{html.escape(line)}</span>' if kind else html.escape(line)
