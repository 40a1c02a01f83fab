"""FusedAdam: the arithmetic of torch's AdamW, Apex's interface, and exact resumption."""

import gc
import io
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from other_device import OnDevice, OtherDevice

import megatron_hybrid as mh
from megatron_hybrid.optimizer import MOMENTS, FusedAdam, OffloadedAdam

SHAPES = ((7,), (33, 5), (4, 3, 2), (0,))


def make_params(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_grads(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer, params, steps):
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def assert_same_bits(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.detach(), b.detach())


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_within_rounding(adam_w_mode, weight_decay):
    ours, theirs = make_params(), make_params()
    reference = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    options = dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    train(FusedAdam(ours, adam_w_mode=adam_w_mode, **options), ours, range(20))
    train(reference(theirs, foreach=False, **options), theirs, range(20))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_without_bias_correction(adam_w_mode):
    params = make_params()
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.95, 1e-8, 0.1
    expected = [param.detach().double() for param in params]
    moments = [[torch.zeros_like(value), torch.zeros_like(value)] for value in expected]
    optimizer = FusedAdam(
        params, lr, bias_correction=False, betas=(beta1, beta2), eps=eps, weight_decay=decay,
        adam_w_mode=adam_w_mode,
    )  # fmt: skip
    for step in range(5):
        set_grads(params, step)
        optimizer.step()
        for value, (first, second), param in zip(expected, moments, params, strict=True):
            gradient = param.grad.double() + (0 if adam_w_mode else decay * value)
            first.mul_(beta1).add_((1 - beta1) * gradient)
            second.mul_(beta2).add_((1 - beta2) * gradient**2)
            value.sub_(lr * (first / (second.sqrt() + eps) + (decay * value if adam_w_mode else 0)))
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), value.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capturable", [False, True])
def test_resume_is_bitwise_exact(dtype, capturable):
    straight = make_params(dtype)
    optimizer = FusedAdam(straight, lr=1e-2, weight_decay=0.1, capturable=capturable)
    train(optimizer, straight, range(3))
    checkpoint = io.BytesIO()
    torch.save({"params": [p.detach() for p in straight], "optimizer": optimizer.state_dict()}, checkpoint)
    train(optimizer, straight, range(3, 6))

    checkpoint.seek(0)
    saved = torch.load(checkpoint, weights_only=True)
    resumed = [torch.nn.Parameter(param) for param in saved["params"]]
    optimizer = FusedAdam(resumed, lr=5.0, capturable=capturable)  # lr comes from the checkpoint
    optimizer.load_state_dict(saved["optimizer"])
    train(optimizer, resumed, range(3, 6))
    assert_same_bits(straight, resumed)
    assert optimizer.state_dict()["param_groups"][0]["step"] == 6


def test_apex_state():
    """One integer step a group; moments of the parameter's shape, in FP32; nothing else for FP32."""
    params = make_params()
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:], "lr": 1.0}], lr=1e-3)
    train(optimizer, params, range(2))
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
    assert all(type(group["step"]) is int for group in optimizer.param_groups)
    for param in params:
        assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}
        assert all(value.shape == param.shape for value in optimizer.state[param].values())


def test_state_may_be_given_before_the_first_step():
    """Megatron creates empty moments and fills them from a checkpoint that has no step for torch."""
    params, given = make_params(), make_params()
    optimizer, other = FusedAdam(params), FusedAdam(given)
    for param in given:
        other.state[param] = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
    other.param_groups[0]["step"] = None
    train(optimizer, params, range(2))
    train(other, given, range(2))
    assert_same_bits(params, given)


def test_low_precision_parameters_have_fp32_masters():
    params = make_params(torch.bfloat16)
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizer, reference = FusedAdam(params, lr=1e-3), FusedAdam(masters, lr=1e-3)
    for step in range(10):
        set_grads(params, step)
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        reference.step()
    for param, master in zip(params, masters, strict=True):
        assert torch.equal(optimizer.state[param]["master_param"], master.detach())
        assert torch.equal(param.detach(), master.detach().bfloat16())
        assert optimizer.state[param]["exp_avg"].dtype == torch.float32


def test_after_update_sees_tensor_subclasses():
    """The seam for parameters that are not plain tensors: they write their master back themselves."""

    class Odd(torch.Tensor):
        pass

    seen = []

    class Recording(FusedAdam):
        def after_update(self, param, master):
            seen.append((param, master.dtype))
            super().after_update(param, master)

    plain = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    odd = torch.ones(3, dtype=torch.bfloat16).as_subclass(Odd).requires_grad_()
    plain.grad, odd.grad = torch.ones_like(plain), torch.ones(3, dtype=torch.bfloat16)
    Recording([plain, odd], lr=0.1).step()
    assert len(seen) == 1 and seen[0][0] is odd and seen[0][1] == torch.float32
    assert torch.equal(odd.detach().as_subclass(torch.Tensor), plain.detach())


