"""Kernels for all groups of rows on the CPU, where grouped linears find what a Hopper GPU offers them: the plans, casts
and products are those of CUDA, the tensors the host's. Python's way and the C++ node's call one and the same functions,
through the extensions' Python functions or through their tables."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch

from megatron_hybrid import kernels
from megatron_hybrid.gemm import grouped_cuda
from megatron_hybrid.grouped_columns import encode, encode_scale
from megatron_hybrid.testing.hopper import POINTER, capsule, replacements

BLOCK = 128
ELEMENTS = ("e4m3", "e5m2")
SOURCES = tuple(kernels.SOURCE_CODES)  # dtypes by the code that extensions have for them
CODES = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}
OUT = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("row_fast", "row", "block", "tile")
I32, I64 = ctypes.c_int32, ctypes.c_int64


def struct(name: str, **fields):
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# as csrc/numerics/format.h and csrc/gemm/grouped.h have them
Spec = struct("Spec", element=I32, scale_rule=I32, axis=I32, block_m=I32, block_k=I32, pow2=ctypes.c_bool,
              eps=ctypes.c_float, outer_rows=ctypes.c_bool, rht=ctypes.c_bool, sr=ctypes.c_bool)  # fmt: skip
Matrix = struct("Matrix", data=POINTER, dtype=I32, rows=I64, cols=I64, row_stride=I64, col_stride=I64)
Payload = struct("Payload", codes=POINTER, transposed=ctypes.c_bool, scale=POINTER, amax=POINTER)
Quantize = struct("Quantize", spec=Spec, x=Matrix, out=Payload, fixed_scale=ctypes.c_bool, rng=POINTER, row_ids=POINTER,
                  noop=POINTER, measured=POINTER, scratch=POINTER)  # fmt: skip
Groups = struct("Groups", ends=POINTER, blocks=POINTER, groups=I64, count=I64, rows=I64, choice=POINTER, parts=I64)
Weights = struct("Weights", data=POINTER, dtype=I32, places=POINTER, dots=POINTER)
Pair = struct("Pair", row=Quantize, col=Quantize, has_row=ctypes.c_bool, has_col=ctypes.c_bool, derived=ctypes.c_bool,
              sums=POINTER, gate=POINTER, grad=POINTER, grad_stride=I64, groups=Groups, weights=Weights,
              any_strips=ctypes.c_bool)  # fmt: skip
GroupAmax = struct("GroupAmax", cast=Pair, of_columns=POINTER, of_rows=POINTER)
Where = struct("Where", stream=ctypes.c_size_t, threads=ctypes.c_int)
Multiply = struct("Multiply", a=POINTER, b=POINTER, a_scale=POINTER, b_scale=POINTER, out=POINTER, ends=POINTER,
                  blocks=POINTER, groups=I64, count=I64, rows_a=I64, n=I64, k=I64, kind=I32, out_type=I32,
                  a_e5m2=ctypes.c_bool, b_e5m2=ctypes.c_bool, add=ctypes.c_bool)  # fmt: skip


def at(address: int, shape: tuple, dtype: torch.dtype, strides: tuple | None = None) -> torch.Tensor:
    """What is in memory there."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if strides else torch.Size(shape).numel()
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer((ctypes.c_uint8 * (extent * dtype.itemsize)).from_address(address), dtype=dtype)
    return flat.as_strided(shape, strides) if strides else flat.view(shape)


def matrix(x: Matrix) -> torch.Tensor:
    return at(x.data, (x.rows, x.cols), SOURCES[x.dtype], (x.row_stride, x.col_stride))


class Function:
    """A function of a structure for C++, whose errors are kept."""

    def __init__(self, of, argument, errors: list):
        def call(args, where):
            try:
                of(args.contents)
            except Exception as error:  # ctypes would print it and go on
                errors.append(error)

        self.pointer = ctypes.CFUNCTYPE(None, ctypes.POINTER(argument), ctypes.POINTER(Where))(call)


