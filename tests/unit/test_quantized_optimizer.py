"""FusedAdam over quantized parameters: masters, both directions, delayed scales, resumption, changes of recipe."""

import copy
import io
import pickle

import pytest
import torch
from linear_cases import EVERY, randn, recipe
from test_quantized_weights import K, M, N, assert_same_parameters, linear, same_bytes, step_of, uniform

import megatron_hybrid as mh

QUANTIZED = [fmt for fmt in EVERY if fmt != "high_precision"]


def quantized(rec, **kwargs):
    with mh.quantized_model_init(rec, preserve_high_precision_init_val=True):
        return linear(None, **kwargs)


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_p59_masters_track_torch_and_payloads_are_their_quantization(fmt):
    """P59: masters bitwise as torch's fused AdamW on FP32; after every step the bytes are `quantize(master)`."""
    rec = uniform(fmt)
    module = quantized(rec)
    control, weight = mh.prepare(module, seed=1), module.weight
    master = torch.nn.Parameter(weight.get_high_precision_init_val().float())
    options = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer = mh.FusedAdam(module.parameters(), **options)
    reference = torch.optim.AdamW([master], fused=True, **options)
    pointers = [b.data_ptr() for s in (weight.rowwise, weight.columnwise) for b in s.buffers().values()]
    for step in range(1, 6):
        control.begin_step(step)
        weight.grad = randn(N, K, seed=step)
        master.grad = weight.grad.float()
        optimizer.step()
        reference.step()
        assert torch.equal(optimizer.state[weight]["master_param"], master)
        keys = module.hq.weight_owner.keys(weight.device)
        expected = weight.quantizer.quantize(master.detach(), **keys).to(torch.bfloat16)
        assert same_bytes(weight, expected) and not weight.stale
        assert torch.equal(weight.dequantize(), expected.dequantize())
        control.end_step()
    assert pointers == [b.data_ptr() for s in (weight.rowwise, weight.columnwise) for b in s.buffers().values()]


def test_c44_masters_start_from_the_initial_value_which_is_freed():
    module = quantized("nvfp4_fprop_mxfp8_bwd")
    initial = module.weight.get_high_precision_init_val().float()
    optimizer = mh.FusedAdam(module.parameters(), lr=0.0)
    module.weight.grad = torch.zeros(N, K, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(optimizer.state[module.weight]["master_param"], initial)
    assert module.weight.get_high_precision_init_val() is None
    decoded = linear(uniform("nvfp4"))
    optimizer = mh.FusedAdam(decoded.parameters(), lr=0.0)
    before = decoded.weight.dequantize()
    decoded.weight.grad = torch.zeros(N, K, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(optimizer.state[decoded.weight]["master_param"], before)


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "nvfp4", "fp8_current_e4m3"])
def test_a_thousand_steps_of_a_hundredth_of_a_quantum_move_a_weight(fmt):
    """The master keeps what the codes cannot show: 1000 x 1/100 of the step between codes is ten codes."""
    module = linear(uniform(fmt), bias=False, sizes=(32, 32))
    with torch.no_grad():
        module.weight.copy_(torch.ones(32, 32))
    # codes above 1.0 are 1/8 (E4M3) or 1/2 (E2M1) apart where the block's maximum stays within a factor of two
    quantum = 0.5 if fmt == "nvfp4" else 0.125
    optimizer = mh.FusedAdam(module.parameters(), lr=quantum / 100, eps=0.0)
    module.weight.grad = torch.full((32, 32), -1.0, dtype=torch.bfloat16)
    first = module.weight.dequantize().clone()
    optimizer.step()
    assert (module.weight.dequantize() - first).abs().max() <= quantum / 50  # one step is less than a code
    for _ in range(999):
        optimizer.step()
    # every step moves by lr up to the rounding of Adam's quotient and of the FP32 sum
    moved = optimizer.state[module.weight]["master_param"] - 1.0
    assert (moved - 10 * quantum).abs().max() <= 1000 * (quantum / 100) * 2.0**-20 + 1000 * 8 * 2.0**-24
    assert (module.weight.dequantize() - (1 + 10 * quantum)).abs().max() <= quantum / 2 * (1 + 10 * quantum)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ],
)
def test_c46_an_optimizer_without_masters_is_refused_and_the_error_names_the_cure(make):
    module = linear(uniform("mxfp8_e4m3"), bias=False)
    before = module.weight.detach().clone()
    optimizer = make(module.parameters())
    module(randn(M, K)).float().sum().backward()
    with pytest.raises(NotImplementedError, match="FP32 masters.*mh.FusedAdam"):
        optimizer.step()
    assert same_bytes(module.weight, before)


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("fmt", ["nvfp4:2d", "fp8_delayed_e4m3:history=3"])
def test_a_noop_flag_changes_nothing(fmt, correction):
    module, control = quantized(uniform(fmt)), None
    control = mh.prepare(module)
    optimizer = mh.FusedAdam(module.parameters(), lr=1e-2, capturable=True, bias_correction=correction)
    flag = torch.zeros((), dtype=torch.int32)

    def step(i, value):
        control.begin_step(i)
        flag.fill_(value)
        module.weight.grad, module.bias.grad = randn(N, K, seed=i), randn(N, seed=i)
        optimizer.step(noop_flag=flag)

    step(1, 0)
    before = [module.weight.detach().clone(), module.bias.detach().clone()]
    states = {k: v.clone() for k, v in optimizer.state[module.weight].items()}
    scales = [b.clone() for b in module.hq.buffers()]
    step(2, 1)
    assert same_bytes(module.weight, before[0]) and torch.equal(module.bias, before[1])
    assert all(torch.equal(v, states[k]) for k, v in optimizer.state[module.weight].items())
    assert all(map(torch.equal, module.hq.buffers(), scales))
    assert optimizer.state_dict()["param_groups"][0]["step"] == 1
    step(2, 0)
    assert not same_bytes(module.weight, before[0]) and optimizer.state_dict()["param_groups"][0]["step"] == 2
    with pytest.raises(ValueError, match="capturable"):
        mh.FusedAdam(module.parameters()).step(noop_flag=flag)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_delayed", "mxfp8_fprop_nvfp4_bwd"])
