"""Statistics of quantization (issue "see, diagnose"; case 78): numbers against float64 ones, and what recording costs."""

import json
import math

import pytest
import torch
from linear_cases import training_losses

import megatron_hybrid as mh
from megatron_hybrid.formats import parse_format
from megatron_hybrid.observe import statistics
from megatron_hybrid.observe.recorder import StatisticsError, derived
from megatron_hybrid.observe.statistics import FIELDS, LOWEST_EXPONENT, hadamard, largest_code, measure
from megatron_hybrid.scaling import DelayedState
from megatron_hybrid.storage import cast

FORMATS = ["fp8_current_e4m3", "fp8_rowwise_e5m2", "fp8_block_e4m3", "fp8_block_e4m3:2d", "mxfp8_e4m3", "nvfp4", "nvfp4:2d",
           "nvfp4:rht"]  # fmt: skip
SNR = {"mxfp8_e4m3": (25, 40), "nvfp4": (15, 25), "fp8_current_e4m3": (25, 40)}


def data(rows=72, columns=80, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=g))
    x[3], x[:, 5] = 0, x[:, 5] * 50
    return x.bfloat16()


def measured(s, x):
    numbers, exponents = measure(s, x)
    values = dict(zip(FIELDS, numbers.tolist(), strict=True))
    counts = {i + LOWEST_EXPONENT: n for i, n in enumerate(exponents.tolist()) if n}
    return values, counts


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_float64_arithmetic(name, direction):
    fmt, x = parse_format(name), data()
    s = cast(x, fmt, direction, transposed=direction == "columnwise")
    values, counts = measured(s, x)
    ref = (hadamard(x.float(), direction) if fmt.rht else x.float()).double()
    dec = s.decode(torch.empty(x.shape), inverse_rht=False).double()
    assert values["amax"] == ref.abs().max().item()
    assert values["zeros"] == pytest.approx((dec == 0).double().mean().item(), rel=1e-6)
    assert values["underflow"] == pytest.approx(((dec == 0) & (ref != 0)).double().mean().item(), rel=1e-6)
    largest = (s.codes() & (0x7F if fmt.bits == 8 else 7)) == largest_code(fmt.element)
    furthest = {"e4m3": 464 / 448, "e5m2": 61440 / 57344, "e2m1": 7 / 6}[fmt.element]
    clipped = (largest & (ref.abs() > dec.abs() * furthest)).double().mean().item()
    assert clipped == 0 or fmt.element == "e2m1"  # whose smallest scales have few bits; others follow the tensor
    assert values["saturation"] == pytest.approx(clipped, rel=1e-6)
    out = derived(values)
    noise = (ref - dec).square().sum()
    assert out["snr_db"] == pytest.approx(10 * math.log10(ref.square().sum() / noise), abs=1e-3)
    cosine = (ref * dec).sum() / (ref.norm() * dec.norm())
    assert 1 - out["cosine"] == pytest.approx(1 - cosine.item(), rel=1e-3)
    scale = s.scale_inv()
    assert sum(counts.values()) == scale.numel()
    assert values["scale_max"] == scale.max().item() and values["scale_min"] > 0
    for exponent in counts:
        assert ((scale >= 2.0**exponent) & (scale < 2.0 ** (exponent + 1))).any() or exponent == LOWEST_EXPONENT


@pytest.mark.parametrize("name, bounds", SNR.items())
def test_c78_snr_of_normal_numbers_is_what_the_format_gives(name, bounds):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    out = derived(measured(cast(x, parse_format(name), "rowwise"), x)[0])
    assert bounds[0] < out["snr_db"] < bounds[1]


def test_largest_codes():
    assert [largest_code(element) for element in ("e4m3", "e5m2", "e2m1")] == [0x7E, 0x7B, 7]


