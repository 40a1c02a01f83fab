"""All groups at once: the bytes and results of the loop over experts, in one cast an operand (properties 41 to 43)."""

from types import SimpleNamespace

import pytest
import torch
from linear_cases import counted_casts, gradients, randn, recipe
from torch.fx.experimental.proxy_tensor import make_fx

import megatron_hybrid as mh
from megatron_hybrid.gemm import grouped as gemms
from megatron_hybrid.gemm import grouped_cuda
from megatron_hybrid.grouped_at_once import GroupedPlan
from megatron_hybrid.grouped_columns import row_scaled_columns
from megatron_hybrid.groups import Groups
from megatron_hybrid.stacked import GroupedColumns, StackedWeight
from megatron_hybrid.storage import cast, high_precision_storage
from megatron_hybrid.storage_layout import narrow
from megatron_hybrid.testing.assertions import assert_bitwise_equal

K, N, EXPERTS = 128, 256, 4
SPLITS = [[44, 20, 7, 1], [0, 64, 0, 33], [1, 0, 0, 0], [32, 128, 16, 64]]
DERIVED = {"columnwise_source": {"input": "rowwise_dequantized", "weight": "rowwise_dequantized"}}
AT_ONCE = {
    "bf16": recipe("high_precision", "high_precision", "high_precision"),
    "mxfp8": recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"),
    "rowscaled": recipe("nvfp4:row_scaled", "mxfp8_e4m3", "mxfp8_e4m3", **DERIVED),
    "fp8_rowwise": recipe("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "fp8_rowwise_e4m3"),
    "fp8_rowwise_pow2": recipe("fp8_rowwise_e4m3:pow2", "fp8_rowwise_e5m2:eps=1e-3", "fp8_rowwise_e4m3:pow2,eps=1e-3"),
    "fp8_block": mh.Recipe.load("fp8_block"),
    "backward in high precision": recipe("mxfp8_e4m3", "high_precision", "high_precision"),
    "forward in high precision": recipe("high_precision", "mxfp8_e4m3", "mxfp8_e4m3"),
    "three": recipe("fp8_rowwise_e4m3", "mxfp8_e4m3", "fp8_block_e4m3"),
    "dequantized": recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3").with_backward("dequantized"),
    "random rows": recipe("high_precision", {"grad_output": "nvfp4:row_scaled,sr", "weight": "nvfp4:row_scaled"}, "mxfp8_e4m3"),
}
ONE_BY_ONE = {
    "nvfp4": (recipe("nvfp4", "nvfp4", "nvfp4"), "input.rowwise nvfp4: a group has one scale or amax"),
    "fp8_current": (mh.Recipe.load("fp8_current"), "a group has one scale"),
    "fp8_delayed": (mh.Recipe.load("fp8_delayed"), "a group has one scale"),
    "row-scaled columns": (recipe("mxfp8_e4m3", "mxfp8_e4m3", "nvfp4:row_scaled"), "a group has amaxes of its own"),
    "tiled rows": (recipe("mxfp8_e4m3:2d", "mxfp8_e4m3:2d", "mxfp8_e4m3:2d"), "a scale spans rows"),
}  # fmt: skip


def grouped(rcp, *, one_by_one=False, experts=EXPERTS, shape=(N, K), bias=True, **kw):
    torch.manual_seed(1)
    m = mh.HybridGroupedLinear(experts, shape[1], shape[0], bias, recipe=rcp, name="experts.fc1", dtype=torch.bfloat16, **kw)
    mh.prepare(m, seed=3).begin_step(1)
    m.hq.one_by_one = one_by_one
    return m


def data(rows, shape=(N, K)):
    return randn(rows, shape[1], seed=0), randn(rows, shape[0], seed=1)


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("splits", SPLITS)
def test_p42_p43_c08_c09_equals_the_loop_bit_for_bit(name, splits):
    x, dy = data(sum(splits))
    m, loop = grouped(AT_ONCE[name]), grouped(AT_ONCE[name], one_by_one=True)
    assert isinstance(m.how, GroupedPlan) and loop.how == "asked for"
    for found, expected in zip(gradients(m, x, dy, splits), gradients(loop, x, dy, splits), strict=True):
        assert torch.equal(found, expected)
    assert m.plans()[0].calls == loop.plans()[0].calls
    with torch.no_grad():
        assert torch.equal(m(x, torch.tensor(splits)), loop(x, splits))


@pytest.mark.parametrize("rcp", [*AT_ONCE.values(), *(rcp for rcp, _ in ONE_BY_ONE.values())], ids=[*AT_ONCE, *ONE_BY_ONE])
def test_tokens_or_gradients_of_zeros_give_zeros(rcp):
    """Batches of zeros, whose amaxes are zero: nothing but the bias goes on, and no NaN."""
    splits = SPLITS[0]
    x, dy = data(sum(splits))
    m = grouped(rcp)
    y, dx, dw, db = gradients(m, torch.zeros_like(x), dy, splits)
    rows = torch.arange(len(splits)).repeat_interleave(torch.tensor(splits))
    assert torch.equal(y, m.bias.detach()[rows]) and not dw.any() and dx.any() and torch.isfinite(dx).all() and db.any()
    y, dx, dw, db = gradients(m, x, torch.zeros_like(dy), splits)
    assert torch.isfinite(y).all() and not dx.any() and not dw.any() and not db.any()


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_cannot_be_cast_at_once_says_why(name):
    rcp, why = ONE_BY_ONE[name]
    assert why in grouped(rcp).how


def test_tiles_that_span_experts_and_mixed_experts_run_one_by_one():
    assert "a tile spans experts of 192 rows" in grouped(mh.Recipe.load("fp8_block"), shape=(192, 128)).how
    mixed = recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3", rules=[{"match": {"experts": 2}, "use": "high_precision"}])
    m = grouped(mixed)
    assert m.how == "experts have different plans"
    mh.prepare(m, AT_ONCE["mxfp8"])
    assert isinstance(m.how, GroupedPlan)


def test_an_expert_s_own_step_rule_ends_it():
    rules = [{"match": {"experts": 1, "steps": "3:"}, "use": "high_precision"}]
    m = grouped(recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3", rules=rules))
    controller = mh.prepare(m)
    found = []
    for step in (1, 3):
        controller.begin_step(step)
        found.append(m.how)
    assert isinstance(found[0], GroupedPlan) and found[1] == "experts have different plans"


@pytest.mark.parametrize("name", ["mxfp8", "rowscaled", "bf16", "fp8_rowwise"])
@pytest.mark.parametrize("experts", [2, 16])
def test_p41_one_cast_an_operand_and_direction_whatever_the_number_of_experts(name, experts):
    m = grouped(AT_ONCE[name], experts=experts)
    splits = [5] * experts
    x, dy = data(sum(splits))
    with counted_casts() as casts:
        gradients(m, x, dy, splits)
    kernels = {"bf16": 0, "mxfp8": 6, "rowscaled": 6, "fp8_rowwise": 4}[name]  # row-scaled columns are no kernel's
    assert len(casts) == kernels, casts
    with torch.no_grad(), counted_casts() as casts:
        m(x, splits)
    assert len(casts) == (1 if name != "bf16" else 0)  # the weight is in its cache


def test_c13_padding_is_what_wgrad_s_formats_need():
    assert [grouped(AT_ONCE[name]).how.alignment for name in ("bf16", "backward in high precision")] == [1, 1]
    assert [grouped(AT_ONCE[name]).how.alignment for name in ("forward in high precision", "mxfp8", "three")] == [32, 32, 128]
    groups = Groups([44, 0, 7, 32], 4, 83, torch.device("cpu"))
    assert [groups.layout(align).rows for align in (1, 32, 128)] == [83, 64 + 32 + 32, 3 * 128]


def test_groups_of_other_rows_are_refused():
    """`Groups` made once serve several linears, over the same rows alone."""
    m, groups = grouped(AT_ONCE["mxfp8"]), Groups([10] * EXPERTS, EXPERTS, 10 * EXPERTS, torch.device("cpu"))
    assert m(randn(10 * EXPERTS, K), groups).shape == (10 * EXPERTS, N)
    assert Groups.of(groups, EXPERTS, 10 * EXPERTS, torch.device("cpu")) is groups
    for rows in (10 * EXPERTS - 2, 10 * EXPERTS + 4):
        with pytest.raises(ValueError, match=rf"{10 * EXPERTS} rows on cpu: expected .* the {rows} rows of x"):
            m(randn(rows, K), groups)
    for num, device in ((EXPERTS + 1, "cpu"), (EXPERTS, "meta")):
        with pytest.raises(ValueError, match=f"expected {num} groups of the {10 * EXPERTS} rows of x on {device}"):
            Groups.of(groups, num, 10 * EXPERTS, torch.device(device))


@pytest.mark.parametrize("known", [True, False])
def test_layouts_place_rows_and_leave_zeros(known):
    """Where only the device knows the sizes there is room for any, and the same rows at the same places."""
    splits, align = [5, 0, 17, 1], 16
    groups = Groups(splits, 4, 23, torch.device("cpu"))
    if not known:
        groups._device, groups._host = torch.tensor(splits, dtype=torch.int32), None
    layout, x = groups.layout(align), randn(23, 8)
    spread = layout.spread(x)
    assert layout.rows == (64 if known else 96) == spread.shape[0]
    assert layout.ends.tolist() == [16, 16, 48, 64] and layout.ends.dtype == torch.int32
    assert torch.equal(groups.of_row, torch.tensor([0] * 5 + [2] * 17 + [3]))
    expected = torch.zeros(layout.rows, 8, dtype=x.dtype)
    for start, rows, part in zip((0, 16, 16, 48), splits, x.split(splits)):
        expected[start : start + rows] = part
    assert torch.equal(spread, expected)


@pytest.mark.parametrize("fmt", ["fp8_rowwise_e4m3", "fp8_rowwise_e5m2:pow2", "fp8_rowwise_e4m3:eps=0.5"])
@pytest.mark.parametrize("align", [1, 16, 128])
def test_row_scaled_columns_are_the_kernels_bytes(fmt, align):
    splits = [33, 0, 16, 7]
    x = randn(56, 32, seed=5) * torch.logspace(-6, 6, 32).bfloat16()
    x[40, 3], x[41, 4], x[2, 5], x[3, 5] = float("nan"), float("inf"), float("-inf"), -float("nan")
    x[:, 6] = 0
    x[:, 7] *= 1e-38
    x[3, 8] = -float("nan")
    groups, fmt = Groups(splits, 4, 56, torch.device("cpu")), mh.parse_format(fmt)
    layout = groups.layout(align)
    payload = row_scaled_columns(x, fmt, layout)
    assert payload.scale.shape == (4, 32)
    for group, part in enumerate(x.split(splits)):
        expected = mh.HybridQuantizer(columnwise=fmt).quantize(part).columnwise
        found = GroupedColumns(payload, layout).piece(group)
        assert_bitwise_equal(found.codes(), expected.codes(), "equal")
        assert_bitwise_equal(found.scale, expected.scale, "equal")


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp8_e4m3:2d", "nvfp4:row_scaled", "fp8_rowwise_e4m3", "fp8_block_e4m3:2d"])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_a_stacked_weight_is_its_experts(fmt, direction):
    weight = torch.stack([randn(N, K, seed=seed) for seed in range(3)])
    stack = StackedWeight.make(weight, mh.parse_format(fmt), direction)
    for expert in range(3):
        expected = getattr(mh.HybridQuantizer(fmt, fmt).quantize(weight[expert]), direction)
        found = stack.piece(expert)
        assert found.shape == expected.shape
        assert_bitwise_equal(found.codes(), expected.codes(), "equal")
        assert_bitwise_equal(found.scale_inv(), expected.scale_inv(), "equal")
    values = torch.stack([stack.piece(e).dequantize(torch.bfloat16) for e in range(3)])
    assert_bitwise_equal(stack.dequantize().contiguous(), values, "equal")


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp8_e5m2", "fp8_block_e4m3", "fp8_rowwise_e4m3", "nvfp4:row_scaled"])
@pytest.mark.parametrize("rows", [N, 144, 80])
def test_columns_of_a_stacked_weight_are_rows_of_its_transpose(fmt, rows):
    """Cast where they are and turned over, or turned over and cast: also where the last block of an expert is not whole."""
    weight = torch.stack([randn(rows, K, seed=seed) for seed in range(3)])
    weight[0, :3, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    found = StackedWeight.make(weight, mh.parse_format(fmt), "columnwise")
    expected = StackedWeight.make(weight.transpose(1, 2).contiguous(), mh.parse_format(fmt), "rowwise")
    assert found.shape == expected.shape == (K, rows) and found.payload.direction == "rowwise"
    for name, buffer in found.buffers().items():
        assert_bitwise_equal(buffer, expected.buffers()[name], "equal")


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3:2d", "fp8_block_e4m3:2d"])
def test_tiles_of_a_weight_are_cast_once_for_both_directions(fmt):
    m = grouped(recipe({"input": "mxfp8_e4m3", "weight": fmt}, {"grad_output": "mxfp8_e4m3", "weight": fmt}, "mxfp8_e4m3"))
    assert isinstance(m.how, GroupedPlan)
    x, dy = data(40)
    with counted_casts() as casts:
        gradients(m, x, dy, [10] * 4)
    of_weight = [direction for shape, direction in casts if shape == (EXPERTS * N, K)]
    assert of_weight == ["rowwise"]
    weight, fmt = m.weight.detach(), mh.parse_format(fmt)
    turned, alone = StackedWeight.make(weight, fmt, "rowwise").as_columns(), StackedWeight.make(weight, fmt, "columnwise")
    assert (turned.direction, turned.shape) == (alone.direction, alone.shape)
    for name, buffer in turned.buffers().items():
        assert_bitwise_equal(buffer, alone.buffers()[name], "equal")


def test_the_weight_is_cast_once_a_step():
    m = grouped(AT_ONCE["mxfp8"])
    controller = mh.prepare(m)
    controller.begin_step(1)
    x, dy = data(40)
    counts = []
    for _ in range(2):
        with counted_casts() as casts:
            gradients(m, x, dy, [10, 10, 10, 10])
        counts.append(len(casts))
    assert counts == [6, 4]
    with torch.no_grad():
        m.weight.data.mul_(2)
    stale = m(x, [10] * 4)
    controller.end_step()
    assert not torch.equal(m(x, [10] * 4), stale)


def test_frozen_weights_keep_nothing_of_the_input():
    m = grouped(AT_ONCE["mxfp8"], bias=False)
    m.weight.requires_grad_(False)
    x, dy = data(40)
    with counted_casts() as casts:
        m(x.requires_grad_(), [10] * 4).backward(dy)
    assert m.weight.grad is None and x.grad is not None
    assert sorted(direction for _, direction in casts) == ["columnwise"] + ["rowwise"] * 3
    assert [shape for shape, direction in casts if direction == "columnwise"] == [(EXPERTS * N, K)]  # the weight's


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_weights_whose_memory_comes_and_goes_are_cast_in_every_pass(name, one_by_one):
    (x, dy), splits = data(72), [44, 20, 0, 8]
    kept, cast = (grouped(AT_ONCE[name], one_by_one=one_by_one) for _ in range(2))
    for runtime in cast.hq:
        runtime.keep_no_weight()
    assert one_by_one or isinstance(cast.how, GroupedPlan)
    for found, expected in zip(gradients(cast, x, dy, splits), gradients(kept, x, dy, splits), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["mxfp8", "bf16"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_such_weights_may_be_elsewhere_in_backward(name, one_by_one):
    """As where a pool's memory is another layer's in between: backward reads the weight where it is then."""
    (x, dy), splits, runs = data(72), [44, 20, 0, 8], []
    for moves in (False, True):
        m, x_in = grouped(AT_ONCE[name], one_by_one=one_by_one), x.clone().requires_grad_()
        for runtime in m.hq:
            runtime.keep_no_weight()
        y = m(x_in, splits)
        if moves:
            left, m.weight.data = m.weight.data, m.weight.data.clone()
            left.fill_(7.0)
        y.backward(dy)
        runs.append((x_in.grad, m.weight.grad))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_gradients_go_where_the_weight_says(one_by_one):
    m, given = grouped(AT_ONCE["mxfp8"], one_by_one=one_by_one), []
    m.weight.take_main_grad = lambda: (given.append(torch.ones(m.weight.shape)), given[-1])[1]
    plain = grouped(AT_ONCE["mxfp8"], one_by_one=one_by_one)
    plain.weight.main_grad = torch.ones(m.weight.shape)
    x, dy = data(72)
    for module in (m, plain):
        module(x, [44, 20, 0, 8]).backward(dy)
    assert len(given) == 1 and torch.equal(given[0], plain.weight.main_grad) and m.weight.grad_added_to_main_grad


def test_main_grad_accumulates_in_fp32():
    results = []
    for one_by_one in (False, True):
        m = grouped(AT_ONCE["rowscaled"], one_by_one=one_by_one, bias=False)
        m.weight.main_grad = torch.full(m.weight.shape, 1.0)
        x, dy = data(72)
        for _ in range(2):
            m(x, [44, 20, 0, 8]).backward(dy)
        results.append(m.weight.main_grad)
        assert m.weight.grad_added_to_main_grad and (m.weight.main_grad[2] == 1).all()
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "rowscaled"])
def test_bf16_grouped_mm_is_right_within_its_roundings(name):
    """The GPU's backend for high precision and emulation, through torch's CPU implementation of the same operator."""
    splits = [44, 0, 7, 32]
    m = grouped(AT_ONCE[name], bias=False)
    how, groups = m.how, Groups(splits, EXPERTS, sum(splits), torch.device("cpu"))
    plan = m.plans()[0]
    x, dy = data(sum(splits))
    weights = {
        gemm: StackedWeight.make(m.weight.detach(), getattr(plan, gemm).pair.b, direction)
        for gemm, direction in (("fprop", "rowwise"), ("dgrad", "columnwise"))
    }
    for gemm, a in (("fprop", x), ("dgrad", dy)):
        fmt = getattr(plan, gemm).pair.a
        row = mh.HybridQuantizer(rowwise=fmt).cast(a, columnwise=False)[0]
        found = gemms.BF16.rows(gemm, how.plans, row, weights[gemm], groups, torch.bfloat16)
        expected = gemms.LOOP.rows(gemm, how.plans, row, weights[gemm], groups, torch.bfloat16)
        near(found, expected)
        prepared = gemms.BF16.prepared(getattr(plan, gemm).pair)
        assert torch.equal(prepared.rows(gemm, how.plans, row, weights[gemm], groups, torch.bfloat16), found)
    layout = groups.layout(max(how.alignment, gemms.BF16.alignment(plan.wgrad.pair)))
    a = GroupedColumns.make(dy, plan.wgrad.pair.a, layout, transposed=True)
    b = GroupedColumns.make(x, plan.wgrad.pair.b, layout, transposed=True)
    into = torch.ones(m.weight.shape)
    near(gemms.BF16.contract(how.plans, a, b, torch.bfloat16), gemms.LOOP.contract(how.plans, a, b, torch.bfloat16))
    prepared = gemms.BF16.prepared(plan.wgrad.pair)
    for backend in (gemms.BF16, prepared):
        found = backend.contract(how.plans, a, b, torch.float32, into.fill_(1))
        assert found is into and (found[1] == 1).all()
    plainly = [backend.contract(how.plans, a, b, torch.bfloat16) for backend in (gemms.BF16, prepared)]
    assert torch.equal(*plainly)


def test_bf16_gemms_read_high_precision_that_parameters_hold():
    """As where parameters are quantized in the other direction: a payload, not the weight itself."""
    m = grouped(AT_ONCE["bf16"], bias=False)
    plan, weight, groups = m.plans()[0], m.weight.detach(), Groups([5] * EXPERTS, EXPERTS, 5 * EXPERTS, torch.device("cpu"))
    fmt, (E, N, K) = plan.dgrad.pair.b, weight.shape
    row = mh.HybridQuantizer(rowwise=plan.dgrad.pair.a).cast(torch.randn(5 * E, N).bfloat16(), columnwise=False)[0]
    payload = high_precision_storage(weight.flatten(0, 1), fmt, "columnwise", torch.bfloat16)
    given = StackedWeight.make(weight, fmt, "columnwise"), StackedWeight(payload, "columnwise", fmt, E)
    backend = gemms.BF16.prepared(plan.dgrad.pair)
    assert torch.equal(*(backend.rows("dgrad", m.hq.plans(weight.device), row, w, groups, torch.bfloat16) for w in given))


@pytest.mark.parametrize("strides", ["one element", "one row", "of an odd row", "that begins anywhere", "turned"])
def test_bf16_gemms_read_tensors_of_any_strides(strides):
    """`torch._grouped_mm` wants rows packed: the gradient of a sum is one element, repeated."""
    m, splits = grouped(AT_ONCE["bf16"], bias=False), [44, 0, 7, 32]
    how, groups, plan = m.how, Groups(splits, EXPERTS, sum(splits), torch.device("cpu")), m.plans()[0]
    x, dy = (as_strided(t, strides) for t in data(sum(splits)))
    w = StackedWeight.make(m.weight.detach(), plan.fprop.pair.b, "rowwise")
    rows = [high_precision_storage(t, plan.fprop.pair.a, "rowwise", t.dtype) for t in (x, x.contiguous())]
    columns = [
        [GroupedColumns.make(t, plan.wgrad.pair.a, groups.layout(1), transposed=True) for t in pair]
        for pair in ((dy, x), (dy.contiguous(), x.contiguous()))
    ]
    prepared = [gemms.BF16.prepared(step.pair) for step in (plan.fprop, plan.wgrad)]
    for fprop, wgrad in ([gemms.BF16] * 2, prepared):
        assert torch.equal(*(fprop.rows("fprop", how.plans, a, w, groups, torch.bfloat16) for a in rows))
        assert torch.equal(*(wgrad.contract(how.plans, *pair, torch.bfloat16) for pair in columns))


def as_strided(t, strides):
    """A tensor of the shape of `t` (T, K)."""
    wide = torch.randn(t.shape[0], t.shape[1] + 9).bfloat16()
    return {
        "one element": t[:1, :1].expand(t.shape),
        "one row": t[:1].expand(t.shape),
        "of an odd row": wide[:, : t.shape[1]],
        "that begins anywhere": torch.nn.functional.pad(wide, (0, 7))[:, 3 : 3 + t.shape[1]],
        "turned": t.t().contiguous().t(),
    }[strides]


def test_own_kernels_get_packed_codes(monkeypatch):
    """A part of a quantized tensor is a view of wider rows, which the kernels know nothing of."""
    m = grouped(AT_ONCE["fp8_block"], bias=False)
    plan, seen = m.plans()[0], []
    wide = randn(83, 2 * K, seed=0)
    whole, part = (plan.quantizers["input"].quantize(t).rowwise for t in (wide[:, K:].contiguous(), wide))
    part = narrow(part, 1, K, K)[0]
    assert not part.qdata.is_contiguous()
    w = StackedWeight.make(m.weight.detach(), plan.fprop.pair.b, "rowwise")
    monkeypatch.setattr(gemms.grouped_cuda, "takes", lambda *tensors: True)
    monkeypatch.setattr(gemms.grouped_cuda, "run", lambda what, *arguments: seen.append(arguments[:4]))
    groups = SimpleNamespace(layout=lambda align: SimpleNamespace(blocks=None))
    gemms.OWN.prepared(plan.fprop.pair).rows("fprop", m.how.plans, part, w, groups, torch.bfloat16)
    ((a, b, a_scale, b_scale),) = seen
    assert all(t.is_contiguous() for t in (a, b, a_scale, b_scale))
    assert torch.equal(a, whole.qdata) and torch.equal(a_scale, whole.scale)


def test_own_kernels_add_to_what_has_the_gradient_s_shape_only(monkeypatch):
    m = grouped(AT_ONCE["fp8_block"], bias=False)
    plan, groups = m.plans()[0], Groups([83, 0, 0, 0], EXPERTS, 83, torch.device("cpu"))
    layout = groups.layout(128)
    x, dy = data(83)
    columns = [
        GroupedColumns(cast(layout.spread(t), plan.wgrad.pair.a, "columnwise", transposed=True), layout)
        for t in (dy, x)
    ]
    layout.blocks = None  # the map, which no kernel reads here
    monkeypatch.setattr(gemms.grouped_cuda, "takes", lambda *tensors: True)
    monkeypatch.setattr(gemms.grouped_cuda, "run", lambda what, *arguments: None)
    own, total = gemms.OWN.prepared(plan.wgrad.pair), torch.zeros(EXPERTS - 1, N, K)
    with pytest.raises(RuntimeError, match="size|shape"):
        own.contract(m.how.plans, *columns, torch.bfloat16, total)


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_dtype_that_no_cast_reads_is_named(name, one_by_one):
    m = grouped(AT_ONCE[name], one_by_one=one_by_one).double()
    with pytest.raises(ValueError, match="cannot quantize dtype torch.float64; supported: float32"):
        m(data(72)[0].double(), [44, 20, 0, 8])


def test_an_input_quantized_before_needs_frozen_weights():
    m, (x, dy), splits = grouped(AT_ONCE["fp8_block"], bias=False), data(72), [44, 20, 0, 8]
    held = m.plans()[0].quantizers["input"].quantize(x)
    with pytest.raises(ValueError, match="experts.fc1.*: input was quantized before.*give it as it was, or freeze"):
        m(held, splits).backward(dy)
    m.weight.requires_grad_(False)
    assert torch.equal(m(held, splits), m(x, splits))


def test_sizes_on_another_device_are_refused():
    m, (x, _) = grouped(AT_ONCE["mxfp8"]), data(72)
    with pytest.raises(ValueError, match="m_splits on meta: expected them on cpu"):
        m(x, torch.tensor([44, 20, 0, 8], device="meta"))


def test_a_trace_sees_the_experts_own_operators(monkeypatch):
    """Kernels of all groups at once are none: a graph would be without them."""
    m, (x, _), splits = grouped(AT_ONCE["fp8_block"]), data(72), [44, 20, 0, 8]
    with torch.no_grad():
        expected = m(x, splits)
        monkeypatch.setattr(mh.grouped, "grouped_at_once", None)
        graph = make_fx(lambda x: m(x, splits))(x)
        assert torch.equal(graph(x), expected)


def near(found, expected):
    """Two roundings to bf16 against one, of sums in FP32."""
    expected = expected.float()
    bound = 3 * 2.0**-8 * expected.abs() + 1e-5 * expected.abs().max()
    assert ((found.float() - expected).abs() <= bound).all()


def test_choice_of_backends_on_hopper():
    """As the plan says, native or emulated; sizes of groups are needed on the host only where nothing else runs."""
    from megatron_hybrid.gemm import DeviceKind
    from megatron_hybrid.plan import build_plan
    from megatron_hybrid.roles import GROUPED_LINEAR, ModuleRole

    role = ModuleRole(GROUPED_LINEAR, "experts.fc1", expert=0)
    rows = "grouped_mm" if grouped_cuda.library() is None else "grouped_decoding"
    expected = {
        "bf16": ["grouped_mm"] * 3,
        "mxfp8": [rows, rows, "grouped_mm"],
        "rowscaled": [rows, rows, "grouped_mm"],
        "fp8_rowwise": ["grouped_fp8"] * 3,
        "fp8_block": ["grouped_fp8"] * 3,
    }
    for name, backends in expected.items():
        plan = build_plan(AT_ONCE[name].resolve(role), "experts.fc1", DeviceKind("cuda", (9, 0)))
        found = [gemms.choose(step, (N, K), torch.bfloat16).name for step in plan.steps().values()]
        assert found == backends, name
        odd = [gemms.choose(step, (N, 68), torch.bfloat16).name for step in plan.steps().values()]
        assert odd == ["loop"] * 3
