"""Composed modules equal their parts; grouped linears equal a loop over experts (properties 23, 42; cases 1, 3, 8, 9, 50)."""

import pytest
import torch

import megatron_hybrid as mh
from megatron_hybrid import HybridSelfAttention

FORMATS = ["high_precision", "fp8_current_e4m3", "fp8_rowwise_e4m3", "fp8_block_e4m3", "mxfp8_e4m3", "nvfp4", "nvfp4:row_scaled"]


def recipe(fmt, rules=()):
    defaults = {"fprop": fmt, "dgrad": fmt, "wgrad": fmt}
    return mh.Recipe.from_dict({"version": 1, "name": "t", "defaults": defaults, "rules": list(rules)})


def grads(module, x, dy, *args):
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x, *args)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_p23_norm_linear_is_its_parts(norm, zero_centered):
    torch.manual_seed(0)
    m = mh.HybridLayerNormLinear(64, 48, recipe="mxfp8_fprop_nvfp4_bwd", normalization=norm,
                                 zero_centered_gamma=zero_centered, return_norm_output=True, dtype=torch.bfloat16)  # fmt: skip
    x, dy = torch.randn(5, 64).bfloat16(), torch.randn(5, 48).bfloat16()
    y, normed = m(x)
    assert torch.equal(y, m.linear(m.norm(x))) and torch.equal(normed, m.norm(x))
    ref = torch.nn.functional.layer_norm(x.float(), (64,)) if norm == "LayerNorm" else torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-5)
    assert (normed.float() - ref).abs().max() <= ref.abs().max() * 2.0**-8
    y.backward(dy)
    assert m.norm.weight.grad is not None


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu2"])
def test_p23_mlp_is_its_parts(gated, activation):
    torch.manual_seed(0)
    m = mh.HybridMLP(64, 96, gated=gated, activation=activation, norm="RMSNorm", name="layer.mlp", recipe="mxfp8", dtype=torch.bfloat16)
    assert [r.role.name for r in m.modules() if hasattr(r, "role")] == ["layer.mlp.linear_fc1", "layer.mlp.linear_fc2"]
    x, dy = torch.randn(6, 64).bfloat16(), torch.randn(6, 64).bfloat16()
    y = grads(m, x, dy)[0]
    h = m.linear_fc1(m.norm(x))
    act = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu, "relu2": lambda t: t.relu().square()}[activation]
    h = act(h[:, :96]) * h[:, 96:] if gated else act(h)
    assert torch.equal(y, m.linear_fc2(h))
    with pytest.raises(ValueError, match="did you mean 'gelu'"):
        mh.HybridMLP(8, 8, activation="gelo")


def copied(layer, rcp, **kw):
    """A stand-alone linear with the same weight and bias."""
    alone = mh.HybridLinear(layer.in_features, layer.out_features, layer.bias is not None, recipe=rcp, dtype=torch.bfloat16, **kw)
    alone.load_state_dict(layer.state_dict(), strict=False)
    return alone


