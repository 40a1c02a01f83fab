"""Quantized parameters of experts in common memory: all experts at once, the bits of one after another, no copy, no cast."""

import contextlib
import copy
import pickle

import pytest
import torch
from linear_cases import assert_same, counted_casts, gradients, randn, recipe
from test_quantized_weights import same_bytes
from torch.multiprocessing.reductions import StorageWeakRef

import megatron_hybrid as mh
from megatron_hybrid.formats import COLUMNWISE, ROWWISE
from megatron_hybrid.gemm import grouped as gemms
from megatron_hybrid.grouped_at_once import GroupedPlan
from megatron_hybrid.groups import Groups
from megatron_hybrid.stacked import StackedWeight
from megatron_hybrid.storage_layout import equal

E, K, N = 4, 256, 512
SPLITS = [44, 0, 7, 32]
DERIVED = {"columnwise_source": {"input": "rowwise_dequantized", "weight": "rowwise_dequantized"}}
RECIPES = {
    "mxfp8": recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"),
    "rowscaled": recipe("nvfp4:row_scaled", "mxfp8_e4m3", "mxfp8_e4m3", **DERIVED),
    "rowscaled columns": recipe("mxfp8_e4m3", {"grad_output": "mxfp8_e4m3", "weight": "nvfp4:row_scaled"}, "mxfp8_e4m3"),
    "fp8_rowwise": recipe("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "fp8_rowwise_e4m3"),
    "fp8_block": mh.Recipe.load("fp8_block"),
    "dequantized": recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3").with_backward("dequantized"),
}


def grouped(rcp, *, quantized=True, one_by_one=False, bias=True, shape=(N, K), experts=E):
    torch.manual_seed(1)
    with mh.quantized_model_init(rcp, True) if quantized else contextlib.nullcontext():
        m = mh.HybridGroupedLinear(experts, shape[1], shape[0], bias, recipe=rcp, name="fc1", dtype=torch.bfloat16)
    mh.prepare(m, seed=3).begin_step(1)
    m.hq.one_by_one = one_by_one
    return m


def data(rows=sum(SPLITS), shape=(N, K)):
    return randn(rows, shape[1], seed=0), randn(rows, shape[0], seed=1)


def addresses(m):
    return [
        (s.direction, name, t.data_ptr())
        for w in m.weights()
        for s in (w.rowwise, w.columnwise)
        if s is not None
        for name, t in s.buffers().items()
    ]


def assert_in_the_stack(m):
    """Every expert's tensors are views of the stack's, one after another."""
    for direction in (ROWWISE, COLUMNWISE):
        stack = getattr(m.hq.stack, direction)
        for name, whole in {} if stack is None else stack.buffers().items():
            for e, w in enumerate(m.weights()):
                part = getattr(getattr(w, direction), name)
                assert part.data_ptr() == whole.data_ptr() + e * part.nbytes and part.is_contiguous()


@pytest.mark.parametrize("name", RECIPES)
def test_p42_c08_equals_one_after_another_bit_for_bit(name):
    x, dy = data()
    m, loop, plain = (grouped(RECIPES[name], **how) for how in ({}, {"one_by_one": True}, {"quantized": False}))
    assert isinstance(m.how, GroupedPlan) and loop.how == "asked for"
    assert_in_the_stack(m)
    found, expected = gradients(m, x, dy, SPLITS), gradients(loop, x, dy, SPLITS)
    assert_same(found, expected)
    y, dx, dw, db = gradients(plain, x, dy, SPLITS)
    assert_same([*found[:2], torch.stack([t for t in found[2:] if t.shape == (N, K)])], [y, dx, dw])
    assert any(torch.equal(t, db) for t in found[2:] if t.shape == (E, N))
    assert m.plans()[0].calls == loop.plans()[0].calls
    with torch.no_grad():
        assert torch.equal(m(x, torch.tensor(SPLITS)), y)


@pytest.mark.parametrize("name", ["mxfp8", "rowscaled", "fp8_rowwise", "fp8_block"])
@pytest.mark.parametrize("experts", [2, 8])
def test_p41_weights_are_neither_cast_nor_copied(name, experts):
    """One cast an operand and direction of input and gradient, whatever the number of experts."""
    m, splits = grouped(RECIPES[name], experts=experts), [5] * experts
    x, dy = data(sum(splits))
    before = addresses(m)
    with counted_casts() as casts:
        gradients(m, x, dy, splits)
    assert len(casts) == {"mxfp8": 4, "rowscaled": 4, "fp8_rowwise": 2, "fp8_block": 4}[name], casts
    assert all(shape[0] >= x.shape[0] for shape, _ in casts)
    assert addresses(m) == before


@pytest.mark.parametrize("name", ["mxfp8", "rowscaled", "fp8_block"])
def test_steps_of_the_optimizer_write_the_stack(name):
    rcp = RECIPES[name]
    models = [grouped(rcp), grouped(rcp, one_by_one=True)]
    optimizers = [mh.FusedAdam(m.parameters(), lr=1e-2) for m in models]
    before, losses = addresses(models[0]), []
    for step in range(3):
        x, dy = data()
        for m, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            losses.append(gradients(m, x + step, dy, SPLITS)[0])
            optimizer.step()
    assert_same(losses[::2], losses[1::2])
    assert not torch.equal(losses[0], losses[2])
    assert addresses(models[0]) == before
    assert all(map(same_bytes, *(m.weights() for m in models)))


def test_main_grads_of_experts_accumulate_in_fp32():
    found = []
    for one_by_one in (False, True):
        m = grouped(RECIPES["mxfp8"], one_by_one=one_by_one, bias=False)
        for w in m.weights():
            w.main_grad = torch.full((N, K), 1.0)
        x, dy = data()
        for _ in range(2):
            m(x, SPLITS).backward(dy)
        assert all(w.grad_added_to_main_grad for w in m.weights()) and (m.weights()[1].main_grad == 1).all()
        found.append([w.main_grad for w in m.weights()])
    assert_same(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_over_experts_goes_to_their_accumulators_without_a_copy(dtype):
    totals, dw = [randn(N, K, seed=e, dtype=torch.float32) for e in range(E)], torch.stack([randn(N, K, seed=9)] * E).to(dtype)
    expected = [total + part.float() for total, part in zip(totals, dw)]
    assert gemms._finish(dw, dtype, totals) is totals
    assert_same(totals, expected)


def reload_by_assignment(m):
    m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True)
    return m


def take_memory_of_their_own(m):
    for weight in m.weights():
        rowwise, columnwise = ({} if s is None else s.buffers() for s in (weight.rowwise, weight.columnwise))
        weight.take_buffers(*({n: t.clone() for n, t in held.items()} for held in (rowwise, columnwise)))
        assert weight.rowwise.qdata.untyped_storage().nbytes() == weight.rowwise.qdata.nbytes
    return m


MOVES = [copy.deepcopy, reload_by_assignment, take_memory_of_their_own, lambda m: m.half().bfloat16()]


@pytest.mark.parametrize("move", MOVES)
def test_payloads_that_moved_are_joined_again(move):
    m, (x, dy) = grouped(RECIPES["mxfp8"]), data()
    expected = gradients(m, x, dy, SPLITS)
    before = addresses(m)
    m = move(m)
    assert_same(gradients(m, x, dy, SPLITS), expected)
    assert isinstance(m.how, GroupedPlan)
    assert_in_the_stack(m)
    m.weights()[1].data.copy_(torch.zeros(N, K))  # the stack is what is read
    assert not m(x, [0, sum(SPLITS), 0, 0])[:, :].sub(m.bias[1]).any()
    assert len(addresses(m)) == len(before)


def through_a_pickle(m):
    return pickle.loads(pickle.dumps(m))


def follow_a_switch(m):
    switch_to_others_at_once(m)
    return m


@pytest.mark.parametrize("move", [*MOVES[:2], MOVES[3], through_a_pickle, follow_a_switch])
def test_a_state_dict_taken_after_a_move_follows_later_writes(move):
    """As one of plain parameters does, whether or not there has been a forward."""
    m = move(grouped(RECIPES["mxfp8"]))
    state, (x, _) = m.state_dict(), data()
    m(x, SPLITS)
    with torch.no_grad():
        for w in m.weights():
            w.copy_(torch.ones(N, K))
    for e, w in enumerate(m.weights()):
        assert same_bytes(state[f"weight{e}"], w) and (state[f"weight{e}"].dequantize() == 1).all()


def test_what_is_written_of_an_expert_is_its_own_bytes():
    m = grouped(RECIPES["mxfp8"])
    one = sum(b.nbytes for b in m.weight1.payload_buffers())
    whole = sum(b.nbytes for s in (m.hq.stack.rowwise, m.hq.stack.columnwise) for b in s.buffers().values())
    assert whole == E * one
    for written in (pickle.dumps(m.weight1), pickle.dumps(m.state_dict()["weight1"].detach())):
        assert one < len(written) < 1.5 * one
        assert same_bytes(pickle.loads(written), m.weight1)
    assert whole < len(pickle.dumps(m)) < 1.5 * whole
    assert_in_the_stack(m)


def test_a_change_of_formats_is_followed():
    rules = [{"match": {"steps": "2:"}, "use": "fp8_rowwise_e4m3"}]
    rcp = recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3", rules=rules)
    models = [grouped(rcp), grouped(rcp, one_by_one=True)]
    x, dy = data()
    for step in (1, 2):
        runs = []
        for m in models:
            mh.prepare(m).begin_step(step)
            runs.append(gradients(m, x, dy, SPLITS))
        assert_same(*runs)
        assert isinstance(models[0].how, GroupedPlan)
        assert_in_the_stack(models[0])
    assert "fp8_rowwise" in str(models[0].hq.stack.rowwise.format)


def switch_to_one_by_one(m):
    controller = mh.prepare(m, seed=3)
    controller.switch("fp8_current")
    controller.begin_step(2)


def switch_to_others_at_once(m):
    controller = mh.prepare(m, seed=3)
    controller.switch(RECIPES["fp8_rowwise"])
    controller.begin_step(2)


LEAVE = [switch_to_one_by_one, switch_to_others_at_once, lambda m: m.to("meta"), reload_by_assignment]


@pytest.mark.parametrize("leave", LEAVE)
def test_memory_that_weights_have_left_is_let_go(leave):
    """At once, before any call."""
    m = grouped(RECIPES["mxfp8"])
    assert_in_the_stack(m)
    stack = m.hq.stack
    held = [StorageWeakRef(t.untyped_storage()) for s in (stack.rowwise, stack.columnwise) for t in s.buffers().values()]
    assert len(held) == 4 and not any(memory.expired() for memory in held)
    leave(m)
    assert all(memory.expired() for memory in held)
    if leave is switch_to_one_by_one:
        assert stack.rowwise is None and stack.columnwise is None
    else:
        assert_in_the_stack(m)


def test_a_move_to_where_they_are_leaves_weights_in_their_memory():
    m = grouped(RECIPES["mxfp8"])
    before = addresses(m)
    m.to("cpu").bfloat16()
    assert isinstance(m.how, GroupedPlan) and addresses(m) == before


def test_experts_that_are_to_run_one_by_one_keep_memory_of_their_own_alone():
    m = grouped(RECIPES["mxfp8"])
    m.hq.one_by_one = True
    assert m.how == "asked for" and m.hq.stack.rowwise is None


def test_what_does_not_run_at_once_says_why():
    assert "a group has one scale" in grouped(recipe(*["fp8_current_e4m3"] * 3)).how
    assert "scale of 8 bytes is not whole 16 bytes" in grouped(RECIPES["fp8_block"], shape=(256, 128)).how
    mixed = grouped(RECIPES["mxfp8"])
    mixed.weights()[2].requires_grad_(False)
    assert mixed.how == "some experts are frozen"
    rules = [{"match": {"experts": 1}, "use": "high_precision"}]
    assert grouped(recipe(*["mxfp8_e4m3"] * 3, rules=rules)).how == "experts have different plans"
    stale = grouped(RECIPES["mxfp8"])
    stale.weights()[0].detach().update(torch.ones(N, K), columnwise=False)
    assert stale.how == "an expert's direction is stale"
    with pytest.raises(mh.PlanError, match="columnwise is stale"):
        gradients(stale, *data(), SPLITS)
    with mh.quantized_model_init(RECIPES["mxfp8"], requires_grad=False):
        frozen = mh.HybridGroupedLinear(E, K, N, name="fc1", dtype=torch.bfloat16)
    assert frozen.how == "weights hold no columns"
    casts = grouped(RECIPES["mxfp8"])
    for runtime in casts.hq:
        runtime.keep_no_weight()
    assert casts.how == "dgrad reads the original"
    assert frozen(data()[0], SPLITS).shape == (sum(SPLITS), N)


def test_frozen_experts_give_the_input_its_gradient():
    found = []
    for one_by_one in (False, True):
        m = grouped(RECIPES["mxfp8"], one_by_one=one_by_one, bias=False)
        for w in m.weights():
            w.requires_grad_(False)
        x, dy = data()
        x.requires_grad_()
        m(x, SPLITS).backward(dy)
        found.append([x.grad])
    assert_same(*found)


STACKED = ["mxfp8_e4m3", "nvfp4:row_scaled", "fp8_rowwise_e4m3"]


@pytest.mark.parametrize("fmt, rows", [*((fmt, rows) for fmt in STACKED for rows in (N, 144)), ("fp8_block_e4m3:2d", N)])
def test_columns_by_rows_are_the_bytes_of_a_stack_s_cast(fmt, rows):
    """What GPU GEMMs multiply: also where a block of 32 rows ends inside an expert. Tiles that would span experts are
    never stacked."""
    rcp = recipe({"input": "mxfp8_e4m3", "weight": fmt}, {"weight": fmt, "grad_output": "mxfp8_e4m3"}, "mxfp8_e4m3")
    m = grouped(rcp, shape=(rows, K))
    assert isinstance(m.how, GroupedPlan)
    values = torch.stack([w.get_high_precision_init_val() for w in m.weights()])
    fmt = mh.parse_format(fmt)
    for direction in (ROWWISE, COLUMNWISE):
        held = StackedWeight(getattr(m.hq.stack, direction), direction, fmt, E)
        made = StackedWeight.make(values, fmt, direction)
        assert held.shape == made.shape and equal(held.by_rows(), made.payload)
        for e in range(E):
            assert equal(held.piece(e), made.piece(e))


@pytest.mark.parametrize("name", ["mxfp8", "rowscaled", "fp8_rowwise"])
@pytest.mark.parametrize("rows", [N, 144])
def test_bf16_grouped_mm_reads_parameters_as_it_reads_casts(name, rows):
    """The GPU's backend for emulation, through torch's CPU implementation of the same operator."""
    m, plain = (grouped(RECIPES[name], quantized=q, bias=False, shape=(rows, K)) for q in (True, False))
    how, plan, groups = m.how, m.plans()[0], Groups(SPLITS, E, sum(SPLITS), torch.device("cpu"))
    x, dy = data(shape=(rows, K))
    for gemm, a, direction in (("fprop", x, ROWWISE), ("dgrad", dy, COLUMNWISE)):
        pair = getattr(plan, gemm).pair
        row = mh.HybridQuantizer(rowwise=pair.a).cast(a, columnwise=False)[0]
        held = StackedWeight(getattr(m.hq.stack, direction), direction, pair.b, E)
        source = plain.weight.detach()
        if direction == COLUMNWISE and plan.quantizers["weight"].derives_columnwise:
            source = StackedWeight.make(source, plan.fprop.pair.b, ROWWISE).dequantize()
        made = StackedWeight.make(source, pair.b, direction)
        found, expected = (gemms.BF16.rows(gemm, how.plans, row, w, groups, torch.bfloat16) for w in (held, made))
        assert torch.equal(found, expected)
