"""GemmPlan: everything about a module's three GEMMs, decided and checked once, at build.

Saving for backward, gathering, offload, tests and `explain` read the plan; nothing is decided again at run time.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from . import gemm as gemms
from .formats import COLUMNWISE, DIRECTIONS, ROWWISE, nearest
from .gemm import DIMENSIONS, OPERANDS, DeviceKind, GemmBackend, GemmPair
from .lean import LeanCasts
from .quantizer import HybridQuantizer, as_matrix
from .roles import GRAD_OUTPUT, INPUT, WEIGHT
from .sharding import PAYLOAD as TRAVELS
from .sharding import ROW_PAYLOAD, Sharding, column_gather, covers_other_ranks, cuts_blocks, row_gather
from .storage import QuantizedStorage, derive_columnwise
from .tensor import HybridTensor, payload

ORIGINAL, PAYLOAD = "original", "payload"
SAVE_INPUT = (PAYLOAD, ORIGINAL)


class PlanError(ValueError):
    """A recipe asks a module for something it cannot do; names module, gemm, operands, formats and device."""


@dataclass(frozen=True)
class GemmStep:
    """One GEMM of the plan: which payloads it multiplies and on which backend.

    multiply    the backend's function of (A, B, out_dtype, accumulate_into), made once for the pair
    directions  of A and of B
    counted_as  (gemm, backend name): its key in `GemmPlan.calls`
    shielded    type of the device whose autocast must not reach the product; None for high precision, which follows it
    """

    pair: GemmPair
    backend: GemmBackend
    multiply: Callable = field(init=False, compare=False, repr=False)
    directions: tuple[str, str] = field(init=False, compare=False, repr=False)
    counted_as: tuple[str, str] = field(init=False, compare=False, repr=False)
    shielded: str | None = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "multiply", self.backend.prepare(self.pair))
        object.__setattr__(self, "directions", tuple(direction for _, direction in OPERANDS[self.pair.gemm]))
        object.__setattr__(self, "counted_as", (self.pair.gemm, self.backend.name))
        device = self.pair.device.type
        shielded = self.pair.is_quantized and torch.amp.is_autocast_available(device)
        object.__setattr__(self, "shielded", device if shielded else None)

    @property
    def native(self) -> bool:
        return self.backend.native

    @property
    def runs(self) -> str:
        """``native``, ``emulated`` or ``high precision``."""
        if not self.pair.is_quantized:
            return "high precision"
        return "native" if self.native else "emulated"

    @property
    def accumulation(self) -> str:
        """``fast`` or ``full``: what its sums keep, which only some native GEMMs let a recipe choose."""
        return self.backend.accumulation(self.pair)

    def alignment(self) -> dict[str, int]:
        """Multiples to which the module's dimensions M, N and K are padded inside this gemm."""
        return dict(zip(DIMENSIONS[self.pair.gemm], self.backend.alignment(self.pair)))