def test_p38_resume_is_bitwise(name):
    def fresh(seed=0):
        module = quantized(name, cls=mh.HybridMLP, seed=seed)
        return module, mh.FusedAdam(module.parameters(), lr=1e-2, weight_decay=0.1), mh.prepare(module, seed=4)

    straight = fresh()
    for step in range(1, 4):
        step_of(*straight, step)
    file = io.BytesIO()
    torch.save([straight[0].state_dict(), straight[1].state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    resumed = fresh(seed=9)
    for part, state in zip(resumed, states):
        part.load_state_dict(state)
    assert resumed[0].linear_fc1.weight.get_high_precision_init_val() is None
    for step in range(4, 7):
        assert torch.equal(step_of(*straight, step), step_of(*resumed, step))
    assert_same_parameters(straight[0], resumed[0])


def test_p29_a_switch_requantizes_from_masters():
    module = quantized("mxfp8")
    control, optimizer, weight = mh.prepare(module), mh.FusedAdam(module.parameters(), lr=1e-2), module.weight
    step_of(module, optimizer, control, 1)
    master = optimizer.state[weight]["master_param"]
    for rec in ("nvfp4_fprop_mxfp8_bwd", "fp8_delayed"):
        control.switch(rec)
        assert module.weight is weight and isinstance(weight, torch.nn.Parameter)
        expected = module.plan.quantizers["weight"].quantize(master, state=module.hq.weight_states()).to(torch.bfloat16)
        assert same_bytes(weight, expected)
        step_of(module, optimizer, control, 2)
        assert optimizer.state[weight]["master_param"] is master


def test_step_rules_requantize_from_masters():
    rules = [{"match": {"steps": "2:"}, "use": {"fprop": "mxfp8_e4m3"}}]
    module = quantized(recipe("nvfp4", "nvfp4", "nvfp4", rules=rules, top={"weights": "quantized"}))
    control, optimizer = mh.prepare(module), mh.FusedAdam(module.parameters(), lr=1e-2)
    for step, fmt in ((1, "nvfp4"), (2, "mxfp8_e4m3"), (3, "mxfp8_e4m3")):
        control.begin_step(step)
        assert str(module.weight.rowwise.format) == fmt and str(module.weight.columnwise.format) == "nvfp4"
        step_of(module, optimizer, control, step)


def test_c37_delayed_scales_and_bytes_are_of_one_version():
    """Case 37: the scale stored with the codes is the one they were cast with, whatever the state does later."""
    fmt = "fp8_delayed_e4m3:history=2"
    module = quantized(uniform(fmt))
    control, optimizer = mh.prepare(module), mh.FusedAdam(module.parameters(), lr=1e-2)
    history, scale = [module.weight.get_high_precision_init_val().abs().max().float()], torch.tensor(1.0)
    for step in range(1, 5):
        step_of(module, optimizer, control, step)
        scale = torch.full((), 448.0) / torch.stack(history[-2:]).max()
        assert module.weight.rowwise.scale == 1 / scale and module.hq.weight_rowwise_scale == scale
        history.append(optimizer.state[module.weight]["master_param"].abs().max())
        error = (module.weight.dequantize() - optimizer.state[module.weight]["master_param"]).abs()
        assert (error <= module.weight.dequantize().abs() * 2.0**-3 + 2.0**-9 / scale).all()


@pytest.mark.parametrize("source", ["plain", "quantized"])
def test_c38_a_value_written_after_a_step_is_the_masters_too(source):
    """Loaded weights are not undone by the next step."""
    with mh.quantized_model_init("mxfp8"):
        m = mh.HybridLinear(64, 32, bias=False)
    mh.prepare(m)
    optimizer = mh.FusedAdam(m.parameters(), lr=0.0)

    def step():
        m(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    value = torch.full((32, 64), 7.0)
    new = value if source == "plain" else m.weight.quantizer.quantize(value)
    m.load_state_dict({"weight": new})
    step()
    assert torch.equal(m.weight.detach().dequantize(), value)


def test_arguments_in_the_order_of_the_interface():
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = mh.FusedAdam([p], 1e-3, (0.5, 0.6), 1e-6, 0.1, False, True)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 1e-6, 0.1)
    assert not optimizer.adam_w_mode and optimizer.capturable


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_model_and_optimizer_trains_and_switches_as_they_do(how):
    """The copy has the optimizer's options, and its weights know their masters, which a switch casts."""
    module = linear(uniform("mxfp8_e4m3"))
    control, optimizer = mh.prepare(module, seed=1), mh.FusedAdam(module.parameters(), lr=1e-2)
    step_of(module, optimizer, control, 1)
    together = copy.deepcopy if how == "deepcopy" else lambda x: pickle.loads(pickle.dumps(x))
    twin, twin_optimizer = together((module, optimizer))
    twin_control = mh.prepare(twin, seed=1)
    for model, ctl, opt in ((module, control, optimizer), (twin, twin_control, twin_optimizer)):
        ctl.switch(uniform("nvfp4"))
        step_of(model, opt, ctl, 2)
    assert_same_parameters(module, twin)
    moments = pickle.loads(pickle.dumps(mh.optimizer.OffloadedAdam(linear("bf16").parameters(), chunk_bytes=64)))
    assert moments.chunk_bytes == 64 and not moments.capturable
