"""Plans: refused pairs, alignment only where a gemm needs it, accumulation, counters; the library's calling
conventions checked by a stand-in (properties 21, 22, 25; cases 13, 20, 82, 95)."""

import itertools

import pytest
import torch
from linear_cases import STATELESS, gradients, randn, recipe

import megatron_hybrid as mh
from megatron_hybrid.formats import COLUMNWISE, parse_format
from megatron_hybrid.gemm import BACKENDS, GEMMS, OPERANDS, DeviceKind, GemmPair
from megatron_hybrid.plan import build_plan
from megatron_hybrid.quantizer_spec import DEFAULT_SETTINGS, ModuleQuant
from megatron_hybrid.roles import ModuleRole
from megatron_hybrid.storage import QuantizedStorage, cast

CPU, SM90, SM100 = DeviceKind("cpu"), DeviceKind("cuda", (9, 0)), DeviceKind("cuda", (10, 0))
NATIVE = next(b for b in BACKENDS if b.name == "scaled_mm")
NATIVE_PAIRS = [
    ("fp8_current_e5m2", "fp8_current_e4m3"),
    ("fp8_rowwise_e4m3", "fp8_rowwise_e5m2"),
    ("fp8_block_e4m3", "fp8_block_e4m3:2d"),
    ("fp8_block_e4m3:no_pow2", "fp8_block_e4m3"),
    ("fp8_block_e5m2", "fp8_block_e4m3:2d"),
    ("fp8_block_e4m3", "fp8_block_e5m2"),
]


def plan(device=CPU, name="decoder.layers.3.mlp.linear_fc1", **slots):
    """A plan straight from settings; slots as fprop_input="mxfp8_e4m3"."""
    settings = {**DEFAULT_SETTINGS, **{k.replace("_", ".", 1): parse_format(v) for k, v in slots.items()}}
    return build_plan(ModuleQuant.from_settings(ModuleRole("linear", name), settings), name, device)


@pytest.mark.parametrize("device", [CPU, SM90, SM100], ids=str)
@pytest.mark.parametrize("gemm", GEMMS)
def test_p21_a_pair_is_refused_exactly_when_one_side_is_transformed_and_names_everything(gemm, device):
    a, b = GEMMS[gemm]
    for f1, f2 in itertools.product(STATELESS, repeat=2):
        slots = {f"{gemm}_{a}": f1, f"{gemm}_{b}": f2}
        if parse_format(f1).rht == parse_format(f2).rht:
            assert plan(device, **slots).steps()[gemm].pair.a == parse_format(f1)
            continue
        with pytest.raises(mh.PlanError) as error:
            plan(device, **slots)
        directions = dict(OPERANDS[gemm])
        for word in ("module decoder.layers.3.mlp.linear_fc1", gemm, f"{a}.{directions[a]} {f1} ", f"{b}.{directions[b]} {f2} ",
                     f"on {device}", "use `rht` on both or on neither"):  # fmt: skip
            assert word in str(error.value)


def test_p21_c95_refusals_come_before_the_first_forward():
    with pytest.raises(ValueError, match="expert 1, wgrad: grad_output.columnwise nvfp4:rht x input.columnwise nvfp4 on cpu"):
        mh.HybridGroupedLinear(2, 32, 32, name="experts", recipe=lambda role: mh.HybridQuantizer(
            "nvfp4", "nvfp4:rht" if (role.tensor_type, role.expert) == ("grad_output", 1) else "nvfp4"))  # fmt: skip
    with pytest.raises(mh.PlanError, match="module fc: save_input 'orginal'; did you mean 'original'"):
        mh.HybridLinear(32, 32, name="fc", save_input="orginal")


@pytest.mark.parametrize(
    "device,slots,expected",
    [
        # case 13: high precision forward, FP8 backward: rows are padded for wgrad's contraction, nothing else needs them
        (SM90, dict(wgrad_grad_output="fp8_current_e5m2", wgrad_input="fp8_current_e4m3"), dict(M=16, N=1, K=16)),
        (SM90, dict(dgrad_grad_output="fp8_current_e5m2", dgrad_weight="fp8_current_e4m3"), dict(M=1, N=16, K=16)),
        (SM90, dict(fprop_input="fp8_current_e4m3", fprop_weight="fp8_current_e4m3"), dict(M=1, N=16, K=16)),
        (SM90, dict(fprop_input="fp8_block_e4m3", fprop_weight="fp8_block_e4m3:2d"), dict(M=4, N=16, K=16)),
        (SM90, dict(fprop_input="mxfp8_e4m3", fprop_weight="nvfp4"), dict(M=1, N=1, K=1)),  # emulated
        (SM90, {}, dict(M=1, N=1, K=1)),
        (CPU, dict(wgrad_grad_output="fp8_current_e5m2", wgrad_input="fp8_current_e4m3"), dict(M=1, N=1, K=1)),
    ],
)
def test_c13_alignment_is_only_what_a_gemms_formats_need(device, slots, expected):
    p = plan(device, **slots)
    assert {d: p.alignment(d) for d in "MNK"} == expected


