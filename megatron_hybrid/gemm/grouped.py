"""GEMMs of all groups of a grouped linear at once.

==========  ==================================  =====================================================================
gemm        operands                            result
==========  ==================================  =====================================================================
fprop       x (T, K) by rows, w (E, N, K)       y (T, N): each row with its group's weight
dgrad       dy (T, N) by rows, w (E, K, N)      dx (T, K)
wgrad       dy (T', N), x (T', K) by columns    dw (E, N, K): each group's rows contracted; T' with whole blocks
==========  ==================================  =====================================================================

A loop over the groups runs every pair on every device, bit for bit as dense linears would, but must know the groups'
sizes on the host. The others do not: one launch, and sizes stay on the device.
"""

from __future__ import annotations

from typing import Protocol

import torch

from .. import kernels, ops_triton
from ..formats import COLUMNWISE, ROWWISE
from ..groups import Groups
from ..plan import PlanError
from ..stacked import GroupedColumns, StackedWeight, rows_of
from ..storage import FP8_DTYPES, QuantizedStorage
from . import decoding, grouped_cuda
from .backend import GemmPair, finish
from .backends import bf16_operand, epilogue_scale, fits_bf16
from .scaled_mm import BLOCK, ROW, TILE, codes, scale_kind

_ALIGN = 16  # bytes: rows of a matrix, and groups along the contraction, begin at multiples of this
_FEW_ROWS = 1024  # an expert: decodes of weights where they are multiplied win at 256 and lose at 4096 (performance.md)
_HOPPER = (9, 0)
NO_OPERATORS = (
    "kernels of all groups are no operators: they take neither tensors without memory nor those that a graph is made of; "
    "run the forward so too, whose experts then run one by one"
)
_OWN_KINDS = {(ROW, ROW): grouped_cuda.ROW, (BLOCK, BLOCK): grouped_cuda.BLOCKS, (BLOCK, TILE): grouped_cuda.TILES}


