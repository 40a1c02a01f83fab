"""Adam with Apex's interface, so that Megatron treats it as its fused optimizer.

What Megatron relies on, and torch's AdamW does not give: ``step`` is one number a parameter group (an ``int`` in
its checkpoints) instead of a tensor a parameter; the state holds tensors of the parameter's shape and nothing
else, so it can be created empty and filled from a checkpoint. The arithmetic is torch's own fused kernel, on CPU
and GPU, hence equal to ``torch.optim.AdamW(fused=True)``.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from .tensor_owner import Owned

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"


class FusedAdam(torch.optim.Optimizer):
    """AdamW (``adam_w_mode``) or Adam with L2 regularisation; moments in FP32 whatever the parameter's type.

    A parameter that is not FP32 itself gets an FP32 master in its state: the update happens there, and
    :meth:`after_update` writes it back. A quantized parameter's master starts from its preserved high-precision value
    (which is freed then) or else from its decode, and is cast to every direction the parameter holds, with its
    module's delayed scales and random keys. DTensor parameters are updated through their local shards.
    ``capturable`` keeps ``step`` as a tensor on the device, for CUDA graphs; ``lr`` may then be a tensor too.
    """

    _options = ("adam_w_mode", "capturable", "set_grad_none")  # that are no group's

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        adam_w_mode=True,
        capturable=False,
        *,
        bias_correction=True,
        amsgrad=False,
        set_grad_none=True,
    ):
        if amsgrad:
            raise ValueError("FusedAdam: amsgrad is not supported")
        if not torch.is_tensor(lr) and lr < 0:
            raise ValueError(f"FusedAdam: lr must not be negative, got {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"FusedAdam: betas must lie in [0, 1), got {betas}")
        if eps < 0 or weight_decay < 0:
            raise ValueError(
                f"FusedAdam: eps and weight_decay must not be negative, got {eps} and {weight_decay}"
            )
        self.adam_w_mode = bool(adam_w_mode)
        self.capturable = bool(capturable)
        self.set_grad_none = bool(set_grad_none)
        super().__init__(
            params,
            dict(
                lr=lr,
                bias_correction=bool(bias_correction),
                betas=tuple(betas),
                eps=eps,
                weight_decay=weight_decay,
            ),
        )

    def __getstate__(self):
        """What copies and pickles are made of: the base class leaves out what it does not know."""
        return super().__getstate__() | {name: getattr(self, name) for name in self._options}

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        for param, tensors in self.state.items():
            if isinstance(param, Owned) and MASTER in tensors:
                param.set_master(tensors[MASTER])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure=None, *, noop_flag: torch.Tensor | None = None):
        """One update of every parameter that has a gradient; a group's ``step`` counts for all of them.

        noop_flag: int32 device scalar; non-zero leaves parameters, masters, moments and ``step`` as they are, without
        a wait for the device. Raises ``ValueError`` for it without ``capturable``: ``step`` must be on the device.
        """
        if noop_flag is not None and not self.capturable:
            raise ValueError("FusedAdam: noop_flag needs capturable=True, which keeps `step` on the device")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # A shard without elements counts as updated: steps, and the states in their order, are those of other ranks.
            updated = [param for param in group["params"] if param.grad is not None or not _local(param).numel()]
            for param in updated:
                if param not in self.state:
                    self._state_of(param)
            if updated:
                self._advance(group, updated[0].device, noop_flag)
                self._update(group, [param for param in updated if param.grad is not None], noop_flag)
        return loss

    def after_update(self, param: torch.Tensor, master: torch.Tensor, noop_flag: torch.Tensor | None = None) -> None:
        """Write the updated FP32 master back to a parameter of another kind.

        Called for parameters that are tensor subclasses; plain ones are copied together.
        """
        if isinstance(param, Owned):
            param.write(master, step=True, noop_flag=noop_flag)
        else:
            param.copy_(master)

    def state_dict(self):
        """As usual; ``step`` is an ``int`` in it, also when it lives on the device."""
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            if torch.is_tensor(group.get("step")):
                group["step"] = int(group["step"])
        return state_dict

    def load_state_dict(self, state_dict) -> None:
        """As usual, but moments and masters keep FP32 (the base class casts them to the parameter's type)."""
        device_steps = [group.get("step") for group in self.param_groups]
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            for key, tensor in state_dict["state"].get(saved_id, {}).items():
                loaded = self.state[param].get(key)
                if torch.is_tensor(tensor) and torch.is_tensor(loaded) and loaded.dtype != tensor.dtype:
                    self.state[param][key] = tensor.to(device=param.device, copy=True)
            if isinstance(param, Owned) and MASTER in self.state[param]:
                param.clear_high_precision_init_val()
                param.set_master(self.state[param][MASTER])
        for group, device_step in zip(self.param_groups, device_steps, strict=True):
            step = int(group.get("step") or 0)
            # A captured graph knows the tensor that counts, so its value changes and not the tensor.
            group["step"] = device_step.fill_(step) if torch.is_tensor(device_step) else step

    def _advance(self, group, device, noop_flag) -> None:
        """Count the group's step; a checkpoint without one (None) starts at 0."""
        step = group.get("step")
        if self.capturable:
            if not torch.is_tensor(step):
                step = torch.full((), float(step or 0), dtype=torch.float32, device=device)
            group["step"] = step.to(device).add_(1 if noop_flag is None else _is_zero(noop_flag))
        else:
            group["step"] = int(step or 0) + 1

    def _update(self, group, params, noop_flag) -> None:
        batches = defaultdict(list)  # the kernel takes tensors of one device
        copies = []
        for param in params:
            state = self._state_of(param)
            target = state.get(MASTER, param)
            tensors = tuple(_local(tensor) for tensor in (target, param.grad, *(state[key] for key in MOMENTS)))
            tensors = (tensors[0], _gradient_for(*tensors[:2]), *tensors[2:])
            batches[tensors[0].device].append(tensors)
            if target is not param:
                copies.append((param, target))
        for device, tensors in batches.items():
            targets, *others = (list(column) for column in zip(*tensors, strict=True))
            self._run(group, device, noop_flag, targets, *others)
            torch.autograd.graph.increment_version(targets)  # torch's fused kernels do not
        self._write_back(copies, noop_flag)

    def _state_of(self, param) -> dict:
        """The parameter's state, with whatever is missing created."""
        state = self.state[param]
        is_quantized = isinstance(param, Owned)
        if (is_quantized or param.dtype != torch.float32) and MASTER not in state:
            state[MASTER] = param.take_master() if is_quantized else param.detach().to(torch.float32)
        like = state.get(MASTER, param)
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(like, dtype=torch.float32)
        return state

    def _run(self, group, device, noop_flag, targets, gradients, exp_avgs, exp_avg_sqs) -> None:
        step = group["step"]
        if not group["bias_correction"]:
            before = [tensor.clone() for tensor in (*targets, *exp_avgs, *exp_avg_sqs)] if noop_flag is not None else []
            self._run_uncorrected(group, targets, gradients, exp_avgs, exp_avg_sqs)
            for tensor, old in zip((*targets, *exp_avgs, *exp_avg_sqs), before):
                tensor.copy_(torch.where(noop_flag.reshape(()).bool(), old, tensor))
            return
        if not torch.is_tensor(step):
            step = torch.full((), float(step), dtype=torch.float32, device=device)  # a fill: no host sync
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        lr = group["lr"]
        kernel(
            targets,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step.to(device)] * len(targets),
            lr=lr.to(device) if torch.is_tensor(lr) else float(lr),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None if noop_flag is None else 1 - _is_zero(noop_flag).to(device),
        )

    def _run_uncorrected(self, group, targets, gradients, exp_avgs, exp_avg_sqs) -> None:
        """Without bias correction, which torch's kernel always applies."""
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        if decay and self.adam_w_mode:
            torch._foreach_mul_(targets, 1 - lr * decay)
        elif decay:
            gradients = torch._foreach_add(gradients, targets, alpha=decay)
        torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(exp_avgs, denominators)
        torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(targets, updates)

    def _write_back(self, copies, noop_flag) -> None:
        """The masters' new values into the parameters."""
        plain = [pair for pair in copies if type(pair[0]) in (torch.Tensor, torch.nn.Parameter)]
        if plain:
            params, masters = zip(*plain, strict=True)
            torch._foreach_copy_(list(params), list(masters))
        flag = {} if noop_flag is None else {"noop_flag": noop_flag}
        for param, master in copies:
            if type(param) in (torch.Tensor, torch.nn.Parameter):
                continue
            if hasattr(param, "to_local"):
                param, master = _local(param), _local(master)
            self.after_update(param, master, **flag)


