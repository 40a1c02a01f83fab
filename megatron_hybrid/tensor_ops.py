"""What torch operations do to a `HybridTensor`: one rule an operation; without a rule the operation raises.

Views and slices share buffers with what they are taken from. A slice must lie on block bounds of every direction
held. Shapes: a tensor's payloads are (M, K) matrices, so a view keeps the last dimension K, or is flat.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.utils._pytree import tree_iter

from . import storage_layout as moves
from . import tensor as hybrid
from .formats import COLUMNWISE, ROWWISE
from .quantizer import SOURCE_DTYPES, HybridQuantizer
from .storage import QuantizedStorage

aten = torch.ops.aten
RULES: dict = {}
_SUMS = (aten.add.Tensor, aten.add_.Tensor)


def implements(*ops):
    """Register the decorated function as the rule of aten overloads; it gets the overload and its arguments."""

    def register(rule):
        for op in ops:
            if op in RULES:
                raise ValueError(f"{op} already has a rule: {RULES[op].__name__}")
            RULES[op] = rule
        return rule

    return register


def dispatch(func, args, kwargs):
    rule = RULES.get(func)
    if rule is None:
        t = next(a for a in tree_iter((args, kwargs)) if isinstance(a, hybrid.HybridTensor))
        raise NotImplementedError(f"{func} has no rule for HybridTensor({t.describe()}): {_cure(func)}")
    return rule(func, *args, **kwargs)


def _cure(func) -> str:
    cure = "call .dequantize() on it for a plain tensor"
    if func in _SUMS:
        cure += (
            "; in backward: what SwiGLU reads in an MLP has a second reader, and its gradient is cast as it is computed: read "
            "it in a forward hook of linear_fc1, or turn --no-bias-swiglu-fusion on"
        )
    if not func._schema.is_mutable:
        return cure
    return (
        f"{cure}; arithmetic in place would round every step to its codes and lose small updates, so an optimizer over "
        "quantized weights must keep FP32 masters and write them back: use mh.FusedAdam, or `p.copy_(master)` after a "
        "step of one's own"
    )


# ---- views of the whole tensor


@implements(aten.detach.default, aten.alias.default)
def _same(func, t):
    return t._like(t.rowwise, t.columnwise, t.shape, t.stride(), t.storage_offset())


def _geometry(func, t, *args, **kwargs) -> torch.Tensor:
    """What the operation does to size, stride and offset, done to a tensor without data."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
    base = torch.empty(t.storage_offset() + span, dtype=t.dtype, device="meta")
    return func(base.as_strided(t.shape, t.stride(), t.storage_offset()), *args, **kwargs)


@implements(
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims,
)  # fmt: skip
def _view(func, t, *args):
    """The last dimension stays, or everything becomes one dimension."""
    out = _geometry(func, t, *args)
    M, K = t._matrix
    if out.dim() != 1 and hybrid.matrix_shape(out.shape) != (M, K):
        raise ValueError(
            f"{func}: {tuple(t.shape)} as {tuple(out.shape)}: blocks run along the last dimension, so a view keeps "
            f"its size {K} or is flat; call .dequantize() for any other shape"
        )
    return t._like(t.rowwise, t.columnwise, out.shape, out.stride(), out.storage_offset())


@implements(aten.as_strided.default)
def _as_strided(func, t, size, stride, storage_offset=None):
    """Only what changes nothing."""
    offset = t.storage_offset() if storage_offset is None else storage_offset
    if (tuple(size), tuple(stride), offset) != (tuple(t.shape), t.stride(), t.storage_offset()):
        raise ValueError(
            f"{func}: size {tuple(size)}, stride {tuple(stride)}, offset {offset} of a HybridTensor of size "
            f"{tuple(t.shape)}, stride {t.stride()}, offset {t.storage_offset()}: quantized blocks cannot be "
            "re-strided; slice on block bounds or call .dequantize()"
        )
    return _same(func, t)


