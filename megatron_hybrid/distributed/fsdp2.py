"""FSDP2 (`fully_shard`) that gathers payload bytes of one direction instead of high-precision weights.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    ctl = mh.prepare(model, "mxfp8", num_microbatches=2)
    gathers = mh.gather_quantized(model, ctl)    # print it: what is gathered, in which pass, how many bytes

The sharded parameters stay what they were, high-precision DTensors: any optimizer runs on them and any checkpoint holds
them. Only the all-gather changes: this rank's rows are cast first, with the bytes that casting the whole weight would
give them (`param_gather.ShardedWeights`), and the gathered parameter is a `HybridTensor`. Forward gathers what fprop
reads, backward what dgrad reads. Amaxes of what shards cut, or of whole tensors, are max-reduced in `ctl.begin_step`,
all in one collective: FSDP's own hooks communicate nothing but the gather.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, is_bw

from ..formats import DIRECTIONS
from ..gathered_experts import GatheredExperts
from ..plan import ORIGINAL, WEIGHT, PlanError
from ..runtime import LinearRuntime
from ..scaling import Pieces
from ..tensor import HybridTensor
from ..weights import WeightOwner, unfilled
from .param_gather import BOTH, ShardedWeights, part_read, reduce_amaxes
from .shard_map import overlap

FORWARD, BACKWARD = "forward", "backward"


def gather_quantized(model: torch.nn.Module, ctl, *, recompute: bool = False) -> QuantizedGathers:
    """Gather the weights of the model's quantized linears as payloads, from the next forward on.

    model: after `fully_shard` of its layers and of itself, off the meta device. ctl: its `Controller`, whose
    `begin_step` or `invalidate` must come before a forward that follows an optimizer's step or a load. recompute:
    activations are recomputed in backward, which then gathers the rowwise payload too.

    Weights that a plan reads in high precision (an expert's, of a grouped linear's), those that FSDP2 cuts along another
    dimension than the first, and shards of DTensors are left as they were; `QuantizedGathers.skipped` says why. What
    Megatron's tensor-parallel ranks split is gathered, with amaxes of all shards. Raises ``ValueError`` when no quantized
    linear of the model is sharded, for a model on the meta device, and for ``reshard_after_forward=<int>``, whose smaller
    gather FSDP2 keeps to itself.
    """
    sharded, mode = {}, Mode()
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None:
            module.register_forward_pre_hook(mode.note, prepend=True)  # before FSDP's own, which gathers
        for p in group.fsdp_params if group is not None else ():
            sharded[p._module_info.module, p._module_info.param_name] = group, p
    weights, skipped = [], {}
    for path, module in model.named_modules():
        found = sharded.get((module, "weight"))
        if found is None or "hq" not in module._modules:
            continue
        reason = _reason(path, module, *found)
        if reason is None:
            weights.append(GatheredWeight(path, module, *found, recompute, mode))
        else:
            skipped[path] = reason
    if not weights and not skipped:
        raise ValueError("gather_quantized: no quantized linear of this model is sharded; call fully_shard before")
    gathers = QuantizedGathers(tuple(weights), skipped)
    ctl.on_new_weights.append(gathers.refresh)
    return gathers


def _reason(path: str, module, group, p) -> str | None:
    """Why this weight is gathered in high precision, or None. Raises ``ValueError`` for what cannot work at all."""
    after = group.post_forward_mesh_info
    if p._sharded_local_tensor.is_meta:
        raise ValueError(f"gather_quantized: {path}.weight is on the meta device; to_empty and initialise the model first")
    if after is not None and after is not group.mesh_info:
        raise ValueError(
            f"gather_quantized: {path} is sharded with reshard_after_forward=<int>, whose smaller gather FSDP2 makes in "
            "high precision only; use True or False"
        )
    if p.is_dtensor or any(runtime.sharding is not None and runtime.ranks is None for runtime in _runtimes(module)):
        return "also sharded by tensor parallelism, over ranks that are not known here"
    if p.fsdp_placement.dim != 0:
        return f"sharded along dimension {p.fsdp_placement.dim}"
    if p.offload_to_cpu:
        return "its shard is offloaded to the CPU"
    return next(filter(None, (_needs_original(runtime, p.device) for runtime in _runtimes(module))), None)


def _needs_original(runtime: LinearRuntime, device) -> str | None:
    """Why a linear's weight, an expert's, cannot be read from payloads."""
    plan, expert = runtime.plan_for(device), runtime.role.expert
    quantizer, which = plan.quantizers[WEIGHT], "" if expert is None else f"expert {expert}: "
    if not quantizer.rowwise.is_quantized:
        return f"{which}fprop reads it in high precision"
    if plan.saved[WEIGHT] == ORIGINAL:
        return f"{which}dgrad reads the original"
    if any(fmt.sr for fmt in quantizer.formats()):
        if expert is not None:
            return f"{which}it is rounded stochastically, by rows of all experts"
        if isinstance(runtime.index_maps.get(WEIGHT), Pieces):
            return "it is rounded stochastically, and a tensor-parallel rank's rows are of two places"
    return None


def _runtimes(module) -> list[LinearRuntime]:
    """One, or one an expert."""
    return [module.hq] if isinstance(module.hq, LinearRuntime) else list(module.hq)


class Mode:
    """Whether the forward that runs now computes gradients. FSDP2 gathers under `no_grad`, where nothing says so."""

    gradients = True

    def note(self, module, args) -> None:
        self.gradients = torch.is_grad_enabled()


@dataclass
class Pass:
    """One kind of gather: the casts of this rank's share, and the buffers it fills.

    parts       of the weight, with the directions that are filled
    amaxes      which of all amaxes its casts read, int64; None: all of them
    """

    parts: list[HybridTensor]
    shares: ShardedWeights
    buffers: list[torch.Tensor]
    amaxes: torch.Tensor | None = None
    received: list[torch.Tensor] = field(default_factory=list)  # FSDP's gather outputs


class GatheredWeight:
    """One sharded weight: casts this rank's rows before a gather, assembles the payloads after it.

    Its two hooks sit on the shard as attributes, where FSDP2 looks for them; the shard stays a plain tensor. A grouped
    weight (E, N, K) has a part an expert, each of them whole on one rank; where experts run at once, all in common memory.
    """

    brings_bytes = True  # parts are empty until a gather

    def __init__(self, path: str, module, group, p, recompute: bool, mode: Mode):
        self.path, self.recompute, self._mode = path, recompute, mode
        self._module, self._group, self._param = module, group, p
        self._amaxes: dict[str, torch.Tensor] = {}
        self._seen = None  # version of the shard when its amaxes were taken
        self._build()
        self._attach()

    # ---- what is gathered

    def _build(self) -> None:
        """Payloads and shares for the module's plans of now."""
        module, p = self._module, self._param
        shape, dtype = tuple(p._orig_size), self._group.mp_policy.param_dtype or p.sharded_param.dtype
        self.parts = [unfilled(runtime, shape[-2:], dtype, p.device, trained=True) for runtime in _runtimes(module)]
        for t, runtime in zip(self.parts, _runtimes(module)):
            t._stale.owner = WeightOwner(module, "weight", runtime)
        self.tensor = GatheredExperts(tuple(self.parts)) if len(shape) == 3 else self.parts[0]
        self._at_once = self._runs_at_once()
        together = self._at_once and not isinstance(module.hq.how_each(self.parts), str)  # then in common memory
        for t in self.parts:
            t._stale.owner.gather = self  # which knows from here on where payloads are
        self.passes = {name: self._pass(name, together) for name in (FORWARD, BACKWARD, BOTH)}
        every = self.passes[BOTH].shares.places()
        for one in self.passes.values():
            if (own := one.shares.places()).keys() != every.keys():
                places = [place for key in own for place in every[key]]
                one.amaxes = torch.tensor(places, dtype=torch.int64, device=p.device)
        for buffer in self.passes[BOTH].buffers:
            buffer.untyped_storage().resize_(0)

    def _runs_at_once(self) -> bool:
        """Whether plans let experts run at once; those of inputs and gradients have a say too."""
        return type(self.tensor) is GatheredExperts and not isinstance(self._module.hq.how(self.tensor), str)

    def _pass(self, name: str, together: bool) -> Pass:
        mesh, reads = self._param.mesh_info, dict(forward=name != BACKWARD, backward=name != FORWARD)
        parts = [part_read(t, **reads) for t in self.parts]
        shares = ShardedWeights(parts, self._ranges(), mesh.shard_mesh_rank, gather=BOTH)
        held = [s for t in parts for s in t.payloads()]
        if together:
            held = [getattr(self._module.hq.stack, s.direction) for s in held[: len(held) // len(parts)]]
        return Pass(parts, shares, [b for s in held for b in s.buffers().values()])

    def _ranges(self) -> list[list[tuple[int, int]]]:
        """Of every rank, its flat range of each part."""
        rows, ranks = self._param._orig_size[0], self._param.mesh_info.shard_mesh_size
        each, row = -(-rows // ranks), self._param._orig_size[1:].numel()
        bounds = [min(rank * each, rows) * row for rank in range(ranks + 1)]
        n = self.parts[0].numel()
        return [
            [overlap(i * n, (i + 1) * n, first, last) for i in range(len(self.parts))] for first, last in pairwise(bounds)
        ]

    def bytes(self, name: str) -> int:
        """Bytes a rank sends in one gather of a pass."""
        return sum(n for n in self._input_sizes(self.passes[name].shares.chunk_bytes))

    def _input_sizes(self, num_bytes: int) -> list[int]:
        """Sizes of the gather's inputs. FSDP2 takes shards of uneven height only in multiples of the padded shard."""
        p = self._param
        if p._orig_size[0] % p.mesh_info.shard_mesh_size == 0:
            return [num_bytes]
        padded = p.padded_sharded_param_size.numel()
        return [padded] * max(1, -(-num_bytes // padded))

    # ---- before a step

    def follow(self) -> None:
        """Meet what may have changed since the last step: the plans, the shard (loads, moves), its values."""
        module, p = self._module, self._param
        quantizers = [runtime.plan_for(p.device).quantizers[WEIGHT] for runtime in _runtimes(module)]
        if quantizers != [t.quantizer for t in self.parts] or self._at_once != self._runs_at_once():
            for runtime in _runtimes(module):
                if (reason := _needs_original(runtime, p.device)) is not None:
                    raise PlanError(f"{runtime.label}: its weight is gathered quantized (gather_quantized), but {reason}")
            self._build()
            p.all_gather_outputs, p._unsharded_inner_tensors = [], []
            if hasattr(p, "_unsharded_param"):
                p._unsharded_param.data = self.tensor
        p.reset_sharded_param()
        self._attach()

    def _attach(self) -> None:
        shard = self._param._sharded_local_tensor
        if getattr(shard, "fsdp_pre_all_gather", None) != self._before:
            shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = self._before, self._after
            self._param._init_extensions()

    def start_amaxes(self) -> torch.Tensor:
        """This rank's, of all that is gathered; int32."""
        masters = self._masters()
        self._seen = self._param._sharded_local_tensor._version
        return self.passes[BOTH].shares.amaxes(masters)

    def take_amaxes(self, reduced: torch.Tensor) -> None:
        """Those of all ranks."""
        self._amaxes = {
            name: reduced if one.amaxes is None else reduced.index_select(0, one.amaxes) for name, one in self.passes.items()
        }

    def _masters(self) -> list[torch.Tensor]:
        """This rank's flat range of each part."""
        shares = self.passes[BOTH].shares
        shard = self._param._sharded_local_tensor.detach().float().reshape(-1)
        return list(shard.split([b - a for a, b in shares.ranges[shares.rank]]))

    # ---- FSDP2's hooks

    def _choose(self) -> str:
        """Which pass asks: FSDP2 says so in the state of the group it gathers.

        Both directions where FSDP2 keeps what it gathered for the next pass: after a forward that is not resharded, or
        is a recomputation, which backward follows; after a backward that is not resharded, which a forward follows.
        """
        forward, backward = self.gathered()
        if self._group._training_state == TrainingState.FORWARD:
            return BOTH if is_bw() else forward
        return backward if self._group._training_state == TrainingState.PRE_BACKWARD else BOTH

    def gathered(self) -> tuple[str, str]:
        """(by a forward, by a backward)."""
        group = self._group
        stays = self.recompute or not group.reshard_after_backward
        return BOTH if group.post_forward_mesh_info is None else FORWARD, BOTH if stays else BACKWARD

    def _before(self, mesh, outer_size, outer_stride, module, mp_policy):
        """(inputs of the all-gather, what `_after` gets: which pass, and whether casts record)."""
        name, p = self._choose(), self._param
        if self._seen != p._sharded_local_tensor._version:
            raise RuntimeError(
                f"{self.path}.weight was written since the last ctl.begin_step() or ctl.invalidate(), which prepare its "
                "gather; call one of them after an optimizer's step or a load, before the next forward"
            )
        one = self.passes[name]
        p.all_gather_outputs, p._unsharded_inner_tensors = one.received, one.buffers
        trains = self._module.training and self._mode.gradients
        evaluates = self._group._training_state == TrainingState.FORWARD and not trains
        asked = name, not evaluates
        chunk = one.shares.cast(self._masters(), self._amaxes[name], record=not evaluates)
        sizes = self._input_sizes(chunk.numel())
        if len(sizes) == 1 and sizes[0] == chunk.numel():
            return (chunk,), asked
        padded = torch.nn.functional.pad(chunk, (0, sum(sizes) - chunk.numel()))
        return tuple(part.view(p.padded_sharded_param_size) for part in padded.split(sizes[0])), asked

    def _after(self, outputs, asked: tuple[str, bool], param_dtype, *, out=None):
        """Every rank's bytes into the payloads. Autograd may hold these buffers for backward: no version moves."""
        name, record = asked
        one = self.passes[name]
        one.received = self._param.all_gather_outputs
        for buffer in one.buffers:
            buffer.untyped_storage().resize_(buffer.numel() * buffer.itemsize)
        world = self._param.mesh_info.shard_mesh_size
        chunks = torch.cat([o.reshape(world, -1) for o in outputs], dim=1) if len(outputs) > 1 else outputs[0]
        chunks = chunks.reshape(world, -1)[:, : one.shares.chunk_bytes]
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter((*one.parts, *one.buffers)):
            one.shares.scatter(chunks, record=record)
        for received in one.received:
            received.untyped_storage().resize_(0)
        for t, filled in zip(self.parts, one.parts):
            t._stale.filled(t.payloads(), filled.payloads(), DIRECTIONS[1:] if name == FORWARD else ())
        return None if out is not None else (self.tensor, tuple(one.buffers))


@dataclass(frozen=True)
class QuantizedGathers:
    """What `gather_quantized` arranged. ``str()`` prints it. skipped: module path -> reason."""

    weights: tuple[GatheredWeight, ...]
    skipped: dict[str, str]

    @torch.no_grad()
    def refresh(self) -> None:
        """Before a step: the amaxes of all weights that cover several ranks' elements, one collective a group of ranks that
        share weights, and one of those that split them."""
        by_group = defaultdict(list)
        for weight in self.weights:
            weight.follow()
            by_group[weight._group._all_gather_process_group].append(weight)
        for group, weights in by_group.items():
            own = [weight.start_amaxes() for weight in weights]
            shares = [weight.passes[BOTH].shares for weight in weights]
            for weight, reduced in zip(weights, reduce_amaxes(shares, own, group)):
                weight.take_amaxes(reduced)

    def __str__(self) -> str:
        lines = [f"{'weight':<40} {'forward':>12} {'backward':>12}  bytes a rank sends"]
        for w in self.weights:
            forward, backward = (w.bytes(name) for name in w.gathered())
            lines.append(f"{w.path:<40} {forward:>12,} {backward:>12,}  {w.tensor.describe()}")
        lines += [f"{path:<40} {'high precision':>25}  {reason}" for path, reason in self.skipped.items()]
        return "\n".join(lines)