class OffloadedAdam(FusedAdam):
    """`FusedAdam` whose moments live in host memory: 8 bytes a parameter less on the device, the same bits.

    A step brings them to their parameters' device, about ``chunk_bytes`` at a time, and takes them back; the host waits
    for the last copy of each group, so that whoever reads the state finds it whole. ``capturable`` and DTensors raise
    ``ValueError``.
    A load fills them on the device before they move.
    """

    _options = (*FusedAdam._options, "chunk_bytes")

    def __init__(self, *args, chunk_bytes: int = 1 << 28, **kwargs):
        super().__init__(*args, **kwargs)
        if self.capturable:
            raise ValueError("OffloadedAdam: capturable is not supported, a captured step cannot wait for the host")
        self.chunk_bytes = chunk_bytes

    def load_state_dict(self, state_dict) -> None:
        """As `FusedAdam.load_state_dict`; the moments end on the host."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            _move_to_host(state)

    def _state_of(self, param) -> dict:
        if hasattr(param, "to_local"):
            raise ValueError("OffloadedAdam: DTensor parameters are not supported")
        state = super()._state_of(param)
        _move_to_host(state)
        return state

    def _update(self, group, params, noop_flag) -> None:
        super()._update(group, params, noop_flag)
        for device in {param.device for param in params if param.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _run(self, group, device, noop_flag, targets, gradients, exp_avgs, exp_avg_sqs) -> None:
        for part in _parts(exp_avgs, self.chunk_bytes // 2):
            kept = (*exp_avgs[part], *exp_avg_sqs[part])
            moved = [tensor.to(device, non_blocking=True) for tensor in kept]
            half = len(moved) // 2
            super()._run(group, device, noop_flag, targets[part], gradients[part], moved[:half], moved[half:])
            for host, updated in zip(kept, moved):
                if host is not updated:
                    host.copy_(updated, non_blocking=True)


def _move_to_host(state: dict) -> None:
    """The moments of a state into pinned host memory, where they are not there already."""
    for key in MOMENTS:
        if (moment := state.get(key)) is not None and moment.device.type != "cpu":
            state[key] = torch.empty_like(moment, device="cpu", pin_memory=True).copy_(moment)


def _parts(tensors, most_bytes: int):
    """Slices of a list of tensors, each of so many bytes at most, or of one tensor."""
    start = size = 0
    for index, tensor in enumerate(tensors):
        if size and size + tensor.nbytes > most_bytes:
            yield slice(start, index)
            start, size = index, 0
        size += tensor.nbytes
    if start < len(tensors):
        yield slice(start, len(tensors))


def _is_zero(flag: torch.Tensor) -> torch.Tensor:
    """float32 (): 1 where the flag is zero, else 0."""
    return (flag.reshape(()) == 0).to(torch.float32)


def _gradient_for(target, gradient):
    """The gradient in FP32, laid out as its target is: the kernel walks both in memory order."""
    if gradient.is_sparse:
        raise ValueError("FusedAdam: sparse gradients are not supported")
    if gradient.stride() != target.stride():
        return torch.empty_like(target).copy_(gradient)
    return gradient.float()


def _local(tensor):
    """A DTensor's own shard; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
