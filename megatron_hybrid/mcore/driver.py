"""From Megatron's training loop to the controller: one driver a run, over all chunks of this rank's model.

`patches.training_steps` calls it, finding it as the attribute ``hq_driver`` of a chunk. A loop of one's own on
Megatron-Core calls `attach`, and the four methods itself.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch

from ..control import Controller
from ..distributed.amax import WeightAmaxes
from ..offload import offload_activations
from ..patches.training_steps import DRIVER
from ..runtime import LinearRuntime
from . import fsdp, graphs, megatron_fsdp, state
from .experts import HybridGroupedParallelLinear
from .layers import HybridParallelLinear
from .param_sync import gathers


class Driver:
    """Drives a `Controller`. Outside of steps, in evaluation, nothing moves: keys stay those of the last step.

    group: the ranks that share the tensors, None where there is only one. All of them hold the same modules.
    expert_groups: the same for the tensors of experts, see `Controller.end_step`.
    """

    def __init__(self, controller: Controller, group=None, expert_groups=()):
        self.controller, self.group, self.expert_groups = controller, group, expert_groups
        self.in_step = self.has_begun = self.has_seen_weights = False
        self.before_first = []  # called once, with the controller: the model is wrapped and loaded by then
        self.after_first = []  # called once, after the first step

    def begin_step(self, completed: int | None) -> None:
        """Before a training step; `completed`: how many iterations came before (None: as Megatron's arguments say)."""
        from megatron.training import get_args

        self._begin((get_args().curr_iteration if completed is None else completed) + 1)
        self.in_step = True

    def _begin(self, step: int) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        for first in self.before_first:
            first(self.controller)
        self.before_first = []
        self.controller.begin_step(step, get_num_microbatches())
        found = gathers(self.controller.runtimes)
        if found and not self.has_begun:
            self.controller.reduce_amaxes(self.group, self.expert_groups)  # recorded when weights were made
        self.has_begun = self.has_seen_weights = True
        for gather in found:
            gather.follow_formats()
        state.forget_missing(self.controller.runtimes)

    def forward(self, microbatch: int) -> None:
        """Before the forward of a microbatch, in training and in evaluation."""
        if self.in_step:
            self.controller.microbatch(microbatch)
        elif not self.has_begun:  # an evaluation first of all: as after the last step, which the checkpoint is of
            from megatron.training import get_args

            self._begin(max(1, get_args().iteration))
        elif not self.has_seen_weights:  # those of the last step, or others that were loaded over them
            self.controller.invalidate()
            self.has_seen_weights = True

    def backward(self, microbatch: int) -> None:
        """Before the backward of a microbatch."""
        if self.in_step:
            self.controller.microbatch(microbatch)

    def end_step(self, completed: bool = True, skipped: bool = False) -> None:
        """After the optimizer's step; not completed: it did not come to that, and the step will be repeated. skipped:
        loss scaling found gradients that are not finite."""
        self.in_step = self.has_seen_weights = False
        self.controller.microbatch(0)
        if completed:
            if skipped:
                self.controller.forget_overflow()
            self.controller.end_step(self.group, self.expert_groups)
            for follow in self.after_first:
                follow()
            self.after_first = []


def attach(chunks: list, *, seed: int, weights_at_once: bool = True, weights_move: bool = False) -> Driver | None:
    """Make the driver of a model's chunks and hang it on each; None for a model without quantized linears.

    weights_at_once: the weights of a chunk are all there at its first forward of a step, so that tensor-parallel ranks
    can reduce their amaxes in one collective; False where parameters are gathered layer by layer. weights_move: into memory
    that a gather gives them anew (FSDP).
    """
    runtimes = [m for chunk in chunks for m in chunk.modules() if isinstance(m, LinearRuntime)]
    if not runtimes:
        return None
    amax_group, data_parallel, expert_tp, expert_dp = _groups(chunks[0])
    controller = Controller(
        runtimes, None, seed & 0xFFFFFFFF, 1, replica=data_parallel.rank(), num_replicas=data_parallel.size(),
        expert_replica=_replica_of_experts(data_parallel, expert_tp),
        expert_part=_part_of_replica(chunks[0], expert_tp),
    )  # fmt: skip
    for chunk in chunks:
        pool_weight_amaxes(chunk, weights_at_once, weights_move)
    driver = Driver(
        controller,
        amax_group if amax_group.size() > 1 else None,
        [g for g in (expert_tp, expert_dp) if g is not None and g.size() > 1],
    )
    for chunk in chunks:
        setattr(chunk, DRIVER, driver)
    return driver


def pool_weight_amaxes(chunk, weights_at_once: bool, weights_move: bool) -> None:
    """Reduce the amaxes of a chunk's weight shards together, a step, instead of each before its cast.

    All those of a group of ranks, where they are there at once; those of a grouped linear's experts always. Where weights
    move, a linear's own too, which its cache would else ask for again whenever its address changed on this rank.
    """
    together: dict = {}  # what is reduced together -> (group of ranks, its weights)
    for module in chunk.modules():
        if isinstance(module, HybridParallelLinear) and (weights_at_once or weights_move):
            key = module.tp_group if weights_at_once else module
            weights = {module.hq: functools.partial(getattr, module, "weight")}
        elif isinstance(module, HybridGroupedParallelLinear):
            key, weights = module, {hq: functools.partial(module.weight_of, e) for e, hq in enumerate(module.hq)}
        else:
            continue
        if all(hq.sharding is not None for hq in weights):
            together.setdefault(key, (module.tp_group, {}))[1].update(weights)
    for group, weights in together.values():
        WeightAmaxes(group, weights, move=weights_move)


def _groups(chunk):
    """(the ranks that share a stage's tensors, those that share its weights only, those that split its experts, those that
    have the same experts, or parts of experts), the last two None where nothing knows of experts.

    Inputs are the same on all tensor-parallel ranks or split among them, weights are split among them and the same
    on data- and context-parallel ranks, each of which sees other tokens: one scale for all of them. Pipeline stages
    share nothing. An expert's tensors are shared by the expert-tensor-parallel ranks and, other tokens, by the
    expert-data-parallel ones.
    """
    from megatron.core import parallel_state

    with_context = dict(with_context_parallel=True)
    amax_group = _group(chunk, "tp_dp_cp", parallel_state.get_tensor_and_data_parallel_group, **with_context)
    same_weights = _group(chunk, "dp_cp", parallel_state.get_data_parallel_group, **with_context)
    return amax_group, same_weights, *(getattr(chunk.pg_collection, name, None) for name in ("expt_tp", "expt_dp"))


def _group(chunk, name: str, of_megatron, **options):
    """A group of a chunk's collection; of Megatron's state where the collection lacks it."""
    group = getattr(chunk.pg_collection, name, None)
    return of_megatron(**options) if group is None else group


def _replica_of_experts(data_parallel, expert_tp) -> int:
    """The first replica among the ranks that split an expert with this one: more than one where there are more
    expert-tensor-parallel ranks than tensor-parallel ones."""
    ranks = torch.distributed.get_process_group_ranks(data_parallel)
    together = () if expert_tp is None else torch.distributed.get_process_group_ranks(expert_tp)
    return min([data_parallel.rank(), *(ranks.index(rank) for rank in together if rank in ranks)])


def _part_of_replica(chunk, expert_tp) -> int:
    """A replica's ranks that split the same experts have tokens of their own: this rank's number among such groups. More
    than one where there are more tensor-parallel ranks than expert-tensor-parallel ones."""
    from megatron.core import parallel_state

    group = _group(chunk, "tp", parallel_state.get_tensor_model_parallel_group)
    return 0 if expert_tp is None else group.rank() // expert_tp.size()


def attach_in_run(chunks: list) -> list:
    """Hook before the model is wrapped, in a run of Megatron's training; a model built elsewhere is left alone."""
    from .checkpoint import run_args

    args = run_args()
    if args is not None:
        sharded = args.use_megatron_fsdp or args.use_torch_fsdp2
        at_once = not (sharded or args.overlap_param_gather)
        driver = attach(chunks, seed=args.seed, weights_at_once=at_once, weights_move=sharded)
        if driver is not None:
            driver.controller.say = _say_on_rank_0
            if args.cuda_graph_impl == graphs.LOCAL:
                graphs.prepare(chunks, driver.controller)
                driver.after_first.append(functools.partial(graphs.say_captured, chunks, _say_on_rank_0))
            _record_statistics(driver.controller, args)
            _profile_step(driver.controller, args)
            if getattr(args, "hq_switch_recipe", False) or args.finetune:
                driver.before_first.append(functools.partial(state.follow_recipe, args))
            _offload_layers(chunks, args)
            if getattr(args, "hq_backward_in_main_thread", False):
                torch.autograd.set_multithreading_enabled(False)
            if args.use_torch_fsdp2:
                driver.before_first += [functools.partial(fsdp.gather_payloads, chunk, args) for chunk in chunks]
            if args.use_megatron_fsdp:
                driver.before_first += megatron_fsdp.prepare(chunks, args, driver.controller)
            if getattr(args, "hq_check_nan", False):
                driver.controller.check_nan(args.rank if args.world_size > 1 else None)
            state.note_missing(driver.controller.runtimes, args)  # last: a plan made anew has its own lengths of histories
    return chunks


def _say_on_rank_0(line: str) -> None:
    from megatron.training import print_rank_0

    print_rank_0(f"> {line}")


def _offload_layers(chunks: list, args) -> None:
    """``--hq-offload-layers``, of every chunk of this stage."""
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    for chunk in chunks if getattr(args, "hq_offload_layers", 0) else ():
        layers = [module for module in chunk.modules() if isinstance(module, BaseTransformerLayer)]
        offload_activations(layers[: args.hq_offload_layers], least_bytes=args.hq_offload_least_bytes)


def _profile_step(controller: Controller, args) -> None:
    """``--hq-profile-step`` on every rank; rank 0 says what it found."""
    if not getattr(args, "hq_profile_step", 0):
        return
    from .validation import statistics_path

    controller.profile_step(
        args.hq_profile_step, statistics_path(args).with_name("hq_profile.json"),
        rank=args.rank if args.world_size > 1 else None, say=_say_whole_line if args.rank == 0 else None,
    )  # fmt: skip


def _say_whole_line(line: str) -> None:
    print(line, flush=True)


def _record_statistics(controller: Controller, args) -> None:
    """``--hq-stats-interval`` on the last data-parallel rank of every stage and shard, and for experts on the last of
    theirs: every module on one rank at least."""
    from .validation import statistics_path

    if not getattr(args, "hq_stats_interval", 0):
        return
    is_last_replica = controller.keys.replica == controller.keys.num_replicas - 1
    if not is_last_replica and not _has_experts_alone(args):
        return
    controller.record_statistics(
        args.hq_stats_interval,
        statistics_path(args),
        writer=_tensorboard(args),
        rank=args.rank if args.world_size > 1 else None,
        say=_say_whole_line if args.rank == args.world_size - 1 else None,
        only=None if is_last_replica else _is_expert,
    )


def _has_experts_alone(args) -> bool:
    """Whether this is the last of the ranks that hold the same experts."""
    from megatron.core import parallel_state

    if args.num_experts is None:
        return False
    group = parallel_state.get_expert_data_parallel_group()
    return group.rank() == group.size() - 1


def _is_expert(runtime: LinearRuntime) -> bool:
    return runtime.role.expert is not None


def _tensorboard(args):
    """Megatron's writer on the last rank, which alone has one; elsewhere, on the last tensor-parallel rank, one in a folder
    inside ``--tensorboard-dir``, which TensorBoard shows beside it. None where there is no TensorBoard."""
    from megatron.core import parallel_state
    from megatron.training import get_tensorboard_writer

    if (writer := get_tensorboard_writer()) is not None or not args.tensorboard_dir:
        return writer
    if importlib.util.find_spec("tensorboard") is None:
        return None  # Megatron has warned
    if parallel_state.get_tensor_model_parallel_rank() != parallel_state.get_tensor_model_parallel_world_size() - 1:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(Path(args.tensorboard_dir) / f"hq_rank{args.rank}"))