class GroupKernels:
    """seen: of every call of a kernel for all groups what it was told, but for addresses. errors: raised in calls by
    C++."""

    INTERFACE = kernels._INTERFACE

    def __init__(self):
        self.seen, self.errors = [], []
        self._cpu = kernels.extension("cpu")
        self.FormatSpec, self.PANEL_ROWS = self._cpu.FormatSpec, self._cpu.PANEL_ROWS
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = POINTER, [ctypes.py_object, ctypes.c_char_p]
        real = (POINTER * 4).from_address(get(self._cpu.CASTS, b"megatron_hybrid.casts"))
        self._dense = ctypes.CFUNCTYPE(None, ctypes.POINTER(Pair), ctypes.POINTER(Where))(real[1])
        self._functions = [
            Function(self.cast, Pair, self.errors), Function(self.amax, GroupAmax, self.errors),
            Function(lambda args: self.multiply("rows", args), Multiply, self.errors),
            Function(lambda args: self.multiply("columns", args), Multiply, self.errors),
        ]  # fmt: skip
        cast, amax, rows, columns = (ctypes.cast(f.pointer, POINTER).value for f in self._functions)
        self.CASTS, self._casts = capsule("megatron_hybrid.casts", [real[0], cast, real[2], real[3], amax])
        self.GROUPED, self._grouped = capsule("megatron_hybrid.grouped", [rows, columns])

    def __getattr__(self, name: str):
        return getattr(self._cpu, name)

    # ---- as Python calls them

    def quantize_pair(self, row, col, data, dtype, M, K, *rest, groups=None, weights=None):
        if groups is None:
            return self._cpu.quantize_pair(row, col, data, dtype, M, K, *rest)
        down, across, _, _, gate, _, _, _, _, _, *grad = rest
        grad = grad or (0, 0)
        x = Matrix(data, dtype, M, K, down, across)
        sides = [Quantize(x=x) if s is None else Quantize(_spec(s[0]), x, Payload(*s[1:5])) for s in (row, col)]
        computed = gate, *grad, Groups(*groups), Weights(*weights or ())
        self.cast(Pair(*sides, row is not None, True, False, None, *computed))

    def group_amax(
        self, data, dtype, M, K, down, across, groups, of_columns, of_rows, stream, threads, gate, grad, stride, weights
    ):
        x = Quantize(x=Matrix(data, dtype, M, K, down, across))
        cast = Pair(x, x, False, True, False, None, gate, grad, stride, Groups(*groups), Weights(*weights or ()))
        self.amax(GroupAmax(cast, of_columns, of_rows))

    def run(self, what, a, b, a_scale, b_scale, out, where, rows_a, n, kind, fast, add, e5m2):
        pointers = [t.data_ptr() for t in (a, b, a_scale, b_scale, out, where.ends, where.blocks)]
        of_kind = KINDS.index(grouped_cuda.kind_of(kind, fast))
        sizes = where.ends.shape[0], where.count, rows_a, n, a.shape[1]
        self.multiply(what, Multiply(*pointers, *sizes, of_kind, OUT.index(out.dtype), *e5m2, add))
        return out

    # ---- what they do

    def cast(self, pair: Pair) -> None:
        g = pair.groups
        if not g.ends:
            return self._dense(pair, Where(0, 1))
        self.seen.append(("cast", *_told(pair), *(_of_spec(s.spec) for s in (pair.row, pair.col)), pair.has_row))
        rows, (T, K) = _rows(pair), (g.rows, pair.col.x.cols)
        if pair.has_row:
            self._by_rows(rows, pair.row)
        out, spec, ends = pair.col.out, pair.col.spec, at(g.ends, (g.groups,), torch.int32).tolist()
        used = at(g.blocks, (3, g.count), torch.int32).T.tolist()[: ends[-1]]
        spread = torch.zeros(g.count * BLOCK, K, dtype=rows.dtype)
        for b, (_, first, num) in enumerate(used):
            spread[b * BLOCK : b * BLOCK + num] = rows[first : first + num]
        fmt = SimpleNamespace(element=ELEMENTS[spec.element], eps=spec.eps, pow2=spec.pow2)
        amax = spread.abs().view(g.count, BLOCK, K).amax(1).float()
        if spec.outer_rows:
            amax = at(out.amax, (g.groups, K), torch.float32)
        enc = encode_scale(amax, fmt)
        at(out.scale, tuple(enc.shape), torch.float32).copy_(torch.ones_like(enc) / enc)
        of_block = enc if not spec.outer_rows else enc[[group for group, *_ in used] + [0] * (g.count - len(used))]
        values = spread.view(g.count, BLOCK, K).float() * of_block.unsqueeze(1)
        at(out.codes, (K, g.count * BLOCK), torch.uint8).copy_(encode(values.view(-1, K), fmt).T)

    def _by_rows(self, rows: torch.Tensor, row: Quantize) -> None:
        fields = {name: getattr(row.spec, name) for name, _ in Spec._fields_}
        side = self.FormatSpec(**fields), row.out.codes, False, row.out.scale, row.out.amax or 0, False, 0, 0
        self._cpu.quantize_pair(side, None, *kernels._matrix(rows), False, 0, 0, 0, 0, 0, 0, 1)

    def amax(self, args: GroupAmax) -> None:
        self.seen.append(("amax", *_told(args.cast), bool(args.of_rows)))
        rows, g = _rows(args.cast).abs().float(), args.cast.groups
        found = at(args.of_columns, (g.groups, rows.shape[1]), torch.float32)
        for group, first, num in at(g.blocks, (3, g.count), torch.int32).T.tolist():
            if num:
                found[group] = torch.maximum(found[group], rows[first : first + num].amax(0))
        if args.of_rows:
            at(args.of_rows, (g.rows,), torch.float32).copy_(rows.amax(1))

    def multiply(self, what: str, args: Multiply) -> None:
        told = ("groups", "count", "rows_a", "n", "k", "kind", "out_type", "a_e5m2", "b_e5m2", "add")
        self.seen.append((what, *(getattr(args, name) for name in told)))
        ends = at(args.ends, (args.groups,), torch.int32).tolist()
        kind, used = KINDS[args.kind], at(args.blocks, (3, args.count), torch.int32).T.tolist()[: ends[-1]]
        by_rows = what == "rows"
        out = at(args.out, (args.rows_a, args.n) if by_rows else (args.groups, args.rows_a, args.n), OUT[args.out_type])
        a = self._codes(args.a, args.rows_a, args.k, args.a_e5m2)
        b = self._codes(args.b, args.groups * args.n if by_rows else args.n, args.k, args.b_e5m2)
        if by_rows:
            deep = -(-args.k // BLOCK)
            a = a * self._scales(args.a_scale, a, 1 if kind.startswith("row") else deep)
            high = b.shape[0] // BLOCK if kind == "tile" else b.shape[0]
            b = b * self._scales(args.b_scale, b, 1 if kind.startswith("row") else deep, high)
            for group, first, num in used:
                part = slice(first, first + num)
                out[part] = (a[part] @ b[group * args.n : (group + 1) * args.n].T).to(out.dtype)
            return
        blocks_of = [range(start, end) for start, end in zip([0, *ends], ends)]
        for group, own in enumerate(blocks_of):
            total = torch.zeros(args.rows_a, args.n, dtype=torch.float64)
            for i in own:
                which, high = (group, args.groups) if kind.startswith("row") else (i, args.count)
                cut, scales = slice(i * BLOCK, (i + 1) * BLOCK), []
                for address, t in ((args.a_scale, a), (args.b_scale, b)):
                    scales.append(at(address, (high, t.shape[0]), torch.float32)[which].double().unsqueeze(1))
                total += (a[:, cut] * scales[0]) @ (b[:, cut] * scales[1]).T
            out[group] = (total + out[group].double() if args.add else total).to(out.dtype)

    @staticmethod
    def _codes(address, rows, columns, e5m2) -> torch.Tensor:
        return at(address, (rows, columns), torch.uint8).view(CODES[e5m2]).double()

    @staticmethod
    def _scales(address, codes, deep: int, high: int | None = None) -> torch.Tensor:
        rows, columns = codes.shape
        high = rows if high is None else high
        scales = at(address, (high, deep), torch.float32).double()
        scales = scales if high == rows else scales.repeat_interleave(BLOCK, 0)
        return scales if deep == 1 else scales.repeat_interleave(BLOCK, 1)[:, :columns]


def _spec(spec) -> Spec:
    return Spec(*(getattr(spec, name) for name, _ in Spec._fields_))


def _of_spec(spec: Spec) -> tuple:
    return tuple(getattr(spec, name) for name, _ in Spec._fields_)


def _told(pair: Pair) -> tuple:
    x, g = pair.col.x, pair.groups
    return x.dtype, x.rows, x.cols, g.groups, g.count, g.rows, bool(g.choice), g.parts, bool(pair.gate), bool(pair.grad)


def _rows(pair: Pair) -> torch.Tensor:
    """What is cast, of all groups."""
    g, x = pair.groups, matrix(pair.col.x)
    if g.choice:
        choice = at(g.choice, (g.rows,), torch.int32).long()
        copies = x[choice.clamp(min=0) // g.parts]
        return torch.where((choice >= 0).unsqueeze(1), copies, torch.zeros((), dtype=x.dtype))
    if not pair.gate and not pair.grad:
        return x
    w = pair.weights
    weights = at(w.data, (g.rows,), SOURCES[w.dtype]).float().unsqueeze(1) if w.data else 1.0
    if pair.gate:
        gate = at(pair.gate, tuple(x.shape), x.dtype, x.stride()).float()
        return (torch.nn.functional.silu(gate) * x.float() * weights).to(x.dtype)
    F = x.shape[1] // 2
    dy = at(pair.grad, (x.shape[0], F), x.dtype, (pair.grad_stride, 1)).float() * weights
    gate, up = x.float().split(F, dim=1)
    s = gate.sigmoid()
    if w.dots:
        at(w.dots, (g.rows, F // BLOCK), torch.float32).fill_(0.5)
    return torch.cat((dy * up * s * (1 + gate * (1 - s)), dy * gate * s), dim=1).to(x.dtype)


def as_on_hopper(monkeypatch, extension=None) -> GroupKernels:
    """From here on grouped linears on the CPU are planned, cast and multiplied as on a Hopper GPU. extension: whose
    casts those are, in place of the stand-in's."""
    found = GroupKernels()
    casts = extension or found
    for where, name, what in (*replacements(casts, found), (grouped_cuda, "run", found.run)):
        monkeypatch.setattr(where, name, what)
    kernels._spec.cache_clear()
    return found