@implements(aten.expand.default)
def _expand(func, t, size, *, implicit=False):
    """Only to the shape it has."""
    out = _geometry(func, t, size)
    if (out.shape, out.stride()) != (t.shape, t.stride()):
        raise ValueError(f"{func}: {tuple(t.shape)} to {tuple(size)} of HybridTensor({t.describe()}): call .dequantize()")
    return _same(func, t)


@implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _transpose(func, t, *args):
    """Exact and free for matrices: the rowwise payload of x is the columnwise payload of x.T."""
    out = _geometry(func, t, *args)
    if out.shape == t.shape and out.stride() == t.stride():
        return _same(func, t)
    q = t.quantizer
    if t.dim() != 2 or q.derives_columnwise:
        reason = "its column is derived from its row" if t.dim() == 2 else f"it has {t.dim()} dimensions, not 2"
        raise NotImplementedError(f"{func} of HybridTensor({t.describe()}): {reason}; call .dequantize()")
    row, col = (None if s is None else moves.transpose(s) for s in (t.columnwise, t.rowwise))
    shared = t._shared and tuple(_flip(name) for name in t._shared)
    return hybrid.HybridTensor._wrap(
        row, col, HybridQuantizer(q.columnwise, q.rowwise), t.dtype, out.shape, out.stride(),
        out.storage_offset(), device=t.device, matrix=t._matrix[::-1], shared=shared,
        stale={_flip(d) for d in t.stale},
    )  # fmt: skip


def _flip(name: str) -> str:
    """The other direction's name of a direction or an attribute."""
    old, new = (ROWWISE, COLUMNWISE) if name.startswith(ROWWISE) else (COLUMNWISE, ROWWISE)
    return new + name[len(old) :]


# ---- pieces


def _matrix_range(func, t, dim: int, start: int, length: int) -> tuple[int, int, int]:
    """(matrix dimension, start, length) of [start, start + length) along dimension `dim` of the tensor."""
    M, K = t._matrix
    if t.dim() == 1 and M != 1:  # a flat view: whole rows only
        if start % K or length % K:
            raise ValueError(f"{func}: [{start}:{start + length}) of a flat view does not hold whole rows of {K}")
        return moves.ROWS, start // K, length // K
    if dim == t.dim() - 1:
        return moves.COLUMNS, start, length
    if any(n != 1 for n in t.shape[:dim]):
        raise ValueError(
            f"{func}: dimension {dim} of {tuple(t.shape)} is not the outermost nor the last; its pieces are not "
            "contiguous rows. View the tensor as a matrix or call .dequantize()"
        )
    inner = math.prod(t.shape[dim + 1 : -1])
    return moves.ROWS, start * inner, length * inner


def _piece(func, t, dim: int, start: int, length: int, out: torch.Tensor):
    """Rows or columns of the payloads as a tensor with the geometry of `out`."""
    if length == t.shape[dim] and out.dim() == t.dim():
        return _same(func, t)
    axis, start, length = _matrix_range(func, t, dim, start, length)
    pieces = [None if s is None else moves.narrow(s, axis, start, length) for s in (t.rowwise, t.columnwise)]
    row, col = (None if p is None else p[0] for p in pieces)
    row, col = _share(t, row, col)
    matrix = list(t._matrix)
    matrix[axis] = length
    shared = dict.fromkeys(t._shared or ())
    for p in pieces:
        shared.update(dict.fromkeys(f"{p[0].direction}_{name}" for name in p[1]) if p is not None else {})
    return t._like(
        row, col, out.shape, out.stride(), out.storage_offset(), matrix=tuple(matrix),
        shared=tuple(shared),
    )  # fmt: skip


