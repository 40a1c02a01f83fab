"""Parameters that live quantized: how a module creates, initialises, writes and requantizes its weight.

    with mh.quantized_model_init("mxfp8"):
        model = mh.HybridMLP(64, 256)          # weights are `HybridTensor`s; nothing keeps them in high precision
    optimizer = mh.FusedAdam(model.parameters())   # keeps FP32 masters, writes both directions after a step

A recipe with ``weights: quantized`` does the same without the context. Which directions a weight holds follows from
the plan: those that forward and backward read.
"""

from __future__ import annotations

import contextlib
import weakref
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from .formats import COLUMNWISE, DIRECTIONS, ELEMENTS
from .plan import WEIGHT, GemmPlan, PlanError
from .random_keys import RandomKeys
from .recipe import DEFAULT_RECIPE, QUANTIZED
from .recipe_callable import as_recipe
from .scaling import Pieces, Rng, frozen, scale_for, update_states
from .storage import QuantizedStorage
from .tensor import HybridTensor, matrix_shape

FITS = 1 + 2.0**-5  # less than half a step above an element type's largest number, more than a decode's rounding


@dataclass(frozen=True)
class InitMode:
    """What `quantized_model_init` says to the modules that are built inside."""

    recipe: object
    preserve: bool
    requires_grad: bool


_mode: ContextVar[InitMode | None] = ContextVar("quantized_model_init", default=None)


@contextlib.contextmanager
def quantized_model_init(recipe, preserve_high_precision_init_val: bool = False, *, requires_grad: bool = True):
    """Modules built inside have quantized weights, and this recipe unless they are given one.

    recipe: a `Recipe`, a name or path, or a function of a role. preserve_high_precision_init_val: keep a copy of the
    initial (or loaded) values on the CPU, `p.get_high_precision_init_val()`, from which `FusedAdam` starts its
    masters, exactly; it frees them then, as `p.clear_high_precision_init_val()` does. requires_grad: False for
    inference: frozen weights that hold only the direction that forward reads.

    Weights that the recipe leaves in high precision stay plain parameters. Works under `no_grad` and on the meta
    device (``to_empty``, then ``reset_parameters`` or ``load_state_dict``). Raises `PlanError` at a module whose
    recipe reads one direction of the weight in high precision.
    """
    token = _mode.set(InitMode(as_recipe(recipe), preserve_high_precision_init_val, requires_grad))
    try:
        yield
    finally:
        _mode.reset(token)


def module_recipe(recipe):
    """The recipe of a module that is being built: its own, else the context's, else the default."""
    mode = _mode.get()
    if recipe is None:
        recipe = DEFAULT_RECIPE if mode is None else mode.recipe
    return as_recipe(recipe) if mode is None else as_recipe(recipe).with_weights(QUANTIZED)


