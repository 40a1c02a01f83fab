"""One direction's payload: plain tensors, their format and their memory layout. No autograd, no hidden state."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from . import kernels
from .formats import COLUMNWISE, ROWWISE, Format

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # torch's, by element type
# of block scales by a format's scale rule: as they are stored, and what the bytes are
SCALE_DTYPES = {"fp32": torch.float32, "e8m0": torch.uint8, "e4m3_amax": torch.uint8}
_SCALE_TYPES = {"fp32": torch.float32, "e8m0": torch.float8_e8m0fnu, "e4m3_amax": torch.float8_e4m3fn}


@dataclass(frozen=True, eq=False)
class QuantizedStorage:
    """Payload of one direction of a logical (M, K) matrix.

    format, direction   what the codes mean and which axis a GEMM contracts (rowwise: K, columnwise: M)
    shape               logical (M, K); leading dimensions of the tensor are flattened into M
    dtype               the nominal (high-precision) dtype this payload stands for
    transposed          False: qdata is (M, K) row-major. True: qdata is (K, M), as a GEMM reads a column operand.
                        Recorded, never guessed from a shape.
    qdata               uint8 codes; FP4 packs two a byte along the last stored dimension, the even one low.
                        `high_precision`: the tensor itself, (M, K), any strides.
    scale               block scales in `Format.scale_shape`, never swizzled, or None
    outer_amax          float32 amaxes of `Format.amax_shape` (NVFP4), or None

    A fresh payload's tensors are contiguous; those of a piece of one (storage_layout.py) may be strided views.
    """

    format: Format
    direction: str
    shape: tuple[int, int]
    dtype: torch.dtype
    transposed: bool
    qdata: torch.Tensor
    scale: torch.Tensor | None = None
    outer_amax: torch.Tensor | None = None

    BUFFERS = ("qdata", "scale", "outer_amax")

    @staticmethod
    def empty(fmt: Format, direction: str, shape, dtype, device, *, transposed=False, like=None) -> QuantizedStorage:
        """Unwritten payload for a cast to fill; high precision gets a tensor of `dtype`.

        like: a tensor of that device; where it is fake, so are the payload's, in its mode or out of it.
        """
        make = functools.partial(torch.empty, device=device) if like is None else functools.partial(_beside, like)
        M, K = shape
        if not fmt.is_quantized:
            return QuantizedStorage(fmt, direction, (M, K), dtype, False, make((M, K), dtype=dtype))
        rows, last = (K, M) if transposed else (M, K)
        qdata = make((rows, fmt.packed(last)), dtype=torch.uint8)
        scale = make(fmt.scale_shape(M, K, direction), dtype=SCALE_DTYPES[fmt.scale])
        outer = make(fmt.amax_shape(M, K, direction), dtype=torch.float32) if fmt.keeps_amax else None
        return QuantizedStorage(fmt, direction, (M, K), dtype, transposed, qdata, scale, outer)

    @classmethod
    def of(cls, format, direction, shape, dtype, transposed, qdata, scale=None, outer_amax=None) -> QuantizedStorage:
        """What the constructor makes, several times as fast: casts make one or two a call. Not for traced code."""
        made = object.__new__(cls)
        made.__dict__.update(
            format=format, direction=direction, shape=shape, dtype=dtype, transposed=transposed, qdata=qdata,
            scale=scale, outer_amax=outer_amax,
        )  # fmt: skip
        return made

    @property
    def device(self) -> torch.device:
        """Where its buffers lie."""
        return self.qdata.device

    def buffers(self) -> dict[str, torch.Tensor]:
        """The payload's tensors by name, in a fixed order; absent ones are left out."""
        return {n: t for n in self.BUFFERS if (t := getattr(self, n)) is not None}

    def with_buffers(self, buffers: dict[str, torch.Tensor]) -> QuantizedStorage:
        """The same payload over other tensors (after a copy, a gather or a load)."""
        return self.changed(**buffers)

    def changed(self, **fields) -> QuantizedStorage:
        """`dataclasses.replace`, several times as fast."""
        if torch.compiler.is_compiling():
            return replace(self, **fields)
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **fields)
        return other

    @property
    def nbytes(self) -> int:
        """Of all buffers together."""
        return sum(t.numel() * t.element_size() for t in self.buffers().values())

    def _require_quantized(self, what: str) -> None:
        if not self.format.is_quantized:
            raise ValueError(f"{what}: a high_precision payload has none")

    def codes(self) -> torch.Tensor:
        """uint8 (M, K), one code an element, in the tensor's own orientation (`rht`: transformed domain)."""
        self._require_quantized("codes()")
        M, K = self.shape
        codes = self.qdata
        if self.format.bits == 4:
            last = M if self.transposed else K
            codes = unpack_fp4(codes, last)
        return (codes.T if self.transposed else codes).contiguous()

    def block_scale(self) -> torch.Tensor:
        """float32 block scales without the outer level, shape `Format.scale_shape`."""
        self._require_quantized("block_scale()")
        return self.scale.view(_SCALE_TYPES[self.format.scale]).to(torch.float32)

    def outer_scale(self) -> torch.Tensor:
        """float32 outer decode scale (NVFP4's 1/enc; 1 elsewhere), shape () or (M, 1) / (1, K)."""
        self._require_quantized("outer_scale()")
        if self.outer_amax is None:
            return torch.ones((), dtype=torch.float32, device=self.device)
        return kernels.outer_scale(self.outer_amax, self.format, torch.empty_like(self.outer_amax))

    def scale_inv(self) -> torch.Tensor:
        """float32 decode scales, unexpanded: `block_scale() * outer_scale()`."""
        return self.block_scale() if self.outer_amax is None else self.block_scale() * self.outer_scale()

    def amax(self) -> torch.Tensor | None:
        """Float32 outer amaxes, or None for formats without."""
        return self.outer_amax

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode to a contiguous (M, K) tensor; FP32 arithmetic, then one rounding to `dtype`."""
        if not self.format.is_quantized:
            return self.qdata.to(dtype)
        return self.decode(_beside(self.qdata, self.shape, dtype=dtype))

    def decode(self, out: torch.Tensor, *, outer: bool = True, inverse_rht: bool = True) -> torch.Tensor:
        """Decode into `out`, a strided (M, K) tensor; see `kernels.dequantize` for the two switches."""
        if not self.format.is_quantized:
            return out.copy_(self.qdata)
        M, K = self.shape
        kernels.dequantize(
            *self._whole_buffers(), self.format, self.direction, M, K,
            transposed=self.transposed, out=out, outer=outer, inverse_rht=inverse_rht,
        )  # fmt: skip
        return out

    def _whole_buffers(self) -> list:
        return [None if t is None else t.contiguous() for t in (self.qdata, self.scale, self.outer_amax)]

    @property
    def operand_shape(self) -> tuple[int, int]:
        """(rows, contraction) of this payload as a GEMM operand: (M, K) rowwise, (K, M) columnwise."""
        return self.shape if self.direction == ROWWISE else self.shape[::-1]

    def operand(self, dtype: torch.dtype, *, outer: bool = True) -> torch.Tensor:
        """Decode to the GEMM view (rows, contraction), contraction contiguous; `rht` stays transformed."""
        out = self.unwritten_operand(dtype)
        if self.format.is_quantized:
            self.decode(self._of_operand(out), outer=outer, inverse_rht=False)
        return out

    def unwritten_operand(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for `operand`, which `decode_operands` fills; of a payload that is not quantized, the operand."""
        if self.format.is_quantized:
            return _beside(self.qdata, self.operand_shape, dtype=dtype)
        return self._of_operand(self.qdata.to(dtype))

    def _of_operand(self, t: torch.Tensor) -> torch.Tensor:
        """(M, K) of the GEMM view, and the GEMM view of (M, K)."""
        return t if self.direction == ROWWISE else t.T


