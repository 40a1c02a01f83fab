"""Parameters that live quantized: creation, what they hold, training, evaluation, files."""

import copy
import dataclasses
import io
import types

import pytest
import torch
from linear_cases import DELAYED, EVERY, assert_same, gradients, nbytes, randn, recipe
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

import megatron_hybrid as mh
from megatron_hybrid.plan import PlanError
from megatron_hybrid.storage_layout import equal

K, N, M = 64, 96, 48


def uniform(fmt, **top):
    return recipe(fmt, fmt, fmt, top={"weights": "quantized", **top})


def linear(rec, seed=0, cls=mh.HybridLinear, sizes=(K, N), **kwargs):
    torch.manual_seed(seed)
    return cls(*sizes, recipe=rec, dtype=torch.bfloat16, **kwargs)


def high(rec):
    return dataclasses.replace(rec, weights="high_precision")


def step_of(model, optimizer, control, step, rows=M):
    control.begin_step(step)
    optimizer.zero_grad()
    y = model(randn(rows, K, seed=step))
    y.float().square().mean().backward()
    optimizer.step()
    control.end_step()
    return y.detach()


def same_bytes(a, b) -> bool:
    return all(
        (s is None) == (t is None) and (s is None or equal(s, t))
        for s, t in ((a.rowwise, b.rowwise), (a.columnwise, b.columnwise))
    )