def test_the_transform_is_the_kernels_own():
    """A cast of the transformed tensor without `rht` decodes as one of the tensor with it, ragged last block too."""
    x = data(32, 40).float()
    with_rht = cast(x, parse_format("nvfp4:rht"), "rowwise").decode(torch.empty(x.shape), inverse_rht=False)
    error = (with_rht - hadamard(x, "rowwise")).norm() / x.norm()
    plain = cast(x, parse_format("nvfp4"), "rowwise").dequantize()
    assert error < 1.5 * (plain - x).norm() / x.norm()
    eye = torch.eye(16)
    assert torch.equal(hadamard(eye, "rowwise").abs(), torch.full((16, 16), 0.25))


def test_clipping_and_underflow_are_counted():
    fmt = parse_format("fp8_delayed_e4m3:history=4")
    state = DelayedState.new(fmt, "cpu")  # scale 1: everything above 448 is clipped
    x = torch.tensor([[1.0, 1e-9, 0.0, 1000.0, -465.0, 463.0, 2.0, 3.0]])
    values, counts = measured(cast(x, fmt, "rowwise", state=state), x)
    assert values["saturation"] == 2 / 8 and values["underflow"] == 1 / 8 and values["zeros"] == 2 / 8
    assert values["amax"] == 1000 and counts == {0: 1}


def test_what_is_not_a_number_is_none():
    x = torch.full((32, 32), float("nan"))
    out = derived(measured(cast(x, parse_format("mxfp8_e4m3"), "rowwise"), x)[0])
    assert out["nonfinite"] == 1 and out["snr_db"] is None and out["cosine"] is None
    exact = torch.ones(32, 32)
    out = derived(measured(cast(exact, parse_format("mxfp8_e4m3"), "rowwise"), exact)[0])
    assert out["snr_db"] is None and out["cosine"] == 1 and out["nonfinite"] == 0
    empty = torch.ones(0, 32)
    out = derived(measured(cast(empty, parse_format("mxfp8_e4m3"), "rowwise"), empty)[0])
    assert out["amax"] is None and out["snr_db"] is None


class Writer:
    def __init__(self):
        self.scalars, self.histograms, self.flushed = {}, {}, 0

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value

    def add_histogram_raw(self, tag, *, global_step, **values):
        self.histograms[tag, global_step] = values

    def flush(self):
        self.flushed += 1


