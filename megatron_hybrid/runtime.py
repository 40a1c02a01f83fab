"""What a quantized module keeps between calls: its plan, delayed-scaling state, random keys, weight cache.

One `LinearRuntime` a module. It is an `nn.Module` only so that delayed-scaling state lands in the state dict as
plain tensors (`<module>.hq.input_rowwise_scale`, `..._history`); recipes without state add no keys.
"""

from __future__ import annotations

import operator
import warnings
from bisect import bisect_right
from dataclasses import replace

import torch

from .formats import DIRECTIONS
from .linear import Communication, LinearCall
from .plan import GRAD_OUTPUT, INPUT, ORIGINAL, PAYLOAD, WEIGHT, GemmPlan, PlanError, build_plan
from .random_keys import RandomKeys, shifted
from .recipe import QUANTIZED, Recipe
from .roles import OPERANDS, ModuleRole, QuantizerRole
from .scaling import DelayedState, Pieces, rescale, resized
from .sharding import Sharding
from .weight_cache import WeightCache


HISTORY = "_history"  # how names of such buffers end
_NOBODY_MOVES_SCALES = (
    "a linear with delayed scaling trains without a controller: nobody moves its scales on; "
    "`ctl = mh.prepare(model)`, then `ctl.begin_step(i)` and `ctl.end_step()` around each step"
)


class Changes:
    """How often a plan changed: of one runtime, or of all that share this."""

    count = 0


