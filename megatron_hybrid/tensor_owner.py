"""What a quantized parameter knows besides its bytes: who writes it, and its value in high precision.

None of this is part of the tensor's value: it is not saved, not copied, and lives on in detached tensors and `.data`.
"""

from __future__ import annotations

import weakref

import torch

from .scaling import frozen


class Marks(set):
    """Shared by all tensors over the same payloads: the set of stale directions, and of a parameter

    owner          what calls its casts (`weights.WeightOwner`): knows delayed scales, random keys, rounding; or None
    preserve       keep the high-precision value of writes that are not an optimizer's
    init_value     that value, on the CPU, or None
    master         weak reference to the FP32 master that an optimizer keeps, or None
    promised       stale directions that will be filled before backward reads them (FSDP2's second gather)
    """

    owner = init_value = master = None
    preserve = False
    promised = frozenset()

    def filled(self, held, fresh, promised=()) -> None:
        """A gather has filled the payloads `fresh` of those held, and `promised` directions will be before backward."""
        for s in held:
            (self.discard if s in fresh else self.add)(s.direction)
        self.promised = frozenset(promised)

    def follow(self, value: torch.Tensor) -> None:
        """An optimizer's master takes over a value that something else wrote; the next step would undo it."""
        master = None if self.master is None else self.master()
        if master is not None:
            master.copy_(value)

    def inherit(self, other: Marks) -> None:
        """Take over everything but staleness: the payloads have moved, the parameter is the same one."""
        self.owner, self.preserve, self.init_value, self.master = (
            other.owner, other.preserve, other.init_value, other.master
        )  # fmt: skip


class Owned:
    """The part of `HybridTensor` that concerns parameters. `_stale` is its `Marks`."""

    __slots__ = ()

    def write(self, src: torch.Tensor, *, step=False, master=False, record=True, noop_flag=None):
        """Quantize `src` into every direction held, with the scales, keys and rounding of the module that owns it.

        src: this shape, high precision, this device. step: by an optimizer after its step (delayed scales then move
        on). master: `src` is the optimizer's, not a new value. record: histories of delayed scales keep the amax.
        noop_flag: int32 device scalar; non-zero changes nothing. A tensor without an owner is just updated.
        Raises what `update` raises, before anything is written.
        """
        marks = self._stale
        src = written_value(self, src)
        owner, source = marks.owner, self._source(src)
        checked = dict(rng=None, state=None) if owner is None else owner.keys(self.device)
        self.quantizer.check_arguments(source, rng=checked["rng"], state=checked["state"], noop=noop_flag)
        if owner is not None and noop_flag is None and not (step or master or self.is_kept()):
            owner.start_scales(src)
        keys = write_keys(self, step=step, record=record, noop_flag=noop_flag)
        self.update(src, **keys, noop_flag=noop_flag)
        if not (step or master):
            marks.follow(src)
        if not (step or master) and marks.preserve and self._shared is None:
            marks.init_value = src.detach().to("cpu", copy=True) if not src.is_meta else None
        return self

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The value that was quantized, in its own dtype, on the CPU; None unless it was preserved.

        Initialisation and loading set it, any other write drops it. See `quantized_model_init`.
        """
        return self._stale.init_value if self._shared is None else None

    def clear_high_precision_init_val(self) -> None:
        """Free the preserved value, and preserve no other."""
        self._stale.init_value, self._stale.preserve = None, False

    def take_master(self) -> torch.Tensor:
        """A new FP32 master on this device: from the preserved value, which is freed, else from the decode."""
        value = self.get_high_precision_init_val()
        value = self.detach().dequantize() if value is None else value
        self.clear_high_precision_init_val()
        master = value.to(device=self.device, dtype=torch.float32, copy=True)
        self.set_master(master)
        return master

    def set_master(self, master: torch.Tensor) -> None:
        """Tell the parameter which FP32 tensor its optimizer keeps; a change of formats is then cast from that."""
        self._stale.master = weakref.ref(master)

    def is_kept(self) -> bool:
        """Whether something keeps the value in high precision: a master, or the preserved value of the next write."""
        return self._stale.preserve or (self._stale.master is not None and self._stale.master() is not None)

    def comes_and_goes(self) -> bool:
        """Whether a gather gives the payloads their memory and bytes, and takes them back."""
        owner = self._stale.owner
        return owner is not None and owner.gather is not None and owner.gather.brings_bytes

    def best_value(self) -> torch.Tensor:
        """The most exact value there is, on this device: the master, the preserved value, else the decode."""
        master = None if self._stale.master is None else self._stale.master()
        value = self.get_high_precision_init_val() if master is None else master
        return self.detach().dequantize() if value is None else value.detach().to(self.device)

    def from_float8(self) -> torch.Tensor:
        """The decode in the nominal dtype, under the name that Megatron calls where checkpoints are written."""
        return self.detach().dequantize(dtype=self.dtype)


def write_keys(t, *, step: bool = False, record: bool = True, noop_flag=None) -> dict:
    """`rng`, `state` and `reduce_amax` of a cast into a parameter; step: delayed scales move on first. record: their
    histories keep the cast's amax."""
    owner = t._stale.owner
    keys = dict(rng=None, state=None) if owner is None else owner.keys(t.device, step=step, noop_flag=noop_flag)
    return keys if record else {**keys, "state": frozen(keys["state"])}


def written_value(t, src: torch.Tensor) -> torch.Tensor:
    """`src` as it is cast into a parameter: rounded to its dtype first where the recipe's ``master_cast`` says so."""
    owner = t._stale.owner
    return src if owner is None else owner.rounded(src, t.dtype)
