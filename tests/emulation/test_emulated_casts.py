"""The CUDA casts' own source, compiled for the CPU, gives the CPU casts' bytes: every pair of formats, without a GPU.

The GPU runs of `tests/numerics/test_cast_pair.py` say more; this says it where there is none. `-m slow`: it compiles first.
"""

import ctypes
import importlib.util
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_hybrid as mh
from megatron_hybrid import kernels, node
from megatron_hybrid.formats import COLUMNWISE, DIRECTIONS, ROWWISE, parse_format
from megatron_hybrid.gemm import backends
from megatron_hybrid.grouped_columns import GroupCast, with_torch
from megatron_hybrid.grouped_payloads import GroupedPayloads
from megatron_hybrid.groups import Groups
from megatron_hybrid.ops_triton.grouped_gemm import block_map
from megatron_hybrid.permutation import RowMap
from megatron_hybrid.storage import _side, cast, decode_operands, derive_columnwise
from megatron_hybrid.tensor import HybridTensor
from megatron_hybrid.testing.assertions import assert_bitwise_equal
from megatron_hybrid.testing.generators import cast_input, make_input

sys.path += [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / folder) for folder in ("numerics", "unit"))]
from build import build_module, build_program  # noqa: E402
from linear_cases import recipe  # noqa: E402
from test_cast_pair import (  # noqa: E402
    FORMATS, FP4_STRIPS, LAYOUTS, NOOP_PAIRS, SHAPES, STRIP_COMPUTED, STRIP_FORMATS, assert_same, check_fp4_strips,
    check_noop, check_strips, check_whole_rows, computed_strip_cases, empty, lay_out, new_rng, new_states, panel_sums,
    strip_cases,
)  # fmt: skip
from test_decode_operands import check_every_pair, check_factors, check_pair  # noqa: E402
from test_node import Library, layers, results  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    found = importlib.util.spec_from_file_location("_C_cuda", build_module(tmp_path_factory.mktemp("emulated")))
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["codes", "fp4_codes", "decode"])
def test_codes(tmp_path, name):
    """Every magnitude that rounding to E2M1 can see, nearest and stochastic, and blocks under all sizes of scales; decodes
    inside a product of every code under every scale, and their order."""
    found = subprocess.run([build_program(tmp_path, name)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def cast_emulated(
    module, outs, x, states, rng, derived=False, sums=None, gate=None, grad=None, amaxes=(None, None), noop=None,
    any_strips=False,
):  # fmt: skip
    """`storage.cast_pair` through the emulated extension; an output that is None is left out."""
    sides, copies, keep = [], [], []
    for out, state, amax in zip(outs, states, amaxes):
        if out is None:
            sides.append(None)
            continue
        side = _side(out, amax, state, None, copies)
        spec = module_spec(module, side.format, out.direction, x.device)
        looks = side.measured is not None and side.format.outer_axis == "row" and out.direction == ROWWISE
        scratch = torch.empty(-(-x.shape[0] // module.PANEL_ROWS), dtype=torch.int32) if looks else None
        keep.append((side, scratch))
        sides.append((spec, *side.arguments(out.direction, x.device, scratch)[1:]))
    words = rng.words(x.shape[1])
    address = [kernels._ptr(t) for t in (sums, gate, words, rng.row_ids)]
    of_grad = () if grad is None else (grad.data_ptr(), grad.stride(0))
    matrix = kernels._matrix(x)
    module.quantize_pair(*sides, *matrix, derived, *address, kernels._ptr(noop), 0, 0, *of_grad, any_strips=any_strips)


@pytest.mark.parametrize("row", FORMATS)
def test_every_pair(emulated, row):
    turn = FORMATS.index(row)
    for col, shape in itertools.product(FORMATS, SHAPES):
        turn += 1
        kind, dtype = ("normal", "special", "tiny")[turn % 3], ("bfloat16", "float16", "bfloat16", "float32")[turn % 4]
        x = lay_out(cast_input(make_input(kind, shape), dtype), LAYOUTS[turn // 2 % 4])
        transposed, states = (turn % 5 == 0, turn % 3 != 0), new_states((row, col), "cpu")
        outs = [empty(n, d, x, t) for n, d, t in zip((row, col), DIRECTIONS, transposed)]
        cast_emulated(emulated, outs, x, states, new_rng("cpu", *x.shape))
        for out, name, turned in zip(outs, (row, col), transposed):
            (own,) = new_states([name], "cpu")
            rng = new_rng("cpu", *x.shape)
            expected = cast(x, parse_format(name), out.direction, state=own, rng=rng, transposed=turned)
            assert_same(out, expected, f"{row} | {col} {shape} {kind} {dtype} {out.direction}")


@pytest.mark.parametrize("row", STRIP_FORMATS)
def test_rows_and_columns_in_registers(emulated, row):
    for x, names, amaxes, transposed in strip_cases(row):
        outs, states = [n and empty(n, d, x, t) for n, d, t in zip(names, DIRECTIONS, transposed)], new_states(names, "cpu")
        cast_emulated(emulated, outs, x, states, new_rng("cpu", *x.shape), amaxes=amaxes)
        check_strips(x, names, amaxes, transposed, outs, states)


@pytest.mark.parametrize("name", FP4_STRIPS)
def test_nvfp4_in_registers(emulated, name):
    """Where strips fit, no tile is in shared memory: copies of rows and random bits are 32 KiB each."""
    shared = ctypes.c_int.in_dll(ctypes.CDLL(emulated.__file__), "emulated_shared_bytes")

    def run(outs, x, states, amaxes, rng):
        cast_emulated(emulated, outs, x, states, rng, amaxes=amaxes, any_strips=True)
        if outs[1] and x.shape[0] % 32 in (0, 31 if outs[1].format.bits == 4 else 0) and x.shape[1] % 16 == 0:
            assert shared.value in (0, 32768, 65536)

    check_fp4_strips(name, "cpu", run)


@pytest.mark.parametrize("any_strips", [False, True])
def test_nvfp4_of_transposed_memory(emulated, any_strips):
    """A kernel that sees the transpose writes scales apart from each other and draws by places in the tensor itself."""
    shared = ctypes.c_int.in_dll(ctypes.CDLL(emulated.__file__), "emulated_shared_bytes")
    x, transposed = cast_input(make_input("normal", (160, 256)), "bfloat16").T.contiguous().T, (False, True)
    for names in (
        ("nvfp4:sr", "nvfp4"), ("nvfp4", "nvfp4:rht,sr"), ("mxfp8_e4m3", "nvfp4:rht"), ("nvfp4:row_scaled", "nvfp4")
    ):  # fmt: skip
        outs = [empty(n, d, x, t) for n, d, t in zip(names, DIRECTIONS, transposed)]
        cast_emulated(emulated, outs, x, (None, None), new_rng("cpu", *x.shape), any_strips=any_strips)
        assert not any_strips or shared.value in (0, 32768, 65536)
        check_strips(x, names, (None, None), transposed, outs, (None, None), lambda device: new_rng(device, *x.shape))


@pytest.mark.parametrize("names", [
    ("fp8_block_e4m3", "mxfp8_e4m3"), ("fp8_rowwise_e4m3", "fp8_rowwise_e5m2"), ("fp8_rowwise_e4m3", None),
    ("fp8_delayed_e4m3", "fp8_block_e4m3:2d"), ("nvfp4", "nvfp4"),
])  # fmt: skip
def test_rows_more_than_2_31_elements_from_the_first(emulated, names):
    """Of memory that is not touched between the rows."""
    shape, apart = (130, 256), 1 << 25
    far = torch.empty(shape[0] * apart, dtype=torch.bfloat16).view(shape[0], apart)[:, : shape[1]]
    assert far.stride(0) * (shape[0] - 1) > 1 << 31
    x = far.copy_(cast_input(make_input("normal", shape), "bfloat16"))
    outs = [n and empty(n, d, x, d == COLUMNWISE) for n, d in zip(names, DIRECTIONS)]
    states = [None if n is None else new_states([n], "cpu")[0] for n in names]
    cast_emulated(emulated, outs, x, states, new_rng("cpu", *shape))
    for out, name in zip(outs, names):
        if out is not None:
            state = new_states([name], "cpu")[0]
            near = cast(x.contiguous(), parse_format(name), out.direction, state=state, transposed=out.transposed)
            assert_same(out, near, f"{names} {out.direction}")


def test_rows_held_whole(emulated):
    """In one launch, where a row is no longer than a thread block holds."""
    counted = ctypes.c_int.in_dll(ctypes.CDLL(emulated.__file__), "emulated_launches")

    def run(out, x):
        before, rows = counted.value, out.direction == ROWWISE
        cast_emulated(emulated, (out, None) if rows else (None, out), x, (None, None), new_rng("cpu", *x.shape))
        assert counted.value - before == (1 if max(x.shape) <= 32768 else 2)

    check_whole_rows("cpu", run)


@pytest.mark.parametrize("names", NOOP_PAIRS)
def test_noop_in_registers(emulated, names):
    def run(outs, x, states, noop):
        cast_emulated(emulated, outs, x, states, new_rng("cpu", *x.shape), noop=noop)

    check_noop(names, "cpu", run)


@pytest.mark.parametrize("row", [f for f in FORMATS if "sr" not in f])
def test_derived_columns(emulated, row):
    for col, shape in itertools.product(("mxfp8_e4m3", "fp8_block_e4m3:2d"), SHAPES[1:3]):
        x = cast_input(make_input("special", shape), "bfloat16")
        outs = [empty(row, ROWWISE, x, False), empty(col, COLUMNWISE, x, True)]
        cast_emulated(emulated, outs, x, new_states((row, col), "cpu"), new_rng("cpu", *shape), derived=True)
        (own,) = new_states([row], "cpu")
        kept = cast(x, parse_format(row), ROWWISE, state=own)
        assert_same(outs[0], kept, f"{row} -> {col} {shape} row")
        assert_same(outs[1], derive_columnwise(kept, parse_format(col), transposed=True), f"{row} -> {col} {shape} column")


@pytest.fixture
def operands_emulated(emulated, monkeypatch):
    """A function of the kernels' door by the emulated kernels."""

    def by_emulation(function):
        def call(*args, **kwargs):
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "extension", lambda device_type: emulated)
                kernels._spec.cache_clear()
                function(*args, **kwargs)
            kernels._spec.cache_clear()

        return call

    return by_emulation


LAUNCHES = [  # of a cast of both directions: (formats, shape, launches)
    (("nvfp4", "nvfp4"), (16, 1024), 2), (("nvfp4:2d", "nvfp4:2d"), (1024, 1024), 3), (("nvfp4", "nvfp4"), (33, 1024), 3),
    (("fp8_current_e4m3", "fp8_current_e4m3"), (16, 1024), 2), (("mxfp8_e4m3", "mxfp8_e4m3"), (16, 1024), 1),
    (("nvfp4:row_scaled,rht", "nvfp4:row_scaled,rht"), (16, 128), 3), (("mxfp8_e4m3", "nvfp4:row_scaled"), (128, 192), 2),
    (("mxfp8_e4m3", "nvfp4:row_scaled"), (129, 192), 3), (("fp8_rowwise_e4m3", "fp8_rowwise_e4m3"), (400, 192), 3),
    (("fp8_rowwise_e4m3", "fp8_rowwise_e4m3"), (401, 192), 4), (("fp8_block_e4m3", "fp8_rowwise_e4m3"), (400, 192), 3),
    (("fp8_block_e4m3", "fp8_block_e4m3"), (400, 192), 1),
]  # fmt: skip


@pytest.mark.parametrize("names,shape,launches", LAUNCHES)
def test_no_more_launches_than_a_cast_needs(emulated, names, shape, launches):
    """A pass for amaxes starts with one for zeros only where several thread blocks raise the same amax."""
    x = cast_input(make_input("normal", shape), "bfloat16")
    outs = [empty(n, d, x, d == COLUMNWISE) for n, d in zip(names, DIRECTIONS)]
    counted = ctypes.c_int.in_dll(ctypes.CDLL(emulated.__file__), "emulated_launches")
    before = counted.value
    cast_emulated(emulated, outs, x, new_states(names, "cpu"), new_rng("cpu", *shape))
    assert counted.value - before == launches
    for out, name in zip(outs, names):
        expected = cast(x, parse_format(name), out.direction, transposed=out.transposed)
        assert_same(out, expected, f"{name} {shape} {out.direction}")


def test_one_launch_decodes_both_operands_and_writes_their_factor(emulated, operands_emulated):
    counted = ctypes.c_int.in_dll(ctypes.CDLL(emulated.__file__), "emulated_launches")
    decode, shapes = operands_emulated(decode_operands), ((16, 1024), (256, 1024))
    for names, across, launches in (
        (("nvfp4", "nvfp4:2d"), (False, False), 1), (("mxfp8_e4m3", "mxfp8_e4m3"), (False, False), 1),
        (("nvfp4", "mxfp8_e4m3"), (False, False), 2), (("nvfp4", "nvfp4"), (True, False), 2),
        (("nvfp4", "nvfp4"), (True, True), 3), (("high_precision", "nvfp4"), (False, False), 1),
    ):  # fmt: skip
        before = counted.value
        check_pair(names, shapes, ROWWISE, across, torch.bfloat16, False, decode=decode)
        assert counted.value - before == launches, (names, across)


LINEARS = [  # formats of input, weight and gradient in all three gemms; own launches of a step, products by cuBLASLt
    (("nvfp4", "nvfp4:2d", "nvfp4"), 7 + 3, 3), (("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"), 3 + 3, 0),
    (("nvfp4", "mxfp8_e4m3", "nvfp4"), 5 + 2 * 2 + 1, 3), (("nvfp4", "nvfp4:row_scaled", "nvfp4"), 8 + 3 + 2 * 2, 1),
]  # fmt: skip


@pytest.mark.skipif(node.library() is None, reason="this build has no _C_node")
@pytest.mark.parametrize("formats,launches,products", LINEARS)
def test_a_linear_by_the_node(emulated, formats, launches, products, monkeypatch):
    """A step as on a GPU, with a library that stands in for cuBLASLt: the launches, and the bits of the CPU's kernels."""
    x, w, dy = formats
    fprop, dgrad = {"input": x, "weight": w}, {"grad_output": dy, "weight": w}
    how = recipe(fprop, dgrad, {"grad_output": dy, "input": x})
    library, found = Library(), []
    monkeypatch.setattr(backends.EmulatedBackend, "bf16_devices", ("cpu", "cuda"))
    for module in (node, backends):
        monkeypatch.setattr(module, "cublaslt", library)
    counted = ctypes.c_int.in_dll(ctypes.CDLL(emulated.__file__), "emulated_launches")
    for casts in (kernels.extension("cpu").CASTS, emulated.CASTS):
        monkeypatch.setattr(kernels.extension("cpu"), "CASTS", casts)
        (layer,) = layers(how, bias=False, count=1, features=(1024, 1024))
        before = counted.value
        library.seen.clear()
        found.append((results(layer, shape=(16,))[1], list(library.seen)))
        made = counted.value - before
    assert made == launches and len(library.seen) == products and found[0][1] == found[1][1]
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))


def test_both_operands_of_products(operands_emulated):
    """Together and apart, as they are stored alike or not; and every factor."""
    check_every_pair(decode=operands_emulated(decode_operands))
    check_factors("cpu", decode=operands_emulated(kernels.decode_operands))


@pytest.fixture
def decode_emulated(emulated, monkeypatch):
    """Decodes of CPU tensors run the emulated kernels."""

    def decode(payload, out, **options):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "extension", lambda device_type: emulated)
            kernels._spec.cache_clear()
            payload.decode(out, **options)
        kernels._spec.cache_clear()
        return out

    return decode


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_decodes(decode_emulated, name, direction):
    """Every way through the decode kernels: payloads stored along and across, outputs of every layout and type, whole and
    ragged runs, NaN and Inf; both switches of NVFP4."""
    fmt, turn = parse_format(name), 0
    switches = ({}, {"outer": False}, {"inverse_rht": False}) if fmt.bits == 4 else ({},)
    for shape, transposed in itertools.product((*SHAPES, (70, 1040), (0, 8)), (False, True)):
        x = cast_input(make_input(("normal", "special", "tiny")[turn % 3], shape), "bfloat16")
        (state,) = new_states([name], "cpu")
        payload = cast(x, fmt, direction, state=state, rng=new_rng("cpu", *shape), transposed=transposed)
        for dtype, layout in itertools.product(DTYPES, ("contiguous", LAYOUTS[1 + turn % 3])):
            options, turn = switches[turn % len(switches)], turn + 1
            expected = payload.decode(torch.empty(shape, dtype=getattr(torch, dtype)), **options)
            out = lay_out(torch.full(shape, -3.0, dtype=expected.dtype), layout)
            decode_emulated(payload, out, **options)
            what = f"{name} {direction} {shape} {'across' if transposed else 'along'} to {dtype} {layout} {options}"
            assert_bitwise_equal(out, expected, what, any_nan=dtype == "float32")


@pytest.mark.parametrize("row", [None, *FORMATS])
def test_sums_of_columns(emulated, row):
    """Sums taken on the way are those of the fixed order, whatever is cast; the bytes of the casts stay."""
    shapes = (*SHAPES, (0, 32), (1, 300), (300, 1))
    for turn, (col, shape) in enumerate(itertools.product((None, "mxfp8_e4m3", "nvfp4:rht,sr"), shapes)):
        x = lay_out(cast_input(make_input("normal", shape), ("bfloat16", "float32", "float16")[turn % 3]), LAYOUTS[turn % 4])
        outs = [None if n is None else empty(n, d, x, d == COLUMNWISE) for n, d in zip((row, col), DIRECTIONS)]
        sums = torch.full((-(-shape[0] // emulated.PANEL_ROWS), shape[1]), float("nan"))
        cast_emulated(emulated, outs, x, new_states([n or "nvfp4" for n in (row, col)], "cpu"), new_rng("cpu", *shape), sums=sums)
        assert torch.equal(sums, panel_sums(x)), (row, col, shape)
        for out, name in zip(outs, (row, col)):
            if out is not None:
                (own,) = new_states([name], "cpu")
                keys = dict(state=own, rng=new_rng("cpu", *shape), transposed=out.direction == COLUMNWISE)
                assert_same(out, cast(x, parse_format(name), out.direction, **keys), f"{row} | {col} {shape} {out.direction}")


GATED = ("fp8_delayed_e5m2", "fp8_block_e4m3", "mxfp8_e4m3", "mxfp8_e5m2:2d")
DTYPES = ("bfloat16", "float16", "float32")


def sigmoid(gate):
    """As the kernels' plain code computes it."""
    return 1.0 / (1.0 + exp_minus(gate))


def exp_minus(x):
    return torch.exp2((-x * 1.44269504088896340736).double()).float()


def swiglu(x):
    gate, up = x.float().chunk(2, dim=-1)
    return (gate / (1.0 + exp_minus(gate)) * up).to(x.dtype)


def swiglu_gradient(dy, x):
    gate, up, d = *x.float().chunk(2, dim=-1), dy.float()
    s = sigmoid(gate)
    fused = (gate.double() * (1.0 - s).double() + 1.0).float()  # rounded once, as the hardware does
    return torch.cat((d * up * s * fused, d * gate * s), dim=-1).to(x.dtype)


def check_computed(emulated, y, x, names, **computed):
    """Payloads, sums and histories of a cast that computes y are those of y cast."""
    sums = torch.full((-(-y.shape[0] // emulated.PANEL_ROWS), y.shape[1]), float("nan"))
    for taken in (sums, None):  # without sums 16-bit tensors are held in registers
        outs = [empty(n, d, x, d == COLUMNWISE) for n, d in zip(names, DIRECTIONS)]
        states = new_states(names, "cpu")
        cast_emulated(emulated, outs, x, states, new_rng("cpu", *y.shape), sums=taken, **computed)
        for out, name, state in zip(outs, names, states):
            (own,) = new_states([name], "cpu")
            expected = cast(y, parse_format(name), out.direction, state=own, transposed=out.direction == COLUMNWISE)
            assert_same(out, expected, f"{names} {tuple(y.shape)} {out.direction}")
            if own is not None:
                assert_bitwise_equal(state.history, own.history, "history", any_nan=True)
    assert torch.equal(sums.nan_to_num(7.0), panel_sums(y).nan_to_num(7.0)), (names, y.shape)


@pytest.mark.parametrize("row", GATED)
def test_swiglu_on_the_way(emulated, row):
    """The payloads and sums are those of the rounded silu(gate) * up, never in memory; NaN and Inf too."""
    for turn, (col, (M, K)) in enumerate(itertools.product(GATED, SHAPES)):
        x = cast_input(make_input("special" if turn % 2 else "normal", (M, 2 * K)), DTYPES[turn % 3])
        gate, up = lay_out(x, LAYOUTS[turn % 4]).chunk(2, dim=1)
        check_computed(emulated, swiglu(x), up, (row, col), gate=gate)


@pytest.mark.parametrize("row", GATED)
def test_the_gradient_of_swiglu_on_the_way(emulated, row):
    """The same of the gradients of gate and up, also where a tile holds the end of one and the start of the other."""
    for turn, (col, (M, F)) in enumerate(itertools.product(GATED, SHAPES)):
        kind, dtype = "special" if turn % 2 else "normal", DTYPES[turn % 3]
        x, dy = (cast_input(make_input(kind, (M, width)), dtype) for width in (2 * F, F + 8 * (turn % 3)))
        dy = dy[:, turn % 3 :][:, :F]
        check_computed(emulated, swiglu_gradient(dy, x), lay_out(x, LAYOUTS[turn // 4 % 4]), (row, col), grad=dy)


@pytest.mark.parametrize("row", STRIP_COMPUTED)
def test_swiglu_and_its_gradient_in_registers(emulated, row):
    """Of whole tensors, either direction alone too; M cut, K cut (of the product), rows apart."""
    for x, gate_up, dy, names in computed_strip_cases(row):
        forth, back = (swiglu(x), gate_up[1], dict(gate=gate_up[0])), (swiglu_gradient(dy, x), x, dict(grad=dy))
        for y, read, computed in (forth, back):
            states = new_states(names, "cpu")
            outs = [n and empty(n, d, read, d == COLUMNWISE) for n, d in zip(names, DIRECTIONS)]
            cast_emulated(emulated, outs, read, states, new_rng("cpu", *y.shape), **computed)
            check_strips(y, names, (None, None), (False, True), outs, states)


class Plain(torch.autograd.Function):
    """SwiGLU as two kernels of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return swiglu(x)

    @staticmethod
    def backward(ctx, dy):
        return swiglu_gradient(dy, *ctx.saved_tensors)


@pytest.fixture
def emulated_linears(emulated, monkeypatch):
    """Linears on the CPU whose casts are the emulated ones."""
    monkeypatch.setattr(kernels, "extension", lambda device_type: emulated)
    kernels._spec.cache_clear()
    yield
    kernels._spec.cache_clear()


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "fp8_delayed", "fp8_current", "bf16"])
def test_linears_around_swiglu(emulated_linears, recipe):
    """Output, gradients, histories and counts of two linears with SwiGLU in their casts and between them; the gradient of
    fc1's output is never there in high precision."""
    gated_cast = pytest.importorskip("megatron_hybrid.gated_cast", reason="needs triton")
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        made = dict(recipe=recipe, dtype=torch.bfloat16)
        fc1, fc2 = mh.HybridLinear(64, 320, bias=False, name="fc1", **made), mh.HybridLinear(160, 32, name="fc2", **made)
        ctl, seen = mh.prepare(torch.nn.ModuleList((fc1, fc2))), []
        for step in (1, 2):
            ctl.begin_step(step)
            x = torch.randn(2, 70, 64).bfloat16().requires_grad_()
            h = fc1(x)
            casts = gated_cast.swiglu_casts(h, fc2.hq, fc2.weight, training=True)
            assert tuple(c is not None for c in casts) == (recipe in ("mxfp8", "fp8_block", "fp8_delayed"),) * 2
            y = gated_cast.SwigluCast.apply(h, *casts) if inside and any(casts) else Plain.apply(h)
            h.grad_fn.register_prehook(lambda grads: seen.append(type(grads[0])))
            out = fc2(y)
            out.backward(torch.randn(2, 70, 32).bfloat16())
            ctl.end_step()
            weights = [p.grad for layer in (fc1, fc2) for p in layer.parameters()]
            buffers = [b for layer in (fc1, fc2) for _, b in layer.hq.named_buffers()]
            found.append([out.detach(), x.grad, *weights, *(b.clone() for b in buffers)])
        assert set(seen) == {HybridTensor if inside and any(casts) else torch.Tensor}
        found.append(fc1.plan.calls)
    for a, b in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        assert a == b if isinstance(a, dict) else all(map(torch.equal, a, b))


class PlainWeighted(torch.autograd.Function):
    """Weighted SwiGLU as kernels of its own."""

    @staticmethod
    def forward(ctx, x, weights):
        ctx.save_for_backward(x, weights)
        return weighted_swiglu(x, weights.unsqueeze(1), torch.zeros(()))[0]

    @staticmethod
    def backward(ctx, dy):
        x, weights = ctx.saved_tensors
        _, dx, terms = weighted_swiglu(x, weights.unsqueeze(1), dy)
        return dx, terms.sum(1).float()


@pytest.mark.parametrize("sizes", [[0, 1, 44, 7], [130, 3, 0, 260]])
def test_experts_around_swiglu(emulated_linears, monkeypatch, sizes):
    """Results and gradients of two grouped linears with SwiGLU in their casts and between them; neither SwiGLU's result
    nor the gradient of fc1's output is ever there in high precision."""
    gated_cast = pytest.importorskip("megatron_hybrid.gated_cast", reason="needs triton")
    monkeypatch.setattr("megatron_hybrid.ops_triton.reason", lambda device: None)  # casts of groups on the CPU too
    T, E, K, F, found = sum(sizes), len(sizes), 128, 256, []
    for inside in (True, False):
        made = dict(recipe="fp8_block", dtype=torch.bfloat16)
        torch.manual_seed(0)
        fc1 = mh.HybridGroupedLinear(E, K, 2 * F, name="fc1", **made)
        fc2 = mh.HybridGroupedLinear(E, F, K, name="fc2", **made)
        mh.prepare(torch.nn.ModuleList((fc1, fc2))).begin_step(1)
        x, weights = torch.randn(T, K).bfloat16().requires_grad_(), torch.rand(T).requires_grad_()
        groups, seen = Groups(sizes, E, T, x.device), []
        h = fc1(x, groups)
        if inside:
            forth, back = fc2.call_for_computed(h, groups), gated_cast.call_for_gradient(h)
            y = gated_cast.WeightedSwigluCast.apply(h, weights, None, forth, back)
        else:
            y = PlainWeighted.apply(h, weights)
        h.grad_fn.register_prehook(lambda grads: seen.append(type(grads[0])))
        seen.append(type(y))
        out = fc2(y, groups)
        out.backward(torch.randn(T, K).bfloat16())
        assert seen == [GroupedPayloads if inside else torch.Tensor] * 2
        found.append([weights.grad, out.detach(), x.grad, fc1.weight.grad, fc2.weight.grad])
    (dw, *inside), (dw_apart, *apart) = found
    torch.testing.assert_close(dw, dw_apart, rtol=1e-5, atol=1e-6)
    assert all(t.any() for t in inside) and all(map(torch.equal, inside, apart))


def the_map(sizes):
    """`ops_triton.grouped_gemm.block_map` of host sizes: ends, and (group, first row, rows) of every block."""
    blocks, ends, row = [], [], 0
    for group, size in enumerate(sizes):
        blocks += [(group, row + at, min(128, size - at)) for at in range(0, size, 128)]
        row, ends = row + size, [*ends, len(blocks)]
    room = len(blocks) + 2  # as where only the device knows the sizes; what is behind the last block means nothing
    padded = torch.full((3, room), -(1 << 30), dtype=torch.int32)
    padded[:, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32).T if blocks else padded[:, :0]
    return torch.tensor(ends, dtype=torch.int32), padded


@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "sizes", [[5, 0, 300, 128, 1], [0, 0], [0], [700], [0] * 300 + [129], [(37 * i) % 300 for i in range(600)]]
)
def test_map_of_groups(emulated, sizes, wide):
    """Of more groups and blocks than a thread block has threads too; what means nothing is 0."""
    ends, blocks = the_map(sizes)
    sizes, count = torch.tensor(sizes, dtype=wide), blocks.shape[1]
    found = [torch.full_like(t, -7) for t in (ends, blocks)]
    emulated.group_map(sizes.data_ptr(), wide == torch.int64, len(sizes), count, *(f.data_ptr() for f in found), 0, 0)
    expected = ends, blocks.clamp(min=0)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, block_map(sizes, count), expected))


GROUP_SIZES = [7, 0, 300, 128, 1, 44]
GROUP_FORMATS = [  # by rows, by columns
    ("fp8_block_e4m3", "fp8_block_e4m3"), ("fp8_rowwise_e4m3", "fp8_rowwise_e4m3"),
    ("fp8_rowwise_e5m2", "fp8_block_e5m2"), ("fp8_block_e5m2", "fp8_rowwise_e5m2"),
]  # fmt: skip


class GroupCasts:
    """Memory for payloads of all groups of `GROUP_SIZES` in a pair of formats, full of what casts must overwrite."""

    def __init__(self, module, formats, K):
        self.formats = [parse_format(name) for name in formats]
        self.whole = [fmt.outer_axis == "row" for fmt in self.formats]
        T, E, (self.ends, self.blocks) = sum(GROUP_SIZES), len(GROUP_SIZES), the_map(GROUP_SIZES)
        count = self.blocks.shape[1]
        self.codes = [torch.full(shape, 0xAA, dtype=torch.uint8) for shape in ((T, K), (K, count * 128))]
        shapes = (T, 1 if self.whole[0] else -(-K // 128)), (E if self.whole[1] else count, K)
        self.scale = [torch.full(shape, float("nan")) for shape in shapes]
        self.amax = [torch.zeros(T, 1), torch.zeros(E, K)]
        self._specs = [module_spec(module, f, d, torch.device("cpu")) for f, d in zip(self.formats, DIRECTIONS)]
        self._module = module

    def __call__(self, x, *, choice=None, with_rows=True, weights=None, gate=0, grad=(0, 0)):
        """Amaxes, and casts from them. choice: of copies, three for each row of x. Others: as extensions take them."""
        by = (0, 1) if choice is None else (choice.data_ptr(), 3)
        sizes = len(GROUP_SIZES), self.blocks.shape[1], sum(GROUP_SIZES)
        groups = (self.ends.data_ptr(), self.blocks.data_ptr(), *sizes, *by)
        rows, columns = (kernels._ptr(t) for t in self.amax)
        matrix, of_rows = kernels._matrix(x), rows if with_rows else 0
        self._module.group_amax(*matrix, groups, columns, of_rows, 0, 0, gate, *grad, weights)
        row, column = (
            (spec, codes.data_ptr(), transposed, scale.data_ptr(), amax if whole else 0, False, 0, 0)
            for spec, codes, transposed, scale, amax, whole in zip(
                self._specs, self.codes, (False, True), self.scale, (rows, columns), self.whole
            )
        )
        self._module.quantize_pair(
            row if with_rows else None, column, *matrix, False, 0, gate, 0, 0, 0, 0, 0, *grad, groups=groups,
            weights=weights,
        )  # fmt: skip

    def check(self, rows, *, with_rows=True):
        """What was cast is what casts of each group of these rows alone give, zeros behind them."""
        first, (of_rows, of_columns) = 0, self.amax
        for group, part in enumerate(rows.split(GROUP_SIZES)):
            num = -(-len(part) // 128)
            if len(part):
                expected = cast(part.contiguous(), self.formats[1], COLUMNWISE, transposed=True)
                assert torch.equal(self.codes[1][:, first * 128 : first * 128 + len(part)], expected.qdata)
                found = self.scale[1][group] if self.whole[1] else self.scale[1][first : first + num]
                assert torch.equal(found.reshape(expected.scale.shape), expected.scale)
                amax = part.float().abs().amax(0)
                torch.testing.assert_close(of_columns[group], amax, rtol=0, atol=0, equal_nan=True)
            first += num
            assert (self.codes[1][:, first * 128 - (num * 128 - len(part)) : first * 128] == 0).all()
        assert (self.codes[1][:, first * 128 :] == 0xAA).all()
        if not with_rows:
            return
        expected = cast(rows.contiguous(), self.formats[0], ROWWISE)
        assert torch.equal(self.codes[0], expected.qdata)
        assert torch.equal(self.scale[0], expected.scale.reshape(self.scale[0].shape))
        amax = rows.float().abs().amax(1, keepdim=True)
        torch.testing.assert_close(of_rows, amax, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("formats", GROUP_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "K, tokens, with_rows",
    [(256, None, True), (256, 70, False), (136, 70, True), (136, 480, True), (136, None, False), (33, 70, True)],
)
def test_groups(emulated, formats, dtype, K, tokens, with_rows):
    """All groups' columns, and the rows beside them, of rows and of copies; a place without a choice has the first."""
    T, g = sum(GROUP_SIZES), torch.Generator().manual_seed(1)
    x = (torch.randn(tokens or T, K, generator=g) * 8).to(dtype)
    x[3, 7], x[10], x[11, 1], x[12, 2] = float("nan"), 0, float("-inf"), float("inf")
    choice = torch.randint(0, (tokens or T) * 3, (T,), generator=g, dtype=torch.int32)
    choice[40], choice[-3:] = -1, -1
    casts = GroupCasts(emulated, formats, K)
    casts(x, choice=choice if tokens else None, with_rows=with_rows)
    casts.check(x[choice.long().clamp(min=0) // 3] if tokens else x, with_rows=with_rows)


def weighted_swiglu(x, w, dy):
    """Its result, its gradient and the terms of the weights', rounded where kernels round; w (T, 1)."""
    gate, up = x.float().chunk(2, dim=1)
    d, s = dy.float(), sigmoid(gate)
    fused = (gate.double() * (1.0 - s).double() + 1.0).float()
    gradient = torch.cat((d * w * up * s * fused, d * w * gate * s), dim=1)
    return (gate / (1.0 + exp_minus(gate)) * up * w).to(x.dtype), gradient.to(x.dtype), (d * gate * s * up).double()


@pytest.mark.parametrize("formats", GROUP_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("F, by", [(128, None), (256, torch.float32), (136, torch.bfloat16), (128, torch.float16)])
def test_groups_of_swiglu(emulated, formats, dtype, F, by):
    """SwiGLU of all groups and its gradient, times the rows' weights, cast as they are computed, give the codes, scales
    and amaxes of what is rounded first; the weights' gradients too."""
    T, g = sum(GROUP_SIZES), torch.Generator().manual_seed(1)
    x, dy = torch.randn(T, 2 * F, generator=g).to(dtype), torch.randn(T, F + 8, generator=g).to(dtype)[:, :F]
    x[3, 7], x[10], x[11, F + 1], x[12, 5], dy[20, 2] = float("nan"), 0, float("-inf"), float("inf"), float("nan")
    dots, w, pointers = torch.full((T, -(-F // 128)), float("nan")), torch.ones(T, 1), None
    if by is not None:
        weights, places = torch.rand(2 * T, generator=g).to(by), torch.randperm(2 * T, generator=g)[:T].int()
        places[30] = -1
        w = torch.where(places < 0, torch.zeros(()), weights[places.long()].float()).unsqueeze(1)
        pointers = kernels.weights_of(weights, places, dots)
    product, gradient, terms = weighted_swiglu(x, w, dy)
    gate, up = x.chunk(2, dim=1)
    casts = GroupCasts(emulated, formats, F)
    casts(up, weights=pointers, gate=gate.data_ptr())
    casts.check(product)
    if F % 128:
        with pytest.raises(RuntimeError, match="rows of groups are computed in 16 bits"):
            GroupCasts(emulated, formats, 2 * F)(x, grad=(dy.data_ptr(), dy.stride(0)))
        return
    casts = GroupCasts(emulated, formats, 2 * F)
    casts(x, weights=pointers, grad=(dy.data_ptr(), dy.stride(0)))
    casts.check(gradient)
    if by is not None:
        torch.testing.assert_close(dots.double().sum(1), terms.sum(1), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", ["fp8_block_e4m3", "fp8_rowwise_e4m3"])
@pytest.mark.parametrize("copied, with_rows", [(False, True), (False, False), (True, False), (True, True)])
def test_groups_as_grouped_linears_cast_them(emulated, monkeypatch, name, copied, with_rows):
    """`GroupCast` asks the kernels for what torch's operations and a cast by rows give."""
    fmt, sizes, K = parse_format(name), [5, 0, 300, 128, 1], 256
    g = torch.Generator().manual_seed(2)
    routed = torch.rand(sum(sizes), len(sizes), generator=g) < 0.4
    copies = RowMap.of(routed, int(routed.sum())) if copied else None
    sizes = routed.sum(0).tolist() if copied else sizes
    x = torch.randn(routed.shape[0], K, generator=g).bfloat16()
    layout = Groups(sizes, len(sizes), sum(sizes), x.device).layout(128)
    if fmt.outer_axis == "row":
        expected = with_torch(x, fmt, layout, copies)
    else:
        expected = cast(layout.spread(x, copies), fmt, COLUMNWISE, transposed=True)
    by_rows = cast(copies.expand(x) if copied else x, fmt, ROWWISE)
    monkeypatch.setattr(kernels, "extension", lambda device_type: emulated)
    kernels._spec.cache_clear()
    try:
        rows, columns = GroupCast(fmt if with_rows else None, fmt)(x, layout, copies)
    finally:
        kernels._spec.cache_clear()
    assert (columns.shape, columns.dtype, columns.transposed) == ((layout.rows, K), x.dtype, True)
    for found, wanted in zip(columns.buffers().values(), expected.buffers().values(), strict=True):
        assert torch.equal(found, wanted)
    assert (rows is not None) == with_rows
    if with_rows:
        assert rows.shape == by_rows.shape
        assert torch.equal(rows.qdata, by_rows.qdata) and torch.equal(rows.scale, by_rows.scale)


def module_spec(module, fmt, direction, device):
    plain = kernels.spec(fmt, direction, device)
    fields = ("element", "scale_rule", "axis", "block_m", "block_k", "pow2", "eps", "outer_rows", "rht", "sr")
    return module.FormatSpec(**{f: getattr(plain, f) for f in fields})


@pytest.mark.skipif(node.library() is None, reason="this build has no _C_node")
@pytest.mark.parametrize("name", ["fp8_block", "fp8_rowwise", "rows, then blocks"])
@pytest.mark.parametrize("most", [None, 1, 2])
def test_grouped_linears_by_the_node(emulated, monkeypatch, name, most):
    """By CUDA's own casts of all groups: the bits and the launches of Python's function, of rows and of tokens."""
    cases = pytest.importorskip("test_grouped_node", reason="needs triton")
    stand_in = cases.as_on_hopper(monkeypatch, emulated)
    counted = ctypes.c_int.in_dll(ctypes.CDLL(emulated.__file__), "emulated_launches")
    where, sizes = (None, torch.tensor([130, 0, 7, 60])) if most is None else cases.mapped(most, "cpu")
    T, tokens = int(sizes.sum()), 197 if most is None else cases.TOKENS
    groups = Groups(sizes.tolist(), cases.EXPERTS, T, torch.device("cpu")).between(copies=where, sums=where)
    x, dy = cases.data(tokens)
    found = []
    for m in cases.pair(name):
        m(x, groups)  # the weight is cast
        before = counted.value
        y, made, told = cases.results(m, x, dy, groups, stand_in=stand_in)
        found.append((made, told, counted.value - before, cases.is_by_node(y)))
    kernels._spec.cache_clear()
    (by_node, told, launches, is_node), (by_python, told_python, launches_python, is_python) = found
    assert (is_node, is_python) == (True, False) and told == told_python and launches == launches_python
    assert all(t.any() for t in by_node) and all(map(torch.equal, by_node, by_python)) and not stand_in.errors
