"""Checks of grouped weights under FSDP2 with payload gathers; run_fsdp2.py runs them."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from fsdp2_cases import DEVICE, WORLD, assert_same, full, sgd, trained, weight_recipe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tp_cases import on_the_wire

import megatron_hybrid as mh

SIZES = (128, 512)
EXPERTS = 6  # over four ranks: two, two, two and none; over two: three each
EXPERT_PAIRS = [
    ("mxfp8_e4m3", "mxfp8_e4m3", "original", True),
    ("fp8_block_e4m3:2d", "fp8_block_e4m3:2d", "original", True),
    ("fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "original", True),
    ("nvfp4:row_scaled", "mxfp8_e4m3", "rowwise_dequantized", True),
    ("nvfp4:row_scaled", "mxfp8_e4m3", "original", True),
    ("nvfp4:2d", "fp8_current_e4m3", "original", False),
    ("fp8_current_e4m3", "fp8_current_e4m3", "original", False),
    ("fp8_delayed_e4m3:history=3", "fp8_delayed_e5m2:history=3", "original", False),
]
OF_THEIR_OWN = {  # experts with formats, scales and derived columns of their own
    "rules": [
        {"match": {"experts": "1:3"}, "use": {gemm: {"weight": "fp8_current_e4m3"} for gemm in ("fprop", "dgrad")}},
        {"match": {"experts": "3:"}, "use": {"fprop": {"weight": "fp8_block_e4m3"}}},
    ]
}


class Experts(torch.nn.Module):
    """Two grouped linears of `EXPERTS` experts: N and K of one are K and N of the other."""

    def __init__(self, num=EXPERTS):
        super().__init__()
        self.up, self.down = (mh.HybridGroupedLinear(num, *pair, bias=True) for pair in (SIZES, SIZES[::-1]))
        self.num = num

    def forward(self, x):
        rows = [x.shape[0] // self.num] * (self.num - 1)
        splits = [*rows, x.shape[0] - sum(rows)]
        return self.down(torch.tanh(self.up(x, splits)), splits)


def build_experts(recipe, *, gather=True, one_by_one=False, recompute=False, num=EXPERTS, mesh=None, **options):
    torch.manual_seed(1)
    model = Experts(num)
    mesh = mesh or init_device_mesh(DEVICE, (WORLD,))
    for linear in (model.up, model.down):
        linear.hq.one_by_one = one_by_one
        fully_shard(linear, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    ctl = mh.prepare(model, recipe, num_microbatches=2)
    return model, ctl, mh.gather_quantized(model, ctl, recompute=recompute) if gather else None


def expert_batch(step, micro):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
    return torch.randn(40, SIZES[0], generator=generator, device="cpu").to(DEVICE)


def train_experts(model, ctl, steps=3, group=None, recompute=False, make=sgd):
    """Losses and whole weights."""

    def recomputed(x):
        return checkpoint(model, x, use_reentrant=False)

    return trained(model, ctl, make(model), expert_batch, steps, group, recomputed if recompute else model)


def check_experts_bytes_are_the_unsharded_weights():
    """P48 of grouped weights: in every gather each expert's payloads are those of a cast of it alone, in common memory and
    run at once where formats let them, its delayed scale the same on all ranks; and nothing is left of them after a step."""
    for row, col, source, together in EXPERT_PAIRS:
        model, ctl, gathers = build_experts(weight_recipe(row, col, source))
        assert len(gathers.weights) == 2 and not gathers.skipped, gathers.skipped
        seen = []

        def compare(w, name):
            hq, masters = w._module.hq, whole[w.path]
            assert (hq.stack.rowwise is not None) == together, (row, col)
            for e, (t, filled) in enumerate(zip(w.parts, w.passes[name].parts)):
                states = hq[e].weight_states()
                state = None if states is None else tuple(None if s is None else s.frozen() for s in states)
                expected = t.quantizer.quantize(masters[e], state=state)
                for s in (filled.rowwise, filled.columnwise):
                    for buffer, value in {} if s is None else getattr(expected, s.direction).buffers().items():
                        assert torch.equal(getattr(s, buffer), value), (row, col, w.path, e, s.direction, buffer)
            seen.append((w.path, name))

        for w in gathers.weights:
            after = w._after

            def spy(outputs, asked, dtype, *, out=None, w=w, after=after):
                result, name = after(outputs, asked, dtype, out=out), asked[0]
                compare(w, name)
                return result

            w._param._sharded_local_tensor.fsdp_post_all_gather = spy
        optimizer = sgd(model)
        for i in (1, 2):
            whole = {name: full(getattr(model, name).weight).detach() for name in ("up", "down")}
            ctl.begin_step(i)
            model(torch.randn(24, SIZES[0], device=DEVICE)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ctl.end_step(dist.group.WORLD)
            assert not any(b.untyped_storage().size() for w in gathers.weights for b in w.passes["both"].buffers)
        assert seen == 2 * [("up", "forward"), ("down", "forward"), ("down", "backward"), ("up", "backward")], seen


def check_experts_train_as_with_high_precision_gathers():
    """P47 of grouped weights: losses and weights bit for bit, at once and one by one, resharded or not, recomputed or not."""
    for row, col, source, together in EXPERT_PAIRS[:-1]:
        recipe = weight_recipe(row, col, source)
        for one_by_one in {False, together}:
            plain = build_experts(recipe, gather=False, one_by_one=one_by_one)
            found = build_experts(recipe, one_by_one=one_by_one)
            assert_same(train_experts(*found[:2]), train_experts(*plain[:2]))
            how = {isinstance(linear.hq.how(linear.weight), str) for linear in (plain[0].up, plain[0].down)}
            assert how == {one_by_one or not together}, (row, col, how)
    recipe = weight_recipe("mxfp8_e4m3", "nvfp4:row_scaled")
    others = (dict(reshard_after_forward=False), False), ({}, True), (dict(num=2), False), (dict(num=1), False)
    for options, recompute in others:
        plain = build_experts(recipe, gather=False, **options)
        found = build_experts(recipe, recompute=recompute, **options)
        expected = train_experts(*plain[:2], recompute=recompute)
        assert_same(train_experts(*found[:2], recompute=recompute), expected)


def check_experts_of_shipped_recipes():
    """Inputs and gradients quantized too; weights FP32, or gathered as bf16 from FP32 with a master cast of either kind."""
    for name in ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4_rowscaled_fprop_mxfp8_bwd"):
        plain = build_experts(name, gather=False)
        expected = train_experts(*plain[:2], group=dist.group.WORLD)
        model, ctl, gathers = build_experts(name)
        assert len(gathers.weights) == 2, (name, gathers.skipped)
        found = train_experts(model, ctl, group=dist.group.WORLD)
        if name == "fp8_delayed":  # the scale is moved by the amax of this step's weight, not of its last
            assert all(torch.isfinite(w).all() for w in found[1])
        else:
            assert_same(found, expected)
    policy = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    recipe = weight_recipe("mxfp8_e4m3", "nvfp4:row_scaled", master_cast="param_dtype")
    plain = build_experts(recipe, gather=False, **policy)
    found = build_experts(recipe, **policy)
    assert_same(train_experts(*found[:2]), train_experts(*plain[:2]))


def check_experts_with_formats_of_their_own():
    """Experts whose columns are gathered beside experts whose columns follow from the row; then another recipe."""
    recipe = weight_recipe("mxfp8_e4m3", "nvfp4", **OF_THEIR_OWN)
    other = weight_recipe("fp8_block_e4m3", "mxfp8_e4m3")
    results = []
    for gather in (False, True):
        model, ctl, gathers = build_experts(recipe, gather=gather)
        assert not gather or len({str(t.quantizer) for t in gathers.weights[0].parts}) == 3
        first = train_experts(model, ctl)
        ctl.switch(other)
        results.append((first, train_experts(model, ctl)))
    for found, expected in zip(*results):
        assert_same(found, expected)


def check_experts_follow_rules_of_their_inputs():
    """A step's rule on the input alone: from one by one to at once, whose payloads are in common memory, and back."""
    pair = "fp8_current_e4m3", "mxfp8_e4m3"  # experts with the first run one by one
    for (first, then), reshard in itertools.product((pair, pair[::-1]), (True, False)):
        recipe = weight_recipe("mxfp8_e4m3", "mxfp8_e4m3").to_dict()
        recipe["defaults"]["fprop"]["input"] = first
        recipe["rules"] = [{"match": {"steps": "2:4"}, "use": {"fprop": {"input": then}}}]
        recipe = mh.Recipe.from_dict(recipe)
        plain = build_experts(recipe, gather=False, reshard_after_forward=reshard)
        model, ctl, gathers = build_experts(recipe, reshard_after_forward=reshard)
        together = []
        for w in gathers.weights:
            w._module.register_forward_hook(lambda m, *_: together.append(not isinstance(m.hq.how(m.weight), str)))
        assert_same(train_experts(model, ctl, steps=5), train_experts(*plain[:2], steps=5))
        at_once = [i in (2, 3) if first == pair[0] else i not in (2, 3) for i in range(1, 6)]
        assert together == [one for one in at_once for _ in range(4)], together