class GroupedBackend(Protocol):
    """One way to run the gemms of all groups."""

    name: str

    def reason(self, pair: GemmPair, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        """None when it can run the pair for (E, N, K) weights, shape = (N, K), in this dtype; else why not."""

    def alignment(self, pair: GemmPair) -> int:
        """The multiple of rows at which groups of columns must begin; 1 for fprop and dgrad."""

    def prepared(self, pair: GemmPair) -> GroupedBackend:
        """The same for one pair, with what can be decided decided."""

    def rows(self, gemm: str, plans, a: QuantizedStorage, w: StackedWeight, groups: Groups, dtype) -> torch.Tensor:
        """fprop or dgrad. plans: one an expert, whose counts of gemms grow."""

    def contract(self, plans, a: GroupedColumns, b: GroupedColumns, dtype, accumulate_into=None) -> torch.Tensor:
        """wgrad, or added to `accumulate_into`, (E, N, K) or a list of E tensors (N, K)."""


class GroupedLoop:
    """The dense backends of the plan, group by group."""

    name = "loop"  # must know the sizes on the host

    def reason(self, pair, shape, dtype):
        return None

    def alignment(self, pair):
        return 1

    def prepared(self, pair):
        return self

    def rows(self, gemm, plans, a, w, groups, dtype):
        outputs, start = [], 0
        for expert, (plan, size) in enumerate(zip(plans, groups.host)):
            outputs.append(plan.run(gemm, rows_of(a, start, size), w.piece(expert), dtype))
            start += size
        return torch.cat(outputs)

    def contract(self, plans, a, b, dtype, accumulate_into=None):
        results = [
            plan.run(
                "wgrad", a.piece(expert), b.piece(expert), dtype,
                accumulate_into=None if accumulate_into is None else accumulate_into[expert],
            )
            for expert, plan in enumerate(plans)
        ]  # fmt: skip
        return torch.stack(results) if accumulate_into is None else accumulate_into


class GroupedMm:
    """`torch._grouped_mm` in bf16, for high precision and for formats whose decode is exact in bf16.

    Sums are in FP32 and rounded to bf16; outer scales are multiplied on after that, a second rounding.
    """

    name = "grouped_mm"

    def reason(self, pair, shape, dtype):
        if pair.device.type != "cuda":
            return f"needs a CUDA device, found {pair.device}"
        if dtype != torch.bfloat16:
            return f"needs bf16 tensors, found {dtype}"
        for fmt in (pair.a, pair.b):
            if not fits_bf16(fmt):
                return f"{fmt} does not decode to bf16 exactly"
            if fmt.is_quantized and pair.gemm == "wgrad" and fmt.outer_axis != "none":
                return f"{fmt} has a scale a group"
        return _unaligned(shape, 2)

    def alignment(self, pair):
        quantized = pair.gemm == "wgrad" and (pair.a.is_quantized or pair.b.is_quantized)
        return _ALIGN // 2 if quantized else 1  # high precision keeps its rows as they are, contraction not contiguous

    def prepared(self, pair):
        return self if pair.is_quantized else HighPrecisionMm()

    def rows(self, gemm, plans, a, w, groups, dtype):
        _count(plans, gemm)
        y = torch._grouped_mm(_readable(bf16_operand(a)), _bf16_stack(w).transpose(1, 2), offs=groups.layout(1).ends)
        by_row = epilogue_scale(a)
        by_col = epilogue_scale(w.payload) if isinstance(w.payload, QuantizedStorage) else None
        if by_row is not None and by_col is not None and ops_triton.reason(y.device) is None:
            from ..ops_triton.permute import scale_rows

            by_row = by_row.reshape(-1).expand(y.shape[0]).contiguous()
            return scale_rows(y, by_row, by_col.reshape(w.num, -1).contiguous(), groups.of_row)
        if by_row is not None:
            y = y * by_row.reshape(-1, 1)
        if by_col is not None:
            y = y * by_col.view(w.num, -1)[groups.of_row]
        return y.to(dtype)

    def contract(self, plans, a, b, dtype, accumulate_into=None):
        _count(plans, "wgrad")
        dw = torch._grouped_mm(_bf16_columns(a), _bf16_columns(b).T, offs=a.layout.ends)
        return _finish(dw, dtype, accumulate_into)


class HighPrecisionMm(GroupedMm):
    """`GroupedMm` of tensors as they are."""

    def rows(self, gemm, plans, a, w, groups, dtype):
        if not isinstance(w.payload, torch.Tensor):  # parameters that live quantized in the other direction
            return super().rows(gemm, plans, a, w, groups, dtype)
        _count(plans, gemm)
        b = w.payload.transpose(1, 2) if w.direction == ROWWISE else w.payload
        return torch._grouped_mm(_readable(a.qdata), b, offs=groups.layout(1).ends)

    def contract(self, plans, a, b, dtype, accumulate_into=None):
        _count(plans, "wgrad")
        dw = torch._grouped_mm(_readable(a.payload.qdata).t(), _readable(b.payload.qdata), offs=a.layout.ends)
        return _finish(dw, dtype, accumulate_into)


class GroupedDecoding(GroupedMm):
    """`GroupedMm` whose fprop and dgrad decode the weight where it is multiplied (decoding.py), on Hopper: each weight is
    read as codes, and none is written in bf16. Results are rounded once.

    most: rows an expert, on average, above which it is `GroupedMm`, whose products are faster and whose decodes of
    weights then weigh less; None: whatever their number.
    """

    name = "grouped_decoding"

    def __init__(self, most: int | None):
        self.most = most

    def reason(self, pair, shape, dtype):
        if pair.gemm == "wgrad":
            return "multiplies rows only"
        if (why := decoding.pair_reason(pair) or ops_triton.reason(pair.device)) is not None:
            return why
        rows_b, contraction = shape if pair.gemm == "fprop" else shape[::-1]
        return decoding.shape_reason(rows_b, contraction) or super().reason(pair, shape, dtype)

    def rows(self, gemm, plans, a, w, groups, dtype):
        few = self.most is None or groups.rows <= self.most * w.num
        y = decoding.multiply(a, w.by_rows(), w.num, groups.layout(grouped_cuda.BLOCK_ROWS).blocks) if few else None
        if y is None:
            return super().rows(gemm, plans, a, w, groups, dtype)
        _count(plans, gemm)
        return y


class GroupedFp8:
    """Own kernels: FP8 with scales a row, 1 x 128 blocks, 128 x 128 tiles, on Hopper. In CUDA (grouped_cuda.py) where
    they were built, else in Triton (ops_triton/grouped_gemm.py).

    Products are summed up in the tensor cores 128 at a time, or all of them where `accumulate: fast` lets scales a row
    do so. Results are rounded once, FP32 accumulators added to in place.
    """

    name = "grouped_fp8"

    def reason(self, pair, shape, dtype):
        if pair.device.capability != _HOPPER:
            return f"needs sm_90, found {pair.device}"
        if (why := ops_triton.reason(pair.device)) is not None:
            return why
        if (scale_kind(pair.a), scale_kind(pair.b)) not in _OWN_KINDS:
            offered = ", ".join(f"{a} x {b}" for a, b in _OWN_KINDS)
            return f"takes FP8 with FP32 scales ({offered}), found {pair.a} x {pair.b}"
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"gives bf16, fp16 or FP32, asked for {dtype}"
        return _unaligned(shape, 1)

    def alignment(self, pair):
        return grouped_cuda.BLOCK_ROWS if pair.gemm == "wgrad" else 1

    def prepared(self, pair):
        return PreparedFp8(pair)

    def rows(self, gemm, plans, a, w, groups, dtype):
        return self.prepared(getattr(plans[0], gemm).pair).rows(gemm, plans, a, w, groups, dtype)

    def contract(self, plans, a, b, dtype, accumulate_into=None):
        return self.prepared(plans[0].wgrad.pair).contract(plans, a, b, dtype, accumulate_into)


class PreparedFp8(GroupedFp8):
    """`GroupedFp8` of one pair of formats."""

    def __init__(self, pair: GemmPair):
        self.kind, self.fast = _OWN_KINDS[scale_kind(pair.a), scale_kind(pair.b)], _is_fast(pair)
        self.dtypes = FP8_DTYPES[pair.a.element], FP8_DTYPES[pair.b.element]
        self.e5m2 = pair.a.element == "e5m2", pair.b.element == "e5m2"

    def rows(self, gemm, plans, a, w, groups, dtype):
        _count(plans, gemm)
        s, where = w.by_rows(), groups.layout(grouped_cuda.BLOCK_ROWS).blocks
        out = torch.empty((a.shape[0], s.shape[0] // w.num), dtype=dtype, device=a.qdata.device)
        return self._run("rows", plans[0], a, s, out, where, a.shape[0], out.shape[1])

    def contract(self, plans, a, b, dtype, accumulate_into=None):
        _count(plans, "wgrad")
        x, y, num = a.payload, b.payload, a.layout.groups.num
        shape, total = (num, x.shape[1], y.shape[1]), accumulate_into
        add = isinstance(total, torch.Tensor) and total.is_contiguous() and total.shape == shape
        made = dtype if total is None else total[0].dtype
        out = total if add else torch.empty(shape, dtype=made, device=x.qdata.device)
        self._run("columns", plans[0], x, y, out, a.layout.blocks, shape[1], shape[2], add)
        return out if add else _finish(out, dtype, total)

    def _run(self, what: str, plan, a: QuantizedStorage, b: QuantizedStorage, out, where, rows_a: int, n: int, add=False):
        """`multiply_rows` or `multiply_columns` of payloads, packed: those of a part of a wider tensor are views.

        Raises `PlanError` for payloads without memory, as a backward under fake tensors makes them.
        """
        packed = codes(a).contiguous(), codes(b).contiguous()
        if kernels.traced(packed[0]) and not torch.compiler.is_compiling():
            raise PlanError(f"{plan.label}: {NO_OPERATORS}")
        tensors = *packed, a.scale.contiguous(), b.scale.contiguous(), out
        if grouped_cuda.takes(*tensors):
            return grouped_cuda.run(what, *tensors, where, rows_a, n, self.kind, self.fast, add, self.e5m2)
        from ..ops_triton import grouped_gemm

        a, b = (t.view(fp8) for t, fp8 in zip(tensors, self.dtypes))
        if what == "rows":
            return grouped_gemm.multiply_rows(a, b, *tensors[2:], where, self.kind, fast=self.fast)
        return grouped_gemm.multiply_columns(a, b, *tensors[2:], where, self.kind, fast=self.fast, add=add)


class ScaledGroupedMm:
    """`torch._scaled_grouped_mm`: E4M3 with a scale a row, on Hopper. The result is bf16."""

    name = "scaled_grouped_mm"

    def reason(self, pair, shape, dtype):
        if pair.device.capability != _HOPPER:
            return f"needs sm_90, found {pair.device}"
        if not all(scale_kind(fmt) == ROW and fmt.element == "e4m3" for fmt in (pair.a, pair.b)):
            return f"takes E4M3 with a scale a row, found {pair.a} x {pair.b}"
        if dtype != torch.bfloat16:
            return f"gives bf16, asked for {dtype}"
        return _unaligned(shape, 1)

    def alignment(self, pair):
        return _ALIGN if pair.gemm == "wgrad" else 1

    def prepared(self, pair):
        return self

    def rows(self, gemm, plans, a, w, groups, dtype):
        _count(plans, gemm)
        s = w.by_rows()
        w_codes = _e4m3(s.qdata).view(w.num, *w.shape)
        return torch._scaled_grouped_mm(
            _e4m3(a.qdata), w_codes.transpose(1, 2), a.scale.reshape(-1), s.scale.view(w.num, -1),
            offs=groups.layout(1).ends, out_dtype=torch.bfloat16, use_fast_accum=_is_fast(getattr(plans[0], gemm).pair),
        )  # fmt: skip

    def contract(self, plans, a, b, dtype, accumulate_into=None):
        _count(plans, "wgrad")
        dw = torch._scaled_grouped_mm(
            _e4m3(a.payload.qdata), _e4m3(b.payload.qdata).T, a.payload.scale.reshape(-1), b.payload.scale.reshape(-1),
            offs=a.layout.ends, out_dtype=torch.bfloat16, use_fast_accum=_is_fast(plans[0].wgrad.pair),
        )  # fmt: skip
        return _finish(dw, dtype, accumulate_into)


OWN, NATIVE, BF16, LOOP = GroupedFp8(), ScaledGroupedMm(), GroupedMm(), GroupedLoop()
DECODING, DECODING_ALWAYS = GroupedDecoding(_FEW_ROWS), GroupedDecoding(None)


def choose(step, shape: tuple[int, int], dtype: torch.dtype) -> GroupedBackend:
    """For a `GemmStep` of the experts' plan: what runs as the plan says, native or emulated, without the host first."""
    if step.native and step.pair.is_quantized:
        return next((b for b in (OWN, NATIVE) if b.reason(step.pair, shape, dtype) is None), LOOP)
    if step.backend.name == "reference":  # asked for by name
        return LOOP
    if DECODING.reason(step.pair, shape, dtype) is None:
        return DECODING_ALWAYS if step.backend.name == decoding.NAME else DECODING
    return LOOP if BF16.reason(step.pair, shape, dtype) else BF16


def _unaligned(shape: tuple[int, int], element_size: int) -> str | None:
    """Rows of every operand and result must begin at multiples of 16 bytes."""
    multiple = _ALIGN // element_size
    wrong = [size for size in shape if size % multiple]
    return f"N and K must be multiples of {multiple}, found {shape[0]} and {shape[1]}" if wrong else None


def _count(plans, gemm: str) -> None:
    """One gemm of every expert, on its plan's backend."""
    first = plans[0]
    first.calls[gemm, getattr(first, gemm).backend.name] += len(plans)


def _finish(dw: torch.Tensor, dtype, accumulate_into):
    """`finish` of (E, N, K), into one accumulator or into one an expert, without a copy in the accumulators' dtype."""
    if not isinstance(accumulate_into, list):
        return finish(dw, dtype, accumulate_into)
    torch._foreach_add_(accumulate_into, list(dw.unbind()))
    return accumulate_into


def _is_fast(pair: GemmPair) -> bool:
    """Sums of blocks are always promoted, to be scaled."""
    return pair.accumulate == "fast" and scale_kind(pair.a) == ROW


def _e4m3(qdata: torch.Tensor) -> torch.Tensor:
    return qdata.view(torch.float8_e4m3fn)


def _bf16_stack(w: StackedWeight) -> torch.Tensor:
    """(E, rows, contraction) in bf16, outer scales left out."""
    s, (rows, contraction) = w.payload, w.shape
    if isinstance(s, torch.Tensor):
        return w.high_precision()
    if s.direction == COLUMNWISE and contraction % (s.format.block(COLUMNWISE)[0] or 1) == 0:  # no block spans experts
        return bf16_operand(s).view(rows, w.num, contraction).transpose(0, 1)
    return bf16_operand(w.by_rows()).view(w.num, rows, contraction)


def _bf16_columns(columns: GroupedColumns) -> torch.Tensor:
    """(rows, T') in bf16: contraction contiguous where it was quantized."""
    return _readable(bf16_operand(columns.payload))


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x (M, K) as `torch._grouped_mm` reads it: rows or columns packed, which begin at multiples of 16 bytes.

    A copy of others: gradients of sums, which repeat one element, and parts of wider tensors.
    """
    (M, K), (down, across), multiple = x.shape, x.stride(), _ALIGN // x.element_size()
    by_rows = across == 1 and down >= K and down % multiple == 0
    by_columns = down == 1 and across >= M and across % multiple == 0
    if (by_rows or by_columns) and x.data_ptr() % _ALIGN == 0:
        return x
    packed = torch.contiguous_format
    return x.clone(memory_format=packed) if K % multiple == 0 else x.t().clone(memory_format=packed).t()
