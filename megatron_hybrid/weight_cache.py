"""A weight's payloads from one microbatch to the next."""

from __future__ import annotations

import functools

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Later:
    """Whether a step's first microbatch is over, for kernels: an int32 scalar, zero until then, on every device that asks."""

    def __init__(self):
        self._value, self._flags = 0, {}

    def set(self, later: bool) -> None:
        self._value = int(later)
        for flag in self._flags.values():
            flag.fill_(self._value)

    def on(self, device: torch.device) -> torch.Tensor:
        """The scalar there, whose memory stays. Made at its first use, before any capture."""
        if device not in self._flags:
            self._flags[device] = torch.full((), self._value, dtype=torch.int32, device=device)
        return self._flags[device]


class WeightCache:
    """A weight's payloads inside one microbatch window: cast once a step, not once a microbatch.

    The window is opened by the controller's `begin_step` or `invalidate` and closed by its `end_step`; outside of one
    every call casts, as nobody says there when the weight was written. Inside, `invalidate` begins anew, which a
    parameter sync and a load call. is_open: for callers without a controller, that call `invalidate` themselves.

    Which memory it is and torch's version counter are checked too, but they alone do not see writes through `.data` or
    a flat buffer. An address alone says nothing: a weight that is computed for each call (parametrized, or given to
    `torch.func.functional_call`) may come to lie where the last one was. Of inference tensors nobody counts versions, so
    that their payloads are not kept.

    One that stands keeps its payloads' memory for good, and writes a new window's payloads there: a captured CUDA graph
    reads them where they were when it was captured. The graph casts by itself, in a step's first microbatch, or `refresh`
    does before it is replayed.
    """

    def __init__(self, is_open: bool = True):
        self.is_open = is_open
        self._later = self._again = None
        self._captured, self._held = False, [None, None]
        self.invalidate()

    def __reduce__(self):
        return WeightCache, (False,)  # a copied or pickled module starts with an empty cache, and maybe without a controller

    def amaxes(self):
        """(rowwise, columnwise) amaxes of the weight that were reduced over ranks together with others', or None."""
        return None

    def held(self) -> list:
        """The payloads there are now."""
        return [s for s, fresh in zip(self._held, self._fresh) if fresh]

    @property
    def stands(self) -> bool:
        return self._later is not None

    def stand(self, later: Later) -> None:
        """From now on payloads stay where they are."""
        self._later = later

    def invalidate(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._key, self._memory, self._fresh, self._recorded = None, None, [False, False], [False, False]
        if not self.stands:
            self._held = [None, None]

    def refresh(self) -> None:
        """What the last call in training asked for, now: before a graph reads it. Nothing where that is held."""
        if self._again is not None:
            weight, cast, wanted, record = self._again
            self.get(weight, cast, wanted, record=record)

    def get(self, weight, cast, wanted: tuple[bool, bool], *, record: bool = False, training: bool = False, update=None):
        """(rowwise, columnwise) payloads; `cast(weight, rowwise=, columnwise=)` makes those not held yet.

        record: the cast records amaxes. A payload made without (in evaluation, under `no_grad`) is made again then.
        training: gradients follow. update: `update(row, col, noop)` casts into payloads, None for one that is not
        quantized, with nothing outside of the device's memory; None where there is no such cast.
        """
        if not (self.is_open or self.stands) or weight.is_inference():
            return cast(weight, rowwise=wanted[0], columnwise=wanted[1])
        if training and self.stands and not self._captured:
            self._again = weight, cast, wanted, record
        # a stack begins where its first matrix does
        memory = weight.untyped_storage()
        key = (memory._cdata, weight.data_ptr(), weight._version, weight.device, weight.shape)
        if key != self._key:
            if self._key is not None:
                self._forget()
            self._key, self._memory = key, StorageWeakRef(memory)  # as long as this is held no other memory has that number
        missing = [w and (not f or (record and not r)) for w, f, r in zip(wanted, self._fresh, self._recorded)]
        first = False
        if any(missing):
            first = any(w and h is None for w, h in zip(wanted, self._held))
            new = cast(weight, rowwise=missing[0], columnwise=missing[1])
            put = _into_memory_of if self.stands else _instead_of
            self._held = [put(h, n) if m else h for n, m, h in zip(new, missing, self._held)]
            self._fresh = [m or f for m, f in zip(missing, self._fresh)]
            self._recorded = [record if m else r for m, r in zip(missing, self._recorded)]
        found = tuple(h if w else None for h, w in zip(self._held, wanted))
        if training and self.stands and update is not None:
            self._capture(found, functools.partial(update, noop=self._later.on(weight.device)), first)
        return found

    def _capture(self, found, update, first: bool) -> None:
        """In a capture: have the graph cast. first: before any, once, as a kernel may not be loaded in a capture."""
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            self._captured, self._again = True, None
        if capturing or first:
            update(*(s if s is not None and s.format.is_quantized else None for s in found))


def _instead_of(held, new):
    return new


def _into_memory_of(held, new):
    """The payload `held` with what `new` holds; `new` where there is none yet, or one of another format.

    What is high precision is the weight itself, and stays it.
    """
    if held is None or held.format != new.format:
        return new
    pairs = zip(held.buffers().values(), new.buffers().values(), strict=True)
    moved = [(old, fresh) for old, fresh in pairs if old.data_ptr() != fresh.data_ptr()]
    if moved:
        with torch.no_grad():
            torch._foreach_copy_(*map(list, zip(*moved)))
    return held
