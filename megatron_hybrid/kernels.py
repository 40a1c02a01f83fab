"""The one door to the compiled kernels: torch tensors in, raw pointers out.

``csrc`` knows neither torch nor Python objects: its functions take pointers, sizes, strides and (on CUDA) a
stream, allocate nothing and never synchronise. The CPU extension ``megatron_hybrid._C`` and the CUDA one
``megatron_hybrid._C_cuda`` export the same functions; the tensor's device picks one, at call time.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass

import torch

from .formats import COLUMNWISE, DIRECTIONS, ELEMENTS, ROWWISE, Format

_MODULES = {"cpu": "megatron_hybrid._C", "cuda": "megatron_hybrid._C_cuda"}
SOURCE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INTERFACE = 11  # csrc/interface.h
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))
_SCALE_RULES = {"none": 0, "fp32": 1, "e8m0": 2, "e4m3_amax": 3}


@functools.lru_cache(maxsize=None)
def extension(device_type: str):
    """The compiled module for a device type. Raises ``RuntimeError`` saying how to build it when it is missing."""
    name = _MODULES.get(device_type)
    if name is None:
        raise RuntimeError(f"no kernels for device type {device_type!r}; supported: {', '.join(_MODULES)}")
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        need = "a C++17 compiler" if device_type == "cpu" else "nvcc on PATH"
        raise RuntimeError(
            f"the {device_type} kernels ({name}) are not built or cannot be loaded: {exc}. "
            f"Build them with `pip install -e . --no-build-isolation` ({need} required)."
        ) from exc


def fits(module) -> bool:
    """Whether an extension is there, of the time of this file."""
    return getattr(module, "INTERFACE", None) == _INTERFACE


@functools.lru_cache(maxsize=None)
def _spec(device_type: str, fmt: Format, direction: str):
    return extension(device_type).FormatSpec(**spec_fields(fmt, direction))


def spec_fields(fmt: Format, direction: str) -> dict:
    """The C++ description of one direction of a format, by field.

    ``block_m``/``block_k``: the scale block in the (M, K) tensor, 0 for the whole extent. ``axis``: 0 when
    the contraction runs along K (rowwise), 1 when along M (columnwise).
    """
    bm, bk = fmt.block(direction)
    return dict(
        element=tuple(ELEMENTS).index(fmt.element),  # 0 e4m3, 1 e5m2, 2 e2m1
        scale_rule=_SCALE_RULES[fmt.scale],
        axis=0 if direction == ROWWISE else 1,
        block_m=bm or 0,
        block_k=bk or 0,
        pow2=fmt.pow2,
        eps=fmt.eps,
        outer_rows=fmt.outer_axis == "row",
        rht=fmt.rht,
        sr=fmt.sr,
    )


def spec(fmt: Format, direction: str, device: torch.device):
    return _spec(device.type, fmt, direction)


def _where(t: torch.Tensor) -> tuple[int, int]:
    """Where a call runs: the tensor's CUDA device and that device's current stream, or torch's CPU threads."""
    if t.device.type == "cuda":
        index = t.device.index
        return torch._C._cuda_getCurrentRawStream(index), index  # torch.cuda.current_stream makes an object a call
    return 0, torch.get_num_threads()


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """`x`; of a view that stands for the negative of what lies in memory (the imaginary part of a conjugate) a copy that is."""
    return x.resolve_neg() if x.is_neg() else x


def _ptr(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _matrix(x: torch.Tensor) -> tuple:
    """Pointer, dtype code, M, K and both strides (in elements) of a 2-D high-precision tensor."""
    if x.dim() != 2:
        raise ValueError(f"kernels take a 2-D tensor, found shape {tuple(x.shape)}")
    code = SOURCE_CODES.get(x.dtype)
    if code is None:
        raise ValueError(f"cannot quantize dtype {x.dtype}; supported: float32, bfloat16, float16")
    return x.data_ptr(), code, x.shape[0], x.shape[1], x.stride(0), x.stride(1)


def traced(t: torch.Tensor) -> bool:
    """True under torch.compile, export, make_fx, and for fake, functional or meta tensors: the call must be an operator."""
    if torch.compiler.is_compiling() or type(t) not in _PLAIN or t.is_meta:
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(k) is not None for k in _TRACERS)


def _operators():
    from . import ops  # registers them

    return ops