def decode_operands(payloads, outs, *, outer=True, factor=None) -> None:
    """Decode A's and B's payloads into what their `unwritten_operand` gave, by one call of the kernels.

    outer: as for `operand`. factor: float32 (), set to the product of the payloads' outer scales, of one number each;
    of untraced tensors only, else ``RuntimeError``.
    """
    pairs = [(s, s._of_operand(out)) for s, out in zip(payloads, outs)]
    if any(kernels.traced(out) for _, out in pairs):
        if factor is not None:
            raise RuntimeError("decode_operands: a factor of traced tensors would stay unwritten")
        for s, out in pairs:
            if s.format.is_quantized:
                s.decode(out, outer=outer, inverse_rht=False)
        return
    operands = [
        (*s._whole_buffers(), s.format, s.direction, s.transposed, out, outer, False) if s.format.is_quantized else None
        for s, out in pairs
    ]  # fmt: skip
    if any(operands):
        kernels.decode_operands(*operands, factor)


def _beside(t: torch.Tensor, shape, dtype: torch.dtype) -> torch.Tensor:
    """Unwritten memory on the device of a tensor, fake where that is; Dynamo does not take this of a subclass's inner tensors."""
    if torch.compiler.is_compiling():
        return torch.empty(shape, dtype=dtype, device=t.device)
    return t.new_empty(shape, dtype=dtype)


