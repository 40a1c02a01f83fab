"""FSDP2 with payload gathers against FSDP2 without and against one rank, four ranks or two, all in one launch."""

from __future__ import annotations

import gc
import itertools
from functools import partial

import fsdp2_experts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checks import arguments, raises, run_checks, start
from fsdp2_cases import DEVICE, WORLD, assert_same, full, sgd, trained, weight_recipe
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tp_cases import on_the_wire

import megatron_hybrid as mh

FOR_FOUR = ("check_hybrid_sharding", "check_checkpoint_across_layouts")
SIZES = (64, 96, 130, 6)  # shards of 24 rows (cut every block), of 33 and 31 rows, of 2 rows and none
PAIRS = [
    ("mxfp8_e4m3", "nvfp4", "original"),
    ("nvfp4:2d", "nvfp4:2d", "original"),
    ("fp8_current_e4m3", "fp8_current_e4m3", "original"),
    ("fp8_current_e4m3", "fp8_block_e4m3", "original"),
    ("fp8_block_e4m3:2d", "fp8_block_e4m3:2d", "original"),
    ("nvfp4:row_scaled", "mxfp8_e4m3", "rowwise_dequantized"),
    ("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "original"),
    ("mxfp8_e4m3", "mxfp8_e4m3", "rowwise_dequantized"),
    ("fp8_delayed_e4m3:history=3", "fp8_delayed_e5m2:history=3", "original"),
]


class Model(torch.nn.Module):
    def __init__(self, recompute=False, device=None):
        super().__init__()
        pairs = itertools.pairwise(SIZES)
        self.layers = torch.nn.ModuleList(mh.HybridLinear(k, n, device=device) for k, n in pairs)
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = torch.tanh(x)
        return x


def build(recipe, *, gather=True, reshard=True, mesh=None, recompute=False, said=True, policy=None, seed=1, skips=False,
          kind=Model):  # fmt: skip
    """(model, controller, gathers), the gathers' None without; said: to the gathers, that a model recomputes; skips:
    the recipe leaves nothing to gather."""
    torch.manual_seed(seed)
    model = kind(recompute)
    mesh = mesh or init_device_mesh(DEVICE, (WORLD,))
    options = dict(mesh=mesh, reshard_after_forward=reshard, **({"mp_policy": policy} if policy else {}))
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    ctl = mh.prepare(model, recipe, num_microbatches=2)
    gathers = mh.gather_quantized(model, ctl, recompute=recompute and said) if gather else None
    assert not gather or bool(gathers.weights) != skips, gathers.skipped
    return model, ctl, gathers


def batch(step, micro, rank=None):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + (dist.get_rank() if rank is None else rank))
    return torch.randn(8, SIZES[0], generator=generator, device="cpu").to(DEVICE)


def train(model, ctl, optimizer, steps=3, group=None):
    """Losses, and the whole weights at the end."""
    return trained(model, ctl, optimizer, batch, steps, group)


