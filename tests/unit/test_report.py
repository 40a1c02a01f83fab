"""`megatron-hybrid report`: what is read of runs, and the page, looked at by a browser where there is one."""

import json
import math
import re
import shutil
import subprocess

import pytest

from megatron_hybrid.cli import main
from megatron_hybrid.observe import run_record
from megatron_hybrid.observe.plots import snr_grid, spread
from megatron_hybrid.observe.runs import Cell, load_run, outliers, read_cells, read_timers
from megatron_hybrid.recipe import Recipe

TIMERS = """INFO:megatron.core.timers:(min, max) time across ranks (ms):
    forward-backward ...............................: (202.17, 203.73)
    optimizer-inner-step ...........................: (0.99, 1.28)
    optimizer ......................................: (9.87, {optimizer})
    forward-compute ................................: (104.87, 106.42)
"""


def entry(layer, leaf="mlp.linear_fc1", operand="weight", gemm="dgrad", step=10, **changes):
    module = f"decoder.layers.{layer - 1}.{leaf}"
    numbers = {
        "snr_db": 20.0 + 0.1 * layer,
        "cosine": 0.99,
        "amax": 1.0,
        "underflow": 0.0,
        "saturation": 0.0,
        "nonfinite": 0.0,
    }
    return {"step": step, "module": module, "layer": layer, "operand": operand, "gemm": gemm, "format": "nvfp4", **numbers,
            **changes}  # fmt: skip


def cell(*args, **kwargs):
    record = entry(*args, **kwargs)
    return Cell(**{name: record[name] for name in Cell.__dataclass_fields__})


def write_run(folder, recipe, losses, cells=(), log=""):
    folder.mkdir()
    lines = [
        {"iteration": i, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "ms": 100.0} for i, loss in enumerate(losses, 1)
    ]
    lines.append({"iteration": len(losses), "valid_loss": losses[-1] + 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "hq_stats.rank0.jsonl").write_text("".join(json.dumps(record) + "\n" for record in cells))
    (folder / "log.txt").write_text(log)
    import torch

    recipe = Recipe.load(recipe)
    run_record.write(folder / "metrics.jsonl", recipe, ["> summary"], {"num_layers": 4}, torch.device("cpu"))
    return folder


@pytest.fixture
def two_runs(tmp_path):
    cells = [entry(i, leaf, operand, gemm) for i in range(1, 7) for leaf in ("mlp.linear_fc1", "self_attention.linear_qkv")
             for gemm, operand in (("fprop", "input"), ("dgrad", "weight"))]  # fmt: skip
    cells += [
        entry(3, step=20, snr_db=11.0),
        entry(4, step=20, saturation=0.02),
        entry(5, step=20, nonfinite=0.5, snr_db=None),
    ]
    a = write_run(tmp_path / "a", "mxfp8", [4.0, 3.0, 2.5, 2.0], cells, TIMERS.format(optimizer=10.5) * 3)
    b = write_run(tmp_path / "b<b>", "nvfp4", [4.1, 3.2, 2.6, 2.1])
    return a, b


def test_the_page_says_what_the_runs_say(two_runs, tmp_path, capsys):
    a, b = two_runs
    assert main(["report", f"first={a}", str(b), "--out", str(tmp_path / "out" / "page")]) == 0
    page = tmp_path / "out" / "page" / "index.html"
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:)', text)  # self-contained
    assert text.count("data:image/png;base64,") == 3
    assert {path.name for path in page.parent.glob("*.png")} == {"losses.png", "snr_0.png", "time.png"}
    assert "<td>first</td><td>mxfp8 (" in text and "b&lt;b&gt;" in text and "b<b>" not in text
    assert "<td class=n>2.1000</td><td class=n>2.2000</td><td class=n>+4.76%</td><td class=n>100.0</td>" in text
    order = [
        text.index(word) for word in ("50.00% of the tensor is NaN", "2.00% saturates", "dB below the median of 6")
    ]
    assert order == sorted(order)
    assert '<span class="del">-name: mxfp8</span>' in text and '<span class="add">+name: nvfp4</span>' in text
    assert "Not split: b&lt;b&gt;" in text