def assert_same_parameters(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert same_bytes(p, q) if isinstance(p, mh.HybridTensor) else torch.equal(p, q)


@pytest.mark.parametrize("fmt", EVERY)
def test_p28_parameters_are_hybrid_tensors_of_the_same_initial_values(fmt):
    """P28: parameter type, payloads; the values of an ordinary module with the same seed, and no rounding twice."""
    module, plain = linear(uniform(fmt)), linear(high(uniform(fmt)))
    weight = module.weight
    if fmt == "high_precision":
        assert type(weight) is torch.nn.Parameter
        return
    assert isinstance(weight, mh.HybridTensor) and isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    assert weight.shape == (N, K) and weight.dtype == torch.bfloat16 and weight.is_leaf
    assert weight.quantizer == module.plan.quantizers["weight"]
    assert weight.get_high_precision_init_val() is None
    assert torch.equal(module.bias, plain.bias)
    if "sr" not in fmt:
        row, col = plain.plan.quantize("weight", plain.weight.detach(), rowwise=True, columnwise=True,
                                       state=module.hq.weight_states())  # fmt: skip
        assert equal(weight.rowwise, row) and equal(weight.columnwise, col)


def test_p28_the_initial_value_is_preserved_exactly_and_freed():
    plain = linear(high(uniform("nvfp4")))
    with mh.quantized_model_init("nvfp4", preserve_high_precision_init_val=True):
        weight = linear(uniform("nvfp4")).weight
    value = weight.get_high_precision_init_val()
    assert value.device.type == "cpu" and value.dtype == torch.bfloat16 and torch.equal(value, plain.weight)
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    weight.detach().copy_(plain.weight)
    assert weight.get_high_precision_init_val() is None  # cleared for good


def test_the_context_gives_modules_their_recipe_and_nests():
    with mh.quantized_model_init("mxfp8"):
        mlp = mh.HybridMLP(K, N, norm="RMSNorm", gated=True)
        with mh.quantized_model_init("fp8_block"):
            block = mh.HybridLinear(K, N)
        other = mh.HybridLayerNormLinear(K, N, recipe="nvfp4_fprop_mxfp8_bwd")
        attention = mh.HybridSelfAttention(K, 4)
    linears = (mlp.linear_fc1, mlp.linear_fc2, block, other.linear, attention.linear_qkv, attention.linear_proj)
    formats = [str(module.weight.rowwise.format) for module in linears]
    assert formats == ["mxfp8_e4m3", "mxfp8_e4m3", "fp8_block_e4m3:2d", "nvfp4", "mxfp8_e4m3", "mxfp8_e4m3"]
    assert type(mh.HybridLinear(K, N).weight) is torch.nn.Parameter  # left again
    assert type(mlp.norm.weight) is torch.nn.Parameter


def test_c55_directions_follow_the_plan_and_requires_grad_not_the_grad_mode():
    """Case 55: one direction where one is read. D2: `no_grad` at construction does not matter."""
    with torch.no_grad():
        both = linear(uniform("mxfp8_e4m3")).weight
    assert both.rowwise is not None and both.columnwise is not None and both.requires_grad
    row_only = linear(uniform("mxfp8_e4m3", backward="dequantized")).weight
    assert row_only.rowwise is not None and row_only.columnwise is None
    with mh.quantized_model_init("mxfp8", requires_grad=False):
        frozen = linear(None)
    weight = frozen.weight
    assert weight.columnwise is None and not weight.requires_grad
    assert weight.rowwise.nbytes == N * K + N * K // 32
    assert torch.isfinite(frozen(randn(M, K))).all()
    x = randn(M, K).requires_grad_()
    with pytest.raises(PlanError, match="weight.columnwise"):
        frozen(x)


class Allocations(TorchDispatchMode):
    """Every floating-point storage of 16 bits or more an element that is made inside, and how much of it lives."""

    def __init__(self, least: int):
        super().__init__()
        self.least, self.made = least, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if type(t) is torch.Tensor and t.dtype.is_floating_point and t.element_size() > 1:
                storage = t.untyped_storage()
                if storage.nbytes() >= self.least:
                    self.made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_block", "fp8_delayed", "mxfp8_fprop_nvfp4_bwd"])
def test_no_high_precision_copy_lives(name):
    """Unique storage bytes after forward, backward and step: gradients, masters and moments are all there is."""
    with Allocations(2 * N * K) as made:
        with mh.quantized_model_init(name):
            module = linear(None, bias=False)
        control, optimizer = mh.prepare(module), mh.FusedAdam(module.parameters(), lr=1e-3)
        control.begin_step(1)
        assert made.live() == 0 and made.made
        y = module(randn(8, K))
        assert made.live() == 0
        y.float().sum().backward()
        assert made.live() == 2 * N * K  # the gradient
        optimizer.step()
        optimizer.zero_grad()
        assert made.live() == 3 * 4 * N * K  # the master, two moments
        control.end_step()
        control.begin_step(2)
        y = module(randn(8, K))
        assert made.live() == 3 * 4 * N * K
    buffers = [b for s in (module.weight.rowwise, module.weight.columnwise) for b in s.buffers().values()]
    assert len({b.untyped_storage().data_ptr() for b in buffers}) == len(buffers)
    assert nbytes(buffers) < 2.3 * N * K


@pytest.mark.parametrize("name", ["mxfp8", "fp8_delayed", "fp8_block", "fp8_rowwise", "nvfp4", "nvfp4_fprop_mxfp8_bwd"])
def test_p26_c36_c38_training_and_evaluation_as_with_bf16_parameters(name):
    """P26, P56, cases 36, 37, 38: with `master_cast: param_dtype` every output has the bits of bf16 parameters,

    also with evaluations and gradient accumulation in between, and after steps.
    """
    rec = dataclasses.replace(mh.Recipe.load(name), weights="quantized", master_cast="param_dtype")
    with mh.quantized_model_init(rec, preserve_high_precision_init_val=True):
        ours = linear(None, cls=mh.HybridMLP, norm="LayerNorm")
    theirs = linear(high(rec), cls=mh.HybridMLP, norm="LayerNorm")
    models = (ours, theirs)
    controls = [mh.prepare(m, seed=5, num_microbatches=2) for m in models]
    optimizers = [mh.FusedAdam(m.parameters(), lr=1e-2, weight_decay=0.1) for m in models]
    for step in range(1, 6):
        outputs = [[], []]
        for model, control, optimizer, found in zip(models, controls, optimizers, outputs):
            control.begin_step(step)
            optimizer.zero_grad()
            for j in range(2):
                control.microbatch(j)
                y = model(randn(M, K, seed=10 * step + j))
                y.float().square().mean().backward()
                found.append(y.detach())
            model.eval()
            with torch.no_grad():
                found.append(model(randn(M, K, seed=77)))
            model.train()
            found += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            control.end_step()
        assert_same(*outputs)


def test_p26_evaluation_loses_no_direction():
    module = linear(uniform("nvfp4"))
    x, dy = randn(M, K), randn(M, N, seed=1)
    first = gradients(module, x, dy)
    for _ in range(2):
        module.eval()
        with torch.no_grad():
            module(x)
        with torch.inference_mode():
            module(x)
        module.train()
        assert_same(gradients(module, x, dy), first)


@pytest.mark.parametrize("fmt", [DELAYED, "nvfp4:2d", "nvfp4:sr", "fp8_block_e4m3"])
def test_meta_device_is_materialised_later(fmt):
    direct = linear(uniform(fmt))
    with torch.device("meta"):
        later = linear(uniform(fmt))
    assert later.weight.is_meta and isinstance(later.weight, mh.HybridTensor)
    weight = later.weight
    later.to_empty(device="cpu")
    assert later.weight is weight and weight.device.type == "cpu" and weight.requires_grad
    torch.manual_seed(0)
    later.reset_parameters()
    assert_same_parameters(later, direct)
    assert_same(list(later.buffers()), list(direct.buffers()))
    if "sr" not in fmt:
        assert_same(gradients(later, randn(M, K), randn(M, N)), gradients(direct, randn(M, K), randn(M, N)))
    with torch.device("meta"):
        loaded = linear(uniform(fmt))
    loaded.load_state_dict(copy.deepcopy(direct).state_dict(), assign=True)
    assert_same_parameters(loaded, direct)


@pytest.mark.parametrize("fmt", [DELAYED, "mxfp8_e4m3", "nvfp4:2d", "nvfp4:sr"])
def test_p38_c39_bf16_files_into_quantized_weights_and_back(fmt):
    """P38, case 39: both directions come from the loaded values; the way back is the decode."""
    plain, target = linear(high(uniform(fmt)), seed=1), linear(uniform(fmt))
    for name, buffer in plain.hq._buffers.items():
        buffer.fill_(300.0 if name.endswith("scale") else 0.0)
    pointers = [b.data_ptr() for b in target.weight.rowwise.buffers().values()]
    target.load_state_dict(plain.state_dict())
    assert pointers == [b.data_ptr() for b in target.weight.rowwise.buffers().values()]
    keys = target.hq.weight_owner.keys(torch.device("cpu"))
    expected = target.weight.quantizer.quantize(plain.weight, **keys)
    assert same_bytes(target.weight, expected) and not target.weight.stale
    back = linear(high(uniform(fmt)), seed=2)
    back.load_state_dict(target.state_dict())
    assert torch.equal(back.weight.float(), target.weight.dequantize(dtype=torch.bfloat16).float())
    file = io.BytesIO()
    torch.save(target.state_dict(), file)
    file.seek(0)
    again = linear(uniform(fmt), seed=3)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert same_bytes(again.weight, target.weight)


def test_a_load_without_histories_drops_the_amax_of_the_value_before():
    plain, target = linear(high(uniform("mxfp8_e4m3")), seed=1), linear(uniform(DELAYED))
    with torch.no_grad():
        plain.weight.mul_(0.25)
    target.load_state_dict(plain.state_dict(), strict=False)
    for state_dict in (target.state_dict(), {"bias": plain.bias.detach()}):  # a history that is there stays
        target.load_state_dict(state_dict, strict=False)
        assert all(s.history[0] == plain.weight.abs().max().float() for s in target.hq.weight_states())


def test_a_loaded_value_is_where_masters_start():
    plain = linear(high(uniform("nvfp4")), seed=1)
    with mh.quantized_model_init("nvfp4", preserve_high_precision_init_val=True):
        target = linear(uniform("nvfp4"))
    target.load_state_dict(plain.state_dict())
    assert torch.equal(target.weight.get_high_precision_init_val(), plain.weight)
    target.weight.detach().update(randn(N, K))  # not the value any more
    assert target.weight.get_high_precision_init_val() is None


def test_copies_moves_and_pickles_keep_the_module_s_scales():
    """A delayed weight can be written after a deepcopy, a move and a pickle: its owner knows the scale."""
    module = linear(uniform(DELAYED))
    own = module.hq.weight_rowwise_scale.clone()
    module.weight.partition_dim = 1
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    moved = copy.deepcopy(module).to(torch.float32)
    assert moved.weight.dtype == torch.float32 and moved.weight.partition_dim == 1
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False), moved):
        assert other.weight._stale.owner is other.hq.weight_owner is not module.hq.weight_owner
        other.hq.weight_rowwise_scale.fill_(64.0)
        with torch.no_grad():
            other.weight.copy_(torch.ones(N, K))
        assert other.weight.rowwise.scale == 1 / 64 and module.hq.weight_rowwise_scale == own
    del module.weight.partition_dim
    torch.save(module.weight, file := io.BytesIO())
    file.seek(0)
    assert same_bytes(torch.load(file, weights_only=True), module.weight)


