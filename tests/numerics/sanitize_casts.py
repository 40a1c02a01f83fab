"""Every CUDA kernel of the casts on small ragged tensors, for compute-sanitizer; the bytes are compared with the CPU's.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/numerics/sanitize_casts.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/numerics/sanitize_casts.py
"""

import argparse
import itertools

import torch
from test_cast_pair import (
    FP4_STRIPS, LAYOUTS, NOOP_PAIRS, STRIP_COMPUTED, STRIP_FORMATS, WHOLE_ROWS, by_any_strips, check_fp4_strips,
    check_noop, check_pair, check_strip_cases, check_whole_rows, empty, lay_out, new_states,
)  # fmt: skip
from test_gated_cast import check_computed_strips

from megatron_hybrid import kernels
from megatron_hybrid.formats import COLUMNWISE, DIRECTIONS, ROWWISE, parse_format
from megatron_hybrid.gemm import grouped_cuda
from megatron_hybrid.grouped_columns import GroupCast, with_torch
from megatron_hybrid.groups import Groups
from megatron_hybrid.lean import OperandCast
from megatron_hybrid.ops_triton import swiglu
from megatron_hybrid.ops_triton.grouped_gemm import block_map
from megatron_hybrid.permutation import RowMap
from megatron_hybrid.quantizer import HybridQuantizer
from megatron_hybrid.storage import cast, cast_pair
from megatron_hybrid.testing.generators import cast_input, make_input

# one format a way of finding scales; FP4 without and with options
ROWS = ("fp8_current_e4m3", "fp8_rowwise_e4m3", "fp8_block_e5m2:2d", "mxfp8_e4m3", "nvfp4:row_scaled", "nvfp4:rht,sr")
COLUMNS = ("fp8_delayed_e5m2", "fp8_block_e4m3", "mxfp8_e5m2:2d", "nvfp4:2d", "nvfp4:row_scaled,rht", "nvfp4:sr")
SHAPES = ((145, 272), (67, 35))


