"""The weights of a grouped linear: one (E, N, K) parameter, or one (N, K) an expert where any of them lives quantized.

An expert has formats, scales and column blocks of its own, which one matrix of all experts does not hold. Where all have
the same formats, and scales that do not span an expert, their payloads lie in common memory (`ExpertStack`).
"""

from __future__ import annotations

import functools

import torch

from .grouped import ExpertRuntimes
from .grouped_at_once import GroupedCall
from .groups import Groups
from .plan import INPUT, WEIGHT
from .random_keys import shifted
from .runtime import LinearRuntime
from .tensor import HybridTensor
from .weights import HoldsWeight, lives_quantized


class HoldsExpertWeights(HoldsWeight):
    """What a grouped linear adds for weights that may live quantized.

    weight      (E, N, K), or None where there are ``weight0``, ``weight1``, ... (N, K) instead
    hq          one runtime an expert
    """

    num_gemms: int
    hq: ExpertRuntimes

    def hold_expert_weights(self, *, preserve: bool = False) -> None:
        """Where a plan says that a weight is to live quantized: one parameter an expert, quantized or not, with the
        attributes of the one for all. Once, at the end of building, after index maps are set, which then count an
        expert's rows in all experts'. preserve: see `hold_weight`."""
        if not any(lives_quantized(runtime) for runtime in self.hq):
            return
        whole, self.weight = self.weight, None
        for runtime in self.hq:
            shard = runtime.index_maps.get(WEIGHT, (0, 0, whole.shape[2]))
            place = shifted(shard, runtime.role.expert * self.hq.weight_rows)
            runtime.index_maps = {**runtime.index_maps, WEIGHT: place}
        for e, value in enumerate(whole.detach()):
            parameter = torch.nn.Parameter(value.clone(), requires_grad=whole.requires_grad)
            parameter.__dict__.update(whole.__dict__)
            self.register_parameter(f"weight{e}", parameter)
        self.hold_weight(preserve=preserve)
        self.settle_payloads()

    def settle_payloads(self) -> None:
        """Into common memory, where experts run at once."""
        if self.weight is None:
            self.hq.how_each(self._own_values())

    def leave_payloads(self) -> None:
        """Let go of the common memory, where weights have left it, and settle anew at once: what is taken of them from now
        on, such as a state dict, follows later writes. While a change of formats has reached only some, they wait."""
        if self._modules.get("hq") is None or self.weight is not None:
            return
        weights = self._own_values()
        self.hq.stack.forget_left(weights)
        if all(map(_has_planned_formats, weights, self.hq)):
            self.settle_payloads()

    def _own_values(self) -> list[torch.Tensor]:
        """The weights, where Megatron-FSDP's shards stand in their place too."""
        return [getattr(weight, "orig_param", weight) for weight in self.weights()]

    def __setstate__(self, state):
        super().__setstate__(state)
        self.leave_payloads()  # copies have memory of their own

    def held_weights(self) -> list[tuple]:
        """(parameter's name, runtime) of the weights that live quantized, one an expert."""
        if self._modules.get("hq") is None or self.weight is not None:
            return []
        return [(f"weight{e}", runtime) for e, runtime in enumerate(self.hq)]

    def weights(self) -> list[torch.Tensor]:
        """The weight (N, K) of every expert."""
        if self.weight is not None:
            return [self.weight[e] for e in range(self.num_gemms)]
        parameters = self._parameters
        return [parameters[name] for name in _names(self.num_gemms)]

    def weight_of(self, local_expert: int) -> torch.Tensor:
        """One expert's (N, K)."""
        return self._parameters[_names(self.num_gemms)[local_expert]] if self.weight is None else self.weight[local_expert]

    @property
    def weight_device(self) -> torch.device:
        """Where the weights are."""
        return (self._parameters["weight0"] if self.weight is None else self.weight).device

    def multiply(self, x: torch.Tensor, bias, m_splits) -> torch.Tensor:
        """`ExpertRuntimes.forward`, or `.each` over quantized weights."""
        if self.weight is None:
            return self.hq.each(x, self.weights(), bias, m_splits, training=self.training)
        return self.hq.forward(x, self.weight, bias, m_splits, training=self.training)

    def call_for_computed(self, x: torch.Tensor, groups: Groups) -> GroupedCall | None:
        """The call of all experts at once that `multiply` will make of what is computed from x, if that can be cast as
        it is computed; None in evaluation, of frozen weights, and of those that are there in a call only."""
        weights = self.weights() if self.weight is None else [self.weight]
        if not torch.is_grad_enabled() or not any(weight.requires_grad for weight in weights):
            return None
        if self.weight is not None:
            call = self.hq.call_at_once(x, self.weight, groups, training=self.training)
        elif all(type(weight) is HybridTensor for weight in weights):
            call = self.hq.call_each(x, weights, groups, training=self.training)
        else:
            call = None
        return call if call is not None and call.takes_computed(INPUT) else None

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Takes one weight for all experts, or one an expert, whichever this module has."""
        whole, each = f"{prefix}weight", [f"{prefix}weight{e}" for e in range(self.num_gemms)]
        if self.weight is None and whole in state_dict:
            parts, errors = state_dict.pop(whole).unbind(), args[-1]
            if len(parts) != self.num_gemms:
                errors.append(f"{whole} has {len(parts)} experts, expected {self.num_gemms}")
            state_dict.update(zip(each, parts))
        elif self.weight is not None and whole not in state_dict and all(key in state_dict for key in each):
            parts = [state_dict.pop(key) for key in each]
            plain = [p.dequantize(dtype=p.dtype) if isinstance(p, HybridTensor) else p for p in parts]
            state_dict[whole] = torch.stack(plain)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.leave_payloads()


@functools.lru_cache(maxsize=None)
def _names(num: int) -> tuple[str, ...]:
    """Of the experts' parameters."""
    return tuple(f"weight{e}" for e in range(num))


def _has_planned_formats(weight: torch.Tensor, runtime: LinearRuntime) -> bool:
    return type(weight) is HybridTensor and weight.quantizer == runtime.plan_for(weight.device).quantizers[WEIGHT]