@dataclass(frozen=True)
class GemmPlan:
    """The resolved plan of one linear.

    quantizers  operand -> HybridQuantizer
    saved       operand -> what is kept for backward: ``columnwise`` payload, ``rowwise`` payload (the column is
                decoded from it in backward) or ``original`` (the high-precision tensor, cast in backward)
    sharding    how tensor-parallel ranks split the operands; None: one rank
    reduced     operand -> (rowwise, columnwise): whether its outer amaxes are max-reduced over the ranks before a cast
    calls       counts of GEMMs run, by (gemm, backend name); for tests and reports. Compiled code does not count.
    gathers     counts of gathers run, by (operand, direction, what travelled: sharding.py's words)
    draws       the operands that round stochastically, in any direction
    """

    name: str
    device: DeviceKind
    fprop: GemmStep
    dgrad: GemmStep
    wgrad: GemmStep
    quantizers: dict[str, HybridQuantizer]
    saved: dict[str, str]
    sharding: Sharding | None = None
    reduced: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    calls: Counter = field(default_factory=Counter, compare=False)
    gathers: Counter = field(default_factory=Counter, compare=False)
    draws: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        draws = tuple(op for op, q in self.quantizers.items() if any(f is not None and f.sr for f in q.formats()))
        object.__setattr__(self, "draws", draws)

    @property
    def uses_rng(self) -> bool:
        """Whether any operand rounds stochastically."""
        return bool(self.draws)

    @functools.cached_property
    def lean(self) -> LeanCasts | None:
        """How `LeanLinear` casts this plan's operands; None for a plan that needs all of linear.py."""
        return LeanCasts.of(self) if type(self) is GemmPlan else None  # a subclass wants to see every call

    @property
    def gathered(self) -> str | None:
        """The operand whose rows come together from all ranks before its gemms, or None."""
        return None if self.sharding is None else self.sharding.gathered

    def gather(self, direction: str, rows: int) -> str:
        """What travels of the gathered operand's direction, for `rows` rows a rank: sharding.py's words."""
        quantizer = self.quantizers[self.gathered]
        if direction == ROWWISE:
            return row_gather(quantizer, rows)
        return column_gather(quantizer, rows, row_is_there=self.gathered == GRAD_OUTPUT)

    def kept_of_gathered(self, rows: int) -> str:
        """What is kept for backward of this rank's rows of a gathered input; as `saved`."""
        saved = self.saved[INPUT]
        if saved == ORIGINAL:
            return ORIGINAL
        return {TRAVELS: saved, ROW_PAYLOAD: ROWWISE}.get(self.gather(COLUMNWISE, rows), ORIGINAL)

    def cut_shards(self) -> list[str]:
        """``weight.rowwise nvfp4`` of every direction whose blocks end at shard bounds, not where the whole tensor's do.

        Such codes are those of the shard as a tensor of its own: right, but not the bytes of one rank.
        """
        found = []
        for operand, shard in ({} if self.sharding is None else self.sharding.shards).items():
            for direction, fmt in zip((ROWWISE, COLUMNWISE), self.quantizers[operand].formats()):
                if operand != self.gathered and shard.length and cuts_blocks(fmt, direction, shard, shard.length):
                    found.append(f"{operand}.{direction} {fmt}")
        return found

    def steps(self) -> dict[str, GemmStep]:
        """The three gemms by name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    def alignment(self, dimension: str) -> int:
        """The multiple of dimension ``M``, ``N`` or ``K`` at which no gemm of this module pads anything."""
        return math.lcm(*(step.alignment().get(dimension, 1) for step in self.steps().values()))

    def counts(self) -> Counter:
        """GEMMs run so far, by what they ran as: ``native``, ``emulated``, ``high precision``."""
        total = Counter()
        for (gemm, _), n in self.calls.items():
            total[getattr(self, gemm).runs] += n
        return total

    def transposed(self, operand: str) -> bool:
        """Whether this operand's columnwise payload is written contraction-contiguous."""
        step = self.dgrad if operand == WEIGHT else self.wgrad
        return step.backend.wants_transposed(step.pair)

    def quantize(self, operand: str, x: torch.Tensor, *, rowwise=False, columnwise=False, **keys):
        """(rowwise, columnwise) payloads of `x` (..., K) for the directions asked for. keys: see `HybridQuantizer.cast`."""
        return self.quantizers[operand].cast(
            as_matrix(x), rowwise=rowwise, columnwise=columnwise, transposed=self.transposed(operand), **keys
        )

    def held_payloads(self, operand: str, x: HybridTensor, rowwise: bool, columnwise: bool):
        """(rowwise, columnwise) payloads of an operand that was quantized before, no cast.

        Raises `PlanError` when they are not what this plan's own cast would be: other formats, a missing direction, or
        one that an update left behind.
        """
        quantizer, spec = self.quantizers[operand], x.spec
        source = spec.quantizer[2]
        wanted = rowwise, columnwise
        held = [payload(x, direction) if want else None for direction, want in zip(DIRECTIONS, wanted)]
        for direction, want, s, fmt in zip(DIRECTIONS, wanted, held, quantizer.formats()):
            same_source = direction == ROWWISE or source == quantizer.columnwise_source
            fresh = direction not in spec.stale or direction in x._stale.promised
            if want and not (s is not None and s.format == fmt and same_source and fresh):
                raise PlanError(
                    f"{self.label}: {operand} was quantized before, to {x.describe()}, columnwise_source={source}"
                    f"{'' if fresh else f' ({direction} is stale)'}; the plan needs {operand}.{direction} {fmt}, "
                    f"columnwise_source={quantizer.columnwise_source}"
                )
        return held

    def derive(self, operand: str, row: QuantizedStorage, *, rng=None, state=None, reduce_amax=None):
        """The columnwise payload from a rowwise one."""
        return derive_columnwise(
            row, self.quantizers[operand].columnwise, rng=rng, state=None if state is None else state[1],
            reduce_amax=reduce_amax, transposed=self.transposed(operand),
        )  # fmt: skip

    def run(self, gemm: str, a, b, out_dtype, accumulate_into=None) -> torch.Tensor:
        """`A @ B.T`, both payloads in the directions this gemm contracts. Shapes: gemm/backend.py.

        Raises `PlanError` naming a direction that is missing.
        """
        step = getattr(self, gemm)
        if a is None or b is None or (a.direction, b.direction) != step.directions:
            self._raise_missing(gemm, a, b)
        if not torch.compiler.is_compiling():
            self.calls[step.counted_as] += 1
        if step.shielded is not None and torch.is_autocast_enabled(step.shielded):
            with torch.autocast(step.shielded, enabled=False):  # operands are decoded in the dtype that is exact
                return step.multiply(a, b, out_dtype, accumulate_into)
        return step.multiply(a, b, out_dtype, accumulate_into)

    def _raise_missing(self, gemm: str, *payloads):
        for s, (operand, direction) in zip(payloads, OPERANDS[gemm]):
            found = "nothing" if s is None else s.direction
            if found != direction:
                raise PlanError(f"{self.label}, {gemm}: needs {operand}.{direction}, found {found}")

    @property
    def label(self) -> str:
        """The module as messages name it."""
        return module_label(self.name)