def test_gradients_in_another_memory_order():
    param, same = (torch.nn.Parameter(torch.arange(12.0).reshape(3, 4)) for _ in range(2))
    gradient = torch.randn(3, 4)
    param.grad, same.grad = gradient.t().contiguous().t(), gradient
    FusedAdam([param], lr=0.1).step()
    FusedAdam([same], lr=0.1).step()
    assert torch.equal(param.detach(), same.detach())


def test_dtensor_parameters():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = make_params(torch.bfloat16)[1:3]
        placements = ([Shard(0)], [Replicate()])
        sharded = [
            torch.nn.Parameter(distribute_tensor(param.detach().clone(), mesh, placement))
            for param, placement in zip(plain, placements, strict=True)
        ]
        optimizer, reference = FusedAdam(sharded, lr=1e-2), FusedAdam(plain, lr=1e-2)
        for step in range(3):
            set_grads(plain, step)
            for param, source, placement in zip(sharded, plain, placements, strict=True):
                param.grad = distribute_tensor(source.grad, mesh, placement)
            optimizer.step()
            reference.step()
        assert_same_bits([param.to_local() for param in sharded], plain)
        assert isinstance(optimizer.state[sharded[0]]["exp_avg"], DTensor)
    finally:
        dist.destroy_process_group()


def test_shards_without_elements_have_steps_and_states_as_other_ranks_do():
    """A group that is all on other ranks still counts; states are in the parameters' order, whoever has gradients."""
    first, second, alone = (torch.nn.Parameter(torch.ones(rows, 3)) for rows in (0, 2, 0))
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([{"params": [first, unused, second]}, {"params": [alone]}])
    for _ in range(2):
        second.grad = torch.ones(2, 3)
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
    assert list(map(id, optimizer.state)) == [id(first), id(second), id(alone)]
    assert optimizer.state[first]["exp_avg"].shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [FusedAdam, OffloadedAdam])
def test_torch_knows_that_a_step_wrote_the_parameters(optimizer, dtype):
    """Its own fused kernels leave the version as it is: a backward through the old weight gives wrong gradients then."""
    net = torch.nn.Linear(4, 4, dtype=dtype)
    x = torch.ones(2, 4, dtype=dtype, requires_grad=True)
    y = net(x).sum()
    y.backward(retain_graph=True)
    optimizer(net.parameters()).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_two_steps_of_the_optimizer_inside_of_one_of_the_controller_use_the_new_weights():
    """As where a discriminator's step comes before the generator's pass through it."""
    torch.manual_seed(0)
    net, losses = mh.HybridLinear(32, 16, recipe="mxfp8"), []
    ctl, optimizer, x = mh.prepare(net), FusedAdam(net.parameters(), lr=0.1), torch.randn(8, 32)
    ctl.begin_step(1)
    for _ in range(2):
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(net(x).square().sum().item())
    fresh = mh.HybridLinear(32, 16, recipe="mxfp8")
    fresh.load_state_dict(net.state_dict())
    assert losses[1] == fresh(x).square().sum().item() and losses[0] != losses[1]


def test_zero_grad_and_closure():
    (param,) = params = [torch.nn.Parameter(torch.ones(2))]
    optimizer = FusedAdam(params)

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(param.grad, torch.zeros(2))
    optimizer.zero_grad()
    assert param.grad is None
    before = param.detach().clone()
    optimizer.step()
    assert torch.equal(param.detach(), before) and optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": -1.0}, "eps"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        FusedAdam(make_params(), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [1, 600, 1 << 28])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_offloaded_has_the_same_bits(dtype, chunk_bytes, bias_correction):
    """However many tensors are updated at once; a resumed one and one that takes over, too."""
    ours, theirs, resumed = make_params(dtype), make_params(dtype), make_params(dtype)
    options = dict(lr=1e-2, weight_decay=0.1, bias_correction=bias_correction)
    whole, optimizer = FusedAdam(theirs, **options), OffloadedAdam(ours, chunk_bytes=chunk_bytes, **options)
    train(whole, theirs, range(4))
    train(optimizer, ours, range(4))
    assert_same_bits(ours, theirs)
    with torch.no_grad():
        for param, value in zip(resumed, ours, strict=True):
            param.copy_(value)
    again = OffloadedAdam(resumed, chunk_bytes=chunk_bytes, **options)
    again.load_state_dict(optimizer.state_dict())
    train(again, resumed, range(4, 6))
    train(whole, theirs, range(4, 6))
    assert_same_bits(resumed, theirs)


