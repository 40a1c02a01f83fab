"""Grouped linears whose weights live quantized: one parameter an expert, the bits of ordinary ones."""

import contextlib
import copy

import pytest
import torch
from linear_cases import assert_same, gradients, randn, recipe
from test_quantized_weights import same_bytes

import megatron_hybrid as mh

E, K, N = 4, 64, 48
SPLITS = [7, 0, 44, 1]
FORMATS = ["mxfp8_e4m3", "nvfp4", "fp8_current_e4m3", "fp8_delayed_e4m3:history=3", "nvfp4:2d"]


def grouped(rec, quantized, **kwargs):
    torch.manual_seed(0)
    context = mh.quantized_model_init(rec, True) if quantized else contextlib.nullcontext()
    with context:
        return mh.HybridGroupedLinear(E, K, N, bias=True, recipe=rec, name="experts", dtype=torch.bfloat16, **kwargs)


def joined(tensors):
    """y, dx, bias and the weight gradients, of one weight or of one an expert, as y, dx, dw (E, N, K), db."""
    y, dx, *rest = tensors
    weights, bias = [t for t in rest if t.dim() != 2 or t.shape[0] != E], [t for t in rest if t.shape == (E, N)]
    return [y, dx, weights[0] if len(weights) == 1 else torch.stack(weights), *bias]


@pytest.mark.parametrize("fmt", FORMATS)
def test_p28_p42_quantized_experts_have_the_bits_of_ordinary_ones(fmt):
    """P28, P42, c08: the same initial values, outputs and gradients, groups of 0, 1, 7 and 44 rows."""
    rec = recipe(fmt, fmt, fmt)
    ours, theirs = grouped(rec, True), grouped(rec, False)
    assert ours.weight is None and all(isinstance(w, mh.HybridTensor) for w in ours.weights())
    for e, weight in enumerate(ours.weights()):
        assert torch.equal(weight.get_high_precision_init_val(), theirs.weight[e])
    x, dy = randn(sum(SPLITS), K), randn(sum(SPLITS), N, seed=1)
    assert_same(joined(gradients(ours, x, dy, SPLITS)), joined(gradients(theirs, x, dy, SPLITS)))
    assert fmt == "mxfp8_e4m3" or "weight.rowwise" in str(ours.how) or "input.rowwise" in str(ours.how)


@pytest.mark.parametrize("fmt", FORMATS)
def test_p59_steps_of_the_optimizer_and_files(fmt):
    """Three steps equal bf16 parameters' with `master_cast: param_dtype`; state dicts go both ways."""
    rec = recipe(fmt, fmt, fmt, top={"master_cast": "param_dtype"})
    models = grouped(rec, True), grouped(rec, False)
    controls = [mh.prepare(m) for m in models]
    optimizers = [mh.FusedAdam(m.parameters(), lr=1e-2) for m in models]
    for step in range(1, 4):
        outputs = []
        for model, control, optimizer in zip(models, controls, optimizers):
            control.begin_step(step)
            optimizer.zero_grad()
            y = model(randn(sum(SPLITS), K, seed=step), SPLITS)
            y.float().square().mean().backward()
            optimizer.step()
            control.end_step()
            outputs.append(y.detach())
        assert_same(outputs[:1], outputs[1:])
    ours, theirs = models
    fresh = grouped(rec, True)
    fresh.load_state_dict(theirs.state_dict())
    for mine, value in zip(fresh.weights(), theirs.weight):
        assert torch.equal(mine.get_high_precision_init_val(), value)
    fresh.load_state_dict(ours.state_dict())
    assert all(map(same_bytes, fresh.weights(), ours.weights()))
    back = grouped(rec, False)
    back.load_state_dict(ours.state_dict())
    assert torch.equal(back.weight, torch.stack([w.dequantize(dtype=torch.bfloat16) for w in ours.weights()]))


@pytest.mark.parametrize("experts", [E - 1, E + 1])
def test_a_stack_of_another_number_of_experts_is_refused(experts):
    rec = recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3")
    state = grouped(rec, False).state_dict() | {"weight": torch.zeros(experts, N, K)}
    with pytest.raises(RuntimeError, match=f"weight has {experts} experts, expected {E}"):
        grouped(rec, True).load_state_dict(state, strict=False)


def test_formats_of_one_s_own_and_experts_left_alone():
    rules = [{"match": {"experts": "0:1"}, "use": "high_precision"}, {"match": {"experts": "2:3"}, "use": "nvfp4"}]
    rec = recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3", rules=rules)
    ours = grouped(rec, True)
    kinds = [str(w.rowwise.format) if isinstance(w, mh.HybridTensor) else "plain" for w in ours.weights()]
    assert kinds == ["plain", "mxfp8_e4m3", "nvfp4", "mxfp8_e4m3"]
    x, dy = randn(sum(SPLITS), K), randn(sum(SPLITS), N, seed=1)
    want = gradients(ours, x, dy, SPLITS)
    assert_same(joined(want), joined(gradients(grouped(rec, False), x, dy, SPLITS)))
    assert_same(gradients(copy.deepcopy(ours), x, dy, torch.tensor(SPLITS, dtype=torch.int32)), want)


def test_stochastic_rounding_of_an_expert_counts_its_rows_in_the_whole():
    rec = recipe("nvfp4:sr", "nvfp4:sr", "high_precision")
    ours, theirs = grouped(rec, True, first_expert=2), grouped(rec, False, first_expert=2)
    controls = [mh.prepare(m, seed=9) for m in (ours, theirs)]
    for control in controls:
        control.begin_step(3)
    with torch.no_grad():
        for weight in ours.weights():  # again, with this step's keys
            weight.copy_(weight.get_high_precision_init_val())
    x = randn(sum(SPLITS), K)
    assert torch.equal(ours(x, SPLITS), theirs(x, SPLITS))


def test_meta_device():
    rec = recipe("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3", top={"weights": "quantized"})
    direct = grouped(rec, False)
    with torch.device("meta"):
        later = grouped(rec, False)
    later.to_empty(device="cpu")
    torch.manual_seed(0)
    later.reset_parameters()
    assert all(map(same_bytes, later.weights(), direct.weights()))
