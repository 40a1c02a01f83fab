"""What a file or a copy of a `HybridTensor` contains: plain tensors and plain data, with a version.

`torch.load(weights_only=True)` accepts such files: the one function they name is registered below.
"""

from __future__ import annotations

import copy

import torch

from . import tensor as hybrid

VERSION = 1


def record(t: hybrid.HybridTensor) -> dict:
    """Everything needed to rebuild `t`: strings, numbers, lists and plain tensors: its buffers, but copies of those that lie in
    memory with others', as experts' do: a file holds all of a tensor's memory."""
    names, spec = t.__tensor_flatten__()
    plain = spec._replace(dtype=str(t.dtype).removeprefix("torch."), stale=list(spec.stale))._asdict()
    for direction in ("rowwise", "columnwise"):
        if plain[direction] is not None:
            plain[direction] = plain[direction]._asdict()
    return {
        "version": VERSION,
        "spec": plain,
        "tensors": {name: _alone(t, getattr(t, name)) for name in names},
        "size": list(t.shape),
        "stride": list(t.stride()),
        "offset": t.storage_offset(),
        "device": str(t.device),
        "requires_grad": t.requires_grad,
        "attributes": dict(t.__dict__),  # what nn.Parameter and users set
    }


def _alone(t: hybrid.HybridTensor, buffer: torch.Tensor) -> torch.Tensor:
    """A buffer as it is written. Pieces, like torch's, share their memory with what they are of."""
    whole = t._shared is hybrid.WHOLE
    return buffer.clone() if whole and buffer.nbytes < buffer.untyped_storage().nbytes() else buffer


def rebuild_hybrid_tensor(r: dict) -> hybrid.HybridTensor:
    """The tensor of a `record`. Raises ``ValueError`` for a record of a newer version."""
    if r["version"] > VERSION:
        raise ValueError(f"a HybridTensor of file version {r['version']}; this release reads up to {VERSION}")
    frames = {d: None if (f := r["spec"][d]) is None else hybrid.Frame(**f) for d in ("rowwise", "columnwise")}
    dtype = getattr(torch, r["spec"]["dtype"])
    spec = hybrid.TensorSpec(**{**r["spec"], **frames, "dtype": dtype})
    tensors = [r["tensors"][name] for name in spec.names()]
    device = tensors[0].device if tensors else torch.device(r["device"])
    t = hybrid.HybridTensor(tensors, spec, r["size"], r["stride"], r["offset"], device)
    t.__dict__.update(r["attributes"])
    return t.requires_grad_(r["requires_grad"])


def deepcopy(t: hybrid.HybridTensor, memo: dict) -> hybrid.HybridTensor:
    """A copy with its own buffers, attributes and gradient, as torch makes of plain leaves."""
    if id(t) in memo:
        return memo[id(t)]
    with torch.no_grad():
        new = t.clone()
    memo[id(t)] = new
    new.__dict__.update(copy.deepcopy(t.__dict__, memo))
    new.requires_grad_(t.requires_grad)
    if t.grad is not None:
        new.grad = copy.deepcopy(t.grad, memo)
    return new


torch.serialization.add_safe_globals([rebuild_hybrid_tensor])