@implements(aten.slice.Tensor)
def _slice(func, t, dim=0, start=None, end=None, step=1):
    """A range on block bounds; a step of more than one only where it changes nothing."""
    out = _geometry(func, t, dim, start, end, step)
    dim = dim % t.dim()
    if step != 1 and t.shape[dim] > 1:
        raise ValueError(f"{func}: step {step} along dimension {dim} cuts blocks of HybridTensor({t.describe()})")
    first = 0 if start is None else min(max(start + t.shape[dim] if start < 0 else start, 0), t.shape[dim])
    return _piece(func, t, dim, first, out.shape[dim], out)


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func, t, sizes, dim=0):
    outs = _geometry(func, t, sizes, dim)
    dim = dim % t.dim()
    starts = [0]
    for out in outs:
        starts.append(starts[-1] + out.shape[dim])
    return [_piece(func, t, dim, start, out.shape[dim], out) for start, out in zip(starts, outs)]


@implements(aten.select.int)
def _select(func, t, dim, index):
    out = _geometry(func, t, dim, index)
    dim = dim % t.dim()
    if dim == t.dim() - 1:
        raise ValueError(f"{func}: one column of HybridTensor({t.describe()}) is not a tensor with its last dimension")
    return _piece(func, t, dim, index % t.shape[dim], 1, out)


@implements(aten.unbind.int)
def _unbind(func, t, dim=0):
    return [_select(aten.select.int, t, dim, i) for i in range(t.shape[dim])]


# ---- copies


def _share(t, row, col):
    """Where both directions of `t` are one high-precision tensor, those of a result are too."""
    if row is not None and col is not None and t.rowwise.qdata is t.columnwise.qdata:
        col = col.with_buffers({"qdata": row.qdata})
    return row, col


def _mapped(t, f):
    row, col = (None if s is None else f(s) for s in (t.rowwise, t.columnwise))
    return _share(t, row, col)


def _new_buffers(f):
    return lambda s: moves.map_buffers(s, f)


@implements(aten.clone.default)
def _clone(func, t, *, memory_format=None):
    """Own, contiguous buffers; a piece that shared scales now has its own."""
    out = _geometry(func, t, memory_format=memory_format)
    row, col = _mapped(t, _new_buffers(lambda b: b.clone(memory_format=torch.contiguous_format)))
    return t._like(row, col, out.shape, out.stride(), shared=hybrid.WHOLE, stale=set(t.stale))


@implements(aten._to_copy.default)
def _to_copy(
    func, t, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None
):  # fmt: skip
    """Another device, or another nominal dtype (quantized bytes stay; a high-precision payload is cast)."""
    dtype = dtype or t.dtype
    if dtype not in SOURCE_DTYPES:
        what = f"HybridTensor({t.describe()})"
        raise NotImplementedError(f"{func} to {dtype} has no meaning for {what}: call .dequantize()")
    out = _geometry(func, t, memory_format=memory_format)

    def move(s: QuantizedStorage) -> QuantizedStorage:
        buffers = {}
        for name, b in s.buffers().items():
            to = None if s.format.is_quantized else dtype
            b = b.to(device=device, dtype=to, non_blocking=non_blocking, copy=True).contiguous()
            buffers[name] = b.pin_memory() if pin_memory else b
        return replace(s, dtype=dtype, **buffers)

    row, col = _mapped(t, move)
    device = torch.device(device) if device is not None else None
    return t._like(row, col, out.shape, out.stride(), dtype=dtype, device=device, shared=hybrid.WHOLE, stale=set(t.stale))