def pairs() -> int:
    turn = 0
    for dtype, row, col in itertools.product(("bfloat16", "float16", "float32"), ROWS, COLUMNS):
        turn += 1
        x = lay_out(cast_input(make_input("special", SHAPES[turn % 2]), dtype), LAYOUTS[turn // 2 % 4])
        check_pair(x, (row, col), "cuda", f"{row} | {col} {dtype} {turn}", (turn % 5 == 0, turn % 3 != 0))
    return turn


def single_directions() -> int:
    turn = 0
    for dtype, name, direction in itertools.product(("bfloat16", "float32"), ROWS + COLUMNS, DIRECTIONS):
        turn += 1
        x = cast_input(make_input("normal", SHAPES[turn % 2]), dtype).cuda()
        out = empty(name, direction, x, turn % 3 == 0)
        (state,) = new_states([name], "cuda")
        if "sr" in name:
            continue
        cast_pair(*((out, None) if direction == ROWWISE else (None, out)), x, state=(state, state))
        for out_dtype, layout in itertools.product((torch.bfloat16, torch.float16, torch.float32), LAYOUTS[:2]):
            decoded = lay_out(torch.zeros(out.shape, dtype=out_dtype, device="cuda"), layout)
            out.decode(decoded, inverse_rht=turn % 2 == 0)
        fmt = parse_format(name)
        if (shape := fmt.amax_shape(*x.shape, direction)) is not None:
            kernels.amax(x, fmt, direction, torch.empty(shape, device="cuda"))
    return turn


def derived_columns() -> int:
    rows = [r for r in ROWS if "sr" not in r]
    for row, col in itertools.product(rows, ("mxfp8_e4m3", "fp8_block_e4m3")):
        x = cast_input(make_input("normal", SHAPES[0]), "bfloat16").cuda()
        outs = [empty(row, ROWWISE, x, False), empty(col, COLUMNWISE, x, True)]
        cast_pair(*outs, x, state=new_states((row, col), "cuda"), derived=True)
    return len(rows) * 2


def sums_and_gates() -> int:
    for turn, layout in enumerate(LAYOUTS):
        x = lay_out(cast_input(make_input("normal", SHAPES[turn % 2]), "bfloat16").cuda(), layout)
        both = OperandCast(HybridQuantizer("mxfp8_e4m3", "fp8_block_e4m3"), True, "cuda")
        parts = kernels.sum_parts(x)
        both(x, True, True, None, sums=parts)
        assert torch.equal(parts.sum(dim=0).bfloat16(), kernels.column_sums(x))
        gate, up = lay_out(torch.cat((x, x), dim=1), layout).chunk(2, dim=1)
        both(up, True, True, None, sums=parts, gate=gate)
    return 2 * len(LAYOUTS)


def in_registers() -> int:
    """Casts by strips, every kind of scales beside every other; rows held whole; calls that may leave all as it is."""
    calls = sum(check_strip_cases(row, "cuda") for row in STRIP_FORMATS)
    calls += sum(check_fp4_strips(name, "cuda", by_any_strips) for name in FP4_STRIPS)
    check_whole_rows("cuda", lambda out, x: cast_pair(*((out, None) if out.direction == ROWWISE else (None, out)), x))
    for names in NOOP_PAIRS:
        check_noop(names, "cuda", lambda outs, x, states, noop: cast_pair(*outs, x, state=states, noop=noop))
    calls += sum(check_computed_strips(row) for row in STRIP_COMPUTED)
    return calls + 2 * len(WHOLE_ROWS) + 2 * len(NOOP_PAIRS)


def groups() -> int:
    """Rows and columns of groups, of rows that are there and of copies: what casts of the columns without a map give."""
    sizes, turn = [5, 0, 300, 128, 1], 0
    T, num = sum(sizes), len(sizes)
    for dtype, name, K, copied in itertools.product(
        (torch.bfloat16, torch.float32), ("fp8_block_e4m3", "fp8_rowwise_e4m3"), (272, 48), (False, True)
    ):
        turn += 1
        fmt, layout = parse_format(name), Groups(sizes, num, T, torch.device("cuda")).layout(128)
        x = torch.randn(70 if copied else T, K, device="cuda").to(dtype)
        routed = torch.zeros(70, num, dtype=torch.bool, device="cuda")
        routed[torch.randperm(70 * num, device="cuda")[: T // 2] // num, torch.arange(T // 2, device="cuda") % num] = True
        copies = RowMap.of(routed, int(routed.sum())) if copied else None
        if copied:
            layout = Groups(routed.sum(0).tolist(), num, copies.num_rows, torch.device("cuda")).layout(128)
        rows, columns = GroupCast(fmt, fmt)(x, layout, copies)
        spread = layout.spread(x, copies)
        expected = with_torch(x, fmt, layout, copies) if "rowwise" in name else cast(spread, fmt, COLUMNWISE, transposed=True)
        assert torch.equal(columns.qdata, expected.qdata)
        assert torch.equal(rows.qdata, cast(copies.expand(x) if copied else x, fmt, ROWWISE).qdata)
    return turn


def groups_of_swiglu() -> int:
    """SwiGLU of groups and its gradient, weighted, cast as they are computed: what casts after kernels apart give."""
    sizes, turn = [7, 0, 300, 128, 1, 44], 0
    T, layout = sum(sizes), Groups(sizes, len(sizes), sum(sizes), torch.device("cuda")).layout(128)
    for dtype, name, F in itertools.product(
        (torch.bfloat16, torch.float16), ("fp8_block_e4m3", "fp8_block_e5m2", "fp8_rowwise_e4m3"), (128, 136, 256)
    ):
        turn += 1
        both = GroupCast(parse_format(name), parse_format(name))
        x, dy = (torch.randn(T, n, device="cuda").to(dtype) for n in (2 * F, F))
        weights, places = torch.rand(2 * T, device="cuda").to(dtype), torch.arange(T, dtype=torch.int32, device="cuda")
        places[3::5] = -1
        given = torch.where(places < 0, 0, weights[:T]).contiguous()
        gate, up = x.chunk(2, dim=1)
        cases = [(up, dict(gate=gate), swiglu.weighted_product(x, given))]
        dots = torch.empty(T, F // 128, device="cuda")
        if F % 128 == 0:
            cases.append((x, dict(grad=dy), swiglu.weighted_gradient(dy, x, given)[0]))
        for of, computed, expected in cases:
            found = both(of, layout, weights=kernels.weights_of(weights, places, dots), **computed)
            assert all(torch.equal(a.qdata, b.qdata) for a, b in zip(found, both(expected, layout), strict=True))
    return 2 * turn


def products() -> int:
    """Grouped FP8 GEMMs over ragged groups and sizes, every kind of scales."""
    sizes, turn = torch.tensor([5, 0, 300, 128, 1], dtype=torch.int32, device="cuda"), 0
    where, T, E = block_map(sizes, 9), 434, 5
    codes = lambda *shape: torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)  # noqa: E731
    for (kind, fast), N, K in itertools.product(((0, True), (0, False), (1, False), (2, False)), (128, 384), (144, 272)):
        turn += 1
        out = torch.empty(T, N, dtype=torch.bfloat16, device="cuda")
        scale = torch.ones(E * N * 3, device="cuda")
        grouped_cuda.multiply_rows(codes(T, K), codes(E * N, K), scale[: T * 3], scale, out, where, kind, fast=fast)
        if kind < 2:
            dw = torch.empty(E, N, K, device="cuda")
            for_columns = torch.ones(9 * 384, device="cuda")
            grouped_cuda.multiply_columns(
                codes(N, 9 * 128), codes(K, 9 * 128), for_columns, for_columns, dw, where, kind, fast=fast, add=False
            )
    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", action="store_true", help="grouped FP8 GEMMs too (memcheck; needs Hopper)")
    args = parser.parse_args()
    calls = pairs() + single_directions() + derived_columns() + sums_and_gates() + groups() + groups_of_swiglu()
    calls += in_registers()
    multiplied = f", {products()} products" if args.products else ""
    torch.cuda.synchronize()
    print(f"{calls} casts, bytes as on the CPU{multiplied}")


if __name__ == "__main__":
    main()