def check_gathered_bytes_are_the_unsharded_weights():
    """P48, P49, P45: every pair of formats, shards that cut blocks, uneven and empty ones; over steps."""
    for row, col, source in PAIRS:
        model, ctl, gathers = build(weight_recipe(row, col, source))
        assert len(gathers.weights) == 3, gathers.skipped
        seen = []

        def compare(w, directions):
            module = w._module
            quantizer, master = w.tensor.quantizer, masters[w.path]
            states = module.hq.weight_states()
            state = None if states is None else tuple(None if s is None else s.frozen() for s in states)
            expected = quantizer.quantize(master, state=state)
            for direction in directions:
                for name, buffer in getattr(expected, direction).buffers().items():
                    found = getattr(getattr(w.tensor, direction), name)
                    assert torch.equal(found, buffer), (row, col, w.path, direction, name)
            seen.append((w.path, directions))

        for w in gathers.weights:
            after = w._after

            def spy(outputs, asked, dtype, *, out=None, w=w, after=after):
                result, name = after(outputs, asked, dtype, out=out), asked[0]
                (filled,) = w.passes[name].parts
                compare(w, [s.direction for s in (filled.rowwise, filled.columnwise) if s is not None])
                return result

            w._param._sharded_local_tensor.fsdp_post_all_gather = spy
        optimizer = sgd(model)
        for i in (1, 2):
            masters = {f"layers.{k}": full(layer.weight).detach() for k, layer in enumerate(model.layers)}
            ctl.begin_step(i)
            model(batch(i, 0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ctl.end_step(dist.group.WORLD)
        assert len(seen) == 12, len(seen)


def check_training_equals_high_precision_gathers():
    """P47: the same losses and weights, bit for bit, for every optimizer, resharding or not, recomputed or not."""
    recipe = weight_recipe("mxfp8_e4m3", "nvfp4")
    optimizers = (sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), lambda m: mh.FusedAdam(m.parameters(), lr=0.01))
    for make in optimizers:
        plain = build(recipe, gather=False)
        expected = train(plain[0], plain[1], make(plain[0]))
        model, ctl, _ = build(recipe)
        assert_same(train(model, ctl, make(model)), expected)
    for options in (dict(reshard=False), dict(recompute=True), dict(recompute=True, reshard=False)):
        plain = build(recipe, gather=False)
        expected = train(plain[0], plain[1], sgd(plain[0]))
        model, ctl, _ = build(recipe, **options)
        assert_same(train(model, ctl, sgd(model)), expected)


class Spanning(Model):
    """One recomputation over two units of FSDP2. reentrant: of `checkpoint`; None: without."""

    reentrant: bool | None = None

    def forward(self, x):
        first = self.first if self.reentrant is None else partial(checkpoint, self.first, use_reentrant=self.reentrant)
        return torch.tanh(self.layers[2](first(x)))

    def first(self, x):
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return x


def check_recomputation_over_several_layers():
    """Both kinds of `checkpoint` over layers that FSDP2 gathers one by one, whose forwards run again in backward before
    it asks for them there: the bits of no recomputation, histories of delayed scales too."""
    for row, col in (("mxfp8_e4m3", "nvfp4"), ("fp8_delayed_e4m3:history=3", "fp8_delayed_e5m2:history=3")):
        found = []
        for reentrant in (None, False, True):
            model, ctl, _ = build(weight_recipe(row, col), recompute=reentrant is not None, kind=Spanning)
            model.reentrant = reentrant
            inputs = lambda i, j: batch(i, j).requires_grad_()  # noqa: E731
            losses, weights = trained(model, ctl, sgd(model), inputs, 3, dist.group.WORLD)
            found.append((losses, [*weights, *(b.clone() for b in model.buffers())]))
        for one in found[1:]:
            assert_same(one, found[0])


class AnyOrder(Model):
    """twice: its first layer runs two times; last: its last layer, which runs, is in the result."""

    twice, last = False, True

    def forward(self, x):
        for layer in (self.layers[0], *self.layers[:2]) if self.twice else self.layers[:2]:
            x = torch.tanh(layer(x[:, : layer.in_features]))
        y = torch.tanh(self.layers[2](x))
        return y if self.last else x


def check_forwards_and_backwards_in_other_orders():
    """Two forwards before a backward or two, an evaluation between, a layer that runs twice, one that backward leaves
    out in a step, a frozen one: losses and weights of high-precision gathers."""

    def loss(model, i, j):
        return model(batch(i, j)).square().sum()

    def both_at_once(model, ctl, i):
        return [loss(model, i, 0) + loss(model, i, 1)]

    def one_after_another(model, ctl, i):
        return [(ctl.microbatch(j), loss(model, i, j))[1] for j in range(2)]

    def evaluated(model, ctl, i):
        found = loss(model, i, 0)
        with torch.no_grad():
            loss(model.eval(), i, 1)
        model.train()
        return [found]

    def left_out(model, ctl, i):
        model.last = i != 2
        return [loss(model, i, 0)]

    def frozen(model, ctl, i):
        model.layers[1].weight.requires_grad_(False)
        return [loss(model, i, 0)]

    ways = [(way, "") for way in (both_at_once, one_after_another, evaluated, left_out, frozen)]
    ways += [(both_at_once, "twice"), (evaluated, "stays"), (both_at_once, "stays")]
    delayed = "fp8_delayed_e4m3:history=3", "fp8_delayed_e5m2:history=3"
    for (way, option), pair in itertools.product(ways, (("mxfp8_e4m3", "nvfp4"), delayed)):
        if way is left_out and pair is delayed:
            continue  # whose columns, never gathered, have no amax in that step's history
        found = []
        for gather in (False, True):
            model, ctl, _ = build(weight_recipe(*pair), gather=gather, reshard=option != "stays", kind=AnyOrder)
            model.twice, optimizer, seen = option == "twice", sgd(model), []
            for i in (1, 2, 3):
                ctl.begin_step(i)
                losses = way(model, ctl, i)
                for one in losses:
                    one.backward()
                    seen.append(one.item())
                optimizer.step()
                optimizer.zero_grad()
                ctl.end_step(dist.group.WORLD)
            found.append((seen, [full(p).detach().clone() for p in model.parameters()]))
        assert_same(*found)


def check_recomputation_must_be_said():
    """Else backward has gathered one direction only: an error that says which, before a number is wrong."""
    model, ctl, _ = build(weight_recipe("mxfp8_e4m3", "nvfp4"), recompute=True, said=False)
    with raises(mh.PlanError, "rowwise is stale"):
        train(model, ctl, sgd(model), steps=1)


def check_gradients_add_up_in_fp32_before_they_are_reduced():
    """Microbatches that FSDP2 does not reduce after, with weights that stay gathered in between or do not: losses and
    weights of high-precision gathers, and where each of 300 bf16 gradients is one, 300."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    recipe = weight_recipe("mxfp8_e4m3", "nvfp4", master_cast="param_dtype")
    for stays in (False, True):
        found = []
        for gather in (False, True):
            model, ctl, _ = build(recipe, gather=gather, policy=policy)

            def forward(x, model=model, calls=itertools.count()):
                last = next(calls) % 2 == 1
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last or not stays)
                return model(x)

            found.append(trained(model, ctl, sgd(model), batch, 3, forward=forward))
        assert_same(*found)
    model = mh.HybridLinear(64, 32, bias=False)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (WORLD,)), mp_policy=policy)
    ctl = mh.prepare(model, recipe, num_microbatches=300)
    assert mh.gather_quantized(model, ctl).weights
    ctl.begin_step(1)
    for i in range(300):
        ctl.microbatch(i)
        model.set_requires_gradient_sync(i == 299)
        model(torch.ones(1, 64)).sum().backward()
    grad = model.weight.grad
    assert grad.dtype == torch.float32 and torch.equal(full(grad), torch.full((32, 64), 300.0))


def check_shipped_recipes():
    for name in ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4_fprop_mxfp8_bwd", "mxfp8_fprop_nvfp4_bwd"):
        recipe = mh.Recipe.load(name)
        plain = build(recipe, gather=False)
        expected = train(plain[0], plain[1], sgd(plain[0]), group=dist.group.WORLD)
        model, ctl, gathers = build(recipe)
        assert gathers.weights, (name, gathers.skipped)
        found = train(model, ctl, sgd(model), group=dist.group.WORLD)
        assert all(torch.isfinite(w).all() for w in found[1]), name
        if name != "fp8_delayed":  # there a rank alone does not see the whole weight's amax
            assert_same(found, expected)


def check_evaluation_records_no_amaxes():
    """Delayed scaling: gathers of forwards in evaluation, or without gradients, leave the weights' histories alone."""
    model, ctl, _ = build(weight_recipe("fp8_delayed_e4m3", "fp8_delayed_e5m2"))
    histories = [b for name, b in model.named_buffers() if name.endswith("weight_rowwise_history")]
    ctl.begin_step(1)
    with torch.no_grad():
        model(batch(1, 0))
    model.eval()(batch(1, 0))
    assert len(histories) == 3 and not any(h.any() for h in histories)
    model.train()(batch(1, 0)).square().sum().backward()
    assert all(h[0] > 0 for h in histories)
    recipe = weight_recipe("fp8_delayed_e4m3", "fp8_delayed_e5m2", "rowwise_dequantized")
    model, ctl, _ = build(recipe, reshard=False)  # whose forwards derive the column too
    histories = [b for name, b in model.named_buffers() if "hq.weight_" in name and name.endswith("_history")]
    ctl.begin_step(1)
    model.eval()(batch(1, 0))
    assert len(histories) == 6 and not any(h.any() for h in histories)


def check_hybrid_sharding():
    """HSDP: two replicas of two shards; equal to plain HSDP, experts too, and replicas to each other."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    for pair in (("nvfp4", "fp8_current_e4m3"), ("fp8_delayed_e4m3:history=3", "fp8_delayed_e5m2:history=3")):
        recipe = weight_recipe(*pair)
        plain = build(recipe, gather=False, mesh=mesh)
        expected = train(plain[0], plain[1], sgd(plain[0]), group=dist.group.WORLD)
        model, ctl, _ = build(recipe, mesh=mesh)
        found = train(model, ctl, sgd(model), group=dist.group.WORLD)
        assert_same(found, expected)
        for mine in (*found[1], *(b.clone() for b in model.buffers())):
            of_all = [torch.empty_like(mine) for _ in range(WORLD)]
            dist.all_gather(of_all, mine)
            assert all(torch.equal(mine, other) for other in of_all), pair
    recipe = weight_recipe("mxfp8_e4m3", "nvfp4:row_scaled")
    runs = [fsdp2_experts.build_experts(recipe, gather=gather, mesh=mesh)[:2] for gather in (False, True)]
    assert_same(*(fsdp2_experts.train_experts(*run) for run in runs))


def check_mixed_precision_and_master_cast():
    """master_cast param_dtype: as if FSDP2 had rounded the weight before it was cast."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    recipe = weight_recipe("mxfp8_e4m3", "nvfp4", master_cast="param_dtype")
    plain = build(recipe, gather=False, policy=policy)
    expected = train(plain[0], plain[1], sgd(plain[0]))
    model, ctl, _ = build(recipe, policy=policy)
    assert_same(train(model, ctl, sgd(model)), expected)
    model, ctl, _ = build(weight_recipe("mxfp8_e4m3", "nvfp4"), policy=policy)
    assert train(model, ctl, sgd(model))[0] != expected[0]


def check_bytes_on_the_wire():
    """P62, P11: what travels is one direction's payload and scales, and the bias; and what the table says."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(mh.HybridLinear(256, 128, bias=False))
    mesh = init_device_mesh(DEVICE, (WORLD,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)  # the root itself does not reshard after forward
    ctl = mh.prepare(model, weight_recipe("mxfp8_e4m3", "nvfp4"))
    gathers = mh.gather_quantized(model, ctl)
    ctl.begin_step(1)
    x = torch.randn(4, 256, requires_grad=True)
    with on_the_wire() as seen:
        model(x).sum().backward()
    sent = [call.nbytes for call in seen if call.name == "all_gather_into_tensor"]
    rows = 128 // WORLD
    row = rows * 256 + rows * 256 // 32  # codes and scales of 32 x 256
    # codes, two a byte, scales of 16 x 1, and on the first rank the tensor's amax: every rank sends as much as the largest
    column = rows * 256 // 2 + rows // 16 * 256 + 4
    assert sent == [row, column], (sent, row, column)
    assert f"{row:,}" in str(gathers) and f"{column:,}" in str(gathers)


def check_amaxes_travel_in_one_collective_a_step():
    """And nowhere else: forwards and backwards gather weights and reduce gradients, an optimizer sends nothing."""
    delayed, tensors = ("nvfp4", "fp8_delayed_e4m3:history=3"), 2 * ("fp8_current_e4m3",)
    for pair in (("mxfp8_e4m3:2d", "nvfp4:2d"), delayed, tensors):
        model, ctl, _ = build(weight_recipe(*pair))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for i in (1, 2):
            with on_the_wire() as before:
                ctl.begin_step(i)
            with on_the_wire() as during:
                for j in range(2):
                    ctl.microbatch(j)
                    model(batch(i, j)).square().sum().backward()
            with on_the_wire() as after:
                optimizer.step()
                optimizer.zero_grad()
                ctl.end_step()
            assert [(s.name, s.dtype, s.op) for s in before] == [("all_reduce", torch.int32, dist.ReduceOp.MAX)], before
            assert {s.name for s in during} == {"all_gather_into_tensor", "reduce_scatter_tensor"}, during
            assert not after, after


def alive() -> tuple[int, int]:
    """Tensors that are there, and bytes of their memory, of each piece once; on a GPU all that is allocated."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        return len(tensors), torch.cuda.memory_allocated()
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors if torch._C._has_storage(t))}
    return len(tensors), sum(storages.values())