class Parts(torch.nn.Module):
    """The parts of a composed module, built alone and put together by hand."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.put_together = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.put_together(self, x)


def norm_parts(norm):
    alone = torch.nn.LayerNorm(64, dtype=torch.bfloat16) if norm.bias is not None else torch.nn.RMSNorm(64, eps=1e-5, dtype=torch.bfloat16)
    alone.load_state_dict(norm.state_dict())
    return alone


def attend(parts, x):
    q, k, v = parts.qkv(x).unflatten(-1, (8, 16)).transpose(1, 2).split((4, 2, 2), dim=1)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return parts.proj(out.transpose(1, 2).flatten(2))


def swiglu(h):
    gate, up = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("fmt", FORMATS)
def test_p23_composed_modules_are_their_parts_in_y_dx_dw_and_db(fmt):
    rcp = recipe(fmt)
    torch.manual_seed(0)
    made = dict(recipe=rcp, dtype=torch.bfloat16)
    norm_linear = mh.HybridLayerNormLinear(64, 64, **made)
    mlp = mh.HybridMLP(64, 96, gated=True, activation="silu", norm="RMSNorm", **made)
    attention = HybridSelfAttention(64, 4, num_query_groups=2, **made)
    layer = torch.nn.Sequential(norm_linear, attention, mlp)  # a transformer layer without its residuals
    parts = {
        norm_linear: Parts(lambda p, x: p.linear(p.norm(x)), norm=norm_parts(norm_linear.norm), linear=copied(norm_linear.linear, rcp)),
        attention: Parts(attend, qkv=copied(attention.linear_qkv, rcp), proj=copied(attention.linear_proj, rcp)),
        mlp: Parts(lambda p, x: p.fc2(swiglu(p.fc1(p.norm(x)))), norm=norm_parts(mlp.norm), fc1=copied(mlp.linear_fc1, rcp), fc2=copied(mlp.linear_fc2, rcp)),
        layer: None,
    }  # fmt: skip
    parts[layer] = torch.nn.Sequential(parts[norm_linear], parts[attention], parts[mlp])
    x, dy = torch.randn(2, 5, 64).bfloat16(), torch.randn(2, 5, 64).bfloat16()
    for module, alone in parts.items():
        got, want = grads(module, x, dy), grads(alone, x, dy)
        assert len(got) == len(want) and all(torch.equal(g, w) for g, w in zip(got, want))


def grouped(fmt, experts=4, rules=(), bias=True, **kw):
    torch.manual_seed(1)
    return mh.HybridGroupedLinear(experts, 64, 48, bias, recipe=recipe(fmt, rules), name="experts.linear_fc1", dtype=torch.bfloat16, **kw)


def loop(m, x, dy, splits, fmts):
    """Every expert as a dense linear with its own format."""
    out, start = [], 0
    for e, rows in enumerate(splits):
        dense = mh.HybridLinear(64, 48, m.bias is not None, recipe=recipe(fmts[e]), dtype=torch.bfloat16)
        with torch.no_grad():
            dense.weight.copy_(m.weight[e])
            if m.bias is not None:
                dense.bias.copy_(m.bias[e])
        out.append(grads(dense, x[start : start + rows], dy[start : start + rows]))
        start += rows
    y, dx, dw, *db = zip(*out)
    return [torch.cat(y), torch.cat(dx), torch.stack(dw), *(torch.stack(b) for b in db)]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("splits", [[44, 20, 7, 1], [0, 64, 0, 33], [0, 0, 0, 0]])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_p42_c01_c03_c08_c09_grouped_is_a_loop_over_experts(fmt, splits, as_tensor):
    m = grouped(fmt)
    x, dy = torch.randn(sum(splits), 64).bfloat16(), torch.randn(sum(splits), 48).bfloat16()
    got = grads(m, x, dy, torch.tensor(splits, dtype=torch.int32) if as_tensor else splits)
    for g, w in zip(got, loop(m, x, dy, splits, [fmt] * 4)):
        assert torch.equal(g, w)
    assert all((m.weight.grad[e] == 0).all() for e in range(4) if splits[e] == 0)


def test_recipes_mixed_per_expert():
    rules = [{"match": {"experts": "2:4"}, "use": "nvfp4"}]
    m = grouped("mxfp8_e4m3", rules=rules)
    splits = [16, 8, 24, 8]
    x, dy = torch.randn(56, 64).bfloat16(), torch.randn(56, 48).bfloat16()
    want = loop(m, x, dy, splits, ["mxfp8_e4m3", "mxfp8_e4m3", "nvfp4", "nvfp4"])
    assert all(torch.equal(g, w) for g, w in zip(grads(m, x, dy, splits), want))


def test_c03_poisoned_main_grad_of_an_empty_expert_is_untouched_and_others_accumulate():
    m = grouped("mxfp8_e4m3", bias=False)
    m.weight.main_grad = torch.zeros(4, 48, 64)
    m.weight.main_grad[1] = 5.0
    x, dy = torch.randn(96, 64).bfloat16(), torch.randn(96, 48).bfloat16()
    seen = []
    for _ in range(2):
        m(x, [64, 0, 32, 0]).backward(dy)
        seen.append(m.weight.main_grad.clone())
    assert m.weight.grad_added_to_main_grad and m.weight.grad is not None
    assert (seen[1][1] == 5).all() and (seen[1][3] == 0).all()
    for e in (0, 2):
        assert torch.equal(seen[1][e], 2 * seen[0][e]) and seen[0][e].abs().sum() > 0


@pytest.mark.parametrize("splits", [[1, 2, 3], [40, 20, 7, -3], [1, 1, 1, 1]])
def test_wrong_splits_are_refused(splits):
    with pytest.raises(ValueError, match="m_splits"):
        grouped("high_precision")(torch.randn(64, 64).bfloat16(), splits)


def test_an_empty_batch_leaves_no_other_weight_in_the_cache():
    """Without tokens the experts run one by one: their casts are not those of the stack, though it begins with the first's."""
    m = mh.HybridGroupedLinear(3, 64, 48, recipe="mxfp8")
    controller = mh.prepare(m)
    controller.begin_step(1)
    x = torch.randn(9, 64)
    with torch.no_grad():
        first, empty, again = m(x, [4, 0, 5]), m(x[:0], [0, 0, 0]), m(x, [4, 0, 5])
    assert empty.shape == (0, 48) and torch.equal(first, again)