def test_c52_shared_quantized_weights_accumulate():
    """Case 52: a quantized weight used twice has the gradient of both uses."""
    a, b = linear(uniform("mxfp8_e4m3"), bias=False), linear(uniform("mxfp8_e4m3"), bias=False)
    b.weight = a.weight
    x, dy = randn(M, K), randn(M, N)
    (dw,) = torch.autograd.grad(a(x), a.weight, dy)
    torch.autograd.backward([a(x), b(x)], [dy, dy])
    assert torch.equal(a.weight.grad, dw + dw) and type(a.weight.grad) is torch.Tensor


@pytest.mark.parametrize("reentrant", [True, False])
def test_p36_recompute(reentrant):
    module = linear(uniform("mxfp8_e4m3"), cls=mh.HybridMLP)
    x, dy = randn(M, K), randn(M, K, seed=1)
    want = gradients(module, x, dy)
    module.zero_grad()
    x = x.clone().requires_grad_()
    checkpoint(module, x, use_reentrant=reentrant).backward(dy)
    assert_same([x.grad, *(p.grad for p in module.parameters())], want[1:])


def test_compiled_linears_take_quantized_weights():
    module = linear(uniform("mxfp8_e4m3"))
    want = gradients(module, randn(M, K), randn(M, N))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    module.zero_grad()
    x = randn(M, K).requires_grad_()
    y = compiled(x)
    y.backward(randn(M, N))
    assert_same([y.detach(), x.grad, *(p.grad for p in module.parameters())], want)