def check_memory():
    """P44, P51: the same tensors every iteration, freed after use, and no more of them after 200 steps than after 20."""
    model, ctl, gathers = build(weight_recipe("mxfp8_e4m3", "nvfp4"))
    optimizer = sgd(model)
    w, counts = gathers.weights[0], []
    for i in range(1, 201):
        ctl.begin_step(i)
        model(batch(i, 0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ctl.end_step()
        sizes = [b.untyped_storage().size() for b in w.passes["both"].buffers]
        assert sizes == [0] * len(sizes), sizes
        if i in (20, 100, 200):
            counts.append(alive())
    unsharded = w._param._unsharded_param
    assert unsharded.rowwise.qdata is w.tensor.rowwise.qdata
    tensors, sizes = zip(*counts)
    assert len(set(tensors)) == 1 and max(sizes) - min(sizes) < 180 * 512, counts  # a GPU's least piece in every step
    ctl.begin_step(201)
    with torch.no_grad():
        model.layers[0](batch(1, 0))
    held = [w.tensor.rowwise.qdata, w.tensor.columnwise.qdata]
    assert [b.untyped_storage().size() > 0 for b in held] == [False, False]
    model.layers[0].unshard()
    assert torch.isfinite(model.layers[0].weight.dequantize("columnwise")).all()
    model.layers[0].reshard()


def check_meta_device_and_switch():
    """Built on the meta device, sharded, then initialised; then a recipe with other formats."""
    model = Model(device="meta")
    for layer in model.layers:
        fully_shard(layer, mesh=init_device_mesh(DEVICE, (WORLD,)))
    ctl = mh.prepare(model, weight_recipe("mxfp8_e4m3", "nvfp4"), num_microbatches=2)
    with raises((ValueError, RuntimeError), "meta device"):
        mh.gather_quantized(model, ctl)
    model.to_empty(device=DEVICE)
    for layer in model.layers:
        torch.manual_seed(dist.get_rank())
        for p in layer.parameters():
            torch.nn.init.normal_(p.to_local(), std=0.1)
    ctl = mh.prepare(model, weight_recipe("mxfp8_e4m3", "nvfp4"), num_microbatches=2)
    assert len(mh.gather_quantized(model, ctl).weights) == 3
    optimizer = sgd(model)
    train(model, ctl, optimizer, steps=1)
    saved = {k: v.to_local().clone() for k, v in model.state_dict().items()}
    other = weight_recipe("nvfp4:2d", "nvfp4:2d")
    ctl.switch(other)
    found = train(model, ctl, optimizer, steps=2)

    fresh = Model(device="meta")
    for layer in fresh.layers:
        fully_shard(layer, mesh=init_device_mesh(DEVICE, (WORLD,)))
    fresh.to_empty(device=DEVICE)
    for k, v in fresh.state_dict().items():
        v.to_local().copy_(saved[k])
    ctl = mh.prepare(fresh, other, num_microbatches=2)
    assert len(mh.gather_quantized(fresh, ctl).weights) == 3
    assert_same(train(fresh, ctl, sgd(fresh), steps=2), found)


def check_refusals():
    """What cannot work raises on every rank, before anything is sent."""
    model = Model()
    ctl = mh.prepare(model, "mxfp8")
    with raises((ValueError, RuntimeError), "no quantized linear"):
        mh.gather_quantized(model, ctl)
    for layer in model.layers if WORLD > 2 else ():
        fully_shard(layer, mesh=init_device_mesh(DEVICE, (WORLD,)), reshard_after_forward=2)
    if WORLD > 2:
        with raises((ValueError, RuntimeError), "reshard_after_forward=<int>"):
            mh.gather_quantized(model, ctl)
    model, ctl, gathers = build(weight_recipe("mxfp8_e4m3", "nvfp4"))
    with raises((ValueError, RuntimeError), "begin_step"):
        model(batch(0, 0))
    model, ctl, gathers = build(weight_recipe("mxfp8_e4m3", "high_precision"), skips=True)
    assert not gathers.weights and set(gathers.skipped.values()) == {"dgrad reads the original"}, gathers.skipped
    train(model, ctl, sgd(model), steps=1)


def training_state(model, optimizer) -> dict:
    """Of the model and of the optimizer, both by name, as checkpoints hold them."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def check_checkpoint_across_layouts():
    """P50: files hold plain high-precision tensors; from four ranks to two and from two to four, AdamW's moments and
    histories of delayed scales too. The next step is the same bit for bit: all of its gradient is one rank's, whose sum
    with zeros is exact on any number of ranks."""
    four = init_device_mesh(DEVICE, (WORLD,))
    pairs = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("copy", "shard"))["shard"]
    delayed = "fp8_delayed_e4m3:history=3", "fp8_delayed_e5m2:history=3"
    formats = {"mixed": ("mxfp8_e4m3", "nvfp4"), "delayed": delayed}
    directions = {"4 to 2": (four, pairs), "2 to 4": (pairs, four)}
    for (name, (source, target)), (what, both) in itertools.product(directions.items(), formats.items()):
        folder, recipe = arguments().folder / f"dcp {name} {what}", weight_recipe(*both)
        model, ctl, _ = build(recipe, mesh=source)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in (1, 2):
            one_step(model, ctl, optimizer, step, rank=source.get_local_rank())  # copies get the same
        state = training_state(model, optimizer)
        if source is four or dist.get_rank() < 2:
            dcp.save(state, checkpoint_id=folder, process_group=source.get_group())
        dist.barrier()
        loaded, ctl2, _ = build(recipe, mesh=target, seed=2)
        optimizer2 = torch.optim.AdamW(loaded.parameters(), lr=0.01)
        found = training_state(loaded, optimizer2)
        dcp.load(found, checkpoint_id=folder, process_group=target.get_group())
        set_state_dict(loaded, optimizer2, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        sides = (model, optimizer, ctl), (loaded, optimizer2, ctl2)
        assert_equal_training(*sides, (name, what))
        shares = [mesh.size() * (mesh.get_local_rank() == 0) for mesh in (source, target)]
        losses = [one_step(m, c, o, 3, share=share) for (m, o, c), share in zip(sides, shares)]
        assert torch.equal(*losses), (name, what, losses)
        assert_equal_training(*sides, (name, what, "a step later"))


def one_step(model, ctl, optimizer, step: int, rank: int = 0, share: int = 1) -> torch.Tensor:
    """The loss of the microbatch that a rank has in this step. share: what it counts in the mean over ranks."""
    ctl.begin_step(step)
    loss = model(batch(step, 0, rank=rank)).square().sum()
    (loss * share).backward()
    optimizer.step()
    optimizer.zero_grad()
    ctl.end_step(dist.group.WORLD)
    return loss.detach()


def assert_equal_training(one, other, what) -> None:
    """Weights, buffers and the optimizer's moments of two (model, optimizer, controller), however they are sharded."""
    moments = [[full(state) for p in m.parameters() for state in o.state[p].values()] for m, o, _ in (one, other)]
    assert len(moments[0]) == 3 * len(list(one[0].parameters()))
    rest = [[full(t) for t in (*m.parameters(), *m.buffers())] for m, *_ in (one, other)]
    for a, b in (*zip(*moments, strict=True), *zip(*rest, strict=True)):
        assert torch.equal(a, b), what


def main() -> None:
    start(threads=1)
    run_checks(globals(), vars(fsdp2_experts), leave_out=FOR_FOUR if WORLD < 4 else ())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
