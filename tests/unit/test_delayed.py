"""Delayed scaling at tensor level: histories per direction, any mixture, the rule run by hand."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from tensor_cases import assert_same_storage, tensor

import megatron_hybrid as mh
from megatron_hybrid.scaling import FLT_MAX
from megatron_hybrid.testing import oracle
from megatron_hybrid.testing.assertions import assert_bitwise_equal

CONFIGS = ("fp8_delayed_e4m3:history=4", "fp8_delayed_e5m2:history=3,margin=2", "fp8_delayed_e4m3:history=5,algo=most_recent")


def steps(n=10):
    """Inputs whose amax wanders over six powers of ten, with a zero step, an Inf step and a NaN step."""
    for i in range(n):
        x = tensor((32, 48), seed=i) * 10.0 ** ((i * 7) % 7 - 3)
        if i == 3:
            x.zero_()
        if i == 5:
            x[0, 0] = float("inf")
        if i == 7:
            x[1, 1] = float("nan")
        yield x


@pytest.mark.parametrize("fmt", CONFIGS)
def test_p30_ten_steps_equal_a_hand_run_of_the_rule(fmt):
    f = mh.parse_format(fmt)
    state = mh.DelayedState.new(f, "cpu")
    history, scale = np.zeros(f.option("history"), np.float32), np.float32(1)
    assert float(state.scale) == 1
    q = mh.HybridQuantizer(fmt, None)
    for i, x in enumerate(steps()):
        t = q.quantize(x, state=(state, None))
        assert_bitwise_equal(t.rowwise.scale, np.float32(1) / np.float32(scale), f"step {i}: the scale before the step")
        expected = oracle.quantize(x, fmt, "rowwise", scale=scale)
        assert_bitwise_equal(t.rowwise.codes(), expected.codes, f"step {i}")
        history[0] = np.maximum(history[0], oracle.as_float32(x.abs().float().amax()))
        assert_bitwise_equal(state.history, history, f"step {i}: recorded")
        history, scale = oracle.delayed_update(history, scale, fmt)
        state.update(f)
        assert_bitwise_equal(state.history, history, f"step {i}: rolled", any_nan=True)
        assert_bitwise_equal(state.scale, scale, f"step {i}: next scale")


def test_the_rule_in_numbers():
    """scale = max * 2^-margin / amax; unchanged when amax is 0, Inf or NaN; FLT_MAX instead of Inf."""
    f = mh.parse_format("fp8_delayed_e4m3:history=2,margin=1")
    s = mh.DelayedState.new(f, "cpu")
    for amax, scale in ((7.0, 32.0), (0.0, 32.0), (0.0, 32.0), (float("inf"), 32.0), (1.0, 32.0), (1.0, 224.0), (1e-40, 224.0)):
        s.record(torch.tensor(amax))  # 448 * 0.5 / 7 = 32; two zero steps keep it; Inf stays two steps in the history
        s.update(f)
        assert float(s.scale) == scale, amax
    s.history.zero_()
    s.record(torch.tensor(1e-40))
    s.update(f)
    assert float(s.scale) == FLT_MAX


def test_several_casts_of_a_step_record_their_maximum():
    q = mh.HybridQuantizer("fp8_delayed_e4m3:history=2", None)
    state = q.new_state()
    for value in (2.0, 5.0, 3.0):
        q.quantize(torch.full((4, 4), value), state=state)
    assert state[0].history.tolist() == [5.0, 0.0]


@pytest.mark.parametrize("row,col", list(itertools.product((*CONFIGS, "mxfp8_e4m3", "nvfp4"), CONFIGS)))
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_p30_every_direction_has_its_own_history(row, col, source):
    q = mh.HybridQuantizer(row, col, source)
    state = q.new_state()
    assert (state[0] is None) == (not q.rowwise.is_stateful) and state[1] is not None
    alone = mh.HybridQuantizer(None, col).new_state()
    for x in itertools.islice(steps(), 3):
        t = q.quantize(x, state=state)
        seen = t.rowwise.dequantize(torch.bfloat16) if q.derives_columnwise else x
        assert_same_storage(t.columnwise, mh.HybridQuantizer(None, col).quantize(seen, state=alone).columnwise, f"{row} {col}")
        for s, fmt in zip((*state, alone[1]), (*q.formats(), q.columnwise)):
            if s is not None:
                s.update(fmt)
    assert_bitwise_equal(state[1].history, alone[1].history, "history")


def test_a_frozen_state_scales_and_records_nothing():
    """Evaluation and recomputation."""
    q = mh.HybridQuantizer("fp8_delayed_e4m3", "fp8_delayed_e5m2")
    state = q.new_state()
    state[0].scale.fill_(16)
    x = tensor((32, 48))
    frozen = tuple(s.frozen() for s in state)
    t = q.quantize(x, state=frozen)
    assert float(state[0].history.max()) == float(state[1].history.max()) == 0
    u = q.quantize(x, state=state)
    assert_same_storage(t.rowwise, u.rowwise)
    assert_same_storage(t.columnwise, u.columnwise)
    assert float(state[0].history[0]) == float(state[1].history[0]) == float(x.abs().max())


def test_an_amax_from_the_caller_is_what_is_recorded():
    """Already reduced over the ranks that share the tensor."""
    q = mh.HybridQuantizer("fp8_delayed_e4m3", None)
    state = q.new_state()
    q.quantize(tensor((8, 8)), state=state, amax=(torch.tensor(123.0), None))
    assert float(state[0].history[0]) == 123.0


def test_update_uses_the_scale_of_the_state_not_of_the_old_bytes():
    """Codes and scale_inv are always of the same version (cases.md 37)."""
    q = mh.HybridQuantizer("fp8_delayed_e4m3", None)
    state = q.new_state()
    t = q.quantize(tensor((8, 32)), state=state)
    state[0].scale.fill_(64)
    assert float(t.rowwise.scale) == 1.0, "a later scale does not reach bytes cast earlier"
    new = tensor((8, 32), seed=1)
    t.update(new, state=state)
    assert float(t.rowwise.scale) == 1 / 64
    assert_same_storage(t.rowwise, q.quantize(new, state=state).rowwise)


def test_state_is_plain_tensors():
    state = mh.DelayedState.new(mh.parse_format("fp8_delayed_e4m3"), "cpu")
    assert state.history.shape == (1024,) and state.scale.shape == ()
    copy = mh.DelayedState(*pickle.loads(pickle.dumps((state.scale, state.history))))
    assert torch.equal(copy.history, state.history)
    with pytest.raises(ValueError, match="only delayed scaling"):
        mh.DelayedState.new(mh.parse_format("mxfp8_e4m3"), "cpu")