def test_offloaded_calls_hooks_of_steps_once():
    """Also where a `FusedAdam` was made before, whose `step` torch wraps too."""
    params, called = make_params(), []
    FusedAdam(params)
    optimizer = OffloadedAdam(params)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    train(optimizer, params, range(1))
    assert called == ["before", "after"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("chunk_bytes", [1, 1200, 1 << 28])
def test_moments_move_to_a_device_and_back(dtype, bias_correction, chunk_bytes, monkeypatch):
    """Bits of `FusedAdam`; between steps every moment is in pinned host memory, whole once `step` returns, and in a step a
    chunk of them on the device. A load ends there too."""
    waits = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    options = dict(lr=1e-2, weight_decay=0.1, bias_correction=bias_correction)
    theirs, values, resumed = make_params(dtype), make_params(dtype), make_params(dtype)
    whole = FusedAdam(theirs, **options)
    train(whole, theirs, range(3))
    biggest, total = max(8 * p.numel() for p in values), sum(8 * p.numel() for p in values)

    def placed(values):
        return [OnDevice(v.detach()).requires_grad_() for v in values]

    def steps(optimizer, params, which):
        for step in which:
            set_grads(values, step)
            for param, value in zip(params, values, strict=True):
                param.grad = OnDevice(value.grad)
            optimizer.step()

    def assert_at_rest(optimizer):
        moments = [state[key] for state in optimizer.state.values() for key in MOMENTS]
        assert len(moments) == 2 * len(SHAPES)
        assert all(type(m) is torch.Tensor and (m.data_ptr() in device.pinned or not m.numel()) for m in moments)

    with OtherDevice() as device:
        params = placed(values)
        optimizer = OffloadedAdam(params, chunk_bytes=chunk_bytes, **options)
        steps(optimizer, params, range(3))
        assert_at_rest(optimizer)
        # the moments' first zeros are made on the device
        assert (device.to_device, device.to_host) == (3 * total, 4 * total)
        assert device.most <= max(2 * chunk_bytes, 2 * biggest) and len(waits) == 3
    assert_same_bits([p.held for p in params], theirs)
    for param, mine in zip(theirs, params, strict=True):
        assert_same_bits(*([state[key] for key in MOMENTS] for state in (whole.state[param], optimizer.state[mine])))
    with torch.no_grad():
        for value, param in zip(resumed, params, strict=True):
            value.copy_(param.held)
    with device:
        again = OffloadedAdam(later := placed(resumed), chunk_bytes=chunk_bytes, **options)
        again.load_state_dict(optimizer.state_dict())
        assert_at_rest(again)
        steps(again, later, range(3, 5))
    train(whole, theirs, range(3, 5))
    assert_same_bits([p.held for p in later], theirs)


def test_offloaded_refuses_what_a_host_copy_cannot_follow():
    with pytest.raises(ValueError, match="capturable is not supported"):
        OffloadedAdam(make_params(), capturable=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_needs_less_of_a_gpu(dtype):
    """The same bits; between steps the moments' 8 bytes a parameter are not on the device, in a step one chunk of them."""
    shapes, chunk = [(512, 1024)] * 8, 1 << 22
    numel = 8 * 512 * 1024

    def run(cls, **options):
        gc.collect()  # or what other tests left is freed in between
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        generator = torch.Generator("cuda").manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(s, generator=generator, device="cuda").to(dtype)) for s in shapes]
        optimizer = cls(params, lr=1e-2, weight_decay=0.1, **options)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator, device="cuda").to(dtype)
            optimizer.step()
        held = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        return params, optimizer, held, torch.cuda.max_memory_allocated() - before - held

    expected, whole, more, _ = run(FusedAdam)
    found, optimizer, less, extra = run(OffloadedAdam, chunk_bytes=chunk)
    assert more - less == 8 * numel
    # in a step: a chunk of moments, and the FP32 gradients that bf16 parameters need in either
    assert extra <= 2 * chunk + (4 * numel if dtype is torch.bfloat16 else 0) + (1 << 20)
    for state in optimizer.state.values():
        assert all(state[key].is_pinned() for key in MOMENTS)
    for key in MOMENTS:
        assert_same_bits([s[key].cpu() for s in whole.state.values()], [s[key] for s in optimizer.state.values()])
    assert_same_bits(found, expected)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not any(state[key].is_cuda for state in optimizer.state.values() for key in MOMENTS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("capturable", [False, True])
def test_on_a_gpu_without_waiting_for_it(capturable):
    ours = [torch.nn.Parameter(param.detach().cuda()) for param in make_params()]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    optimizer = FusedAdam(ours, lr=1e-2, weight_decay=0.1, capturable=capturable)
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, foreach=False)
    for step in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step)).cuda()
            b.grad = a.grad.clone()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