def amax(x: torch.Tensor, fmt: Format, direction: str, out: torch.Tensor) -> torch.Tensor:
    """Outer amaxes of ``x`` (M, K) for a cast: float32 ``out`` of ``fmt.amax_shape``; after the Hadamard
    transform where the format has one. Per-tensor and per-row FP8 propagate NaN; NVFP4 ignores it."""
    if traced(x):
        _operators().amax_(x, str(fmt), direction, out)
        return out
    x = in_memory(x)
    extension(x.device.type).amax(spec(fmt, direction, x.device), *_matrix(x), out.data_ptr(), *_where(x))
    return out


def quantize(x, fmt, direction, *, qdata, scale, amax=None, transposed=False, fixed_scale=False, rng=None,
             row_ids=None, noop=None):  # fmt: skip
    """Cast ``x`` (M, K) into preallocated ``qdata`` and ``scale``.

    qdata: uint8, contiguous, (M, K) or, ``transposed``, (K, M); FP4 packs two codes a byte along its last
    dimension, the even one in the low nibble, ceil(last/2) bytes a row. scale: ``fmt.scale_shape``, contiguous;
    float32 decode scales (fp32 rule), or uint8 E8M0 / E4M3 bytes. amax: float32 ``fmt.amax_shape``, read, for
    formats that have an outer amax. fixed_scale: `amax` holds the *encode scale* itself (delayed scaling).
    rng: int64 tensor (seed, tensor_id, step * microbatches + microbatch, row offset, column offset, global K)
    on x's device, for `sr`; row_ids: int64 (M,) global row of each row, instead of the row offset. noop: int32 device
    flag; non-zero leaves every output untouched.
    """
    if traced(x):
        _operators().quantize_(x, str(fmt), direction, qdata, scale, amax, transposed, fixed_scale, rng, row_ids, noop)
        return
    x = in_memory(x)
    extension(x.device.type).quantize(
        spec(fmt, direction, x.device), *_matrix(x), _ptr(qdata), transposed, _ptr(scale), _ptr(amax), fixed_scale,
        _ptr(rng), _ptr(row_ids), _ptr(noop), *_where(x)
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Side:
    """One direction of a `quantize_pair` call; buffers as in `quantize`.

    measured: None: `amax` is known. A tensor: the call takes x's own amax as well, and puts it there before it reads
    `amax`, which may be the same tensor; with fixed_scale the first value of `measured` (a history) is raised to it.
    """

    format: Format
    qdata: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor | None = None
    transposed: bool = False
    fixed_scale: bool = False
    measured: torch.Tensor | None = None

    def scratch(self, rows: int) -> torch.Tensor | None:
        """Working memory with which a CUDA cast takes row amaxes while it casts, in place of a pass before."""
        if self.measured is None or self.format.outer_axis != "row" or not self.measured.is_cuda:
            return None
        return row_scratch(rows, self.measured.device)

    def arguments(self, direction: str, device: torch.device, scratch: torch.Tensor | None) -> tuple:
        return (
            spec(self.format, direction, device), _ptr(self.qdata), self.transposed, _ptr(self.scale), _ptr(self.amax),
            self.fixed_scale, _ptr(self.measured), _ptr(scratch),
        )  # fmt: skip


def in_one_call(x: torch.Tensor) -> bool:
    """Whether `quantize_pair` of `x` is one call of the extension, and not a sequence of the functions above."""
    return not traced(x)


def quantize_pair(x, row: Side | None, col: Side | None, *, derived=False, rng=None, row_ids=None, noop=None):
    """Cast ``x`` (M, K) rowwise, columnwise or both; on CUDA it is read once, plus once for amaxes to be known first.

    derived: the column is cast from the row's decode, rounded to x's dtype. CUDA only, `in_one_call`, and the
    column's amax must be known, or collected by delayed scaling. Other arguments as in `quantize`.
    """
    if not in_one_call(x):
        if derived:
            raise ValueError("quantize_pair: derived columns need an untraced tensor")
        for direction, side in zip(DIRECTIONS, (row, col)):
            if side is not None:
                _quantize_side(x, direction, side, rng, row_ids, noop)
        return
    x = in_memory(x)
    scratch = None if row is None else row.scratch(x.shape[0])
    rows = None if row is None else row.arguments(ROWWISE, x.device, scratch)
    cols = None if col is None else col.arguments(COLUMNWISE, x.device, None)
    extension(x.device.type).quantize_pair(
        rows, cols, *_matrix(x), derived, 0, 0, _ptr(rng), _ptr(row_ids), _ptr(noop), *_where(x)
    )


def row_scratch(rows: int, device) -> torch.Tensor:
    """Working memory with which a CUDA cast takes row amaxes while it casts, in place of a pass before."""
    return torch.empty(-(-rows // extension("cuda").PANEL_ROWS), dtype=torch.int32, device=device)


def cast_directions(
    x: torch.Tensor, row: tuple | None, col: tuple | None, sums=None, gate=None, grad=None, rng=None, row_ids=None
) -> None:
    """`quantize_pair` of a plain tensor, its sides described before as `Side.arguments` describes them.

    rng, row_ids: see `quantize`. sums: what `sum_parts` returned, filled in the same read. What is cast may be computed on
    the way, on CUDA, if no amax has to be measured before, and rounded to x's dtype:
    gate: a tensor of x's dtype, shape and strides: `silu(gate) * x`.
    grad: (M, K / 2) of x's dtype, its last dimension contiguous: the gradient of `silu(x[:, : K / 2]) * x[:, K / 2 :]`.
    """
    (M, K), x = x.shape, in_memory(x)
    extension(x.device.type).quantize_pair(
        row, col, x.data_ptr(), SOURCE_CODES[x.dtype], M, K, *x.stride(), False, _ptr(sums), _ptr(gate), _ptr(rng),
        _ptr(row_ids), 0, *_where(x), *_of_grad(grad)
    )  # fmt: skip


def cast_groups(
    x: torch.Tensor, row: tuple | None, col: tuple, groups: tuple, *, gate=None, grad=None, weights: tuple | None = None
) -> None:
    """Columns of all groups of rows of `x` (M, K), and the rows beside them, in one read; on CUDA only.

    FP8 with FP32 scales of 128 elements, or of whole rows and columns, whose amaxes are float32 (rows, 1) and (E, K) then.
    row, col: described before as `Side.arguments` describes them. col: stored (K, 128 * blocks), whole blocks, codes 0 where
    one has no row; scales (blocks, K) or (E, K); transposed. groups: what `groups_of` gives.
    gate, grad: as `cast_directions`'s, of 16-bit tensors; weights: what `weights_of` gives, by which `silu(gate) * x`
    is multiplied before it is rounded.
    """
    x = in_memory(x)
    extension(x.device.type).quantize_pair(
        row, col, *_matrix(x), False, 0, _ptr(gate), 0, 0, 0, *_where(x), *_of_grad(grad), groups=groups, weights=weights
    )


def _of_grad(grad: torch.Tensor | None) -> tuple[int, int]:
    """Address and distance of rows of the gradient that a cast computes SwiGLU's from; 0 where there is none."""
    return (0, 0) if grad is None else (grad.data_ptr(), grad.stride(0))


def weights_of(weights: torch.Tensor, places=None, dots=None) -> tuple:
    """Weights of rows as `cast_groups` takes them. places: int32 (T,), where among the weights each row's is, -1 for
    none and a weight of 0. dots: float32 (T, F / 128), filled with what adds up to the weights' gradients where `grad`
    is cast."""
    return weights.data_ptr(), SOURCE_CODES[weights.dtype], _ptr(places), _ptr(dots)


def amax_groups(
    x: torch.Tensor, groups: tuple, *, rows: bool = False, gate=None, grad=None, weights: tuple | None = None
) -> tuple[torch.Tensor, int, int]:
    """(memory, address of the columns' amaxes (E, K) in it, of the rows' (T, 1) or 0) as `cast_groups` takes them, of
    what it will cast of `x` (M, K), in one read; on CUDA only."""
    num, num_rows, K, x = groups[2], groups[4], x.shape[1], in_memory(x)
    found = torch.zeros(num * K + (num_rows if rows else 0), dtype=torch.float32, device=x.device)
    columns = found.data_ptr()
    of_rows = columns + 4 * num * K if rows else 0
    extension(x.device.type).group_amax(
        *_matrix(x), groups, columns, of_rows, *_where(x), _ptr(gate), *_of_grad(grad), weights
    )
    return found, columns, of_rows


def map_groups(sizes: torch.Tensor, ends: torch.Tensor, blocks: torch.Tensor) -> None:
    """Write the map of the blocks of 128 rows of groups of these sizes, int32 or int64 (E,): ends (E,) and blocks (3, count),
    int32; on CUDA only."""
    extension(sizes.device.type).group_map(
        sizes.data_ptr(), sizes.dtype == torch.int64, *sizes.shape, blocks.shape[1], ends.data_ptr(), blocks.data_ptr(),
        *_where(sizes)
    )  # fmt: skip


def groups_of(where, num_rows: int, copies=None) -> tuple:
    """Groups of rows as the functions above take them. where: the map of blocks of 128 rows that begin where their group does
    (`ops_triton.grouped_gemm.BlockMap`). num_rows: of all groups. copies: a RowMap: row r of these is a copy of x's row
    choice[r] // num_experts."""
    choice = (0, 1) if copies is None else (copies.choice.data_ptr(), copies.num_experts)
    return (where.ends.data_ptr(), where.blocks.data_ptr(), where.ends.shape[0], where.count, num_rows, *choice)


def sum_parts(x: torch.Tensor) -> torch.Tensor | None:
    """Memory for the FP32 sums of `x` (M, K) over M, a row a panel, which a cast on CUDA can fill; None elsewhere."""
    if not x.is_cuda or x.dtype not in SOURCE_CODES:
        return None
    M, K = x.shape
    return torch.empty((-(-M // extension("cuda").PANEL_ROWS), K), dtype=torch.float32, device=x.device)


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """`x` (M, K) summed over M in FP32, in x's dtype: on CUDA the bits that a cast's sums give, in a read of its own."""
    if x.is_cuda and traced(x):
        return _operators().column_sums(x)
    parts = sum_parts(x)
    if parts is None:
        return x.sum(dim=0)
    cast_directions(x, None, None, parts)
    return parts.sum(dim=0).to(x.dtype)


def _quantize_side(x, direction: str, side: Side, rng, row_ids, noop) -> None:
    """One direction by `amax` and `quantize`."""
    fmt = side.format
    if side.measured is not None:
        found = amax(x, fmt, direction, side.measured.new_empty(fmt.amax_shape(*x.shape, direction)))
        kept = side.measured[0] if side.fixed_scale else side.measured
        found = torch.maximum(kept, found) if side.fixed_scale else found
        kept.copy_(found if noop is None else torch.where(noop.bool(), kept, found))
    quantize(
        x, fmt, direction, qdata=side.qdata, scale=side.scale, amax=side.amax, transposed=side.transposed,
        fixed_scale=side.fixed_scale, rng=rng if fmt.sr else None, row_ids=row_ids if fmt.sr else None, noop=noop,
    )  # fmt: skip


def dequantize(qdata, scale, amax, fmt, direction, M, K, *, transposed, out, outer=True, inverse_rht=True):
    """Decode into ``out``, a strided (M, K) float32 / bfloat16 / float16 tensor (nearest even from FP32).

    ``outer=False`` leaves NVFP4's outer scale 1/enc out (a GEMM applies it in its epilogue);
    ``inverse_rht=False`` stays in the transformed domain."""
    if traced(out):
        _operators().dequantize_(qdata, scale, amax, str(fmt), direction, transposed, out, outer, inverse_rht)
        return
    if out.shape != (M, K):
        raise ValueError(f"dequantize into {tuple(out.shape)}, expected {(M, K)}")
    operand = qdata, scale, amax, fmt, direction, transposed, out, outer, inverse_rht
    extension(out.device.type).dequantize(*_decode(operand), *_where(out))


def decode_operands(a: tuple | None, b: tuple | None, factor: torch.Tensor | None = None) -> None:
    """Decode both operands of a product, or one, as `dequantize` does; on CUDA by one launch if both are stored alike.

    a, b: (qdata, scale, amax, format, direction, transposed, out, outer, inverse_rht), untraced. factor: float32 (),
    set to the product of the `outer_scale` of both; an operand without an amax leaves that of the other. Raises
    ``ValueError`` where an operand has several amaxes.
    """
    *_, out, _, _ = a or b
    operands = (operand and _decode(operand) for operand in (a, b))
    extension(out.device.type).decode_operands(*operands, _ptr(factor), *_where(out))


def _decode(operand: tuple) -> tuple:
    """What the extension is told of a decode, but for where it runs."""
    qdata, scale, amax, fmt, direction, transposed, out, outer, inverse_rht = operand
    return (
        spec(fmt, direction, out.device), _ptr(qdata), transposed, _ptr(scale), _ptr(amax), *_matrix(out),
        outer, inverse_rht,
    )  # fmt: skip


def outer_scale(amax: torch.Tensor, fmt: Format, out: torch.Tensor) -> torch.Tensor:
    """NVFP4's decode factor 1/enc (float32, elementwise) from outer amaxes."""
    if traced(amax):
        _operators().outer_scale_(amax, str(fmt), out)
        return out
    extension(amax.device.type).outer_scale(amax.data_ptr(), out.data_ptr(), amax.numel(), *_where(amax))
    return out