def describe_runs(plans) -> str:
    """How many gemms of some plans run as what: ``gemms: 4 emulated, 2 native``."""
    counts = Counter(step.runs for plan in plans for step in plan.steps().values())
    return "gemms: " + (", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none")


def module_label(name: str) -> str:
    return f"module {name or '(unnamed)'}"


def describe_operands(pair: GemmPair) -> list[str]:
    """Operands A and B, each as ``input.rowwise mxfp8_e4m3``."""
    return [f"{op}.{direction} {fmt}" for (op, direction), fmt in zip(OPERANDS[pair.gemm], (pair.a, pair.b))]


def _saved(operand: str, quantizer: HybridQuantizer, save_input: str, save_weight: str) -> str:
    row, column = quantizer.formats()
    if operand == WEIGHT and save_weight == ORIGINAL:
        return ORIGINAL
    if quantizer.derives_columnwise:
        # the row is enough: keep it where it is smaller. A weight's column is rather made once a step (its cache)
        smaller = not column.is_quantized or (operand == INPUT and row.bits < column.bits)
        return ROWWISE if smaller else COLUMNWISE
    if not column.is_quantized or (operand == INPUT and save_input == ORIGINAL):
        return ORIGINAL
    return COLUMNWISE


def build_plan(
    resolved, name: str, device, *, backend: str | None = None, save_input: str = PAYLOAD,
    save_weight: str = PAYLOAD, sharding: Sharding | None = None,
) -> GemmPlan:  # fmt: skip
    """Build and check the plan of one module.

    resolved: a recipe's `ModuleQuant` (operand -> formats, accumulate). name: the module's full name, for
    messages. device: a torch device, or a `DeviceKind` to plan for one that is not there. backend: force one by
    name (tests). save_input: ``payload`` keeps the quantized input for backward; ``original`` keeps the tensor and
    casts in backward, for inputs that something else keeps alive anyway. A column derived from the row always
    comes from the payload, whatever is chosen here. save_weight: ``original`` casts the weight's column in backward, for
    weights whose memory comes and goes. sharding: how tensor-parallel ranks split the operands.

    Raises `PlanError` naming module, gemm, operands, formats and device.
    """
    if save_input not in SAVE_INPUT:
        raise PlanError(
            f"{module_label(name)}: save_input {save_input!r}{nearest(str(save_input), SAVE_INPUT)} "
            f"Valid: {', '.join(SAVE_INPUT)}"
        )
    kind = DeviceKind.of(device)
    quantizers = {op: HybridQuantizer(*resolved.quantizer(op)) for op in (INPUT, WEIGHT, GRAD_OUTPUT)}
    steps = {}
    for gemm, ((op_a, dir_a), (op_b, dir_b)) in OPERANDS.items():
        a, b = getattr(quantizers[op_a], dir_a), getattr(quantizers[op_b], dir_b)
        pair = GemmPair(gemm, a, b, kind, resolved.accumulate[gemm])
        try:
            steps[gemm] = GemmStep(pair, gemms.choose(pair, backend))
        except ValueError as exc:
            operands = " x ".join(describe_operands(pair))
            raise PlanError(f"{module_label(name)}, {gemm}: {operands} on {kind}: {exc}") from None
    saved = {op: _saved(op, quantizers[op], save_input, save_weight) for op in (INPUT, WEIGHT)}
    reduced = {} if sharding is None else _reduced(quantizers, sharding)
    return GemmPlan(name, kind, **steps, quantizers=quantizers, saved=saved, sharding=sharding, reduced=reduced)


def _reduced(quantizers: dict[str, HybridQuantizer], sharding: Sharding) -> dict[str, tuple[bool, bool]]:
    found = {}
    for operand, shard in sharding.shards.items():
        row, col = quantizers[operand].formats()
        both = covers_other_ranks(row, ROWWISE, shard), covers_other_ranks(col, COLUMNWISE, shard)
        if any(both):
            found[operand] = both
    return found
