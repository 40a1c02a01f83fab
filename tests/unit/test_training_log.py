"""Logs read back: the lines are Megatron 0.19.2's own, shortened nowhere."""

import json
import math

import pytest

from megatron_hybrid.observe.plots import plot_losses
from megatron_hybrid.observe.training_log import (
    TrainingLog,
    TrainPoint,
    ValidPoint,
    differences,
    parse_line,
    parse_log,
    read_metrics,
)

TRAIN = (
    " [2030-01-01 10:00:00.123456] iteration       12/     300 | consumed samples:          192 | elapsed time per "
    "iteration (ms): 431.7 | learning rate: 3.000000E-03 | global batch size:    16 | lm loss: 3.141593E+00 | loss "
    "scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
VALID = " validation loss at iteration 50 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "
FINAL = " validation loss at iteration 300 on validation set | lm loss value: 2.100000E+00 | lm loss PPL: 8.2E+00 | "
TEST = " validation loss at iteration 300 on test set | lm loss value: 2.200000E+00 | lm loss PPL: 9.0E+00 | "


def test_train_line():
    assert parse_line(TRAIN) == TrainPoint(12, loss=3.141593, grad_norm=1.234, lr=3e-3, ms=431.7, total=300)


def test_train_line_with_a_prefix_and_without_loss():
    line = "[default1]:" + TRAIN.replace(" lm loss: 3.141593E+00 |", "").replace(" grad norm: 1.234 |", "")
    assert parse_line(line) == TrainPoint(12, lr=3e-3, ms=431.7, total=300)


def test_nan_is_read_and_found():
    log = parse_log([TRAIN.replace("3.141593E+00", "nan")])
    assert math.isnan(log.train[0].loss)
    assert log.first_bad() is log.train[0]


def test_validation_lines():
    assert parse_line(VALID) == ValidPoint(50, 2.5)
    assert parse_line(FINAL) == ValidPoint(300, 2.1)
    assert parse_line(TEST) == ValidPoint(300, 2.2, test=True)
    log = parse_log(["noise", VALID, "-----", FINAL, TEST])
    assert log.valid == [ValidPoint(50, 2.5), ValidPoint(300, 2.1)]
    assert log.final_valid_loss() == 2.1


@pytest.mark.parametrize("line", ["", "iteration", "> building iteration 3", "validation loss", "time: iteration 3 |"])
def test_other_lines_report_nothing(line):
    assert parse_line(line) is None


def test_metrics_keep_every_digit(tmp_path):
    value = 0.1 + 0.2
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        json.dumps({"iteration": 1, "loss": value, "grad_norm": 1 / 3, "lr": 5e-3, "ms": 7.5}) + "\n"
        + json.dumps({"iteration": 1, "valid_loss": value}) + "\n"
        + json.dumps({"iteration": 1, "test_loss": value}) + "\n"
        + '{"iteration": 2, "lo'  # the run was stopped here
    )
    log = read_metrics(path)
    assert log.train == [TrainPoint(1, loss=value, grad_norm=1 / 3, lr=5e-3, ms=7.5)]
    assert log.valid == [ValidPoint(1, value)]


@pytest.mark.parametrize("line", ["no json", '{"loss": 1}', '{"iteration": 1, "loss": "x"}', "[]"])
def test_a_bad_metrics_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "valid_loss": 2}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a metrics record"):
        read_metrics(path)


def _run(first: int, last: int, norm=lambda i: 1 / i, valid=2.0) -> TrainingLog:
    points = [TrainPoint(i, loss=1.0, grad_norm=norm(i)) for i in range(first, last + 1)]
    return TrainingLog(points, [ValidPoint(last, valid)])


def test_equal_runs_have_no_differences():
    whole = _run(1, 10)
    whole.valid.insert(0, ValidPoint(5, 3.0))
    resumed = _run(8, 10)
    assert differences(whole, resumed) == []
    resumed.train[0] = TrainPoint(8, loss=99.0, grad_norm=1 / 8)  # the loss after a start is another average
    assert differences(whole, resumed) == []


def test_the_last_bit_is_a_difference():
    assert "iteration 9: grad norm" in differences(_run(1, 10), _run(8, 10, lambda i: math.nextafter(1 / i, 2)))[1]
    assert "validation losses 2.0 at 10 became" in differences(_run(1, 10), _run(8, 10, valid=math.nextafter(2.0, 3)))[0]


def test_missing_parts_are_differences():
    assert differences(_run(1, 10), TrainingLog()) == ["the resumed run logged no iteration"]
    assert "only the resumed run has it" in differences(_run(1, 10), _run(10, 11))[0]
    resumed = _run(8, 10)
    resumed.valid.clear()
    assert differences(_run(1, 10), resumed) == ["the resumed run logged no validation loss"]


def test_plot_is_written_whole(tmp_path):
    path = tmp_path / "new" / "loss.png"
    plot_losses({"a": _run(1, 10), "empty": TrainingLog()}, path, levels={"bigram entropy": 2.4}, title="t")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in path.parent.iterdir()] == ["loss.png"]
