"""The controller of a training loop: step rules, weight-cache windows, random counters, delayed scaling.

    ctl = mh.prepare(model, recipe, seed=0, num_microbatches=4)
    for i in range(1, steps + 1):
        ctl.begin_step(i)
        for j in range(4):
            ctl.microbatch(j)
            loss(model(batch[j])).backward()
        optimizer.step()
        ctl.end_step()

Megatron's training calls the same object through its hooks.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from dataclasses import replace

import torch

from .consumer import bind_outputs
from .distributed.amax import start_max
from .plan import PlanError, describe_runs
from .random_keys import RandomKeys
from .recipe import Recipe
from .recipe_callable import as_recipe
from .roles import ModuleRole
from .runtime import LinearRuntime
from .scaling import update_states
from .weight_cache import Later, WeightCache


class Controller:
    """Made by `prepare`. Methods are cheap: they do nothing on the device for recipes that need nothing.

    runtimes: of the model's quantized linears. others: roles of modules that a recipe may name and leaves alone.
    replica, num_replicas: see `RandomKeys`. expert_replica: that of experts, where ranks of several replicas split them and
    share their tokens: the same on all of these ranks. expert_part: `part` of `RandomKeys`, for experts. say: gets a line
    whenever plans change; by default the logger ``megatron_hybrid`` does, as information.
    """

    def __init__(
        self, runtimes: list[LinearRuntime], recipe: Recipe | None, seed: int, num_microbatches: int,
        others: tuple[ModuleRole, ...] = (), replica: int = 0, num_replicas: int = 1, expert_replica: int | None = None,
        expert_part: int = 0,
    ):  # fmt: skip
        self.runtimes, self.others = runtimes, others
        self.keys = RandomKeys(seed, num_microbatches, replica, num_replicas)
        self._expert_keys = self.keys
        expert_replica = replica if expert_replica is None else expert_replica
        if (expert_replica, expert_part) != (replica, 0):
            self._expert_keys = RandomKeys(seed, num_microbatches, expert_replica, num_replicas, expert_part)
        for runtime in runtimes:
            runtime.keys = self.keys if runtime.role.expert is None else self._expert_keys
            runtime.weight_cache = WeightCache(is_open=False)
        self.recorder = None  # of statistics
        self.profile = None  # `observe.profile.StepProfile`
        self.on_new_weights = []  # called by `invalidate`, once the step's plans are there
        self._later: Later | None = None  # see `stand`
        self._running, self._warned = None, False  # the step that has begun and not ended; whether that was said
        self.say = lambda line: None
        if recipe is not None:
            self.switch(recipe)
        self.say = logging.getLogger("megatron_hybrid").info

    def record_statistics(self, every: int, path, **options) -> None:
        """Every `every` steps, measure what the casts of the first microbatch do and append it to a file of JSON lines.

        path, options (writer, rank, say): see `observe.recorder.Recorder`, which says what raises.
        """
        from .observe.recorder import Recorder

        self.recorder = Recorder(every, path, **options)

    def profile_step(self, step: int, path, **options) -> None:
        """Write what the time of step `step` goes to into a JSON file.

        options (rank, say): see `observe.profile.StepProfile`, which says what raises.
        """
        from .observe.profile import StepProfile

        self.profile = StepProfile(step, path, **options)

    def check_nan(self, rank: int | None = None) -> None:
        """From now on raise `observe.nan_check.NanFound` at the first NaN or Inf. Makes the host wait for every cast."""
        from .observe.nan_check import NanCheck

        for runtime in self.runtimes:
            runtime.nan_check = NanCheck(self.keys, rank)

    def stand(self) -> None:
        """For layers that are captured in CUDA graphs: what their casts read besides tensors stays where it is, and each step
        and microbatch is written there. Who replays a layer calls `LinearRuntime.refresh` before. Plans cannot change once a
        step has begun."""
        self._later = Later()
        for keys in self._all_keys():
            keys.stand()
        for runtime in self.runtimes:
            runtime.weight_cache.stand(self._later)

    def begin_step(self, step: int, num_microbatches: int | None = None) -> None:
        """Start of step `step` (Megatron's 1-based iteration): step rules take effect, a cache window opens."""
        if step < 1 or step != int(step):
            raise ValueError(f"begin_step({step}): steps count from 1, as Megatron's iterations do")
        self._refuse_if_followed()
        self._warn_if_not_ended(step)
        changed = [runtime.set_step(step) for runtime in self.runtimes].count(True)
        if changed:
            self.say(f"step {step}: rules on steps change {changed} of {len(self.runtimes)} linears; {self._runs()}")
        self._set_keys(step, 0, num_microbatches)
        for runtime in self.runtimes:
            runtime.make_keys()
        self.invalidate()
        if self.recorder is not None:
            self.recorder.begin_step(step, self.runtimes)
        if self.profile is not None:
            self.profile.begin_step(step, self.runtimes)

    def microbatch(self, index: int) -> None:
        """Before the forward of microbatch `index` (0-based), and before its backward where others ran in between."""
        self._set_keys(self.keys.step, index)

    def _refuse_if_followed(self) -> None:
        """Raise ``RuntimeError`` where a later controller has taken a module over: its random keys would never move."""
        own = self._all_keys()
        taken = next((runtime for runtime in self.runtimes if runtime.keys not in own), None)
        if taken is not None:
            raise RuntimeError(
                f"module {taken.label}: `mh.prepare` was called for it again, and this controller drives it no longer; "
                "go on with the later one, over all modules that train together"
            )

    def _warn_if_not_ended(self, step: int) -> None:
        """Once, where the last step was left open and delayed scales wait for its end."""
        left_open, self._running = self._running not in (None, step), step
        if left_open and not self._warned and any(True for r in self.runtimes for _ in r.states(moving=True)):
            self._warned = True
            warnings.warn(
                f"begin_step({step}) without `ctl.end_step()` of the step before, which moves delayed scales on: "
                "they stay as they are",
                stacklevel=3,
            )

    def _set_keys(self, *where) -> None:
        for keys in self._all_keys():
            keys.set(*where)
        if self._later is not None:
            self._later.set(self.keys.microbatch > 0)

    def _all_keys(self):
        return dict.fromkeys((self.keys, self._expert_keys))

    def end_step(self, group=None, expert_groups=None) -> None:
        """After the optimizer's step: the cache window closes, delayed scales move on.

        group: the process group whose ranks share the tensors; all amaxes are max-reduced in one collective.
        expert_groups: where experts are spread over ranks, the groups, one after another, over which their amaxes are
        reduced instead: the ranks that hold the same experts. Every rank takes part, tokens or not: an amax is then 0.
        """
        self._running = None
        for runtime in self.runtimes:
            runtime.end_step()
        if self.recorder is not None:
            self.recorder.end_step(self.keys.step)
        self.reduce_amaxes(group, expert_groups)
        together = defaultdict(list)
        for fmt, state in (pair for runtime in self.runtimes for pair in runtime.states(moving=True)):
            together[fmt, state.scale.device, len(state.history)].append(state)
        for (fmt, *_), same in together.items():
            update_states(fmt, same)
        if self.profile is not None:
            self.profile.end_step(self.keys.step)

    def forget_overflow(self) -> None:
        """Before `end_step`, where loss scaling skipped the optimizer's step: an amax of this step that is Inf or NaN
        counts for nothing. In a history it would keep the scale as it is until it has dropped out."""
        for _, state in (pair for runtime in self.runtimes for pair in runtime.states()):
            state.history[:1].nan_to_num_(nan=0.0, posinf=0.0)

    def reduce_amaxes(self, group=None, expert_groups=None) -> None:
        """Max-reduce what every history collected since the last step, in one collective a group; see `end_step`."""
        spread = [r for r in self.runtimes if expert_groups is not None and r.role.expert is not None]
        shared = [r for r in self.runtimes if expert_groups is None or r.role.expert is None]
        _reduce_amaxes(shared, [] if group is None else [group])
        _reduce_amaxes(spread, expert_groups or [])

    def invalidate(self) -> None:
        """Drop cached quantized weights, and keep those cast from now on until the step's end or the next call: call it, on
        every rank, after writing to a weight inside a step or before an evaluation that follows one. `begin_step` does."""
        for runtime in self.runtimes:
            runtime.invalidate()
            if runtime.weight_cache is not None:
                runtime.weight_cache.is_open = True
        for follow in self.on_new_weights:
            follow()

    def rescale_from(self, recipe, step: int | None = None) -> None:
        """After loading delayed scales of a run with another recipe: make them anew, from the histories, where its
        formats map an amax to another number. recipe: that run's, as for `switch`, None where nobody knows it: then
        all are made anew; step: its last one, for step rules. Load the optimizer before: weights that live quantized
        are cast anew from its masters."""
        recipe = None if recipe is None else as_recipe(recipe)
        for runtime in self.runtimes:
            runtime.rescale_from(recipe, step)
        self.invalidate()

    def switch(self, recipe) -> None:
        """Change the recipe from the next forward on. Every module is planned and checked before any is changed.

        recipe: a `Recipe`, a name or path, or a function of a role. A forward that ran before keeps its own plan for
        its backward, but cannot be recomputed any more: switch between steps.
        """
        recipe = as_recipe(recipe)
        if self._later is not None and self.keys.step:
            raise PlanError(
                f"recipe {recipe.name} from step {self.keys.step} on: layers that are captured in CUDA graphs go on with the "
                "formats of their capture; switch before the first step, or train without graphs"
            )
        recipe.check_matches([*(r.role for r in self.runtimes), *self.others])
        for runtime in self.runtimes:
            runtime.check(recipe)
        names = dict.fromkeys(runtime.recipe.name for runtime in self.runtimes)
        for runtime in self.runtimes:
            runtime.replan(recipe)
        said = f"recipe {', '.join(names)} becomes {recipe.name} from the next forward on (step {self.keys.step} has begun)"
        self.say(f"{said}; {self._runs()}")

    def _runs(self) -> str:
        """How many gemms run as what now."""
        return describe_runs(plan for runtime in self.runtimes for plan in runtime.plans())


def _reduce_amaxes(runtimes: list[LinearRuntime], groups) -> None:
    """The running step's amaxes, max-reduced in one collective a group."""
    histories = [state.history[0] for runtime in runtimes for _, state in runtime.states()]
    for group in groups if histories else ():
        torch._foreach_copy_(histories, start_max(histories, group)())


def prepare(model: torch.nn.Module, recipe=None, seed: int = 0, num_microbatches: int = 1) -> Controller:
    """A `Controller` over every quantized module of `model`.

    recipe: gives all of them this recipe (a `Recipe`, a name or path, or a function of a role); None keeps what they
    were built with. seed: of stochastic rounding, 32 bits. Unnamed modules take their path in the model as name, and
    producers that know their consumer's role find the consumer. Raises ``ValueError`` when the model has no
    quantized module, none of such a role, or a sharded parameter with `main_grad`; `RecipeError` for a rule that
    matches nothing, `PlanError` for a plan that cannot run.
    """
    _refuse_main_grad_of_shards(model)
    runtimes, others = [], []
    for path, module in model.named_modules():
        if isinstance(module, LinearRuntime):
            module.name_if_unnamed(_owner_path(path))
            runtimes.append(module)
        elif isinstance(role := getattr(module, "role", None), ModuleRole):
            module.role = role if role.name else replace(role, name=path)
            others.append(module.role)
    if not runtimes:
        raise ValueError("prepare: the model has no quantized module (HybridLinear and its kin)")
    bind_outputs(model)
    return Controller(runtimes, None if recipe is None else as_recipe(recipe), seed, num_microbatches, tuple(others))


def _refuse_main_grad_of_shards(model: torch.nn.Module) -> None:
    """FSDP2 reduces what autograd returns; a gradient added to `main_grad` would never be reduced."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "main_grad") and hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"parameter {name}: it is sharded (FSDP2, DTensor) and has `main_grad`, which bypasses the reduction of "
                "gradients; leave `main_grad` out, FSDP2 accumulates by itself"
            )


def _owner_path(path: str) -> str:
    """Path of the module that owns the runtime at a path: ``fc1.hq``, or ``experts.hq.3`` of a grouped module."""
    parts = path.split(".")
    return ".".join(parts[: len(parts) - 1 - parts[::-1].index("hq")])