def high_precision_storage(x: torch.Tensor, fmt: Format, direction: str, dtype: torch.dtype) -> QuantizedStorage:
    """The identity payload: `x` (M, K) itself, cast to the nominal dtype when it differs."""
    return QuantizedStorage(fmt, direction, tuple(x.shape), dtype, False, x.to(dtype))


def unpack_fp4(packed: torch.Tensor, n: int) -> torch.Tensor:
    """uint8 (..., ceil(n / 2)) -> codes (..., n): the even one is the low nibble."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :n]


def cast(
    x, fmt: Format, direction: str, *, dtype=None, amax=None, reduce_amax=None, state=None, rng=None,
    transposed=False, noop=None,
):  # fmt: skip
    """Cast `x` (M, K) to one direction's payload.

    amax: float32 of `fmt.amax_shape` (already reduced over ranks), computed from `x` when None. reduce_amax: a
    function of a computed amax that gives the one to use, such as its maximum over ranks. state: a
    `DelayedState`, required by delayed scaling, whose history records this tensor's amax. rng: an `Rng`,
    required by stochastic rounding. noop: int32 device flag; non-zero records nothing and leaves the result
    unwritten. Raises ``ValueError`` when state or rng is missing.
    """
    dtype = dtype or x.dtype
    if not fmt.is_quantized:
        return high_precision_storage(x, fmt, direction, dtype)
    out = QuantizedStorage.empty(fmt, direction, tuple(x.shape), dtype, x.device, transposed=transposed, like=x)
    cast_into(out, x, amax=amax, reduce_amax=reduce_amax, state=state, rng=rng, noop=noop)
    return out


def cast_into(out: QuantizedStorage, x, *, amax=None, reduce_amax=None, state=None, rng=None, noop=None) -> None:
    """Cast `x` into an existing payload, same data pointers. `noop`: int32 device flag, non-zero changes nothing."""
    check_call(out.format, out.direction, state, rng)
    if not out.format.is_quantized:
        new = x.to(out.dtype)
        out.qdata.copy_(new if noop is None else torch.where(noop.bool(), out.qdata, new))
        return
    in_parts = out.format.sr and rng.parts is not None
    if amax is None and (in_parts or reduce_amax is not None):
        amax = _own_amax(out, x)
        amax = amax if amax is None or reduce_amax is None else reduce_amax(amax)
    if in_parts and _cast_parts(out, x, amax, rng, noop):
        return
    row, col = (out, None) if out.direction == ROWWISE else (None, out)
    cast_pair(row, col, x, amax=(amax, amax), state=(state, state), rng=rng, noop=noop)


def cast_pair(
    row: QuantizedStorage | None, col: QuantizedStorage | None, x, *,
    amax=(None, None), state=(None, None), rng=None, noop=None, derived=False,
) -> None:  # fmt: skip
    """Cast `x` into quantized payloads of one or both directions by one kernel call; arguments as for `cast_into`.

    derived: the column is cast from the row's decode; only where `derives_in_one_call` says so.
    """
    copies = []
    sides = [None if o is None else _side(o, a, s, noop, copies) for o, a, s in zip((row, col), amax, state)]
    noisy = any(o is not None and o.format.sr for o in (row, col))
    kernels.quantize_pair(
        x, *sides, derived=derived, rng=rng.words(x.shape[1]) if noisy else None,
        row_ids=rng.row_ids if noisy else None, noop=noop,
    )  # fmt: skip
    for buffer, written in copies:
        buffer.copy_(written)


def _side(out: QuantizedStorage, amax, state, noop, copies: list) -> kernels.Side:
    """A payload as the kernels see it. Pieces are strided: written through a copy, which `copies` remembers."""

    def whole(buffer):
        written = buffer.contiguous()
        if written is not buffer:
            copies.append((buffer, written))
        return written

    fmt, outer, measured = out.format, None, None
    shape = fmt.amax_shape(*out.shape, out.direction)
    if fmt.is_stateful:
        outer = state.scale
        if amax is None:
            measured = state.history
        else:
            state.record(amax, noop)
    elif amax is not None:
        outer = amax.contiguous()
        _keep_amax(out, amax, noop)
    elif shape is not None:
        kept = out.outer_amax
        outer = measured = _beside(out.qdata, shape, dtype=torch.float32) if kept is None else whole(kept)
    return kernels.Side(fmt, whole(out.qdata), whole(out.scale), outer, out.transposed, fmt.is_stateful, measured)


def derives_in_one_call(col: Format, x, dtype, amax) -> bool:
    """Whether `cast_pair` can cast a column from the row's decode, nominally `dtype`: on CUDA, where no amax of the
    decode is needed before the cast."""
    known = col.outer_axis == "none" or col.is_stateful or amax is not None
    return x.is_cuda and kernels.in_one_call(x) and known and dtype == x.dtype


def _own_amax(out: QuantizedStorage, x) -> torch.Tensor | None:
    fmt, shape = out.format, out.format.amax_shape(*x.shape, out.direction)
    return None if shape is None else kernels.amax(x, fmt, out.direction, x.new_empty(shape, dtype=torch.float32))


def _keep_amax(out: QuantizedStorage, amax, noop) -> None:
    if out.outer_amax is not None:
        out.outer_amax.copy_(amax if noop is None else torch.where(noop.bool(), out.outer_amax, amax))


def _cast_parts(out: QuantizedStorage, x, amax, rng, noop) -> bool:
    """Cast each of the runs that a shard is made of with its own key; False, and nothing done, where they cut blocks."""
    from .storage_layout import granularity, narrow  # it builds on this module

    dim, keys = rng.parts
    length = x.shape[dim] // len(keys)
    if x.shape[dim] % len(keys) or length % granularity(out, dim):
        return False
    _keep_amax(out, amax, noop)
    for i, key in enumerate(keys):
        piece, _ = narrow(out, dim, i * length, length)
        run = amax.narrow(dim, i * length, length) if amax.dim() and amax.shape[dim] > 1 else amax
        cast_into(piece, x.narrow(dim, i * length, length), amax=run, rng=key, noop=noop)
    return True


def check_call(fmt: Format, direction: str, state, rng) -> None:
    if fmt.is_stateful and state is None:
        raise ValueError(f"{direction} {fmt}: delayed scaling needs `state` (an amax history); see mh.DelayedState")
    if fmt.sr and rng is None:
        raise ValueError(f"{direction} {fmt}: stochastic rounding needs `rng`; see mh.Rng")


def derive_columnwise(row: QuantizedStorage, fmt: Format, **kwargs) -> QuantizedStorage:
    """`rowwise_dequantized`: the one way a column payload is made from a row payload.

    The row's decode is rounded to the nominal dtype (nearest even) and cast columnwise.
    """
    if row.direction != ROWWISE:
        raise ValueError(f"columnwise is derived from a rowwise payload, found {row.direction}")
    return cast(row.dequantize(row.dtype), fmt, COLUMNWISE, dtype=row.dtype, **kwargs)