def test_main_grad_takes_the_gradient():
    """D12: 257 ones make 257 in an FP32 `main_grad` over a quantized weight."""
    module = linear(uniform("mxfp8_e4m3"), bias=False)
    module.weight.main_grad = torch.zeros(N, K)
    for _ in range(257):
        module(torch.ones(1, K, dtype=torch.bfloat16)).backward(torch.ones(1, N, dtype=torch.bfloat16))
        module.weight.grad = None
    assert torch.equal(module.weight.main_grad, torch.full((N, K), 257.0))


@pytest.mark.parametrize("backward, named", [("high_precision", "backward: high_precision"), (None, "dgrad")])
def test_a_plan_that_reads_the_original_is_refused(backward, named):
    rec = uniform("mxfp8_e4m3", backward=backward) if backward else recipe(
        "mxfp8_e4m3", "high_precision", "mxfp8_e4m3", top={"weights": "quantized"}
    )  # fmt: skip
    with pytest.raises(PlanError, match=f"module fc9.*{named}.*dequantized"):
        linear(rec, name="fc9")


def test_a_later_step_that_reads_the_original_is_refused_at_build():
    rules = [{"match": {"steps": "9:"}, "use": {"fprop": "high_precision"}}]
    rec = recipe("nvfp4", "nvfp4", "nvfp4", rules=rules, top={"weights": "quantized"})
    with pytest.raises(PlanError, match="fprop would read"):
        linear(rec)


def test_weights_of_an_ordinary_model_do_not_become_quantized_by_a_switch():
    module = linear("mxfp8")
    with pytest.raises(PlanError, match="made in high precision.*quantized_model_init"):
        mh.prepare(module, uniform("mxfp8_e4m3"))


def decoded(module):
    return module.weight.detach().dequantize(dtype=torch.float32)


