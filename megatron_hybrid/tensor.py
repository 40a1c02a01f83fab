"""HybridTensor: the `torch.Tensor` subclass for quantized parameters, FSDP shards and checkpoints.

It looks like a tensor of its nominal dtype and logical shape and holds up to two payloads: `t.rowwise` (contracted
along its last dimension) and `t.columnwise` (contracted along the others), in formats that may differ. Inside
modules and gemms plain `QuantizedStorage`s travel instead. What torch operations do to it is in tensor_ops.py;
an operation without a rule there raises and names itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .formats import COLUMNWISE, DIRECTIONS, ROWWISE, nearest, parse_format
from .quantizer import SOURCE_DTYPES, HybridQuantizer, as_matrix
from .storage import QuantizedStorage
from .tensor_owner import Marks, Owned

WHOLE = None
_PREFIX = {ROWWISE: "rowwise_", COLUMNWISE: "columnwise_"}


class Frame(NamedTuple):
    """A payload without its tensors. `tensors`: (buffer name, name of the HybridTensor attribute that holds it)."""

    format: str
    transposed: bool
    tensors: tuple[tuple[str, str], ...]


class TensorSpec(NamedTuple):
    """A HybridTensor without its tensors and geometry: plain, comparable data.

    matrix: (M, K) of the payloads for a flat view, else None (leading dimensions flattened, last dimension).
    shared: None for a whole tensor; for a piece of one, the attributes (scales, amaxes) that also cover elements
    outside it.
    """

    dtype: torch.dtype
    quantizer: tuple[str | None, str | None, str]
    rowwise: Frame | None
    columnwise: Frame | None
    matrix: tuple[int, int] | None
    stale: tuple[str, ...]
    shared: tuple[str, ...] | None

    def names(self) -> list[str]:
        """Attributes that hold tensors; a tensor that both directions share is listed once."""
        frames = [f for f in (self.rowwise, self.columnwise) if f is not None]
        return list(dict.fromkeys(attribute for f in frames for _, attribute in f.tensors))


def _frame(s: QuantizedStorage | None, other: QuantizedStorage | None = None) -> Frame | None:
    """The frame of a payload; `other`: one listed before it, whose tensors are not listed again."""
    if s is None:
        return None
    shared = other is not None and s.qdata is other.qdata  # both are the one high-precision tensor
    prefix = _PREFIX[other.direction if shared else s.direction]
    return Frame(str(s.format), s.transposed, tuple((n, prefix + n) for n in s.buffers()))


def _storage(frame: Frame | None, direction: str, shape, dtype, tensors: dict) -> QuantizedStorage | None:
    if frame is None:
        return None
    buffers = {name: tensors[attribute] for name, attribute in frame.tensors}
    parse = parse_format.__wrapped__ if torch.compiler.is_compiling() else parse_format  # Dynamo warns of caches
    return QuantizedStorage(parse(frame.format), direction, shape, dtype, frame.transposed, **buffers)


def payload(t: HybridTensor, direction: str) -> QuantizedStorage | None:
    """`t.rowwise` or `t.columnwise`; unlike those also inside a compiled region that made `t` itself."""
    spec = t.spec
    frame = spec.rowwise if direction == ROWWISE else spec.columnwise
    if frame is None:
        return None
    tensors = {attribute: getattr(t, attribute) for _, attribute in frame.tensors}
    return _storage(frame, direction, spec.matrix or matrix_shape(t.shape), spec.dtype, tensors)


def matrix_shape(size) -> tuple[int, int]:
    """Logical (M, K) of a tensor: leading dimensions flattened, last dimension; (1, 1) for a scalar."""
    return (math.prod(size[:-1]), size[-1]) if len(size) else (1, 1)


class HybridTensor(Owned, torch.Tensor):
    """A quantized tensor of up to two directions. Made by `HybridQuantizer.quantize` or `from_storages`.

    rowwise, columnwise   the payloads, or None
    quantizer             the immutable `HybridQuantizer` that `update` and `copy_` use
    stale                 directions that `update` left behind on request: their bytes are of an earlier value. Shared
                          by all tensors over the same buffers; `dequantize` avoids them, `update` of both clears it

    Detached tensors, views, slices and `.data` share buffers. In-place operations (`update`, `copy_`) write every
    direction they touch from the source given, never one direction from the other, except a column whose
    `columnwise_source` is ``rowwise_dequantized``: it is derived from the row's new decode.
    """

    __slots__ = ("_row", "_col", "_quantizer", "_stale", "_shared", "_matrix")
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, tensors, spec: TensorSpec, size, stride=None, offset=0, device=None):
        """Assemble from what `__tensor_flatten__` gives: tensors in the order of `spec.names()`, and the spec."""
        matrix = spec.matrix or matrix_shape(size)
        named = dict(zip(spec.names(), tensors, strict=True))
        row = _storage(spec.rowwise, ROWWISE, matrix, spec.dtype, named)
        col = _storage(spec.columnwise, COLUMNWISE, matrix, spec.dtype, named)
        return cls._wrap(
            row, col, HybridQuantizer(*spec.quantizer), spec.dtype, size, stride, offset,
            device=device, matrix=matrix, stale=set(spec.stale), shared=spec.shared,
        )  # fmt: skip

    @classmethod
    def _wrap(cls, row, col, quantizer, dtype, size, stride, offset, *, device, matrix, stale, shared):
        held = row if row is not None else col
        device = held.device if held is not None else device or torch.device("cpu")  # "cuda" has no index, buffers do
        t = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset if stride else None, dtype=dtype, device=device
        )
        t._row, t._col, t._quantizer = row, col, quantizer
        t._matrix, t._shared = matrix, shared
        t._stale = stale if isinstance(stale, Marks) else Marks(stale)
        return t

    def __init__(self, *args, **kwargs):
        pass  # torch.Tensor's takes none

    @classmethod
    def from_storages(cls, row, col, shape, dtype, quantizer: HybridQuantizer, *, device=None) -> HybridTensor:
        """A tensor over existing payloads, which are not copied.

        row, col: `QuantizedStorage` of this direction and (M, K), or None. shape: logical shape, its leading
        dimensions flattened are M. dtype: nominal dtype. device: only needed when both payloads are None.
        Raises ``ValueError`` when a payload does not fit the shape, the dtype or the quantizer's format.
        """
        shape = tuple(shape)
        _check_storages(row, col, shape, dtype, quantizer)
        if torch.compiler.is_compiling():  # the constructor is what Dynamo puts into a graph
            spec = _spec(row, col, dtype, quantizer)
            named = {_PREFIX[s.direction] + n: t for s in (row, col) if s is not None for n, t in s.buffers().items()}
            return cls(tuple(named[n] for n in spec.names()), spec, shape)
        return cls._wrap(
            row, col, quantizer, dtype, shape, None, 0,
            device=device, matrix=matrix_shape(shape), stale=set(), shared=WHOLE,
        )  # fmt: skip

    def _like(self, row, col, size, stride, offset=0, *, dtype=None, device=None, matrix=None, shared=..., stale=None):
        """Another tensor of this quantizer; what is not given is this tensor's (the stale set itself)."""
        return HybridTensor._wrap(
            row, col, self._quantizer, dtype or self.dtype, size, stride, offset, device=device or self.device,
            matrix=matrix or self._matrix, stale=self._stale if stale is None else stale,
            shared=self._shared if shared is ... else shared,
        )  # fmt: skip

    # ---- what it holds

    @property
    def rowwise(self) -> QuantizedStorage | None:
        """The payload contracted along rows, or None."""
        return self._row

    @property
    def columnwise(self) -> QuantizedStorage | None:
        """The payload contracted along columns, or None."""
        return self._col

    def payloads(self) -> list[QuantizedStorage]:
        """Those held, the row first."""
        return [s for s in (self._row, self._col) if s is not None]

    def payload_buffers(self) -> list[torch.Tensor]:
        """The tensors that the payloads held consist of."""
        return [buffer for s in self.payloads() for buffer in s.buffers().values()]

    @property
    def quantizer(self) -> HybridQuantizer:
        """What made it, and makes it anew in `update`."""
        return self._quantizer

    @property
    def stale(self) -> frozenset[str]:
        """Directions that an update of the other one has left behind."""
        return frozenset(self._stale)

    @property
    def spec(self) -> TensorSpec:
        """Everything about it but the buffers: what moves, copies and files rebuild it from."""
        matrix = None if self._matrix == matrix_shape(self.shape) else self._matrix
        return _spec(self._row, self._col, self.dtype, self._quantizer, matrix, self._stale, self._shared)

    def clear(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        """Let go of payloads. Memory is freed when no other tensor shares it; detached tensors keep theirs."""
        self._row = None if rowwise else self._row
        self._col = None if columnwise else self._col

    def take_buffers(self, rowwise: dict[str, torch.Tensor], columnwise: dict[str, torch.Tensor]) -> None:
        """Move the payloads held to these tensors, by name, which have their bytes. Detached tensors keep the old ones."""
        self._row = None if self._row is None else self._row.with_buffers(rowwise)
        self._col = None if self._col is None else self._col.with_buffers(columnwise)

    # ---- decode

    def dequantize(self, direction: str | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode to a new plain tensor of this shape and `dtype`. Differentiable: the gradient passes through.

        direction: ``rowwise``, ``columnwise``, or None for the more exact of those held that are not stale (wider
        codes first, then smaller blocks; ties rowwise). Raises ``ValueError`` naming a direction that is not held.
        """
        if self.requires_grad and torch.is_grad_enabled():
            return _Dequantize.apply(self, direction, dtype)
        s = self._pick(direction)
        out = s.dequantize(dtype) if s.format.is_quantized else s.qdata.to(dtype, copy=True)
        return out.reshape(self.shape)

    def _pick(self, direction: str | None) -> QuantizedStorage:
        if direction is not None and direction not in DIRECTIONS:
            raise ValueError(f"unknown direction {direction!r}{nearest(str(direction), DIRECTIONS)} Valid: {DIRECTIONS}")
        held = self.payloads()
        if direction is not None:
            for s in held:
                if s.direction == direction:
                    return s
        if direction is not None or not held:
            found = ", ".join(s.direction for s in held) or "nothing"
            wanted = direction or "rowwise or columnwise"
            raise ValueError(f"dequantize: the tensor has no {wanted} payload, it holds {found}")
        fresh = [s for s in held if s.direction not in self._stale]
        return min(fresh or held, key=lambda s: s.format.exactness)

    # ---- in-place writes

    def update(
        self, src: torch.Tensor, *, rowwise=True, columnwise=True, state=None, amax=None, reduce_amax=None, rng=None,
        noop_flag=None,
    ) -> HybridTensor:  # fmt: skip
        """Quantize `src` (this shape, high precision, this device) into the payloads held; same data pointers.

        rowwise, columnwise: the directions wanted; one that is not held is left out. A direction held but not wanted
        keeps its bytes, which are then of an earlier value: it is listed in `stale`. A column derived from the row
        (``rowwise_dequantized``) is cast from the updated row's decode; updated alone, from a row cast for it that
        is then dropped. state, amax, rng: as in `HybridQuantizer.quantize`; reduce_amax: a pair of functions of an
        amax that is computed here, such as its maximum over ranks. noop_flag: int32 device scalar; non-zero leaves every
        byte, scale and history as it was.

        Raises ``ValueError`` before anything is written: a wrong shape, device or dtype, a missing state or rng, or
        a piece whose scales also cover elements outside it.
        """
        row = self._row if rowwise else None
        col = self._col if columnwise else None
        if row is None and col is None:
            return self
        x = self._source(src)
        keys = dict(state=state, amax=amax, rng=rng, noop=noop_flag)
        self._quantizer.check_arguments(x, row is not None, col is not None, **keys)
        with torch.no_grad():
            self._quantizer.update(row, col, x, reduce_amax=reduce_amax, **keys)
        self._written(row, col)
        return self

    def rederive(self, *, state=None, amax=None, reduce_amax=None, rng=None, noop_flag=None) -> HybridTensor:
        """Cast the column again from the row held, in place; for ``columnwise_source="rowwise_dequantized"`` only.

        For rows that arrived as bytes (a gather, a load). The pairs are as in `update`.
        """
        if not self._quantizer.derives_columnwise or self._row is None or self._col is None:
            raise ValueError(f"rederive needs both directions and a derived column: {self!r}")
        self._check_castable()
        with torch.no_grad():
            keys = dict(state=state, amax=amax, reduce_amax=reduce_amax, rng=rng, noop=noop_flag)
            self._quantizer.rederive(self._row, self._col, **keys)
        self._bump(self._col)
        if ROWWISE in self._stale:
            self._stale.add(COLUMNWISE)
        elif self._shared is WHOLE:
            self._stale.discard(COLUMNWISE)
        return self

    def _source(self, src) -> torch.Tensor:
        """`src` as the (M, K) to cast, checked."""
        self._check_castable()
        if not isinstance(src, torch.Tensor) or isinstance(src, HybridTensor):
            found = type(src).__name__
            raise ValueError(f"update takes a plain high-precision tensor, found {found}; see copy_ and dequantize()")
        if src.shape != self.shape or src.device != self.device:
            raise ValueError(
                f"update: expected shape {tuple(self.shape)} on {self.device}, found {tuple(src.shape)} on {src.device}"
            )
        return as_matrix(src.detach()) if self._matrix == matrix_shape(self.shape) else src.detach().reshape(self._matrix)

    def _check_castable(self) -> None:
        if self._shared:
            raise ValueError(
                f"a piece of a tensor in {self.describe()} cannot be cast anew alone: its scales also cover elements "
                "outside it. Update the whole tensor."
            )

    def _written(self, row, col) -> None:
        """Record what an in-place write did: version counters and staleness."""
        self._bump(row, col)
        self._stale.init_value = None  # not the value any more
        written = [s.qdata for s in (row, col) if s is not None]
        for s in (self._row, self._col):
            if s is not None and not any(s.qdata is q for q in written):
                self._stale.add(s.direction)
            elif s is not None and self._shared is WHOLE:  # a piece cannot make the rest fresh
                self._stale.discard(s.direction)

    def _bump(self, *written) -> None:
        """Torch's version counters, of this tensor and its buffers: the kernels write behind torch's back."""
        tensors = [t for s in written if s is not None for t in s.buffers().values()]
        torch.autograd.graph.increment_version([self, *tensors])

    # ---- torch protocols

    def __tensor_flatten__(self):
        spec = self.spec
        return spec.names(), spec

    @classmethod
    def __tensor_unflatten__(cls, inner, spec, outer_size, outer_stride):
        return cls(tuple(inner[n] for n in spec.names()), spec, outer_size, outer_stride)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return tensor_ops.dispatch(func, args, kwargs or {})

    @property
    def data(self):
        """The same payloads outside autograd, as of any tensor; takes a `HybridTensor` only."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new):
        if not isinstance(new, HybridTensor):
            found = type(new).__name__
            raise ValueError(f".data of a HybridTensor takes a HybridTensor, found {found}; use update() or copy_()")
        torch.Tensor.data.__set__(self, new)
        marks = self._stale
        for name in HybridTensor.__slots__:
            setattr(self, name, getattr(new, name))
        if self._stale.owner is None:  # another value of the same parameter
            self._stale.inherit(marks)
            self._stale.init_value = None

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            raise RuntimeError("only tensors made by the user (graph leaves) can be deep-copied")
        return tensor_state.deepcopy(self, memo)

    def __reduce_ex__(self, protocol):
        return tensor_state.rebuild_hybrid_tensor, (tensor_state.record(self),)

    def share_memory_(self) -> HybridTensor:
        """Move the payloads' buffers into shared memory."""
        for buffer in self.payload_buffers():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all of the payloads' buffers lie in shared memory."""
        return all(buffer.is_shared() for buffer in self.payload_buffers())

    def describe(self) -> str:
        """The formats held, for messages: ``rowwise=mxfp8_e4m3, columnwise=None``."""
        return ", ".join(f"{d}={None if s is None else s.format}" for d, s in zip(DIRECTIONS, (self._row, self._col)))

    def __repr__(self):
        extra = ", columnwise_source=rowwise_dequantized" if self._quantizer.derives_columnwise else ""
        extra += f", stale={sorted(self._stale)}" if self._stale else ""
        extra += ", requires_grad=True" if self.requires_grad else ""
        return f"HybridTensor({tuple(self.shape)}, {self.describe()}, dtype={self.dtype}, device='{self.device}'{extra})"


def _buffer_property(direction: str, name: str) -> property:
    def get(self):
        s = self._row if direction == ROWWISE else self._col
        return None if s is None else getattr(s, name)

    return property(get, doc=f"Tensor `{name}` of the {direction} payload, or None.")


for _direction in DIRECTIONS:
    for _name in QuantizedStorage.BUFFERS:
        setattr(HybridTensor, _PREFIX[_direction] + _name, _buffer_property(_direction, _name))


def _spec(row, col, dtype, quantizer, matrix=None, stale=(), shared=WHOLE) -> TensorSpec:
    names = tuple(None if f is None else str(f) for f in quantizer.formats())
    return TensorSpec(
        dtype, (*names, quantizer.columnwise_source), _frame(row), _frame(col, row), matrix,
        tuple(sorted(stale)), shared,
    )  # fmt: skip


def _check_storages(row, col, shape, dtype, quantizer) -> None:
    if dtype not in SOURCE_DTYPES:
        raise ValueError(f"nominal dtype {dtype}; supported: {', '.join(map(str, SOURCE_DTYPES))}")
    for s, direction, fmt in zip((row, col), DIRECTIONS, quantizer.formats()):
        if s is None:
            continue
        expected = (direction, fmt, matrix_shape(shape), dtype)
        found = (s.direction, s.format, tuple(s.shape), s.dtype)
        if found != expected:
            text = " against ".join(f"({d}, {f}, {m}, {t})" for d, f, m, t in (found, expected))
            raise ValueError(f"{direction} payload (direction, format, shape, dtype): {text} expected")


class _Dequantize(torch.autograd.Function):
    """Decode; the gradient of the decoded tensor is the gradient of the quantized one (straight through)."""

    @staticmethod
    def forward(ctx, t, direction, dtype):
        ctx.dtype = t.dtype
        return t.detach().dequantize(direction, dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None, None


from . import tensor_ops, tensor_state  # noqa: E402  both need the class