def train(path=None, every=2, steps=5, recipe="mxfp8_fprop_nvfp4_bwd", **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(mh.HybridLinear(64, 64, dtype=torch.bfloat16), torch.nn.GELU(), mh.HybridLinear(64, 64,
                              dtype=torch.bfloat16))  # fmt: skip
    ctl = mh.prepare(net, recipe, seed=3, num_microbatches=2)
    if path is not None:
        ctl.record_statistics(every, path, **options)
    return training_losses(net, ctl, torch.optim.SGD(net.parameters(), lr=0.1), 1, steps)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_recorded_steps_have_every_cast_once_and_change_no_bit(tmp_path):
    writer, said, path = Writer(), [], tmp_path / "new" / "stats.jsonl"
    assert train(path, writer=writer, say=said.append) == train()
    records = read(path)
    assert [r["step"] for r in records] == [2] * 12 + [4] * 12
    names = {(r["module"], r["operand"], r["direction"], r["gemm"], r["format"]) for r in records}
    slots = [("input", "rowwise", "fprop", "mxfp8_e4m3"), ("weight", "rowwise", "fprop", "mxfp8_e4m3"),
             ("grad_output", "rowwise", "dgrad", "nvfp4"), ("weight", "columnwise", "dgrad", "nvfp4"),
             ("grad_output", "columnwise", "wgrad", "nvfp4"), ("input", "columnwise", "wgrad", "nvfp4")]  # fmt: skip
    assert names == {(module, *slot) for module in "02" for slot in slots}
    for r in records:
        assert (15 if r["format"] == "nvfp4" else 25) < r["snr_db"] < 45 and 0.98 < r["cosine"] <= 1
        assert sum(r["block_exponents"].values()) > 0 and r["source"] == "original"
    assert ("hq-snr_db/0/input.rowwise", 4) in writer.scalars and len(writer.scalars) == 24 * 8
    assert len(writer.histograms) == 24 and writer.flushed == 2
    assert len(said) == 2 and said[1].startswith("> statistics of 12 casts at step 4: ")


def test_tensorboard_has_every_number_and_the_histogram(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    train(tmp_path / "stats.jsonl", writer=SummaryWriter(str(tmp_path / "tb")), say=None)
    events = accumulator.EventAccumulator(str(tmp_path / "tb"), {"scalars": 0, "histograms": 0}).Reload()
    for record in read(tmp_path / "stats.jsonl"):
        place = f"{record['module']}/{record['operand']}.{record['direction']}"
        for name in ("snr_db", "cosine", "amax", "scale_min", "scale_max", "underflow", "saturation", "zeros"):
            found = {e.step: e.value for e in events.Scalars(f"hq-{name}/{place}")}
            assert found[record["step"]] == pytest.approx(record[name], rel=1e-6)
        shown = {e.step: e.histogram_value for e in events.Histograms(f"hq-block_exponents/{place}")}[record["step"]]
        counts = {int(exponent): n for exponent, n in record["block_exponents"].items()}
        assert {limit - 0.5: n for limit, n in zip(shown.bucket_limit, shown.bucket) if n} == counts
        assert shown.num == sum(counts.values())


def test_nothing_runs_in_steps_that_are_not_recorded(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "megatron_hybrid.observe.recorder.measure", lambda *a: calls.append(a) or statistics.measure(*a)
    )
    train(tmp_path / "a.jsonl", every=100, steps=3)
    assert not calls and not (tmp_path / "a.jsonl").exists()


def test_a_column_derived_in_backward_is_compared_with_its_row(tmp_path):
    recipe = {"version": 1, "defaults": {"fprop": "nvfp4", "dgrad": "mxfp8_e4m3", "wgrad": "mxfp8_e4m3",
              "columnwise_source": {"input": "rowwise_dequantized"}}}  # fmt: skip
    train(tmp_path / "a.jsonl", every=1, steps=1, recipe=mh.Recipe.from_dict(recipe), say=None)
    sources = {(r["operand"], r["direction"]): r["source"] for r in read(tmp_path / "a.jsonl")}
    assert sources["input", "columnwise"] == "rowwise"
    assert {key for key, source in sources.items() if source == "rowwise"} == {("input", "columnwise")}


def test_ranks_do_not_share_a_file(tmp_path):
    train(tmp_path / "stats.jsonl", every=1, steps=1, rank=3, say=None)
    assert {r["rank"] for r in read(tmp_path / "stats.rank3.jsonl")} == {3}


@pytest.mark.parametrize("every, path, says", [(0, "a.jsonl", "at least 1"), (5, ".", "is a folder")])
def test_mistakes_are_said_before_training(every, path, says, tmp_path):
    with pytest.raises(StatisticsError, match=says):
        train(tmp_path / path, every=every)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recording_waits_for_the_device_only_at_the_end_of_a_step(tmp_path):
    fmt, x = parse_format("mxfp8_e4m3"), torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).cuda()
    s = cast(x, fmt, "rowwise")
    measure(s, x)  # compiled and cached parts
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers, _ = measure(s, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    numbers, cpu = numbers.cpu(), measure(cast(x.cpu(), fmt, "rowwise"), x.cpu())[0]
    sums = slice(-3, None)  # of squares, in FP32, in another order: off by a rounding a term at most
    assert torch.allclose(numbers[:-3], cpu[:-3], rtol=1e-6, equal_nan=True)
    assert torch.allclose(numbers[sums], cpu[sums], rtol=x.numel() * 2.0**-24)