def test_runs_that_left_little_make_a_page_that_says_how_to_leave_more(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text(
        " [x] iteration        1/       6 | elapsed time per iteration (ms): 222.1 | lm loss: 4.86E+00 | grad norm: 1.1 |\n"
    )
    assert main(["report", str(log), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert "--hq-stats-interval N" in text and "4.8600" in text and "not recorded" in text


@pytest.mark.parametrize("path, says", [("nowhere", "no such file or folder"), (".", "no metrics.jsonl")])
def test_paths_without_a_run_exit_2(path, says, tmp_path, capsys):
    assert main(["report", str(tmp_path / path), "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_damaged_file_is_named_with_its_line(two_runs, capsys):
    a, _ = two_runs
    with (a / "hq_stats.rank0.jsonl").open("a") as file:
        file.write('{"step": 1}\n')
    number = len((a / "hq_stats.rank0.jsonl").read_text().splitlines())
    assert main(["report", str(a)]) == 2
    assert f"hq_stats.rank0.jsonl:{number}: not a record of statistics" in capsys.readouterr().err


DAMAGES = {
    "metrics.run.json": ["[]", "{", '{"recipe": 5}', '{"recipe": {"name": "a"}}', "\udcff"],
    "hq_stats.rank0.jsonl": ['{"step": 1}\n', "\udcff\n", "[" * 100_000 + "\n", "[]\n"],
    "metrics.jsonl": ['{"iteration": Infinity, "loss": 1}\n', '{"iteration": 1, "loss": []}\n', '{"loss": 1}\n'],
    "hq_profile.rank0.json": ["[]", "{", '{"ms": 1, "split": [1]}', '{"ms": 1, "split": {"a": "b"}}', '{"ms": "x", "split": {}}'],
}


@pytest.mark.parametrize("file, text", [(file, text) for file, texts in DAMAGES.items() for text in texts])
def test_whatever_is_damaged_is_named(file, text, two_runs, capsys):
    a, _ = two_runs
    (a / file).write_text(text, errors="surrogateescape")
    assert main(["report", str(a)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {a / file}:") and "not a " in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize("changes", [{"module": 5}, {"gemm": "fprp"}, {"snr_db": "high"}, {"step": "x"}, {"layer": 1.5}])
def test_statistics_of_other_kinds_are_named(changes, two_runs, capsys):
    a, _ = two_runs
    (a / "hq_stats.rank0.jsonl").write_text(json.dumps(entry(1) | changes) + "\n")
    assert main(["report", str(a)]) == 2
    assert "hq_stats.rank0.jsonl:1: not a record of statistics" in capsys.readouterr().err


@pytest.mark.parametrize("losses", [[math.nan] * 4, [4.0, 3.0, math.nan, math.nan], [4.0, math.inf, 1e308, 2.0], [math.nan, 2.0]])
def test_a_run_that_diverged_has_its_page(losses, tmp_path, capsys):
    a = write_run(tmp_path / "a", "mxfp8", losses)
    assert main(["report", str(a), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "losses.png").is_file() and not capsys.readouterr().err


def test_a_folder_with_an_equals_sign_is_a_path(two_runs, tmp_path):
    odd = two_runs[0].rename(tmp_path / "lr=3")
    assert load_run(str(odd)).name == "lr=3" and load_run(f"first={odd}").name == "first"


def test_the_last_step_and_the_worst_rank_count(tmp_path):
    paths = []
    for rank, snrs in enumerate(([30.0, 21.0], [25.0, 22.0])):
        paths.append(tmp_path / f"hq_stats.rank{rank}.jsonl")
        records = [entry(1, step=step, snr_db=snr) for step, snr in zip((10, 20), snrs)]
        paths[-1].write_text("".join(json.dumps(record) + "\n" for record in records) + '{"cut o')
    (found,) = read_cells(paths).values()
    assert (found.step, found.snr_db) == (20, 21.0)


def test_outliers_are_those_unlike_their_kind():
    cells = [cell(i) for i in range(1, 20)] + [cell(20, snr_db=17.0), cell(21, underflow=0.2)]
    assert [o.cell.layer for o in outliers(cells)] == [20, 21]
    assert outliers([cell(i) for i in range(1, 20)]) == []


def test_the_grid_has_a_row_for_a_linear_and_operand_and_a_column_for_a_layer():
    cells = [
        cell(10),
        cell(2),
        cell(2, "self_attention.linear_qkv", "input", "fprop"),
        cell(2, "mlp.linear_fc1", snr_db=9.0),
    ]
    rows, columns, grid = snr_grid(cells)
    assert rows == ["linear_qkv  fprop input  nvfp4", "linear_fc1  dgrad weight  nvfp4"] and columns == ["2", "10"]
    assert grid[1].tolist() == [9.0, 21.0] and str(grid[0, 1]) == "nan"


def test_timers_are_medians_of_the_slowest_rank():
    text = "".join(TIMERS.format(optimizer=value) for value in (10.0, 30.0, 11.0))
    assert read_timers(text) == {"forward-compute": 106.42, "optimizer": 11.0}


def test_a_browser_shows_every_section(two_runs, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on PATH")
    assert main(["report", *map(str, two_runs), "--out", str(tmp_path / "out")]) == 0
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    picture = tmp_path / "page.png"
    url = (tmp_path / "out" / "index.html").as_uri()
    subprocess.run([*command, f"--screenshot={picture}", "--window-size=1200,3000", url], check=True, timeout=120,
                   capture_output=True)  # fmt: skip
    from PIL import Image

    image = Image.open(picture).convert("RGB").resize((120, 300))
    dark = [sum(image.getpixel((x, y))) < 690 for y in range(300) for x in range(120)]
    assert image.size == (120, 300) and 0.03 < sum(dark) / len(dark) < 0.9  # there are words and pictures
    dom = subprocess.run([*command, "--dump-dom", url], check=True, timeout=120, capture_output=True, text=True).stdout
    assert [re.sub("<.*?>", "", title) for title in re.findall("<h2>.*?</h2>", dom)] == [
        "Runs", "Losses", "Signal-to-noise ratio", "Outlier layers", "Time", "Inside a step",
        "Recipes"]  # fmt: skip


def test_load_run_takes_a_name(two_runs):
    run = load_run(f"mine={two_runs[0]}")
    assert run.name == "mine" and run.milliseconds() == 100.0 and len(run.cells) == 24


def test_what_a_step_s_time_goes_to(two_runs, tmp_path):
    """Of several ranks the slowest; a damaged file is named."""
    a, b = two_runs
    for rank, ms in enumerate((100.0, 120.0)):
        record = {"step": 5, "rank": rank, "device": "X", "ms": ms, "split": {"gemms": ms - 30, "casts": 10.0, "other": 20.0}}
        (a / f"hq_profile.rank{rank}.json").write_text(json.dumps(record))
    assert main(["report", str(a), str(b), "--out", str(tmp_path / "page")]) == 0
    text = (tmp_path / "page" / "index.html").read_text()
    assert (tmp_path / "page" / "profile.png").is_file() and "<td>gemms</td><td class=n>90.0</td>" in text
    (a / "hq_profile.rank0.json").write_text("{}")
    with pytest.raises(ValueError, match=r"hq_profile.rank0.json: not a profile"):
        load_run(str(a))


def test_a_file_that_is_no_run_is_refused(tmp_path, capsys):
    text = tmp_path / "README.md"
    text.write_text("# Some words\n")
    assert main(["report", str(text), "--out", str(tmp_path / "page")]) != 0
    assert f"{text}: no iteration, evaluation or cast of a training run in it" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize("wanted", [[0.2] * 10, [0.0, 0.01, 0.5, 0.99, 1.0], [0.1 * i for i in range(11)], [0.3], []])
def test_labels_beside_curves_do_not_overlap(wanted):
    found = spread(wanted, 0.05)
    assert all(0 <= height <= 1 + 1e-9 for height in found) and len(found) == len(wanted)
    assert all(b - a >= 0.05 - 1e-9 for a, b in zip(found, found[1:]))
    if all(b - a >= 0.05 for a, b in zip(wanted, wanted[1:])):
        assert found == pytest.approx(wanted)  # none moves that need not


def test_more_labels_than_fit_share_the_height():
    assert spread([0.5] * 5, 0.9) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