class LinearRuntime(torch.nn.Module):
    """Owns the plan of one linear on each device it runs on, and what its casts read.

    recipe, role: what the plan is resolved from. backend: force a gemm backend by name (tests). save_input,
    sharding: see `build_plan`. Raises `PlanError` for a plan that cannot run.
    """

    def __init__(
        self, recipe: Recipe, role: ModuleRole, device, *, backend: str | None = None, save_input: str = PAYLOAD,
        sharding: Sharding | None = None,
    ):  # fmt: skip
        super().__init__()
        self.recipe, self.role, self.backend, self.save_input = recipe, role, backend, save_input
        self.save_weight, self.sharding = PAYLOAD, sharding
        self.step: int | None = None
        self.changes = Changes()  # of the plan
        self._before_load: dict[str, torch.Tensor] = {}  # histories that made room for loaded ones of another length
        self._scaled_for = {}  # buffer prefix -> the format that its scale was made for
        self._was_loaded = False  # scales, since the last step: they are of the step before the next one
        self.keys: RandomKeys | None = None
        self.weight_cache: WeightCache | None = None
        self.weight_owner = None  # `weights.WeightOwner` of a weight that lives quantized
        self.missing_state = ()  # names of buffers that the checkpoint lacks, though the state dict to load has them
        self.observer = None  # an `observe.recorder.Observer` in steps whose casts are measured
        self.nan_check = None  # an `observe.nan_check.NanCheck`
        self.profile = None  # an `observe.profile.StepProfile` in the step that is profiled on the CPU
        self.ranks: Communication | None = None  # over which a quantized weight's and experts' amaxes are reduced
        self.index_maps: dict[str, tuple[int, int, int] | Pieces] = {}  # operand -> where a shard lies in the whole
        self._call_states: dict[bool, tuple] = {}  # whether amaxes are recorded -> (buffers, `LinearCall.state` of them)
        self._plans: dict[torch.device, GemmPlan] = {}
        self._forward_plan: GemmPlan | None = None  # of the last forward outside backward since the last step's end
        self._superseded: list[tuple[int, dict]] = []  # (when, plans until then) of changes after a forward of this step
        self.plan_for(torch.device(device))
        self._make_states()

    def plan_for(self, device: torch.device) -> GemmPlan:
        """The plan on a device, built at its first use there. Raises `PlanError`."""
        if device not in self._plans:
            self._plans[device] = self.build(self.recipe, device, self.step)
        return self._plans[device]

    @property
    def device(self) -> torch.device:
        """The first that it has a plan for: the one it was made on."""
        return next(iter(self._plans))

    def plans(self) -> list[GemmPlan]:
        """Those built so far, one a device."""
        return list(self._plans.values())

    def build(self, recipe: Recipe, device, step: int | None) -> GemmPlan:
        """The plan of a recipe at a step. Raises `PlanError`."""
        resolved = recipe.resolve(self.role, step=step)
        return build_plan(
            resolved, self.label, device, backend=self.backend, save_input=self.save_input,
            save_weight=self.save_weight, sharding=self.sharding,
        )  # fmt: skip

    @property
    def label(self) -> str:
        """The module's name, with the expert's number for one of a grouped module."""
        return self.role.name if self.role.expert is None else f"{self.role.name}, expert {self.role.expert}"

    def roles(self, output: QuantizerRole | None = None) -> tuple[QuantizerRole | None, ...]:
        """Roles in the order of use: input, weight, output (the consumer's, None by default), grad_output."""
        role = self.role.operand
        return role(INPUT), role(WEIGHT), output, role(GRAD_OUTPUT)

    # ---- delayed scaling

    def _make_states(self) -> None:
        """Buffers of every (operand, direction) that is scaled by history, now or at another step of the recipe.

        A checkpoint then loads whichever step it is of. Those there already keep their values; where the plan of now
        has a history of another length, the newest. What the recipe uses at no step stays here, but not in state dicts.
        """
        used, self._has_other_lengths = set(), False
        for device, plan in self._plans.items():
            now = dict(_stateful(plan))
            formats = self._formats_of_other_steps(device) | now
            for prefix, fmt in formats.items():
                fresh = DelayedState.new(fmt, device)
                old = self._buffers.get(f"{prefix}{HISTORY}")
                if old is None:
                    self.register_buffer(f"{prefix}_scale", fresh.scale)
                    self.register_buffer(f"{prefix}{HISTORY}", fresh.history)
                    self._scaled_for[prefix] = fmt
                elif prefix in now and old.shape != fresh.history.shape:
                    new = resized(old, len(fresh.history))
                    memory = self._memory_before_load(f"{prefix}{HISTORY}", len(new))
                    self._buffers[f"{prefix}{HISTORY}"] = new if memory is None else memory.copy_(new)
            self._follow_formats(plan)
            used.update(formats)
        self._before_load.clear()
        self._non_persistent_buffers_set = {name for name in self._buffers if name.rsplit("_", 1)[0] not in used}

    def _memory_before_load(self, name: str, length: int) -> torch.Tensor | None:
        """What a history was before a load of another length, if it had this one: a captured CUDA graph writes there."""
        memory = self._before_load.get(name)
        fits = memory is not None and len(memory) == length and memory.device == self._buffers[name].device
        return memory if fits else None

    def _formats_of_other_steps(self, device) -> dict:
        """Buffer prefix -> format, of what step rules scale by history at some step or without one."""
        if not self.recipe.has_step_rules:
            return {}
        steps = (None, *self.recipe.change_steps())
        return {prefix: fmt for step in steps for prefix, fmt in _stateful(self.build(self.recipe, device, step))}

    def _follow_formats(self, plan: GemmPlan) -> None:
        """Scales made for another element type or margin are made anew, from their histories."""
        for prefix, fmt in _stateful(plan):
            if _maps_to(self._scaled_for[prefix]) != _maps_to(fmt):
                rescale(fmt, self._state(prefix))
            self._scaled_for[prefix] = fmt

    def take_length(self, name: str, length: int) -> None:
        """Make room for a history of another length that will be loaded; the next step gives it the plan's."""
        old = self._buffers[name]
        if len(old) != length:
            self._before_load.setdefault(name, old)
            memory = self._memory_before_load(name, length)  # as it is: what is loaded may be this very tensor
            self._buffers[name] = old.new_zeros(length) if memory is None else memory
            self._has_other_lengths = True

    def _take_lengths(self, state_dict: dict, prefix: str) -> None:
        for name in self._buffers:
            loaded = state_dict.get(prefix + name)
            if name.endswith(HISTORY) and loaded is not None and loaded.dim() == 1:
                self.take_length(name, len(loaded))

    def expect_scales(self) -> None:
        """Scales will be loaded in place, where no `load_state_dict` says so."""
        self._was_loaded = True

    def rescale_from(self, recipe: Recipe | None, step: int | None) -> None:
        """Take the scales, which were loaded, for those that `recipe` left at `step`; make them what the plan needs.
        None: nobody knows what they were made for, all are made anew."""
        if recipe is None:
            self._was_loaded = False
            for plan in self._plans.values():
                for prefix, fmt in _stateful(plan):
                    rescale(fmt, self._state(prefix))
            if self.weight_owner is not None:
                self.weight_owner.recast()
            return
        if self.weight_owner is not None and recipe.weights != QUANTIZED:
            self.weight_owner.forget_running_amax()  # recorded by the load; a weight in high precision has none yet
        self._scales_are_of(recipe, step)
        if step is not None:
            self.set_step(step + 1)  # at once: the plan of no step may have formats of its own
        self._follow_loaded(recipe, step)

    def _scales_are_of(self, recipe: Recipe, step: int | None) -> None:
        """Those that were loaded were made for what `recipe` has at `step`."""
        self._was_loaded = False
        for device in self._plans:
            left = _stateful(self.build(recipe, device, step))
            self._scaled_for.update({prefix: fmt for prefix, fmt in left if prefix in self._scaled_for})

    def _follow_loaded(self, recipe: Recipe, step: int | None) -> None:
        """Scales, and the weights that a load cast with them, become those of the plan's formats."""
        for device, plan in self._plans.items():
            self._follow_formats(plan)
            before = self.build(recipe, device, step).quantizers[WEIGHT]
            if self.weight_owner is not None and before != plan.quantizers[WEIGHT]:
                self.weight_owner.recast()

    def _apply(self, fn, recurse=True):
        """Moves to another device; stays FP32 where the model changes its dtype."""
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            if buffer.dtype != torch.float32:
                self._buffers[name] = kept[name].to(buffer.device)
        self.invalidate()  # a weight that went to another dtype and back may be where it was, rounded
        return self

    def states(self, *, moving: bool = False):
        """(format, `DelayedState`) of everything this module scales by history.

        moving: only those that move on at the end of a step. A quantized weight's does when the weight is written.
        """
        if self._buffers:
            for prefix, fmt in _stateful(self.plan_for(next(self.buffers()).device)):
                if not (moving and self.weight_owner is not None and prefix.startswith(WEIGHT)):
                    yield fmt, self._state(prefix)

    def weight_states(self) -> tuple[DelayedState | None, DelayedState | None] | None:
        """(rowwise, columnwise) state of the weight, or None where nothing is scaled by history."""
        return tuple(self._state(f"{WEIGHT}_{d}") for d in DIRECTIONS) if self._buffers else None

    def reset_states(self) -> None:
        """Scales and histories as new."""
        for name, buffer in self._buffers.items():
            buffer.fill_(1.0 if name.endswith("_scale") else 0.0)

    def load_states_first(self, state_dict: dict, prefix: str, *, weight: bool = False, assign: bool = False) -> None:
        """Take over scales and histories of a state dict before the weight is loaded, whose cast reads them.

        That cast records the amax of what it reads, which a checkpoint's decode may have larger than the run had: the
        state dict, which may hold these very buffers, keeps the values that are loaded over it afterwards.

        weight: the state dict has it. The running amax of a history that it lacks is then of the value before, and dropped.
        assign: the load is by assignment, which replaces buffers on the meta device.
        """
        self._take_lengths(state_dict, prefix)
        drops = weight and self.weight_owner is not None
        for name, buffer in self._buffers.items():
            loaded = state_dict.get(prefix + name)
            lacks = loaded is None or name in self.missing_state
            if drops and lacks and name.startswith(WEIGHT) and name.endswith(HISTORY):
                buffer[0] = 0
            if loaded is not None and loaded.shape == buffer.shape and (assign or not buffer.is_meta):
                if buffer.is_meta:
                    self._buffers[name] = buffer = torch.empty_like(loaded)
                buffer.copy_(loaded)
                state_dict[prefix + name] = loaded.clone()

    def leave_meta(self, device: torch.device) -> None:
        """New scales and histories on a device, where they have no memory and the weight does."""
        for name, buffer in self._buffers.items():
            if buffer.is_meta and device.type != "meta":
                self._buffers[name] = torch.full_like(buffer, 1.0 if name.endswith("_scale") else 0.0, device=device)

    def quantizes_weight(self) -> bool:
        """Whether the plan quantizes the weight in any direction."""
        return any(fmt.is_quantized for plan in self._plans.values() for fmt in plan.quantizers[WEIGHT].formats())

    def _state(self, prefix: str, record=True) -> DelayedState | None:
        scale = self._buffers.get(f"{prefix}_scale")
        if scale is None:
            return None
        return DelayedState(scale, self._buffers[f"{prefix}{HISTORY}"] if record else None)

    # ---- changes of the plan

    def set_step(self, step: int | None) -> bool:
        """Follow the recipe's step rules: re-plan when this step resolves differently. Returns whether it did."""
        was_loaded, self._was_loaded = self._was_loaded and step is not None and self.recipe.has_step_rules, False
        if was_loaded:
            self._scales_are_of(self.recipe, step - 1 or None)
        old, self.step = self.step, step
        changed = self._follow_step(old, step)
        if was_loaded and not changed:
            self._follow_loaded(self.recipe, step - 1 or None)
        if self._has_other_lengths:
            self._make_states()
        return changed

    def _follow_step(self, old: int | None, step: int | None) -> bool:
        if not self.recipe.has_step_rules:
            return False
        edges = self.recipe.change_steps()
        # without a step no rule on steps holds, which is a change even for those that hold at every step
        if old is None or step is None or bisect_right(edges, old) != bisect_right(edges, step):
            if self.recipe.resolve(self.role, step=old) != self.recipe.resolve(self.role, step=step):
                self.replan(self.recipe)
                return True
        return False

    def replan(self, recipe: Recipe) -> None:
        """Switch recipe: the new plan is built and checked before anything changes."""
        plans = {device: self.build(recipe, device, self.step) for device in self._plans}
        if self._forward_plan is not None:
            self._superseded.append((torch._C._autograd._get_sequence_nr(), self._plans))
        self.recipe, self._plans = recipe, plans
        self.changes.count += 1
        self._make_states()
        self.invalidate()
        if self.weight_owner is not None:
            self.weight_owner.requantize()

    def keep_no_weight(self) -> None:
        """Cast the weight in every pass and keep none of its payloads in between: its own memory comes and goes."""
        self.save_weight, self.weight_cache = ORIGINAL, None
        self.replan(self.recipe)

    def check(self, recipe: Recipe) -> None:
        """Raise `PlanError` if this module could not follow `recipe`; changes nothing."""
        for device in self._plans:
            plan = self.build(recipe, device, self.step)
            if self.weight_owner is not None:
                self.weight_owner.check(recipe, device)
            elif recipe.weights == QUANTIZED and any(f.is_quantized for f in plan.quantizers[WEIGHT].formats()):
                raise PlanError(
                    f"{plan.label}: the recipe says `weights: quantized`, but this weight was made in high precision; "
                    "build the model with this recipe, or under mh.quantized_model_init(recipe), modules that rules "
                    "match by name with their names"
                )

    def name_if_unnamed(self, name: str) -> None:
        if not self.role.name:
            self.role = replace(self.role, name=name)
            self.check(self.recipe)
            self.replan(self.recipe)

    def weight_reducers(self, device):
        """(rowwise, columnwise) functions of a weight's outer amax that give its maximum over the tensor-parallel
        ranks, None where it covers this rank's elements alone; or None for neither."""
        both = self.plan_for(device).reduced.get(WEIGHT) if self.ranks is not None else None
        return None if both is None else tuple(self._maximum if needed else None for needed in both)

    def _maximum(self, amax: torch.Tensor) -> torch.Tensor:
        return amax if amax.is_meta else self.ranks.start_max([amax])()[0]

    def make_keys(self) -> None:
        """Create the random keys now, not at the first forward, which may be compiled and must not."""
        for device, plan in self._plans.items():
            if plan.uses_rng:
                for operand in plan.draws:
                    self.keys.rng(self.role, operand, device, self.index_maps.get(operand))

    def invalidate(self) -> None:
        """Drop the cached quantized weight."""
        if self.weight_cache is not None:
            self.weight_cache.invalidate()

    def refresh(self) -> None:
        """The cached quantized weight of now, where a captured graph reads it; see `WeightCache.refresh`."""
        if self.weight_cache is not None:
            self.weight_cache.refresh()

    def end_step(self) -> None:
        """Every forward of the step has had its backward: nothing of it can be recomputed any more."""
        self._forward_plan, self._superseded = None, []
        self.invalidate()
        if self.weight_cache is not None:
            self.weight_cache.is_open = False

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        self._take_lengths(state_dict, prefix)
        self._was_loaded = self._was_loaded or any(prefix + name in state_dict for name in self._buffers)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.invalidate()

    # ---- a call

    def call(self, device: torch.device, comm: Communication, *, training: bool, rows: int = 0) -> LinearCall:
        """The arguments of one `hybrid_linear` call. Amaxes are recorded only in training with gradients on.

        rows: how many of the gathered operand this rank has, where there is one.

        Raises `PlanError` for stochastic rounding without a controller, and for a recomputation whose forward ran
        with another recipe.
        """
        plan = self.plan_for(device)
        self._check_recompute(device, plan)
        rng = state = whole = None
        if plan.draws:
            if self.keys is None:
                raise PlanError(
                    f"{plan.label}: the recipe rounds stochastically; call "
                    "`ctl = mh.prepare(model, recipe, seed=...)` and `ctl.begin_step(i)` first"
                )
            maps = self.index_maps
            if plan.gathered in plan.draws:
                whole = self.keys.rng(self.role, plan.gathered, device, None)
                maps = {**maps, plan.gathered: shifted(maps[plan.gathered], comm.rank * rows)}
            rng = {op: self.keys.rng(self.role, op, device, maps.get(op)) for op in plan.draws}
        if self._buffers:
            state = self._states_of_call(training and torch.is_grad_enabled())
        if not torch.compiler.is_compiling():
            for watcher in (self.observer, self.nan_check, self.profile):
                plan = plan if watcher is None else watcher.watch(plan)
        return LinearCall(plan, comm, rng, state, self.weight_cache, whole, training and torch.is_grad_enabled())

    def _states_of_call(self, record: bool) -> dict:
        """operand -> (rowwise, columnwise) `DelayedState`, made anew only once a buffer is another tensor."""
        known, buffers = self._call_states.get(record), tuple(self._buffers.values())
        if known is None or not _same(known[0], buffers):
            if record and self.keys is None and not torch.compiler.is_compiling():
                warnings.warn(_NOBODY_MOVES_SCALES)
            state = {op: tuple(self._state(f"{op}_{d}", record) for d in DIRECTIONS) for op in OPERANDS}
            self._call_states[record] = known = buffers, state
        return known[1]

    def _check_recompute(self, device: torch.device, plan: GemmPlan) -> None:
        """A forward inside backward is activation recomputation: its plan must be its forward's.

        Otherwise the recipe changed in between, and gradients would mix two recipes.
        """
        if torch.compiler.is_compiling():
            return
        if torch._C._current_graph_task_id() == -1:
            if self._forward_plan is not plan:  # a module's attributes are slow to set
                self._forward_plan = plan
        elif plan != self._recomputed_plan(device, plan):
            raise PlanError(
                f"{plan.label}: the recipe changed between a forward and its recomputation in backward; finish the "
                "backward of a step before switching"
            )

    def _recomputed_plan(self, device: torch.device, plan: GemmPlan) -> GemmPlan:
        """The plan of the forward that is being recomputed.

        Autograd numbers its nodes as they are made. The node that runs now, and asked for the recomputation, was made
        with that forward: before the first change of plans that has a higher number (both in the thread that runs
        forwards). A recomputation started by a tensor's hook has no node: there it is the last forward's plan.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            return self._forward_plan or plan
        made = node._sequence_nr()
        return next((plans.get(device, plan) for when, plans in self._superseded if made < when), plan)


def _same(some: tuple, others: tuple) -> bool:
    """Whether these are the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _maps_to(fmt):
    """What an amax is mapped to by a delayed scale."""
    return fmt.element, fmt.option("margin")


def _stateful(plan: GemmPlan):
    """(buffer prefix, format) of every operand and direction that is scaled by history."""
    for operand in OPERANDS:
        for direction in DIRECTIONS:
            fmt = getattr(plan.quantizers[operand], direction)
            if fmt.is_stateful:
                yield f"{operand}_{direction}", fmt