def test_accumulate_is_honoured_where_the_hardware_offers_it():
    slots = dict(fprop_input="fp8_current_e4m3", fprop_weight="fp8_current_e4m3")
    assert plan(SM90, **slots).fprop.accumulation == "fast"  # the default of fprop
    assert plan(CPU, **slots).fprop.accumulation == "full"
    blocks = dict(fprop_input="fp8_block_e4m3", fprop_weight="fp8_block_e4m3:2d")
    assert plan(SM90, **blocks).fprop.accumulation == "full"  # the library always promotes block by block
    assert {r["accumulate"] for r in mh.explain([("m", plan(SM90))]).records()} == {"full"}


def test_c82_counters_say_what_ran():
    torch.manual_seed(0)
    layer = mh.HybridLinear(32, 32, recipe=recipe("mxfp8_e4m3", "high_precision", "nvfp4"), dtype=torch.bfloat16)
    for _ in range(3):
        gradients(layer, randn(4, 32), randn(4, 32, seed=1))
    with torch.no_grad():
        layer(randn(4, 32))
    assert layer.plan.counts() == {"emulated": 4 + 3, "high precision": 3}
    assert layer.plan.calls == {("fprop", "emulated"): 4, ("dgrad", "high_precision"): 3, ("wgrad", "emulated"): 3}


# ---- torch's scaled_mm, played by a stand-in that checks how it is called

KIND = {t.value: name for name, t in torch.nn.functional.ScalingType.__members__.items()}