class WeightOwner:
    """Stands between a module's quantized weight and the runtime whose plan and scales its casts read.

    Holds neither alive. Copies and pickles of it are None: a copied module makes its own.
    """

    def __init__(self, module: torch.nn.Module, name: str, runtime):
        self._module, self._name, self._runtime = weakref.ref(module), name, weakref.ref(runtime)
        self.gather = None  # what casts it from masters that are split among ranks

    def __reduce__(self):
        return type(None), ()

    @property
    def weight(self) -> HybridTensor | None:
        module = self._module()
        weight = None if module is None else module._parameters.get(self._name)
        weight = getattr(weight, "orig_param", weight)  # between steps Megatron-FSDP's modules hold the shards
        return weight if isinstance(weight, HybridTensor) else None

    @property
    def recipe(self):
        return self._runtime().recipe

    @property
    def label(self) -> str:
        return self._runtime().label

    def keys(self, device, *, step: bool = False, noop_flag=None) -> dict:
        """`rng`, `state` and, where other ranks share the scale, `reduce_amax` of a cast of this weight now. step: of one
        after an optimizer's step."""
        runtime = self._runtime()
        if runtime is None:  # the module is gone, the weight is not
            return dict(rng=None, state=None)
        states = runtime.weight_states()
        if step and states is not None:
            for state, fmt in zip(states, runtime.plan_for(device).quantizers[WEIGHT].formats()):
                if state is not None and fmt.is_stateful:  # one that another step's plan uses stands still
                    update_states(fmt, [state], noop_flag)
        reducers = runtime.weight_reducers(device)
        shared = {} if reducers is None else {"reduce_amax": reducers}
        return dict(rng=_rng(runtime, device), state=states, **shared)

    def amaxes_shared(self, direction: str, device):
        """The process group over which the amax of this direction is reduced, besides the ranks that share the weight;
        None: over none."""
        runtime = self._runtime()
        reducers = runtime.weight_reducers(device)
        return None if reducers is None or reducers[DIRECTIONS.index(direction)] is None else runtime.ranks.group

    def rounded(self, src: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `rounded`."""
        runtime = self._runtime()
        return src if runtime is None else rounded(src, dtype, runtime.recipe)

    def start_scales(self, value: torch.Tensor) -> None:
        """See `start_scales`."""
        if (runtime := self._runtime()) is not None:
            start_scales(runtime, value)

    def check(self, recipe, device) -> None:
        """Raise `PlanError` for a recipe that this weight could not follow."""
        check_recipe(self._runtime(), recipe, device)

    def settle(self) -> None:
        """Have the weight's payloads stay where they are, until their formats change."""
        if (module := self._module()) is not None:
            module.settle_payloads()

    def check_split(self) -> None:
        """Raise `PlanError` for a weight that other ranks share in a way that a cast from split masters does not know."""
        runtime = self._runtime()
        plan = runtime.plan_for(self.weight.device)
        if any(fmt.sr for fmt in plan.quantizers[WEIGHT].formats()) and isinstance(runtime.index_maps.get(WEIGHT), Pieces):
            raise PlanError(f"{plan.label}: stochastic rounding of a quantized gated weight is not supported under "
                            "tensor parallelism")  # fmt: skip

    def forget_running_amax(self) -> None:
        """That of a value that no forward read with this format; the cast that follows records anew."""
        for state in self._runtime().weight_states() or ():
            if state is not None:
                state.history[0] = 0

    def recast(self) -> None:
        """Cast anew, in the formats there are, what was cast with scales of other ones: from the master or the
        preserved value, where there is one. A gather casts from split masters when it next follows formats."""
        t = self.weight
        if t is None:
            return
        if self.gather is not None:
            self.forget_running_amax()
            self.gather.outdated = True
        elif t.is_kept():
            self.forget_running_amax()
            t.detach().write(t.best_value(), master=True)

    def requantize(self) -> None:
        """Follow a changed plan: cast anew from the master, the preserved value, else the decode, in that order. Where a
        gather casts split masters, its next one does that: what is cast here is the decode, whose amax does not count.
        Where a gather brings the bytes and the memory, there are only their shapes."""
        t, runtime = self.weight, self._runtime()
        if t is None or t.quantizer == runtime.plan_for(t.device).quantizers[WEIGHT]:
            return
        marks = t._stale
        self.forget_running_amax()
        with torch.no_grad():
            trained = t.requires_grad or t.columnwise is not None
            if self.gather is not None and self.gather.brings_bytes:
                new = unfilled(runtime, t.shape, t.dtype, t.device, trained=trained)
                for buffer in new.payload_buffers():  # the gather gives them memory, a group of weights at a time
                    buffer.untyped_storage().resize_(0)
            else:
                value = t.best_value()
                if not t.is_kept():
                    start_scales(runtime, value)
                new = quantize(runtime, value, t.dtype, trained=trained, record=self.gather is None)
            new._stale.inherit(marks)
            t.data = new
        torch.autograd.graph.increment_version(t)
        self._module().leave_payloads()


def rounded(src: torch.Tensor, dtype: torch.dtype, recipe) -> torch.Tensor:
    """`src` as the recipe's ``master_cast`` wants it: as it is, or rounded to the parameter's dtype first."""
    return src.to(dtype) if recipe.master_cast == "param_dtype" else src


def start_scales(runtime, value: torch.Tensor) -> None:
    """Before a new value is cast that nothing else keeps: delayed scales that are still 1, or clip it, are made to fit.

    Elsewhere they start at 1, and what a format cannot hold at 1 is made up for a step later. Here it would be lost.
    Scales that were loaded with the value, or history has made, stay as they are.
    """
    states, formats = runtime.weight_states() or (), runtime.plan_for(value.device).quantizers[WEIGHT].formats()
    scaled = [(state, fmt) for state, fmt in zip(states, formats) if fmt.is_stateful]
    if not scaled or value.is_meta or not value.numel():
        return
    amax = value.detach().abs().amax().float()
    for state, fmt in scaled:
        unused = (state.scale == 1) & (state.history == 0).all()
        clips = amax * state.scale > FITS * ELEMENTS[fmt.element].max
        state.scale.copy_(torch.where(unused | clips, scale_for(fmt, amax, state.scale), state.scale))


def _rng(runtime, device) -> Rng | None:
    if not any(fmt.sr for fmt in runtime.plan_for(device).quantizers[WEIGHT].formats()):
        return None
    index_map = runtime.index_maps.get(WEIGHT)
    keys = runtime.keys or RandomKeys(seed=0, num_microbatches=1)  # before there is a controller: the draw of step 0
    return keys.rng(runtime.role, WEIGHT, device, index_map)


def unfilled(runtime, shape, dtype: torch.dtype, device, *, trained: bool) -> HybridTensor:
    """Memory for the directions that the plan reads; `trained` False: those of forward only."""
    plan = runtime.plan_for(device)
    quantizer = plan.quantizers[WEIGHT]
    directions = DIRECTIONS if trained and plan.saved[WEIGHT] == COLUMNWISE else DIRECTIONS[:1]
    payloads = [QuantizedStorage.empty(getattr(quantizer, d), d, matrix_shape(shape), dtype, device) for d in directions]
    row, col = payloads if len(payloads) == 2 else (*payloads, None)
    return HybridTensor.from_storages(row, col, shape, dtype, quantizer)


def quantize(runtime, x: torch.Tensor, dtype: torch.dtype, *, trained: bool, record: bool = True) -> HybridTensor:
    """`x` in the directions that the plan reads; `trained` False: those of forward only. record: histories of delayed
    scales keep the amaxes."""
    x = rounded(x, dtype, runtime.recipe)
    t = unfilled(runtime, x.shape, dtype, x.device, trained=trained)
    states = runtime.weight_states()
    keys = dict(rng=_rng(runtime, x.device), state=states if record else frozen(states))
    return t.update(x, reduce_amax=runtime.weight_reducers(x.device), **keys)


def check_plan(plan: GemmPlan, resolved) -> None:
    """Raise `PlanError` for a plan that reads the original of a weight that lives quantized.

    resolved: the recipe's `ModuleQuant` that the plan was built from.
    """
    quantizer = plan.quantizers[WEIGHT]
    row, column = quantizer.formats()
    if row.is_quantized and (column.is_quantized or quantizer.derives_columnwise):
        return
    gemms = [gemm for gemm, fmt in (("fprop", row), ("dgrad", column)) if not fmt.is_quantized]
    why = " (`backward: high_precision`)" if resolved.backward == "high_precision" else ""
    raise PlanError(
        f"{plan.label}: its weight lives quantized and nothing keeps it in high precision, which {' and '.join(gemms)} "
        f"would read{why}; use `backward: dequantized` or a quantized format there, or `weights: high_precision`"
    )


def check_recipe(runtime, recipe, device) -> None:
    """Raise `PlanError` if a quantized weight could not follow a recipe, now or from a later step on."""
    for step in (runtime.step, *recipe.change_steps()):
        check_plan(runtime.build(recipe, device, step), recipe.resolve(runtime.role, step=step))


class HoldsWeight:
    """What a module adds for weights that may live quantized. One weight and one runtime, `self.hq`, unless it says."""

    def held_weights(self) -> list[tuple]:
        """(parameter name, its `LinearRuntime`) of every weight; none before there are runtimes."""
        hq = self._modules.get("hq")
        return [] if hq is None else [("weight", hq)]

    def hold_weight(self, *, preserve: bool = False) -> None:
        """Quantize the weights, initialised before, that the recipe says so of. Once, at the end of building.

        preserve: keep their values on the CPU whatever `quantized_model_init` says.
        """
        mode = _mode.get()
        for name, hq in self.held_weights():
            weight = self._parameters.get(name)  # none in an output layer that shares the embedding's
            if weight is None or isinstance(weight, HybridTensor) or not lives_quantized(hq):
                continue
            check_recipe(hq, hq.recipe, weight.device)
            keep = preserve or (mode is not None and mode.preserve)
            trained = weight.requires_grad and (mode is None or mode.requires_grad)
            self._parameters[name] = _quantized_parameter(hq, weight, keep, trained)
        self._own_weights()

    def settle_payloads(self) -> None:
        """Have the weights' payloads where calls want them, before someone remembers where they are."""

    def leave_payloads(self) -> None:
        """Payloads may have been replaced: hold on to none that weights no longer have."""

    def _own_weights(self) -> None:
        for name, hq in self.held_weights():
            weight = self._parameters.get(name)
            if isinstance(weight, HybridTensor):
                hq.weight_owner = weight._stale.owner = WeightOwner(self, name, hq)

    def __setstate__(self, state):
        super().__setstate__(state)
        self._own_weights()

    def _apply(self, fn, recurse=True):
        """Moves keep what the parameters know."""
        held = {name: self._parameters.get(name) for name, _ in self.held_weights()}
        known = {n: (p._stale, dict(p.__dict__)) for n, p in held.items() if isinstance(p, HybridTensor)}
        super()._apply(fn, recurse)
        for name, (marks, attributes) in known.items():
            after = self._parameters[name]
            if after._stale is not marks:
                after._stale.inherit(marks)
            after.__dict__.update(attributes)
        self.leave_payloads()
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args, **kwargs):
        held = [name for name, _ in self.held_weights()]
        written = [hq for name, hq in self.held_weights() if f"{prefix}{name}" in state_dict]
        assign = local_metadata.get("assign_to_params_buffers", False)
        for path, module in self.named_modules():
            if hasattr(module, "load_states_first"):  # the weight is cast with these
                module.load_states_first(state_dict, f"{prefix}{path}.", weight=module in written, assign=assign)
        before = [self._parameters.get(name) for name in held]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        if any(self._parameters.get(name) is not weight for name, weight in zip(held, before)):
            self._take_assigned()

    def _take_assigned(self) -> None:
        """Parameters that took the place of the module's own live as its recipe says, in its formats."""
        for name, hq in self.held_weights():
            hq.leave_meta(self._parameters[name].device)
        self.hold_weight()
        for _, hq in self.held_weights():
            if hq.weight_owner is not None:
                hq.weight_owner.requantize()
        self.leave_payloads()


def lives_quantized(runtime) -> bool:
    """Whether the weight of a linear is to live quantized: the recipe says so, and the plan quantizes it."""
    return runtime.recipe.weights == QUANTIZED and runtime.quantizes_weight()


def _quantized_parameter(runtime, weight: torch.nn.Parameter, preserve: bool, trained: bool) -> torch.nn.Parameter:
    """The parameter that takes the place of `weight`, with its attributes."""
    with torch.no_grad():
        if not preserve:
            start_scales(runtime, weight.detach())
        t = quantize(runtime, weight.detach(), weight.dtype, trained=trained)
    t._stale.preserve = preserve
    if preserve and not weight.is_meta:
        t._stale.init_value = weight.detach().to("cpu", copy=True)
    new = torch.nn.Parameter(t, requires_grad=trained)
    new.__dict__.update({k: v for k, v in weight.__dict__.items() if k not in new.__dict__})
    return new


@contextlib.contextmanager
def fresh_values(weight: torch.Tensor):
    """A tensor to initialise in the place of `weight`: itself, or a plain one that is then quantized into it."""
    if not isinstance(weight, HybridTensor):
        yield weight
        return
    values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    yield values
    with torch.no_grad():
        weight.copy_(values)
