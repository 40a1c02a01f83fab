"""Quantization formats: what a name such as ``nvfp4:2d`` means.

A :class:`Format` is frozen data: element type, scale rule, block shape, options. It is parsed from a
string and prints back to it. Everything that differs between formats is a field of the format's
:class:`Family` (one table below), so that code elsewhere asks the format and never compares names.

The arithmetic is specified in docs/numerics.md and implemented once, in ``csrc/numerics``.
"""

from __future__ import annotations

import difflib
import functools
import math
from dataclasses import dataclass, field

ROWWISE, COLUMNWISE = "rowwise", "columnwise"
DIRECTIONS = (ROWWISE, COLUMNWISE)


@dataclass(frozen=True)
class Element:
    """A number type: its name, bits a code, largest magnitude and significant bits (implicit one included)."""

    name: str
    bits: int
    max: float
    significant_bits: int
    smallest: float  # above zero

    @property
    def largest_margin(self) -> int:
        """Powers of two by which `max` can be lowered and is not rounded to zero."""
        return math.ceil(math.log2(self.max / self.smallest))  # half of `smallest` goes to zero, more does not


ELEMENTS = {
    e.name: e
    for e in (
        Element("e4m3", 8, 448.0, 4, 2.0**-9),
        Element("e5m2", 8, 57344.0, 3, 2.0**-16),
        Element("e2m1", 4, 6.0, 2, 0.5),
    )
}


@dataclass(frozen=True)
class Option:
    """One option a family accepts: ``flag`` (no value), or a value parsed by ``parse`` with a default."""

    name: str
    parse: type | None = None  # None: a flag
    default: object = False
    choices: tuple = ()
    minimum: float | None = None
    maximum: float = math.inf

    def read(self, text: str | None, owner: str):
        if self.parse is None:
            if text is not None:
                raise ValueError(f"{owner}: option {self.name!r} takes no value, found {text!r}")
            return True
        if text is None:
            raise ValueError(f"{owner}: option {self.name!r} needs a value, as in {self.name}={self.default}")
        try:
            value = self.parse(text)
        except ValueError:
            raise ValueError(f"{owner}: option {self.name}={text!r} is not a valid {self.parse.__name__}") from None
        if self.choices and value not in self.choices:
            raise ValueError(f"{owner}: option {self.name}={text!r}; valid: {', '.join(map(str, self.choices))}")
        if self.minimum is not None and not (value >= self.minimum and math.isfinite(value)):
            raise ValueError(f"{owner}: option {self.name}={text!r} must be a finite number >= {self.minimum:g}")
        if self.minimum is not None and value > self.maximum:
            raise ValueError(f"{owner}: option {self.name}={text!r} must be at most {self.maximum:.8g}")
        return value


@dataclass(frozen=True)
class Family:
    """What formats of one name share.

    ``block``: rowwise block as (rows, columns); ``None`` means the whole extent.
    ``scale``: ``none`` | ``fp32`` (a decode scale a block) | ``e8m0`` (an exponent byte a block) |
    ``e4m3_amax`` (an E4M3 byte a block and an FP32 amax a tensor or row).
    ``exclusive``: option sets of which at most one may be given, each with the reason.
    """

    name: str
    elements: tuple[str, ...]
    scale: str
    block: tuple[int | None, int | None]
    options: tuple[Option, ...] = ()
    exclusive: tuple[tuple[frozenset, str], ...] = ()
    stateful: bool = False


def _flags(*names: str) -> tuple[Option, ...]:
    return tuple(Option(n) for n in names)


_EPS = Option("eps", float, 0.0, minimum=0.0, maximum=3.4028234e38)  # of FP32
_POW2 = (frozenset({"pow2", "no_pow2"}), "they contradict each other")
_FP8 = ("e4m3", "e5m2")

