"""When a module of Megatron's may keep its quantized weight: Megatron says when the weight may have changed."""

from __future__ import annotations


class WeightWindow:
    """For modules with `hq`: drops the cached weight at the first microbatch of a step, on a change of mode, on a load."""

    @property
    def is_first_microbatch(self) -> bool:
        """Set by Megatron before the first microbatch of a step: the weight may have changed since."""
        return self.__dict__.get("_is_first_microbatch", True)

    @is_first_microbatch.setter
    def is_first_microbatch(self, value: bool) -> None:
        self._is_first_microbatch = value
        self._forget_weight()

    def train(self, mode: bool = True):
        self._forget_weight()
        return super().train(mode)

    def _load_from_state_dict(self, *args, **kwargs):
        self._forget_weight()
        return super()._load_from_state_dict(*args, **kwargs)

    def _forget_weight(self) -> None:
        hq = self._modules.get("hq")
        if hq is not None:
            hq.invalidate()