def check_experts_bytes_on_the_wire():
    """P62 of grouped weights: one direction's payloads and scales of a rank's experts, and the biases in high precision."""
    model, ctl, gathers = build_experts(weight_recipe("mxfp8_e4m3", "nvfp4:row_scaled"), num=2 * WORLD)
    ctl.begin_step(1)
    with on_the_wire() as seen:
        model(torch.randn(24, SIZES[0], device=DEVICE)).square().sum().backward()
    sent = [call.nbytes for call in seen if call.name == "all_gather_into_tensor"]
    n = 2 * 128 * 512  # elements a rank
    row, col = n + n // 32, n // 2 + n // 16
    amaxes = {"up": 2 * 128 * 4, "down": 2 * 512 * 4}  # of columns
    biases = {"up": 2 * 512 * 4, "down": 2 * 128 * 4}
    forward = [row + biases["up"], row + biases["down"]]
    backward = [col + amaxes["down"] + biases["down"], col + amaxes["up"] + biases["up"]]
    assert sent == [*forward, *backward], (sent, forward, backward)
    assert all(f"{n:,}" in str(gathers) for n in (row, col + amaxes["up"], col + amaxes["down"]))


def check_experts_in_high_precision_are_listed():
    recipe = weight_recipe("mxfp8_e4m3", "mxfp8_e4m3", rules=[{"match": {"experts": "3"}, "use": "high_precision"}])
    _, _, gathers = build_experts(recipe)
    reason = "expert 3: fprop reads it in high precision"
    assert not gathers.weights and gathers.skipped == {"up": reason, "down": reason}