FAMILIES = {
    f.name: f
    for f in (
        Family("high_precision", (), "none", (None, None)),
        Family("fp8_current", _FP8, "fp32", (None, None), (*_flags("pow2", "no_pow2"), _EPS), (_POW2,)),
        Family(
            "fp8_delayed",
            _FP8,
            "fp32",
            (None, None),
            (
                Option("history", int, 1024, minimum=1, maximum=2**20),
                Option("margin", int, 0, minimum=0),
                Option("algo", str, "max", choices=("max", "most_recent")),
            ),
            stateful=True,
        ),
        Family("fp8_rowwise", _FP8, "fp32", (1, None), (*_flags("pow2", "no_pow2"), _EPS), (_POW2,)),
        Family("fp8_block", _FP8, "fp32", (1, 128), (*_flags("2d", "pow2", "no_pow2"), _EPS), (_POW2,)),
        Family("mxfp8", _FP8, "e8m0", (1, 32), _flags("2d")),
        Family(
            "nvfp4",
            ("e2m1",),
            "e4m3_amax",
            (1, 16),
            _flags("2d", "row_scaled", "rht", "sr"),
            (
                (frozenset({"2d", "row_scaled"}), "a tile's scale spans rows, a row's amax does not"),
                (frozenset({"2d", "rht"}), "the transform mixes one axis only, a tile's scale is shared by both"),
            ),
        ),
    )
}

# families whose FP32 scales are powers of two unless `no_pow2` says otherwise
_POW2_BY_DEFAULT = frozenset({"fp8_block"})