def test_formats_that_a_gather_brings_take_no_memory_before_it():
    rules = [{"match": {"steps": "2:"}, "use": "fp8_block_e4m3"}]
    module = linear(recipe("mxfp8_e4m3", "nvfp4", "mxfp8_e4m3", rules=rules, top={"weights": "quantized"}))
    module.hq.weight_owner.gather = types.SimpleNamespace(brings_bytes=True)
    control = mh.prepare(module)
    control.begin_step(1)
    assert module.weight.rowwise.nbytes
    control.begin_step(2)
    for s in (module.weight.rowwise, module.weight.columnwise):
        assert s.format.family == "fp8_block" and s.shape == (N, K) and len(s.buffers()) == 2
        assert all(t.numel() and not t.untyped_storage().nbytes() for t in s.buffers().values())


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_delayed_scales_fit_a_value_that_nothing_else_keeps(element):
    """Created, loaded or copied into: as exact as under current scaling, never lost at a scale of 1 or clipped."""
    delayed, current = (linear(uniform(f"fp8_{kind}_{element}")) for kind in ("delayed", "current"))

    def assert_as_current(factor):
        found, best = decoded(delayed), decoded(current)
        assert torch.equal(found, best) and found.abs().max() > 0, factor

    assert_as_current(0)
    plain = linear(high(uniform("mxfp8_e4m3")))
    for factor in (2.0**12, 2.0**4):  # larger than the first value by far, which clips
        fresh = torch.randn(N, K, generator=torch.Generator().manual_seed(3)).bfloat16() * factor
        with torch.no_grad():
            plain.weight.copy_(fresh)
        delayed, current = (linear(uniform(f"fp8_{kind}_{element}")) for kind in ("delayed", "current"))
        for module in (delayed, current):
            module.load_state_dict(plain.state_dict(), strict=False)
        assert_as_current(factor)
    for module in (delayed, current):
        with torch.no_grad():
            module.weight.copy_(torch.full((N, K), 2.0**20))
    assert_as_current("copy")


def test_delayed_scales_of_a_file_stay():
    """A load with scales gives the saved bytes, whatever they make of the value; so does one with preserved values."""
    saved = linear(uniform("fp8_delayed_e4m3:history=2"))
    control, optimizer = mh.prepare(saved), mh.FusedAdam(saved.parameters(), lr=0.1)
    for step in range(1, 4):
        step_of(saved, optimizer, control, step)
    again = linear(uniform("fp8_delayed_e4m3:history=2"), seed=4)
    again.load_state_dict(saved.state_dict())
    assert same_bytes(saved.weight, again.weight)
    with mh.quantized_model_init("fp8_delayed", preserve_high_precision_init_val=True):
        kept = linear(None)
    assert kept.hq.weight_states()[0].scale == 1


def test_p38_histories_survive_a_load_of_the_buffers_themselves():
    """A checkpoint may be read in place: the state dict holds the module's own buffers. The decode that is loaded with
    them has a larger amax than was recorded; it must not stay."""
    module = linear(recipe("fp8_rowwise_e4m3", DELAYED, DELAYED, top={"weights": "quantized"}))
    with torch.no_grad():
        module.weight.copy_(randn(N, K))
    state = dict(module.state_dict())
    state["weight"] = 2 * module.weight.detach().dequantize(dtype=torch.bfloat16)
    before = [buffer.clone() for buffer in module.buffers()]
    module.load_state_dict(state)
    assert_same(list(module.buffers()), before)


@pytest.mark.parametrize("fmt", [DELAYED, "mxfp8_e4m3"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("holds", ["payloads", "bf16"])
def test_a_load_by_assignment_lives_as_the_recipe_says(fmt, device, holds):
    """Whatever took the parameter's place: payloads that the module then writes with its scales, or a plain tensor."""
    source = linear(uniform(fmt), seed=3)
    state = copy.deepcopy(source.state_dict())
    if holds == "bf16":
        state["weight"] = source.weight.detach().dequantize(dtype=torch.bfloat16)
    module = linear(uniform(fmt), device=device)
    module.load_state_dict(state, assign=True)
    assert module.weight._stale.owner is module.hq.weight_owner and module.hq.weight_owner.weight is module.weight
    twins = [(m, mh.FusedAdam(m.parameters(), lr=1e-2), mh.prepare(m, seed=2)) for m in (source, module)]
    assert torch.equal(step_of(*twins[0], 1), step_of(*twins[1], 1)) or holds == "bf16"
    assert step_of(*twins[1], 2).isfinite().all() and isinstance(module.weight, mh.HybridTensor)


def test_a_load_by_assignment_of_other_formats_follows_the_recipe():
    module = linear(uniform("mxfp8_e4m3"))
    module.load_state_dict(copy.deepcopy(linear(uniform("nvfp4"), seed=3).state_dict()), assign=True)
    assert str(module.weight.rowwise.format) == "mxfp8_e4m3" and module(randn(M, K)).isfinite().all()
