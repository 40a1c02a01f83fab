"""What a quantized module keeps between calls: its plan, delayed-scaling state, random keys, weight cache.

One `LinearRuntime` a module. It is an `nn.Module` only so that delayed-scaling state lands in the state dict as
plain tensors (`<module>.hq.input_rowwise_scale`, `..._history`); recipes without state add no keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .formats import DIRECTIONS
from .linear import Communication, LinearCall, WeightCache
from .plan import GRAD_OUTPUT, INPUT, WEIGHT, GemmPlan, PlanError, build_plan
from .recipe import Recipe
from .roles import ModuleRole, tensor_id
from .scaling import DelayedState, Rng

OPERANDS = (INPUT, WEIGHT, GRAD_OUTPUT)


class RandomKeys:
    """The stochastic-rounding keys of one step, in device memory: one row of six words a microbatch and operand.

    A forward keeps the rows of its microbatch, so that its backward draws with the same counter whatever runs in
    between. The weight always uses the first microbatch's counter: it is one tensor a step.
    """

    def __init__(self, seed: int, num_microbatches: int):
        self.seed, self.num_microbatches = seed, num_microbatches
        self.step = self.microbatch = 0
        self._tables: dict[tuple, torch.Tensor] = {}

    def set(self, step: int, microbatch: int) -> None:
        if not 0 <= microbatch < self.num_microbatches:
            raise ValueError(
                f"microbatch {microbatch} of {self.num_microbatches}: pass `num_microbatches` to prepare() or begin_step()"
            )
        if step != self.step:
            for (_, _, slot, _), row in self._tables.items():
                row[2] = self._counter(step, slot)
        self.step, self.microbatch = step, microbatch

    def _counter(self, step: int, slot: int) -> int:
        return (step * self.num_microbatches + slot) & 0xFFFFFFFF

    def rng(self, role, operand: str, device, index_map=(0, 0, 0)) -> Rng:
        slot = 0 if operand == WEIGHT else self.microbatch
        key = (role, operand, slot, device)
        if key not in self._tables:
            fresh = Rng(self.seed, tensor_id(role.operand(operand)), 0, 0, index_map, device=device)
            fresh.values[2] = self._counter(self.step, slot)
            self._tables[key] = fresh.values
        return Rng.view(self._tables[key])


class LinearRuntime(torch.nn.Module):
    """Owns the plan of one linear on each device it runs on, and what its casts read.

    recipe, role: what the plan is resolved from. backend: force a gemm backend by name (tests).
    """

    def __init__(self, recipe: Recipe, role: ModuleRole, device, *, backend: str | None = None):
        super().__init__()
        self.recipe, self.role, self.backend = recipe, role, backend
        self.step: int | None = None
        self.keys: RandomKeys | None = None
        self.weight_cache: WeightCache | None = None
        self._plans: dict[torch.device, GemmPlan] = {}
        self._states: dict[str, tuple] = {}
        self._make_state(self.plan_for(torch.device(device)), device)

    def plan_for(self, device: torch.device) -> GemmPlan:
        """The plan on a device, built at its first use there. Raises `PlanError`."""
        if device not in self._plans:
            resolved = self.recipe.resolve(self.role, step=self.step)
            self._plans[device] = build_plan(resolved, self.role.name, device, backend=self.backend)
        return self._plans[device]

    def _make_state(self, plan: GemmPlan, device) -> None:
        """Buffers of every stateful (operand, direction); those there already keep their values."""
        for operand in OPERANDS:
            for direction in DIRECTIONS:
                fmt = getattr(plan.quantizers[operand], direction)
                prefix = f"{operand}_{direction}"
                if not fmt.is_stateful:
                    continue
                fresh = DelayedState.new(fmt, device)
                old = getattr(self, f"{prefix}_history", None)
                if old is None or old.shape != fresh.history.shape:
                    self.register_buffer(f"{prefix}_scale", fresh.scale)
                    self.register_buffer(f"{prefix}_history", fresh.history)

    def states(self):
        """(format, `DelayedState`) of everything this module scales by history."""
        plan = self.plan_for(next(self.buffers()).device) if self._buffers else None
        for operand in OPERANDS if plan else ():
            for direction in DIRECTIONS:
                fmt = getattr(plan.quantizers[operand], direction)
                if fmt.is_stateful:
                    yield fmt, self._state(operand, direction)

    def _state(self, operand, direction, record=True) -> DelayedState | None:
        scale = getattr(self, f"{operand}_{direction}_scale", None)
        if scale is None:
            return None
        return DelayedState(scale, getattr(self, f"{operand}_{direction}_history") if record else None)

    def set_step(self, step: int | None) -> None:
        """Follow the recipe's step rules: re-plan when this step resolves differently."""
        old = self.recipe.resolve(self.role, step=self.step)
        self.step = step
        if self.recipe.resolve(self.role, step=step) != old:
            self.replan(self.recipe)

    def replan(self, recipe: Recipe) -> None:
        """Switch recipe: the new plan is built and checked before anything changes."""
        plans = {
            d: build_plan(recipe.resolve(self.role, step=self.step), self.role.name, d, backend=self.backend)
            for d in self._plans
        }
        self.recipe, self._plans = recipe, plans
        for device, plan in plans.items():
            self._make_state(plan, device)
        if self.weight_cache is not None:
            self.weight_cache.invalidate()

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        if self.weight_cache is not None:
            self.weight_cache.invalidate()

    def check(self, recipe: Recipe) -> None:
        """Raise `PlanError` if this module could not follow `recipe`; changes nothing."""
        for device in self._plans:
            build_plan(recipe.resolve(self.role, step=self.step), self.role.name, device, backend=self.backend)

    def name_if_unnamed(self, name: str) -> None:
        if not self.role.name:
            self.role = replace(self.role, name=name)
            self.replan(self.recipe)

    def call(self, device: torch.device, comm: Communication, *, training: bool) -> LinearCall:
        """The arguments of one `hybrid_linear` call. Amaxes are recorded only in training with gradients on."""
        plan = self.plan_for(device)
        rng = state = None
        if plan.uses_rng:
            if self.keys is None:
                raise PlanError(
                    f"module {self.role.name or '(unnamed)'}: the recipe rounds stochastically; call "
                    "`ctl = mh.prepare(model, recipe, seed=...)` and `ctl.begin_step(i)` first"
                )
            rng = {op: self.keys.rng(self.role, op, device) for op in OPERANDS}
        if self._buffers:
            record = training and torch.is_grad_enabled()
            state = {op: tuple(self._state(op, d, record) for d in DIRECTIONS) for op in OPERANDS}
        return LinearCall(plan, comm, rng, state, self.weight_cache)