# properties of a Format
_FACTS = ("scale", "is_quantized", "is_stateful", "bits", "tile", "pow2", "eps", "rht", "sr", "row_scaled", "is_per_tensor",
          "outer_axis", "keeps_amax")  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A quantization format. Make one with :func:`parse_format`; ``str()`` gives the canonical name back."""

    family: str
    element: str | None = None
    options: tuple[tuple[str, object], ...] = ()
    name: str = field(default="", compare=False)

    def __post_init__(self):
        for name in _FACTS:  # every cast asks: worked out once, here
            getattr(self, name)

    def __str__(self) -> str:
        return self.name

    def option(self, name: str):
        """Value of an option, or its default (False for a flag that is not set)."""
        for key, value in self.options:
            if key == name:
                return value
        for opt in FAMILIES[self.family].options:
            if opt.name == name:
                return opt.default
        return False

    @functools.cached_property
    def scale(self) -> str:
        return FAMILIES[self.family].scale

    @functools.cached_property
    def is_quantized(self) -> bool:
        return self.scale != "none"

    @functools.cached_property
    def is_stateful(self) -> bool:
        """True for delayed scaling: quantizing needs an amax history."""
        return FAMILIES[self.family].stateful

    @functools.cached_property
    def bits(self) -> int:
        """Bits a code; 16 for high precision."""
        return ELEMENTS[self.element].bits if self.element else 16

    @functools.cached_property
    def tile(self) -> bool:
        """True when a scale covers a square tile and is therefore shared by both directions."""
        return bool(self.option("2d"))

    @functools.cached_property
    def pow2(self) -> bool:
        return bool(self.option("pow2")) or (self.family in _POW2_BY_DEFAULT and not self.option("no_pow2"))

    @functools.cached_property
    def eps(self) -> float:
        return float(self.option("eps"))

    @functools.cached_property
    def rht(self) -> bool:
        return bool(self.option("rht"))

    @functools.cached_property
    def sr(self) -> bool:
        return bool(self.option("sr"))

    @functools.cached_property
    def row_scaled(self) -> bool:
        return bool(self.option("row_scaled"))

    @functools.cached_property
    def is_per_tensor(self) -> bool:
        return self.is_quantized and FAMILIES[self.family].block == (None, None)

    @functools.cached_property
    def outer_axis(self) -> str:
        """What one FP32 outer scale or amax covers: ``none``, ``tensor`` or ``row`` (of the contraction view)."""
        if FAMILIES[self.family].block == (1, None) or self.row_scaled:
            return "row"
        return "tensor" if self.is_per_tensor or self.keeps_amax else "none"

    @functools.cached_property
    def keeps_amax(self) -> bool:
        """Whether a payload holds its outer amaxes, which the decode reads."""
        return self.scale == "e4m3_amax"

    def packed(self, num: int) -> int:
        """Bytes of a stored row of `num` codes."""
        return -(-num * self.bits // 8)

    def block(self, direction: str) -> tuple[int | None, int | None]:
        """Block shape (rows, columns) in the (M, K) tensor; ``None`` is the whole extent."""
        bm, bk = FAMILIES[self.family].block
        if self.tile:
            return bk, bk
        return (bm, bk) if direction == ROWWISE else (bk, bm)

    def scale_shape(self, M: int, K: int, direction: str) -> tuple[int, ...]:
        """Shape of the block scales of an (M, K) tensor; ``()`` for one scale a tensor."""
        bm, bk = self.block(direction)
        if bm is None and bk is None:
            return ()
        return (1 if bm is None else -(-M // bm), 1 if bk is None else -(-K // bk))

    def amax_shape(self, M: int, K: int, direction: str) -> tuple[int, ...] | None:
        """Shape of the FP32 amaxes a cast needs before it starts: ``()``, (M, 1), (1, K), or None for none."""
        if self.outer_axis == "none":
            return None
        if self.outer_axis == "tensor":
            return ()
        return (M, 1) if direction == ROWWISE else (1, K)

    @property
    def exactness(self) -> tuple:
        """Sort key, smaller is more exact: wider codes first, then smaller blocks."""
        block = [math.inf if b is None else b for b in self.block(ROWWISE)]
        return (-self.bits, block[0] * block[1])


def shares_codes(row: Format, column: Format) -> bool:
    """Whether both directions of a tensor hold the same codes and scales, so that one is the other in another layout."""
    return row == column and (row.is_per_tensor or row.tile) and not row.sr


def format_names() -> list[str]:
    """Every valid name without options."""
    return [f"{f.name}_{e}" if len(f.elements) > 1 else f.name for f in FAMILIES.values() for e in (f.elements or ("",))]


def describe_options(family: Family) -> str:
    return ", ".join(o.name if o.parse is None else f"{o.name}={o.default}" for o in family.options) or "none"


def nearest(word: str, valid) -> str:
    """'; did you mean ...?' or ''. Where a word was cut short, the first valid one that it begins: E4M3 before E5M2."""
    valid = list(valid)
    close = [name for name in valid if word and name.startswith(f"{word}_")]
    close = close or difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


_NOT_QUANTIZED = ("bf16", "bfloat16", "fp16", "float16", "fp32", "float32", "none", "hp")  # words of others for it


def _split_base(base: str, text: str) -> tuple[Family, str | None]:
    for family in FAMILIES.values():
        if len(family.elements) <= 1 and base == family.name:
            return family, (family.elements[0] if family.elements else None)
        for element in family.elements:
            if len(family.elements) > 1 and base == f"{family.name}_{element}":
                return family, element
    names = format_names()
    hint = f"; not to quantize is 'high_precision'." if base in _NOT_QUANTIZED else nearest(base, names) or "."
    raise ValueError(f"unknown format {text!r}{hint} Valid formats: {', '.join(names)}")


@functools.lru_cache(maxsize=None)
def parse_format(text: str) -> Format:
    """Parse ``name`` or ``name:option,option=value`` into a :class:`Format`.

    Raises ``ValueError`` naming the valid formats or options when the text is not one, and the reason when
    options exclude each other.
    """
    if isinstance(text, Format):
        return text
    if not isinstance(text, str):
        raise ValueError(f"a format is a string such as 'mxfp8_e4m3', found {text!r}")
    base, colon, rest = text.strip().partition(":")
    family, element = _split_base(base, text)
    known = {o.name: o for o in family.options}
    chosen: dict[str, object] = {}
    for item in rest.split(",") if colon else ():
        key, eq, value = item.strip().partition("=")
        if key not in known:
            raise ValueError(
                f"format {text!r}: unknown option {key!r}{nearest(key, known) or '.'} "
                f"Options of {base}: {describe_options(family)}"
            )
        if key in chosen:
            raise ValueError(f"format {text!r}: option {key!r} given twice")
        chosen[key] = known[key].read(value if eq else None, f"format {text!r}")
    for group, reason in family.exclusive:
        both = [o.name for o in family.options if o.name in group & set(chosen)]
        if len(both) > 1:
            raise ValueError(f"format {text!r}: options {' and '.join(both)} cannot be combined: {reason}")
    if (margin := chosen.get("margin", 0)) > (limit := ELEMENTS[element].largest_margin if element else 0):
        raise ValueError(
            f"format {text!r}: option margin={margin}: every element would be rounded to zero; {element} has room for {limit}"
        )
    return _canonical(family, element, chosen)


def _canonical(family: Family, element: str | None, chosen: dict) -> Format:
    redundant = {"pow2"} if family.name in _POW2_BY_DEFAULT else {"no_pow2"}
    kept = tuple(
        (o.name, chosen[o.name])
        for o in family.options
        if o.name in chosen and o.name not in redundant and chosen[o.name] != o.default
    )
    words = [k if v is True else f"{k}={v}" for k, v in kept]
    base = f"{family.name}_{element}" if len(family.elements) > 1 else family.name
    return Format(family.name, element, kept, base + (":" + ",".join(words) if words else ""))


HIGH_PRECISION = parse_format("high_precision")