def stand_in(a, b, scales_a, recipe_a, swizzle_a, scales_b, recipe_b, swizzle_b, bias, out_dtype, dims, use_fast_accum):
    """The documented contract of scaled_mm for the kinds of scales used here, in float64."""
    (M, K), N = a.shape, b.shape[1]
    (scale_a,), (scale_b,), kinds = scales_a, scales_b, (KIND[recipe_a[0]], KIND[recipe_b[0]])
    assert a.stride() == (K, 1) and b.stride() == (1, K) and K % 16 == 0 and N % 16 == 0
    assert (swizzle_a, swizzle_b, bias, dims) == ([], [], None, ())
    assert torch.float8_e4m3fn in (a.dtype, b.dtype) and scale_a.dtype == scale_b.dtype == torch.float32
    blocks = -(-K // 128)
    if kinds == ("TensorWise", "TensorWise"):
        assert scale_a.numel() == scale_b.numel() == 1
        wide_a, wide_b = scale_a, scale_b
    elif kinds == ("RowWise", "RowWise"):
        assert scale_a.shape == (M, 1) and scale_b.shape == (1, N)
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        wide_a, wide_b = scale_a, scale_b
    else:
        assert not use_fast_accum and a.dtype == b.dtype == torch.float8_e4m3fn and M % 4 == 0
        wide_a = _blocks(scale_a, M, blocks).repeat_interleave(128, dim=1)[:, :K]
        if kinds == ("BlockWise1x128", "BlockWise1x128"):
            wide_b = _blocks(scale_b, N, blocks).T.repeat_interleave(128, dim=0)[:K]
        else:
            assert kinds == ("BlockWise1x128", "BlockWise128x128")
            padded = -(-blocks // 4) * 4
            assert scale_b.shape == (padded, -(-N // 128)) and scale_b.stride() == (1, padded)
            wide_b = scale_b.repeat_interleave(128, dim=0)[:K].repeat_interleave(128, dim=1)[:, :N]
    return ((a.double() * wide_a) @ (b.double() * wide_b)).to(out_dtype)


def older(a, b, *, scale_a, scale_b, out_dtype):
    """The function for block scales with an operand in E5M2: kinds by shape; tiles said to be dense, read four-aligned."""
    (M, K), N = a.shape, b.shape[1]
    assert M % 4 == 0 and {a.dtype, b.dtype} == {torch.float8_e4m3fn, torch.float8_e5m2}
    blocks, tiles = -(-K // 128), -(-N // 128)
    wide_a = _blocks(scale_a, M, blocks).repeat_interleave(128, dim=1)[:, :K]
    if scale_b.shape == (blocks, N):
        wide_b = _blocks(scale_b.T, N, blocks).T.repeat_interleave(128, dim=0)[:K]
    else:
        assert scale_b.shape == (blocks, tiles) and scale_b.stride() == (1, blocks)
        read = scale_b.as_strided((blocks, tiles), (1, -(-blocks // 4) * 4))
        wide_b = read.repeat_interleave(128, dim=0)[:K].repeat_interleave(128, dim=1)[:, :N]
    return ((a.double() * wide_a) @ (b.double() * wide_b)).to(out_dtype)


def _blocks(scale, rows, blocks):
    assert scale.shape == (rows, blocks) and (rows == 1 or scale.stride(0) == 1)
    assert blocks == 1 or scale.stride(1) == rows
    return scale


def payloads_of(pair, M, N, K):
    """Of random operands, columns as the plan writes them, and as parameters rest."""
    shapes = {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}
    return [
        cast(randn(*shapes[operand], seed=seed), fmt, direction, transposed=direction == COLUMNWISE and operand != "weight")
        for seed, ((operand, direction), fmt) in enumerate(zip(OPERANDS[pair.gemm], (pair.a, pair.b)))
    ]


@pytest.mark.parametrize("b", ["fp8_block_e4m3", "fp8_block_e4m3:2d"])
def test_traced_block_products_have_whole_blocks(b, monkeypatch):
    """torch's shape rule for traced calls divides K and N by 128 and drops the rest."""

    def spy(qa, qb, *rest):
        assert qb.shape[0] % 128 == 0 and qb.shape[1] % 128 == 0
        return stand_in(qa, qb, *rest)

    monkeypatch.setattr(torch, "_scaled_mm_v2", spy)
    pair = GemmPair("fprop", parse_format("fp8_block_e4m3"), parse_format(b), SM90)
    payloads = payloads_of(pair, 33, 145, 272)
    run, wanted = NATIVE.prepare(pair), payloads[0].operand(torch.float32) @ payloads[1].operand(torch.float32).T
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.allclose(run(*payloads, torch.float32), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("accumulate", ["fast", "full"])
@pytest.mark.parametrize("shape", [(256, 512, 640), (1, 16, 16), (200, 144, 272), (33, 129, 127), (0, 16, 16), (5, 700, 200)])
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("a,b", NATIVE_PAIRS)
def test_the_native_backend_calls_the_library_by_its_rules(a, b, gemm, shape, accumulate, monkeypatch):
    flags = []

    def spy(*args):
        flags.append(args[-1])
        return stand_in(*args)

    monkeypatch.setattr(torch, "_scaled_mm_v2", spy)
    monkeypatch.setattr(torch, "_scaled_mm", older)
    pair = GemmPair(gemm, parse_format(a), parse_format(b), SM90, accumulate)
    assert NATIVE.reason(pair) is None
    payloads = payloads_of(pair, *shape)
    exact = payloads[0].operand(torch.float32).double() @ payloads[1].operand(torch.float32).double().T
    for dtype in (torch.bfloat16, torch.float32):
        out = NATIVE.run(*payloads, pair, dtype)
        assert out.dtype == dtype and out.shape == exact.shape
        assert torch.allclose(out.double(), exact, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    total = torch.ones(exact.shape)
    assert NATIVE.run(*payloads, pair, torch.bfloat16, accumulate_into=total) is total
    assert torch.allclose(total.double(), exact + 1, rtol=1e-5, atol=1e-4)
    assert set(flags) <= {NATIVE.accumulation(pair) == "fast"}
    assert bool(flags) == (0 not in shape and ("block" not in a or "e5m2" not in a + b))


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA has no fake CUDA tensors")
@pytest.mark.parametrize("shape", [(256, 512, 640), (33, 145, 272), (4, 16, 16)])
@pytest.mark.parametrize("a,b", NATIVE_PAIRS)
def test_traced_products_pass_torchs_own_shape_rules(a, b, shape, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    pair = GemmPair("fprop", parse_format(a), parse_format(b), SM90)
    M, N, K = shape
    with FakeTensorMode():
        payloads = [
            QuantizedStorage.empty(fmt, "rowwise", (rows, K), torch.bfloat16, "cuda")
            for fmt, rows in ((pair.a, M), (pair.b, N))
        ]
        assert NATIVE.prepare(pair)(*payloads, torch.bfloat16).shape == (M, N)