@implements(aten.new_zeros.default, aten.new_empty.default, aten.zeros_like.default, aten.empty_like.default)
def _new(func, t, size=None, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    """A HybridTensor of the same formats and directions; for another dtype (an FP32 master, say) a plain tensor."""
    size = tuple(t.shape if size is None else size)
    zero = func in (aten.new_zeros.default, aten.zeros_like.default)
    device = t.device if device is None else torch.device(device)
    if dtype is not None and dtype != t.dtype:
        make = torch.zeros if zero else torch.empty
        return make(size, dtype=dtype, device=device, pin_memory=bool(pin_memory))
    M, K = hybrid.matrix_shape(size)
    new = [
        None if s is None else moves.new_like(s, (M, K), device=device, zero=zero)
        for s in (t.rowwise, t.columnwise)
    ]
    if pin_memory:
        new = [None if s is None else moves.map_buffers(s, torch.Tensor.pin_memory) for s in new]
    row, col = _share(t, *new)
    return t._like(row, col, size, None, device=device, matrix=(M, K), shared=hybrid.WHOLE, stale=set())


@implements(aten.copy_.default)
def _copy_(func, dst, src, non_blocking=False):
    if not isinstance(dst, hybrid.HybridTensor):  # decode into a plain tensor
        return dst.copy_(src.dequantize(dtype=dst.dtype if dst.dtype in SOURCE_DTYPES else torch.float32), non_blocking)
    if not isinstance(src, hybrid.HybridTensor):  # quantize anew, both directions from the source
        return dst.write(src.to(dst.device, non_blocking=non_blocking).expand(dst.shape))
    _check_bytes_fit(func, dst, src)
    for mine, theirs in ((dst.rowwise, src.rowwise), (dst.columnwise, src.columnwise)):
        if mine is not None:
            moves.copy_(mine, theirs)
    dst._stale.init_value = None
    if dst._shared is hybrid.WHOLE:
        dst._stale.clear()
    dst._stale.update(d for d in src.stale if getattr(dst, d) is not None)
    if dst._stale.master is not None and dst._shared is hybrid.WHOLE:
        dst._stale.follow(dst.detach().dequantize())
    return dst


def _check_bytes_fit(func, dst, src) -> None:
    """Raise unless `src` holds, byte for byte, everything `dst` does."""
    found, expected = f"{tuple(src.shape)} {src.describe()}", f"{tuple(dst.shape)} {dst.describe()}"
    fits = dst.shape == src.shape and dst._matrix == src._matrix
    for mine, theirs in ((dst.rowwise, src.rowwise), (dst.columnwise, src.columnwise)):
        fits = fits and (mine is None or (theirs is not None and theirs.format == mine.format))
    if not fits:
        raise ValueError(
            f"{func}: cannot copy the bytes of HybridTensor({found}) into HybridTensor({expected}); to quantize "
            "anew, copy from .dequantize()"
        )
    for name in dst._shared or ():  # reads the device; pieces only
        if not torch.equal(getattr(dst, name), getattr(src, name).to(dst.device)):
            raise ValueError(
                f"{func}: {name} of a piece of HybridTensor({expected}) also covers elements outside it, and the "
                "source's differs: copy the whole tensor"
            )


# ---- questions and memory


@implements(aten.equal.default)
def _equal(func, a, b):
    """Same shape, formats and bytes in every direction; NaN equals itself."""
    if not (isinstance(a, hybrid.HybridTensor) and isinstance(b, hybrid.HybridTensor)):
        raise NotImplementedError(f"{func} of a HybridTensor and a plain tensor: call .dequantize() and compare values")
    if a.shape != b.shape or a.dtype != b.dtype or a.quantizer != b.quantizer:
        return False
    return all(
        (mine is None) == (theirs is None) and (mine is None or moves.equal(mine, theirs))
        for mine, theirs in ((a.rowwise, b.rowwise), (a.columnwise, b.columnwise))
    )


@implements(aten.is_pinned.default)
def _is_pinned(func, t, device=None):
    return all(b.is_pinned() for b in t.payload_buffers())


@implements(aten._pin_memory.default)
def _pin_memory(func, t, device=None):
    row, col = _mapped(t, _new_buffers(lambda b: b.contiguous().pin_memory()))
    return t._like(row, col, t.shape, None, shared=hybrid.WHOLE, stale=set(t.stale))


@implements(aten.record_stream.default)
def _record_stream(func, t, stream):
    for b in t.payload_buffers():
        b.record_stream(stream)
